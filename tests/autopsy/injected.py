"""A dataset each of whose samples breaks its worker in another way, once."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.faults.causes import CAUSES

STALL_TIMEOUT = 1.0


# -- more ways than the engine's table has -------------------------------------------------


def free_twice() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    place = libc.malloc(64)
    libc.free(place)
    libc.free(place)


def throw_bad_alloc() -> None:
    """An uncaught C++ exception: libstdc++ says which, and aborts."""
    ctypes.CDLL("libstdc++.so.6")._ZSt17__throw_bad_allocv()


def throw_an_error_in_cpp() -> None:
    ctypes.CDLL("libstdc++.so.6")._ZSt21__throw_runtime_errorPKc(b"bad header")


def free_what_is_not_allocated() -> None:
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free(ctypes.addressof(ctypes.create_string_buffer(256)) + 16)


def fail_an_assertion() -> None:
    ctypes.CDLL(None).__assert_fail(b"size > 0", b"decode.c", 812, b"decode")


def exit_in_native_code() -> None:
    ctypes.CDLL(None)._exit(7)


def give_up_for_lack_of_threads() -> None:
    """As OpenBLAS does: a word on standard error, and exit."""
    os.write(2, b"OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2\n")
    os._exit(1)


def wait_for_a_thread_that_died() -> None:
    done = threading.Event()

    def decode() -> None:
        raise ValueError("no such codec")

    threading.Thread(target=decode, name="decoder").start()
    done.wait()


def wait_on_a_condition() -> None:
    condition = threading.Condition()
    with condition:
        condition.wait()


def read_a_silent_socket() -> None:
    import socket

    one, _other = socket.socketpair()
    one.recv(1)


def spin_in_native_code() -> None:
    import hashlib

    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 1 << 30)


def recurse_in_python() -> None:
    def deeper(depth: int) -> int:
        return deeper(depth + 1) + 1

    deeper(0)


def collate_shapes() -> None:
    torch.stack([torch.zeros(2), torch.zeros(3)])


def read_a_truncated_image() -> None:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "JPEG")
    Image.open(io.BytesIO(file.getvalue()[:400])).load()


def open_what_is_not_there() -> None:
    open("/nowhere/at/all.jpg", "rb")  # noqa: SIM115


def allocate_too_much() -> None:
    torch.empty(1 << 55, dtype=torch.uint8)


_MORE: dict[str, Callable[[], Any]] = {
    "double free": free_twice,
    "bad_alloc": throw_bad_alloc,
    "C++ error": throw_an_error_in_cpp,
    "invalid pointer": free_what_is_not_allocated,
    "assertion in C": fail_an_assertion,
    "_exit in C": exit_in_native_code,
    "no more threads": give_up_for_lack_of_threads,
    "hang after a thread's death": wait_for_a_thread_that_died,
    "hang in a condition": wait_on_a_condition,
    "hang in a socket": read_a_silent_socket,
    "spin in native code": spin_in_native_code,
    "SIGPROF": lambda: os.kill(os.getpid(), signal.SIGPROF),
    "RecursionError": recurse_in_python,
    "ragged batch": collate_shapes,
    "truncated image": read_a_truncated_image,
    "missing file": open_what_is_not_there,
    "absurd allocation": allocate_too_much,
}

DEATHS: dict[str, str] = {
    "SIGKILL": "killed-from-outside",
    "SIGKILL with a child left": "killed-from-outside",
    "SIGSEGV": "native-segv",
    "segfault": "native-segv",
    "segfault in a thread": "native-segv",
    "SIGFPE": "native-segv",
    "SIGILL": "illegal-instruction",
    "SIGABRT": "abort",
    "abort()": "abort",
    "double free": "abort",
    "bad_alloc": "allocation-failed",
    "C++ error": "abort",
    "invalid pointer": "abort",
    "assertion in C": "abort",
    "_exit in C": "exited-by-itself",
    "no more threads": "task-limit",
    "SIGBUS": "sigbus-not-shm",
    "truncated mmap": "sigbus-not-shm",
    "stack overflow": "stack-overflow",
    "stack overflow in a thread": "stack-overflow",
    "os._exit(0)": "exited-by-itself",
    "os._exit(3)": "exited-by-itself",
    "all descriptors closed": "exited-by-itself",
    "SIGXCPU": "cpu-limit",
    "SIGALRM": "stray-signal",
    "SIGRTMIN": "stray-signal",
    "SIGPROF": "stray-signal",
    "hang": "silent-stall",
    "hang in a lock": "silent-stall",
    "hang in a condition": "silent-stall",
    "hang after a thread's death": "silent-stall",
    "hang in a pipe": "silent-stall",
    "hang in a socket": "silent-stall",
    "hang with the GIL held": "silent-stall",
    "spin": "endless-loop",
    "spin in native code": "endless-loop",
    "SIGSTOP": "stopped",
}
"""What ends a worker, and the cause that `Incident.cause` must name."""

ERRORS: dict[str, str] = {
    "sys.exit": "python-exception",
    "KeyboardInterrupt": "python-exception",
    "GeneratorExit": "python-exception",
    "BaseException": "python-exception",
    "StopIteration": "python-exception",
    "ValueError": "python-exception",
    "RecursionError": "stack-overflow",
    "ragged batch": "collate-shape",
    "truncated image": "bad-sample",
    "missing file": "bad-sample",
    "absurd allocation": "allocation-failed",
    "MemoryError": "allocation-failed",
    "OSError 24": "fd-exhaustion",
}
"""What the user's code raises, and the cause that `explain` must find in the error's text."""


class Minefield(Dataset[Any]):
    """Sample 2i+1 is the i-th cause; the even ones are harmless."""

    def __init__(self, causes: list[str], folder: str) -> None:
        self.causes = causes
        self.folder = folder

    def __len__(self) -> int:
        return 2 * len(self.causes) + 1

    def __getitem__(self, index: int) -> Any:
        if index % 2:
            self.strike(index // 2)
        return torch.tensor(index)

    def strike(self, which: int) -> None:
        """Do what one of the causes does, unless it was done before."""
        name = self.causes[which]
        try:
            os.close(os.open(f"{self.folder}/struck-{which}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        act = _MORE.get(name) or CAUSES[name].act
        act()
