"""Memory over batches, torch beside holdfast, for four datasets that run out of it.

    python -m benchmarks.curves --plot docs/images/memory-curves.png --write docs/memory-limits.md

The datasets are those of ``tests/shortage``: one that leaks, one that is copied by being read, one
that leaves cycles, one with large samples and much prefetching. Each is loaded three times: by
torch and by holdfast in a control group with a limit, and by torch without limit, to see how far it
would go. The limit is what a run needs at rest, measured, and half of what torch piles up. After
each batch the trainer writes down what its group has in use; what it has written survives its end.

Where no control group can be made all three run without limit, and what is written down is the
memory of the process tree (PSS, and batches that no process has mapped).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.page import put
from benchmarks.rounds import ROOT, clear_session, pss, tree, unmapped_shared_memory, wait
from tests.shortage import runs
from tests.shortage.datasets import KINDS
from tests.shortage.trainer import stream
from tests.support.groups import MemoryGroup, NoGroup, memory_group

COMMAND = ("-m", "benchmarks.curves")
MB = 1e6


@dataclass(frozen=True)
class Curve:
    """One run: bytes in use after each batch, and how it ended."""

    loader: str
    limited: bool
    used: list[int]
    finished: bool


@dataclass(frozen=True)
class Picture:
    """One dataset."""

    kind: str
    limit: int | None  # None where no group can be made
    batches: int
    curves: list[Curve]

    def curve(self, loader: str, *, limited: bool) -> Curve | None:
        found = (one for one in self.curves if (one.loader, one.limited) == (loader, limited))
        return next(found, None)


# -- measuring ----------------------------------------------------------------------------


def draw(kind: str) -> Picture:
    size, batch = KINDS[kind].size, KINDS[kind].options["batch_size"]
    try:
        limit = runs.limit_for(kind)
    except NoGroup as why:
        print(f"without limits: {why}")
        return Picture(
            kind, None, size // batch, [_free(one, kind) for one in ("torch", "holdfast")]
        )
    curves = [
        _grouped("torch", kind, limit),
        _grouped("torch", kind, None),
        _grouped("holdfast", kind, limit),
    ]
    return Picture(kind, limit, size // batch, curves)


def _grouped(loader: str, kind: str, limit: int | None) -> Curve:
    with tempfile.TemporaryDirectory() as folder, memory_group(limit) as group:
        out = Path(folder, "curve")
        place = [str(group.path), str(group.version)]
        done = runs.run([*COMMAND, "--one", loader, kind, str(out), *place], group)
        return Curve(loader, limit is not None, _written(out), done.returncode == 0)


def _free(loader: str, kind: str) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "curve")
        process = subprocess.Popen(
            [sys.executable, *COMMAND, "--one", loader, kind, str(out)],
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            wait(process, look=False)
        finally:
            clear_session(process)
        return Curve(loader, False, _written(out), process.returncode == 0)


def _written(out: Path) -> list[int]:
    return [int(line) for line in out.read_text().split()] if out.exists() else []


def train(loader: str, kind: str, out: Path, used: Callable[[], int]) -> None:
    """One run, in this process."""
    with out.open("w") as file:

        def note(_: int) -> None:
            file.write(f"{used()}\n")
            file.flush()

        stream(loader, kind, each=note)


def _of_the_tree() -> int:
    pids = tree(os.getpid())
    return sum(map(pss, pids)) + unmapped_shared_memory(pids)


# -- showing ------------------------------------------------------------------------------


def table(pictures: Sequence[Picture]) -> str:
    """For the docs."""
    lines = [
        "| dataset | limit | torch under it | most: torch without limit | holdfast under it |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for one in pictures:
        stock, free = one.curve("torch", limited=True), one.curve("torch", limited=False)
        ours = one.curve("holdfast", limited=one.limit is not None)
        limit = "none" if one.limit is None else f"{one.limit / MB:,.0f} MB"
        cells = [KINDS[one.kind].title, limit, _ended(stock, one.batches), _most(free), _most(ours)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ended(curve: Curve | None, batches: int) -> str:
    if curve is None:
        return "not tried"
    done = f"{len(curve.used)} of {batches} batches"
    return f"finishes, {done}" if curve.finished else f"lost after {done}"


def _most(curve: Curve | None) -> str:
    if curve is None or not curve.used:
        return "–"
    lost = "" if curve.finished else ", lost"
    return f"{max(curve.used) / MB:,.0f} MB{lost}"


NO_PLOT = "matplotlib is not installed (pip install '.[bench]')"


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(pictures: Sequence[Picture], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(9.5, 6.2))
    for axes, one in zip(panels.flat, pictures, strict=False):
        for curve in one.curves:
            ours = curve.loader == "holdfast"
            colour = "#c0392b" if ours else "#2c3e50"
            faint = not curve.limited and one.limit is not None
            label = curve.loader + (", no limit" if faint else "")
            heights = [used / MB for used in curve.used]
            places = range(1, len(heights) + 1)
            style = ":" if faint else "-"
            axes.plot(places, heights, style, color=colour, label=label, linewidth=1.6)
            if not curve.finished and heights:
                axes.plot(len(heights), heights[-1], "x", color=colour, markersize=9, mew=2.5)
        if one.limit is not None:
            axes.axhline(one.limit / MB, color="grey", linestyle="--", linewidth=0.9)
            axes.text(one.batches, one.limit / MB, "limit", ha="right", va="bottom", color="grey")
        axes.set_title(KINDS[one.kind].title, fontsize="medium")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, one.batches + 1)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("MB in use, trainer and workers")
    for axes in panels[-1]:
        axes.set_xlabel("batches delivered (×: the run was lost)")
    panels.flat[0].legend(frameon=False, fontsize="small", loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def run(kinds: Sequence[str], json_path: Path | None, plot_path: Path | None) -> list[Picture]:
    """Measure all of them; say, write (each as it is known) and draw what was found."""
    pictures: list[Picture] = []
    print("\nmemory over batches:")
    for kind in kinds:
        one = draw(kind)
        pictures.append(one)
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps([asdict(each) for each in pictures], indent=1) + "\n")
        for curve in one.curves:
            limit = f"limit {one.limit / MB:,.0f} MB" if curve.limited and one.limit else "no limit"
            said = _ended(curve, one.batches)
            print(
                f"{kind:<12} {curve.loader:<9} {limit:<15} {_most(curve):>16}  {said}", flush=True
            )
    if json_path is not None:
        print(f"written: {json_path}")
    if plot_path is not None and can_plot():
        plot(pictures, plot_path)
        print(f"written: {plot_path}")
    elif plot_path is not None:
        print(f"not written: {plot_path}. {NO_PLOT}")
    return pictures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--plot", type=Path, metavar="PATH")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        loader, kind, out, *group = asked.one
        used = MemoryGroup(Path(group[0]), int(group[1])).used if group else _of_the_tree
        train(loader, kind, Path(out), used)
        return
    if asked.plot is not None and not can_plot():
        parser.error(f"--plot {asked.plot}: {NO_PLOT}")  # now, and not after all the measuring
    told = table(run(asked.kinds, asked.json, asked.plot))
    if asked.write is not None:
        put(asked.write, "curves", told)


if __name__ == "__main__":
    main()
