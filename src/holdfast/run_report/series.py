"""The progress records of a run as curves, and what was measured of its samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from holdfast.autopsy.tally import BUCKETS, lower_bound
from holdfast.run_report.curves import Floats, Grid, number
from holdfast.run_report.logged_run import LoggedRun
from holdfast.run_report.record_values import Record, cut, list_of, loader_of

MOST_CURVES: Final = 256
STEPS: Final = {
    "fetch": ("fetch",),
    "collate": ("collate",),
    "send": ("send",),
    "idle": ("idle",),
    "start": ("boot", "start-up", "replay"),
}
"""What the page calls the steps of a worker, and the notes that belong to each."""


# -- progress ------------------------------------------------------------------------------


@dataclass
class Series:
    """The records of one pool, from its beginning on."""

    rank: int
    loader: str
    times: list[float]
    records: list[Record]

    @property
    def last(self) -> Record:
        return self.records[-1]

    @property
    def ended(self) -> bool:
        return self.last.get("ended") is True

    @property
    def batches(self) -> int:
        return max(0, int(self.last["batches"]))

    @property
    def samples(self) -> int:
        return max(0, int(self.last["samples"]))

    @property
    def workers(self) -> bool:
        """Whether it has any; older records do not say, and are of loaders that have."""
        return self.last.get("seats") != 0

    @property
    def approximate(self) -> bool:
        return self.last.get("approximate") is True

    @property
    def bytes(self) -> float:
        return number(self.last.get("bytes")) or 0.0

    @property
    def waited(self) -> float:
        return number(self.last["wait_seconds"]) or 0.0

    @property
    def elapsed(self) -> float:
        return number(self.last["elapsed"]) or 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Of all workers together, by step."""
        return {step: _spent(self.last, step) for step in STEPS}

    def counted(self, what: Callable[[Record], float]) -> list[float]:
        """A count at each of its times; it began with nothing."""
        return [0.0, *(what(one) for one in self.records)]

    @property
    def detailed(self) -> Record | None:
        """The last record with distributions."""
        return next((one for one in reversed(self.records) if "times" in one), None)


def _spent(record: Record, step: str) -> float:
    return sum(number(record["seconds"].get(note)) or 0.0 for note in STEPS[step])


def read_series(progress: Iterable[Record]) -> list[Series]:
    found: dict[tuple[int, str, float], list[Record]] = defaultdict(list)
    for record in progress:
        found[record["rank"], loader_of(record), float(record["series"])].append(record)
    made = []
    for (rank, loader, began), records in found.items():
        # A clock that was set back: a curve never goes back.
        records.sort(key=lambda one: float(one["elapsed"]))
        times = [float(one["time"]) for one in records]
        started = min(began, times[0]) if times[0] - began < 600 else times[0]
        made.append(Series(rank, loader, [started, *times], records))
    return made


def by_loader(series: Iterable[Series]) -> dict[tuple[int, str], list[Series]]:
    found: dict[tuple[int, str], list[Series]] = defaultdict(list)
    for one in series:
        found[one.rank, one.loader].append(one)
    return dict(sorted(found.items()))


@dataclass
class Flow:
    """Batches, waiting and the work of workers, of one loader of one rank, in each interval."""

    active: Floats
    samples: Floats
    batches: Floats
    waited: Floats
    steps: dict[str, Floats]

    @classmethod
    def of(cls, grid: Grid, series: Sequence[Series]) -> Flow:
        def gained(what: Callable[[Record], float]) -> Floats:
            gains = [grid.gained(one.times, one.counted(what)) for one in series]
            summed: Floats = np.array(gains).sum(axis=0)
            return summed

        def field(name: str) -> Callable[[Record], float]:
            return lambda record: number(record.get(name)) or 0.0

        def step(name: str) -> Callable[[Record], float]:
            return lambda record: _spent(record, name)

        return cls(
            active=gained(field("elapsed")),
            samples=gained(field("samples")),
            batches=gained(field("batches")),
            waited=gained(field("wait_seconds")),
            steps={name: gained(step(name)) for name in STEPS},
        )

    def curves(self, grid: Grid) -> dict[str, Any]:
        least = grid.width / 10  # too little to tell a rate
        busy = np.sum(list(self.steps.values()), axis=0)
        return {
            "samples": grid.ratio(self.samples, self.active, least),
            "batches": grid.ratio(self.batches, self.active, least),
            "waiting": grid.ratio(np.minimum(self.waited, self.active), self.active, least),
            "steps": {name: grid.ratio(one, busy, 0.001) for name, one in self.steps.items()},
            "seconds": {name: round(float(one.sum()), 3) for name, one in self.steps.items()},
            "active": round(float(self.active.sum()), 3),
            "waited": round(float(self.waited.sum()), 3),
        }


# -- memory --------------------------------------------------------------------------------


def memory_curves(grid: Grid, run: LoggedRun, series: Sequence[Series]) -> list[dict[str, Any]]:
    """For each rank: curves in bytes. What is of one loader is named with it if there are more."""
    several = len({one.loader for one in series}) > 1
    points: dict[int, dict[str, list[tuple[float, float | None]]]]
    points = defaultdict(lambda: defaultdict(list))
    for one in series:
        rank, prefix = points[one.rank], f"{one.loader}: " if several and one.loader else ""
        for record in one.records:
            at = float(record["time"])
            rank["trainer"].append((at, number(record.get("trainer_bytes"))))
            rank[f"{prefix}shared memory"].append((at, number(record.get("shared_bytes"))))
            for worker, size in sorted(record["workers"].items()):
                rank[f"{prefix}worker {worker}"].append((at, number(size)))
    measured = {(one.rank, one.loader) for one in series}
    totals = {one["rank"]: _machine_total(one) for one in run.runs}
    for record in run.memory:
        at, rank = float(record["time"]), points[record["rank"]]
        rank["trainer"].append((at, number(record.get("trainer_bytes"))))
        used, limit = number(record.get("usage")), number(record.get("limit"))
        whole, available = totals.get(record["rank"]), number(record.get("available"))
        if limit is None and whole is not None and available is not None:
            used, limit = whole - available, whole
        rank["in use"].append((at, used))
        rank["limit"].append((at, limit))
        if (record["rank"], loader_of(record)) not in measured:  # an older logbook
            for worker, size in sorted((record.get("workers") or {}).items()):
                rank[f"worker {worker}"].append((at, number(size)))
    found = []
    for rank_number, curves in sorted(points.items()):
        known = [(name, points) for name, points in curves.items() if any(v for _, v in points)]
        known.sort(key=lambda curve: _order(curve[0]))
        found.append(
            {
                "rank": rank_number,
                "curves": [
                    {"name": name, "values": grid.highest(values)}
                    for name, values in known[:MOST_CURVES]
                ],
            }
        )
    return [one for one in found if one["curves"]]


_KINDS: Final = ("limit", "in use", "trainer", "shared memory", "worker")


def _order(name: str) -> tuple[int, str, int]:
    """The limit first, and workers by their numbers."""
    loader, _, what = name.rpartition(": ")
    kind = next((at for at, kind in enumerate(_KINDS) if what.startswith(kind)), len(_KINDS))
    digits = "".join(filter(str.isdecimal, what))
    return kind, loader, int(digits[:9] or 0)


def _machine_total(run: Record) -> float | None:
    machine = run.get("machine")
    memory = machine.get("memory") if isinstance(machine, dict) else None
    return number(memory.get("total")) if isinstance(memory, dict) else None


# -- samples -------------------------------------------------------------------------------


def distributions(series: Sequence[Series]) -> dict[str, Any]:
    detailed = [one.detailed for one in series]
    records = [one for one in detailed if one is not None]
    return {
        "measured": sum(sum(_counts(one.get("times"))) for one in records),
        "times": _histogram([_counts(one.get("times")) for one in records], "seconds"),
        "sizes": _histogram([_counts(one.get("sizes")) for one in records], "bytes"),
        "slowest": _top(one.get("slowest") for one in records),
        "largest": _top(one.get("largest") for one in records),
    }


def _counts(sparse: Any) -> list[int]:
    found = [0] * BUCKETS
    for bucket, count in sparse.items() if isinstance(sparse, dict) else ():
        if str(bucket).isdecimal() and int(bucket) < BUCKETS and isinstance(count, int):
            found[int(bucket)] += max(0, count)
    return found


def _histogram(counts: Sequence[Sequence[int]], unit: str) -> dict[str, Any] | None:
    """Lower bounds and counts, from the first to the last bucket that is not empty."""
    sums = [sum(bucket) for bucket in zip(*counts, strict=True)]
    filled = [bucket for bucket, count in enumerate(sums) if count]
    if not filled:
        return None
    span = range(max(0, filled[0] - 1), min(BUCKETS, filled[-1] + 2))
    return {
        "from": [float(f"{lower_bound(bucket, unit):.4g}") for bucket in (*span, span.stop)],
        "counts": [sums[bucket] for bucket in span],
        "median": _middle(sums, unit),
    }


def _middle(sums: Sequence[int], unit: str) -> float:
    """The median, to within the width of a bucket."""
    half, so_far = sum(sums) / 2, 0
    for bucket, count in enumerate(sums):
        so_far += count
        if so_far >= half:
            low, high = lower_bound(bucket, unit), lower_bound(bucket + 1, unit)
            return float(f"{low + (high - low) * (1 - (so_far - half) / count):.2g}")
    return 0.0


def _top(lists: Iterable[Any]) -> list[dict[str, Any]]:
    best: dict[tuple[str, str], float] = {}
    for entries in lists:
        for entry in list_of(entries):
            if not (isinstance(entry, list) and len(entry) == 3):
                continue
            value, key, name = entry
            known, sample = number(value), (cut(key), cut(name or ""))
            if known is not None:
                best[sample] = max(known, best.get(sample, 0.0))
    ranked = sorted(best.items(), key=lambda one: -one[1])[:8]
    return [{"value": value, "key": key, "name": name} for (key, name), value in ranked]
