"""What the kernel wrote about a process.

Usually unreadable without permissions (``dmesg_restrict``), and incomplete when much was written: a
line is a proof, its absence proves little.
"""

from __future__ import annotations

import errno
import math
import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast import kernel
from holdfast.autopsy.readers import HERE, Roots, procfs

_MAX_RECORDS = 20_000  # of /dev/kmsg, at most
_RECORD_BYTES = 8192  # bytes of one record
_CLOCK_SLACK = 30.0  # seconds by which the kernel's clock may differ
_COMMAND_TIMEOUT = 2.0  # seconds a command may take
_COMMANDS = (
    ["dmesg"],
    ["journalctl", "-k", "-q", "-b", "--no-pager", "-n", "5000", "-o", "short-monotonic"],
)


@dataclass(frozen=True)
class KernelLog:
    """Lines of the kernel's log, and from where."""

    source: str
    lines: tuple[str, ...]


def read(
    roots: Roots = HERE, *, since: float = -math.inf, commands: bool = False
) -> KernelLog | None:
    """The kernel's log, if we may read it and are in the pid namespace that its pids belong to.

    Lines before `since`, in seconds of the monotonic clock, are left out: pids are reused, and an
    old line must not be taken for a new one. There is some slack, because the kernel's log has its
    own clock. With `commands`, dmesg and journalctl are tried too.
    """
    if not procfs.in_first_namespace(roots):
        return None
    lines = _kmsg(roots, since - _CLOCK_SLACK)
    if lines is not None:
        return KernelLog(str(roots.kmsg), tuple(lines))
    if commands:
        for command in _COMMANDS:
            output = _run(command)
            if output:
                return KernelLog(
                    command[0], tuple(newer(output.splitlines(), since - _CLOCK_SLACK))
                )
    return None


def newer(lines: Iterable[str], since: float) -> list[str]:
    """The lines that begin with a ``[seconds]`` of `since` or later; lines without it are dropped
    unless `since` is minus infinity."""
    found = []
    for line in lines:
        match = re.match(r"\[\s*(\d+\.\d+)\]", line)
        if since == -math.inf or (match is not None and float(match[1]) >= since):
            found.append(line)
    return found


def about(pid: int, lines: Iterable[str]) -> tuple[str, ...]:
    """The lines that name a process as killed for memory or crashed."""
    wanted = (
        re.compile(rf"[Kk]ill(ed)? process {pid} \("),
        re.compile(rf"oom-kill:.*\bpid={pid}\b"),
        re.compile(rf"\S+\[{pid}\]:? (segfault|general protection|trap )"),
        re.compile(rf"INFO: task \S+:{pid} blocked for more than"),
    )
    return tuple(line for line in lines if any(pattern.search(line) for pattern in wanted))


@dataclass(frozen=True)
class Subject:
    """The process a line is about; one that asked for memory is named without a pid."""

    name: str
    pid: int | None = None

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})" if self.pid is not None else self.name


_SUBJECTS = tuple(
    re.compile(pattern)
    for pattern in (
        r"[Kk]ill(?:ed)? process (?P<pid>\d{1,9}),? \((?P<name>[^)]*)\)",
        r"oom-kill:.*\btask=(?P<name>[^,]*),pid=(?P<pid>\d{1,9})",
        r"reaped process (?P<pid>\d{1,9}) \((?P<name>[^)]*)\)",
        r"(?P<name>[^\s\[]+)\[(?P<pid>\d{1,9})\]:? (?:segfault|general protection|trap )",
        r"INFO: task (?P<name>\S+):(?P<pid>\d{1,9}) blocked",
        r"sending SIG\w+ to process (?P<pid>\d{1,9})(?: uid \d+)?(?: \"(?P<name>[^\"]*)\")?",
        r"(?P<name>\S+) invoked oom-killer",
    )
)


def subject(line: str) -> Subject | None:
    """The process a line is about, if it names one."""
    for pattern in _SUBJECTS:
        if match := pattern.search(line):
            found = match.groupdict()
            pid = found.get("pid")
            return Subject(found["name"] or "?", None if pid is None else int(pid))
    return None


def _kmsg(roots: Roots, since: float) -> list[str] | None:
    try:
        fd = kernel.open_file(roots.kmsg, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found: list[str] = []
    try:
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(fd, _RECORD_BYTES)
            except OSError as error:
                if error.errno == errno.EPIPE:  # the record was overwritten while we read
                    continue
                break
            if not record:
                break
            at, words = _parsed(record.decode(errors="replace"))
            if at >= since:
                found += words.splitlines()
    finally:
        os.close(fd)
    return found


def _parsed(record: str) -> tuple[float, str]:
    """Time and text of a record "6,1234,5678,-;text", with the time in microseconds."""
    match = re.match(r"\d+,\d+,(\d+),[^;]*;", record)
    return (int(match[1]) / 1e6, record[match.end() :]) if match else (math.inf, record)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
