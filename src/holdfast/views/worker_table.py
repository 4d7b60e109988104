"""The live view of loader workers: a table that refreshes in place."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.autopsy.machine_facts import in_words
from holdfast.autopsy.readers import HERE, Roots, cgroup, procfs
from holdfast.views.py_spy import Stacks
from holdfast.views.workers import SMAPS_TIME_SHARE, Worker, WorkerMonitor

_NOTABLE_GROWTH = 10 << 10  # bytes per second from which growth is coloured: 36 MB per hour
_FILE_WIDTH = 120  # characters per line, if not on a terminal
_STATES = {"R": "green", "D": "red", "T": "red", "t": "red", "Z": "red"}


def run(out: Console, pid: int | None, interval: float, once: bool, stacks: bool = True) -> int:
    """Show until q is pressed; returns how many workers there were at the end."""
    once = once or not (out.is_terminal and sys.stdin.isatty())
    # With --once there are two readings only, so their cost does not matter.
    monitor = WorkerMonitor(pid, share=1.0 if once else SMAPS_TIME_SHARE)
    spy = Stacks() if stacks else None
    try:
        if once:
            return _once(out, monitor, spy, interval)
        with _keys(), Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                rows = monitor.refresh()
                _request_stacks(spy, rows)
                live.update(draw(rows, surroundings(rows), spy, _no_workers(pid)), refresh=True)
                if _quits(interval):
                    return _count(rows)
    except KeyboardInterrupt:
        return 0
    finally:
        if spy is not None:
            spy.close()


def _once(out: Console, monitor: WorkerMonitor, spy: Stacks | None, interval: float) -> int:
    """Print one table, after two readings, because rates need two."""
    rows = monitor.refresh()
    deadline = time.monotonic() + max(interval, 1.0)
    while time.monotonic() < deadline:
        _request_stacks(spy, rows)
        time.sleep(0.1)
    rows = monitor.refresh()
    width = out.width if out.is_terminal else max(out.width, _FILE_WIDTH)
    out.print(draw(rows, surroundings(rows), spy, _no_workers(monitor.pid)), width=width)
    return _count(rows)


def _request_stacks(spy: Stacks | None, rows: Sequence[Worker]) -> None:
    if spy is not None:
        spy.ask([row.pid for row in rows if not row.ours and row.pid != row.trainer])


def _count(rows: Sequence[Worker]) -> int:
    return sum(row.pid != row.trainer for row in rows)


@contextmanager
def _keys() -> Iterator[None]:
    """Read keys without Enter; the terminal is restored in any case."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quits(seconds: float) -> bool:
    """Wait for some seconds; True as soon as q is pressed."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0]:
            pressed = os.read(sys.stdin.fileno(), 64)
            if not pressed or b"q" in pressed.lower():
                return True
    return False


def surroundings(rows: Sequence[Worker], roots: Roots = HERE) -> list[str]:
    """Memory of the machine, of the first trainer's group, and of /dev/shm: a line for each."""
    parts = []
    memory = procfs.meminfo(roots)
    if memory is not None:
        parts.append(f"memory {in_words(memory.available)} of {in_words(memory.total)} available")
    if rows:
        confined = cgroup.confinement(rows[0].trainer, roots)
        if confined.memory_limit and confined.memory_usage is not None:
            used, limit = confined.memory_usage, confined.memory_limit
            parts.append(
                f"control group {in_words(used)} of {in_words(limit)} ({used / limit:.0%})"
            )
        else:
            parts.append("control group without a limit")
    shm = procfs.fill(roots.shm)
    if shm is not None:
        parts.append(f"/dev/shm {in_words(shm.total - shm.free)} of {in_words(shm.total)} used")
    return parts


NO_WORKERS = (
    "no loader workers are running (processes called pt_data_worker, threads or actors of holdfast)"
)


def _no_workers(pid: int | None) -> str:
    if pid is None:
        return NO_WORKERS
    if os.path.exists(f"/proc/{pid}"):
        return f"process {pid} has no loader workers now"
    return f"process {pid} has ended"


def draw(
    rows: Sequence[Worker],
    below: Sequence[str],
    spy: Stacks | None = None,
    if_empty: str = NO_WORKERS,
) -> RenderableType:
    """The table, the lines `below` it, and a line about what could not be read."""
    if not rows:
        return Text("\n".join([if_empty, *below]))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", expand=True)
    table.add_column("PID", justify="right")
    table.add_column("WHO", no_wrap=True)
    table.add_column("S")
    for name in ("CPU", "RSS", "PRIV", "SHRD", "GROWTH", "FDS", "THR"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("DOING", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        style = "bold" if row.pid == row.trainer else ""
        table.add_row(*_figures(row), Text(_doing(row, spy)), style=style)
    notes = [Text(""), *map(Text, below)]
    if all(row.memory is None for row in rows):
        notes.append(Text("memory and files of another user's processes cannot be read", "dim"))
    if spy is not None and spy.why_not and any(not row.ours for row in rows):
        notes.append(
            Text(f"torch's workers are shown with their kernel function: {spy.why_not}", "dim")
        )
    return Group(table, *notes)


def _figures(row: Worker) -> list[Text]:
    memory = row.memory
    sizes = (memory.resident, memory.private, memory.shared) if memory else (None, None, None)
    growing = row.growth is not None and row.growth > _NOTABLE_GROWTH
    return [
        Text(str(row.pid or "")),
        Text(_who(row)),
        Text(row.state, _STATES.get(row.state, "")),
        Text("" if row.cpu is None else f"{row.cpu:.0%}"),
        *(Text(_short(size)) for size in sizes),
        Text(_per_minute(row.growth), "yellow" if growing else ""),
        Text("" if row.descriptors is None else str(row.descriptors)),
        Text("" if row.threads is None else str(row.threads)),
    ]


def _who(row: Worker) -> str:
    if row.pid == row.trainer:
        return "trainer"
    if row.method:
        return f"{row.method} {row.number}"
    if row.number is None:
        return "ours" if row.ours else "torch"
    return f"ours {row.number}"


def _doing(row: Worker, spy: Stacks | None) -> str:
    if row.pid == row.trainer:
        return row.command
    if row.note is not None:
        words = row.note.in_words(time.monotonic())
        return f"{words}, {row.command}" if row.method else words
    place = spy.places.get(row.pid) if spy is not None else None
    return place or (f"in {row.wchan}" if row.wchan else "")


def _short(size: int | None) -> str:
    """Four characters: 812K, 7.1M, 120M, 1.2G."""
    if size is None:
        return ""
    figure = size / 1024
    for unit in "KMGT":
        if figure < 999.5:
            return f"{figure:.1f}{unit}" if figure < 9.95 and unit != "K" else f"{figure:.0f}{unit}"
        figure /= 1024
    return f"{figure:.0f}P"


def _per_minute(growth: float | None) -> str:
    if growth is None:
        return ""
    if abs(growth) * 60 < 1 << 10:
        return "0"
    return f"{'+' if growth > 0 else '-'}{_short(int(abs(growth) * 60))}/m"
