"""A folder that fills while training runs, and can be read whatever happened to the run.

Each record is one line of JSON, appended with one write; a kill at any moment costs at most the
line being written. The next writer starts on a new line, and readers skip incomplete lines. Files
are opened for each record: incidents are rare, memory is noted every few seconds, and so there is
no state that a fork could share or a kill could lose.

A file that has grown to its limit is renamed to ``name.1.jsonl`` and a new one begins, so the
newest records are always there, in bounded space. Curves are thinned out then: what is in
``name.1.jsonl`` reaches back to the beginning of the run, evenly spaced.

Each rank of a distributed run has its own folder (rank 0 has the folder itself), so no two machines
write one file. Several loaders of one process may.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from holdfast import jsonl, kernel, loader_identity
from holdfast.autopsy.machine_facts import MachineFacts

log = logging.getLogger("holdfast")

TAKEN_UP = "taken-up"
"""The event that says how an incident of an iterable dataset went on."""
KINDS = ("loaders", "incidents", "bad_samples", "memory", "progress", "events", "tuning")
CURVES = ("memory", "progress")
"""Kinds whose old records are thinned out and not removed."""
LIMIT = 8 << 20  # bytes of one file before it is renamed
_MAX_RECORD_BYTES = 256 << 10  # bytes of one record
_Made = Callable[[], dict[str, Any]]  # makes a record when it is written
LOCK_TIMEOUT = 1.0  # seconds to wait for another writer


class Logbook:
    """The writer's side."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int | None = None,
        loader: str = "",
        limit: int = LIMIT,
    ) -> None:
        """`loader` is the name of the loader that writes it; every record contains it."""
        self.rank = loader_identity.rank().number if rank is None else rank
        self.loader = loader
        self.given = os.fspath(folder)
        top = Path(folder)
        self.folder = top / f"rank-{self.rank}" if self.rank else top
        self.limit = limit
        self.failed = False  # a record could not be written, and the user was told
        # Enough for some minutes while the disk does not answer.
        self._waiting: deque[tuple[str, _Made]] = deque(maxlen=100)
        self.folder.mkdir(parents=True, exist_ok=True)

    def begin(self, options: Mapping[str, Any]) -> None:
        """Write run.json: versions, options, machine. It replaces that of an earlier run, and of
        another loader; loaders.jsonl has all of them."""
        record = {
            "time": time.time(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "rank": self.rank,
            "loader": self.loader,
            "command": sys.argv,
            "versions": _versions(),
            "options": {name: _plain(value) for name, value in options.items()},
            "machine": _plain(MachineFacts.read().to_json()),
        }
        with self._surviving():
            fresh = self.folder / f".run.json.{os.getpid()}"
            fresh.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            fresh.replace(self.folder / "run.json")
        self._waiting.append(("loaders", lambda: record))

    def incident(self, record: Mapping[str, Any]) -> None:
        self._append("incidents", record)

    def bad_sample(self, record: Mapping[str, Any]) -> None:
        self._append("bad_samples", record)

    def memory(self, record: Mapping[str, Any]) -> None:
        """Queue it for the next `flush`: measuring must never wait for a disk."""
        whole = {"time": time.time(), **record}
        self._waiting.append(("memory", lambda: whole))

    def progress(self, make: Callable[[], dict[str, Any]]) -> None:
        """Queue it for the next `flush`, which calls `make`."""
        now = time.time()
        self._waiting.append(("progress", lambda: {"time": now, **make()}))

    def event(self, event: str, text: str, **figures: Any) -> None:
        """Something that happened and is no incident. Queued for the next `flush` too."""
        record = {"time": time.time(), "event": event, "text": text, **figures}
        self._waiting.append(("events", lambda: record))

    def tuning(self, record: Mapping[str, Any]) -> None:
        """What ``holdfast tune`` has found."""
        if not (self.folder / "run.json").exists():  # not that of a training run
            self.begin({})
        self.flush()
        self._append("tuning", record)

    @property
    def pending(self) -> bool:
        """Whether there is something for `flush`."""
        return bool(self._waiting)

    def flush(self) -> None:
        """Write all queued records."""
        while self._waiting:
            try:
                kind, make = self._waiting.popleft()
            except IndexError:  # another thread was quicker
                return
            self._append(kind, make())

    def _append(self, kind: str, record: Mapping[str, Any]) -> None:
        whole = {"time": time.time()} | {name: _plain(value) for name, value in record.items()}
        whole |= {"rank": self.rank, "loader": self.loader, "trainer": os.getpid()}
        line = json.dumps(whole)
        if len(line) > _MAX_RECORD_BYTES:  # a very long stack, for example: shorten every field
            line = json.dumps({name: _short(value) for name, value in whole.items()})
        path = self.folder / f"{kind}.jsonl"
        with self._surviving(), _alone(self.folder):
            if _size(path) + len(line) >= self.limit and path.exists():
                older = self.folder / f"{kind}.1.jsonl"
                if kind in CURVES:
                    _thin_out(older, path, self.limit)
                path.replace(older)
            jsonl.append(path, line.encode() + b"\n")

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """A full disk must not end the run: warn once and go on."""
        try:
            yield
        except OSError as error:
            if not self.failed:
                log.warning(
                    "the logbook %s cannot be written (%s); the run goes on without it",
                    self.folder,
                    error,
                )
            self.failed = True


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Exclude other writers while a file is renamed. The kernel unlocks when a process dies."""
    if not jsonl.LOCKS:  # usually there is only one writer
        yield
        return
    fd = kernel.open_file(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(fd)
        yield
    finally:
        # Closing is not enough: a child that another thread has just forked has a copy of `fd`.
        with contextlib.suppress(OSError):
            jsonl.unlock(fd)
        os.close(fd)


def _lock(fd: int) -> None:
    """Wait for the lock, but not for ever: losing a record is better than mixing two or hanging."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            jsonl.lock(fd)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)
        except OSError:
            return  # a file system without locks: usually there is only one writer


def _thin_out(older: Path, newer: Path, limit: int) -> None:
    """Put what is in `older` before `newer`, and keep so many records of it all, evenly spaced in
    time, that they take half of `limit`. What is no point of a curve stays: what a search for a
    leak has found, and the last record of a series; the oldest go if that is too much."""
    content = older.read_bytes() if older.exists() else b""
    lines = [line for line in (content + b"\n" + newer.read_bytes()).split(b"\n") if line.strip()]
    times = [float(found[1]) if (found := _TIME.match(line)) else 0.0 for line in lines]
    points = max(1, limit // 2 * len(lines) // sum(map(len, lines)))
    spacing = (max(times) - min(filter(None, times), default=0.0)) / points
    kept, due = [], 0.0
    for line, at in zip(lines, times, strict=True):
        if at >= due:
            due = at + spacing
        elif b'"leak"' not in line and b'"ended": true' not in line:
            continue
        kept.append(line + b"\n")
    fresh = newer.with_name(f".{newer.name}.{os.getpid()}")
    fresh.write_bytes(b"".join(kept)[-limit:])  # readers skip an incomplete line
    fresh.replace(newer)


_TIME = re.compile(rb'\{"time": ([0-9.]+)')


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _plain(value: Any) -> Any:
    """The value as a JSON type; its repr if there is none."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(one) for one in value]
    return repr(value)[:1000]


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= 4000 else value[:2000] + " … " + value[-2000:]
    if isinstance(value, list):
        return [_short(one) for one in value[:20]]
    if isinstance(value, dict):
        return {name: _short(one) for name, one in list(value.items())[:50]}
    return value


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("holdfast", "torch", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
