"""What each loader does when something breaks: ``python -m benchmarks.faults``.

One fault in one worker, in a process of its own, with a deadline: the worker is killed in a sample,
a sample raises, a sample hangs, or the trainer itself is killed. What came of it is printed as it
was seen. `--write docs/comparison.md` puts the table into that page.

Loaders are started as `benchmarks.loaders` starts them; holdfast and torch's loaders also with the
option that each of them has for the fault, which the table names.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.loaders import LOADERS, torch_like
from benchmarks.page import put
from benchmarks.rounds import ROOT, clear_session
from benchmarks.workloads import Batch, Samples, Workload

NAMES = {
    "holdfast": "holdfast",
    "torch": "torch",
    "stateful": "StatefulDataLoader",
    "nodes": "torchdata.nodes",
    "spdl": "SPDL",
    "grain": "Grain",
}
PATIENCE = 30.0  # seconds without a batch
GONE = 10.0  # seconds after the trainer's death
BATCHES, BATCH_SIZE, STRUCK = 30, 8, 100  # the sample in which it happens: batch 12
FAULTS = {
    "killed": "a worker is killed (SIGKILL)",
    "raises": "a sample raises an exception",
    "hangs": "a sample hangs",
    "trainer": "the trainer is killed (SIGKILL)",
}
OPTIONS = {  # what a loader has for a fault
    ("holdfast", "raises"): {"on_bad_sample": "skip"},
    ("holdfast", "hangs"): {"stall_timeout": 3},
    ("torch", "hangs"): {"timeout": 3},
    ("stateful", "hangs"): {"timeout": 3},
}


class Breaking(Samples):
    """One of its samples breaks something; all but an exception, once."""

    def __init__(self, fault: str, token: Path) -> None:
        super().__init__(torch.arange(1.0, 4097.0)[:, None], BATCH_SIZE, lambda item: item)
        self.fault, self.token, self.trainer = fault, token, os.getpid()

    def __getitem__(self, index: int) -> Any:
        if index == STRUCK and os.getpid() != self.trainer:
            if self.fault == "raises":
                raise OSError("image file is truncated")
            if not self.token.exists():
                self.token.touch()
                if self.fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.fault == "hangs":
                    time.sleep(1000)
        return super().__getitem__(index)


def start(name: str, workload: Workload, fault: str) -> Iterable[Batch]:
    options = OPTIONS.get((name, fault))
    if options is None:
        return LOADERS[name].start(workload)
    return torch_like(functools.partial(_classes()[name], **options), workload)


def _classes() -> dict[str, Callable[..., Iterable[Batch]]]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    import holdfast

    stock = torch.utils.data.DataLoader
    return {"holdfast": holdfast.DataLoader, "torch": stock, "stateful": StatefulDataLoader}


def suffer(name: str, fault: str, token: Path) -> None:
    """In the process that is measured: a line for each batch, and one at the end."""
    dataset = Breaking(fault, token)
    workload = Workload("faults", "", BATCH_SIZE, lambda size: dataset)
    right = 0
    for number, batch in enumerate(start(name, workload, fault)):
        begin = number * BATCH_SIZE
        whole = (torch.arange(begin, begin + BATCH_SIZE) % 4096 + 1.0)[:, None]
        kept = whole[whole[:, 0] != STRUCK + 1.0] if fault == "raises" else whole
        right += any(torch.equal(batch, wanted) for wanted in (whole, kept))
        print("batch", flush=True)
        if fault == "trainer" and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if number + 1 == BATCHES:
            print(f"right {right}", flush=True)
            os._exit(0)


def outcome(name: str, fault: str) -> str:
    """What was seen."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        command = [sys.executable, "-m", "benchmarks.faults", "--one", name, fault, folder]
        with out.open("wb") as said:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=said, stderr=subprocess.DEVNULL, start_new_session=True
            )
        try:
            heard, size = time.monotonic(), -1
            while process.poll() is None and time.monotonic() < heard + PATIENCE:
                time.sleep(0.1)
                if out.stat().st_size != size:
                    heard, size = time.monotonic(), out.stat().st_size
            if fault == "trainer":
                return survivors(process.pid)
            lines = out.read_text().splitlines()
            if process.returncode is None:
                return f"hangs: no batch for {PATIENCE:.0f} s"
            if lines and lines[-1] == f"right {BATCHES}":
                return "goes on" + (", without the sample" if fault == "raises" else "")
            if lines and lines[-1].startswith("right"):
                return f"goes on with other batches ({lines[-1]} of {BATCHES})"
            return f"ends: `{lines[-1].removeprefix('raised ')}`" if lines else "ends"
        finally:
            clear_session(process)


def survivors(session: int) -> str:
    """Processes of the session that are there a while after the trainer's death."""
    time.sleep(GONE)
    left = [
        process
        for process in psutil.process_iter()
        if _session(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    ]
    return f"{len(left)} processes left after {GONE:.0f} s" if left else "none left"


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def table(seen: dict[tuple[str, str], str]) -> str:
    names = [name for name in NAMES if LOADERS[name].present]
    versions = ", ".join(f"{NAMES[name]} {LOADERS[name].version}" for name in names)
    lines = [f"| | {' | '.join(FAULTS.values())} |", f"| --- |{' --- |' * len(FAULTS)}"]
    for name in names:
        cells = []
        for fault in FAULTS:
            option = OPTIONS.get((name, fault), {})
            shown = ", ".join(f"`{key}={value!r}`" for key, value in option.items())
            cells.append(seen[name, fault] + (f" ({shown})" if shown else ""))
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Versions: {versions}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--one", nargs=3, metavar=("LOADER", "FAULT", "FOLDER"))
    parser.add_argument("--write", type=Path, metavar="PAGE")
    asked = parser.parse_args()
    if asked.one:
        name, fault, folder = asked.one
        try:
            suffer(name, fault, Path(folder, "done"))
        except Exception as error:
            print(f"raised {type(error).__name__}", flush=True)
            os._exit(1)
    seen = {}
    for fault in FAULTS:
        for name in (name for name in NAMES if LOADERS[name].present):
            seen[name, fault] = outcome(name, fault)
            print(f"{FAULTS[fault]:<34} {NAMES[name]:<20} {seen[name, fault]}", flush=True)
    if asked.write is not None:
        put(asked.write, "faults", table(seen))


if __name__ == "__main__":
    main()
