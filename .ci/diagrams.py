"""Draws the diagrams of docs/architecture.md, and the plot of the figures in docs/performance.md:
``python .ci/diagrams.py docs/images``.

Plain SVG: a repository's host shows it, and so does the site, in light and dark.
"""

from __future__ import annotations

import itertools
import sys
from html import escape
from pathlib import Path

STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.title { font-weight: 600; } .small { font-size: 11.5px; fill: #59636e; }
.number { font-size: 11.5px; font-weight: 700; fill: #fff; text-anchor: middle; }
rect { fill: #fff; stroke: #8c959f; } .ground { fill: #fff; stroke: none; }
.trainer { fill: #ddf4ff; stroke: #54aeff; } .nursery { fill: #fff8c5; stroke: #d4a72c; }
.worker { fill: #dafbe1; stroke: #4ac26b; } .memory { fill: #fbefff; stroke: #c297ff; }
.inner { fill: #ffffffb0; } .dead { fill: #ffebe9; stroke: #ff8182; }
.line { stroke: #57606a; stroke-width: 1.4; fill: none; } .tip { fill: #57606a; }
.ours { fill: #0969da; stroke: none; } .others { fill: #afb8c1; stroke: none; }
.one { stroke: #d1242f; stroke-width: 1.2; stroke-dasharray: 3 3; }
.quiet { stroke-dasharray: 4 3; } circle { fill: #0969da; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; }
  rect { fill: #0d1117; stroke: #6e7681; } .ground { fill: #0d1117; stroke: none; }
  .trainer { fill: #0c2d4d; stroke: #388bfd; } .nursery { fill: #3b2e0a; stroke: #9e6a03; }
  .worker { fill: #0f3321; stroke: #2ea043; } .memory { fill: #2d1c4b; stroke: #8957e5; }
  .inner { fill: #0d111780; } .dead { fill: #4c1c1b; stroke: #da3633; }
  .ours { fill: #4493f8; } .others { fill: #656c76; } .one { stroke: #f85149; }
  .line { stroke: #9198a1; } .tip { fill: #9198a1; }
}
"""


class Drawing:
    """Boxes with text, and arrows between points."""

    def __init__(self, width: int, height: int, about: str) -> None:
        self.size, self.about = (width, height), about
        self.parts: list[str] = []

    def box(
        self,
        x: int,
        y: int,
        width: int,
        height: int,
        kind: str,
        title: str,
        *lines: str,
        numbered: bool = False,
    ) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
        )
        self.text(x + (32 if numbered else 10), y + 20, title, "title")
        for number, line in enumerate(lines):
            self.text(x + 10, y + 38 + 16 * number, line, "small")

    def text(self, x: int, y: int, words: str, kind: str = "") -> None:
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>')

    def arrow(
        self, *points: tuple[int, int], words: str = "", quiet: bool = False, both: bool = False
    ) -> None:
        """Through the points; the words are beside the middle of its longest part."""
        way = " ".join(f"{'L' if place else 'M'}{x} {y}" for place, (x, y) in enumerate(points))
        start = ' marker-start="url(#tip)"' if both else ""
        look = "line quiet" if quiet else "line"
        self.parts.append(f'<path class="{look}" d="{way}" marker-end="url(#tip)"{start}/>')
        if words:
            pairs = list(itertools.pairwise(points))
            (ax, ay), (bx, by) = max(
                pairs, key=lambda pair: sum(abs(a - b) for a, b in zip(*pair, strict=True))
            )
            down = ax == bx
            x, y = (ax + 6, (ay + by) // 2 + 4) if down else (min(ax, bx) + 8, ay - 6)
            self.text(x, y, words, "small")

    def step(self, number: int, x: int, y: int) -> None:
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="9"/>')
        self.text(x, y + 4, str(number), "number")

    def save(self, path: Path) -> None:
        width, height = self.size
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="tip" d="M0 0 8 4 0 8z"/></marker>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(self.about)}"><style>{STYLE}</style><defs>{tip}</defs>'
            f'<rect class="ground" width="{width}" height="{height}"/>'
        )
        path.write_text("\n".join([head, *self.parts, "</svg>"]) + "\n", encoding="utf-8")


def processes() -> Drawing:
    """Which process, which thread, and who owns what."""
    one = Drawing(
        960, 560, "The trainer with its threads, the nursery, the workers, and what passes between"
    )
    one.box(20, 20, 430, 330, "trainer", "trainer process")
    one.text(32, 62, "owns the sampler, the machine, the budget, and batches", "small")
    one.box(40, 76, 390, 92, "inner", "consumer's thread: your training loop",
            "next(): draws from the sampler, asks the machine, sends orders,",
            "takes batches in, makes tensors of them. Sleeps in one poll.",
            "Has the pool's lock while it is inside next().")  # fmt: skip
    one.box(40, 178, 390, 76, "inner", "background thread, one for each pool",
            "while you train: deaths, stalls, memory, closing.",
            "Wakes for these only, and never raises into your code.")  # fmt: skip
    one.box(40, 264, 190, 74, "inner", "pinning thread",
            "only with pin_memory=True", "and an accelerator")  # fmt: skip
    one.box(240, 264, 190, 74, "inner", "reporting thread",
            "after a death: reads evidence,", "writes to the logbook")  # fmt: skip
    one.box(560, 20, 380, 110, "nursery", "nursery process, one for each pool",
            "forked once, before the trainer has threads or CUDA to spoil it.",
            "The only one that forks, signals and reaps workers;",
            "copies their standard error. Keeps a spare after a first death.")  # fmt: skip
    for place in range(2):
        x = 560 + 195 * place
        one.box(x, 200, 185, 150, "worker", f"worker process {place}",
                "its copy of the dataset,", "its random state;", "loads and collates.",
                "No thread of ours beside it")  # fmt: skip
    one.box(
        20, 420, 920, 120, "memory", "shared memory, without names: nothing is left in /dev/shm"
    )
    one.box(40, 452, 280, 76, "inner", "arena of worker 0, 1, …",
            "written by its worker; the trainer says", "which blocks are free again")  # fmt: skip
    one.box(340, 452, 280, 76, "inner", "black box of worker 0, 1, …",
            "written by its worker: batch, sample, step,",
            "random states. Read after a death")  # fmt: skip
    one.box(640, 452, 280, 76, "inner", "packed containers",
            "one copy of the dataset's records", "for all workers, sealed")  # fmt: skip
    one.arrow((450, 60), (560, 60), both=True, words="orders, reports")
    one.arrow((450, 290), (560, 290), both=True, words="one socket pair")
    one.text(458, 306, "for each worker", "small")
    one.arrow((650, 130), (650, 200), words="fork, wait, signal")
    one.arrow((845, 130), (845, 200))
    one.arrow((652, 350), (652, 420), words="batches, notes")
    one.arrow((847, 350), (847, 420))
    one.arrow((200, 420), (200, 350), words="batches are mapped, not copied")
    one.arrow((450, 110), (505, 110), (505, 165), (600, 165), (600, 200), quiet=True)
    one.text(456, 182, "lifeline: its end", "small")
    one.text(456, 196, "kills them all", "small")
    return one


def lanes(drawing: Drawing, names: list[tuple[str, str, int, int]], height: int) -> None:
    for kind, title, x, width in names:
        drawing.box(x, 20, width, height, kind, title)


def column(
    one: Drawing, steps: list[tuple[str, str]], x: int, y: int, width: int, first: int
) -> None:
    """Steps below each other, numbered from `first` on."""
    for number, (title, line) in enumerate(steps, first):
        one.box(x, y, width, 52, "inner", title, line, numbered=True)
        one.step(number, x + 18, y + 15)
        if number > first:
            one.arrow((x + width // 2, y - 12), (x + width // 2, y))
        y += 64


def batch() -> Drawing:
    """A batch's way."""
    one = Drawing(960, 500, "A batch, from the sampler to the training step and back to its worker")
    lanes(one, [("trainer", "trainer: consumer's thread", 20, 440),
                ("memory", "between", 480, 120), ("worker", "worker", 620, 320)], 460)  # fmt: skip
    left = [
        ("iterator, pool", "draw an index list from the sampler; a task has a number"),
        ("machine", "Drawn → Dispatch: which worker, within the byte budget"),
        ("driver → channel", "indices and freed blocks, one small message"),
    ]
    column(one, left, 40, 56, 400, 1)
    right = [
        ("items, fetch", "notes the sample, calls dataset[i]"),
        ("collate", "straight into its arena"),
        ("random state", "into the black box, if it changed"),
        ("send", "a description: a few hundred bytes"),
    ]
    column(one, right, 640, 184, 280, 4)
    one.box(490, 240, 100, 64, "inner", "arena", "the samples")
    one.box(490, 312, 100, 52, "inner", "black box", "notes")
    one.arrow((440, 210), (640, 210), words="socket pair")
    one.arrow((640, 274), (590, 274))
    one.arrow((640, 338), (590, 338))
    back = [
        ("inbox, machine", "BatchReady → Deliver, when it is its turn"),
        ("unpack", "tensors on the arena's memory, without a copy"),
        ("your training step", "the last tensor of the batch dies: its blocks are free again"),
    ]
    column(one, back, 40, 268, 400, 8)
    one.arrow((640, 402), (610, 402), (610, 440), (470, 440), (470, 294), (440, 294))
    one.arrow((490, 262), (460, 262), (460, 358), (440, 358), quiet=True)
    one.arrow((40, 422), (28, 422), (28, 210), (40, 210), quiet=True)
    one.text(40, 470, "freed blocks go with the next order", "small")
    return one


def death() -> Drawing:
    """A death's way."""
    one = Drawing(960, 520, "A worker dies: its replacement first, the reasons after")
    lanes(one, [("worker", "worker", 20, 200), ("nursery", "nursery", 240, 210),
                ("trainer", "trainer", 470, 470)], 480)  # fmt: skip

    def step(number: int, x: int, y: int, width: int, kind: str, title: str, *lines: str) -> None:
        one.box(x, y, width, 36 + 16 * len(lines), kind, title, *lines, numbered=True)
        one.step(number, x + 18, y + 15)

    step(1, 36, 56, 168, "dead", "it dies", "its black box, arena", "and answers remain")
    step(2, 256, 70, 178, "inner", "SIGCHLD", "reads the status, empties", "its standard error")
    step(3, 490, 56, 430, "inner", "driver: how did it end, what was it doing?",
         "the background thread, or next() if it waits: reads the black box,",
         "and what changes from moment to moment")  # fmt: skip
    step(4, 490, 144, 430, "inner", "machine: WorkerExited → Start, Dispatch, Report",
         "does it count as a restart? is a sample suspected? which tasks are open?")  # fmt: skip
    step(5, 256, 176, 178, "inner", "fork", "or the spare: it is", "warmed up already")
    step(6, 36, 240, 168, "inner", "replacement", "same id, same seeds;", "the random state before",
         "the lost batch")  # fmt: skip
    step(
        7,
        36,
        346,
        168,
        "inner",
        "the batch again",
        "bit for bit; or, if a",
        "sample is suspected,",
        "that one alone",
    )
    step(8, 490, 216, 430, "inner", "next() returns the batch",
         "in its place; batches of other workers were never in danger")  # fmt: skip
    step(9, 490, 304, 430, "inner", "reporting thread: evidence, without the lock",
         "kernel's log, counters of control groups, /dev/shm, stack, stderr")  # fmt: skip
    step(10, 490, 372, 430, "inner", "verdict: pure; a cause, how certain, and why",
         "never “out of memory” without a counter that moved")  # fmt: skip
    step(
        11,
        490,
        440,
        430,
        "inner",
        "incident: log, loader.incidents, logbook",
        "what, why, evidence, remedy",
    )
    one.arrow((204, 92), (256, 92))
    one.arrow((434, 92), (490, 92))
    one.arrow((705, 124), (705, 144))
    one.arrow((490, 190), (434, 190))
    one.arrow((300, 244), (300, 270), (204, 270))
    one.arrow((120, 324), (120, 346))
    one.arrow((204, 400), (462, 400), (462, 240), (490, 240))
    one.arrow((920, 170), (932, 170), (932, 330), (920, 330), quiet=True)
    one.text(500, 292, "afterwards: no batch waits for it", "small")
    one.arrow((705, 356), (705, 372))
    one.arrow((705, 424), (705, 440))
    return one


PERFORMANCE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
WORKLOADS = {
    "big": "8 samples of 5 MB",
    "image": "64 images",
    "tiny": "32 × 4 floats",
    "tokens": "32 × 512 tokens",
    "ragged": "padded texts",
    "nested": "dicts of tensors",
    "jpeg": "decoding JPEGs",
    "iterable": "a stream",
}


def published() -> tuple[dict[str, float], list[tuple[str, float, float]]]:
    """Batches a second × torch: of holdfast for each workload, and of each loader for two of them,
    from the tables of the page."""
    text = PERFORMANCE.read_text(encoding="utf-8").partition("## Results")[2]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    ours = {row[0].strip("*"): float(row[1]) for row in rows if row[0].strip("*") in WORKLOADS}
    head = next(place for place, row in enumerate(rows) if row[0] == "loader")
    peers = [(row[0], float(row[1]), float(row[3])) for row in rows[head + 2 : head + 7]]
    return ours, peers


def benchmark() -> Drawing:
    """How fast: the figures of docs/performance.md."""
    ours, peers = published()
    one = Drawing(960, 356, "Batches a second relative to torch; the figures are in performance.md")

    def bars(x: int, y: int, room: int, most: float, rows: list[tuple[str, str, float]]) -> None:
        for place, (name, kind, times) in enumerate(rows):
            at = y + 24 * place
            one.text(x, at + 12, name, "small")
            wide = round(room * times / most)
            one.parts.append(
                f'<rect class="{kind}" x="{x + 150}" y="{at}" width="{wide}" height="16" rx="2"/>'
            )
            one.text(x + 156 + wide, at + 13, f"{times:g}×", "title" if kind == "ours" else "small")
        unit = x + 150 + round(room / most)
        low = y + 24 * len(rows)
        one.parts.append(f'<path class="one" d="M{unit} {y - 6}V{low}"/>')
        one.text(unit - 10, low + 14, "torch", "small")

    one.text(20, 30, "holdfast, batches a second × torch", "title")
    most = max(ours.values())
    rows = [(f"{name}: {about}", "ours", ours[name]) for name, about in WORKLOADS.items()]
    bars(20, 64, 330, most, rows)
    one.text(570, 30, "beside other loaders", "title")
    most = max(max(jpeg, stream) for _, jpeg, stream in peers)
    for place, workload in enumerate(("jpeg", "iterable")):
        y = 64 + 150 * place
        one.text(570, y - 8, f"{workload}: {WORKLOADS[workload]}", "small")
        kinds = ["ours" if name == "holdfast" else "others" for name, *_ in peers]
        rows = [(row[0], kind, row[1 + place]) for row, kind in zip(peers, kinds, strict=True)]
        bars(570, y, 170, most, rows)
    one.text(
        20, 310, "two workers, two cores, medians of rounds; the dashed line is torch", "small"
    )
    return one


def main(folder: Path) -> None:
    for draw in (processes, batch, death, benchmark):
        draw().save(folder / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
