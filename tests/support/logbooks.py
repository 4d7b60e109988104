"""Logbooks of runs that never took place: of days, of many ranks, with anything in their texts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.autopsy.machine_facts import MachineFacts
from holdfast.autopsy.tally import BUCKETS

MARKUP = '<img src=x onerror="document.title=1">'
SCRIPT = "</script><script>window.struck = true</script>"
BEGAN = 1_750_000_000.0
GIB = 1 << 30


def write(
    folder: Path,
    *,
    hours: float = 2.0,
    every: float = 5.0,
    ranks: int = 1,
    loaders: tuple[str, ...] = ("train",),
    workers: int = 4,
    incidents: int = 6,
    bad: int = 12,
    ended: bool = True,
    began: float = BEGAN,
    seed: int = 0,
) -> None:
    """Write a logbook as a run of so many hours would have left it."""
    for rank in range(ranks):
        place = folder / f"rank-{rank}" if rank else folder
        place.mkdir(parents=True, exist_ok=True)
        dice = random.Random(1000 * seed + rank)
        for number, loader in enumerate(loaders):
            whole = {"rank": rank, "loader": loader, "trainer": 100 + rank}
            _append(place, "loaders", [_about(whole, began)])
            series = began + 0.1 * number
            records = list(_progress(dice, whole, series, hours, every, workers, ended))
            _append(place, "progress", records)
            _append(place, "memory", _memory(records, whole))
            _append(place, "incidents", _incidents(dice, whole, began, hours, incidents))
            _append(place, "bad_samples", _bad(dice, whole, began, hours, bad))
        (place / "run.json").write_text(json.dumps(_about(whole, began)))


def _append(place: Path, kind: str, records: Any) -> None:
    with (place / f"{kind}.jsonl").open("a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def _about(whole: dict[str, Any], began: float) -> dict[str, Any]:
    machine = MachineFacts().to_json() | {"memory": {"total": 64 * GIB}}
    return {
        "time": began, "host": "node-7", "pid": whole["trainer"], "command": ["train.py", "--lr", "3e-4"],
        "versions": {"python": "3.11.7", "torch": "2.13.0", "holdfast": "0.1.0"},
        "options": {"num_workers": 4, "batch_size": 64, "on_bad_sample": "skip", "note": MARKUP},
        "machine": machine, **whole,
    }  # fmt: skip


def _progress(
    dice: random.Random, whole: dict[str, Any], began: float, hours: float, every: float,
    workers: int, ended: bool,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    count = max(2, int(hours * 3600 / every))
    samples, waited = 0, 0.0
    sizes = [0.3 * GIB * (1 + 0.05 * one) for one in range(workers)]
    seconds = dict.fromkeys(("fetch", "collate", "send", "idle", "start-up"), 0.0)
    for number in range(count):
        elapsed = (number + 1) * every
        share = 0.35 if 0.45 < number / count < 0.6 else 0.06  # a slow disk for a while
        samples += int(every * 900 * (1 - share) * dice.uniform(0.95, 1.05))
        waited += every * share * dice.uniform(0.8, 1.2)
        for step, part in zip(seconds, (0.3 + share, 0.08, 0.05, 0.55 - share, 0.02), strict=True):
            seconds[step] += workers * every * part
        sizes = [one + 40e3 * every * dice.uniform(0.5, 1.5) for one in sizes]
        for worker in range(workers):
            if sizes[worker] > 1.4 * GIB:
                sizes[worker] = 0.3 * GIB
        yield {
            "time": began + elapsed, "series": began, "elapsed": elapsed, "batches": samples // 64,
            "samples": samples, "approximate": False, "bytes": samples * 150_000,
            "wait_seconds": waited, "seats": workers, "in_flight": 80 << 20, "budget": 4 * GIB,
            "shared_bytes": int(0.4 * GIB), "held_bytes": 1 << 20,
            "trainer_bytes": int(3.1 * GIB + dice.uniform(0, 1e8)),
            "workers": {str(one): int(size) for one, size in enumerate(sizes)},
            "ended": ended and number == count - 1,
            "seconds": {step: round(spent, 3) for step, spent in seconds.items()},
            **(_details(dice, samples) if number % 10 == 0 or number == count - 1 else {}),
            **whole,
        }  # fmt: skip


def _details(dice: random.Random, samples: int) -> dict[str, Any]:
    def bell(middle: int) -> dict[str, int]:
        spread = {one: samples // 40 // (1 + (one - middle) ** 2) for one in range(BUCKETS)}
        return {str(bucket): count for bucket, count in spread.items() if count}

    slow = [[round(2.0 / (one + 1), 3), str(77 * one), f"train/{77 * one}.png"] for one in range(8)]
    return {
        "times": bell(26), "sizes": bell(35), "slowest": slow,
        "largest": [[4e6 / (one + 1), str(one), MARKUP] for one in range(8)],
    }  # fmt: skip


def _memory(records: list[dict[str, Any]], whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for record in records:
        own = sum(record["workers"].values())
        yield {
            "time": record["time"], "trainer_bytes": record["trainer_bytes"], "workers": record["workers"],
            "usage": record["trainer_bytes"] + own, "limit": 12 * GIB, "available": 20 * GIB, **whole,
        }  # fmt: skip


def _incidents(
    dice: random.Random, whole: dict[str, Any], began: float, hours: float, count: int
) -> Iterator[dict[str, Any]]:
    causes = ("oom-killed", "killed-from-outside", "native-segv", "stalled")
    for number in range(count):
        cause = causes[number % len(causes)]
        at = began + hours * 3600 * (number + dice.random()) / max(1, count)
        yield {
            "time": at, "kind": "killed", "worker_id": number % 4, "pid": 4000 + number,
            "signal": "SIGKILL", "exitcode": -9, "batch": 40 * number, "sample": 640 + number,
            "position": 3, "step": "fetch", "action": "replaced; its batch is made again",
            "stack": f'Fatal Python error: Killed\n  File "data.py", line {number} in __getitem__',
            "cause": cause, "confidence": "high" if number % 3 else "medium",
            "because": [f"oom_kill of the control group went up by {number}", MARKUP],
            "evidence": {"signal": "SIGKILL", "stderr": SCRIPT, "worker_bytes": 340 << 20},
            "remedies": [{"text": "Keep less in flight", "command": f"echo '{MARKUP}'"}],
            "sample_name": f"train/{number}.png", "exact": None,
            "text": f"worker {number % 4} (pid {4000 + number}) was killed for lack of memory {SCRIPT}",
            **whole,
        }  # fmt: skip


def _bad(
    dice: random.Random, whole: dict[str, Any], began: float, hours: float, count: int
) -> Iterator[dict[str, Any]]:
    for number in range(count):
        kind = ("raised", "killed", "none")[number % 3]
        yield {
            "time": began + hours * 3600 * dice.random(), "index": 31 * number, "kind": kind,
            "error": "OSError" if kind == "raised" else "",
            "message": f"image file is truncated {SCRIPT}" if kind == "raised" else "",
            "name": f"images/{number:05d}.jpg" if number else MARKUP, "position": 1, "batch": number,
            "worker_id": 0, "epoch": number % 5, "traceback": f"Traceback …\n  {MARKUP}",
            "action": "skipped", "attempts": 1, "verdict": "bad", **whole,
        }  # fmt: skip
