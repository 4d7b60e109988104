"""What a nursery under spawn or forkserver is started with, and how it begins.

Such a nursery is a fresh interpreter. The trainer pickles the blueprint once, into a memory file.
Each worker unpickles it in its own process, so threads and connections that the user's modules
create at import are never lost in a fork.
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

from holdfast import kernel, private_names
from holdfast.processes.lifeline import ARM
from holdfast.processes.nursery_main import IGNORED_SIGNALS, NurseryLoop, note_failure, set_signals
from holdfast.processes.protocol import Equipment
from holdfast.processes.spare import Assignment
from holdfast.transport import codec
from holdfast.worker import blas_threads

_LENGTH = struct.Struct("<q")
_SPAWNED = """\
import pickle, sys
try:
    file = open({payload}, "rb", closefd=False)
    file.seek(0)
    sys.path[:], tracker = pickle.load(file)
    from holdfast.processes.spawn import serve_spawned
except BaseException:
    import socket, traceback
    text = pickle.dumps(traceback.format_exc()[-32768:])
    socket.socket(fileno={control}).send(text)  # as `note_failure` does
    sys.exit(1)
serve_spawned(file.tell(), tracker, *{fds})
"""


@dataclass
class Payload:
    """The blueprint, pickled once, in a memory file, with the descriptors it refers to."""

    fd: int
    fds: tuple[int, ...]
    method: str  # the start method, as the user has given it

    def program(self, fds: tuple[int, ...], lifeline: int) -> str:
        """The program of the fresh interpreter. `fds` are the arguments of `serve_spawned`."""
        return ARM.format(fd=lifeline) + _SPAWNED.format(payload=self.fd, control=fds[0], fds=fds)

    def close(self) -> None:
        os.close(self.fd)
        for fd in self.fds:
            os.close(fd)


class _Popen:
    """Stands in for multiprocessing's Popen while the blueprint is pickled.

    Locks, queues, pipes and shared tensors inside a dataset pass their descriptors to it. They get
    to the nursery under the same numbers, and by fork to every worker.
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
        with kernel.stdio_taken():  # the tracker must not get another file as standard error
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
    """A memory file with these parts, concatenated."""
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    private_names.use_tracker(tracker)

    def find_blueprint() -> Any:
        process: Any = multiprocessing.process.current_process()
        name = process.name
        process._inheriting = True  # for multiprocessing: the main module is being imported
        try:
            # Not closed: the traceback of an error may hold a view of it.
            view = memoryview(kernel.mapped(payload, prot=mmap.PROT_READ))
            size = _LENGTH.unpack_from(view, at)[0]
            start = at + _LENGTH.size
            spawn.prepare(pickle.loads(view[start : start + size]))
            blueprint = codec.decode(view[start + size :], None)
            blas_threads.limit()  # for the libraries that were just loaded
            return blueprint
        finally:
            del process._inheriting
            process.name = name

    status = 1
    line = socket.socket(fileno=control)
    try:
        from holdfast.processes import worker_main
        from holdfast.worker.generator_states import global_states

        global_states()  # where they are in memory: found out here, and not in each worker

        def deliver(given: Assignment, parent: int) -> None:
            equipment = Equipment(
                given.channel, given.arena, blackboxes, parent, lifeline, given.dump
            )
            worker_main.run(pickle.loads(given.setup), equipment, find_blueprint)

        gc.collect()
        gc.freeze()
        NurseryLoop(line, trainer, blackboxes, lifeline, payload).serve(
            deliver, worker_main.warm_up
        )
        status = 0
    except BaseException:
        note_failure(line)
    finally:
        os._exit(status)
