"""Why "auto" takes the shares it takes: runs with other shares, on machines of two sizes.

    python -m benchmarks.shares --write docs/memory-limits.md

A machine is a control group with so much room beyond what the trainer needs at rest. There are
three questions:

- batches in flight (`shares.IN_FLIGHT`): samples of a hundredth of the room, prefetched as far as
  the budget lets them. How full does the machine get, and does it cost time?
- workers that leak (`shares.WORKERS`): how full does it get, and how often are they replaced?
- both at once, with our shares: each of them reckons with what the other has left free.

What must not happen is a kill; what should not happen is that the machine is full, because the
trainer grows too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import holdfast
from benchmarks.page import put
from holdfast.limits import shares as ours
from tests.shortage.runs import rest, run
from tests.support.groups import MemoryGroup, memory_group

MIB = 1 << 20
MACHINES = (256 * MIB, 1024 * MIB)  # of room
SHARES = {
    "in flight": (0.15, 0.25, 0.4),
    "workers": (0.25, 0.4, 0.7),
    "both": (ours.IN_FLIGHT,),
}
WORKERS = 2
_kept: list[Any] = []


class Samples(Dataset[Any]):
    """As large as is asked for; and as much is left behind."""

    def __init__(self, nbytes: int, leaks: int) -> None:
        self.nbytes, self.leaks = nbytes, leaks

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.leaks:
            _kept.append(np.ones(self.leaks, np.uint8))
        return torch.full((self.nbytes,), index % 251, dtype=torch.uint8)


@dataclass(frozen=True)
class Outcome:
    what: str
    room: int
    share: float
    full: float | None  # the part of the room that was in use at the most
    kills: int
    replaced: int | None  # None if the run was lost: no process is left to tell
    seconds: float | None


def measure(what: str, room: int, share: float) -> Outcome:
    base = rest("Leaking")
    with memory_group(base + room) as group:
        place = [str(group.path), str(group.version)]
        command = ["-m", "benchmarks.shares", "--one", what, str(room), str(share), *place]
        done = run(command, group)
    if done.returncode:
        return Outcome(what, room, share, None, done.kills, None, None)
    told = json.loads(done.stdout)
    full = (told["used"] - base) / room
    return Outcome(what, room, share, full, done.kills, told["recycled"], told["seconds"])


def train(what: str, room: int, share: float, group: MemoryGroup) -> dict[str, Any]:
    """In the group: with that share in place of ours."""
    if what == "in flight":
        ours.IN_FLIGHT = share  # type: ignore[misc]
        dataset = Samples(room // 100, 0)
    elif what == "both":
        dataset = Samples(room // 100, room // 100)
    else:
        ours.WORKERS = share  # type: ignore[misc]
        dataset = Samples(1000, room // 100)
    loader = holdfast.DataLoader(dataset, batch_size=4, num_workers=WORKERS, prefetch_factor=16)
    most, began = 0, time.perf_counter()
    for _ in loader:
        time.sleep(0.01)  # a step
        most = max(most, group.used())
    seconds = time.perf_counter() - began
    return {"used": most, "seconds": seconds, "recycled": loader.stats()["recycled"]}


def table(found: Sequence[Outcome]) -> str:
    chosen = {"in flight": ours.IN_FLIGHT, "workers": ours.WORKERS}
    both = f"{ours.IN_FLIGHT:.0%}, {ours.WORKERS:.0%}"
    lines = [
        "| share for | room | share | most in use | kills | replaced | seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found:
        share = both if one.what == "both" else f"{one.share:.0%}"
        if chosen.get(one.what, one.share) == one.share:
            share = f"**{share}**"
        cells = [one.what, f"{one.room >> 20} MiB", share]
        cells.append("lost" if one.full is None else f"{one.full:.0%}")
        cells.append(str(one.kills))
        cells.append("–" if one.replaced is None else str(one.replaced))
        cells.append("–" if one.seconds is None else f"{one.seconds:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shares", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        what, room, share, path, version = asked.one
        group = MemoryGroup(Path(path), int(version))
        print(json.dumps(train(what, int(room), float(share), group)))
        return
    found = []
    for what, shares in SHARES.items():
        for room in MACHINES:
            for share in shares:
                found.append(measure(what, room, share))
                print(found[-1], flush=True)
    if asked.write is not None:
        put(asked.write, "shares", table(found))


if __name__ == "__main__":
    main()
