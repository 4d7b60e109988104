"""Training goes on while its loader's workers are killed: torch and holdfast side by side.

The same training with the same seed, several times:

- undisturbed, with torch's DataLoader, to know the loss that it leads to;
- with torch's DataLoader, one of whose workers is killed; and once more, with a damaged file;
- with holdfast's, whose workers are killed, crash, hang and leak, and then with the damaged file.

The exit status is 0 if all went as promised: torch's runs die; holdfast's arrives at the
undisturbed loss, bit for bit, workers that leak are replaced, the damaged file costs one sample.
At the end there is a report of that run (`holdfast report`), in build/demo.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
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

from demo_run import BATCH_SIZE, BATCHES, TOTAL, Run
from demo_screen import View, choose_view, render, summary

TRAINING = Path(__file__).with_name("demo_training.py")
OUT = Path(__file__).resolve().parents[1] / "build" / "demo"
PATIENCE = 50.0  # seconds a training may be silent
TICK = 0.02
WEIGHING = 0.2  # seconds from one look at the workers' memory to the next
DAMAGED = "0417-*.npy"


@dataclass(frozen=True)
class Blow:
    """What is done to the workers once the run has got that many batches."""

    after: int
    what: str  # "kill one", "kill all", "segfault", "hang", "leak"


LEAK = Blow(2 * BATCHES, "leak")
ONE_KILL = (Blow(60, "kill one"),)
STORM = (
    Blow(9, "kill one"),
    Blow(20, "segfault"),
    Blow(34, "kill one"),
    Blow(48, "kill all"),
    Blow(60, "hang"),
    Blow(72, "kill one"),
    LEAK,
)


class Training:
    """A training in a process of its own, and what we do to it."""

    def __init__(
        self, run: Run, folder: Path, blows: Sequence[Blow], logbook: Path | None = None
    ) -> None:
        self.run = run
        self.blows = list(blows)
        self.dice = random.Random(2)  # which worker a blow hits
        self.pidfds: dict[int, int] = {}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        self.unread = b""
        self.heard: float | None = None  # when it last said something, once it was let train
        self.weighed = 0.0
        command = [sys.executable, str(TRAINING), run.loader, str(folder)]
        if logbook is not None:
            command += ["--logbook", str(logbook)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors
        )
        self.faults = folder / f"faults-{self.process.pid}"
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.orders, self.reports = self.process.stdin, self.process.stdout
        os.set_blocking(self.reports.fileno(), False)

    def train(self, *, more: bool = False) -> None:
        """Let it train; until now it has made its imports and waited. It ends when that is done,
        unless `more` is to come."""
        self.heard = time.monotonic()
        try:
            self.orders.write(b"train\n")
            self.orders.flush()
            if not more:
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
            self._weigh()
            while self.blows and self.run.batches >= self.blows[0].after:
                if not self._strike(self.blows[0].what):
                    break
                self.blows.pop(0)

    def mend(self) -> None:
        """No more leak."""
        (self.faults / "leak").unlink(missing_ok=True)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.reports, self.errors):
            file.close()
        try:
            self.orders.close()
        except BrokenPipeError:
            pass
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
        """A pidfd, unlike a pid, can never mean another process later."""
        before = self.pidfds.pop(worker, None)
        if before is not None:
            os.close(before)
        try:
            self.pidfds[worker] = os.pidfd_open(pid)
        except ProcessLookupError:
            pass

    def _strike(self, what: str) -> bool:
        """Do it; False if there is no worker to do it to just now."""
        if what in ("segfault", "hang", "leak"):
            (self.faults / what).touch()
            if what == "leak":
                self.run.leak(time.monotonic())
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

    def _weigh(self) -> None:
        """Read how much memory of its own each worker has."""
        now = time.monotonic()
        if now < self.weighed + WEIGHING:
            return
        self.weighed = now
        for number, worker in self.run.workers.items():
            try:
                lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue  # it is gone, or may not be looked at
            sizes = [line.split() for line in lines if line.startswith("Private_")]
            self.run.measured(number, sum(int(fields[1]) for fields in sizes) * 1024)

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


@dataclass(frozen=True)
class Runs:
    """All trainings of the demo."""

    reference: Run
    torch: Run
    again: Run
    holdfast: Run


def perform(runs: Runs, place: Path, logbook: Path) -> None:
    """The trainings, on the screen. `place` is for the pictures."""
    reference, torch, holdfast = runs.reference, runs.torch, runs.holdfast
    with choose_view(runs) as view, ExitStack() as processes:

        def prepare(run: Run, *blows: Blow, logbook: Path | None = None) -> Training:
            return processes.enter_context(closing(Training(run, place, blows, logbook)))

        everything = [undisturbed := prepare(reference, LEAK)]
        undisturbed.train()
        watch(everything, view, until=lambda: reference.batches > 0 or reference.died)
        # Their imports take a while, and the undisturbed run leaves the processor time for them.
        everything += [killed := prepare(torch, *ONE_KILL)]
        everything += [stormed := prepare(holdfast, *STORM, logbook=logbook)]
        watch(everything[:1], view, until=lambda: reference.through or reference.died)
        if not reference.through:
            return
        killed.train()
        stormed.train(more=True)
        watch(everything, view, until=lambda: torch.ended)
        everything += [restarted := prepare(runs.again)]
        watch(everything[:-1], view, until=lambda: holdfast.through or holdfast.died)
        stormed.mend()
        damage(place)
        restarted.train()
        stormed.train()
        watch(everything, view, until=lambda: all(one.run.ended for one in everything))


def damage(place: Path) -> None:
    """Cut one of the pictures in half, as a full disk or a broken copy leaves it."""
    (picture,) = (place / "pictures").glob(DAMAGED)
    os.truncate(picture, picture.stat().st_size // 2)


def surprises(runs: Runs) -> list[str]:
    """What did not go as promised."""
    reference, torch, again, holdfast = runs.reference, runs.torch, runs.again, runs.holdfast
    found = []
    if not reference.finished:
        found.append(f"the undisturbed run died: {reference.error}")
    if not torch.died:
        found.append("torch's run survived the death of its worker")
    elif "DataLoader worker" not in torch.error:
        found.append(f"torch's run died, but not of its worker's death: {torch.error}")
    if not again.died:
        found.append("torch's second run survived the damaged file")
    if not holdfast.finished:
        return [*found, f"holdfast's run died: {holdfast.error}"]
    if holdfast.final_loss != reference.final_loss:
        found.append("holdfast's loss is not that of the undisturbed run")
    elif holdfast.same_losses(reference) != TOTAL:
        found.append("holdfast's loss is the undisturbed one, but not all losses before it")
    kinds = {strike.kind for strike in holdfast.strikes}
    found += [
        f"no {kind} took place" for kind in ("SIGKILL", "segfault", "hang") if kind not in kinds
    ]
    for strike in holdfast.strikes:
        if strike.delay is None:
            found.append(f"the {strike.kind} of worker {strike.worker} was not made up for")
    if not holdfast.recycled:
        found.append("no worker was replaced for its size")
    if holdfast.bad is None:
        found.append("the damaged file was not found")
    elif holdfast.samples != BATCHES * BATCH_SIZE - 1:
        found.append(f"the damaged file cost {BATCHES * BATCH_SIZE - holdfast.samples} samples")
    return found


def make_report(logbook: Path, page: Path) -> list[str]:
    """What went wrong with it."""
    command = [sys.executable, "-m", "holdfast", "report", str(logbook), "-o", str(page)]
    made = subprocess.run(
        [*command, "--title", "make demo"], capture_output=True, text=True, timeout=PATIENCE
    )
    return [] if made.returncode == 0 else [f"there is no report: {made.stderr.strip()}"]


def what_grows(logbook: Path) -> str:
    """What holdfast said about the memory of workers."""
    try:
        lines = (logbook / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return ""
    events = [json.loads(line) for line in lines]
    said = (event["text"] for event in events if event["event"] == "growth")
    return next(said, "").partition(";")[0]


def conclude(runs: Runs, unexpected: Sequence[str]) -> int:
    """Print what came out; the exit status."""
    print()
    for line in summary(runs):
        print(render(line))
    print()
    if not unexpected:
        return 0
    print(" This is not what should have happened:")
    for surprise in unexpected:
        print(f" - {surprise}")
    for run in (runs.reference, runs.holdfast):
        if run.died and run.errors:
            print(f"\n {run.name} wrote at its end:\n")
            print(textwrap.indent("\n".join(run.errors.splitlines()[-20:]), "   "))
    return 1


def empty_folder() -> Path:
    """Where logbook and report go: build/demo, or a temporary folder if that cannot be written."""
    try:
        shutil.rmtree(OUT, ignore_errors=True)
        OUT.mkdir(parents=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    return OUT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw its end as an SVG")
    arguments = parser.parse_args()
    began = time.monotonic()
    runs = Runs(
        Run("undisturbed", "torch"),
        Run("torch", "torch", "One worker will be killed."),
        Run("torch again", "torch", "Started again; a file is damaged now."),
        Run(
            "holdfast",
            "holdfast",
            "Workers will be killed one by one and all at once. One will crash in a sample, one "
            "hang. Then the dataset leaks, and then a file is damaged.",
            total=TOTAL + BATCHES,
        ),
    )
    out = empty_folder()
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as place:
            perform(runs, Path(place), out / "logbook")
    except KeyboardInterrupt:
        return 130
    page = out / "report.html"
    runs.holdfast.growth = what_grows(out / "logbook")
    wrong = surprises(runs)
    wrong += make_report(out / "logbook", page) if runs.holdfast.began else []
    status = conclude(runs, wrong)
    print(f" All of this took {time.monotonic() - began:.0f} s.", end="")
    if page.exists():
        print(" A page about holdfast's run, to open in a browser:")
        print(f" {shown(page)}")
        print(f" made of the run's logbook: holdfast report {shown(out / 'logbook')}")
    else:
        print()
    if arguments.picture is not None:
        import demo_picture

        demo_picture.save(runs, arguments.picture)
    return status


def shown(path: Path) -> str:
    """As it can be typed here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


if __name__ == "__main__":
    sys.exit(main())
