"""Memory files without a name, sealed and reserved; unlinked files where there are none."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Final

from holdfast.kernel.chain import NOT_HERE, Chain, call, python, unless_refused
from holdfast.kernel.descriptors import above_stdio, open_file

DONTDUMP: Final = getattr(mmap, "MADV_DONTDUMP", 16)
REMOVE: Final = getattr(mmap, "MADV_REMOVE", 9)
POPULATE_WRITE: Final = getattr(mmap, "MADV_POPULATE_WRITE", 23)
POPULATE: Final = getattr(mmap, "MAP_POPULATE", 0x8000)
_F_ADD_SEALS = 1033
MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 2, 4, 0x10


def _memfd(name: str, flags: int) -> int:
    return call("memfd_create", ctypes.c_char_p(name.encode()), flags)


new_memory_file: Chain[[str, int], int] = Chain(
    ("os.memfd_create", python(os, "memfd_create")),
    ("the system call", _memfd),
)


def memory_file(name: str, *, sealable: bool = False, room: int = 0) -> int:
    """A memory file without a name. Where the kernel has none, an unlinked file in a folder.

    `room`: bytes that are going to be written to it. A folder that has less is skipped.
    """
    flags = MFD_CLOEXEC | (_MFD_ALLOW_SEALING if sealable else 0)
    with unless_refused():
        return above_stdio(new_memory_file(name, flags))
    fd, _ = file_in_a_folder(name, room)
    try:
        if room:
            reserve(fd, 0, room)  # writing to a mapping in a full file system is a SIGBUS
    except BaseException:
        os.close(fd)
        raise
    return fd


def file_in_a_folder(name: str, room: int) -> tuple[int, str]:
    failure = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    for folder in folders():
        try:
            there = os.statvfs(folder)
            if there.f_bavail * there.f_frsize < room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
            return _unlinked(folder, name), folder
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            failure = error
    raise failure


def folders() -> tuple[str, ...]:
    import tempfile  # here, because few processes need it

    try:
        return "/dev/shm", tempfile.gettempdir()
    except OSError:  # no folder for temporary files that can be written to
        return ("/dev/shm",)


def _unlinked(folder: str, name: str) -> int:
    """A file without a name; with O_TMPFILE, if supported, a SIGKILL cannot leave it behind."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return open_file(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    import tempfile

    fd, path = tempfile.mkstemp(prefix=name, dir=folder)
    os.unlink(path)
    return above_stdio(fd)


def seal(fd: int) -> bool:
    """Forbid every process to change the size of a file, or to map it for writing from now on.
    Returns whether that was possible."""
    for kinds in (_SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE, _SEAL_SHRINK | _SEAL_GROW):
        with unless_refused(NOT_HERE):
            fcntl.fcntl(fd, _F_ADD_SEALS, kinds)
            return True
    return False


def _fallocate(fd: int, start: int, nbytes: int) -> None:
    while True:
        try:
            call("fallocate", fd, 0, start, nbytes)
            return
        except InterruptedError:
            pass  # by a signal; tmpfs has undone it


allocate: Chain[[int, int, int], None] = Chain(
    ("os.posix_fallocate", python(os, "posix_fallocate")),
    ("the system call", _fallocate),
)


def reserve(
    fd: int, start: int, end: int, in_use: Callable[[], Iterable[tuple[int, int]]] = tuple
) -> None:
    """Have the kernel allocate the memory of a part of a file, so that writing there cannot fail.

    Where the kernel cannot, zeros are written, except to the pages of what is `in_use` (offsets and
    sizes): these have their memory already, and a process may be reading them.
    """
    with unless_refused():
        allocate(fd, start, end - start)
        return
    for first, last in gaps(start, end, in_use()):
        _write_zeros(fd, first, last)


def gaps(start: int, end: int, in_use: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """The whole pages between `start` and `end` that touch nothing in use."""
    page = mmap.PAGESIZE
    for offset, nbytes in sorted(in_use):
        if start < offset // page * page:
            yield start, min(end, offset // page * page)
        start = max(start, -(-(offset + nbytes) // page) * page)
    if start < end:
        yield start, end


def _write_zeros(fd: int, start: int, end: int) -> None:
    zeros = bytes(min(end - start, 1 << 20))
    while start < end:
        start += os.pwrite(fd, zeros[: end - start], start)
