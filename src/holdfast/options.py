"""The options that holdfast adds to torch's: their values, their meaning, and their error messages.

`parse` checks what the user wrote and returns `Settings`, which the engine reads. The loader keeps
the values as the user gave them, because frameworks rebuild loaders from their attributes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from holdfast.engine.continuation import Recovery
from holdfast.engine.events import RestartPolicy
from holdfast.limits.budget import in_bytes
from holdfast.samples.policy import Limit, Policy

WorkerMethodName = Literal["multiprocessing", "thread", "ray"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The options, checked."""

    restarts: RestartPolicy
    stall_timeout: float | None
    policy: Policy | None  # for bad samples; None to let them raise
    limit: Limit
    quarantine: str | None
    logbook: str | None
    memory_budget: int | Literal["auto"] | None
    worker_memory_limit: int | Literal["auto"] | None
    name: str | None
    iterable_recovery: Recovery = "auto"
    pin_in_place: int | Literal["auto"] | None = None  # bytes that may be registered
    seeding: Literal["worker", "sample"] = "worker"
    sample_seed: int | None = None  # None: the initial seed of the loader's generator
    worker_method: WorkerMethodName = "multiprocessing"
    ray_options: Mapping[str, Any] | None = None


MaxRestarts = int | tuple[int, float] | Literal["auto"] | None
Seeding = Literal["worker", "sample"] | tuple[Literal["sample"], int]
Memory = int | str | None
"""A number of bytes, a text such as "2GiB", "auto", or None for no limit."""

DEFAULT_STALL_TIMEOUT = 300.0
RESTART_PERIOD = 60.0
RESTARTS_PER_WORKER = 5


def parse(
    *,
    max_restarts: Any,
    stall_timeout: Any,
    num_workers: int,
    on_bad_sample: Any = "raise",
    max_bad_samples: Any = None,
    quarantine: Any = None,
    logbook: Any = None,
    memory_budget: Any = "auto",
    worker_memory_limit: Any = "auto",
    name: Any = None,
    iterable_recovery: Any = "auto",
    pin_in_place: Any = None,
    seeding: Any = "worker",
    worker_method: Any = "multiprocessing",
    ray_options: Any = None,
) -> Settings:
    """Check all options; an error names the option, its value and what it takes."""
    stall = _stall_timeout(stall_timeout)
    policy = _policy(on_bad_sample, stall)
    if policy is None:
        for option, value in (("max_bad_samples", max_bad_samples), ("quarantine", quarantine)):
            if value is not None:
                raise ValueError(
                    f'{option}={value!r} has no meaning with on_bad_sample="raise", where the '
                    'first bad sample ends the run; use on_bad_sample="skip" or "replace"'
                )
    kind, seed = _seeding(seeding)
    if kind == "sample" and worker_method == "thread" and num_workers > 0:
        raise ValueError(
            f"seeding={seeding!r} is not possible with worker_method='thread': it seeds the global "
            "generators for each sample, and threads share them. Draw from "
            "torch.utils.data.get_worker_info().rng, or use worker_method='multiprocessing'"
        )
    return Settings(
        restarts=_restarts(max_restarts, num_workers),
        stall_timeout=stall,
        policy=policy,
        limit=_limit(max_bad_samples),
        quarantine=_quarantine(quarantine),
        logbook=_logbook(logbook),
        memory_budget=budget_in_bytes(memory_budget),
        worker_memory_limit=_memory("worker_memory_limit", worker_memory_limit, "1GiB"),
        name=_name(name),
        iterable_recovery=_recovery(iterable_recovery),
        pin_in_place=_memory("pin_in_place", pin_in_place, "8GiB", none="copy to pinned memory"),
        seeding=kind,
        sample_seed=seed,
        worker_method=_worker_method(worker_method),
        ray_options=_ray_options(ray_options, worker_method),
    )


def _seeding(value: Any) -> tuple[Literal["worker", "sample"], int | None]:
    right = (
        'it takes "worker" (as torch), "sample" (for each sample, from the initial seed of '
        "loader.generator or torch, the epoch and its key) or a pair with the seed to use, such as "
        '("sample", 1234)'
    )
    seed: Any = None
    kind = value
    if isinstance(value, (tuple, list)) and len(value) == 2:
        kind, seed = value
        if kind != "sample":
            raise ValueError(f"seeding={value!r} has a seed that would not be used; {right}")
        if not _is_number(seed) or not isinstance(seed, Integral):
            raise TypeError(f"seeding={value!r} has a seed that is no whole number; {right}")
        seed = int(seed)
    if not isinstance(kind, str):
        raise TypeError(f"seeding={value!r} is of the wrong type; {right}")
    if kind not in ("worker", "sample"):
        raise ValueError(f"seeding={value!r} is not one of the words; {right}")
    return ("sample" if kind == "sample" else "worker"), seed


def _policy(value: Any, stall_timeout: float | None) -> Policy | None:
    right = (
        'it takes "raise", "skip", "replace", or a function that takes a BadSample and returns '
        "one of these words or a sample to use instead"
    )
    if isinstance(value, str):
        if value not in ("raise", "skip", "replace"):
            raise ValueError(f"on_bad_sample={value!r} is not one of the words; {right}")
    elif not callable(value):
        raise TypeError(f"on_bad_sample={value!r} is of the wrong type; {right}")
    return None if value == "raise" else Policy(value, stall_timeout)


def _recovery(value: Any) -> Recovery:
    right = (
        'it takes "auto" (continue from the dataset\'s state if that is proven exact, otherwise '
        'draw again), "state" (only from its state), "replay" (never from its state) or "raise" '
        "(the death of a worker of an iterable dataset ends the run)"
    )
    _check_word("iterable_recovery", value, get_args(Recovery), right)
    recovery: Recovery = value
    return recovery


def _worker_method(value: Any) -> WorkerMethodName:
    right = (
        'it takes "multiprocessing" (each worker is a process, which may die), "thread" (each is a '
        "thread of this process: nothing is pickled, and a crash ends the program) or "
        '"ray" (each is an actor of a Ray cluster)'
    )
    _check_word("worker_method", value, get_args(WorkerMethodName), right)
    method: WorkerMethodName = value
    return method


def _check_word(name: str, value: Any, words: Collection[str], right: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is of the wrong type; {right}")
    if value not in words:
        raise ValueError(f"{name}={value!r} is not one of the words; {right}")


def _ray_options(value: Any, worker_method: Any) -> Mapping[str, Any] | None:
    right = (
        'it takes a dict of what an actor is started with, such as {"num_cpus": 1, '
        '"scheduling_strategy": "SPREAD"}, or None'
    )
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"ray_options={value!r} is of the wrong type; {right}")
    if worker_method != "ray":
        raise ValueError(
            f"ray_options={value!r} has no meaning with worker_method={worker_method!r}; use "
            'worker_method="ray"'
        )
    for name in _OURS_IN_RAY:
        if name in value:
            raise ValueError(
                f"ray_options={value!r}: {name} is chosen by holdfast, which replaces actors and "
                f"ends them itself; {right}"
            )
    return dict(value)


_OURS_IN_RAY = (
    "max_restarts",
    "max_task_retries",
    "concurrency_groups",
    "max_concurrency",
    "name",
    "namespace",
    "get_if_exists",
    "lifetime",
)


def _limit(value: Any) -> Limit:
    right = (
        "it takes a number of samples such as 100, a fraction above 0 and below 1 such as 0.01, "
        "None (no limit, but it is an error if all samples are bad), or math.inf (all may be bad)"
    )
    if value is None:
        return Limit()
    if not _is_number(value):
        raise TypeError(f"max_bad_samples={value!r} is of the wrong type; {right}")
    if isinstance(value, Integral):
        if int(value) >= 0:
            return Limit(count=int(value))
    elif 0 < value < 1:
        return Limit(fraction=float(value))
    elif value == math.inf:
        return Limit(all_may_be_bad=True)
    raise ValueError(f"max_bad_samples={value!r} is out of range; {right}")


def check_places(*, quarantine: Any) -> None:
    """Check that files can be written, once, when the loader is made. A disk that fails later must
    not end a run."""
    path = _quarantine(quarantine)
    if path is None:
        return
    right = 'it takes the path of a file, such as "bad.jsonl", in a folder that can be written'
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise ValueError(f"quarantine={quarantine!r}: there is no folder {folder}; {right}")
    if os.path.isdir(path):
        raise ValueError(f"quarantine={quarantine!r} is a folder; {right}")
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe or device may never end
        raise ValueError(f"quarantine={quarantine!r} is a pipe, socket or device; {right}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK | os.R_OK):
        raise ValueError(f"quarantine={quarantine!r} cannot be read and written here; {right}")


def _quarantine(value: Any) -> str | None:
    right = 'it takes the path of a file, such as "bad.jsonl", or None'
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"quarantine={value!r} is of the wrong type; {right}")
    return os.path.abspath(value)


def _restarts(value: Any, num_workers: int) -> RestartPolicy:
    right = (
        'it takes "auto", None (no limit), a number of restarts within a minute such as 20, '
        "or a pair (restarts, seconds) such as (20, 300)"
    )
    if value is None:
        return RestartPolicy(None, RESTART_PERIOD)
    if value == "auto":
        return RestartPolicy(RESTARTS_PER_WORKER * max(1, num_workers), RESTART_PERIOD)
    period: Any = RESTART_PERIOD
    count = value
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"max_restarts={value!r} is not a pair; {right}")
        count, period = value
    if not isinstance(count, int) or isinstance(count, bool) or not _is_number(period):
        raise TypeError(f"max_restarts={value!r} is of the wrong type; {right}")
    if count < 0 or not 0 < period < math.inf:
        raise ValueError(f"max_restarts={value!r} is out of range; {right}")
    return RestartPolicy(count, float(period))


def _stall_timeout(value: Any) -> float | None:
    right = "it takes a number of seconds above 0, such as 300, or None (never)"
    if value is None:
        return None
    if not _is_number(value):
        raise TypeError(f"stall_timeout={value!r} is of the wrong type; {right}")
    if not value > 0:
        raise ValueError(f"stall_timeout={value!r} is out of range; {right}")
    return None if math.isinf(value) else float(value)


def _logbook(value: Any) -> str | None:
    right = 'it takes the path of a folder, such as "runs/today", or None'
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"logbook={value!r} is of the wrong type; {right}")
    path = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise ValueError(f"logbook={value!r} is not a path; {right}")
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"logbook={value!r} is a file; {right}")
    return path


def _name(value: Any) -> str | None:
    right = 'it takes a name for messages, such as "train", or None (after the dataset\'s class)'
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"name={value!r} is of the wrong type; {right}")
    if not value.strip() or not value.isprintable():
        raise ValueError(f"name={value!r} is not a printable name on one line; {right}")
    return value


def budget_in_bytes(value: Any) -> int | Literal["auto"] | None:
    return _memory("memory_budget", value, "2GiB")


def _memory(
    name: str, value: Any, example: str, none: str = "no limit"
) -> int | Literal["auto"] | None:
    right = (
        f'it takes "auto", a number of bytes above 0, a text such as "{example}" or "500MB", or '
        f"None ({none})"
    )
    if value is None:
        return None
    if isinstance(value, str):
        if value == "auto":
            return "auto"
        count = in_bytes(value)
        if count is None:
            raise ValueError(f"{name}={value!r} is not an amount of memory; {right}")
    elif not _is_number(value) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r} is of the wrong type; {right}")
    else:
        count = int(value)
    if count <= 0:
        raise ValueError(f"{name}={value!r} is out of range; {right}")
    return count


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
