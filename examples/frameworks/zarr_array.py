"""An array of zarr, read by workers. One line is different: where DataLoader comes from."""

import tempfile

import torch
import zarr
from torch.utils.data import Dataset

from holdfast import DataLoader

path = tempfile.mkdtemp()
stored = zarr.create_array(path, name="images", shape=(64, 8, 8), chunks=(1, 8, 8), dtype="float32")
stored[:] = torch.rand(64, 8, 8).numpy()


class Images(Dataset):
    def __init__(self):
        self.array = None

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.array is None:  # open it in the worker: zarr reads with threads of its own
            self.array = zarr.open_array(path, path="images", mode="r")
        return torch.from_numpy(self.array[index])


loader = DataLoader(Images(), batch_size=8, shuffle=True, num_workers=2)
print("mean of all images:", torch.cat(list(loader)).mean().item())
print("workers that died:", len(loader.incidents))
