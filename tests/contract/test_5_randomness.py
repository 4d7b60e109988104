"""contract.md section 5: seeds in workers, and what the main process's generators are left with."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils.worker import _generate_state

from tests.support.datasets import Numbers, Revealing, Stream, shuffled_pipe
from tests.support.loaders import Loader
from tests.support.observe import random_state
from tests.support.parts import reseed

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*excessive worker creation"),
]


def base_seed(generator: torch.Generator | None = None) -> int:
    """The one number torch draws at iter()."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def seeds(loader: Any) -> list[int]:
    """Worker seeds by worker id."""
    found = {sample["worker"]: sample["seed"] for sample in loader}
    return [found[worker] for worker in sorted(found)]


def test_every_worker_has_its_own_seed_base_plus_id(loader_class: Loader) -> None:
    loader = loader_class(Revealing(6), batch_size=None, num_workers=3)
    torch.manual_seed(5)
    base = base_seed()
    torch.manual_seed(5)
    assert seeds(loader) == [base, base + 1, base + 2]


def test_torch_random_and_numpy_are_seeded_in_the_worker_as_torch_does(
    loader_class: Loader,
) -> None:
    torch.manual_seed(8)
    base = base_seed()
    torch.manual_seed(8)
    loader = loader_class(Revealing(4), batch_size=None, num_workers=2)
    samples = list(loader)
    for worker in range(2):
        torch.manual_seed(base + worker)
        random.seed(base + worker)
        np.random.seed(_generate_state(base, worker))
        for sample in samples[worker::2]:
            assert torch.equal(sample["torch"], torch.rand(2))
            assert sample["random"] == random.random()
            assert sample["numpy"] == np.random.rand()
            assert sample["torch seed"] == sample["seed"] == base + worker


def test_torchs_numpy_seed_function_gives_the_numbers_it_always_gave() -> None:
    """Tested upstream by its private name too: if it moves, all NumPy streams in workers do."""
    assert _generate_state(2884386318, 1) == [2086503097, 2114937874, 2615662222, 951980738]
    assert _generate_state(2**62 + 12345, 3) == [212656591, 1714744770, 3137660178, 3498849195]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_seeded_generator_makes_order_and_seeds_reproducible(
    loader_class: Loader, num_workers: int
) -> None:
    def run() -> list[Any]:
        generator = torch.Generator().manual_seed(42)
        loader = loader_class(
            Revealing(9),
            batch_size=None,
            shuffle=True,
            num_workers=num_workers,
            generator=generator,
        )
        return [(sample["index"], sample["seed"]) for _ in range(2) for sample in loader]

    before = random_state()
    first = run()
    if num_workers:  # without, the dataset itself draws here
        assert random_state() == before, "with a generator given, the global ones are not touched"
    torch.manual_seed(1)
    assert run() == first


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_advances_the_global_generator_by_just_what_torch_draws(
    loader_class: Loader, num_workers: int, shuffle: bool
) -> None:
    loader = loader_class(Numbers(6), shuffle=shuffle, num_workers=num_workers)
    torch.manual_seed(3)
    iterator = iter(loader)
    if num_workers == 0:
        after_iter = random_state()
        torch.manual_seed(3)
        base_seed()
        assert after_iter == random_state(), "iter() draws once, and nothing else yet"
    list(iterator)
    after_epoch = random_state()
    torch.manual_seed(3)
    base_seed()
    if shuffle:
        base_seed()
    assert after_epoch == random_state()


def test_persistent_workers_draw_their_seed_once(loader_class: Loader) -> None:
    loader = loader_class(Revealing(4), batch_size=None, num_workers=2, persistent_workers=True)
    torch.manual_seed(3)
    first = list(loader)
    after_first = random_state()
    second = list(loader)
    assert random_state() == after_first
    assert [sample["seed"] for sample in second] == [sample["seed"] for sample in first]
    assert [sample["random"] for sample in second] != [sample["random"] for sample in first]


def test_without_persistent_workers_every_epoch_has_new_seeds(loader_class: Loader) -> None:
    loader = loader_class(Revealing(4), batch_size=None, num_workers=2)
    assert set(seeds(loader)).isdisjoint(seeds(loader))


def test_the_same_seed_gives_the_same_shuffle_for_any_number_of_workers(
    loader_class: Loader,
) -> None:
    orders = []
    for num_workers in (0, 1, 2, 3):
        torch.manual_seed(77)
        loader = loader_class(Numbers(20), batch_size=None, shuffle=True, num_workers=num_workers)
        orders.append([list(loader) for _ in range(2)])
    assert orders.count(orders[0]) == 4
    assert orders[0][0] != orders[0][1]


def test_worker_init_fn_may_reseed_for_good(loader_class: Loader) -> None:
    loader = loader_class(Revealing(4), batch_size=None, num_workers=2, worker_init_fn=reseed)
    samples = list(loader)
    for worker in range(2):
        reseed(worker)
        for sample in samples[worker::2]:
            assert torch.equal(sample["torch"], torch.rand(2))
            assert sample["random"] == random.random()
            assert sample["numpy"] == np.random.rand()
            assert sample["torch seed"] == 1000 + worker


def assert_seeded(worker_id: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert info.seed == torch.initial_seed()
    assert info.id == worker_id


def test_the_worker_is_seeded_before_worker_init_fn_runs(loader_class: Loader) -> None:
    loader = loader_class(Numbers(4), batch_size=None, num_workers=2, worker_init_fn=assert_seeded)
    assert list(loader) == [0, 1, 2, 3]


def test_loading_leaves_random_and_numpy_of_the_main_process_alone(loader_class: Loader) -> None:
    for dataset in (Revealing(6), Stream(6)):
        before = random_state()
        list(loader_class(dataset, num_workers=2))
        after = random_state()
        assert [state for state in before if not state.startswith("torch")] == [
            state for state in after if not state.startswith("torch")
        ]


@pytest.mark.slow
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_shuffling_datapipe_is_seeded_by_the_main_process(
    loader_class: Loader, persistent_workers: bool
) -> None:
    def epochs(seed: int, num_workers: int) -> list[list[int]]:
        torch.manual_seed(seed)
        loader = loader_class(
            shuffled_pipe(20),
            batch_size=None,
            shuffle=True,
            num_workers=num_workers,
            persistent_workers=persistent_workers and num_workers > 0,
        )
        return [sorted_as_delivered(loader) for _ in range(2)]

    def sorted_as_delivered(loader: Any) -> list[int]:
        return [sample[0] for sample in loader]

    for num_workers in (0, 1, 2):
        one, again, other = epochs(1, num_workers), epochs(1, num_workers), epochs(2, num_workers)
        assert one == again
        assert one != other
        assert one[0] != one[1]
        assert sorted(one[0]) == list(range(20))
    if not persistent_workers:
        assert epochs(1, 0)[0] != list(range(20))
