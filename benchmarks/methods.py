"""Worker threads beside worker processes, and beside the threads of other loaders.

`python -m benchmarks.methods --write docs/worker-methods.md` puts the table into that page. It is a
part of `make bench`, which writes it to `benchmarks/results/methods.md`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.page import put
from benchmarks.rounds import absent, measure, rotated

WORKLOADS = ("tiny", "tokens", "jpeg", "image")
LOADERS = {
    "holdfast threads": "holdfast, threads",
    "holdfast": "holdfast, processes",
    "nodes threads": "torchdata.nodes, threads",
    "spdl threads": "SPDL, threads",
    "holdfast threads ahead": "holdfast, threads, without `prefetch_factor`",
    "holdfast ahead": "holdfast, processes, without `prefetch_factor`",
}
ONE_PROCESS = "one process without workers"


def rates(workload: str, loaders: list[str], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Batches per second of each loader, and of a loop that only fetches and collates; a value for
    each round."""
    found: dict[str, list[float]] = {name: [] for name in (*loaders, ONE_PROCESS)}
    for turn in range(rounds):
        plain = measure("ceiling", workload, "torch", seconds)
        found[ONE_PROCESS].append(plain["batches_per_s"] / 2)
        for loader in rotated(loaders, turn):
            values = measure("speed", workload, loader, seconds)
            if "failed" in values:
                raise RuntimeError(f"{loader}, {workload}: {values['failed']}")
            found[loader].append(values["batches_per_s"])
    return found


def table(rounds: int, seconds: float) -> str:
    loaders = [name for name in LOADERS if name not in absent(list(LOADERS))]
    columns = {one: rates(one, loaders, rounds, seconds) for one in WORKLOADS}
    lines = [
        f"| batches/s, of holdfast's processes in the same round; medians of {rounds} rounds | "
        + " | ".join(f"*{one}*" for one in WORKLOADS) + " |",
        "| --- |" + " ---: |" * len(WORKLOADS),
    ]  # fmt: skip
    for name in (*loaders, ONE_PROCESS):
        cells = [f"{_ratio(columns[one][name], columns[one]['holdfast']):.2f}" for one in WORKLOADS]
        lines.append(f"| {LOADERS.get(name, name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio(those: list[float], processes: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(those, processes, strict=True))


def run(rounds: int, seconds: float, path: Path) -> None:
    told = table(rounds, seconds)
    path.write_text(told + "\n", encoding="utf-8")
    print(told)
    print(f"\nwritten: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a measurement")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page")
    asked = parser.parse_args()
    told = table(asked.rounds, asked.seconds)
    print(told)
    if asked.write is not None:
        put(asked.write, "methods", told)


if __name__ == "__main__":
    main()
