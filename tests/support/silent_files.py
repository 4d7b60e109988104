"""A file system that does not answer: the smallest FUSE server there can be, in a process of its own.

It has one file, which can be found and opened; a process that reads it waits in the kernel, like a reader
of a network file system whose server is gone. It speaks the kernel's protocol directly, so it needs
no library, but root and /dev/fuse. When the server is killed all who wait get an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

NAME = "train.bin"
SIZE = 1 << 20

_DEVICE = "/dev/fuse"
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _INIT = 1, 2, 3, 14, 15, 26
_OPENDIR, _INTERRUPT, _BATCH_FORGET = 27, 36, 42
_UNANSWERED = {_FORGET, _INTERRUPT, _BATCH_FORGET}  # by rule
_ROOT, _FILE = 1, 2
_FORCE_AND_DETACH = 1 | 2
_libc = ctypes.CDLL(None, use_errno=True)


def possible() -> bool:
    return os.getuid() == 0 and os.access(_DEVICE, os.R_OK | os.W_OK)


@contextlib.contextmanager
def silent_file(folder: Path) -> Iterator[Path]:
    """The path of a file that can be opened and never be read."""
    reading, writing = os.pipe()
    server = os.fork()
    if server == 0:
        try:
            os.close(reading)
            device = os.open(_DEVICE, os.O_RDWR)
            options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
            if _libc.mount(b"silent", os.fsencode(folder), b"fuse", 0, options):
                os.write(writing, os.strerror(ctypes.get_errno()).encode())
            else:
                os.write(writing, b"mounted")
                os.close(writing)
                _serve(device)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read(100)
        assert said == b"mounted", f"no file system here: {said.decode()}"
        yield folder / NAME
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        _libc.umount2(os.fsencode(folder), _FORCE_AND_DETACH)


def _serve(device: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.close(1)  # who waits for the end of the test's output does not wait for us
    while True:
        request = os.read(device, 1 << 20)
        _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
        if opcode in _UNANSWERED or (opcode == _READ and node == _FILE):
            continue
        error, answer = _answer(opcode, node, request[40:])
        os.write(device, struct.pack("<IiQ", 16 + len(answer), -error, unique) + answer)


def _answer(opcode: int, node: int, content: bytes) -> tuple[int, bytes]:
    """An error number, or 0 and the answer."""
    if opcode == _INIT:
        return 0, struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 16, 12, 1 << 16, 1, 0, 0, 0)
    if opcode == _GETATTR:
        return 0, struct.pack("<QII", 3600, 0, 0) + _attributes(node)
    if opcode == _LOOKUP and content.rstrip(b"\0") == NAME.encode():
        return 0, struct.pack("<QQQQII", _FILE, 0, 3600, 3600, 0, 0) + _attributes(_FILE)
    if opcode in (_OPEN, _OPENDIR):
        return 0, struct.pack("<QII", 0, 0, 0)
    return 2 if opcode == _LOOKUP else 38, b""  # ENOENT, ENOSYS


def _attributes(node: int) -> bytes:
    mode = stat.S_IFREG | 0o444 if node == _FILE else stat.S_IFDIR | 0o555
    size = SIZE if node == _FILE else 0
    return struct.pack(
        "<QQQQQQIIIIIIIIII", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
    )
