"""``seeding="sample"``: what a sample draws depends on its key, the epoch and the seed, and on nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, get_worker_info

from holdfast import DataLoader
from tests.seeding.datasets import (
    BadElement,
    Draws,
    DrawsAtOnce,
    Stream,
    Temporary,
    as_is,
    drawn,
    noisy,
)

KILLS = "before-fetch:SIGKILL@worker=0,task=2;after-fetch:SIGKILL@worker=1,task=1;before-send:exit=3@task=6"


def batches(dataset: Any, epochs: int = 1, **arguments: Any) -> list[list[Any]]:
    """Of each epoch: all batches."""
    torch.manual_seed(7)
    arguments = {"batch_size": 3, "collate_fn": as_is, "seeding": "sample", **arguments}
    with DataLoader(dataset, **arguments) as loader:
        return [list(loader) for _ in range(epochs)]


def samples(epoch: list[Any]) -> dict[int, Any]:
    return {key: values for batch in epoch for key, values in batch}


EXPECTED: dict[int, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _expected() -> None:
    EXPECTED.update(samples(batches(Draws(24))[0]))


def draw_at_start(worker: int) -> None:
    drawn()


LAYOUTS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 2, "shuffle": True},
    {"num_workers": 3, "batch_size": 5},
    {"num_workers": 2, "in_order": False},
    {"batch_size": None, "collate_fn": None, "shuffle": True},
    {"num_workers": 2, "on_bad_sample": "skip"},
    {"on_bad_sample": "replace"},
    {"num_workers": 2, "worker_init_fn": draw_at_start},
    {"num_workers": 2, "sampler": [np.int64(key) for key in range(24)]},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=", ".join)
def test_samples_are_the_same_however_the_work_is_divided(layout: dict[str, Any]) -> None:
    found = batches(Draws(24), **layout)[0]
    assert (dict(found) if layout.get("batch_size", 1) is None else samples(found)) == EXPECTED


def test_ranks_have_the_same_samples() -> None:
    parts = [
        samples(batches(Draws(24), num_workers=1, sampler=range(rank, 24, 2))[0])
        for rank in range(2)
    ]
    assert {**parts[0], **parts[1]} == EXPECTED


@pytest.mark.faults
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_samples_are_the_same_whoever_dies(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", KILLS)
    assert samples(batches(Draws(24), num_workers=2, on_bad_sample=policy)[0]) == EXPECTED


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_samples_are_the_same_with_every_start_method(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", KILLS)
    found = batches(Draws(24), num_workers=2, multiprocessing_context=method)[0]
    assert samples(found) == EXPECTED


def test_a_key_that_comes_twice_has_the_same_values() -> None:
    found = batches(Draws(24), num_workers=2, sampler=[5, 6, 5, 7, 5])[0]
    assert [values for batch in found for key, values in batch if key == 5] == [EXPECTED[5]] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_is_tried_again_is_as_if_it_had_not_failed(workers: int) -> None:
    once = Temporary(12)
    once.failed = set(range(12))
    one = samples(batches(once, on_bad_sample="skip")[0])
    other = samples(batches(Temporary(12), num_workers=workers, on_bad_sample="skip")[0])
    assert one == other
    assert set(one) == set(range(12)) - {4}


def test_a_substitute_is_what_it_is_in_its_own_place() -> None:
    once = Temporary(12)
    once.failed = set(range(12))
    found = batches(once, num_workers=2, on_bad_sample="replace")[0]
    plain = samples(batches(once, on_bad_sample="skip")[0])
    values = [sample for batch in found for sample in batch]
    assert len(values) == 12
    assert all(plain[key] == drawn for key, drawn in values)


# -- epochs and seeds -----------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_each_epoch_has_values_of_its_own_for_any_number_of_workers(persistent: bool) -> None:
    ones = batches(Draws(9), epochs=3)
    assert batches(Draws(9), epochs=3, num_workers=2, persistent_workers=persistent) == ones
    assert len({repr(one) for one in ones}) == 3


@pytest.mark.faults
def test_a_replacement_knows_in_which_epoch_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "HOLDFAST_FAULTS", "after-resume:SIGKILL;before-fetch:SIGKILL@task=2,generation=1"
    )
    found = batches(Draws(9), epochs=3, num_workers=2, persistent_workers=True)
    assert found == batches(Draws(9), epochs=3)


def test_where_the_seed_comes_from() -> None:
    def first(seed: int, **arguments: Any) -> list[Any]:
        torch.manual_seed(seed)
        torch.rand(seed)  # what was drawn since does not matter
        return list(DataLoader(Draws(1), collate_fn=as_is, **arguments))

    of_torch = first(1, seeding="sample")
    generator = torch.Generator().manual_seed(1)
    generators = [first(seed, seeding="sample", generator=generator) for seed in (2, 3)]
    assert generators[0] == generators[1] == of_torch != first(2, seeding="sample")
    assert first(2, seeding=("sample", 1)) == first(3, seeding=["sample", 1]) == of_torch


@pytest.mark.parametrize(
    "given", ["samples", "", 5, None, ("sample",), ("worker", 3), ("sample", 1.5), ("sample", True)]
)
def test_a_wrong_seeding_is_named_with_its_value_and_what_would_be_right(given: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        DataLoader([1], seeding=given)
    assert f"seeding={given!r}" in str(caught.value)
    assert '("sample", 1234)' in str(caught.value)


# -- what is as without it ------------------------------------------------------------------


def states() -> Any:
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize(
    "dataset", [Draws(9), Stream(9), DrawsAtOnce(9)], ids=lambda one: type(one).__name__
)
def test_the_trainers_generators_are_its_own(dataset: Any, policy: str) -> None:
    found = []
    for workers in (0, 1, 2):
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        random.gauss(0, 1), np.random.randn()
        loader = DataLoader(
            dataset,
            3,
            num_workers=workers,
            collate_fn=noisy,
            seeding="sample",
            on_bad_sample=policy,
        )
        seen = [states() for _ in loader]
        found.append((seen[-1], states()))
    assert found[0] == found[1] == found[2]


def test_an_error_in_a_sample_leaves_them_too() -> None:
    dataset = Temporary(6)
    loader = DataLoader(dataset, seeding="sample", sampler=[4])
    iterator = iter(loader)
    before = states()
    with pytest.raises(ValueError, match="bad"):
        next(iterator)
    assert states() == before


def seed_of_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.seed == torch.initial_seed()
    info.dataset.seeds = (info.seed, random.random())


class WithInfo(Draws):
    seeds: Any = None

    def __getitem__(self, key: int) -> Any:
        return get_worker_info().seed, self.seeds  # type: ignore[union-attr]


def test_worker_info_and_worker_init_fn_are_as_with_torch() -> None:
    more = {"num_workers": 2, "worker_init_fn": seed_of_worker}
    ours = batches(WithInfo(6), **more)
    assert ours == batches(WithInfo(6), seeding="worker", **more)


# -- batches --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset", [Draws(12), DrawsAtOnce(12)], ids=lambda one: type(one).__name__
)
def test_what_is_done_with_a_batch_is_seeded_by_its_first_key(dataset: Any) -> None:
    one = batches(dataset, collate_fn=noisy)[0]
    assert batches(dataset, collate_fn=noisy, num_workers=3)[0] == one
    assert (
        batches(dataset, collate_fn=noisy, num_workers=2, sampler=[6, 7, 8], on_bad_sample="skip")[
            0
        ]
        == one[2:3]
    )
    assert len({repr(batch[-1]) for batch in one}) == len(one)


# -- streams --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_stream_is_the_same_without_workers_and_with_one(policy: str) -> None:
    ones = batches(Stream(20), epochs=2, on_bad_sample=policy, collate_fn=noisy)
    assert (
        batches(Stream(20), epochs=2, num_workers=1, on_bad_sample=policy, collate_fn=noisy) == ones
    )
    assert ones[0] != ones[1]


def test_a_stream_is_the_same_after_a_bad_element() -> None:
    """Whether its states are exact is tried with the seeds of the elements that are drawn again."""
    found = samples(batches(BadElement(), on_bad_sample="skip")[0])
    assert found == samples(batches(BadElement(), num_workers=1, on_bad_sample="skip")[0])
    assert set(found) == set(range(20)) - {9}


@pytest.mark.faults
@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_goes_on_exactly_after_deaths(
    persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent, "epochs": 2}
    expected = batches(Stream(30), **arguments)
    monkeypatch.setenv(
        "HOLDFAST_FAULTS",
        "before-fetch:SIGKILL@worker=0,task=4;after-collate:SIGKILL@worker=1,task=5",
    )
    assert batches(Stream(30), **arguments) == expected


# -- recovery -------------------------------------------------------------------------------


def test_no_random_states_are_kept() -> None:
    from holdfast.worker.randomness import Randomness
    from holdfast.worker.sample_seeding import SampleSeeds, kept_states
    from tests.worker.test_randomness import Slots

    seeds, sizes = SampleSeeds(1, 2), []
    for iterable in (False, True):
        slots = Slots()
        randomness = Randomness(instead=kept_states(seeds, iterable))
        for number in range(4):
            seeds.for_element()
            drawn()
            randomness.keep(slots, number)
        sizes.append([len(state) for state in slots.kept])
    assert sizes[0][1:] in ([], [20], [20, 20])
    assert set(sizes[0]) == {20}
    assert set(sizes[1]) == {28}
    before = seeds.position
    saved = randomness.saved()
    seeds.for_element()
    randomness.restore(saved)
    assert seeds.position == before


# -- the number of the epoch, and resuming ----------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_of_the_sampler_numbers_the_epochs_too(workers: int) -> None:
    """As frameworks call it. Where it is not called, epochs are counted on from there."""
    expected = batches(Draws(8), epochs=6, num_workers=workers)
    torch.manual_seed(7)
    sampler: Any = DistributedSampler(Draws(8), 1, 0, shuffle=False)
    loader: Any = DataLoader(
        Draws(8),
        batch_size=3,
        collate_fn=as_is,
        seeding="sample",
        num_workers=workers,
        sampler=sampler,
    )
    with loader:
        assert list(loader) == expected[0]
        sampler.set_epoch(3)
        assert list(loader) == expected[3]
        assert list(loader) == expected[4]
        sampler.set_epoch(5)
        assert list(loader) == expected[5]
        sampler.set_epoch(0)
        assert list(loader) == expected[0]


@pytest.mark.parametrize(
    ("there", "here", "persistent"), [(2, 0, False), (0, 3, False), (3, 1, True)]
)
def test_another_number_of_workers_goes_on_exactly(there: int, here: int, persistent: bool) -> None:
    """In the middle of the second epoch: the rest of it, and the epochs after it."""

    def make(workers: int) -> Any:
        torch.manual_seed(7)
        return DataLoader(
            Draws(20),
            batch_size=3,
            shuffle=True,
            collate_fn=as_is,
            seeding="sample",
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
            generator=torch.Generator().manual_seed(2),
        )

    with make(there) as loader:
        expected = [list(loader) for _ in range(3)]
    with make(there) as loader:
        first = list(loader)
        iterator = iter(loader)
        second = [next(iterator) for _ in range(3)]
        state = json.loads(json.dumps(loader.state_dict()))
        del iterator
    with make(here) as loader:
        loader.load_state_dict(state)
        second += list(loader)
        assert [first, second, list(loader)] == expected


@pytest.mark.parametrize("had", [0, 2, 3], ids="after {} batches of the third epoch".format)
@pytest.mark.parametrize("told", ["never", "once", "again", "every epoch"])
def test_a_resumed_run_numbers_its_epochs_as_the_one_without_a_break(told: str, had: int) -> None:
    """Whether the program calls set_epoch once, again when it is started again, or always."""

    def make() -> Any:
        dataset = Draws(8)
        sampler: Any = DistributedSampler(dataset, 1, 0)
        if told in ("once", "again"):
            sampler.set_epoch(5)
        return DataLoader(
            dataset, batch_size=3, collate_fn=as_is, seeding=("sample", 1), sampler=sampler
        )

    def run(loader: Any, epoch: int) -> list[Any]:
        if told == "every epoch":
            loader.sampler.set_epoch(5 + epoch)
        return list(loader)

    loader = make()
    expected = [run(loader, epoch) for epoch in range(5)]
    loader = make()
    for epoch in range(2):
        run(loader, epoch)
    if told == "every epoch":
        loader.sampler.set_epoch(7)
    if had:
        iterator = iter(loader)
        assert [next(iterator) for _ in range(had)] == expected[2][:had]
    state = json.loads(json.dumps(loader.state_dict()))
    again = make()
    if told == "once":
        again.sampler.set_epoch(0)
    again.load_state_dict(state)
    assert [run(again, epoch) for epoch in range(2, 5)] == [expected[2][had:], *expected[3:]]


def test_what_set_epoch_says_after_a_state_was_loaded_counts_for_the_next_epoch() -> None:
    expected = batches(Draws(8), epochs=6)
    torch.manual_seed(7)
    loader: Any = DataLoader(Draws(8), batch_size=3, collate_fn=as_is, seeding="sample")
    list(loader)
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(4)
    assert [list(loader), list(loader)] == expected[4:]
