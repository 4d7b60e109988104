"""Which of the kernel features we use are available here, and what is lost without them."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.kernel.chain import libc, unless_refused
from holdfast.kernel.descriptors import above_stdio, mapped, open_file, pipe, socket_pair
from holdfast.kernel.files import (
    MFD_CLOEXEC,
    allocate,
    file_in_a_folder,
    folders,
    memory_file,
    new_memory_file,
    seal,
)
from holdfast.kernel.lifetimes import (
    PR_GET_PDEATHSIG,
    PR_SET_PDEATHSIG,
    open_pidfd,
    pidfd,
    signal_at_end,
    signal_by_pidfd,
)
from holdfast.kernel.resource_limits import getrlimit, limit, limit_of, limits_of, set_limit


@dataclass(frozen=True)
class Feature:
    """A kernel feature: the way that works here, and what is lost by it."""

    name: str
    way: str = ""
    """Empty if no way works."""
    lost: str = ""
    """Empty if nothing is lost."""


def _memory_files(name: str) -> Feature:
    with unless_refused():
        os.close(above_stdio(new_memory_file("holdfast-survey", MFD_CLOEXEC)))
        return Feature(name, new_memory_file.way)
    try:
        fd, folder = file_in_a_folder("holdfast-survey", 0)
    except OSError as error:
        lost = f"neither memfd_create nor a file in {' or '.join(folders())}: {error.strerror}"
        return Feature(name, "", lost)
    os.close(fd)
    lost = f"batches share the free space of {folder}, and `holdfast top` shows less of workers"
    return Feature(name, f"unlinked files in {folder}", lost)


def _sockets(name: str) -> Feature:
    try:
        one, other = socket_pair()
        with one, other:
            socket.send_fds(one, [b"!"], [one.fileno()])
            _, received, _, _ = socket.recv_fds(other, 1, 1)
            for fd in received:
                os.close(fd)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
            raise
        lost = f"no pair of AF_UNIX sockets that pass descriptors: {error.strerror}"
        return Feature(name, "", lost)
    return Feature(name, "SCM_RIGHTS over AF_UNIX sockets")


def _shared_mappings(name: str) -> Feature:
    try:
        fd = memory_file("holdfast-survey")
    except OSError:
        return Feature(name, "", "no file to map")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        mapped(fd, mmap.PAGESIZE).close()
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        lost = f"a file cannot be mapped for several processes: {error.strerror}"
        return Feature(name, "", lost)
    finally:
        os.close(fd)
    return Feature(name, "MAP_SHARED")


def _process_handles(name: str) -> Feature:
    handle = pidfd(os.getpid())
    if handle is None:
        lost = "a trainer's death may be noticed up to a second later"
        return Feature(name, "the end of a pipe, and waitpid", lost)
    try:
        with unless_refused():
            signal_by_pidfd(handle, 0)
            return Feature(name, open_pidfd.way)
    finally:
        os.close(handle)
    return Feature(name, f"{open_pidfd.way}, and kill")


def _lifeline(name: str) -> Feature:
    reading, writing = pipe()
    line = signal_at_end(reading, signal.SIGURG)
    try:
        if line is None:
            lost = (
                "workers of a killed trainer live on if the process that starts them is stopped too"
            )
            return Feature(name, "", lost)
        return Feature(name, "F_SETSIG")
    finally:
        for fd in (reading, line, writing):  # the writing end last: then no signal is sent
            if fd is not None:
                os.close(fd)


def _parent_death(name: str) -> Feature:
    before = ctypes.c_int()
    get = libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(before), 0, 0, 0)
    if get == 0 and libc.prctl(PR_SET_PDEATHSIG, before.value, 0, 0, 0) == 0:
        return Feature(name, "PR_SET_PDEATHSIG")
    lost = "workers that hang outlive a nursery that is killed, until the trainer ends"
    return Feature(name, "", lost)


def _reservation(name: str) -> Feature:
    fd = memory_file("holdfast-survey")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        with unless_refused():
            allocate(fd, 0, mmap.PAGESIZE)
            return Feature(name, allocate.way)
    finally:
        os.close(fd)
    return Feature(name, "zeros written", "the first use of memory takes longer")


def _seals(name: str) -> Feature:
    fd = memory_file("holdfast-survey", sealable=True)
    try:
        if seal(fd):
            return Feature(name, "F_ADD_SEALS")
        return Feature(name, "", "nothing guards packed containers from being written to")
    finally:
        os.close(fd)


def _foreign_limits(name: str) -> Feature:
    if limit_of(os.getpid(), resource.RLIMIT_CORE) is not None:
        return Feature(name, limits_of.way)
    lost = "a worker that is ended because it hangs may leave a core file"
    return Feature(name, "", lost)


def _own_limits(name: str) -> Feature:
    found = limit(resource.RLIMIT_DATA)
    if found is not None and set_limit(resource.RLIMIT_DATA, *found):
        return Feature(name, getrlimit.way)
    return Feature(name, "", "an allocation that is far too large is not turned into an error")


def _policy(name: str) -> Feature:
    try:
        policy = os.sched_getscheduler(0)
        os.sched_setscheduler(0, policy, os.sched_getparam(0))
        return Feature(name, "SCHED_BATCH")
    except (AttributeError, OSError):
        return Feature(name, "", "small batches arrive a little later")


def _proc(name: str) -> Feature:
    try:
        os.close(open_file("/proc/self/statm", os.O_RDONLY))
        return Feature(name, "mounted")
    except OSError:
        lost = (
            "worker_memory_limit and early collection of garbage have no effect, and verdicts on "
            "deaths are less sure"
        )
        return Feature(name, "", lost)


_SURVEY: dict[str, Callable[[str], Feature]] = {
    "memory files": _memory_files,
    "shared mappings": _shared_mappings,
    "passing descriptors": _sockets,
    "process handles": _process_handles,
    "signal at the end of a pipe": _lifeline,
    "signal at the parent's death": _parent_death,
    "reserving memory": _reservation,
    "sealed files": _seals,
    "limits of other processes": _foreign_limits,
    "limits": _own_limits,
    "scheduling policy": _policy,
    "/proc": _proc,
}
FEATURES: Final = tuple(_SURVEY)
"""The names of what `survey` finds, in its order."""
NEEDED: Final = ("memory files", "shared mappings", "passing descriptors")
"""Features that workers cannot do without; any way will do."""


def survey() -> tuple[Feature, ...]:
    """Every feature, tried here and now."""
    return tuple(_tried(name) for name in FEATURES)


def _tried(name: str) -> Feature:
    try:
        return _SURVEY[name](name)
    except OSError as error:  # a resource is short, or there is no memory file to try it on
        return Feature(name, "", f"it could not be tried: {error.strerror}")


def missing() -> Feature | None:
    """A feature that workers need and that is not available here; None if all are."""
    try:
        return _missing()
    except OSError:  # a resource is short now: the code that needs it will raise
        return None


@functools.cache
def _missing() -> Feature | None:
    return next((found for name in NEEDED if not (found := _SURVEY[name](name)).way), None)
