"""A worker's and the main process's end of one arena, in this process or in two."""

from __future__ import annotations

import os
import pickle
import struct
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.transport import codec
from holdfast.transport.arena import Arena
from holdfast.transport.mapping import create
from holdfast.transport.window import Window

MIB = 1 << 20


@dataclass
class Slot:
    fd: int
    arena: Arena
    window: Window

    def send(self, batch: Any) -> Any:
        """The batch as it arrives in the main process."""
        return codec.decode(codec.encode(batch, self.arena), self.window)

    def recycle(self) -> None:
        for offset in self.window.take_released():
            self.arena.release(offset)

    def lent(self) -> int:
        """Bytes lent out, with released blocks that were not reported to the worker yet."""
        return sum(lease.nbytes for lease in self.window.released.leases.values())

    def resident(self) -> int:
        """Bytes of memory behind the file."""
        return os.fstat(self.fd).st_blocks * 512


def in_use(arena: Arena) -> int:
    """Bytes in blocks that cannot be recycled yet."""
    arena._recycle()
    return arena._extents.in_use


@contextmanager
def new_slot(capacity: int = 256 * MIB) -> Iterator[Slot]:
    fd = create("test", capacity)
    slot = Slot(fd, Arena(fd), Window(fd))
    try:
        yield slot
    finally:
        slot.window.close()
        os.close(fd)


class Child:
    """A forked process that answers each message with `respond(message)`."""

    def __init__(self, respond: Callable[[Any], Any]) -> None:
        theirs, self._send = os.pipe()
        self._receive, mine = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            torch.set_num_threads(1)  # as in a worker: threads do not survive a fork
            try:
                os.close(self._send)
                os.close(self._receive)
                while (message := _read(theirs)) is not None:
                    _write(mine, pickle.dumps(respond(pickle.loads(message))))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(theirs)
        os.close(mine)

    def ask(self, message: Any = None) -> Any:
        _write(self._send, pickle.dumps(message))
        answer = _read(self._receive)
        assert answer is not None, "the child died"
        return pickle.loads(answer)

    def end(self, signal: int | None = None) -> int:
        if signal is not None:
            os.kill(self.pid, signal)
        os.close(self._send)
        os.close(self._receive)
        return os.waitpid(self.pid, 0)[1]


def worker(
    slot: Slot, job: Callable[[Arena, Any], Any], held: Sequence[tuple[int, int]] = ()
) -> Child:
    """A forked process with an arena of its own on the slot's file."""
    arenas: list[Arena] = []

    def respond(message: Any) -> Any:
        if not arenas:
            arenas.append(Arena(slot.fd, held))
        released, request = message
        for offset in released:
            arenas[0].release(offset)
        return job(arenas[0], request)

    return Child(respond)


def _write(fd: int, data: bytes) -> None:
    data = struct.pack("<Q", len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def _read(fd: int) -> bytes | None:
    length = _read_exactly(fd, 8)
    return _read_exactly(fd, struct.unpack("<Q", length)[0]) if length else None


def _read_exactly(fd: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = os.read(fd, length - len(data))
        if not part:
            return b""
        data += part
    return data
