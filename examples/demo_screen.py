"""What the demo shows: two panes in a terminal, plain lines anywhere else, and the summary.

In a terminal every frame is drawn afresh on the alternate screen, so nothing breaks when the window
changes its size; the last frame is printed again on the ordinary screen, where it stays.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from demo_run import BATCHES, EPOCHS, TOTAL, WORKERS, Run, Strike, seconds

WIDEST = 120
NARROWEST, LOWEST = 78, 23  # what the panes need
PANE_LINES = 16
FRAMES_PER_SECOND = 15

Span = tuple[str, str]  # style, text
Line = list[Span]

STYLES = {"": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class View(Protocol):
    """Shows the runs while they go on: the undisturbed one, torch's, holdfast's."""

    def __enter__(self) -> View: ...
    def update(self) -> None: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def choose_view(runs: Sequence[Run]) -> View:
    size = shutil.get_terminal_size()
    roomy = size.columns >= NARROWEST and size.lines >= LOWEST
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and roomy:
        return Panes(runs)
    return Lines(runs)


# -- lines --------------------------------------------------------------------------------


class Lines:
    """One line for each thing that happens."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.shown = [0] * len(runs)
        self.began = time.monotonic()

    def __enter__(self) -> Lines:
        print(f"{PURPOSE}\n", flush=True)
        return self

    def update(self) -> None:
        news = []
        for place, run in enumerate(self.runs):
            news += [(when, run, text) for when, text in run.news[self.shown[place] :]]
            self.shown[place] = len(run.news)
        for when, run, text in sorted(news, key=lambda item: item[0]):
            print(f"{when - self.began:5.1f} s  {run.name:<12} {text}", flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.update()


# -- panes --------------------------------------------------------------------------------


class Panes:
    """torch on the left, holdfast on the right, the undisturbed run above."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.drawn = 0.0

    def __enter__(self) -> Panes:
        self._write("\x1b[?1049h\x1b[?25l")  # the alternate screen, no cursor
        return self

    def update(self) -> None:
        now = time.monotonic()
        if now - self.drawn < 1 / FRAMES_PER_SECOND:
            return
        self.drawn = now
        lines = frame(self.runs, _width())
        # Home; each line to its end; what is below goes away.
        self._write("\x1b[H" + "\x1b[K\r\n".join(render(line) for line in lines) + "\x1b[J")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write("\x1b[?25h\x1b[?1049l")
        if error is None:
            for line in frame(self.runs, _width()):
                print(render(line))

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def frame(runs: Sequence[Run], width: int) -> list[Line]:
    """Everything the panes show at this moment."""
    reference, torch, holdfast = runs
    half = width // 2
    left = _pane(torch, reference, half)
    right = _pane(holdfast, reference, width - half)
    lines: list[Line] = [[("bold", f" {PURPOSE}")], [], _reference(reference, width), []]
    return lines + [one + other for one, other in zip(left, right, strict=True)]


def _reference(run: Run, width: int) -> Line:
    head = f" {run.name}  "
    loss = f"final {_loss(run)}" if run.through else _loss(run) or "starting"
    tail = f"  batch {run.batches:>3}/{TOTAL}  {loss:<16}"
    return [("", head), *_bar(run, width - len(head) - len(tail) - 1), ("", tail)]


def _pane(run: Run, reference: Run, width: int) -> list[Line]:
    inner = width - 4
    body = [*_progress(run, reference, inner), [("dim", "─" * inner)]]
    story, end = _story(run, inner), _end(run, reference, inner)
    room = PANE_LINES - len(body) - len(end)
    body += [*story[-room:], *end]
    body += [[] for _ in range(PANE_LINES - len(body))]
    title = f" {run.loader} "
    top: Line = [("dim", "╭─"), ("bold", title), ("dim", "─" * (inner - len(title) + 1) + "╮")]
    bottom: Line = [("dim", f"╰{'─' * (inner + 2)}╯")]
    sides = [[("dim", "│ "), *_fit(line, inner), ("dim", " │")] for line in body]
    return [top, *sides, bottom]


def _progress(run: Run, reference: Run, width: int) -> list[Line]:
    if not run.batches:
        text = "starting" if run.began else "waits for the undisturbed run"
        return [[("dim", text)], [], [], []]
    epoch = min(EPOCHS, 1 + (run.batches - 1) // BATCHES)
    place = f"epoch {epoch}/{EPOCHS}  batch {run.batches:>3}/{TOTAL}"
    loss = _loss(run)
    same = run.same_losses(reference)
    return [
        [("", place), ("", loss.rjust(width - len(place)))],
        _bar(run, width),
        _workers(run, width),
        [
            ("", "same losses as undisturbed: "),
            ("green" if same == len(run.losses) else "red", f"{same}/{len(run.losses)}"),
        ],
    ]


def _loss(run: Run) -> str:
    last = run.final_loss or (run.losses[-1] if run.losses else None)
    return "" if last is None else f"loss {float.fromhex(last):.3f}"


def _bar(run: Run, width: int) -> Line:
    done = width * run.batches // TOTAL
    style = "red" if run.died else "green"
    return [(style, "━" * done), ("dim", "─" * (width - done))]


def _workers(run: Run, width: int) -> Line:
    line: Line = [("", "workers ")]
    for number in range(WORKERS):
        worker = run.workers.get(number)
        up = worker is not None and worker.up
        line += [("", f" {number} "), ("green" if up else "red", "●" if up else "✗")]
    replaced = sum(strike.incident is not None for strike in run.strikes)
    if replaced:
        text = f"{replaced} replaced"
        line.append(("", text.rjust(width - _length(line))))
    return line


def _story(run: Run, width: int) -> list[Line]:
    if not run.strikes:
        return [[("dim", part)] for part in textwrap.wrap(run.plan, width)]
    return [_strike(run, strike, width) for strike in run.strikes]


def _end(run: Run, reference: Run, width: int) -> list[Line]:
    if run.died:
        message: list[Line] = [[("red", part)] for part in textwrap.wrap(run.error, width)]
        verdict = f"Exit status {run.exit_status}, {TOTAL - run.batches} batches missing."
        return [[], *message[: PANE_LINES // 2], [], [("bold", verdict)]]
    if not run.through:
        return []
    same = run.final_loss == reference.final_loss
    verdict = "the undisturbed one, bit for bit" if same else "not the undisturbed one"
    return [
        [("bold", f"Final loss {run.final_loss}:")],
        [("green" if same else "red", f"{verdict}.")],
    ]


def _strike(run: Run, strike: Strike, width: int) -> Line:
    line: Line = [("", f"worker {strike.worker} "), ("yellow", f"{strike.kind:<9}")]
    if width > 50 and strike.incident is not None:
        line.append(("dim", f"{strike.activity:<20} "))
    if strike.delay is not None:
        return [*line, ("green", "✓"), ("", f" batch in {seconds(strike.delay)}")]
    if run.died:
        return [*line, ("red", "✗"), ("", " the run died")]
    if strike.incident is not None:
        return [*line, ("yellow", "…"), ("", " makes it again")]
    return [*line, ("red", "✗"), ("", " no sign of life" if strike.kind == "hang" else " down")]


# -- the summary --------------------------------------------------------------------------


def summary(runs: Sequence[Run]) -> list[Line]:
    """What happened, in a table of at most 80 columns."""
    reference, torch, holdfast = runs
    head = _row("what", "worker", "while it was", "what holdfast did", "its batch came")
    lines: list[Line] = [[("bold", head)]]
    for strike in holdfast.strikes:
        delay = "never" if strike.delay is None else f"after {seconds(strike.delay)}"
        row = _row(strike.kind, str(strike.worker), strike.activity, strike.action, delay)
        lines.append([("", row)])
    note = "Times: from the blow until the trainer had that batch; making one takes 0.1 s."
    lines += [[("dim", f" {note}")], *_where_it_hung(holdfast)]
    lines += [[], [("bold", " final loss")]]
    return lines + [_final(run, reference) for run in (reference, torch, holdfast)]


def _row(what: str, worker: str, activity: str, action: str, delay: str) -> str:
    return f" {what:<9} {worker:<7} {activity:<20} {action:<22} {delay:>15}"


def _where_it_hung(run: Run) -> list[Line]:
    """The line of code that holdfast found the hanging worker at."""
    for strike in run.strikes:
        if strike.kind != "hang" or strike.incident is None:
            continue
        for line in strike.incident["stack"].splitlines():
            if "demo_training.py" in line:
                place = line.strip().partition("demo_training.py")[2].replace('"', "")
                text = f" The hang, by the stack that holdfast kept: demo_training.py{place}"
                return [[("dim", text)]]
    return []


def _final(run: Run, reference: Run) -> Line:
    line: Line = [("", f" {run.name:<13}")]
    if run.final_loss is None:
        return [*line, ("red", f"none: it died at batch {run.batches} of {TOTAL}")]
    line.append(("", f"{run.final_loss:<24}"))
    if run is reference:
        return line
    if run.final_loss != reference.final_loss:
        return [*line, ("red", "not the same")]
    same = run.same_losses(reference)
    return [*line, ("green", f"the same, as after {same} of {TOTAL} batches")]


# -- text ---------------------------------------------------------------------------------

PURPOSE = f"One training, three times: {TOTAL} batches, {WORKERS} workers, the same seed."


def _width() -> int:
    return min(WIDEST, shutil.get_terminal_size().columns)


def _length(line: Line) -> int:
    return sum(len(text) for _, text in line)


def _fit(line: Line, width: int) -> Line:
    """The line at exactly this width."""
    fitted: Line = []
    for style, text in line:
        fitted.append((style, text[:width]))
        width -= len(text[:width])
    return [*fitted, ("", " " * width)]


def render(line: Line) -> str:
    plain = "NO_COLOR" in os.environ or not sys.stdout.isatty()
    if plain:
        return "".join(text for _, text in line).rstrip()
    return "".join(f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style else text for style, text in line)
