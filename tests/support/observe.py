"""Runs a loader as a `Plan` says and records everything a user could notice, so that two loaders
can be compared.

What is recorded: whether it could be made, every warning, len(), every batch down to strides and
bits, every error with type and text at the `next()` where it came, what the consumer drew between
two batches, and the random state of torch, random, numpy and the loader's own generator after each
`iter()` and each epoch.

What is not: tracebacks' frames inside the loader's own code, addresses, and process numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
import re
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch

from tests.support.datasets import DATASETS
from tests.support.fingerprint import fingerprint
from tests.support.parts import BATCH_SAMPLERS, COLLATES, SAMPLERS, WORKER_INITS
from tests.support.texts import normalised


class Hung(BaseException):
    """The loader did not answer in time. Not an Exception, so that nothing on the way swallows
    it."""


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raises `Hung` in the main thread when the block takes longer than that."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise Hung(f"no answer within {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Plan:
    """Arguments and use of one loader, in plain values: what pytest prints is what one can
    paste."""

    dataset: str = "Revealing"
    size: int = 7
    batch_size: int | None = 2
    shuffle: bool | None = None
    sampler: str | None = None
    batch_sampler: str | None = None
    num_workers: int = 2
    collate_fn: str = "default"
    pin_memory: bool = False
    drop_last: bool = False
    timeout: float = 0
    worker_init_fn: str = "none"
    context: str | None = None
    generator: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    in_order: bool = True
    seed: int = 0
    # How it is used.
    epochs: int = 1
    take: int | None = None  # break after that many calls of next()
    ask_len: bool = False
    keep: bool = False  # hold every batch and look at it only after the loader is gone
    go_on_after_errors: bool = True

    def arguments(self) -> dict[str, Any]:
        """Fresh keyword arguments for one loader; what is left at its default is not passed."""
        generator = torch.Generator().manual_seed(self.seed + 1) if self.generator else None
        made: dict[str, Any] = {
            "dataset": DATASETS[self.dataset](self.size),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "sampler": None
            if self.sampler is None
            else SAMPLERS[self.sampler](self.size, generator),
            "batch_sampler": None
            if self.batch_sampler is None
            else BATCH_SAMPLERS[self.batch_sampler](self.size, generator),
            "num_workers": self.num_workers,
            "collate_fn": COLLATES[self.collate_fn](),
            "pin_memory": self.pin_memory,
            "drop_last": self.drop_last,
            "timeout": self.timeout,
            "worker_init_fn": WORKER_INITS[self.worker_init_fn],
            "multiprocessing_context": self.context,
            "generator": generator,
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": self.persistent_workers,
            "in_order": self.in_order,
        }
        if self.batch_sampler is not None:
            del made["batch_size"]
        return made

    def __repr__(self) -> str:
        changed = (
            f"{each.name}={getattr(self, each.name)!r}"
            for each in dataclasses.fields(self)
            if getattr(self, each.name) != each.default
        )
        return f"Plan({', '.join(changed)})"


Event = tuple[Any, ...]


@dataclass
class Epoch:
    events: list[Event] = field(default_factory=list)
    random_after_iter: Any = None
    random_after_epoch: Any = None


@dataclass
class Seen:
    """What one loader showed."""

    construction: Event = ("made",)
    length: list[Event] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    warnings: list[tuple[str, str, str]] = field(default_factory=list)


def observe(loader_class: Callable[..., Any], plan: Plan, *, patience: float = 40.0) -> Seen:
    """Makes and uses one loader as planned; every observation in comparable form."""
    seen = Seen()
    kept: list[tuple[Epoch, int, Any]] = []
    with warnings.catch_warnings(record=True) as caught, bounded(patience):
        warnings.simplefilter("always")
        seed_everything(plan.seed)
        arguments = plan.arguments()
        try:
            loader = loader_class(**arguments)
        except Exception as error:
            seen.construction = _refusal(error)
            _file(caught, "construction", seen)
            return seen
        _file(caught, "construction", seen)
        for number in range(plan.epochs):
            epoch = Epoch()
            seen.epochs.append(epoch)
            try:
                if plan.ask_len:
                    seen.length.append(_length(loader))
                _run(loader, plan, epoch, number, arguments["generator"], kept, caught, seen)
            except Hung as hung:
                epoch.events.append(("hung", str(hung)))
                break
        del loader, arguments
    for epoch, position, batch in kept:
        epoch.events[position] = ("batch", fingerprint(batch))
    return seen


def _run(
    loader: Any,
    plan: Plan,
    epoch: Epoch,
    number: int,
    generator: torch.Generator | None,
    kept: list[tuple[Epoch, int, Any]],
    caught: list[warnings.WarningMessage],
    seen: Seen,
) -> None:
    try:
        iterator = iter(loader)
    except Exception as error:
        epoch.events.append(("iter", *_refusal(error)))
        _file(caught, f"iter {number}", seen)
        return
    _file(caught, f"iter {number}", seen)
    epoch.random_after_iter = random_state(generator)
    calls = 0
    while plan.take is None or calls < plan.take:
        calls += 1
        try:
            batch = next(iterator)
        except StopIteration:
            epoch.events.append(("end", _next_after_the_end(iterator)))
            break
        except Exception as error:
            epoch.events.append(_refusal(error))
            if not plan.go_on_after_errors or calls > 200:
                break
        else:
            if plan.keep:
                kept.append((epoch, len(epoch.events), batch))
                epoch.events.append(("batch", None))
            else:
                epoch.events.append(("batch", fingerprint(batch)))
            del batch
        finally:
            _file(caught, f"next {number}.{calls}", seen)
        epoch.events.append(
            ("consumer drew", random.random(), torch.rand(1).item(), np.random.rand())
        )
    del iterator
    epoch.random_after_epoch = random_state(generator)


def _next_after_the_end(iterator: Any) -> Event:
    try:
        return ("batch", fingerprint(next(iterator)))
    except StopIteration:
        return ("end",)
    except Exception as error:
        return _refusal(error)


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def random_state(generator: torch.Generator | None = None) -> tuple[str, ...]:
    """The state of the main process's random generators, by name, short enough to print."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": repr(random.getstate()).encode(),
        "numpy": repr([np.asarray(part).tolist() for part in np.random.get_state()]).encode(),
        "generator": b"" if generator is None else generator.get_state().numpy().tobytes(),
    }
    return tuple(
        f"{name} {hashlib.sha256(state).hexdigest()[:12]}" for name, state in states.items()
    )


def _refusal(error: Exception) -> Event:
    event = (
        "error",
        f"{type(error).__module__}.{type(error).__qualname__}",
        normalised(str(error)),
    )
    # A kept traceback would hold the iterator in a cycle, and torch then waits 5 s for each of its
    # workers.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return event


def _length(loader: Any) -> Event:
    try:
        return ("len", len(loader))
    except Exception as error:
        return _refusal(error)


def _file(caught: list[warnings.WarningMessage], when: str, seen: Seen) -> None:
    for each in caught:
        text = str(each.message)
        if (
            "use of fork() may lead to deadlocks" not in text
        ):  # Python's own, about the test runner's threads
            seen.warnings.append((when, each.category.__name__, normalised(text)))
    caught.clear()


# --- comparing ------------------------------------------------------------------------------------

RESIZE = "RuntimeError: Trying to resize storage that is not resizable\n"
STACK = "RuntimeError: stack expects each tensor to be equal size"


def same_error(stock: str, other: str) -> bool:
    """holdfast's text is torch's text and may go on. Where torch in a worker blames its own storage
    for ragged samples (failures.md 14), saying what is really wrong, as torch does without workers,
    is right too."""
    if other.startswith(stock):
        return True
    if stock.endswith(RESIZE):
        beginning = stock.removesuffix(RESIZE)
        return other.startswith((beginning + STACK, beginning + RESIZE.rstrip("\n")))
    return False


def same_event(stock: Event, other: Event) -> bool:
    if stock[0] == other[0] == "error":
        return bool(stock[1] == other[1]) and same_error(stock[2], other[2])
    if stock[:2] == other[:2] == ("iter", "error"):
        return same_event(stock[1:], other[1:])
    return bool(stock == other)


def differences(stock: Seen, other: Seen, *, ordered: bool = True) -> list[str]:
    """Everything in which `other` is not what torch is, in words; empty when they are the same.

    With `ordered=False` an epoch is compared as a multiset, and only its end state of the random
    generators counts.
    """
    found: list[str] = []
    if not same_event(stock.construction, other.construction):
        found.append(f"construction: torch {stock.construction}, other {other.construction}")
    if len(stock.length) != len(other.length) or not all(
        map(same_event, stock.length, other.length)
    ):
        found.append(f"len: torch {stock.length}, other {other.length}")
    if stock.warnings != other.warnings:
        found += _different_warnings(stock, other)
    if len(stock.epochs) != len(other.epochs):
        found.append(f"epochs: torch {len(stock.epochs)}, other {len(other.epochs)}")
    for number, (one, two) in enumerate(zip(stock.epochs, other.epochs, strict=False)):
        found += [f"epoch {number}: {each}" for each in _different_epochs(one, two, ordered)]
    return found


def _different_warnings(stock: Seen, other: Seen) -> list[str]:
    missing = Counter(stock.warnings) - Counter(other.warnings)
    extra = Counter(other.warnings) - Counter(stock.warnings)
    return [f"warning missing: {each}" for each in missing] + [
        f"warning too many: {each}" for each in extra
    ]


def _different_epochs(stock: Epoch, other: Epoch, ordered: bool) -> list[str]:
    found = []
    if stock.random_after_iter != other.random_after_iter:
        states = f"torch {stock.random_after_iter}, other {other.random_after_iter}"
        found.append(f"random state after iter(): {states}")
    if ordered:
        found += _different_events(stock.events, other.events)
    else:
        found += _different_bags(stock.events, other.events)
    if stock.random_after_epoch != other.random_after_epoch:
        states = f"torch {stock.random_after_epoch}, other {other.random_after_epoch}"
        found.append(f"random state at the end: {states}")
    return found


def _different_events(stock: list[Event], other: list[Event]) -> list[str]:
    for position, (one, two) in enumerate(zip(stock, other, strict=False)):
        if not same_event(one, two):
            return [f"event {position} of {len(stock)}:\n  torch {one}\n  other {two}"]
    if len(stock) != len(other):
        return [f"torch had {len(stock)} events, other {len(other)}: {(stock + other)[-1]}"]
    return []


def _different_bags(stock: list[Event], other: list[Event]) -> list[str]:
    left = [of_any_worker(event) for event in other if event[0] != "consumer drew"]
    missing = []
    for event in map(of_any_worker, stock):
        if event[0] == "consumer drew":
            continue
        match = next((each for each in left if same_event(event, each)), None)
        if match is None:
            missing.append(f"missing {event}")
        else:
            left.remove(match)
    return missing + [f"too many {event}" for event in left]


def of_any_worker(event: Event) -> Event:
    """Out of order, which worker makes a batch, and so fails at it, is a matter of luck."""
    if event[0] == "error":
        return (*event[:2], re.sub(r"worker process \d+", "worker process …", event[2]))
    return event
