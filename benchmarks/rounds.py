"""Measurements in turns: all loaders, one after the other, then all again.

The machine's mood changes by the minute (frequency, neighbours, caches). So loaders are compared
within a round, never across runs, and every round starts with another one. Each measurement runs
in a session of its own, which is emptied afterwards whatever the loader left behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.loaders import LOADERS

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 120.0
MEMORY_FILES = ("/dev/shm/", "/memfd:")
SAMPLING = 0.1  # seconds between two looks at the memory of the tree


@dataclass(frozen=True)
class Record:
    round: int
    kind: str
    workload: str
    loader: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    workloads: Sequence[str]
    loaders: Sequence[str]
    repeat: int
    seconds: float

    def __iter__(self) -> Iterator[tuple[int, str, str, str]]:
        """Round, kind, workload, loader: in the order in which they are measured."""
        for turn in range(self.repeat):
            for workload in self.workloads:
                yield turn, "ceiling", workload, "torch"
                for kind in ("speed", "memory"):
                    for loader in rotated(self.loaders, turn):
                        yield turn, kind, workload, loader
                if "holdfast" in self.loaders:
                    yield turn, "recovery", workload, "holdfast"


def run(plan: Plan) -> Iterator[Record]:
    for turn, kind, workload, loader in plan:
        values = measure(kind, workload, loader, plan.seconds)
        yield Record(turn, kind, workload, loader, values)


def measure(kind: str, workload: str, loader: str, seconds: float) -> dict[str, Any]:
    """The values of one measurement, or `{"failed": why}`."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "values.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.measure", kind, workload, loader]
        with log.open("wb") as noise:
            process = subprocess.Popen(
                [*command, "--seconds", str(seconds), "--out", str(out)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=noise,
                stderr=noise,
                start_new_session=True,
            )
        try:
            peaks = wait(process, look=kind == "memory")
        finally:
            clear_session(process)
        if out.exists():
            values: dict[str, Any] = json.loads(out.read_text())
            return values | peaks
        said = log.read_text(errors="replace").splitlines()
        errors = [
            line for line in said if re.match(r"[\w.]+(Error|Exception|Lost|Exceeded)\b", line)
        ]
        return {"failed": (errors or said or [f"exit code {process.returncode}"])[-1]}


def wait(process: subprocess.Popen[bytes], *, look: bool) -> dict[str, float]:
    """Wait for the end; if asked to look, the largest memory of the tree seen meanwhile."""
    deadline = time.monotonic() + PATIENCE
    mapped = held = 0
    while time.monotonic() < deadline:
        try:
            process.wait(SAMPLING)
            break
        except subprocess.TimeoutExpired:
            if look:
                pids = tree(process.pid)
                now = sum(map(pss, pids))
                mapped, held = max(mapped, now), max(held, now + unmapped_shared_memory(pids))
    return {"peak_pss_mb": mapped / 1e6, "peak_held_mb": held / 1e6} if look else {}


def tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def pss(pid: int) -> int:
    """Proportional set size in bytes: a page shared by n processes counts as 1/n in each."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:  # gone, or just going
        pass
    return 0


def unmapped_shared_memory(pids: Iterable[int]) -> int:
    """Bytes of memory files that one of these holds open and none has mapped: batches on
    their way, which are in no process's PSS."""
    open_files: dict[int, int] = {}
    mapped: set[int] = set()
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(MEMORY_FILES):
                    mapped.add(int(fields[4]))
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(fd).startswith(MEMORY_FILES):
                    status = fd.stat()
                    open_files[status.st_ino] = status.st_blocks * 512
        except OSError:
            pass
    return sum(size for inode, size in open_files.items() if inode not in mapped)


def clear_session(process: subprocess.Popen[bytes]) -> None:
    """First politely, so that Python's resource tracker can unlink what others left in /dev/shm."""
    for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0)):
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                return
            process.poll()
            time.sleep(0.05)


def rotated(loaders: Sequence[str], turn: int) -> list[str]:
    start = turn % len(loaders)
    return [*loaders[start:], *loaders[:start]]


def absent(names: Sequence[str]) -> list[str]:
    return [name for name in names if not LOADERS[name].present]
