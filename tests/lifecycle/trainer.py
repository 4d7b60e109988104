"""Trainers: whole processes as the subject of a test.

A trainer is a script in a session of its own. Its standard output is read line by line, its standard error kept in a
file, and its session is how we find everybody who belongs to it, also when it is gone: workers that are not known any
more still carry its session number. Whatever happens in a test, at its end the whole session is killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import eventually, in_session, signal_if
from tests.support.texts import without_warnings_of_forks
from tests.support.warm import TERMINAL, Incubator

ROOT = Path(__file__).parents[2]
PATHS = (ROOT / "src", ROOT)
PRELUDE = """\
import tests.lifecycle.leaving
import gc, os, signal, sys, threading, time
import torch
from holdfast import DataLoader, LoaderClosed
from tests.lifecycle.samples import *
from tests.support.processes import kill

def say(*words):
    os.write(1, " ".join(map(str, words)).encode() + b"\\n")

def mark():
    say("mark", time.monotonic())

"""


@dataclass(frozen=True)
class Ended:
    """How a trainer ended. `seconds` count from the last `mark()` until its exit hooks had run, or until its end if
    it did not get that far."""

    code: int
    lines: list[str]
    err: str
    seconds: float
    left: dict[int, str]

    def values(self, word: str) -> list[str]:
        """What the script has said in lines that begin with `word`."""
        return _said(self.lines, word)


_POLL = ("7", "271", "73")  # poll and ppoll on x86-64, ppoll on arm64


def _said(lines: list[str], word: str) -> list[str]:
    return [line.removeprefix(word).strip() for line in lines if line.split(" ")[0] == word]


class Trainer:
    """A script that runs, or has run."""

    def __init__(self, pid: int, out: int, err: Path, status: Any) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.lines: list[str] = []
        self._out = out
        self._pending = b""
        self._err = err
        self._status = status

    def expect(self, word: str, seconds: float = 30.0, times: int = 1) -> list[str]:
        """Waits until `times` lines that begin with `word` were said, ever; what follows it in each."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.said(word)
            if len(found) >= times:
                return found
            if self._read(deadline) is False:
                self._fail(f"said {word!r} {len(found)} times of {times}")

    def expect_poll(self) -> None:
        """Waits until its main thread is inside poll(), as next() is when it waits."""

        def polls() -> bool:
            return Path(f"/proc/{self.pid}/syscall").read_text().split()[0] in _POLL

        if not eventually(polls):
            self._fail("does not wait")

    def wait(self, seconds: float = 30.0) -> Ended:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if not poll.poll(seconds * 1000):
            self._fail(f"is still there after {seconds} s")
        now = time.monotonic()
        eventually(lambda: not self.companions(), 3.0)
        while self._read(now):
            pass
        marks = self.said("mark")
        hooks = [
            float(when)
            for pid, when in map(str.split, self.said("leaving"))
            if int(pid) == self.pid
        ]
        since = (hooks[0] if hooks else now) - float(marks[-1]) if marks else float("nan")
        code = os.waitstatus_to_exitcode(self._status())
        return Ended(code, self.lines, self.errors(), since, self.companions())

    def seconds_until_alone(self, limit: float = 10.0) -> float:
        """How long it takes from now until no other process of its session is alive."""
        began = time.monotonic()
        while self.companions():
            if time.monotonic() - began > limit:
                return float("inf")
            time.sleep(0.005)
        return time.monotonic() - began

    def companions(self) -> dict[int, str]:
        """Everybody alive in its session but itself: pid and what it is doing."""
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == self.pid:
                continue
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            fields = stat.rsplit(")", 1)[1].split()
            if int(fields[3]) == self.pid and fields[0] not in "ZX":
                found[int(entry)] = f"{stat.rsplit(')', 1)[0]}) {fields[0]} child of {fields[1]}"
        return found

    def errors(self) -> str:
        return without_warnings_of_forks(self._err.read_text())

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def signal_group(self, number: int) -> None:
        os.killpg(self.pid, number)

    def type_in(self, keys: bytes) -> None:
        """Types on its terminal, if it has one."""
        os.write(self._out, keys)

    def hang_up(self) -> None:
        """Closes its terminal."""
        nowhere = os.open("/dev/null", os.O_RDWR)
        os.dup2(nowhere, self._out, inheritable=False)
        os.close(nowhere)

    def dispose(self) -> None:
        # Twice, because a nursery may have been about to fork.
        for _ in range(2):
            for pid in [*self.companions(), *self._itself()]:
                with contextlib.suppress(ProcessLookupError):
                    signal_if(pid, in_session(self.pid))
        eventually(lambda: not self.companions(), 5.0)
        self._status()
        os.close(self.pidfd)
        os.close(self._out)

    def _itself(self) -> list[int]:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return [] if poll.poll(0) else [self.pid]

    def listen(self, seconds: float) -> None:
        """Waits that long for a line to be said."""
        self._read(time.monotonic() + seconds)

    def said(self, word: str) -> list[str]:
        return _said(self.lines, word)

    def _read(self, deadline: float) -> bool:
        """One line more, if there is one by then."""
        while b"\n" not in self._pending:
            poll = select.poll()
            poll.register(self._out, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
            try:
                part = os.read(self._out, 65536)
            except OSError:  # a terminal that no process holds any more
                part = b""
            if not part:
                return False
            self._pending += part.replace(b"\r\n", b"\n")
        line, _, self._pending = self._pending.partition(b"\n")
        self.lines.append(line.decode())
        return True

    def _fail(self, what: str) -> None:
        raise AssertionError(
            f"the trainer {what}\nsaid: {self.lines}\nstderr:\n{self.errors()}\nsession: {self.companions()}"
        )


def _environment(more: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS)), **more}


class Stage:
    """Starts trainers, and ends them all."""

    def __init__(self, folder: Path, forked_from: Incubator | None = None) -> None:
        """`forked_from`: if trainers are to have more than the usual modules."""
        self.folder = folder
        self._forked_from = forked_from
        self._trainers: list[Trainer] = []

    def start(
        self, body: str, *, before: str = "", terminal: bool = False, **environment: str
    ) -> Trainer:
        """A trainer that runs `body`, forked from the incubator, after the code `before` (see `Incubator.start`).

        With `terminal`, a terminal of its own is what it reads from and writes to; `Trainer.type_in` types there.
        """
        script, err = self._write(body)
        here, out = os.openpty() if terminal else os.pipe()
        with err.open("wb") as file:
            command = (self._forked_from or incubator()).start(
                [str(script)],
                out=out,
                err=file.fileno(),
                env=_environment(environment),
                before=TERMINAL if terminal else before,
            )
        os.close(out)
        return self._add(Trainer(command.pid, here, err, command.status))

    def start_fresh(self, body: str, *, flags: Sequence[str] = (), **environment: str) -> Trainer:
        """A trainer in an interpreter of its own, with these flags."""
        script, err = self._write(body)
        here, out = os.pipe()
        with err.open("wb") as file:
            child = subprocess.Popen(
                [sys.executable, *flags, str(script)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=file,
                env=_environment(environment),
                start_new_session=True,
            )
        os.close(out)

        def status() -> int:
            code = child.wait()
            return -code if code < 0 else code << 8

        return self._add(Trainer(child.pid, here, err, status))

    def run(self, body: str, *, seconds: float = 30.0, **how: Any) -> Ended:
        return self.start(body, **how).wait(seconds)

    def run_fresh(self, body: str, *, seconds: float = 60.0, **how: Any) -> Ended:
        return self.start_fresh(body, **how).wait(seconds)

    def close(self) -> None:
        for trainer in self._trainers:
            trainer.dispose()

    def _add(self, trainer: Trainer) -> Trainer:
        self._trainers.append(trainer)
        return trainer

    def _write(self, body: str) -> tuple[Path, Path]:
        number = len(self._trainers)
        script = self.folder / f"trainer{number}.py"
        main = textwrap.indent(textwrap.dedent(body), "    ")
        script.write_text(f'{PRELUDE}if __name__ == "__main__":\n{main}')
        return script, self.folder / f"trainer{number}.err"


@functools.cache
def incubator() -> Incubator:
    """The process from which trainers are forked. `leaving` is to be imported before torch."""
    return Incubator(
        "tests.lifecycle.leaving",
        "holdfast.loader",
        "tests.lifecycle.samples",
        "tests.support.processes",
        path=PATHS,
    )
