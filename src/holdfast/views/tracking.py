"""``holdfast.track(loader)``: one line about an epoch while it runs.

A line on a terminal, one that changes in a notebook, elsewhere a plain line every 30 seconds.
It is drawn by the loop itself, between two batches: a thread beside it could hold a lock while
workers are forked. What it shows is counted here, so that it works for torch's loaders too; only
incidents come from holdfast.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from html import escape
from typing import Any, Final, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from holdfast.autopsy.machine_facts import in_words
from holdfast.autopsy.readers import procfs
from holdfast.loader_identity import rank
from holdfast.loader_report import Report, of
from holdfast.views.scan_report import LINE_INTERVAL, console, in_time

T = TypeVar("T")
Show = Callable[["Track[Any]"], None]

DRAWN: Final = 0.2  # seconds between two drawings
MEMORY_READ: Final = 2.0  # seconds between two readings of memory
MEMORY_SHARE: Final = 0.01  # of the time may go into reading it


def track(loader: Iterable[T], name: str = "") -> Track[T]:
    """Iterate a loader and show one line about it: batches a second, the share of the time that
    you waited for data, memory, incidents, time left.

    The loader may be any that :func:`holdfast.of` takes, torch's own too. The line is shown on
    standard error, of a distributed run in rank 0 only; without a terminal it is a plain line
    every 30 seconds.

    >>> import holdfast
    >>> loader = holdfast.DataLoader([1, 2, 3])
    >>> [int(batch) for batch in holdfast.track(loader)]
    [1, 2, 3]
    """
    return Track(loader, name)


class Track(Generic[T]):
    """A loader that is shown while it is iterated; its `len` is the loader's."""

    def __init__(self, loader: Iterable[T], name: str = "") -> None:
        self._loader = loader
        self._report: Report = of(loader)
        self._name = name or getattr(self._report.loader, "name", None) or ""
        self._iterator: Iterator[T] | None = None
        self.total: int | None = None
        self.done = 0
        self.memory: int | None = None
        self._waited = 0.0
        self._began = self._now = 0.0
        self._incidents = 0  # before this epoch
        self._read_memory = 0.0  # when to read it next

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        try:
            self.total = len(self)
        except TypeError:  # a stream
            self.total = None
        self.done, self._read_memory = 0, 0.0
        self._incidents = self._incidents_so_far()
        self._began = self._now = time.monotonic()
        self._iterator = iter(self._loader)  # workers are forked before anything is drawn
        self._waited = time.monotonic() - self._began
        try:
            with ExitStack() as shown:
                yield from self._batches(self._iterator, *_way(shown))
        finally:
            self._iterator = None

    def _batches(self, iterator: Iterator[T], show: Show, interval: float) -> Iterator[T]:
        drawn = self._began - DRAWN
        taken: list[T] = []  # emptied before the user gets it: a batch is not kept here
        while True:
            asked = time.monotonic()
            try:
                taken.append(next(iterator))
            except StopIteration:
                break
            finally:
                self._now = time.monotonic()
                self._waited += self._now - asked
            self.done += 1
            if self._now - drawn >= interval:
                drawn = self._now
                self._look_at_memory()
                show(self)
            yield taken.pop()
        self._now = time.monotonic()
        if max(self._now - self._began, DRAWN) >= interval:
            show(self)

    def words(self) -> list[str]:
        """The parts of the line."""
        took = self._now - self._began
        rate = self.done / took if took > 0 else 0.0
        parts = [f"{self.done:,}" + ("" if self.total is None else f"/{self.total:,}")]
        if rate:
            parts.append(f"{rate:,.0f} batches/s" if rate >= 10 else f"{rate:.2g} batches/s")
            parts.append(f"waited {min(1.0, self._waited / took):.0%}")
        if self.memory is not None:
            parts.append(in_words(self.memory))
        count = self._incidents_so_far() - self._incidents
        parts.append(f"{count} incident{'s' * (count != 1)}" if count else "no incidents")
        if self.total is None or not rate or self.done >= self.total:
            parts.append(in_time(took))
        else:
            parts.append(f"{in_time((self.total - self.done) / rate)} left")
        return [self._name, *parts] if self._name else parts

    def _incidents_so_far(self) -> int:
        return int(self._report.stats()["incidents"] or 0)

    def _look_at_memory(self) -> None:
        """Bytes of this process and its workers; what they share counts once. Reading them takes
        longer the larger they are."""
        began = time.monotonic()
        if began < self._read_memory:
            return
        pids = [pid for _, pid in self._report.worker_pids()]
        if self._report.engine != "holdfast":
            pids = [one.pid for one in getattr(self._iterator, "_workers", ())]
        sizes = [procfs.rollup(pid) or {} for pid in (os.getpid(), *pids)]
        # Each page counts for a process by the part that it has of it.
        self.memory = sum(size.get("Pss", 0) for size in sizes) or None
        took = time.monotonic() - began
        self._read_memory = began + max(MEMORY_READ, took / MEMORY_SHARE)


def _way(shown: ExitStack) -> tuple[Show, float]:
    """How to show it here, and the seconds between two times."""
    if rank().told:
        return (lambda one: None), float("inf")
    if _in_notebook():
        return _notebook(), DRAWN
    out = console(stderr=True)
    if not out.is_terminal:
        return (lambda one: out.print(", ".join(one.words()))), LINE_INTERVAL
    return _terminal(out, shown), DRAWN


def _terminal(out: Console, shown: ExitStack) -> Show:
    progress = Progress(
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False),
        console=out,
        auto_refresh=False,
    )
    task = progress.add_task("", total=None)
    shown.enter_context(progress)
    out.show_cursor(True)  # a process that is killed does not bring it back

    def show(one: Track[Any]) -> None:
        words = " · ".join(one.words())
        progress.update(task, total=one.total, completed=one.done, description=words, refresh=True)

    return show


def _in_notebook() -> bool:
    """In a kernel that shows HTML. IPython is not imported here: a notebook has."""
    found = sys.modules.get("IPython")
    shell = None if found is None else found.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def _notebook() -> Show:
    # By name: it need not be installed where the types are checked.
    ipython: Any = importlib.import_module("IPython.display")
    handle = ipython.display(ipython.HTML(""), display_id=True)

    def show(one: Track[Any]) -> None:
        scale = "" if one.total is None else f' value="{one.done}" max="{one.total}"'
        handle.update(
            ipython.HTML(f"<progress{scale}></progress> {escape(' · '.join(one.words()))}")
        )

    return show
