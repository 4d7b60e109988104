"""Descriptors that are never 0, 1 or 2, and the pipes, sockets and mappings made of them."""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import socket
from collections.abc import Callable, Iterator

_STDIO = 3  # descriptors below this are the user's


# These functions and `pipe` bind what they call in default arguments: a fork hook calls `pipe`,
# perhaps during interpreter shutdown, when the module's globals are cleared.
def duplicate(
    fd: int,
    control: Callable[[int, int, int], int] = fcntl.fcntl,
    command: int = fcntl.F_DUPFD_CLOEXEC,
    lowest: int = _STDIO,
) -> int:
    return control(fd, command, lowest)


def above_stdio(
    fd: int,
    lowest: int = _STDIO,
    copy: Callable[[int], int] = duplicate,
    close: Callable[[int], None] = os.close,
) -> int:
    """A descriptor of the same file that is not 0, 1 or 2. If `fd` is one of these, it is
    closed."""
    if fd >= lowest:
        return fd
    try:
        return copy(fd)
    finally:
        close(fd)


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """As `os.open`."""
    return above_stdio(os.open(path, flags | os.O_CLOEXEC, mode))


def pipe(
    make: Callable[[], tuple[int, int]] = os.pipe,
    above: Callable[[int], int] = above_stdio,
    close: Callable[[int], None] = os.close,
) -> tuple[int, int]:
    """A reading and a writing end."""
    reading, writing = make()
    try:
        reading = above(reading)
    except BaseException:
        close(writing)
        raise
    try:
        return reading, above(writing)
    except BaseException:
        close(reading)
        raise


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; a packet arrives whole or not at all."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as undo:
        undo.callback(one.close)
        undo.callback(other.close)
        moved = _moved(one), _moved(other)
        undo.pop_all()
    return moved


def _moved(end: socket.socket) -> socket.socket:
    if end.fileno() >= _STDIO:
        return end
    with end:
        return socket.socket(end.family, end.type, end.proto, fileno=duplicate(end.fileno()))


def reopen(fd: int, flags: int) -> int:
    """The file of `fd` with an offset and flags of its own. This needs /proc."""
    return open_file(f"/proc/self/fd/{fd}", flags)


@contextlib.contextmanager
def stdio_taken() -> Iterator[None]:
    """Keeps 0, 1 and 2 occupied while other code opens descriptors for us whose numbers we cannot
    choose."""
    with contextlib.ExitStack() as fillers:
        for _ in range(_STDIO):
            if all(map(_is_open, range(_STDIO))):
                break
            fillers.callback(os.close, os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        yield


def mapped(
    fd: int,
    nbytes: int = 0,
    *,
    flags: int = mmap.MAP_SHARED,
    prot: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> mmap.mmap:
    """A file's memory; all of it if no size is given."""
    with stdio_taken():  # Python's `mmap` keeps a copy of the descriptor
        return mmap.mmap(fd, nbytes, flags, prot)


def _is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


class Doorbell:
    """Wakes the threads that poll it. It is a pipe, because every kernel has pipes. It uses file
    objects, because they know when they are closed: a number may belong to another file by then."""

    def __init__(self) -> None:
        reading, writing = pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        self._reading, self._writing = io.FileIO(reading, "r"), io.FileIO(writing, "w")

    def fileno(self) -> int:
        return self._reading.fileno()

    def ring(self) -> None:
        try:
            self._writing.write(b"!")
        except (ValueError, OSError):
            pass  # closed already

    def clear(self) -> None:
        """Read all rings: until it is rung again, it wakes no thread."""
        self._reading.read(1 << 16)

    def close(self) -> None:
        self._writing.close()
        self._reading.close()
