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
from types import TracebackType
from typing import Protocol

from demo_run import (
    BATCH_SIZE,
    BATCHES,
    MEMORY_LIMIT,
    TOTAL,
    WORKERS,
    Run,
    Strike,
    mebibytes,
    seconds,
)

WIDEST = 120
NARROWEST, LOWEST = 78, 23  # what the panes need
AROUND = 7  # lines that are not inside of the panes, and one for the cursor
TALLEST = 21  # what they have to say at most
FRAMES_PER_SECOND = 15

Span = tuple[str, str]  # style, text
Line = list[Span]

STYLES = {"": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


class Runs(Protocol):
    """The undisturbed training, torch's two, and holdfast's."""

    @property
    def reference(self) -> Run: ...
    @property
    def torch(self) -> Run: ...
    @property
    def again(self) -> Run: ...
    @property
    def holdfast(self) -> Run: ...


class View(Protocol):
    """Shows the runs while they go on."""

    def __enter__(self) -> View: ...
    def update(self) -> None: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def choose_view(runs: Runs) -> View:
    size = shutil.get_terminal_size()
    roomy = size.columns >= NARROWEST and size.lines >= LOWEST
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and roomy:
        return Panes(runs)
    return Lines(runs)


# -- lines --------------------------------------------------------------------------------


class Lines:
    """One line for each thing that happens."""

    def __init__(self, runs: Runs) -> None:
        self.runs = (runs.reference, runs.torch, runs.again, runs.holdfast)
        self.shown = [0] * len(self.runs)
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

    def __init__(self, runs: Runs) -> None:
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
        lines = frame(self.runs, *_size())
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
            for line in frame(self.runs, *_size()):
                print(render(line))

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def frame(runs: Runs, width: int, height: int = LOWEST) -> list[Line]:
    """Everything the panes show at this moment."""
    reference, holdfast = runs.reference, runs.holdfast
    half, inside = width // 2, min(TALLEST, height - AROUND)
    left = _pane("torch.utils.data.DataLoader", _torch(runs, half - 4), half, inside)
    body = _holdfast(holdfast, reference, width - half - 4, inside)
    right = _pane("holdfast.DataLoader", body, width - half, inside)
    lines: list[Line] = [[("bold", f" {PURPOSE}")], [], _reference(reference, width), []]
    return lines + [one + other for one, other in zip(left, right, strict=True)]


def _reference(run: Run, width: int) -> Line:
    head = f" {run.name}  "
    tail = f"  batch {run.batches:>3}/{TOTAL}  {_loss(run) or 'starting':<10}"
    return [("", head), *_bar(run, width - len(head) - len(tail) - 1), ("", tail)]


def _pane(title: str, body: list[Line], width: int, height: int) -> list[Line]:
    inner = width - 4
    body = [*body[:height], *([] for _ in range(height - len(body)))]
    title = f" {title} "
    top: Line = [("dim", "╭─"), ("bold", title), ("dim", "─" * (inner - len(title) + 1) + "╮")]
    bottom: Line = [("dim", f"╰{'─' * (inner + 2)}╯")]
    sides = [[("dim", "│ "), *_fit(line, inner), ("dim", " │")] for line in body]
    return [top, *sides, bottom]


def _torch(runs: Runs, width: int) -> list[Line]:
    """What becomes of torch's run, and of the one that is started after its death."""
    first, second = runs.torch, runs.again
    body = [*_progress(second if second.began else first, runs.reference, width), _rule(width)]
    body += [*_story(first, width), *_death(first, width)]
    if second.began:
        body += [_rule(width), *_story(second, width), *_death(second, width)]
    return body


def _holdfast(run: Run, reference: Run, width: int, height: int) -> list[Line]:
    """What becomes of holdfast's; of its strikes the last ones, if there is not room for all."""
    body = [*_progress(run, reference, width), _rule(width)]
    end = _death(run, width) or _comparison(run, reference)
    room = height - len(body) - len(end)
    return [*body, *_story(run, width)[-room:], *end]


def _rule(width: int) -> Line:
    return [("dim", "─" * width)]


def _progress(run: Run, reference: Run, width: int) -> list[Line]:
    if not run.batches:
        text = "starting" if run.began else "waits for the undisturbed run"
        return [[("dim", text)], [], [], [], []]
    epoch = 1 + (run.batches - 1) // BATCHES
    place = f"epoch {epoch}/{run.total // BATCHES}  batch {run.batches:>3}/{run.total}"
    loss = _loss(run)
    same = run.same_losses(reference)
    compared = min(len(run.losses), TOTAL)
    return [
        [("", place), ("", loss.rjust(width - len(place)))],
        _bar(run, width),
        _workers(run, width),
        [
            ("", "same losses as undisturbed: "),
            ("green" if same == compared else "red", f"{same}/{compared}"),
        ],
        [("", "largest worker so far: "), ("yellow" if run.leaks else "", mebibytes(run.largest))],
    ]


def _loss(run: Run) -> str:
    last = run.losses[-1] if run.losses else None
    return "" if last is None else f"loss {float.fromhex(last):.3f}"


def _bar(run: Run, width: int) -> Line:
    done = width * run.batches // run.total
    style = "red" if run.died else "green"
    return [(style, "━" * done), ("dim", "─" * (width - done))]


def _workers(run: Run, width: int) -> Line:
    line: Line = [("", "workers ")]
    for number in range(WORKERS):
        worker = run.workers.get(number)
        up = worker is not None and worker.up
        line += [("", f" {number} "), ("green" if up else "red", "●" if up else "✗")]
    replaced = sum(strike.incident is not None for strike in run.strikes) + run.recycled
    if replaced:
        text = f"{replaced} replaced"
        line.append(("", text.rjust(width - _length(line))))
    return line


def _story(run: Run, width: int) -> list[Line]:
    if not run.strikes:
        return [[("dim", part)] for part in textwrap.wrap(run.plan, width)]
    return [_strike(run, strike, width) for strike in run.strikes]


def _death(run: Run, width: int) -> list[Line]:
    if not run.died:
        return []
    message: list[Line] = [[("red", part)] for part in textwrap.wrap(run.error, width)]
    verdict = f"Exit status {run.exit_status}, {run.total - run.batches} batches missing."
    return [*message[:3], [("bold", verdict)]]


def _comparison(run: Run, reference: Run) -> list[Line]:
    if not run.leaks:
        return []
    replaced = f"{run.recycled} replaced" if run.recycled else "no worker too large yet"
    lines: list[Line] = [[("yellow", "leak      "), ("", f"over {MEMORY_LIMIT}: {replaced}")]]
    if run.through:
        same = run.final_loss == reference.final_loss
        verdict = "the undisturbed one, bit for bit" if same else "not the undisturbed one"
        lines += [
            [("bold", f"Loss {run.final_loss}:")],
            [("green" if same else "red", f"{verdict}.")],
            [("", "Now a file is damaged.")],
        ]
    if run.bad is not None:
        file = run.bad["name"].rpartition("/")[2]
        lines[-1] = [("yellow", "damaged   "), ("", f"{file} {run.bad['action']}")]
    return lines


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


def summary(runs: Runs) -> list[Line]:
    """What happened, in a table of at most 80 columns."""
    reference, holdfast = runs.reference, runs.holdfast
    head = _row("what", "worker", "while it was", "what holdfast did", "its batch came")
    lines: list[Line] = [[("bold", head)]]
    for strike in holdfast.strikes:
        delay = "never" if strike.delay is None else f"after {seconds(strike.delay)}"
        row = _row(strike.kind, str(strike.worker), strike.activity, strike.action, delay)
        lines.append([("", row)])
    usual = seconds(reference.seconds_per_batch)
    note = f"Times: from the blow until the trainer had that batch; undisturbed: {usual}."
    lines += [[("dim", f" {note}")], *_where_it_hung(holdfast)]
    lines += [[], *_leak(runs), [], *_damage(runs)]
    lines += [[], [("bold", f" Loss on unseen pictures, after {TOTAL} batches")]]
    return lines + [_final(run, reference) for run in (reference, runs.torch, holdfast)]


def _leak(runs: Runs) -> list[Line]:
    """How large workers became. The undisturbed run leaks too, and has no limit."""
    torch, holdfast = mebibytes(runs.reference.largest), mebibytes(runs.holdfast.largest)
    said = textwrap.wrap(runs.holdfast.growth, 65)
    return [
        [("bold", " The dataset leaks: the largest worker")],
        [("", f" torch        {torch:<8} at the end of the undisturbed run, without a limit")],
        [
            ("", f" holdfast     {holdfast:<8} with worker_memory_limit={MEMORY_LIMIT!r}: "),
            ("green" if runs.holdfast.recycled else "red", f"{runs.holdfast.recycled} replaced"),
        ],
        *([("dim", f" {'' if line else 'its log':<13}{part}")] for line, part in enumerate(said)),
    ]


def _damage(runs: Runs) -> list[Line]:
    """What a damaged file costs."""
    again, holdfast = runs.again, runs.holdfast
    lines: list[Line] = [[("bold", " A file is damaged")]]
    died = f"died after {again.batches} batches: " if again.died else "went on"
    words = textwrap.shorten(died + (again.error if again.died else ""), 65, placeholder=" …")
    lines.append([("", " torch        "), ("red", words)])
    samples = f"{holdfast.samples} of {BATCHES * BATCH_SIZE} samples"
    if holdfast.bad is None:
        return [*lines, [("", " holdfast     "), ("red", samples)]]
    found = f"{holdfast.bad['name']} {holdfast.bad['action']}"
    return [*lines, [("", " holdfast     "), ("green", samples), ("", f"; {found}")]]


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
        return [*line, ("red", f"none: it died at batch {run.batches} of {run.total}")]
    line.append(("", f"{run.final_loss:<24}"))
    if run is reference:
        return line
    if run.final_loss != reference.final_loss:
        return [*line, ("red", "not the same")]
    same = run.same_losses(reference)
    return [*line, ("green", f"the same, as after {same} of {TOTAL} batches")]


# -- text ---------------------------------------------------------------------------------

PURPOSE = f"The same training with each loader: {TOTAL} batches, {WORKERS} workers, one seed."


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size()
    return min(WIDEST, size.columns), size.lines


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
