"""What a page shows of a run, from the records of its logbook: pure.

Nothing here is HTML. The page gets plain values and shows every text of them as text. A logbook may
be of any length and origin, so a record with a value of the wrong type is shown without that value,
and what the page holds is bounded.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from holdfast.autopsy.catalogue import CATALOGUE
from holdfast.autopsy.logbook import KINDS, LoggedRun
from holdfast.autopsy.tally import BUCKETS, lower_bound
from holdfast.run_report.bottleneck import Bottleneck, find_bottleneck
from holdfast.run_report.curves import Floats, Grid, number, total

__all__ = ["tell"]

Record = dict[str, Any]
WRITING: Final = 30.0  # seconds without a record after which a run is not being written any more
MOST_INCIDENTS: Final = 1000
MOST_BAD: Final = 5000
MOST_EVENTS: Final = 300
MOST_TUNINGS: Final = 5
MOST_CURVES: Final = 256
TEXT_BYTES: Final = 1_500_000  # of incidents, and of bad samples
LONGEST: Final = 8000  # characters of one text,
SHORT: Final = 300  # or if there are too many
YEARS: Final = (1e9, 1e10)  # from 2001 on; other times are not those of a run
STEPS: Final = {
    "fetch": ("fetch",),
    "collate": ("collate",),
    "send": ("send",),
    "idle": ("idle",),
    "start": ("boot", "start-up", "replay"),
}
"""What the page calls the steps of a worker, and the notes that belong to each."""


def tell(run: LoggedRun, title: str, now: float) -> dict[str, Any]:
    """Everything that the page shows."""
    run = _dated(run)
    series = _series(run.progress)
    curves = _count_curves(run, series)
    times = sorted(_moments(run, series))
    grid = Grid(times, curves)
    groups = _groups(series)
    flows = {key: _Flow.of(grid, found) for key, found in groups.items()}
    waiting = sum(one.waited for one in series)
    active = sum(one.elapsed for one in series)
    seconds = total(one.seconds for one in series)
    batches = sum(one.batches for one in series)
    workers = any(one.workers for one in series)
    bottleneck = find_bottleneck(active, waiting, batches, seconds, workers=workers)
    incidents, left_out = _incidents(run.incidents)
    bad = _bad_samples(run.bad_samples)
    return {
        "title": title,
        "made": now,
        "began": times[0] if times else None,
        "last": times[-1] if times else None,
        "state": _state(series, now),
        "several": {
            "ranks": sorted({one["rank"] for one in _all(run)}),
            "loaders": sorted({_loader(one) for one in [*run.progress, *run.loaders]} - {""}),
        },
        "headline": {
            "batches": batches,
            "samples": sum(one.samples for one in series),
            "approximate": any(one.approximate for one in series),
            "bytes": sum(one.bytes for one in series),
            "seconds": times[-1] - times[0] if times else 0.0,
            "active": active,
            "waited": waiting,
            "deaths": _deaths(run.incidents),
            "gave_up": sum("gave up" in str(one.get("action")) for one in run.incidents),
            "inexact": sum(one.get("exact") is False for one in run.incidents),
            "lost": _lost(run.bad_samples),
            "bad": len(run.bad_samples),
            "leaks": len(run.leaks),
            "recorded": bool(series),
        },
        "bottleneck": _plainly(bottleneck),
        "times": grid.times,
        "width": grid.width,
        "memory": _memory(grid, run, series),
        "flows": [
            {
                "rank": rank,
                "loader": loader,
                "workers": any(one.workers for one in groups[rank, loader]),
            }
            | flow.curves(grid)
            for (rank, loader), flow in flows.items()
        ],
        "distributions": [
            {"rank": rank, "loader": loader, **_distributions(found)}
            for (rank, loader), found in groups.items()
        ],
        "incidents": incidents,
        "left_out": left_out,
        "causes": _causes(run.incidents),
        "bad": bad,
        "bad_left_out": len(run.bad_samples) - len(bad),
        "leaks": [_texts(one, ("time", "rank", "loader", "text")) for one in run.leaks[:50]],
        "events": _events(run.events),
        "loaders": _loaders(run),
        "tuning": [_tuning(one) for one in run.tuning[-MOST_TUNINGS:]],
        "damaged": run.damaged,
    }


def _dated(run: LoggedRun) -> LoggedRun:
    """Without records whose time cannot be that of a run."""
    kinds = ("runs", *KINDS)
    kept = {
        kind: [one for one in getattr(run, kind) if YEARS[0] < one["time"] < YEARS[1]]
        for kind in kinds
    }
    dropped = sum(len(getattr(run, kind)) - len(kept[kind]) for kind in kinds)
    return replace(run, damaged=run.damaged + dropped, **kept)


# -- progress ------------------------------------------------------------------------------


@dataclass
class _Series:
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


def _series(progress: Iterable[Record]) -> list[_Series]:
    found: dict[tuple[int, str, float], list[Record]] = defaultdict(list)
    for record in progress:
        found[record["rank"], _loader(record), float(record["series"])].append(record)
    made = []
    for (rank, loader, began), records in found.items():
        # A clock that was set back: a curve never goes back.
        records.sort(key=lambda one: float(one["elapsed"]))
        times = [float(one["time"]) for one in records]
        started = min(began, times[0]) if times[0] - began < 600 else times[0]
        made.append(_Series(rank, loader, [started, *times], records))
    return made


def _groups(series: Iterable[_Series]) -> dict[tuple[int, str], list[_Series]]:
    found: dict[tuple[int, str], list[_Series]] = defaultdict(list)
    for one in series:
        found[one.rank, one.loader].append(one)
    return dict(sorted(found.items()))


@dataclass
class _Flow:
    """Batches, waiting and the work of workers, of one loader of one rank, in each interval."""

    active: Floats
    samples: Floats
    batches: Floats
    bytes: Floats
    waited: Floats
    steps: dict[str, Floats]

    @classmethod
    def of(cls, grid: Grid, series: Sequence[_Series]) -> _Flow:
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
            bytes=gained(field("bytes")),
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


def _plainly(found: Bottleneck) -> dict[str, Any]:
    return {"where": found.where, "words": found.words, "advice": found.advice}


# -- memory --------------------------------------------------------------------------------


def _memory(grid: Grid, run: LoggedRun, series: Sequence[_Series]) -> list[dict[str, Any]]:
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
        if (record["rank"], _loader(record)) not in measured:  # an older logbook
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


def _count_curves(run: LoggedRun, series: Sequence[_Series]) -> int:
    workers = {
        (one.rank, one.loader, name)
        for one in series
        for name in (one.records[0]["workers"] | one.last["workers"])
    }
    ranks = len({one["rank"] for one in _all(run)})
    return len(workers) + 4 * ranks + 9 * len(_groups(series))


# -- samples -------------------------------------------------------------------------------


def _distributions(series: Sequence[_Series]) -> dict[str, Any]:
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
        for entry in _list(entries):
            if not (isinstance(entry, list) and len(entry) == 3):
                continue
            value, key, name = entry
            known, sample = number(value), (_cut(key), _cut(name or ""))
            if known is not None:
                best[sample] = max(known, best.get(sample, 0.0))
    ranked = sorted(best.items(), key=lambda one: -one[1])[:8]
    return [{"value": value, "key": key, "name": name} for (key, name), value in ranked]


# -- what went wrong -----------------------------------------------------------------------

_NO_DEATH: Final = ("recycled", "renewed")


def _deaths(incidents: Iterable[Record]) -> int:
    return sum(one.get("kind") not in _NO_DEATH for one in incidents)


def _lost(bad: Iterable[Record]) -> int:
    return sum(one.get("action") in ("skipped", "replaced") for one in bad)


def _incidents(records: Sequence[Record]) -> tuple[list[dict[str, Any]], int]:
    """The newest, in order; those that explain least without their evidence, if it is too much."""
    shown, room, told = [], TEXT_BYTES, Counter[str]()
    for one in reversed(records[-MOST_INCIDENTS:]):
        longest, most = (LONGEST, 9) if room > 0 else (SHORT, 2)
        card = _texts(one, ("time", "rank", "loader", "cause", "confidence", "kind"), SHORT)
        card |= _texts(one, ("sample", "sample_name", "worker_id", "step", "exact"), SHORT)
        card |= _texts(one, ("text", "action"), longest)
        card["title"] = _title(card["cause"])
        card["because"] = [_cut(reason, longest) for reason in _list(one.get("because"))[:most]]
        card["remedies"] = [
            {name: _cut(remedy.get(name) or "", longest) for name in ("text", "command")}
            for remedy in _list(one.get("remedies"))[:most]
            if isinstance(remedy, dict)
        ]
        told[str(card["cause"])] += 1
        if room > 0 or told[str(card["cause"])] <= 3:
            card["stack"] = _cut(one.get("stack") or "")
            card["evidence"] = _evidence(one.get("evidence"))
        room -= len(json.dumps(card))
        shown.append(card)
    return shown[::-1], len(records) - len(shown)


def _evidence(found: Any) -> dict[str, str]:
    if not isinstance(found, dict):
        return {}
    return {
        str(name): _cut(value if isinstance(value, str) else json.dumps(value))
        for name, value in list(found.items())[:60]
        if value not in (None, "", [], {})
    }


def _causes(incidents: Iterable[Record]) -> list[dict[str, Any]]:
    counts = Counter(str(one.get("cause")) for one in incidents)
    return [
        {"cause": _cut(cause), "count": count, "title": _title(cause)}
        for cause, count in counts.most_common(50)
    ]


def _title(cause: Any) -> str:
    return CATALOGUE[cause].title if cause in CATALOGUE else "ended for an unknown reason"


def _bad_samples(records: Sequence[Record]) -> list[dict[str, Any]]:
    rows, room = [], TEXT_BYTES
    for one in reversed(records[-MOST_BAD:]):
        longest = SHORT if room > 0 else SHORT // 4
        row = _texts(one, ("time", "rank", "loader", "name", "kind", "error", "message"), longest)
        row |= _texts(one, ("action", "verdict", "epoch", "batch", "attempts"), SHORT // 4)
        row["index"] = _cut(json.dumps(one.get("index")), SHORT // 4)
        if room > 0 and one.get("traceback"):
            row["traceback"] = _cut(one["traceback"], 4000)
        row = {name: value for name, value in row.items() if value not in (None, "")}
        room -= len(json.dumps(row))
        rows.append(row)
    return rows[::-1]


def _events(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The first few of each kind, and how many there were."""
    counts, first = Counter[str](), dict[str, list[dict[str, Any]]]()
    for one in records:
        kind = str(one["event"])
        counts[kind] += 1
        if counts[kind] <= 5 and len(first) <= MOST_EVENTS // 5:
            shown = _texts(one, ("time", "rank", "loader", "text"))
            first.setdefault(kind, []).append(shown)
    return [
        {"event": _cut(kind, 100), "count": counts[kind], "first": shown}
        for kind, shown in first.items()
    ]


# -- what was tried before -----------------------------------------------------------------


def _tuning(record: Record) -> dict[str, Any]:
    """What ``holdfast tune`` has found."""
    limit = record.get("limit")
    size = number(record.get("batch_size"))
    tried = [one for one in _list(record["tried"])[:200] if isinstance(one, dict)]
    names = ("kind", "workers", "prefetch_factor", "start_method", "step_seconds", "visits")
    figures = ("error", "first_batch_seconds", "worker_bytes", "trouble")
    return {
        **_texts(
            record, ("time", "rank", "target", "seconds", "code", "confidence", "method"), 2000
        ),
        "unit": "batches" if size is None else "samples",
        "limit": _texts(limit, ("kind", "words", "confidence", "advice"), 2000)
        if isinstance(limit, dict)
        else None,
        "choices": [[_cut(part, 1000) for part in one[:3]] for one in _rows(record.get("choices"))],
        "notes": [_cut(one, 1000) for one in _list(record.get("notes"))[:20]],
        "tried": [
            _texts(one, (*names, *figures), SHORT)
            | {"rate": (number(one.get("batches_per_second")) or 0.0) * (size or 1.0)}
            for one in tried
        ],
    }


def _rows(value: Any) -> list[list[Any]]:
    return [one for one in _list(value)[:20] if isinstance(one, list) and len(one) >= 3]


# -- where and with what -------------------------------------------------------------------


def _loaders(run: LoggedRun) -> list[dict[str, Any]]:
    """Versions, options and machine of every loader, without repetitions."""
    seen: dict[str, dict[str, Any]] = {}
    for one in [*run.loaders, *run.runs]:
        shown = {
            "loader": _cut(one.get("loader") or "", 200),
            "rank": one["rank"],
            "host": _cut(one.get("host") or "", 200),
            "command": [_cut(word, 500) for word in _list(one.get("command"))[:50]],
            "versions": _flat(one["versions"]),
            "options": _flat(one.get("options")),
            "machine": _flat(one.get("machine")),
        }
        key = json.dumps([shown[part] for part in ("loader", "rank", "versions", "options")])
        entry = seen.setdefault(key, shown | {"times": 0, "first": float(one["time"])})
        entry["times"] += one not in run.runs
    return list(seen.values())[-100:]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _flat(values: Any) -> dict[str, str]:
    if not isinstance(values, Mapping):
        return {}
    return {
        _cut(name, 100): _cut(value if isinstance(value, str) else json.dumps(value), 500)
        for name, value in list(values.items())[:100]
    }


def _state(series: Sequence[_Series], now: float) -> str:
    """``running``, ``ended``, ``cut`` (the last loader was never closed) or ``unknown``."""
    if not series:
        return "unknown"
    if any(not one.ended and now - one.times[-1] < WRITING for one in series):
        return "running"
    return "ended" if max(series, key=lambda one: one.times[-1]).ended else "cut"


def _all(run: LoggedRun) -> list[Record]:
    return [
        *run.runs, *run.loaders, *run.incidents, *run.bad_samples, *run.memory, *run.progress,
        *run.events, *run.tuning,
    ]  # fmt: skip


def _moments(run: LoggedRun, series: Sequence[_Series]) -> Iterable[float]:
    for one in series:
        yield from one.times
    for record in [*run.memory, *run.incidents, *run.bad_samples, *run.loaders]:
        yield float(record["time"])
    if not (series or run.memory or run.incidents):
        yield from (float(one["time"]) for one in _all(run))


def _loader(record: Record) -> str:
    return _cut(record.get("loader") or "", 200)


def _texts(record: Record, names: Iterable[str], longest: int = LONGEST) -> dict[str, Any]:
    """These values: numbers and truth as they are, all others as text of bounded length."""
    return {name: _value(record.get(name), longest) for name in names}


def _value(value: Any, longest: int) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return number(value)
    return _cut(value, longest)


def _cut(value: Any, longest: int = LONGEST) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"
