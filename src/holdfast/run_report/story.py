"""What a page shows of a run, from the records of its logbook: pure.

Nothing here is HTML. The page gets plain values and shows every text of them as text. A logbook may
be of any length and origin, so a record with a value of the wrong type is shown without that value,
and what the page holds is bounded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from holdfast.autopsy.catalogue import title_of
from holdfast.autopsy.logbook import KINDS
from holdfast.run_report.bottleneck import find_bottleneck
from holdfast.run_report.curves import Grid, number, total
from holdfast.run_report.logged_run import LoggedRun
from holdfast.run_report.record_values import LONGEST, Record, cut, flat, list_of, loader_of, texts
from holdfast.run_report.series import (
    Flow,
    Series,
    by_loader,
    distributions,
    memory_curves,
    read_series,
)

WRITING: Final = 30.0  # seconds without a record after which a run is not being written any more
MOST_INCIDENTS: Final = 1000
MOST_BAD: Final = 5000
MOST_EVENTS: Final = 300
MOST_TUNINGS: Final = 5
TEXT_BYTES: Final = 1_500_000  # of incidents, and of bad samples
SHORT: Final = 300  # characters of a text, if there are too many
YEARS: Final = (1e9, 1e10)  # from 2001 on; other times are not those of a run


def tell(run: LoggedRun, title: str, now: float) -> dict[str, Any]:
    """Everything that the page shows."""
    run = _dated(run)
    series = read_series(run.progress)
    curves = _count_curves(run, series)
    times = sorted(_moments(run, series))
    grid = Grid(times, curves)
    found_of = by_loader(series)
    flows = {key: Flow.of(grid, found) for key, found in found_of.items()}
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
            "loaders": sorted({loader_of(one) for one in [*run.progress, *run.loaders]} - {""}),
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
        "bottleneck": vars(bottleneck),
        "times": grid.times,
        "width": grid.width,
        "memory": memory_curves(grid, run, series),
        "flows": [
            {
                "rank": rank,
                "loader": loader,
                "workers": any(one.workers for one in found_of[rank, loader]),
            }
            | flow.curves(grid)
            for (rank, loader), flow in flows.items()
        ],
        "distributions": [
            {"rank": rank, "loader": loader, **distributions(found)}
            for (rank, loader), found in found_of.items()
        ],
        "incidents": incidents,
        "left_out": left_out,
        "causes": _causes(run.incidents),
        "bad": bad,
        "bad_left_out": len(run.bad_samples) - len(bad),
        "leaks": [texts(one, ("time", "rank", "loader", "text")) for one in run.leaks[:50]],
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


def _count_curves(run: LoggedRun, series: Sequence[Series]) -> int:
    workers = {
        (one.rank, one.loader, name)
        for one in series
        for name in (one.records[0]["workers"] | one.last["workers"])
    }
    ranks = len({one["rank"] for one in _all(run)})
    return len(workers) + 4 * ranks + 9 * len(by_loader(series))


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
        card = texts(one, ("time", "rank", "loader", "cause", "confidence", "kind"), SHORT)
        card |= texts(one, ("sample", "sample_name", "worker_id", "step", "exact"), SHORT)
        card |= texts(one, ("text", "action"), longest)
        card["title"] = title_of(card["cause"])
        card["because"] = [cut(reason, longest) for reason in list_of(one.get("because"))[:most]]
        card["remedies"] = [
            {name: cut(remedy.get(name) or "", longest) for name in ("text", "command")}
            for remedy in list_of(one.get("remedies"))[:most]
            if isinstance(remedy, dict)
        ]
        told[str(card["cause"])] += 1
        if room > 0 or told[str(card["cause"])] <= 3:
            card["stack"] = cut(one.get("stack") or "")
            card["evidence"] = _evidence(one.get("evidence"))
        room -= len(json.dumps(card))
        shown.append(card)
    return shown[::-1], len(records) - len(shown)


def _evidence(found: Any) -> dict[str, str]:
    if not isinstance(found, dict):
        return {}
    return {
        str(name): cut(value if isinstance(value, str) else json.dumps(value))
        for name, value in list(found.items())[:60]
        if value not in (None, "", [], {})
    }


def _causes(incidents: Iterable[Record]) -> list[dict[str, Any]]:
    counts = Counter(str(one.get("cause")) for one in incidents)
    return [
        {"cause": cut(cause), "count": count, "title": title_of(cause)}
        for cause, count in counts.most_common(50)
    ]


def _bad_samples(records: Sequence[Record]) -> list[dict[str, Any]]:
    rows, room = [], TEXT_BYTES
    for one in reversed(records[-MOST_BAD:]):
        longest = SHORT if room > 0 else SHORT // 4
        row = texts(one, ("time", "rank", "loader", "name", "kind", "error", "message"), longest)
        row |= texts(one, ("action", "verdict", "epoch", "batch", "attempts"), SHORT // 4)
        row["index"] = cut(json.dumps(one.get("index")), SHORT // 4)
        if room > 0 and one.get("traceback"):
            row["traceback"] = cut(one["traceback"], 4000)
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
            shown = texts(one, ("time", "rank", "loader", "text"))
            first.setdefault(kind, []).append(shown)
    return [
        {"event": cut(kind, 100), "count": counts[kind], "first": shown}
        for kind, shown in first.items()
    ]


# -- what was tried before -----------------------------------------------------------------


def _tuning(record: Record) -> dict[str, Any]:
    """What ``holdfast tune`` has found."""
    limit = record.get("limit")
    size = number(record.get("batch_size"))
    tried = [one for one in list_of(record["tried"])[:200] if isinstance(one, dict)]
    names = ("kind", "workers", "prefetch_factor", "start_method", "step_seconds", "visits")
    figures = ("error", "first_batch_seconds", "worker_bytes", "trouble")
    return {
        **texts(
            record, ("time", "rank", "target", "seconds", "code", "confidence", "method"), 2000
        ),
        "unit": "batches" if size is None else "samples",
        "limit": texts(limit, ("kind", "words", "confidence", "advice"), 2000)
        if isinstance(limit, dict)
        else None,
        "choices": [[cut(part, 1000) for part in one[:3]] for one in _rows(record.get("choices"))],
        "notes": [cut(one, 1000) for one in list_of(record.get("notes"))[:20]],
        "tried": [
            texts(one, (*names, *figures), SHORT)
            | {"rate": (number(one.get("batches_per_second")) or 0.0) * (size or 1.0)}
            for one in tried
        ],
    }


def _rows(value: Any) -> list[list[Any]]:
    return [one for one in list_of(value)[:20] if isinstance(one, list) and len(one) >= 3]


# -- where and with what -------------------------------------------------------------------


def _loaders(run: LoggedRun) -> list[dict[str, Any]]:
    """Versions, options and machine of every loader, without repetitions."""
    seen: dict[str, dict[str, Any]] = {}
    for one in [*run.loaders, *run.runs]:
        shown = {
            "loader": cut(one.get("loader") or "", 200),
            "rank": one["rank"],
            "host": cut(one.get("host") or "", 200),
            "command": [cut(word, 500) for word in list_of(one.get("command"))[:50]],
            "versions": flat(one["versions"]),
            "options": flat(one.get("options")),
            "machine": flat(one.get("machine")),
        }
        key = json.dumps([shown[part] for part in ("loader", "rank", "versions", "options")])
        entry = seen.setdefault(key, shown | {"times": 0, "first": float(one["time"])})
        entry["times"] += one not in run.runs
    return list(seen.values())[-100:]


def _state(series: Sequence[Series], now: float) -> str:
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


def _moments(run: LoggedRun, series: Sequence[Series]) -> Iterable[float]:
    for one in series:
        yield from one.times
    for record in [*run.memory, *run.incidents, *run.bad_samples, *run.loaders]:
        yield float(record["time"])
    if not (series or run.memory or run.incidents):
        yield from (float(one["time"]) for one in _all(run))
