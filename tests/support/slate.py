"""Slate, an accelerator that is none: it has no memory of its own, but pinned memory, which takes as long as a test asks
for. `slate.cpp` is the device as torch sees it.

A process that has activated it keeps it, so only processes of their own do that: see `tests.accelerators`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import ClassVar

import torch

SOURCE = Path(__file__).with_name("slate.cpp")
_BUILD = """
import sys
from torch.utils import cpp_extension
cpp_extension.load("slate", sys.argv[1], build_directory=sys.argv[2], extra_cflags=["-O1"], is_python_module=False)
"""
library: ctypes.CDLL | None = None


def can_be_built() -> bool:
    return (
        shutil.which(os.environ.get("CXX", "c++")) is not None and shutil.which("ninja") is not None
    )


def build(folder: Path) -> Path:
    """The library, made in some seconds if it is not in that folder yet."""
    key = hashlib.sha256(f"{torch.__version__} {sys.version}".encode() + SOURCE.read_bytes())
    built = folder / f"slate-{key.hexdigest()[:16]}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=folder) as apart:  # others may be at it
            command = [sys.executable, "-c", _BUILD, str(SOURCE), apart]
            made = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert made.returncode == 0, made.stdout + made.stderr
            os.replace(Path(apart) / "slate.so", built)
    return built


def activate(path: str) -> None:
    """Let this process have two slates."""
    global library
    library = ctypes.CDLL(path)
    library.slate_register.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.slate_unregister.argtypes = (ctypes.c_void_p,)
    for name in ("allocations", "bytes", "peak", "registered", "register", "unregister"):
        getattr(library, f"slate_{name}").restype = ctypes.c_long
    torch.utils.rename_privateuse1_backend("slate")
    module = types.ModuleType("torch.slate")
    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 2,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module("slate", module)


def make_it_the_default(*kinds: type) -> None:
    """To torch 2.6 `pin_memory=True` means CUDA, unless another device is named: name it in loaders of these classes."""
    if library is None:
        return  # a spawned worker
    if not iter(torch.utils.data.DataLoader([0], pin_memory=True))._pin_memory:
        for kind in kinds:
            kind.__init__.__kwdefaults__["pin_memory_device"] = "slate"


class Fence:
    """Passes when the test says so."""

    all: ClassVar[list[Fence]] = []
    stopped = False  # whether the device does nothing

    def __init__(self) -> None:
        self.all.append(self)

    def passed(self) -> bool:
        return not Fence.stopped


class HostMemory:
    """The driver of a slate, as `pinned_in_place` wants it."""

    def __init__(self, index: int = 0) -> None:
        self.calls: list[str] = []

    def register(self, address: int, nbytes: int) -> str | None:
        assert library is not None
        code = library.slate_register(address, nbytes)
        return None if code == 0 else f"slate_register failed with error {code}"

    def unregister(self, address: int) -> None:
        assert library is not None
        assert library.slate_unregister(address) == 0

    def fence(self) -> Fence:
        return Fence()


def pin_in_place() -> None:
    """Let holdfast use the driver of a slate where it would use CUDA's."""
    from holdfast.processes import pinning_in_place

    pinning_in_place.unavailable = lambda device: None  # type: ignore[assignment]
    pinning_in_place.CudaHostMemory = HostMemory  # type: ignore[misc, assignment]


def take(milliseconds: float) -> None:
    """Let each tensor take so long to be pinned."""
    assert library is not None
    library.slate_take(int(milliseconds * 1000))


def refuse(yes: bool) -> None:
    """Whether there is no pinned memory left."""
    assert library is not None
    library.slate_refuse(int(yes))


def count(what: str) -> int:
    """`allocations` so far, `bytes` that they have now, their `peak`, and the `last_device` that made one; bytes that
    are `registered`."""
    assert library is not None
    return int(getattr(library, f"slate_{what}")())
