"""Reads a logbook (`autopsy.logbook`), also one that is being written or whose writers were killed.

Nothing in it is trusted: a line that is not complete, or not a record of ours, is counted and left
out. The event that says how an incident went on is merged with that incident.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.autopsy.logbook import KINDS, TAKEN_UP


@dataclass(frozen=True)
class LoggedRun:
    """All records of a logbook, of all ranks, oldest first."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """As `runs`, for each loader that has written here."""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    bad_samples: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    progress: list[dict[str, Any]] = field(default_factory=list)
    """Batches, waiting, memory and where the time went, every few seconds; counted from the
    beginning of each `series`."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What happened and is no incident: workers replaced because of their size, memory that ran
    short, starts that had to be tried again."""
    tuning: list[dict[str, Any]] = field(default_factory=list)
    """What ``holdfast tune`` has tried, and recommends."""
    damaged: int = 0  # lines that are not JSON, or not such records

    @property
    def leaks(self) -> list[dict[str, Any]]:
        """The records of memory that say what piles up in workers, and where."""
        return [one for one in self.memory if "leak" in one]

    @property
    def empty(self) -> bool:
        return not (self.runs or any(getattr(self, kind) for kind in KINDS))


def read(folder: str | os.PathLike[str]) -> LoggedRun:
    """All that is in a logbook."""
    top = Path(folder)
    if not top.is_dir():
        raise NotADirectoryError(f"{top} is not a folder, so it is not a logbook")
    runs: list[dict[str, Any]] = []
    records: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    damaged = 0
    for place in [top, *sorted(path for path in top.glob("rank-*") if path.is_dir())]:
        run = place / "run.json"
        if run.exists():
            record = _record(run.read_bytes(), _RUN)
            if record is None:
                damaged += 1
            else:
                runs.append(record)
        for kind in KINDS:
            for name in (f"{kind}.1.jsonl", f"{kind}.jsonl"):
                found, bad = _lines(place / name, _SHAPES[kind])
                records[kind] += found
                damaged += bad
    for found in records.values():
        found.sort(key=lambda record: float(record["time"]))
    records["events"] = [
        one for one in records["events"] if not _completes(one, records["incidents"])
    ]
    return LoggedRun(runs, damaged=damaged, **records)


def _completes(event: dict[str, Any], incidents: list[dict[str, Any]]) -> bool:
    """Whether it says how an incident went on; if so, that incident is updated."""
    if event["event"] != TAKEN_UP:
        return False
    for one in incidents:
        same = all(one.get(name) == event.get(name) for name in ("rank", "trainer"))
        if same and (one["time"], one.get("worker_id")) == (
            event.get("incident"),
            event.get("worker"),
        ):
            action = str(event.get("action"))
            text, before = str(one.get("text", "")), str(one.get("action"))
            one.update(exact=event.get("exact"), action=action)
            one["text"] = text.removesuffix(before) + action if text.endswith(before) else text
            return True
    return False


_Shape = Mapping[str, tuple[type, ...]]
_NUMBER, _NOTHING, _ABSENT = (int, float), type(None), type(...)
_ALWAYS: _Shape = {"time": _NUMBER, "rank": (int,)}
_RUN: _Shape = {**_ALWAYS, "versions": (dict,)}
_SHAPES: dict[str, _Shape] = {
    "loaders": {**_RUN, "options": (dict,)},
    "progress": {
        **_ALWAYS,
        "series": _NUMBER,
        "batches": (int,),
        "samples": (int,),
        "wait_seconds": _NUMBER,
        "elapsed": _NUMBER,
        "workers": (dict,),
        "seconds": (dict,),
    },
    "incidents": {
        **_ALWAYS,
        "cause": (str,),
        "kind": (str, _ABSENT),
        "text": (str, _ABSENT),
        "because": (list, _ABSENT),
        "remedies": (list, _ABSENT),
    },
    "bad_samples": {
        **_ALWAYS,
        "index": (int, float, str, list, dict, _NOTHING),
        "kind": (str, _ABSENT),
    },
    "memory": {
        **_ALWAYS,
        "trainer_bytes": (*_NUMBER, _NOTHING, _ABSENT),
        "workers": (dict, _NOTHING, _ABSENT),
        "leak": (dict, _ABSENT),
        "text": (str, _ABSENT),
    },
    "events": {**_ALWAYS, "event": (str,), "text": (str,)},
    "tuning": {**_ALWAYS, "target": (str,), "tried": (list,)},
}
"""The types of a record's fields; a record that does not match was not written by us."""


def _record(line: bytes, shape: _Shape) -> dict[str, Any] | None:
    """The record on a line; None if it is incomplete, or not one of ours."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    fits = all(isinstance(record.get(name, ...), types) for name, types in shape.items())
    return record if fits else None


def _lines(path: Path, shape: _Shape) -> tuple[list[dict[str, Any]], int]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    lines = [line for line in content.split(b"\n") if line.strip()]
    found = [record for line in lines if (record := _record(line, shape)) is not None]
    return found, len(lines) - len(found)
