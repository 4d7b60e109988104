"""Ways to break a worker, by name: what each does there, and what becomes of the worker.

Every cause is a function that the dataset, the collate function, `worker_init_fn` or a pickled
object calls inside the worker. The verdict beside it is what the kernel or the engine makes of it;
`table.py` combines it with the phase to what a user must see.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import holdfast

DIES, STALLS, RAISES, GOES_ON = "dies", "stalls", "raises", "goes on"


@dataclass(frozen=True)
class Cause:
    """One way to break a worker."""

    name: str
    act: Callable[[], Any]
    verdict: str
    cause: str = ""  # as `Incident.kind` says it
    signal: str | None = None
    exitcode: int | None = None
    stack: str | None = None  # a word that must stand in `Incident.stack`; "" for an empty stack
    error: type[BaseException] | None = None  # what next() raises
    says: str = ""  # words that must stand in its text
    step: str | None = None  # where it ends the worker, if not at once
    action: str | None = None  # the same as an action of HOLDFAST_FAULTS, if it has one


class Unheard(BaseException):
    """A user's own BaseException."""


# -- deaths -------------------------------------------------------------------------------


def _signal(name: str) -> Callable[[], None]:
    def kill_oneself() -> None:
        signal.raise_signal(signal.Signals[name])
        time.sleep(60)  # a signal to the process may take a moment

    return kill_oneself


def read_address_zero() -> None:
    ctypes.string_at(0)


def read_address_zero_in_a_thread() -> None:
    thread = threading.Thread(target=read_address_zero, name="crasher")
    thread.start()
    thread.join()


def read_a_truncated_file() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
            file.truncate(0)
            print(memory[0])


def overflow_the_stack() -> None:
    """Endless recursion through C, with a stack that may not grow any more."""
    sys.setrecursionlimit(1 << 30)
    if threading.current_thread() is threading.main_thread():
        _, hard = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (64 * 1024, hard))
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)

    @prototype
    def recurse(depth: int) -> int:
        return int(recurse(depth + 1))

    recurse(0)


def overflow_the_stack_of_a_thread() -> None:
    before = threading.stack_size(256 * 1024)
    thread = threading.Thread(target=overflow_the_stack)
    thread.start()
    threading.stack_size(before)
    thread.join()


def close_all_descriptors() -> None:
    """As libraries do that make a daemon of the process: our channel goes with the rest."""
    os.closerange(3, 1024)


# -- stalls -------------------------------------------------------------------------------


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def read_an_empty_pipe() -> None:
    reader, _writer = os.pipe()
    os.read(reader, 1)


def spin_in_python() -> None:
    for _ in itertools.count():
        pass


def sleep_with_the_gil_held() -> None:
    ctypes.PyDLL(None).sleep(3600)


# -- errors -------------------------------------------------------------------------------


def leave() -> None:
    sys.exit(5)


def _raise(error: type[BaseException], *args: Any) -> Callable[[], None]:
    def raise_it() -> None:
        raise error(*args)

    return raise_it


def _private_bytes() -> int:
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return int(status["VmData"].split()[0]) * 1024


def use_up_memory() -> None:
    """MemoryError, because private memory is limited; afterwards there is enough again."""
    used = _private_bytes()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20), before[1]))
    try:
        bytearray(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def live_with_little_memory() -> None:
    """MemoryError, and the limit stays: the worker goes on with 64 MB."""
    used = _private_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20), hard))
    bytearray(1 << 30)


# -- what must not matter -----------------------------------------------------------------

_kept: list[Any] = []


def use_up_descriptors() -> None:
    """Leave not one file descriptor free, and go on."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        while True:
            _kept.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass


def use_up_descriptors_and_say_so() -> None:
    use_up_descriptors()
    os.open(os.devnull, os.O_RDONLY)


def leave_a_thread() -> None:
    threading.Thread(target=sleep_for_ever, daemon=False).start()


def leave_a_raising_thread() -> None:
    def mishap() -> None:
        raise ValueError("in a thread")

    threading.excepthook = lambda _: None
    thread = threading.Thread(target=mishap)
    thread.start()
    thread.join()


GRANDCHILDREN = "HOLDFAST_TEST_GRANDCHILDREN"  # a folder: a file for each, with its birth time


def leave_a_child() -> None:
    """A grandchild of the trainer that holds every descriptor the worker has."""
    pid = os.fork()
    if pid == 0:
        sleep_for_ever()
    with open(os.path.join(os.environ[GRANDCHILDREN], str(pid)), "w") as file:
        file.write(_born(pid))


def end_child_left_behind(pid: int, born: str) -> None:
    """In the test: kill it, if the process of that number is still the one we mean."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if born and _born(pid) == born:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):
        pass
    finally:
        os.close(handle)


def _born(pid: int) -> str:
    """The start time of a process, which together with its number is unique."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[19]


def kill_oneself_audibly() -> None:
    """In a way that Python announces to audit hooks."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def leave_a_child_and_die() -> None:
    leave_a_child()
    signal.raise_signal(signal.SIGKILL)
    time.sleep(60)


def _fatal(name: str, act: Callable[[], Any], of: str, **more: Any) -> Cause:
    cause = "killed" if of in ("SIGKILL",) else "crashed"
    number = -signal.Signals[of].value
    return Cause(name, act, DIES, cause, of, number, **more)


def _exits(name: str, code: int) -> Cause:
    act = lambda: os._exit(code)  # noqa: E731
    return Cause(name, act, DIES, "exited", None, code, action=f"exit={code}")


def _stalls(name: str, act: Callable[[], Any], **more: Any) -> Cause:
    return Cause(name, act, STALLS, "stalled", **{"signal": "SIGABRT", "exitcode": -6, **more})


_UNUSUAL = holdfast.UnusualExit
_EVERY = (
    _fatal("SIGKILL", _signal("SIGKILL"), "SIGKILL", action="SIGKILL"),
    _fatal("os.kill", kill_oneself_audibly, "SIGKILL"),
    _fatal("SIGSEGV", _signal("SIGSEGV"), "SIGSEGV", action="SIGSEGV", stack="kill_oneself"),
    _fatal("segfault", read_address_zero, "SIGSEGV", stack="read_address_zero"),
    _fatal(
        "segfault in a thread", read_address_zero_in_a_thread, "SIGSEGV", stack="read_address_zero"
    ),
    _fatal("SIGABRT", _signal("SIGABRT"), "SIGABRT", action="SIGABRT", stack="kill_oneself"),
    _fatal("abort()", os.abort, "SIGABRT", stack="Fatal Python error"),
    _fatal("SIGBUS", _signal("SIGBUS"), "SIGBUS", action="SIGBUS", stack="kill_oneself"),
    _fatal("truncated mmap", read_a_truncated_file, "SIGBUS", stack="read_a_truncated_file"),
    _fatal("SIGFPE", _signal("SIGFPE"), "SIGFPE", action="SIGFPE", stack="kill_oneself"),
    _fatal("SIGILL", _signal("SIGILL"), "SIGILL", action="SIGILL", stack="kill_oneself"),
    _fatal("stack overflow", overflow_the_stack, "SIGSEGV", stack="overflow_the_stack"),
    _fatal("stack overflow in a thread", overflow_the_stack_of_a_thread, "SIGSEGV", stack=""),
    _exits("os._exit(0)", 0),
    _exits("os._exit(3)", 3),
    _fatal("SIGXCPU", _signal("SIGXCPU"), "SIGXCPU"),
    _fatal("SIGALRM", _signal("SIGALRM"), "SIGALRM"),
    _fatal("SIGRTMIN", _signal("SIGRTMIN"), "SIGRTMIN"),
    Cause("all descriptors closed", close_all_descriptors, DIES, "exited", None, 1, step="send"),
    _fatal("SIGKILL with a child left", leave_a_child_and_die, "SIGKILL"),
    _stalls("hang", sleep_for_ever, action="hang", stack="sleep_for_ever"),
    _stalls("hang in a lock", wait_for_a_lock, stack="wait_for_a_lock"),
    _stalls("hang in a pipe", read_an_empty_pipe, stack="read_an_empty_pipe"),
    _stalls("spin", spin_in_python, stack="spin_in_python"),
    _stalls("hang with the GIL held", sleep_with_the_gil_held, stack="sleep_with_the_gil_held"),
    _stalls("SIGSTOP", _signal("SIGSTOP"), action="SIGSTOP", signal="SIGKILL", exitcode=-9),
    Cause("sys.exit", leave, RAISES, error=_UNUSUAL, says="SystemExit: 5"),
    Cause(
        "KeyboardInterrupt",
        _raise(KeyboardInterrupt),
        RAISES,
        error=_UNUSUAL,
        says="KeyboardInterrupt",
    ),
    Cause("GeneratorExit", _raise(GeneratorExit), RAISES, error=_UNUSUAL, says="GeneratorExit"),
    Cause("BaseException", _raise(Unheard, "of"), RAISES, error=_UNUSUAL, says="Unheard: of"),
    Cause(
        "StopIteration",
        _raise(StopIteration, 7),
        RAISES,
        error=holdfast.WorkerError,
        says="StopIteration: 7",
    ),
    Cause("ValueError", _raise(ValueError, "one, two"), RAISES, error=ValueError, says="one, two"),
    Cause("MemoryError", use_up_memory, RAISES, error=MemoryError, says="use_up_memory"),
    Cause(
        "MemoryError for good",
        live_with_little_memory,
        RAISES,
        error=MemoryError,
        says="live_with_little_memory",
    ),
    Cause("OSError 24", use_up_descriptors_and_say_so, RAISES, error=OSError, says="[Errno 24]"),
    Cause("no descriptor free", use_up_descriptors, GOES_ON),
    Cause("thread left behind", leave_a_thread, GOES_ON),
    Cause("thread that raised", leave_a_raising_thread, GOES_ON),
    Cause("child left behind", leave_a_child, GOES_ON),
    Cause("SIGTERM", lambda: signal.raise_signal(signal.SIGTERM), GOES_ON, action="SIGTERM"),
    Cause("SIGINT", lambda: signal.raise_signal(signal.SIGINT), GOES_ON, action="SIGINT"),
    Cause("SIGHUP", lambda: signal.raise_signal(signal.SIGHUP), GOES_ON, action="SIGHUP"),
)
CAUSES = {cause.name: cause for cause in _EVERY}
