"""Runs a trial in processes of its own, watches it, and ends it.

Whatever happens to a trial is a finding: it raises, crashes, hangs or takes too much memory. Every
wait has a deadline. When `run` returns or raises, nothing of the trial is left.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from typing import Any, Final

from holdfast import kernel
from holdfast.autopsy.machine_facts import in_words
from holdfast.autopsy.readers import HERE, procfs, text
from holdfast.limits import gauge
from holdfast.tuning.measurement import Setting, Trial, Trouble
from holdfast.tuning.trial_process import Job, Ready, run_trial

LOOK: Final = 0.04  # seconds between two looks at what workers are doing
TO_CLOSE: Final = 1.0  # seconds for the loader to close
TO_END: Final = 5.0  # seconds for killed processes to be gone
LITTLE: Final = 0.05  # of the memory: less must be left free
SHOWN: Final = 2000  # characters of what a trial wrote


def run(
    job: Job, setting: Setting, seed: int, deadline: float, room: int | None = None
) -> Trial | None:
    """Try a setting, once for each rank at the same time; None if the deadline (of the monotonic
    clock) came first. `room`: bytes that the workers of a rank may have."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        trial = _Running(job, setting, room)
        stack.callback(trial.end)
        for rank in range(job.ranks):
            trial.start(seed * job.ranks + rank, output.fileno())
        found = trial.watch(deadline)
        trial.end()
        if found is None or found.trouble is None:
            return found
        output.seek(0)
        said = output.read().decode(errors="replace").strip()[-SHOWN:]
        details = "\n".join(part for part in (found.trouble.details, said) if part)
        return replace(found, trouble=replace(found.trouble, details=details))


def hung(setting: Setting, words: str) -> Trial:
    """The result of a trial that was ended because it took too long."""
    return Trial(setting, trouble=Trouble("hung", words))


@dataclass
class _Rank:
    """One process of a trial."""

    process: Any
    line: connection.Connection
    ready: Ready | None = None
    result: dict[str, Any] | None = None


@dataclass
class _Seen:
    """What workers were seen doing."""

    looks: int = 0
    in_disk: int = 0
    read_bytes: int = 0
    began: float = field(default_factory=time.monotonic)


class _Running:
    """A trial that is running."""

    def __init__(self, job: Job, setting: Setting, room: int | None) -> None:
        self._job = job
        self._setting = setting
        self._room = room
        self._ranks: list[_Rank] = []
        self._next_weighing = 0.0

    def start(self, seed: int, output: int) -> None:
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        # A signal between the two lines would leave a process that is not in the list.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            process = fork.Process(
                target=_begin, args=(blocked, self._job, self._setting, seed, theirs, output)
            )
            process.start()
            self._ranks.append(_Rank(process, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()

    def watch(self, deadline: float) -> Trial | None:
        """Until there is a result of all ranks, or trouble in one."""
        trouble = self._wait(lambda: all(one.ready for one in self._ranks), deadline, None)
        if trouble is not None:
            return self._failed(trouble)
        if time.monotonic() >= deadline:
            return None
        for one in self._ranks:
            self._tell(one)
        seen = _Seen(read_bytes=self._read_bytes())
        trouble = self._wait(lambda: all(one.result for one in self._ranks), deadline, seen)
        if trouble is not None:
            return self._failed(trouble)
        if not all(one.result for one in self._ranks):
            return None
        return self._trial(seen)

    def _wait(self, done: Any, deadline: float, seen: _Seen | None) -> Trouble | None:
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            by = {one.line: one for one in self._ranks if one.result is None}
            ended = {one.process.sentinel: one for one in self._ranks}
            heard = connection.wait([*by, *ended], min(left, LOOK))
            for line in heard:
                speaker = by.get(line)  # type: ignore[call-overload]
                trouble = None if speaker is None else self._hear(speaker)
                if trouble is not None:
                    return trouble
            for sentinel in heard:
                rank = ended.get(sentinel)
                if rank is not None and not rank.line.poll():
                    return _death(rank.process)
            trouble = self._look(seen)
            if trouble is not None:
                return trouble
        return None

    def _hear(self, rank: _Rank) -> Trouble | None:
        try:
            message = rank.line.recv()
        except (EOFError, OSError):
            return _death(rank.process)
        if isinstance(message, Ready):
            rank.ready = message
        elif "trouble" in message:
            trouble: Trouble = message["trouble"]
            return trouble
        else:
            rank.result = message
        return None

    def _look(self, seen: _Seen | None) -> Trouble | None:
        """What workers are doing, and whether memory is short."""
        if seen is not None:
            for place in self._tasks():
                fields = procfs.stat(place)
                seen.looks += 1
                seen.in_disk += fields is not None and fields[0] == "D"
        return self._short_of_memory()

    def _tasks(self) -> Iterator[str]:
        for one in self._ranks:
            if one.ready is not None:
                yield from map(str, one.ready.pids)
                yield from (f"{one.process.pid}/task/{task}" for task in one.ready.tids)

    def _short_of_memory(self) -> Trouble | None:
        now = time.monotonic()
        if now < self._next_weighing:
            return None
        reading = gauge.read()
        if reading.free is not None and reading.limit and reading.free < LITTLE * reading.limit:
            words = (
                f"it was ended: {in_words(reading.free)} of {in_words(reading.limit)} memory were "
                "left free"
            )
            return Trouble("memory", words)
        for one in self._ranks if self._room is not None else ():
            pids = [one.process.pid, *(() if one.ready is None else one.ready.pids)]
            used = sum(gauge.private(pid) or 0 for pid in pids)
            if self._room is not None and used > self._room:
                took = f"it was ended: it had taken {in_words(used)}, of {in_words(self._room)}"
                return Trouble("memory", took)
        # Reading takes long if there is much to read.
        self._next_weighing = now + max(0.1, 10 * (time.monotonic() - now))
        return None

    def _read_bytes(self) -> int:
        """From disks, by all workers so far."""
        total = 0
        for one in self._ranks:
            ready = one.ready
            for pid in ready.pids if ready is not None and ready.pids else (one.process.pid,):
                for line in (text(HERE.proc / str(pid) / "io") or "").splitlines():
                    name, _, value = line.partition(": ")
                    total += int(value) if name == "read_bytes" and value.isdigit() else 0
        return total

    def _failed(self, trouble: Trouble) -> Trial:
        return Trial(self._setting, trouble=trouble)

    def _trial(self, seen: _Seen) -> Trial:
        results = [one.result for one in self._ranks if one.result is not None]
        budgets = [one["budget_bytes"] for one in results if one["budget_bytes"] is not None]
        passed = max(1e-3, time.monotonic() - seen.began)
        return Trial(
            self._setting,
            slices=tuple(part for one in results for part in one["slices"]),
            first_batch=statistics.median(one["first_batch"] for one in results),
            worker_bytes=max(one["worker_bytes"] for one in results),
            shared_bytes=max(one["shared_bytes"] for one in results),
            batch_bytes=max(one["batch_bytes"] for one in results),
            budget_bytes=min(budgets, default=None),
            disk=seen.in_disk / max(1, seen.looks),
            read_bytes=max(0, self._read_bytes() - seen.read_bytes) / passed,
            lock=statistics.median(one["lock"] for one in results),
            bad_samples=sum(one["bad_samples"] for one in results),
            bad_sample=next((one["bad_sample"] for one in results if one["bad_sample"]), ""),
        )

    def _tell(self, rank: _Rank) -> None:
        with contextlib.suppress(OSError):
            rank.line.send("go on")

    def end(self) -> None:
        """End all processes. May be called again."""
        for one in self._ranks:
            self._tell(one)
        until = time.monotonic() + TO_CLOSE
        for one in self._ranks:
            if one.result is not None:  # it closes its loader
                connection.wait([one.process.sentinel], max(0.0, until - time.monotonic()))
            _kill(one.process)
        until = time.monotonic() + TO_END
        for one in self._ranks:
            one.process.join(max(0.0, until - time.monotonic()))
            # What is still at work would slow the next trial down.
            for pid in () if one.ready is None else one.ready.pids:
                while not procfs.is_dead(pid) and time.monotonic() < until:
                    time.sleep(0.005)
            one.line.close()
        self._ranks.clear()


def _begin(blocked: Any, *args: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which ends this
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    run_trial(*args)


def _kill(process: Any) -> None:
    """The process and all that it has started, also what a dataset has started; nothing if it was
    reaped before. Until then its number, and that of its group, is its own, also if it has
    ended."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
        kernel.has_ended(process.pid)  # raises ChildProcessError if it was reaped
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def _death(process: Any) -> Trouble:
    connection.wait([process.sentinel], TO_CLOSE)
    _kill(process)  # its status is known by now, unless it only closed its line
    process.join(TO_END)
    code = process.exitcode
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return Trouble("died", f"its process was killed by {signal.Signals(-code).name}")
    return Trouble("died", f"its process ended with exit status {code}")
