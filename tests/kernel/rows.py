"""What may be refused, one at a time and all at once, and scripts that run under a refusal."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@dataclass(frozen=True)
class Refusal:
    """Names deleted from Python's modules, system calls refused with an error, no /proc."""

    name: str
    deleted: tuple[str, ...] = ()
    calls: dict[str, str] = field(default_factory=dict)
    proc: bool = True
    stock: bool = True  # whether torch's own loader works there

    def environment(self) -> dict[str, str]:
        wanted = {"deleted": self.deleted, "calls": self.calls, "proc": self.proc}
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (HERE / "refusing", SOURCE))),
            "HOLDFAST_TEST_REFUSED": json.dumps(wanted),
        }

    def skip_unless_possible(self) -> None:
        if self.calls and platform.machine() != "x86_64":
            pytest.skip("the filters of these tests are for x86_64")
        if not self.proc and os.geteuid() != 0:
            pytest.skip("only root may hide /proc, in a mount namespace")

    def run(self, script: str, *arguments: str, seconds: float = 60.0) -> Any:
        """The end of one of the scripts beside this file, under this refusal."""
        self.skip_unless_possible()
        command = [str(HERE / script), *arguments]
        return warm.run(command, timeout=seconds, env=self.environment())


def _filtered(name: str, error: str, *calls: str, stock: bool = True) -> Refusal:
    return Refusal(f"{name} refused ({error})", calls=dict.fromkeys(calls, error), stock=stock)


def _deleted(*names: str) -> Refusal:
    return Refusal(f"no {names[0]}", names)


FILTERED = (
    _filtered("memfd_create", "ENOSYS", "memfd_create"),
    _filtered("memfd_create", "EPERM", "memfd_create"),
    _filtered("pidfd_open", "ENOSYS", "pidfd_open"),
    _filtered("pidfd_open", "EPERM", "pidfd_open"),
    _filtered("pidfd_send_signal", "EPERM", "pidfd_send_signal"),
    _filtered("all of pidfds", "ENOSYS", "pidfd_open", "pidfd_send_signal"),
    _filtered("eventfd2", "EPERM", "eventfd2"),
    _filtered("prlimit64", "EPERM", "prlimit64"),
    _filtered("all of limits", "EPERM", "prlimit64", "getrlimit", "setrlimit"),
    _filtered("fallocate", "EOPNOTSUPP", "fallocate"),
    _filtered("fallocate", "EPERM", "fallocate", stock=False),
    _filtered("madvise", "ENOSYS", "madvise"),
    _filtered("waitid", "EPERM", "waitid"),
    _filtered("F_SETOWN", "EPERM", "fcntl:F_SETOWN"),
    _filtered("F_SETSIG", "EINVAL", "fcntl:F_SETSIG"),
    _filtered("F_ADD_SEALS", "EPERM", "fcntl:F_ADD_SEALS"),
    _filtered("PR_SET_PDEATHSIG", "EPERM", "prctl:PR_SET_PDEATHSIG"),
    _filtered("sched_setscheduler", "EPERM", "sched_setscheduler"),
    _filtered("sched_yield", "EPERM", "sched_yield"),
)
DELETED = (
    _deleted("os.memfd_create", "os.MFD_CLOEXEC", "os.MFD_ALLOW_SEALING"),
    _deleted("os.pidfd_open"),
    _deleted("signal.pidfd_send_signal"),
    _deleted("os.eventfd", "os.EFD_NONBLOCK", "os.EFD_CLOEXEC"),
    _deleted("resource.prlimit"),
    _deleted("os.posix_fallocate"),
    _deleted("os.waitid"),
    _deleted("os.O_TMPFILE"),
    _deleted("os.pipe2"),
    _deleted("os.sched_setscheduler", "os.sched_getscheduler", "os.SCHED_BATCH"),
    _deleted("os.sched_yield"),
    _deleted("os.sched_getaffinity"),
    _deleted("mmap.MADV_REMOVE", "mmap.MADV_DONTDUMP", "mmap.MAP_POPULATE"),
    _deleted("fcntl.F_SETOWN", "fcntl.F_SETSIG", "fcntl.F_ADD_SEALS", "fcntl.F_SEAL_GROW"),
)
NO_PROC = Refusal("no /proc", proc=False)

ALL_FILTERED = Refusal(
    "every call refused",
    calls={call: error for one in FILTERED for call, error in one.calls.items()},
    stock=False,
)
ALL_DELETED = Refusal("every name deleted", tuple(name for one in DELETED for name in one.deleted))
EVERYTHING = Refusal(
    "everything refused at once",
    ALL_DELETED.deleted,
    ALL_FILTERED.calls,
    proc=False,
    stock=False,
)
SINGLE = (*FILTERED, *DELETED, NO_PROC)
