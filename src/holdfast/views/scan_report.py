"""How a scan looks on a terminal: a bar while it runs, tables when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from holdfast.autopsy.machine_facts import in_words
from holdfast.samples.bad_sample import BadSample
from holdfast.samples.policy import group_of
from holdfast.scan.scan_statistics import Examples, Spread, Tally

LINE_INTERVAL: Final = 30.0  # seconds, where there is no terminal
SHOWN_CAUSES: Final = 20
SHOWN_FORMS: Final = 10
SHOWN_GOOD: Final = 20
Names = Callable[[int], str | None]


def console(*, stderr: bool = False) -> Console:
    """Wraps at words on a terminal, and nowhere in a file, so that lines can be searched for."""
    out = Console(highlight=False, markup=False, stderr=stderr)  # names may look like markup
    out.soft_wrap = not out.is_terminal
    return out


class Bar:
    """Progress: a bar on a terminal, elsewhere a line every 30 seconds."""

    def __init__(self, out: Console, total: int, done: int, bad: int) -> None:
        self._out = out
        self._total = total
        self._first = self._done = done
        self._bad = bad
        self._began = self._said = time.monotonic()
        self._live: Progress | None = None
        self._task = TaskID(0)
        if out.is_terminal:
            self._live = Progress(
                TextColumn("scanning"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[bad]}"),
                console=out,
                expand=True,
                transient=True,
                refresh_per_second=4,
            )
            self._task = self._live.add_task("", total=total, completed=done, **self._words())

    def __enter__(self) -> Bar:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, done: int, bad: int) -> None:
        self._done, self._bad = done, bad
        if self._live is not None:
            self._live.update(self._task, completed=done, **self._words())
        elif time.monotonic() - self._said >= LINE_INTERVAL:
            self._said = time.monotonic()
            words = self._words()
            self._out.print(
                f"scanned {done} of {self._total} ({done / self._total:.0%}), "
                f"{words['bad']}, {words['rate']}, {words['left']}",
            )

    def _words(self) -> dict[str, Any]:
        took = time.monotonic() - self._began
        rate = (self._done - self._first) / took if took > 0 else 0.0
        left = in_time((self._total - self._done) / rate) if rate else "?"
        return {
            "rate": f"{_number(rate)}/s" if rate else "…/s",
            "left": f"{left} left",
            "bad": f"[red]{self._bad} bad[/red]"
            if self._bad and self._live
            else f"{self._bad} bad",
        }


@dataclass(frozen=True)
class Report:
    """All that is shown at the end."""

    title: str
    total: int  # to be scanned
    tally: Tally
    seconds: float
    out: str | None = None  # the file that lists the bad samples
    of_files: bool = False  # files were scanned, not a dataset
    retried: int | None = None  # how many samples were listed for --retry
    good_now: tuple[int, ...] = ()
    gone: tuple[BadSample, ...] = ()  # listed, and not in the dataset any more


def show(out: Console, report: Report, names: Names) -> None:
    """Bad samples come last, because the end stays on the screen."""
    tally = report.tally
    rate = f", {_number(tally.seen / report.seconds)} a second" if report.seconds else ""
    out.print(
        f"{report.title}: {tally.seen} of {report.total} samples scanned in "
        f"{in_time(report.seconds)}{rate}."
    )
    if tally.good:
        _spreads(out, tally)
        _tops(out, tally, names)
        _forms(out, tally)
    _twice(out, tally)
    if report.retried is not None:
        _retried(out, report, names)
    _bad(out, report)
    _what_now(out, report)


# -- bad samples ---------------------------------------------------------------------------


def _retried(out: Console, report: Report, names: Names) -> None:
    out.print(f"{len(report.good_now)} of the {report.retried} listed are good now.")
    for index in report.good_now[:SHOWN_GOOD]:
        out.print(Text(f"  {index}  {names(index) or ''}".rstrip(), style="green"))
    if len(report.good_now) > SHOWN_GOOD:
        out.print(f"  … and {len(report.good_now) - SHOWN_GOOD} more")
    if report.gone:
        out.print(f"{len(report.gone)} listed are not in the dataset any more:")
        for bad in report.gone[:SHOWN_GOOD]:
            out.print(Text(f"  {bad.name or bad.index}"))


def _bad(out: Console, report: Report) -> None:
    tally = report.tally
    if not tally.bad:
        out.print(Text("None is bad.", style="green"))
        return
    out.print(Text(f"{tally.bad} {'is' if tally.bad == 1 else 'are'} bad.", style="bold red"))
    table = _table("bad", "cause", "first of them")
    groups = tally.causes.ranked()
    for count, first in groups[:SHOWN_CAUSES]:
        table.add_row(str(count), _cause(first[0]), _who(out, first))
    _print(out, table)
    if len(groups) > SHOWN_CAUSES:
        rest = sum(count for count, _ in groups[SHOWN_CAUSES:])
        out.print(f"… and {rest} of {len(groups) - SHOWN_CAUSES} other causes")


def _cause(bad: BadSample) -> Text:
    words = Text(group_of(bad), style="bold")
    message = bad.message.strip().splitlines()
    if message:
        words.append(f"\n{_cut(message[0], 160)}", style="not bold")
    return words


def _who(out: Console, bad: Sequence[BadSample]) -> Text:
    room = max(20, out.width // 2 - 16)
    return Text("\n".join(_called(one.index, one.name, room) for one in bad[:3]))


# -- numbers -------------------------------------------------------------------------------


def _spreads(out: Console, tally: Tally) -> None:
    table = _table("per sample", "p50", "p95", "max", right=(1, 2, 3))
    for word, spread, unit in _quantities(tally):
        values = (spread.quantile(0.5), spread.quantile(0.95), spread.most)
        table.add_row(word, *(unit(value) for value in values))
    _print(out, table)


def _tops(out: Console, tally: Tally, names: Names) -> None:
    for title, (_, spread, unit) in zip(("slowest", "largest"), _quantities(tally), strict=True):
        if spread.is_flat:
            continue
        table = _table(title, "index", "name", right=(0, 1))
        named = [(value, index, names(index) or "") for value, index in spread.top]
        for value, index, name in named:
            table.add_row(unit(value), str(index), _end_of(name, max(20, out.width - 28)))
        if not any(name for _, _, name in named):
            table.columns.pop()
        _print(out, table)


def _quantities(tally: Tally) -> list[tuple[str, Spread, Callable[[float], str]]]:
    return [("time", tally.seconds, in_seconds), ("bytes", tally.nbytes, _in_bytes)]


def _forms(out: Console, tally: Tally) -> None:
    forms = tally.forms
    kinds = len(forms.by_form)
    if forms.usual() is None:
        more = "more than " if forms.beyond.count else ""
        out.print(
            f"Shapes vary: {more}{kinds} different ones, and none of them has half of the samples. "
            "Default collation needs equal shapes within a batch."
        )
    odd = tally.odd()
    if not odd:
        return
    count = sum(one.examples.count for one in odd)
    out.print(
        f"{count} {'is' if count == 1 else 'are'} unlike the others, and default collation may "
        "fail to put them into one batch:"
    )
    table = _table("odd", "how", "first of them")
    for one in odd[:SHOWN_FORMS]:
        table.add_row(str(one.examples.count), one.how, _indices(one.examples))
    _print(out, table)
    if len(odd) > SHOWN_FORMS:
        out.print(f"… and {len(odd) - SHOWN_FORMS} other forms")


def _twice(out: Console, tally: Tally) -> None:
    if tally.restless.count:
        out.print(
            Text(
                f"{tally.restless.count} differ when loaded again from the same random state, so "
                "they depend on something that no seed controls (a clock, the system's randomness, "
                f"the order of files): {_indices(tally.restless)}",
                style="yellow",
            )
        )
    if tally.still.count:
        which = "All" if tally.still.count == tally.good else f"{tally.still.count} of the good"
        out.print(
            f"{which} draw no random numbers: each is the same in every epoch, so nothing "
            f"augments them: {_indices(tally.still)}"
        )
    if tally.opaque.count:
        out.print(
            f"{tally.opaque.count} contain something that cannot be compared: "
            f"{_indices(tally.opaque)}"
        )


def _what_now(out: Console, report: Report) -> None:
    if not report.tally.bad:
        return
    if report.out is None:
        out.print("What to do: --out bad.jsonl keeps the list, to repair the samples or skip them.")
        return
    out.print(f"All of them, with tracebacks: {report.out}")
    leave_out = "repair or remove these files"
    if not report.of_files:
        skipping = f'DataLoader(..., on_bad_sample="skip", quarantine="{report.out}")'
        leave_out = f"{skipping} skips them"
    out.print(f"What to do: {leave_out}; after repairs, --retry {report.out} tries them again.")


# -- words ---------------------------------------------------------------------------------


def _print(out: Console, table: Table) -> None:
    out.print(table)
    out.print()


def _table(*columns: str, right: Sequence[int] = (0,)) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        narrow = place in right
        justify: Any = "right" if narrow else "left"
        table.add_column(name, justify=justify, no_wrap=narrow, overflow="fold")
    return table


def _called(index: Any, name: str | None, room: int) -> str:
    return f"{index}  {_end_of(name, room)}" if name else str(index)


def _indices(examples: Examples) -> str:
    more = ", …" if examples.count > len(examples.first) else ""
    return ", ".join(map(str, examples.first)) + more


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _end_of(text: str, room: int) -> str:
    """The end of a path says more than its beginning."""
    return text if len(text) <= room else f"…{text[1 - room :]}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def in_time(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02} min"


def in_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds:.0f} s"
    return f"{seconds / 1e-6:.3g} µs"


def _in_bytes(count: float) -> str:
    return in_words(round(count))
