"""Images in one HDF5 file, read by workers. One line is different: where DataLoader comes from."""

import tempfile
from pathlib import Path

import h5py
import torch
from torch.utils.data import Dataset

from holdfast import DataLoader

path = Path(tempfile.mkdtemp()) / "images.h5"
with h5py.File(path, "w") as file:
    file["images"] = torch.rand(64, 8, 8).numpy()


class Images(Dataset):
    def __init__(self):
        self.file = None

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.file is None:  # open it in the worker: an open file must not cross a fork
            self.file = h5py.File(path, "r")
        return torch.from_numpy(self.file["images"][index])


loader = DataLoader(Images(), batch_size=8, shuffle=True, num_workers=2)
print("mean of all images:", torch.cat(list(loader)).mean().item())
print("workers that died:", len(loader.incidents))
