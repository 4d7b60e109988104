"""Alternative ways to do one thing, best first, and system calls without Python's functions."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

REFUSALS = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP})
NOT_HERE = frozenset({*REFUSALS, errno.ENOENT, errno.ENOTDIR, errno.EROFS, errno.EINVAL})

# System call numbers, for builds of Python that lack the function or have one that fails.
_NUMBERS: dict[str, dict[str, int]] = {
    "memfd_create": {"x86_64": 319, "aarch64": 279, "riscv64": 279, "ppc64le": 360, "s390x": 350},
    "getrlimit": {"x86_64": 97, "aarch64": 163, "ppc64le": 76, "s390x": 191},
    "setrlimit": {"x86_64": 160, "aarch64": 164, "ppc64le": 75, "s390x": 75},
    "prlimit64": {"x86_64": 302, "aarch64": 261, "riscv64": 261, "ppc64le": 325, "s390x": 334},
    "fallocate": {"x86_64": 285, "aarch64": 47, "riscv64": 47, "ppc64le": 309, "s390x": 314},
}
_EVERYWHERE = {"pidfd_send_signal": 424, "pidfd_open": 434}  # newer calls have one number
libc: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


class Chain(Generic[P, R]):
    """Alternative ways to do one thing, best first. A way that is refused is not tried again. A way
    is None if this build of Python lacks it."""

    def __init__(self, *ways: tuple[str, Callable[P, R] | None]) -> None:
        self._ways = [(name, way) for name, way in ways if way is not None]
        self._at = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the best way that is not refused. If all are, raises the last one's error."""
        while self._at < len(self._ways):
            at = self._at
            try:
                return self._ways[at][1](*args, **kwargs)
            except OSError as error:
                if error.errno not in REFUSALS or at + 1 == len(self._ways):
                    raise
            self._at = max(self._at, at + 1)  # another thread may be further already
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    @property
    def way(self) -> str:
        """The name of the way in use."""
        return self._ways[self._at][0] if self._ways else ""

    @property
    def serving(self) -> Callable[P, R]:
        """The function of the way in use, without the chain."""
        return self._ways[self._at][1]


class unless_refused:
    """Leaves the block at an OSError that means a refusal. Other errors are raised."""

    def __init__(self, refusals: frozenset[int] = REFUSALS) -> None:
        self._refusals = refusals

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return isinstance(error, OSError) and error.errno in self._refusals


def python(module: Any, name: str) -> Any:
    """A function of a standard module; None if this build of Python lacks it."""
    return getattr(module, name, None)


def call(name: str, *args: Any) -> int:
    """A system call, without Python's function for it."""
    number = _EVERYWHERE.get(name) or _NUMBERS[name].get(platform.machine())
    if number is None:  # on a processor whose numbers we do not know
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    converted = [ctypes.c_long(one) if isinstance(one, int) else one for one in args]
    result = libc.syscall(ctypes.c_long(number), *converted)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)
