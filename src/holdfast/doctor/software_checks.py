"""Are Python, torch and other libraries, as they are set up here, fit for loading data? One function
per check.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.doctor.findings import Check, bad, good, warning
from holdfast.doctor.surroundings import Surroundings
from holdfast.versions import TRIED
from holdfast.worker.blas_threads import VARIABLES, decided

_OLDEST_TORCH, _NEWEST_TORCH = TRIED["torch"]
_NEWEST_PYTHON = TRIED["Python"][1]


def start_method(here: Surroundings) -> Check:
    if here.start_method != "fork":
        return good(
            "start method",
            f"{here.start_method}: the dataset is pickled and copied into every worker",
        )
    if here.thread_names:
        return warning(
            "start method",
            f"fork, while threads run ({', '.join(here.thread_names)}): a lock that one of them holds "
            "stays locked in the worker. Start iterating before you start threads",
            "DataLoader(…, multiprocessing_context='forkserver')",
        )
    return good("start method", "fork, and no other Python thread is running")


def threads(here: Surroundings) -> Check:
    native = here.threads - 1 - len(here.thread_names)
    if native <= 0 and not here.thread_names:
        return good("threads", "this process has one")
    words = f"{len(here.thread_names)} of Python and {native} of libraries are running"
    if here.thread_names:
        return warning("threads", f"{words}: {', '.join(here.thread_names)}")
    if native >= 2 * here.cores:
        return warning(
            "threads",
            f"{words}, on {here.cores} cores: each spawned worker of torch's loader starts as many "
            f"again; {_ours(here)}",
            "export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1",
        )
    return good("threads", f"{words} (BLAS has its own pool)")


def versions(here: Surroundings) -> Check:
    python = ".".join(map(str, here.python))
    words = f"Python {python}, torch {here.torch or 'none'}, NumPy {here.numpy or 'none'}"
    if here.torch is None:
        return bad("versions", f"{words}: torch is not installed", "pip install torch")
    oldest = ".".join(map(str, _OLDEST_TORCH))
    if _release(here.torch) < _OLDEST_TORCH:
        return bad(
            "versions", f"{words}: holdfast needs torch {oldest}", f"pip install 'torch>={oldest}'"
        )
    found = [pitfall for pitfall in _PITFALLS if pitfall.applies(here)]
    meaning = ". ".join([words, *(pitfall.words for pitfall in found)])
    grave = [pitfall for pitfall in found if pitfall.grave]
    if grave:
        return warning("versions", meaning, "\n".join(one.command for one in grave if one.command))
    return good("versions", meaning)


@dataclass(frozen=True)
class _Pitfall:
    """A known problem with a version, or a pair of versions; `grave` if the user has to act."""

    applies: Callable[[Surroundings], bool]
    words: str
    grave: bool = False
    command: str = ""


_PITFALLS = (
    _Pitfall(
        lambda here: _release(here.torch) > _NEWEST_TORCH,
        f"The newest torch that holdfast was tried with is {_NEWEST_TORCH[0]}.{_NEWEST_TORCH[1]}",
    ),
    _Pitfall(
        lambda here: here.python[:2] > _NEWEST_PYTHON,
        f"The newest Python that holdfast was tried with is {_NEWEST_PYTHON[0]}.{_NEWEST_PYTHON[1]}",
    ),
    _Pitfall(
        lambda here: here.free_threaded,
        "this Python is free-threaded: only holdfast's worker threads were tested with that (3.13)",
        grave=True,
        command="PYTHON_GIL=1 python …",
    ),
    _Pitfall(
        lambda here: here.python >= (3, 14) and here.start_method == "forkserver",
        "Since Python 3.14 workers are not forked by default: datasets that cannot be pickled fail, "
        "and scripts need `if __name__ == '__main__':`",
        grave=True,
        command="DataLoader(…, multiprocessing_context='fork')   # the old way",
    ),
    _Pitfall(
        lambda here: here.numpy is None,
        "Without NumPy torch.from_numpy and most datasets fail",
        grave=True,
        command="pip install numpy",
    ),
    _Pitfall(
        lambda here: (
            here.python >= (3, 12) and here.start_method == "fork" and bool(here.thread_names)
        ),
        "Since Python 3.12 a fork while threads run gives a DeprecationWarning, because the child "
        "can hang",
        grave=True,
        command="DataLoader(…, multiprocessing_context='forkserver')",
    ),
    _Pitfall(
        lambda here: here.python >= (3, 12),
        "Since Python 3.12 no thread can be started while the interpreter shuts down: do not iterate "
        "a loader in atexit or __del__",
    ),
    _Pitfall(
        lambda here: here.python < (3, 13),
        "Before Python 3.13 a multiprocessing.SharedMemory that several ranks attach to is removed "
        "when the first of them ends",
    ),
    _Pitfall(
        lambda here: "+cu" in (here.torch or "") and here.start_method == "fork",
        "With CUDA and fork: nothing in the dataset may touch the GPU",
    ),
)


def _release(version: str | None) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version or "")[:2]))


def private_parts(here: Surroundings) -> Check:
    name = "private names"
    wrong = [part for part in here.private_names if part.wrong]
    if not wrong:
        count = len(here.private_names)
        return good(name, f"all {count} that holdfast uses of torch and Python are there")
    words = "; ".join(f"{part.name} {part.wrong}: {part.without}" for part in wrong)
    judged = bad if any(part.needed == "always" for part in wrong) else warning
    newest = ".".join(map(str, _NEWEST_TORCH))
    return judged(name, words, f"pip install 'torch<={newest}.*'   # the newest that was tried")


def sharing(here: Surroundings) -> Check:
    if here.sharing is None:
        return warning("sharing", "not known how torch shares tensors: torch is not installed")
    if here.sharing == "file_system":
        return warning(
            "sharing",
            "file_system: names in /dev/shm remain when a run is killed. holdfast's loader does not "
            "share tensors that way",
            "torch.multiprocessing.set_sharing_strategy('file_descriptor')   # and ulimit -n higher",
        )
    return good("sharing", f"{here.sharing}: torch needs a descriptor per tensor, holdfast none")


def openmp(here: Surroundings) -> Check:
    if len({name.partition(".")[0].partition("-")[0] for name in here.openmp}) > 1:
        return warning(
            "OpenMP",
            f"two runtimes in one process ({', '.join(here.openmp)}): they disturb each other",
            "export OMP_NUM_THREADS=1",
        )
    chosen = [
        f"{name}={here.environment[name]}" for name in VARIABLES if here.environment.get(name)
    ]
    words = ", ".join(chosen) or "OMP_NUM_THREADS is not set"
    if not chosen and here.start_method == "fork" and here.cores > 1:
        return good(
            "OpenMP",
            f"{words}: with torch's loader NumPy's BLAS starts {here.cores} threads in each worker that "
            f"multiplies matrices; {_ours(here)}. torch itself uses one thread with both loaders. "
            "Parallel regions in the trainer before the fork can hang GNU OpenMP in forked processes",
            "export OMP_NUM_THREADS=1",
        )
    return good("OpenMP", words)


def opencv(here: Surroundings) -> Check:
    if here.opencv is None:
        return good("OpenCV", "not installed")
    words = f"starts {here.opencv} threads in each worker"
    command = "cv2.setNumThreads(0)   # in the dataset's module or in worker_init_fn"
    if here.opencv > 1 and here.start_method == "fork" and here.opencv_loaded:
        hangs = "it is loaded here, and may hang after a fork if it was used before"
        return warning("OpenCV", f"{words}; {hangs}", command)
    where = "loaded" if here.opencv_loaded else "installed, not loaded here"
    return good("OpenCV", f"{where}; {words}", command)


def _ours(here: Surroundings) -> str:
    """How many threads holdfast's workers use for linear algebra, in words."""
    if decided(here.environment):
        return "holdfast's workers use as many threads for linear algebra as your variables say"
    return "each of holdfast's workers uses one thread for linear algebra"
