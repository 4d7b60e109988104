"""Records in an LMDB store, read by workers. One line is different: where DataLoader comes from."""

import pickle
import tempfile

import lmdb
import torch
from torch.utils.data import Dataset

from holdfast import DataLoader

path = tempfile.mkdtemp()
with lmdb.open(path) as store, store.begin(write=True) as transaction:
    for index in range(64):
        transaction.put(str(index).encode(), pickle.dumps([index, index % 2]))


class Records(Dataset):
    def __init__(self):
        self.store = None

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.store is None:  # open it in the worker: LMDB must not be used across a fork
            self.store = lmdb.open(path, readonly=True, lock=False)
        with self.store.begin() as transaction:
            return torch.tensor(pickle.loads(transaction.get(str(index).encode())))


loader = DataLoader(Records(), batch_size=8, shuffle=True, num_workers=2)
print("records:", sum(len(batch) for batch in loader))
print("workers that died:", len(loader.incidents))
