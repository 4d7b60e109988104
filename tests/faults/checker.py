"""Plays a loader, records everything, and judges the record: the invariants I1 to I10.

One function plays (`play`), one judges (`check`). What is recorded is plain data: no batch, no
exception and no iterator is kept, because each would keep memory or processes that I5 looks for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch

from holdfast import Incident, LoaderClosed, RestartLimitExceeded, WorkerStartError
from tests.faults.witness import Seen, Witness
from tests.support.fingerprint import fingerprint
from tests.support.processes import alive, descendants, eventually

DEADLINE = 30.0  # seconds for one next(), on a machine where others work too
STARTED = 100.0  # seconds until all workers have a pid
CLOSE_WITHIN = 4.0  # it is 2 s by contract; twice that is no matter of luck
_FINAL = (RestartLimitExceeded, WorkerStartError, LoaderClosed)


@dataclass(frozen=True)
class Batch:
    """One delivered batch: who made it, of which samples, and its bits."""

    worker: int
    numbers: tuple[int, ...]
    bits: Any = field(repr=False)


@dataclass(frozen=True)
class Error:
    """One error that next() raised."""

    kind: type[BaseException]
    text: str
    sample: Any = None
    errno: int | None = None


Event = Batch | Error


@dataclass
class History:
    epochs: list[list[Event]] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)  # whether each epoch came to its end
    longest: float = 0.0
    first_pids: list[int | None] = field(default_factory=list)
    last_pids: list[int | None] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    restarts: int = 0
    close_seconds: float = 0.0
    left: list[str] = field(default_factory=list)
    crash: BaseException | None = None
    seen: Seen | None = None  # of bytes in flight, if there was a witness

    @property
    def events(self) -> list[Event]:
        return [event for epoch in self.epochs for event in epoch]

    @property
    def errors(self) -> list[Error]:
        return [event for event in self.events if isinstance(event, Error)]


# -- playing ------------------------------------------------------------------------------

Interfere = Callable[[Any, int, int], None]


def play(
    make: Callable[[], Any],
    *,
    epochs: int = 1,
    thread: str = "main",
    interfere: Interfere | None = None,
    stock: bool = False,
    witness: Witness | None = None,
) -> History:
    """Iterate over what `make` makes, for some epochs, and close it; everything is recorded.

    Of stock torch (`stock`) only the stream is recorded: it has no incidents, and leaves a signal
    handler behind.

    `interfere(iterator, epoch, number)` is called before each next(), and with number -1 when an
    epoch is over.
    """
    history = History()
    before = Surroundings.now()

    def run() -> None:
        try:
            with contextlib.nullcontext() if witness is None else witness:
                _run(make, history, epochs, interfere, stock, before, witness)
        except BaseException as error:
            history.crash = error

    if thread == "main":
        run()
    else:
        other = threading.Thread(target=run, name="consumer")
        other.start()
        other.join()
    if history.crash is not None:
        raise history.crash
    if stock:
        gc.collect()  # torch's errors hold its iterator, and its workers, in a cycle
    else:
        history.left = before.differences(history)
    return history


def _run(
    make: Callable[[], Any],
    history: History,
    epochs: int,
    interfere: Interfere | None,
    stock: bool,
    before: Surroundings,
    witness: Witness | None,
) -> None:
    loader = make()
    if witness is not None:
        history.seen = witness.seen
        witness.asked = lambda: int(loader.stats()["in_flight_bytes"])
    try:
        for epoch in range(epochs):
            if witness is not None:
                witness.epoch()
            iterator = iter(loader)
            if epoch == 0 and not stock:
                history.first_pids = _pids(iterator)
            events: list[Event] = []
            history.epochs.append(events)
            history.finished.append(_epoch(iterator, epoch, events, history, interfere, witness))
            if interfere is not None:
                interfere(iterator, epoch, -1)
            if stock and epoch + 1 == epochs:
                iterator._shutdown_workers()  # left to gc, it would wait 5 s for each of them
            if not stock:
                if Surroundings.handlers_now() != before.handlers:
                    history.left.append("a signal handler while iterating")
                history.last_pids = [worker.pid for worker in iterator._workers]
            del iterator
            if not history.finished[-1]:
                break
    finally:
        if not stock:
            began = time.monotonic()
            loader.close()
            history.close_seconds = time.monotonic() - began
            history.incidents = loader.incidents
            history.restarts = loader.stats()["restarts"]


def _pids(iterator: Any) -> list[int | None]:
    """Of all workers. On a machine where others work too a fresh interpreter may take longer to import torch than the
    handle of a worker waits for its pid."""
    pids: list[int | None] = []

    def known() -> bool:
        pids[:] = [worker.pid for worker in iterator._workers]
        return None not in pids or iterator._pool.machine.failure is not None

    assert eventually(known, STARTED)
    return pids


def _epoch(
    iterator: Any,
    epoch: int,
    events: list[Event],
    history: History,
    interfere: Interfere | None,
    witness: Witness | None,
) -> bool:
    errors = 0
    number = 0
    while True:
        if interfere is not None:
            interfere(iterator, epoch, number)
        number += 1
        got: Collection[int] = ()
        if witness is not None:
            witness.asks()
        began = time.monotonic()
        try:
            batch = next(iterator)
        except StopIteration:
            return True
        except Exception as error:
            events.append(_recorded(error))
            errors += 1
            if isinstance(error, _FINAL) or errors > 20:
                return False
        else:
            events.append(made := recorded_batch(batch))
            got = made.numbers
            del batch
        finally:
            history.longest = max(history.longest, time.monotonic() - began)
            if witness is not None:
                witness.got(got)


def recorded_batch(batch: Any) -> Batch:
    content = batch.get("samples", batch)
    if isinstance(content, list):
        workers = {sample["worker"] for sample in content}
        numbers = tuple(sample["number"] for sample in content)
    else:
        workers = set(content["worker"].tolist())
        numbers = tuple(content["number"].tolist())
    (worker,) = workers
    return Batch(worker, numbers, fingerprint(batch))


def _recorded(error: Exception) -> Error:
    sample = getattr(error, "holdfast_sample", getattr(error, "sample", None))
    return Error(type(error), str(error), sample, getattr(error, "errno", None))


# -- I5: what a process has, apart from its memory ----------------------------------------

_libc = ctypes.CDLL(None)
_PR_GET_CHILD_SUBREAPER = 37


@dataclass
class Surroundings:
    descendants: set[int]
    fds: dict[str, str]
    maps: int
    shm: set[str]
    handlers: list[Any]
    mask: set[int]
    threads: set[threading.Thread]
    subreaper: int

    @classmethod
    def now(cls) -> Surroundings:
        resource_tracker.ensure_running()  # once for the whole interpreter, by Python itself
        subreaper = ctypes.c_int()
        _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(subreaper), 0, 0, 0)
        return cls(
            descendants(),
            _open_files(),
            len(re.findall("memfd:holdfast", Path("/proc/self/maps").read_text())),
            {name for name in os.listdir("/dev/shm") if _ours(name)},
            cls.handlers_now(),
            set(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            set(threading.enumerate()),
            subreaper.value,
        )

    @staticmethod
    def handlers_now() -> list[Any]:
        return [signal.getsignal(number) for number in sorted(signal.valid_signals())]

    def differences(self, history: History) -> list[str]:
        """What is there now and was not before; a moment is given to what is on its way out."""
        found: list[str] = []

        def nothing_left() -> bool:
            found[:] = self._look(history)
            if found:
                gc.collect()
            return not found

        eventually(nothing_left, 5.0)
        return history.left + found

    def _look(self, history: History) -> list[str]:
        now = Surroundings.now()
        found = [f"process {pid}: {_command(pid)}" for pid in now.descendants - self.descendants]
        seen = {*history.first_pids, *history.last_pids, *(one.pid for one in history.incidents)}
        found += [f"worker {pid} lives" for pid in seen if pid is not None and alive(pid)]
        found += [f"descriptor {fd} {name}" for fd, name in now.fds.items() - self.fds.items()]
        if now.maps > self.maps:
            found.append(f"{now.maps - self.maps} mappings of holdfast's memory files")
        found += [f"/dev/shm/{name}" for name in now.shm - self.shm]
        found += [f"thread {thread.name}" for thread in now.threads - self.threads]
        for name in ("handlers", "mask", "subreaper"):
            if getattr(now, name) != getattr(self, name):
                found.append(f"{name}: {getattr(self, name)} before, {getattr(now, name)} now")
        return found


def _open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            pass  # the one that lists the others
    return found


def _ours(name: str) -> bool:
    """Others work on this machine: only names that we, or our children, may have made."""
    made_by = re.match(r"torch_(\d+)_", name)
    return (made_by is not None and int(made_by[1]) == os.getpid()) or "holdfast" in name


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
    except OSError:
        return "gone"


# -- judging ------------------------------------------------------------------------------


def check_stream(history: History, golden: History, *, per_worker: bool = False) -> None:
    """I1, I2: everything once, in torch's order, with torch's bits; where torch raised, an error.

    Where a replica of an iterable ends early, which worker is asked next is a matter of luck with
    torch too: there each worker's own stream counts.
    """
    assert history.finished == golden.finished, (history.finished, history.errors)
    for number, (ours, theirs) in enumerate(zip(history.epochs, golden.epochs, strict=True)):
        delivered = Counter(n for e in ours if isinstance(e, Batch) for n in e.numbers)
        twice = [n for n, count in delivered.items() if count > 1]
        assert not twice, f"epoch {number}: samples {twice} were delivered twice"
        if per_worker:
            workers = {e.worker for e in (*ours, *theirs) if isinstance(e, Batch)}
            for worker in sorted(workers):
                _same(_of(ours, worker), _of(theirs, worker), f"epoch {number} worker {worker}")
        else:
            _same(ours, theirs, f"epoch {number}")


def _of(events: list[Event], worker: int) -> list[Event]:
    return [event for event in events if isinstance(event, Batch) and event.worker == worker]


def _same(ours: list[Event], theirs: list[Event], where: str) -> None:
    for place, (one, two) in enumerate(zip(ours, theirs, strict=False)):
        if isinstance(two, Error):
            assert isinstance(one, Error), f"{where}: at {place} torch raised, here came {one}"
            continue
        assert isinstance(one, Batch), f"{where}: at {place} torch gave {two}, here came {one}"
        assert one.numbers == two.numbers, f"{where}: at {place} torch gave {two}, here came {one}"
        assert one == two, f"{where}: batch {place} has other bits: {one.bits}, torch {two.bits}"
    assert len(ours) == len(theirs), f"{where}: {len(ours)} events, torch had {len(theirs)}"


def check_conduct(
    history: History, *, innocent: set[int], intensity: int | None, deadline: float = DEADLINE
) -> None:
    """I3, I5, I7, I10: what must hold whatever happened."""
    assert history.longest < deadline, f"I3: one next() took {history.longest:.1f} s"
    assert not history.left, "I5: left behind: " + "; ".join(history.left)
    assert history.close_seconds < CLOSE_WITHIN, f"I5: close() took {history.close_seconds:.1f} s"
    for worker in innocent:
        first, last = history.first_pids[worker], history.last_pids[worker]
        assert first == last, f"I7: bystander {worker} was pid {first} and is now {last}"
        blamed = [str(one) for one in history.incidents if one.worker_id == worker]
        assert not blamed, f"I7: {blamed}"
    assert history.restarts <= len(history.incidents)
    if intensity is not None:
        assert history.restarts <= intensity, f"I10: {history.restarts} restarts"


def seeded(seed: int = 20) -> None:
    torch.manual_seed(seed)
