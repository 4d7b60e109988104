"""Takes away from this process what a kernel, a sandbox or a build of Python may lack.

``HOLDFAST_TEST_REFUSED`` is JSON: ``deleted``, names of functions and constants this Python is to
be without (``os.memfd_create``), and ``calls``, system calls that are refused, with the error they
give (``{"pidfd_open": "ENOSYS", "fcntl:F_SETSIG": "EPERM"}``), and ``proc``, false if there is to be
none. Calls are refused by a seccomp filter and /proc is hidden in a mount namespace: children inherit
both, forked or spawned. Names are deleted in each interpreter: `sitecustomize`, beside this file, sees
to those that are started with this folder on their PYTHONPATH.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import struct

_ARGUMENTS = {  # number of the call, and the value one of its arguments has
    "memfd_create": (319,),
    "pidfd_open": (434,),
    "pidfd_send_signal": (424,),
    "eventfd2": (290,),
    "prlimit64": (302,),
    "getrlimit": (97,),
    "setrlimit": (160,),
    "fallocate": (285,),
    "madvise": (28,),
    "waitid": (247,),
    "socketpair": (53,),
    "sched_yield": (24,),
    "sched_setscheduler": (144,),
    "sched_getscheduler": (145,),
    "sched_getaffinity": (204,),
    "fcntl:F_SETOWN": (72, 1, 8),
    "fcntl:F_SETSIG": (72, 1, 10),
    "fcntl:F_ADD_SEALS": (72, 1, 1033),
    "prctl:PR_SET_PDEATHSIG": (157, 0, 1),
}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO, _X86_64 = 0x7FFF0000, 0x00050000, 0xC000003E


def apply() -> None:
    """What the environment asks for; once."""
    if "HOLDFAST_TEST_REFUSED" not in os.environ:
        return
    wanted = json.loads(os.environ["HOLDFAST_TEST_REFUSED"])
    refuse(**wanted, inherited="HOLDFAST_TEST_INHERITED" in os.environ)
    os.environ["HOLDFAST_TEST_INHERITED"] = "1"


def refuse(
    *,
    deleted: list[str] | None = None,
    calls: dict[str, str] | None = None,
    proc: bool = True,
    inherited: bool = False,
) -> None:
    """`inherited` if the process that started this one has done so for its children too."""
    for name in deleted or ():
        module, _, attribute = name.rpartition(".")
        if hasattr(importlib.import_module(module), attribute):
            delattr(importlib.import_module(module), attribute)
    if not proc and not inherited:
        _hide_proc()
    if calls and not inherited:
        _set_filter(calls)
    for name, error in (calls or {}).items():
        _check(name, getattr(errno, error))
    if os.path.exists("/proc/self") != proc:
        raise RuntimeError("/proc is not as it was to be")


def _hide_proc() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    steps = (
        lambda: libc.unshare(0x20000),  # CLONE_NEWNS
        lambda: libc.mount(b"none", b"/", None, 0x44000, None),  # MS_REC | MS_PRIVATE
        lambda: libc.mount(b"none", b"/proc", b"tmpfs", 0, None),
    )
    for step in steps:
        if step() != 0:
            raise OSError(ctypes.get_errno(), "no mount namespace can be made here")


def _filter(calls: dict[str, str]) -> bytes:
    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    program = [step(_LOAD, 0, 0, 4), step(_EQUAL, 1, 0, _X86_64), step(_RETURN, 0, 0, _ALLOW)]
    program.append(step(_LOAD, 0, 0, 0))
    for name, error in calls.items():
        number, *rest = _ARGUMENTS[name]
        refused = step(_RETURN, 0, 0, _ERRNO | getattr(errno, error))
        if rest:
            argument, value = rest
            program += [step(_EQUAL, 0, 4, number), step(_LOAD, 0, 0, 16 + 8 * argument)]
            program += [step(_EQUAL, 0, 1, value), refused, step(_LOAD, 0, 0, 0)]
        else:
            program += [step(_EQUAL, 0, 1, number), refused]
    program.append(step(_RETURN, 0, 0, _ALLOW))
    return b"".join(program)


def _check(name: str, error: int) -> None:
    """With arguments that would be another error."""
    number, *rest = _ARGUMENTS[name]
    arguments = [-1] * 6
    if rest:
        arguments[rest[0]] = rest[1]
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if (result, ctypes.get_errno()) != (-1, error):
        raise RuntimeError(f"{name} is not refused")


def _set_filter(calls: dict[str, str]) -> None:
    program = ctypes.create_string_buffer(_filter(calls))
    packed = struct.pack("<HxxxxxxQ", (len(program) - 1) // 8, ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.create_string_buffer(packed), 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter can be set here")
