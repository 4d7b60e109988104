"""What was measured, for people (table, plot) and for programs (JSON).

Numbers are medians over the rounds. A ratio is taken within each round, where both loaders met the
same machine, and then the median of the ratios: it is steadier than the ratio of the medians.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.loaders import LOADERS, WORKERS
from benchmarks.rounds import Plan, Record
from benchmarks.workloads import WORKLOADS

METRICS = {
    "batches_per_s": "speed",
    "first_batch_s": "speed",
    "cpu_s_per_gb": "speed",
    "cpu_s_per_batch": "speed",
    "peak_pss_mb": "memory",
    "peak_held_mb": "memory",
    "recovery_s": "recovery",
}


HEAD = [
    *("", "batches/s", "(spread)", "× torch", "of best", "first batch", "× torch"),
    *("CPU s/GB", "× torch", "peak PSS", "× torch", "held", "× torch", "kill → batch"),
]


@dataclass(frozen=True)
class Figure:
    """One number of a loader on a workload."""

    median: float
    low: float
    high: float
    to_torch: float | None

    @property
    def spread(self) -> str:
        return f"{number(self.low)}–{number(self.high)}"


class Results:
    def __init__(self, plan: Plan, records: Iterable[Record]) -> None:
        self.plan = plan
        self.records = list(records)

    def failure(self, workload: str, loader: str) -> str | None:
        for record in self.records:
            if (record.workload, record.loader) == (workload, loader):
                why = record.values.get("failed")
                if why is not None:
                    return f"{record.kind}: {why}"
        return None

    def figure(self, workload: str, loader: str, metric: str) -> Figure | None:
        mine = self._by_round(workload, loader, metric)
        if not mine:
            return None
        torchs = self._by_round(workload, "torch", metric)
        ratios = [mine[turn] / torchs[turn] for turn in mine if torchs.get(turn)]
        values = sorted(mine.values())
        return Figure(median(values), values[0], values[-1], median(ratios) if ratios else None)

    def ceiling(self, workload: str) -> dict[int, float]:
        return {
            record.round: record.values["batches_per_s"]
            for record in self.records
            if (record.kind, record.workload) == ("ceiling", workload)
            and "batches_per_s" in record.values
        }

    def of_ceiling(self, workload: str, loader: str) -> float | None:
        ceiling = self.ceiling(workload)
        mine = self._by_round(workload, loader, "batches_per_s")
        shares = [mine[turn] / ceiling[turn] for turn in mine if turn in ceiling]
        return median(shares) if shares else None

    def _by_round(self, workload: str, loader: str, metric: str) -> dict[int, float]:
        found: dict[int, float] = {}
        for record in self.records:
            if (record.kind, record.workload, record.loader) != (METRICS[metric], workload, loader):
                continue
            value = record.values.get(metric)
            if value is not None:
                found[record.round] = median(value) if isinstance(value, list) else value
        return found


def table(results: Results) -> str:
    plan = results.plan
    lines = []
    for workload in plan.workloads:
        ceilings = results.ceiling(workload).values()
        ceiling = f"; two workers at their best: {number(median(ceilings))}/s" if ceilings else ""
        lines += ["", f"{workload} – {WORKLOADS[workload].about}{ceiling}"]
        rows = [HEAD]
        for loader in plan.loaders:
            failure = results.failure(workload, loader)
            rows.append(row(results, workload, loader))
            if failure is not None:
                rows[-1].append(f"failed: {failure}")
        lines += aligned(rows)
    return "\n".join(lines)


def row(results: Results, workload: str, loader: str) -> list[str]:
    def cells(metric: str, unit: float = 1.0, suffix: str = "") -> list[str]:
        figure = results.figure(workload, loader, metric)
        if figure is None:
            return ["–", "–"]
        return [number(figure.median * unit) + suffix, ratio(figure.to_torch)]

    speed = results.figure(workload, loader, "batches_per_s")
    rate, times = cells("batches_per_s")
    return [
        loader,
        rate,
        f"({speed.spread})" if speed else "",
        times,
        ratio(results.of_ceiling(workload, loader)),
        *cells("first_batch_s", 1e3, " ms"),
        *cells("cpu_s_per_gb"),
        *cells("peak_pss_mb", 1, " MB"),
        *cells("peak_held_mb", 1, " MB"),
        cells("recovery_s", 1e3, " ms")[0],
    ]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, numbers to the right; what is longer than the head row just follows."""
    columns = len(rows[0])
    widths = [max(len(row[column]) for row in rows) for column in range(columns)]
    lines = []
    for cells in rows:
        first, *others = cells[:columns]
        padded = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *padded, *cells[columns:]]).rstrip())
    return lines


def write_json(results: Results, path: Path) -> None:
    plan = results.plan
    summary = {
        workload: {
            "batches_per_s_of_two_workers_at_best": median(results.ceiling(workload).values())
            if results.ceiling(workload)
            else None,
            "loaders": {
                loader: {
                    metric: asdict(figure)
                    for metric in METRICS
                    if (figure := results.figure(workload, loader, metric)) is not None
                }
                for loader in plan.loaders
            },
        }
        for workload in plan.workloads
    }
    document = {
        "machine": machine(plan),
        "plan": asdict(plan),
        "summary": summary,
        "records": [asdict(record) for record in results.records],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def machine(plan: Plan) -> dict[str, Any]:
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "workers": WORKERS,
        "versions": {name: LOADERS[name].version for name in plan.loaders},
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_plot(results: Results, path: Path) -> None:
    """Batches per second relative to torch, per workload: one group of bars each."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plan = results.plan
    loaders = [loader for loader in plan.loaders if loader != "torch"]
    figure, axes = plt.subplots(figsize=(max(6.0, 1.5 * len(plan.workloads) + 2), 4.5))
    width = 0.8 / max(1, len(loaders))
    for place, loader in enumerate(loaders):
        heights = []
        for workload in plan.workloads:
            speed = results.figure(workload, loader, "batches_per_s")
            heights.append((speed and speed.to_torch) or 1.0)
        at = [group + (place - (len(loaders) - 1) / 2) * width for group in range(len(heights))]
        colour = "#c0392b" if loader == "holdfast" else plt.cm.Greys(0.35 + 0.12 * place)
        rises = [height - 1 for height in heights]  # from torch's level, up or down
        bars = axes.bar(at, rises, width, bottom=1, label=loader, color=colour)
        if loader == "holdfast":
            axes.bar_label(bars, [f"{height:.1f}×" for height in heights], padding=2)
    for group, workload in enumerate(plan.workloads):
        stock = results.figure(workload, "torch", "batches_per_s")
        ceilings = results.ceiling(workload).values()
        if stock and ceilings:
            best = median(ceilings) / stock.median
            axes.hlines(best, group - 0.45, group + 0.45, colors="#2c3e50", linestyles="dotted")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.plot([], [], color="#2c3e50", linestyle="dotted", label="two workers at their best")
    axes.set_yscale("log")
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 30])
    axes.get_yaxis().set_major_formatter(mpl.ticker.FormatStrFormatter("%g×"))
    axes.minorticks_off()
    axes.set_xticks(range(len(plan.workloads)), plan.workloads)
    axes.set_ylabel("batches per second, relative to torch")
    axes.set_title(f"{WORKERS} workers, {len(os.sched_getaffinity(0))} cores, median of rounds")
    axes.legend(
        frameon=False, fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.08)
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
