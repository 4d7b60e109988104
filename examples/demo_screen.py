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

from demo_run import BATCHES, EPOCHS, STALL_TIMEOUT, TOTAL, WORKERS, Run, Strike, seconds

WIDEST = 120
NARROWEST, LOWEST = 72, 22  # what the panes need
PANE_LINES = 14
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
    lines: list[Line] = [[("bold", " " + part)] for part in textwrap.wrap(PURPOSE, width - 2)]
    lines += [[], _reference(reference, width), []]
    return lines + [one + other for one, other in zip(left, right, strict=True)]


def _reference(run: Run, width: int) -> Line:
    head = f" {run.name}  "
    if run.finished:
        tail = f"  {run.batches:>3}/{TOTAL}  {_loss(run)}"
    else:
        tail = f"  {run.batches:>3}/{TOTAL}  {'' if run.losses else 'starting'}"
    return [("", head), *_bar(run, width - len(head) - len(tail) - 1), ("", tail)]


def _pane(run: Run, reference: Run, width: int) -> list[Line]:
    inner = width - 4
    body = [*_progress(run, reference, inner), [("dim", "─" * inner)], *_story(run, inner)]
    body += [[] for _ in range(PANE_LINES - len(body))]
    title = f" {run.loader} "
    top: Line = [("dim", "╭─"), ("bold", title), ("dim", "─" * (inner - len(title) + 1) + "╮")]
    bottom: Line = [("dim", f"╰{'─' * (inner + 2)}╯")]
    sides = [[("dim", "│ "), *_fit(line, inner), ("dim", " │")] for line in body[:PANE_LINES]]
    return [top, *sides, bottom]


def _progress(run: Run, reference: Run, width: int) -> list[Line]:
    if not run.batches:
        text = "starting" if run.began else "waits for the undisturbed run"
        return [[("dim", text)], [], [], []]
    epoch = min(EPOCHS, 1 + (run.batches - 1) // BATCHES)
    place = f"epoch {epoch}/{EPOCHS}   batch {run.batches:>3}/{TOTAL}"
    loss = _loss(run)
    same = run.same_losses(reference)
    return [
        [("", place), ("", loss.rjust(width - len(place)))],
        _bar(run, width),
        _workers(run, width),
        [
            ("green" if same == len(run.losses) else "red", f"{same} of {len(run.losses)}"),
            ("", " losses as undisturbed"),
        ],
    ]


def _loss(run: Run) -> str:
    if run.final_loss is not None:
        return f"final loss {float.fromhex(run.final_loss):.4f}"
    return f"loss {float.fromhex(run.losses[-1]):.4f}" if run.losses else ""


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
    lines = [_strike(run, strike, width) for strike in run.strikes]
    if run.died:
        lines.append([])
        lines += [[("red", part)] for part in textwrap.wrap(run.error, width)]
        verdict = f"Exit status {run.exit_status}, {TOTAL - run.batches} batches missing."
        lines += [[], [("bold", verdict)]]
    return lines


def _strike(run: Run, strike: Strike, width: int) -> Line:
    line: Line = [("", f"worker {strike.worker} "), ("yellow", f"{strike.kind:<9}")]
    if width > 50 and strike.incident is not None:
        line.append(("dim", f"{strike.activity:<20} "))
    if strike.delay is not None:
        return [*line, ("green", "✓"), ("", f" batch in {seconds(strike.delay)}")]
    if run.died:
        return [*line, ("red", "✗"), ("", " the run died")]
    waiting = "no sign of life" if strike.kind == "hang" else "down"
    return [*line, ("red", "✗"), ("", f" {waiting}")]


# -- the summary --------------------------------------------------------------------------


def summary(runs: Sequence[Run]) -> list[Line]:
    """What happened, in a table of at most 80 columns."""
    reference, torch, holdfast = runs
    head = _row("what", "worker", "while it was", "what holdfast did", "lost batch")
    lines: list[Line] = [[("bold", head)]]
    for strike in holdfast.strikes:
        action = strike.incident["action"] if strike.incident else "nothing"
        delay = "never" if strike.delay is None else f"after {seconds(strike.delay)}"
        row = _row(strike.kind, str(strike.worker), strike.activity, action, delay)
        lines.append([("", row)])
    lines += _where_it_hung(holdfast)
    lines += [[], [("bold", " final loss")]]
    return lines + [_final(run, reference) for run in (reference, torch, holdfast)]


def _row(what: str, worker: str, activity: str, action: str, delay: str) -> str:
    return f" {what:<9} {worker:<7} {activity:<20} {action:<24} {delay:>13}"


def _where_it_hung(run: Run) -> list[Line]:
    """The line of code that holdfast found the hanging worker at."""
    for strike in run.strikes:
        if strike.kind != "hang" or strike.incident is None:
            continue
        for line in strike.incident["stack"].splitlines():
            if "demo_training.py" in line:
                place = line.strip().partition("demo_training.py")[2]
                text = f" The hang ended after stall_timeout={STALL_TIMEOUT:g} s; it was in demo_training.py"
                return [[("dim", text + place.replace('",', ","))]]
    return []


def _final(run: Run, reference: Run) -> Line:
    line: Line = [("", f" {run.name:<20}")]
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

PURPOSE = (
    f"The same training three times: {TOTAL} batches, {WORKERS} workers. "
    "Only the loader differs."
)


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
    return "".join(
        f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style else text for style, text in line
    )
