"""What a nursery under spawn or forkserver is started with, and how it begins.

Such a nursery is a fresh interpreter. The trainer pickles the blueprint once, into a memory file;
each worker unpickles it in its own process, so nothing the user's modules start can be lost in a
fork.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing.process
import os
import pickle
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from multiprocessing import resource_tracker, spawn
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

from holdfast import kernel
from holdfast.engine.lifeline import ARM
from holdfast.engine.nurse import IGNORED, Nurse, confess, set_signals
from holdfast.engine.protocol import Equipment
from holdfast.memory import codec, threads

__all__ = ["Payload", "serve_spawned", "spawn_payload"]

_LENGTH = struct.Struct("<q")
_SPAWNED = """\
import pickle, sys
try:
    file = open({payload}, "rb", closefd=False)
    file.seek(0)
    sys.path[:], tracker = pickle.load(file)
    from holdfast.engine.payload import serve_spawned
except BaseException:
    import socket, traceback
    said = pickle.dumps(traceback.format_exc()[-32768:])
    socket.socket(fileno={control}).send(said)  # as `confess`
    sys.exit(1)
serve_spawned(file.tell(), tracker, *{fds})
"""


@dataclass
class Payload:
    """The blueprint, pickled once, in a memory file, with the descriptors it refers to."""

    fd: int
    fds: tuple[int, ...]
    method: str  # what the user calls the way it is started

    def program(self, fds: tuple[int, ...], lifeline: int) -> str:
        """What the fresh interpreter runs; `fds` as `serve_spawned` takes them, `fd` among them."""
        return ARM.format(fd=lifeline) + _SPAWNED.format(payload=self.fd, control=fds[0], fds=fds)

    def close(self) -> None:
        os.close(self.fd)
        for fd in self.fds:
            os.close(fd)


class _Popen:
    """Stands in for multiprocessing's Popen while the blueprint is pickled.

    Locks, queues, pipes and shared tensors inside a dataset ask it to carry their descriptors to
    the child. They go to the nursery under the same numbers, and by fork to every worker.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []

    class DupFd:
        def __init__(self, fd: int) -> None:
            self.fd = fd

        def detach(self) -> int:
            return self.fd

    def duplicate_for_child(self, fd: int) -> int:
        copy = kernel.duplicate(fd)
        self.fds.append(copy)
        return copy


def spawn_payload(blueprint: Any, start_method: str) -> Payload:
    """Pickle what a spawned nursery needs. Raises what pickling raises."""
    popen: Any = _Popen()
    before = get_spawning_popen()
    set_spawning_popen(popen)
    try:
        preparation: Any = spawn.get_preparation_data("Process-1")
        preparation["start_method"] = start_method
        with kernel.stdio_taken():  # its process is to get the standard error that is not there
            resource_tracker.ensure_running()
        tracker = popen.duplicate_for_child(resource_tracker.getfd())
        pickled = ForkingPickler.dumps(preparation, 5)
        head = pickle.dumps((list(sys.path), tracker)) + _LENGTH.pack(len(pickled))
        fd = _written(head, pickled, codec.encode_for_start(blueprint))
    except BaseException:
        for copy in popen.fds:
            os.close(copy)
        raise
    finally:
        set_spawning_popen(before)
    return Payload(fd, tuple(popen.fds), start_method)


def _written(*parts: Any) -> int:
    """A memory file with these parts, one after the other."""
    fd = kernel.memory_file("holdfast-blueprint", room=sum(map(len, parts)))
    try:
        with open(fd, "wb", closefd=False) as file:
            for part in parts:
                file.write(part)
    except BaseException:
        os.close(fd)
        raise
    return fd


def serve_spawned(
    at: int,
    tracker: int,
    control: int,
    trainer: int,
    blackboxes: int,
    lifeline: int,
    payload: int,
) -> None:
    """The main function of a spawned nursery."""
    set_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]

    def find_blueprint() -> Any:
        process: Any = multiprocessing.process.current_process()
        name = process.name
        process._inheriting = True  # multiprocessing's sign that the main module is being imported
        try:
            # Not closed: a traceback of what went wrong here may hold a view of it.
            view = memoryview(kernel.mapped(payload, prot=mmap.PROT_READ))
            size = _LENGTH.unpack_from(view, at)[0]
            start = at + _LENGTH.size
            spawn.prepare(pickle.loads(view[start : start + size]))
            blueprint = codec.decode(view[start + size :], None)
            threads.limit()  # of the libraries that have just been loaded
            return blueprint
        finally:
            del process._inheriting
            process.name = name

    status = 1
    line = socket.socket(fileno=control)
    try:
        from holdfast.engine import worker  # imports torch, once for all workers

        def deliver(setup: bytes, channel: int, arena: int, parent: int, dump: int | None) -> None:
            equipment = Equipment(channel, arena, blackboxes, parent, lifeline, dump)
            worker.run(pickle.loads(setup), equipment, find_blueprint)

        gc.collect()
        gc.freeze()
        Nurse(line, trainer, blackboxes, lifeline, payload).serve(deliver)
        status = 0
    except BaseException:
        confess(line)
    finally:
        os._exit(status)
