"""Images that Albumentations and OpenCV augment in workers.

One line is different: where DataLoader comes from. After a death the replacement goes on with the
same random numbers, so the augmentations are those of an undisturbed run.
"""

import albumentations as A
import numpy as np
import torch
from torch.utils.data import Dataset

from holdfast import DataLoader


class Images(Dataset):
    def __init__(self):
        self.transform = A.Compose([A.HorizontalFlip(p=0.5), A.RandomCrop(16, 16)], seed=137)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        image = np.full((24, 24, 3), index, np.uint8)
        return torch.from_numpy(self.transform(image=image)["image"])


loader = DataLoader(Images(), batch_size=8, shuffle=True, num_workers=2)
print("images:", sum(len(batch) for batch in loader))
print("workers that died:", len(loader.incidents))
