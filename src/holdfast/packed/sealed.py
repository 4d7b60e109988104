"""Bytes that are written once and then read by any number of processes, in one copy.

They lie in an anonymous memory file. Its pages are shared, not copied, after a fork; and a process
that is being spawned gets the file's descriptor, not the bytes. There are no reference counts among
them, so that reading writes nothing (`cow-growth`). The file is sealed if the kernel supports it:
no process can shrink it under a reader (SIGBUS) or map it for writing.

Small contents are plain bytes: they are not worth a descriptor. So are all contents if a file is
refused (a tight ``ulimit -f``, no descriptor left, no room). Plain bytes do not grow after a fork
either, but spawned processes get copies.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import weakref
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

from holdfast import kernel

SMALL = 64 << 10
"""Contents below this are plain bytes."""
_ALIGN = 16
_CHUNK = 4 << 20
_REFUSED = frozenset(
    getattr(errno, name)
    for name in ("EFBIG", "EMFILE", "ENFILE", "ENOSYS", "ENOSPC", "EDQUOT", "EPERM", "EACCES")
)


class Sealed:
    """A read-only buffer; `view` is all of it."""

    __slots__ = ("__weakref__", "_fd", "view")

    def __init__(self, fd: int | None, view: memoryview) -> None:
        self._fd = fd
        self.view = view
        if fd is not None:
            weakref.finalize(self, os.close, fd).atexit = False

    def __reduce__(self) -> Any:
        if self._fd is not None and get_spawning_popen() is not None:
            return _by_reference, (reduction.DupFd(self._fd), len(self.view))
        return _by_value, (pickle.PickleBuffer(self.view),)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if protocol >= 5 or get_spawning_popen() is not None:
            return self.__reduce__()
        return _by_value, (bytes(self.view),)


class Writer:
    """Collects the contents piece by piece; `close` makes them a `Sealed`."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._pieces: list[Any] = []  # not in the file yet
        self._fd: int | None = None
        self._in_file = 0
        self._refused = False

    def write(self, data: Any, align: int = _ALIGN) -> int:
        """Append bytes; returns their offset. The default alignment fits every kind of number."""
        view = memoryview(data).cast("B")
        padding = -self.nbytes % align
        at = self.nbytes + padding
        self._pieces += (bytes(padding), bytes(view))
        self.nbytes = at + len(view)
        if self.nbytes > SMALL and not self._refused:
            self._flush()
        return at

    def close(self) -> Sealed:
        if self._fd is None:
            return Sealed(None, memoryview(b"".join(self._pieces)))
        fd, self._fd = self._fd, None
        kernel.seal(fd)
        # Entered into our page tables at once: pages that only one worker has mapped would count as
        # private to it in smaps, and look like growth.
        return _mapped(fd, self.nbytes, kernel.POPULATE)

    def discard(self) -> None:
        """Free everything, after a failure."""
        self._pieces.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _flush(self) -> None:
        try:
            if self._fd is None:
                self._fd = kernel.memory_file("holdfast-packed", sealable=True)
            for piece in self._pieces:
                view = memoryview(piece)
                while len(view):
                    view = view[os.write(self._fd, view[:_CHUNK]) :]
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._back_to_memory()
        else:
            self._in_file = self.nbytes
            self._pieces.clear()

    def _back_to_memory(self) -> None:
        """The file was refused, or may not be this large: continue with plain bytes."""
        self._refused = True
        fd, self._fd = self._fd, None
        if fd is not None:
            parts = range(0, self._in_file, _CHUNK)
            written = [os.pread(fd, min(_CHUNK, self._in_file - at), at) for at in parts]
            self._pieces[:0] = written
            os.close(fd)


def _mapped(fd: int, nbytes: int, flags: int = 0) -> Sealed:
    memory = kernel.mapped(fd, nbytes, flags=mmap.MAP_SHARED | flags, prot=mmap.PROT_READ)
    return Sealed(fd, memoryview(memory))


def _by_reference(descriptor: Any, nbytes: int) -> Sealed:
    fd: int = descriptor.detach()
    os.set_inheritable(fd, False)
    return _mapped(fd, nbytes)


def _by_value(data: Any) -> Sealed:
    writer = Writer()
    writer.write(data)
    return writer.close()
