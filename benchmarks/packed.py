"""Packed containers beside lists and dicts: memory, access, and what workers grow by.

    python -m benchmarks.packed                        # prints the table
    python -m benchmarks.packed --write docs/memory.md # and puts it between the marks in that page

Access is in shuffled order, as a shuffling loader asks for samples. Growth is that of the private
memory of real workers of holdfast over one pass, from ``smaps_rollup``.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.page import put
from holdfast import DataLoader, PackedDict, PackedList


def paths(count: int) -> Any:
    return [f"/data/images/train/{number:09d}.jpg" for number in range(count)]


def pairs(count: int) -> Any:
    return [(path, number % 1000) for number, path in enumerate(paths(count))]


def records(count: int) -> Any:
    return [
        {"image_id": number, "category": f"class {number % 80}", "bbox": [number + 0.5, 2.0, 3.0]}
        for number in range(count)
    ]


def numbers(count: int) -> Any:
    return [number * 7 for number in range(count)]


def tokens(count: int) -> Any:
    return [[(number * 31 + at) % 50_000 for at in range(20)] for number in range(count // 4)]


def captions(count: int) -> Any:
    return {path: f"caption number {number}" for number, path in enumerate(paths(count))}


CASES: dict[str, Callable[[int], Any]] = {
    "paths (`str`)": paths,
    "`(path, label)`": pairs,
    "records (`dict`)": records,
    "`int`": numbers,
    "token lists": tokens,
    "`dict` path → caption": captions,
}


class Reader:
    """A dataset that reads one entry of a container and says how long that is."""

    def __init__(self, container: Any, keys: list[Any]) -> None:
        self.container = container
        self.keys = PackedList(keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> int:
        self.container[self.keys[index]]
        return 1


def private(_: list[int]) -> torch.Tensor:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return torch.tensor(sum(map(int, re.findall(r"Private_\w+:\s+(\d+) kB", rollup))) << 10)


def growth(container: Any, keys: list[Any], method: str) -> int:
    """Bytes by which the private memory of the worker that grows most grows in one pass."""
    loader = DataLoader(
        Reader(container, keys),  # type: ignore[arg-type]
        batch_size=max(1, len(keys) // 20),
        num_workers=1,
        multiprocessing_context=method,
        collate_fn=private,
    )
    seen = [int(figure) for figure in loader]
    return max(seen) - seen[0]


def size(value: Any, seen: set[int]) -> int:
    """Bytes of everything in it, each object once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    own = sys.getsizeof(value)
    if isinstance(value, dict):
        return own + sum(size(part, seen) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return own + sum(size(part, seen) for part in value)
    return own


def access(container: Any, keys: list[Any]) -> float:
    """Nanoseconds for one entry, median of five passes."""
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        for key in keys:
            container[key]
        times.append((time.perf_counter() - begun) / len(keys) * 1e9)
    return statistics.median(times)


def measure(name: str, count: int) -> str:
    plain = CASES[name](count)
    begun = time.perf_counter()
    packed: Any = PackedDict(plain) if isinstance(plain, dict) else PackedList(plain)
    built = time.perf_counter() - begun
    keys = list(plain) if isinstance(plain, dict) else list(range(len(plain)))
    some = random.Random(1).sample(keys, min(len(keys), 200_000))
    before, after = size(plain, set()), packed.nbytes
    slow, quick = access(packed, some), access(plain, some)
    grown = [growth(container, keys, "fork") for container in (plain, packed)]
    return (
        f"| {name} | {len(plain):,} | {mib(before)} | {mib(after)} | {quick:.0f} ns "
        f"| {slow:.0f} ns ({slow / quick:.1f}×) | {mib(grown[0])} | {mib(grown[1])} "
        f"| {built:.1f} s |"
    )


def mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=500_000)
    parser.add_argument("--write", type=Path, help="a page with the marks of the table in it")
    chosen = parser.parse_args()
    lines = [
        "| what | entries | plain, MiB | packed, MiB | plain access | packed access "
        "| worker grows, plain, MiB | packed, MiB | packing takes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in CASES:
        lines.append(measure(name, chosen.count))
        print(lines[-1], flush=True)
    nothing = growth(range(chosen.count), list(range(chosen.count)), "fork")
    lines += [
        "",
        "A worker whose dataset reads nothing but numbers from a `range` grows by "
        f"{mib(nothing)} MiB in the same pass: that much is not the container's.",
    ]
    lines += ["", f"Python {sys.version.split()[0]}, `python -m benchmarks.packed`."]
    if chosen.write:
        put(chosen.write, "figures", "\n".join(lines))


if __name__ == "__main__":
    main()
