"""Datasets for the doctor: a healthy one, and one for every complaint."""

from __future__ import annotations

import functools
import io
import logging
import multiprocessing
import os
import random
import signal
import socket
import sqlite3
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from holdfast import DataLoader
from tests.support.optional import optional

h5py = optional("h5py")
lmdb = optional("lmdb")

COUNTED: list[int] = []
TOTAL = 0


class Healthy(Dataset[Any]):
    def __init__(self) -> None:
        self.data = torch.arange(4000.0).reshape(400, 10)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class Counting(Healthy):
    """Changes what each worker then has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}
        self.calls = 0
        self.generator = random.Random(5)

    def __getitem__(self, index: int) -> Any:
        global TOTAL
        TOTAL += 1
        COUNTED.append(index)
        self.calls += 1
        self.cache[index] = self.generator.random()
        return self.data[index]


class Listed(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.paths = [
            f"/a/rather/long/path/to/an/image/{number:09d}.jpg" for number in range(900_000)
        ]


class Unpicklable(Healthy):
    def __init__(self) -> None:
        super().__init__()
        self.transform = lambda value: value

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.data[index])


class Raising(Healthy):
    def __getitem__(self, index: int) -> Any:
        raise ValueError(f"broken file {index}.jpg")


class Uneven(Healthy):
    """One sample in ten is slow and large."""

    def __getitem__(self, index: int) -> Any:
        if index % 50 == 0 and index:
            time.sleep(0.1)
            return torch.zeros(1_000_000)
        return self.data[index]


class Streaming(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(200))


class Refusing(Healthy):
    def __init__(self) -> None:
        raise FileNotFoundError(2, "no such folder", "/data")


class Ragged(Healthy):
    """Samples that the default collate_fn cannot put together."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(index % 5)


class Waiting(Healthy):
    """As one that reads files: other threads can run meanwhile. `function` may not pickle."""

    def __init__(self, size: int = 10, function: Any = None) -> None:
        super().__init__()
        self.size = size
        self.function = function

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return torch.zeros(self.size)


class Calculating(Healthy):
    """Python code alone."""

    def __getitem__(self, index: int) -> int:
        return sum(range(40_000))


class Crashing(Healthy):
    def __init__(self, crashing: int = 250) -> None:
        super().__init__()
        self.crashing = crashing

    def __getitem__(self, index: int) -> Any:
        if index == self.crashing:
            os.kill(os.getpid(), signal.SIGSEGV)
        return index


class Short(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Lazy(Healthy):
    """As the doctor advises."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "a.h5"
        with h5py.File(self.path, "w") as file:
            file["x"] = np.zeros((400, 3))
        self.file: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = h5py.File(self.path)
            self.table = self.file["x"]
        return self.table[index]


@functools.lru_cache
def cached(index: int) -> int:
    return index


class Remembering(Healthy):
    """Changes things in places where one does not look at once."""

    of_the_class: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.in_the_middle = [None] * 400
        self.array = np.zeros((400, 1000))
        self.tensor = torch.zeros(400, 1000)

    def remember(self, index: int, known: dict[int, int] = {}) -> None:  # noqa: B006
        known[index] = index

    def __getitem__(self, index: int) -> Any:
        self.remember(index)
        self.of_the_class.append(index)
        self.in_the_middle[index] = index  # type: ignore[call-overload]
        self.array[index, -1] = self.tensor[index, -1] = 1
        return cached(index)


# -- what workers would share ----------------------------------------------------------------


class Holding(Healthy):
    """Has opened something, and closes it."""

    def __init__(self, held: Any = None, close: str = "close") -> None:
        super().__init__()
        self.held = held
        self._close = close

    def close(self) -> None:
        getattr(self.held, self._close)()


class Slotted:
    __slots__ = ("file", "unset")

    def __init__(self, file: Any) -> None:
        self.file = file

    def close(self) -> None:
        self.file.close()


def _file() -> Any:
    return open(__file__)


def _hdf5(folder: Path) -> Any:
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"] = np.zeros(3)
    return h5py.File(folder / "a.h5")


def _zip(folder: Path) -> Any:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("a", "b")
    return zipfile.ZipFile(folder / "a.zip")


def _npz(folder: Path) -> Any:
    np.savez(folder / "a.npz", x=np.zeros(3))
    return np.load(folder / "a.npz")


def _tar(folder: Path) -> Any:
    return tarfile.open(folder / "a.tar", "w")


def _image(folder: Path) -> Any:
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    return Image.open(folder / "a.png")


def _table(folder: Path) -> Holding:
    dataset: Any = Holding(_hdf5(folder)["x"])
    dataset.close = lambda: dataset.held.file.close()
    return dataset  # type: ignore[no-any-return]


def _cursor(folder: Path) -> Holding:
    dataset: Any = Holding(sqlite3.connect(folder / "a.db").cursor())
    dataset.close = lambda: setattr(dataset, "held", None)
    return dataset  # type: ignore[no-any-return]


def _in_a_closure(folder: Path) -> Holding:
    file = _file()
    dataset: Any = Healthy()
    dataset.transform = lambda value: file.read(1)
    dataset.close = file.close
    return dataset  # type: ignore[no-any-return]


class _OfTheClass(Holding):
    file: ClassVar[Any] = None

    def close(self) -> None:
        self.file.close()


def _of_the_class(folder: Path) -> Holding:
    _OfTheClass.file = _file()
    return _OfTheClass()


SOMEWHERE: Any = None
NOWHERE: Any = None  # not used


def _read_somewhere() -> str:
    return str(SOMEWHERE.read(1))


class _OfTheModule(Holding):
    def __getitem__(self, index: int) -> Any:
        return _read_somewhere()

    def close(self) -> None:
        SOMEWHERE.close()


def _of_the_module(folder: Path) -> Holding:
    global SOMEWHERE, NOWHERE
    SOMEWHERE = NOWHERE = _file()
    return _OfTheModule()


SHARING: dict[str, tuple[Callable[[Path], Any], list[tuple[str, str]]]] = {
    "file": (lambda _: Holding(_file()), [("dataset.held", "an open file")]),
    "file in a dict": (
        lambda _: Holding({"a": _file()}, "clear"),
        [("dataset.held['a']", "an open file")],
    ),
    "file in a slot": (
        lambda _: Holding(Slotted(_file())),
        [("dataset.held.file", "an open file")],
    ),
    "file in a closure": (_in_a_closure, [("dataset.transform.<closure>.file", "an open file")]),
    "file of the class": (_of_the_class, [("_OfTheClass.file", "an open file")]),
    "file of the module": (
        _of_the_module,
        [("tests.doctor.patients.SOMEWHERE", "an open file")],
    ),
    "socket": (lambda _: Holding(socket.socket()), [("dataset.held", "a socket")]),
    "HDF5": (lambda folder: Holding(_hdf5(folder)), [("dataset.held", "an open HDF5 file")]),
    "table in HDF5": (_table, [("dataset.held", "an open HDF5 file")]),
    "LMDB": (
        lambda folder: Holding({"env": lmdb.open(str(folder / "a"))}, "clear"),
        [("dataset.held['env']", "an open LMDB environment")],
    ),
    "zip": (lambda folder: Holding(_zip(folder)), [("dataset.held", "an open zip archive")]),
    "npz": (lambda folder: Holding(_npz(folder)), [("dataset.held.zip", "an open zip archive")]),
    "tar": (lambda folder: Holding(_tar(folder)), [("dataset.held", "an open tar archive")]),
    "image": (lambda folder: Holding(_image(folder)), [("dataset.held.fp", "an open file")]),
    "database": (
        lambda folder: Holding([sqlite3.connect(folder / "a.db")], "clear"),
        [("dataset.held[0]", "a database connection")],
    ),
    "cursor": (_cursor, [("dataset.held", "a database cursor")]),
}
"""What is opened, and what is to be said of it."""


def _logger(folder: Path) -> Any:
    log = logging.Logger("of the test")
    log.addHandler(logging.StreamHandler())
    log.addHandler(logging.FileHandler(folder / "log", delay=False))
    return log


def _memory_map(folder: Path) -> Any:
    np.zeros(4000).tofile(folder / "a.bin")
    return np.memmap(folder / "a.bin", float, "r")


SPARED: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda _: Healthy(),
    "a path": Holding,
    "standard error": lambda _: Holding(sys.__stderr__),
    "bytes": lambda _: Holding(io.BytesIO(b"abc")),
    "a logger": lambda folder: Holding(_logger(folder)),
    "a memory map": lambda folder: Holding(_memory_map(folder)),
    "a queue": lambda _: Holding(multiprocessing.get_context("fork").SimpleQueue()),
    "a lock": lambda _: Holding(threading.Lock()),
    "not open yet": lambda folder: Lazy(folder),
    "an archive in memory": lambda _: Holding(zipfile.ZipFile(io.BytesIO(), "w")),
}


def make() -> Healthy:
    return Healthy()


def needs(argument: int) -> Healthy:
    return Healthy()


healthy = Healthy()
loader = DataLoader(healthy, batch_size=7, num_workers=1, memory_budget="1GiB")
number = 5
EMPTY: list[int] = []
