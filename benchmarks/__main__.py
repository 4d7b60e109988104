"""The command line: measure, print a table, write JSON and a plot."""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import signal
import sys
from pathlib import Path

from benchmarks import curves, garbage, methods
from benchmarks.loaders import FURTHER_AHEAD, LOADERS
from benchmarks.report import Results, table, write_json, write_plot
from benchmarks.rounds import Plan, Record, absent, measure, run
from benchmarks.workloads import WORKLOADS
from tests.shortage.datasets import KINDS

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("loaders", "methods", "garbage", "curves")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="holdfast beside torch and its peers. docs/performance.md says how to read it.",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    usual = [name for name in LOADERS if name not in FURTHER_AHEAD]
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=usual)
    parser.add_argument("--repeat", type=int, metavar="N", help="rounds (5; with --quick 1)")
    parser.add_argument("--seconds", type=float, metavar="S", help="of a measurement (3; 0.7)")
    parser.add_argument("--quick", action="store_true", help="a glance: short, and one round")
    parser.add_argument("--json", type=Path, default=RESULTS / "latest.json", metavar="PATH")
    parser.add_argument("--plot", type=Path, default=RESULTS / "latest.png", metavar="PATH")
    parser.add_argument(
        "--check",
        action="store_true",
        help="measure nothing: check that every loader makes the right batches in two processes",
    )
    return parser.parse_args()


def main() -> int:
    asked = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: with a table
    missing = absent(asked.loaders)
    for name in missing:
        print(f"{name} is left out: it is not installed (pip install '.[bench]')")
    plan = Plan(
        workloads=asked.workloads,
        loaders=[name for name in asked.loaders if name not in missing],
        repeat=asked.repeat or (1 if asked.quick else 5),
        seconds=asked.seconds or (0.7 if asked.quick else 3.0),
    )
    if asked.check:
        return check(plan)
    _compile()
    status = bench(plan, asked.json, asked.plot) if "loaders" in asked.parts else 0
    if "methods" in asked.parts:
        methods.run(1 if asked.quick else 5, plan.seconds / 2, RESULTS / "methods.md")
    if "garbage" in asked.parts:
        samples, rounds = (60, 1) if asked.quick else (300, 3)
        garbage.run(samples, rounds, RESULTS / "garbage.json")
    if "curves" in asked.parts:
        curves.run(list(KINDS), RESULTS / "curves.json", RESULTS / "curves.png")
    return status


def bench(plan: Plan, json_path: Path, plot_path: Path) -> int:
    steps = sum(1 for _ in plan)
    records: list[Record] = []
    try:
        for record in run(plan):
            records.append(record)
            progress(f"[{len(records)}/{steps}] {record.kind} {record.workload} {record.loader}")
    except KeyboardInterrupt:
        print(f"\nstopped after {len(records)} of {steps} measurements", flush=True)
    finally:  # before anything else that may fail
        results = Results(plan, records)
        write_json(results, json_path)
    progress("")
    print(table(results))
    print(f"\nwritten: {json_path}")
    if importlib.util.find_spec("matplotlib"):
        write_plot(results, plot_path)
        print(f"written: {plot_path}")
    else:
        print("no plot: matplotlib is not installed (pip install '.[bench]')")
    return 1 if any("failed" in record.values for record in records) else 0


def _compile() -> None:
    """As pip does for all it installs, and so for the peers: a package that is compiled
    when it is imported needs some megabytes more for that."""
    package = importlib.util.find_spec("holdfast")
    assert package is not None
    for folder in package.submodule_search_locations or ():
        compileall.compile_dir(folder, quiet=1)


def check(plan: Plan) -> int:
    wrong = 0
    for workload in plan.workloads:
        for loader in plan.loaders:
            values = measure("check", workload, loader, plan.seconds)
            problems = values.get("problems") or [
                values[key] for key in ("failed",) if key in values
            ]
            wrong += bool(problems)
            print(f"{workload:<10} {loader:<10} {'; '.join(problems) or 'right'}", flush=True)
    return 1 if wrong else 0


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
