"""Resource limits of this process and of others."""

from __future__ import annotations

import ctypes
import errno
import resource

from holdfast.kernel.chain import Chain, call, python, unless_refused

_Pair = tuple[int, int]


class _Limits(ctypes.Structure):
    _fields_ = (("soft", ctypes.c_uint64), ("hard", ctypes.c_uint64))

    def pair(self) -> _Pair:
        return _finite(self.soft), _finite(self.hard)


def _finite(value: int) -> int:
    return resource.RLIM_INFINITY if value == 2**64 - 1 else value


def _get_limit(which: int) -> _Pair:
    found = _Limits()
    call("getrlimit", which, ctypes.byref(found))
    return found.pair()


def _set_limit(which: int, limits: _Pair) -> None:
    call("setrlimit", which, ctypes.byref(_Limits(*(value % 2**64 for value in limits))))


def _prlimit(pid: int, which: int, limits: _Pair | None = None) -> _Pair:
    found = _Limits()
    new = None if limits is None else ctypes.byref(_Limits(*(one % 2**64 for one in limits)))
    call("prlimit64", pid, which, new, ctypes.byref(found))
    return found.pair()


def _set_limit_by_python(which: int, limits: _Pair) -> None:
    try:
        resource.setrlimit(which, limits)
    except ValueError as error:  # raised for EPERM
        raise PermissionError(errno.EPERM, str(error)) from error


getrlimit: Chain[[int], _Pair] = Chain(
    ("resource.getrlimit", python(resource, "getrlimit")),
    ("the system call", _get_limit),
)
_setrlimit: Chain[[int, _Pair], None] = Chain(
    ("resource.setrlimit", _set_limit_by_python),
    ("the system call", _set_limit),
)
limits_of: Chain[..., _Pair] = Chain(
    ("resource.prlimit", python(resource, "prlimit")),
    ("the system call", _prlimit),
)


def limit(which: int) -> _Pair | None:
    """This process's soft and hard limit; None if it cannot be known."""
    with unless_refused():
        return getrlimit(which)
    return None


def set_limit(which: int, soft: int, hard: int) -> bool:
    """Whether it could be set."""
    with unless_refused():
        _setrlimit(which, (soft, hard))
        return True
    return False


def limit_of(pid: int, which: int) -> _Pair | None:
    """Another process's soft and hard limit; None if it cannot be known."""
    try:
        return limits_of(pid, which)
    except OSError:
        return None


def set_limit_of(pid: int, which: int, soft: int, hard: int) -> bool:
    """Whether it could be set."""
    try:
        limits_of(pid, which, (soft, hard))
        return True
    except OSError:
        return False
