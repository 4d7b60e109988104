"""Garbage: what reference cycles that hold big arrays cost, and what collecting them costs.

    python -m benchmarks.garbage                              # prints the table
    python -m benchmarks.garbage --write docs/memory-limits.md  # and puts it into that page

Python counts objects, not bytes: a cycle that holds an array of 20 MB is one object, and some
hundred of them must pile up before it collects. Three ways are compared: torch as it is; torch
with ``gc.collect()`` in ``__getitem__``, the usual advice; and holdfast, whose workers collect what
is young when they have grown by so many bytes. Each on a dataset that makes such cycles and on one
that makes the same arrays without: there all collecting is in vain, and only its price is seen.

Each measurement is a process of its own. Time is taken in one pass, memory in another, because
reading it takes time too.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.utils.data

import holdfast
from benchmarks.loaders import WORKERS
from benchmarks.page import put
from benchmarks.report import number
from benchmarks.rounds import ROOT, clear_session, wait

MIB = 1 << 20
COMMAND = (sys.executable, "-m", "benchmarks.garbage")


class Arrays(torch.utils.data.Dataset[Any]):
    """Samples of 5 to 20 MB; what is delivered is small, so that only garbage can pile up."""

    collects = False

    def __init__(self, samples: int, cycles: bool) -> None:
        self.samples, self.cycles = samples, cycles

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.collects:
            gc.collect()
        array = np.ones((5 + index * 7 % 16) * MIB, np.uint8)
        if self.cycles:
            holder: dict[str, Any] = {"array": array}
            holder["itself"] = holder
        return torch.tensor(int(array[::4096].sum()) + index)


class Collecting(Arrays):
    collects = True


WAYS: dict[str, tuple[Any, type[Arrays]]] = {
    "torch": (torch.utils.data.DataLoader, Arrays),
    "torch, `gc.collect()` for each sample": (torch.utils.data.DataLoader, Collecting),
    "holdfast": (holdfast.DataLoader, Arrays),
}
DATA = {"cycles that hold arrays": True, "the same arrays, no cycles": False}


@dataclass(frozen=True)
class Measured:
    data: str
    way: str
    samples_per_s: float
    peak_mb: float


def load(way: str, cycles: bool, samples: int) -> float:
    """Samples per second over all but the first batches, in this process."""
    loader_class, dataset = WAYS[way]
    batches = iter(loader_class(dataset(samples, cycles), batch_size=4, num_workers=WORKERS))
    for _ in range(WORKERS):
        next(batches)
    began = time.perf_counter()
    count = sum(len(batch) for batch in batches)
    return count / (time.perf_counter() - began)


def measure(way: str, data: str, samples: int, rounds: int) -> Measured:
    rates = [_in_a_process(way, data, samples, look=False)["samples_per_s"] for _ in range(rounds)]
    peak = _in_a_process(way, data, samples, look=True)["peak_held_mb"]
    return Measured(data, way, median(rates), peak)


def _in_a_process(way: str, data: str, samples: int, *, look: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rate")
        process = subprocess.Popen(
            [*COMMAND, "--samples", str(samples), "--one", way, data, str(out)],
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            peaks = wait(process, look=look)
        finally:
            clear_session(process)
        if process.poll() != 0:
            raise RuntimeError(
                f"{way}, {data}: the run ended with exit code {process.returncode} and is not "
                "measured; what it said stands above"
            )
        return {"samples_per_s": float(out.read_text()), **peaks}


def table(found: Sequence[Measured]) -> str:
    """For the docs."""
    lines = [
        "| samples | loader | peak memory | samples/s | × torch |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for one in found:
        stock = next(base for base in found if base.data == one.data and base.way == "torch")
        rate = one.samples_per_s / stock.samples_per_s
        lines.append(
            f"| {one.data} | {one.way} | {number(one.peak_mb)} MB | {number(one.samples_per_s)} "
            f"| {rate:.2g} |"
        )
    return "\n".join(lines)


def run(samples: int, rounds: int, json_path: Path | None) -> list[Measured]:
    """Measure all; print and write each as it is known."""
    found: list[Measured] = []
    print(f"\ngarbage: {samples} samples of 5 to 20 MB, {WORKERS} workers")
    for data in DATA:
        for way in WAYS:
            one = measure(way, data, samples, rounds)
            found.append(one)
            if json_path is not None:
                json_path.parent.mkdir(parents=True, exist_ok=True)
                json_path.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
            cells = [f"{number(one.peak_mb)} MB", f"{number(one.samples_per_s)} samples/s"]
            widths = [f"{data:<28}", f"{way:<39}", *(f"{cell:>16}" for cell in cells)]
            print("".join(widths), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.garbage", description=__doc__)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3, help="for the rates: their median")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "DATA", "OUT"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        way, data, out = asked.one
        Path(out).write_text(str(load(way, DATA[data], asked.samples)))
        return
    told = table(run(asked.samples, asked.rounds, asked.json))
    if asked.write is not None:
        put(asked.write, "garbage", told)


if __name__ == "__main__":
    main()
