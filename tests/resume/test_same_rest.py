"""What comes after a resumption is the rest of the run that was not broken off, bit for bit."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import DataLoader
from tests.resume.plans import (
    FINISHED,
    KEEP,
    QUICK,
    SLOW,
    AtItsNextBeginning,
    BothHaveStates,
    ItsOwnIterator,
    KnowsItsEpoch,
    LoadsWhenBegun,
    PicksFromABuffer,
    Plan,
    ShufflesWhenBegun,
)
from tests.support.datasets import OneString
from tests.support.fingerprint import fingerprint
from tests.support.loaders import STOCK

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def seed() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


def generators() -> tuple[Any, ...]:
    """The program's own, which a program saves with its model."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def put_back(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def all_generators(loader: Any) -> list[Any]:
    """The states of the program's, and of those that belong to the loader and to its sampler."""
    of_torch, of_random, of_numpy = generators()
    found = [of_torch.tolist(), of_random, [of_numpy[1].tolist(), *of_numpy[2:]]]
    parts = [part for part in (loader, loader.sampler, loader.batch_sampler) if part is not None]
    for one in {id(one): one for part in parts for one in vars(part).values()}.values():
        if isinstance(one, torch.Generator):
            found.append(one.get_state().tolist())
        elif isinstance(one, random.Random):
            found.append(one.getstate())
    return found


def begin(loader: Any, epoch: int) -> Any:
    told = getattr(loader.sampler, "set_epoch", None)
    if told is not None:
        told(epoch)
    return iter(loader)


def had(iterator: Any, most: int = 1 << 30) -> list[Any]:
    """What comes from an iterator: batches, and errors by their type."""
    found: list[Any] = []
    while len(found) < most:
        try:
            found.append(fingerprint(next(iterator)))
        except StopIteration:
            break
        except OneString as error:
            found.append(re.findall(r"sample \d+", str(error))[-1])
    return found


def whole(plan: Plan) -> tuple[list[list[Any]], list[Any]]:
    """The epochs of stock torch, and all generators at the end."""
    seed()
    loader = plan.make(STOCK)
    epochs = [had(begin(loader, epoch)) for epoch in range(plan.epochs)]
    loader._iterator = None  # ends persistent workers
    return epochs, all_generators(loader)


def check(
    plan: Plan, place: tuple[int, int], reference: tuple[list[list[Any]], list[Any]]
) -> dict[str, Any]:
    """Break off there, go on in another loader, and compare all that follows; returns the state."""
    epochs, at_the_end = reference
    broken, batches = place
    seed()
    loader = plan.make(lambda *args, **kwargs: DataLoader(*args, **kwargs, **plan.ours))
    for epoch in range(broken):
        assert had(begin(loader, epoch)) == epochs[epoch]
    iterator = begin(loader, broken)
    first = had(iterator, batches)
    text = json.dumps(loader.state_dict())
    program = generators()
    del iterator
    loader.close()
    seed()
    resumed = plan.make(lambda *args, **kwargs: DataLoader(*args, **kwargs, **plan.ours))
    resumed.load_state_dict(json.loads(text))
    assert json.dumps(resumed.state_dict()) == text
    put_back(program)
    if not json.loads(text)["_iterator_finished"]:
        first += had(begin(resumed, broken))
    assert first == epochs[broken]
    for epoch in range(broken + 1, plan.epochs):
        assert had(begin(resumed, epoch)) == epochs[epoch]
    assert all_generators(resumed) == at_the_end
    resumed.close()
    found: dict[str, Any] = json.loads(text)
    return found


# Others of the plans differ from these in one thing only.
ALIKE = {
    "in order",
    "shuffled, by torch's",
    "weighted",
    "distributed",
    "an empty stream",
    "less than one batch for each worker",
    "single samples, dropped last",
    "batches of different sizes",
    "its own iterator",
    "the same, that loads when it is begun",
    "a stream that begins where it was loaded",
    "states of dataset and iterator, workers that are not kept",
    "the same with persistent workers",
    "a state that leaves something out",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in QUICK],
)
def test_the_rest_is_that_of_torch_without_a_break(name: str) -> None:
    plan = QUICK[name]
    reference = whole(plan)
    for place in plan.breaks[-1:]:
        check(plan, place, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_the_rest_is_that_of_torch_after_its_other_breaks(name: str) -> None:
    plan = QUICK[name]
    reference = whole(plan)
    for place in plan.breaks[:-1]:
        check(plan, place, reference)
    if name in FINISHED:
        state = check(plan, (0, 1 << 30), reference)
        assert state["_iterator_finished"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_rest_is_that_of_torch_in_every_place(name: str) -> None:
    plan = SLOW[name]
    reference = whole(plan)
    for place in plan.breaks:
        with contextlib.suppress(IndexError):
            check(plan, (place[0], min(place[1], len(reference[0][place[0]]))), reference)


def test_a_replay_is_said_once_with_its_cost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast"):
        check(QUICK["a stream"], (0, 5), whole(QUICK["a stream"]))
    said = [
        one.getMessage() for one in caplog.records if "drawn again and dropped" in one.getMessage()
    ]
    assert len(said) == 1
    assert "5 batches" in said[0]


@pytest.mark.parametrize(
    "left",
    [
        (0,),
        pytest.param((1,), marks=pytest.mark.slow),
        pytest.param((3,), marks=pytest.mark.slow),
        pytest.param((1, 0, 1), marks=pytest.mark.slow),
        (3, 1, 4),
    ],
)
@pytest.mark.parametrize(
    "dataset", [KnowsItsEpoch, AtItsNextBeginning, LoadsWhenBegun, BothHaveStates, ItsOwnIterator]
)
def test_epochs_that_were_left_early_are_known_to_a_dataset_without_workers(
    dataset: Any, left: tuple[int, ...]
) -> None:
    """Its state says in which epoch it is, or it goes on where it was left."""

    def begun() -> Any:
        seed()
        loader = DataLoader(dataset(17), batch_size=2)
        for batches in left:
            had(iter(loader), batches)
        return loader, iter(loader)

    for batches in (0, 1, 2, 4):
        loader, iterator = begun()
        reference = [had(iterator), *(had(iter(loader)) for _ in range(2))]
        loader, iterator = begun()
        first = had(iterator, batches)
        assert first == reference[0][:batches]
        state, program = json.dumps(loader.state_dict()), generators()
        resumed = DataLoader(dataset(17), batch_size=2)
        resumed.load_state_dict(json.loads(state))
        put_back(program)
        rest = [] if json.loads(state)["_iterator_finished"] else had(iter(resumed))
        assert [first + rest, *(had(iter(resumed)) for _ in range(2))] == reference


class Preempted(Exception):
    pass


def preempt(*_: Any) -> None:
    raise Preempted


class _Struck(KnowsItsEpoch):
    """A signal arrives when this many elements more were asked for."""

    until = -1

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            _Struck.until -= 1
            if _Struck.until == 0:
                signal.raise_signal(signal.SIGUSR1)
            yield sample


@pytest.mark.parametrize(
    ("handler", "raised"),
    [
        (preempt, Preempted),
        (lambda *_: sys.exit(3), SystemExit),
        (signal.default_int_handler, KeyboardInterrupt),
    ],
)
@pytest.mark.parametrize("recovery", ["auto", "replay"])
@pytest.mark.parametrize("batches", [0, 1, 3])
def test_what_a_signal_handler_raises_leaves_a_resumption_without_workers(
    monkeypatch: pytest.MonkeyPatch, handler: Any, raised: Any, recovery: Any, batches: int
) -> None:
    """Whichever element of the dataset it waits for: a fingerprint of it would say nothing."""

    def make() -> Any:
        return DataLoader(_Struck(17), batch_size=2, iterable_recovery=recovery)

    monkeypatch.setattr(_Struck, "until", -1)
    loader = make()
    if recovery == "auto":
        had(iter(loader), 3)
    iterator = iter(loader)
    had(iterator, batches)
    state, program = loader.state_dict(), generators()
    rest = had(iterator)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for until in range(1, 100):
            resumed = make()
            resumed.load_state_dict(state)
            put_back(program)
            _Struck.until = until
            try:
                iterator = iter(resumed)
            except raised:
                assert _Struck.until == 0
            else:
                break
            assert resumed.state_dict() == state
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert _Struck.until > 0
    assert until > 1 or (recovery, batches) == ("replay", 0)  # nothing has to be drawn then
    _Struck.until = -1
    assert had(iterator) == rest


def warnings_of_draws(
    caplog: pytest.LogCaptureFixture, dataset: Any, model: Any, **options: Any
) -> tuple[int, bool]:
    """How often it is said that the program's draws are missing, and whether the rest is the same."""

    def trained(loader: Any, batches: int = 1 << 30) -> list[Any]:
        found = []
        for _, batch in zip(range(batches), loader, strict=False):
            found.append(fingerprint(batch))
            model()
        return found

    def make() -> Any:
        return DataLoader(dataset(23), batch_size=3, **options)

    seed()
    reference = trained(make())
    seed()
    loader = make()
    first = trained(loader, 4)
    state, program = json.dumps(loader.state_dict()), generators()
    seed()
    resumed = make()
    resumed.load_state_dict(json.loads(state))
    put_back(program)
    caplog.clear()
    same = first + trained(resumed) == reference
    return sum("without the program's draws" in one for one in caplog.messages), same


def test_a_replay_without_draws_of_the_program_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of_draws(caplog, PicksFromABuffer, random.random) == (1, False)
    assert warnings_of_draws(caplog, PicksFromABuffer, np.random.random) == (0, True)
    assert warnings_of_draws(caplog, ShufflesWhenBegun, random.random, seeding="sample") == (
        0,
        True,
    )
    assert warnings_of_draws(caplog, PicksFromABuffer, random.random, seeding="sample") == (0, True)


@pytest.mark.faults
@pytest.mark.parametrize("dataset", [AtItsNextBeginning, LoadsWhenBegun])
def test_a_stream_that_ends_where_it_begins_loses_nothing_by_deaths_between_epochs(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(dataset, size=11, epochs=3, options=KEEP)
    epochs, _ = whole(plan)
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-resume:SIGKILL")
    seed()
    with plan.make(DataLoader) as loader:
        assert [had(iter(loader)) for _ in epochs] == epochs
        assert loader.stats()["restarts"] == 2
