"""Training goes on while its loader's workers are killed: torch and holdfast side by side.

Three times the same training with the same seed: undisturbed with torch's DataLoader, to know the
loss it leads to; then, at the same time, with torch's DataLoader, one of whose workers is killed,
and with holdfast's, whose workers are killed, crash and hang. The exit status is 0 if all went as
promised: torch's run dies, holdfast's arrives at the undisturbed loss, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from demo_run import TOTAL, Run
from demo_screen import View, choose_view, render, summary

TRAINING = Path(__file__).with_name("demo_training.py")
PATIENCE = 50.0  # seconds a training may be silent
TICK = 0.02


@dataclass(frozen=True)
class Blow:
    """What is done to the workers once the run has got that many batches."""

    after: int
    what: str  # "kill one", "kill all", "segfault", "hang"


ONE_KILL = (Blow(60, "kill one"),)
STORM = (
    Blow(12, "kill one"),
    Blow(28, "segfault"),
    Blow(44, "kill one"),
    Blow(60, "kill all"),
    Blow(75, "hang"),
    Blow(92, "kill one"),
    Blow(105, "kill one"),
)


class Training:
    """A training in a process of its own, and what we do to it."""

    def __init__(self, run: Run, loader: str, blows: Sequence[Blow]) -> None:
        self.run = run
        self.blows = list(blows)
        self.dice = random.Random(2)  # whom a blow hits
        self.pidfds: dict[int, int] = {}
        self.faults = tempfile.TemporaryDirectory(prefix="holdfast-demo-")
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self.unread = b""
        self.heard: float | None = None  # when it last said something, once it was let train
        command = [sys.executable, str(TRAINING), loader, "--faults", self.faults.name]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.orders, self.reports = self.process.stdin, self.process.stdout
        os.set_blocking(self.reports.fileno(), False)

    def begin(self) -> None:
        """Let it train; until now it has made its imports and waited."""
        self.heard = time.monotonic()
        try:
            self.orders.write(b"begin\n")
            self.orders.close()
        except BrokenPipeError:
            pass  # it is dead already; `attend` finds out why

    def attend(self) -> None:
        """Read its reports, strike if it is time, notice its end."""
        ended = self.process.poll() is not None  # asked first: what it said last is in the pipe
        self._read()
        if ended:
            self._end()
        elif self.heard is not None and time.monotonic() > self.heard + PATIENCE:
            self.errors.write(f"DemoError: silent for {PATIENCE:.0f} s".encode())
            self.process.kill()
            self.heard = None  # said once
        else:
            while self.blows and self.run.batches >= self.blows[0].after:
                if not self._strike(self.blows[0].what):
                    break
                self.blows.pop(0)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.orders, self.reports, self.errors):
            file.close()
        self.faults.cleanup()
        for pidfd in self.pidfds.values():
            os.close(pidfd)
        self.pidfds.clear()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self.reports.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not part:
                return
            if self.heard is not None:
                self.heard = time.monotonic()
            *lines, self.unread = (self.unread + part).split(b"\n")
            for line in lines:
                event = json.loads(line)
                self.run.handle(event)
                if event["event"] == "worker":
                    self._get_hold_of(event["worker"], event["pid"])

    def _get_hold_of(self, worker: int, pid: int) -> None:
        """A pidfd, unlike a pid, can never mean somebody else later."""
        before = self.pidfds.pop(worker, None)
        if before is not None:
            os.close(before)
        try:
            self.pidfds[worker] = os.pidfd_open(pid)
        except ProcessLookupError:
            pass

    def _strike(self, what: str) -> bool:
        """Do it; False if there is nobody to do it to just now."""
        if what in ("segfault", "hang"):
            Path(self.faults.name, what).touch()
            return True
        up = [worker for worker in self.pidfds if self.run.workers[worker].up]
        if not up:
            return False
        for worker in up if what == "kill all" else [self.dice.choice(up)]:
            now = time.monotonic()
            try:
                signal.pidfd_send_signal(self.pidfds[worker], signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.run.struck("SIGKILL", worker, now)
        return True

    def _end(self) -> None:
        self.errors.seek(0)
        errors = self.errors.read().decode(errors="replace")
        self.run.end(self.process.returncode, errors, time.monotonic())


def watch(trainings: Sequence[Training], view: View, until: Callable[[], bool]) -> None:
    while not until():
        for training in trainings:
            if not training.run.ended:
                training.attend()
        view.update()
        time.sleep(TICK)


def perform(reference: Run, torch: Run, holdfast: Run) -> None:
    """The three trainings, on the screen."""
    with choose_view((reference, torch, holdfast)) as view, ExitStack() as processes:

        def prepare(run: Run, loader: str, blows: Sequence[Blow] = ()) -> Training:
            return processes.enter_context(closing(Training(run, loader, blows)))

        undisturbed = prepare(reference, "torch")
        undisturbed.begin()
        watch([undisturbed], view, until=lambda: reference.batches > 0 or reference.died)
        # Their imports take a while, and the undisturbed run leaves the processor time for them.
        disturbed = [prepare(torch, "torch", ONE_KILL), prepare(holdfast, "holdfast", STORM)]
        watch([undisturbed], view, until=lambda: reference.through or reference.died)
        if reference.through:
            for training in disturbed:
                training.begin()
            all_of_them = [undisturbed, *disturbed]
            watch(all_of_them, view, until=lambda: all(one.run.ended for one in all_of_them))


def surprises(reference: Run, torch: Run, holdfast: Run) -> list[str]:
    """What did not go as promised."""
    found = []
    if not reference.finished:
        found.append(f"the undisturbed run died: {reference.error}")
    if not torch.died:
        found.append("torch's run survived the death of its worker")
    elif "DataLoader worker" not in torch.error:
        found.append(f"torch's run died, but not of its worker's death: {torch.error}")
    if not holdfast.finished:
        return [*found, f"holdfast's run died: {holdfast.error}"]
    if holdfast.final_loss != reference.final_loss:
        found.append("holdfast's final loss is not that of the undisturbed run")
    elif holdfast.same_losses(reference) != TOTAL:
        found.append("holdfast's final loss is the undisturbed one, but not all losses before it")
    kinds = {strike.kind for strike in holdfast.strikes}
    found += [
        f"no {kind} took place" for kind in ("SIGKILL", "segfault", "hang") if kind not in kinds
    ]
    for strike in holdfast.strikes:
        if strike.delay is None:
            found.append(f"the {strike.kind} of worker {strike.worker} was not made up for")
    return found


def conclude(reference: Run, torch: Run, holdfast: Run) -> int:
    """Print what came out; the exit status."""
    print()
    for line in summary((reference, torch, holdfast)):
        print(render(line))
    print()
    unexpected = surprises(reference, torch, holdfast)
    if not unexpected:
        print(
            f" One dead worker ended torch's run; holdfast's lost {len(holdfast.strikes)} of them\n"
            " and arrived at the undisturbed loss, bit for bit."
        )
        return 0
    print(" This is not what should have happened:")
    for surprise in unexpected:
        print(f" - {surprise}")
    for run in (reference, holdfast):
        if run.died and run.errors:
            print(f"\n {run.name} wrote at its end:\n")
            print(textwrap.indent("\n".join(run.errors.splitlines()[-20:]), "   "))
    return 1


def main() -> int:
    reference = Run("undisturbed", "torch.utils.data.DataLoader")
    torch = Run("torch", "torch.utils.data.DataLoader", "One worker will be killed.")
    holdfast = Run(
        "holdfast",
        "holdfast.DataLoader",
        "Workers will be killed one by one and all at once, one will crash in a sample, one hang.",
    )
    try:
        perform(reference, torch, holdfast)
    except KeyboardInterrupt:
        return 130
    return conclude(reference, torch, holdfast)


if __name__ == "__main__":
    sys.exit(main())
