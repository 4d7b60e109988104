"""The state itself: when it can be taken, what is in it, what is refused, and with which words."""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler

from holdfast import DataLoader, StateError
from tests.resume.plans import (
    Counting,
    EagerPermutation,
    Positions,
    Remembers,
    Resumable,
    Sometimes,
    StatefulIterator,
    Wandering,
    WithWorkerRng,
    share,
)
from tests.support.datasets import Numbers, OneString, Revealing, Stream

Values = list[list[int]]
PLAIN = (str, int, float, bool, type(None))


def values(batches: Any) -> Values:
    return [batch.tolist() for batch in batches]


def numbers(**options: Any) -> Any:
    return DataLoader(Numbers(12), batch_size=2, **options)


WHOLE = [[n, n + 1] for n in range(0, 12, 2)]


def resumed(state: Any, make: Callable[[], Any] = numbers) -> Values:
    loader = make()
    loader.load_state_dict(state)
    return values(loader)


# -- when it can be taken -------------------------------------------------------------------


@pytest.mark.parametrize("method", ["thread", "multiprocessing"])
def test_a_batch_that_has_just_come_is_not_counted_before_the_consumer_has_it(method: str) -> None:
    """A state that another thread asks for is taken when a batch arrives."""
    loader = DataLoader(Lingering(12), num_workers=1, prefetch_factor=1, worker_method=method)
    batches: Any = iter(loader)
    asked = []
    for _ in range(12):
        asked.append(batches._pool.checkpointing.ask())
        next(batches)
    batches._pool.checkpoint()  # answers those that are left
    taken = [one.result(60) for one in asked]
    assert [one.workers[0].seat.answered for one in taken] == [one.done for one in taken]
    loader.close()


class Lingering(Numbers):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)  # so that it is waited for
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_it_can_be_taken_at_any_time_and_counts_what_was_had(workers: int) -> None:
    def make() -> Any:
        return numbers(num_workers=workers)

    loader = make()
    before = loader.state_dict()
    assert before["batches"] == 0
    assert loader._iterator is None
    states = []
    for number, _ in enumerate(loader):
        states.append(loader.state_dict())
        assert states[-1] == loader.state_dict()
        assert states[-1]["batches"] == number + 1
    after = loader.state_dict()
    assert after["_iterator_finished"]
    assert not states[-1]["_iterator_finished"]
    assert resumed(before, make) == resumed(after, make) == WHOLE
    for number, state in enumerate(states[1::2]):
        assert resumed(state, make) == WHOLE[2 * number + 2 :]
    last = make()
    last.load_state_dict(states[-1])
    assert values(last) == []
    assert values(last) == WHOLE


class AsksMeanwhile(torch.utils.data.Sampler[int]):
    """A permutation from a generator. Before it draws that, and after, `ask` is called."""

    def __init__(self, size: int) -> None:
        self.size, self.generator = size, torch.Generator().manual_seed(3)
        self.ask: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        self.ask()
        order = torch.randperm(self.size, generator=self.generator).tolist()
        self.ask()
        yield from order


@pytest.mark.parametrize("own_thread", [False, True])
@pytest.mark.parametrize(
    ("workers", "persistent"),
    [(0, False), pytest.param(2, False, marks=pytest.mark.slow), (2, True)],
)
def test_a_state_that_is_taken_while_an_epoch_begins_is_that_before_or_after(
    workers: int, persistent: bool, own_thread: bool
) -> None:
    """By another thread, for which the sampler waits, or by the sampler itself."""

    def make() -> tuple[Any, AsksMeanwhile]:
        sampler = AsksMeanwhile(12)
        made = numbers(num_workers=workers, persistent_workers=persistent, sampler=sampler)
        return made, sampler

    loader, sampler = make()
    states: list[Any] = []

    def take() -> None:
        states.append(json.loads(json.dumps(loader.state_dict())))

    def ask() -> None:
        if own_thread:
            take()
            return
        thread = threading.Thread(target=take)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    sampler.ask = ask
    whole = [values(loader), values(loader)]
    sampler.ask = lambda: None
    whole.append(values(loader))
    loader.close()
    assert len(states) == 4
    for number, state in enumerate(states):
        other, _ = make()
        other.load_state_dict(state)
        assert [values(other), values(other)] == whole[number // 2 : number // 2 + 2]
        other.close()


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_goes_on_when_a_state_is_loaded_in_it(persistent: bool, epochs: int) -> None:
    loader = numbers(num_workers=2, persistent_workers=persistent)
    for _ in range(epochs):
        assert values(loader) == WHOLE
    had = []
    for number, batch in enumerate(loader):
        had.append(batch.tolist())
        if number == 0:
            state = loader.state_dict()
        elif number == 2:
            loader.load_state_dict(state)
    assert had == WHOLE
    assert loader.state_dict() == state
    assert values(loader) == WHOLE[1:]
    assert values(loader) == WHOLE
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_it_can_be_taken_before_the_first_batch_of_a_resumed_epoch(workers: int) -> None:
    def make() -> Any:
        return numbers(num_workers=workers)

    state = state_of(make)
    for _ in range(2):
        loader = make()
        loader.load_state_dict(state)
        iter(loader)
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
    assert state["batches"] == 2
    assert resumed(state, make) == WHOLE[2:]


class TakesOverWhenBegun(Remembers):
    """Its state is what was loaded only when it is begun."""

    begins: dict[str, Any] | None = None

    def __iter__(self) -> Any:
        if self.begins is not None:
            super().load_state_dict(self.begins)
            self.begins = None
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins = state


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_a_sampler_that_is_not_begun_yet_is_the_one_it_was_given(workers: int) -> None:
    """As in a resumed epoch before its first batch."""

    def make() -> Any:
        return numbers(num_workers=workers, sampler=TakesOverWhenBegun(12))

    expected = values(make())
    state = state_of(make)
    loader = make()
    loader.load_state_dict(state)
    iter(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    assert resumed(state, make) == expected[2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_it_can_be_taken_when_the_loop_has_been_left(workers: int) -> None:
    loader = numbers(num_workers=workers)
    try:
        for number, _ in enumerate(loader):
            assert 1 / (2 - number)
    except ZeroDivisionError:
        pass
    assert resumed(loader.state_dict(), lambda: numbers(num_workers=workers)) == WHOLE[3:]
    loader.close()
    assert loader.state_dict()["batches"] == 3


class Slow(Numbers):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.5 * (index == 4))
        return index


def test_it_can_be_taken_by_another_thread_while_the_loop_waits() -> None:
    loader: Any = DataLoader(Slow(12), batch_size=2, num_workers=1)
    iterator = iter(loader)
    next(iterator), next(iterator)
    waiting = threading.Thread(target=next, args=(iterator,))
    waiting.start()
    time.sleep(0.05)
    state = loader.state_dict()
    assert waiting.is_alive()
    assert state["batches"] == 2
    waiting.join()
    assert loader.state_dict()["batches"] == 3
    assert resumed(state, lambda: DataLoader(Slow(12), batch_size=2, num_workers=1)) == WHOLE[2:]


def test_a_state_of_a_loaded_loader_is_what_was_loaded_and_can_be_taken_again_later() -> None:
    loader = numbers(num_workers=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    state["_iterator_finished"] = False  # as Accelerate does
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert loader.state_dict() is not state
    seen = values(iter(loader))
    assert seen == WHOLE[1:]
    assert state == kept
    loader.load_state_dict({})  # as with torchdata's
    assert values(loader) == WHOLE


def test_several_resumptions_follow_one_another() -> None:
    state, seen = None, []
    while len(seen) < 6:
        loader: Any = DataLoader(Revealing(18), batch_size=3, shuffle=True, num_workers=2)
        if state is None:
            torch.manual_seed(3)
        else:
            loader.load_state_dict(state)
        seen.append(next(iter(loader)))
        state = loader.state_dict()
    torch.manual_seed(3)
    stock = torch.utils.data.DataLoader(Revealing(18), batch_size=3, shuffle=True, num_workers=2)
    for ours, theirs in zip(seen, stock, strict=True):
        assert torch.equal(ours["index"], theirs["index"])
        assert torch.equal(ours["torch"], theirs["torch"])


def test_the_size_and_the_cost_do_not_grow_with_the_position() -> None:
    loader: Any = DataLoader(Numbers(20_000), shuffle=True)
    sizes = []
    for number, _ in enumerate(loader):
        if number in (10, 15_000):
            sizes.append(len(json.dumps(loader.state_dict())))
    assert abs(sizes[0] - sizes[1]) < 100
    assert sizes[0] < 10_000


def test_random_states_cost_ten_kilobytes_for_each_worker() -> None:
    sizes = []
    for workers in (1, 2):
        loader: Any = DataLoader(Revealing(16), num_workers=workers)
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        sizes.append(len(json.dumps(loader.state_dict())))
        loader.close()
    assert 5_000 < sizes[1] - sizes[0] < 12_500


# -- in any order ---------------------------------------------------------------------------


class Uneven(Numbers):
    """Worker 0 is slow."""

    def __getitem__(self, index: int) -> int:
        info = torch.utils.data.get_worker_info()
        time.sleep(0.02 * (info is not None and info.id == 0))
        return index


@pytest.mark.parametrize("sampler", [None, Remembers])
def test_out_of_order_each_sample_comes_once_over_all_parts(sampler: Any) -> None:
    def make() -> Any:
        options = {"sampler": sampler(30)} if sampler else {"shuffle": True}
        return DataLoader(Uneven(30), num_workers=2, in_order=False, **options)

    torch.manual_seed(0)
    seen: list[int] = []
    state: Any = None
    for part in (9, 5, 30):
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            seen.append(int(batch))
            part -= 1
            if not part:
                break
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
    assert sorted(seen) == list(range(30))


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        ((2, 4, False, 7), (0, None, True, 1), (0, None, True, 99)),
        ((3, 5, False, 9), (1, 1, False, 1), (1, 1, False, 99)),
        ((3, 5, False, 9), (1, 1, False, 0), (1, 1, False, 99)),
        ((2, 4, False, 9), (2, 4, True, 2), (2, 4, True, 1), (0, None, True, 99)),
    ],
)
def test_what_came_out_of_order_is_known_in_a_state_of_a_run_with_fewer_workers_or_in_order(
    parts: Any, stateful: bool
) -> None:
    """Each part has its `num_workers`, `prefetch_factor` and `in_order`."""
    seen: list[int] = []
    state: Any = None
    for workers, prefetch, in_order, batches in parts:
        options = {"sampler": Remembers(60)} if stateful else {"shuffle": True}
        loader: Any = DataLoader(
            Uneven(60),
            num_workers=workers,
            prefetch_factor=prefetch,
            in_order=in_order,
            generator=torch.Generator().manual_seed(3),
            seeding="sample",
            **options,
        )
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        found = itertools.islice(iterator, batches)
        seen += [int(batch) for batch in found]
        state = json.loads(json.dumps(loader.state_dict()))
        del iterator, found
        loader.close()
    assert sorted(seen) == list(range(60))


# -- bad samples ----------------------------------------------------------------------------


def skip_or_replace(bad: Any) -> str:
    return "skip" if bad.index % 2 else "replace"


@pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("skip", marks=pytest.mark.slow),
        pytest.param("replace", marks=pytest.mark.slow),
        skip_or_replace,
    ],
)
@pytest.mark.parametrize("sampler", [None, Remembers], ids=["shuffle", "sampler with a state"])
def test_bad_samples_are_counted_over_both_parts(
    sampler: Any, policy: Any, workers: int, tmp_path: Any
) -> None:
    """Substitutes are chosen among the indices that the sampler has given, also before the break."""

    def make(name: str) -> Any:
        return DataLoader(
            Sometimes(40),
            batch_size=4,
            shuffle=sampler is None,
            sampler=sampler and sampler(40),
            num_workers=workers,
            on_bad_sample=policy,
            quarantine=tmp_path / name,
            generator=torch.Generator().manual_seed(4),
        )

    def seen(loader: Any) -> list[Any]:
        return [(batch["index"].tolist(), batch["random"].tolist()) for batch in loader]

    whole = make("one")
    torch.manual_seed(0)
    program = torch.get_rng_state()
    expected = [seen(whole) for _ in range(2)]
    torch.set_rng_state(program)
    first, parts = make("two"), []
    for batch in first:
        parts.append((batch["index"].tolist(), batch["random"].tolist()))
        if len(parts) == (5 if sampler is None else 1):
            break
    state = json.loads(json.dumps(first.state_dict()))
    program = torch.get_rng_state()
    rest = make("two")
    rest.load_state_dict(state)
    torch.set_rng_state(program)
    parts += seen(rest)
    if workers:  # without, `random` is the program's
        assert parts == expected[0]
    assert [one for one, _ in parts] == [one for one, _ in expected[0]]
    assert [one for one, _ in seen(rest)] == [one for one, _ in expected[1]]
    key = [(bad.index, bad.epoch, bad.action) for bad in whole.bad_samples]
    assert [(bad.index, bad.epoch, bad.action) for bad in rest.bad_samples] == key
    assert len((tmp_path / "two").read_text().splitlines()) == len(
        (tmp_path / "one").read_text().splitlines()
    )


class _Stumbling(StatefulIterator):
    """Some elements raise, and the next one can be asked for all the same."""

    def __iter__(self) -> Any:
        return _StumblingPositions(share(self.size))


class _StumblingPositions(Positions):
    def __next__(self) -> Any:
        sample = super().__next__()
        if sample["index"] % 7 == 3:
            raise OneString("bad")
        return sample


@pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_elements_of_a_stream_are_counted_over_both_parts(workers: int) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return DataLoader(
            _Stumbling(40),
            batch_size=4,
            num_workers=workers,
            on_bad_sample="skip",
            max_bad_samples=9,
        )

    def seen(loader: Any) -> list[Any]:
        return [batch["index"].tolist() for batch in loader]

    whole = make()
    expected = seen(whole)
    loader, first = make(), []
    for batch in loader:
        first.append(batch["index"].tolist())
        if len(first) == 4:
            break
    rest = make()
    rest.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert first + seen(rest) == expected
    assert len(rest.bad_samples) == len(whole.bad_samples) == 6


# -- deaths ---------------------------------------------------------------------------------


class _Deadly(torch.utils.data.Dataset[Any]):
    """The first worker that loads one of these samples kills itself, once for each run."""

    def __init__(self, size: int, folder: Any) -> None:
        super().__init__(size)  # type: ignore[call-arg]
        self.folder = folder

    def __getitem__(self, index: Any) -> Any:
        die_once(index, self.folder)
        return super().__getitem__(index)


class Deadly(_Deadly, Revealing):
    pass


def die_once(index: int, folder: Any) -> None:
    if index % 5 == 2:
        try:
            os.close(os.open(folder / str(index), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("stream", [False, True])
def test_under_a_storm_of_kills_every_state_leads_to_the_rest(stream: bool, tmp_path: Any) -> None:
    dataset: Any = _DeadlyStream(30, tmp_path) if stream else Deadly(30, tmp_path)
    plain: Any = Resumable(30) if stream else Revealing(30)
    shuffle = {} if stream else {"shuffle": True}

    def make(data: Any, kind: Any = DataLoader, **more: Any) -> Any:
        generator = torch.Generator().manual_seed(2)
        return kind(data, batch_size=2, num_workers=2, generator=generator, **shuffle, **more)

    expected = [
        (one["index"].tolist(), one["random"].tolist())
        for one in make(plain, torch.utils.data.DataLoader)
    ]
    seen: list[Any] = []
    state = None
    while len(seen) < len(expected):
        loader = make(dataset, max_restarts=None)
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            seen.append((batch["index"].tolist(), batch["random"].tolist()))
            state = loader.state_dict()
            if len(seen) % 5 == 0:
                break
        loader.close()
    assert seen == expected
    assert len(list(tmp_path.iterdir())) == 6


class _DeadlyCounting(_Deadly, Counting):
    pass


def test_the_state_of_a_map_style_dataset_survives_deaths_too(tmp_path: Any) -> None:
    def seen(loader: Any) -> list[Any]:
        return [(one["index"].tolist(), one["loaded"].tolist()) for one in loader]

    expected = seen(torch.utils.data.DataLoader(Counting(30), batch_size=2, num_workers=2))
    loader: Any = DataLoader(
        _DeadlyCounting(30, tmp_path), batch_size=2, num_workers=2, max_restarts=None
    )
    assert seen(loader) == expected
    assert len(list(tmp_path.iterdir())) == 6


class _DeadlyRng(_Deadly, WithWorkerRng):
    pass


def test_generators_of_workers_are_those_of_a_run_without_deaths_or_breaks(tmp_path: Any) -> None:
    def make(data: Any, **more: Any) -> Any:
        torch.manual_seed(4)
        return DataLoader(data, batch_size=2, num_workers=2, **more)

    def seen(batch: Any) -> Any:
        return [one.tolist() for one in (batch["index"], *batch["rng"])]

    expected = [seen(batch) for batch in make(WithWorkerRng(30))]
    found: list[Any] = []
    state = None
    while len(found) < len(expected):
        loader = make(_DeadlyRng(30, tmp_path), max_restarts=None)
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            found.append(seen(batch))
            if len(found) % 4 == 0:
                break
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
    assert found == expected
    assert len(list(tmp_path.iterdir())) == 6


class _DeadlyStream(Resumable):
    def __init__(self, size: int, folder: Any) -> None:
        super().__init__(size)
        self.folder = folder

    def __iter__(self) -> Any:
        for sample in super().__iter__():
            die_once(sample["index"], self.folder)
            yield sample


# -- what is refused ------------------------------------------------------------------------


def state_of(make: Callable[[], Any], batches: int = 2) -> Any:
    loader = make()
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    state = loader.state_dict()
    del iterator
    loader.close()
    return json.loads(json.dumps(state))


def spread(rank: int = 0, seed: int = 0) -> Any:
    data = Numbers(12)
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, rank, seed=seed))


def seeded(seed: int) -> Any:
    return numbers(shuffle=True, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        (numbers, lambda: numbers(num_workers=2), "num_workers=0, and this loader has num_workers=2"),
        (
            lambda: numbers(),
            lambda: DataLoader(Numbers(12), batch_size=3),
            "batch_size=2, and this loader has batch_size=3; use batch_size=2",
        ),
        (
            lambda: numbers(),
            lambda: DataLoader(Numbers(13), batch_size=2),
            "had 12 samples when the state was taken, and has 13 now",
        ),
        (
            lambda: numbers(shuffle=True),
            lambda: numbers(),
            "BatchSampler of torch.utils.data.sampler.RandomSampler when the state was taken",
        ),
        (lambda: seeded(1), lambda: seeded(2), "one with seed 1 when the state was taken, and is one with seed 2"),
        (lambda: spread(), lambda: spread(seed=7), "sampler.seed was 0 when the state was taken, and is 7"),
        (lambda: spread(), lambda: spread(rank=1), "sampler.rank was 0 when the state was taken, and is 1"),
        (
            lambda: numbers(drop_last=True),
            lambda: numbers(),
            "drop_last=True, and this loader has drop_last=False",
        ),
        (
            lambda: DataLoader(Stream(12), batch_size=2),
            lambda: numbers(),
            "the dataset is iterable in the state and map-style here",
        ),
        (
            lambda: numbers(num_workers=1),
            lambda: numbers(num_workers=1, multiprocessing_context="spawn"),
            "started with 'fork' when the state was taken, and are with 'spawn' now",
        ),
        (
            lambda: numbers(num_workers=1),
            lambda: numbers(num_workers=1, persistent_workers=True),
            "persistent_workers=False, and this loader has persistent_workers=True",
        ),
    ],
)  # fmt: skip
def test_a_state_of_another_loader_is_refused_and_says_why(
    there: Callable[[], Any], here: Callable[[], Any], words: str
) -> None:
    state = state_of(there)
    loader = here()
    before = loader.state_dict()
    with pytest.raises(StateError, match="does not fit this loader") as error:
        loader.load_state_dict(state)
    assert words in str(error.value)
    assert loader.state_dict() == before


def test_what_is_no_state_is_refused_and_changes_nothing() -> None:
    loader, state = numbers(), state_of(numbers)
    wrong: list[tuple[Any, str]] = [
        ([], "this is a list"),
        ({"model": 1}, "it has no version"),
        ({**state, "version": 9}, "version 9, and this holdfast reads versions up to 1"),
        ({key: one for key, one in state.items() if key != "epoch"}, "damaged or incomplete"),
        ({**state, "epoch": {**state["epoch"], "done": -1}}, "where a number of batches"),
        ({**state, "sampler": {**state["sampler"], "now": {"a": {"kind": "t", "state": "?"}}}}, "damaged"),
    ]  # fmt: skip
    for one, words in wrong:
        with pytest.raises(StateError) as error:
            loader.load_state_dict(one)
        assert words in str(error.value)
    assert values(loader) == WHOLE


DAMAGE: list[tuple[str, Any]] = [
    ("loader", None),
    ("loader", {}),
    ("loader.settings", []),
    ("loader.samplers", [1]),
    ("loader.worker_method", ["thread"]),
    ("loader.num_workers", None),
    ("_snapshot", None),
    ("_snapshot._worker_snapshots", {}),
    ("_snapshot._worker_snapshots.worker_1", 5),
    ("epoch", None),
    ("epoch.base_seed", 3.7),
    ("epoch.sample_seed", [1]),
    ("epoch.index", "zz"),
    ("next_epoch", -4),
    ("batches", 10**6),
    ("sampler.program", -3),
    ("version", -3),
]


@pytest.mark.parametrize(("path", "value"), DAMAGE, ids=[f"{a}={b}" for a, b in DAMAGE])
def test_a_damaged_state_is_refused_and_changes_nothing(path: str, value: Any) -> None:
    loader, state = numbers(num_workers=2), state_of(lambda: numbers(num_workers=2))
    before, part = loader.state_dict(), state
    *parents, last = path.split(".")
    for name in parents:
        part = part[name]
    part[last] = value
    for strict in (True, False):
        with pytest.raises(StateError):
            loader.load_state_dict(state, strict=strict)
    assert loader.state_dict() == before
    loader.close()


def test_a_state_without_its_workers_is_refused() -> None:
    state = state_of(lambda: numbers(num_workers=2))
    del state["_snapshot"]
    with pytest.raises(StateError, match="the positions of 0 workers, of 2"):
        numbers(num_workers=2).load_state_dict(state)


@pytest.mark.filterwarnings("ignore:holdfast. resumed, but not exactly")
def test_without_strict_it_goes_on_as_near_as_possible() -> None:
    state = state_of(numbers)
    for make, expected in (
        (lambda: numbers(num_workers=2), WHOLE[2:]),
        (lambda: DataLoader(Numbers(12), batch_size=4), [[4, 5, 6, 7], [8, 9, 10, 11]]),
        (lambda: DataLoader(Numbers(13), batch_size=2), [*WHOLE[2:], [12]]),
    ):
        loader = make()
        with pytest.warns(UserWarning, match="resumed, but not exactly"):
            loader.load_state_dict(state, strict=False)
        batches = iter(loader)
        assert next(batches).tolist() == expected[0]
        copied = make()
        copied.load_state_dict(loader.state_dict())
        assert values(batches) == values(copied) == expected[1:]


@pytest.mark.parametrize("kind", [Revealing, Resumable])
def test_without_strict_the_end_of_an_epoch_of_persistent_workers_can_be_gone_on_from_without_workers(
    kind: Any,
) -> None:
    with DataLoader(kind(12), batch_size=2, num_workers=1, persistent_workers=True) as loader:
        first = [batch["index"].tolist() for batch in loader]
        state = loader.state_dict()
    again: Any = DataLoader(kind(12), batch_size=2)
    with pytest.warns(UserWarning, match="not exactly"):
        again.load_state_dict(state, strict=False)
    iter(again)
    assert [batch["index"].tolist() for batch in again] == first


def test_a_sampler_that_gives_other_indices_is_noticed() -> None:
    class ByTime(EagerPermutation):
        def __iter__(self) -> Any:
            return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(time.time_ns())).tolist())  # fmt: skip

    def make() -> Any:
        return DataLoader(Numbers(100), batch_size=5, sampler=ByTime(100))

    loader = make()
    loader.load_state_dict(state_of(make, 3))
    with pytest.raises(StateError, match="the sampler does not give the indices again"):
        iter(loader)


def test_a_sampler_that_shares_its_generator_with_samples_is_noticed() -> None:
    """Without workers both draw from the program's, in turns. A sampler that is asked again without loading samples in
    between cannot get to the same place."""

    def make() -> Any:
        return DataLoader(Revealing(23), batch_size=3, sampler=Wandering(23))

    loader = make()
    loader.load_state_dict(state_of(make, 3))
    with pytest.raises(StateError, match="the sampler does not give the indices again"):
        iter(loader)


class Rolling(torch.utils.data.Sampler[int]):
    """Draws each index from torch's default generator when it is asked for it."""

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Any:
        for _ in range(60):
            yield int(torch.randint(1000, ()))


@pytest.mark.parametrize(
    "parts",
    [
        ((2, 2, 0), (2, 4, 9), (2, 1, 5), (2, 2, 99)),
        ((2, 2, 0), (0, None, 3), (1, 3, 9), (0, None, 99)),
        ((3, 2, 5), (1, 1, 1), (1, 1, 4), (2, 3, 99)),
        ((2, 4, 7), (0, None, 1), (0, None, 99)),
    ],
)
def test_a_sampler_that_draws_from_the_programs_generators_goes_on_where_it_is_asked_earlier_or_later(
    parts: Any,
) -> None:
    """Each part has its `num_workers` and `prefetch_factor`: so many indices are drawn ahead."""

    def make(workers: int, prefetch: int | None) -> Any:
        return DataLoader(Numbers(1000), 2, sampler=Rolling(), num_workers=workers,
                          prefetch_factor=prefetch, seeding="sample")  # fmt: skip

    torch.manual_seed(5)
    expected = values(make(0, None)) + values(make(0, None))
    torch.manual_seed(5)
    found: Values = []
    state: Any = None
    program = torch.get_rng_state()
    for workers, prefetch, batches in parts:
        loader = make(workers, prefetch)
        if state is not None:
            loader.load_state_dict(state)
            torch.set_rng_state(program)
        iterator = iter(loader)
        found += values(itertools.islice(iterator, batches))
        state, program = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
        del iterator
        loader.close()
        torch.manual_seed(6)
    torch.set_rng_state(program)
    found += values(make(0, None))
    assert found == expected


def test_a_state_at_the_start_of_a_later_epoch_waits_for_workers_that_are_behind() -> None:
    """They are busy with an epoch that was left early."""

    class Slow(Revealing):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.03)
            return super().__getitem__(index)

    def make(kind: Any = DataLoader) -> Any:
        torch.manual_seed(5)
        return kind(Slow(12), num_workers=2, persistent_workers=True)

    def seen(loader: Any) -> list[Any]:
        return [(batch["index"].tolist(), batch["random"].tolist()) for batch in loader]

    expected = make(torch.utils.data.DataLoader)
    next(iter(expected))
    rest = seen(expected)
    expected._iterator = None  # which ends its workers
    with make() as loader:
        next(iter(loader))
        iterator = iter(loader)
        state = loader.state_dict()
        del iterator
    with make() as loader:
        loader.load_state_dict(state)
        assert seen(loader) == rest


@pytest.mark.parametrize(
    ("there", "here"),
    [("thread", "multiprocessing"), ("multiprocessing", "thread")],
)
def test_a_state_of_other_workers_is_refused_or_gone_on_from_without_their_random_states(
    there: str, here: str
) -> None:
    state = state_of(lambda: numbers(num_workers=2, worker_method=there))
    loader = numbers(num_workers=2, worker_method=here)
    words = f"worker_method='{there}', and this loader has worker"
    with pytest.raises(StateError, match=words) as raised:
        loader.load_state_dict(state)
    assert "multiprocessing_context" not in str(raised.value)  # threads have none
    with pytest.warns(UserWarning, match="resumed, but not exactly"):
        loader.load_state_dict(state, strict=False)
    assert values(loader) == WHOLE[2:]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_has_plain_types_only(workers: int) -> None:
    """``torch.load(..., weights_only=True)`` takes it, and no class of ours is in it."""

    def plain(one: Any) -> bool:
        if type(one) is dict:
            return all(type(key) is str and plain(value) for key, value in one.items())
        return all(map(plain, one)) if type(one) is list else type(one) in PLAIN

    for seeding in ("worker", "sample", ("sample", 3)):
        loader = numbers(num_workers=workers, shuffle=True, seeding=seeding)
        next(iter(loader))
        state = loader.state_dict()
        assert plain(state), state
        again = numbers(num_workers=workers, shuffle=True, seeding=seeding)
        again.load_state_dict(json.loads(json.dumps(state)))


def test_the_epoch_of_a_sampler_is_set_and_said(caplog: pytest.LogCaptureFixture) -> None:
    loader = spread()
    loader.sampler.set_epoch(3)
    expected = values(loader)
    iterator = iter(loader)
    next(iterator)
    state, other = loader.state_dict(), spread()
    other.load_state_dict(state)
    assert values(other) == expected[1:]
    assert "at epoch 0, and the state is of epoch 3" in caplog.text


def test_a_stream_that_does_not_repeat_itself_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class ByTime(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for number in range(12):
                yield number + time.time_ns() % 1000 * 100

    def make() -> Any:
        return DataLoader(ByTime(), batch_size=2, num_workers=1)

    loader = make()
    loader.load_state_dict(state_of(make))
    assert len(list(loader)) == 4
    assert "not deterministic" in caplog.text


def test_nothing_is_read_with_pickle_unless_a_dataset_forces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import holdfast.plain_data

    def refuse(raw: bytes) -> Any:
        raise AssertionError("pickle")

    state = state_of(lambda: DataLoader(Revealing(12), shuffle=True, num_workers=1))
    monkeypatch.setattr(holdfast.plain_data.pickle, "loads", refuse)
    DataLoader(Revealing(12), shuffle=True, num_workers=1).load_state_dict(state)


# -- errors in the state functions of others ------------------------------------------------


class _Fails(Resumable):
    """Cannot give its state, or load one."""

    def __init__(self, size: int, fails: str) -> None:
        super().__init__(size)
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails == "state_dict":
            raise ValueError("no state today")
        return super().state_dict()

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        raise ValueError("not this one")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fails", ["state_dict", "load_state_dict"])
def test_a_stream_whose_state_functions_raise_is_drawn_again(fails: str, workers: int) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return DataLoader(_Fails(24, fails), batch_size=2, num_workers=workers)

    def indices(loader: Any) -> list[Any]:
        return [batch["index"].tolist() for batch in loader]

    expected = indices(make())
    loader = make()
    loader.load_state_dict(state_of(make, 5))
    assert indices(loader) == expected[5:]


class _FailingMap(Counting):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not this one")


class Overrunning(IterableDataset[int]):
    """Goes on from a loaded state in every epoch, and cannot from the one at its end."""

    start = place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]

    def __iter__(self) -> Any:
        parts, begin = share(12), self.start
        if begin:
            parts[begin]  # an IndexError
        for place in range(begin, len(parts)):
            self.place = place + 1
            yield parts[place]


@pytest.mark.parametrize("batches", [None, 1, 3])
def test_a_stream_that_raises_from_its_state_between_epochs_is_begun_without_it(
    batches: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """`batches` of the second epoch; None: the state is taken before it."""

    def make() -> Any:
        return DataLoader(Overrunning(), batch_size=2, num_workers=2, persistent_workers=True)

    with make() as loader:
        whole = values(loader)
        assert values(loader) == whole
    with make() as loader:
        assert values(loader) == whole
        if batches is not None:
            iterator = iter(loader)
            assert [next(iterator).tolist() for _ in range(batches)] == whole[:batches]
        state = json.loads(json.dumps(loader.state_dict()))
    with make() as loader:
        loader.load_state_dict(state)
        assert values(loader) == whole[batches or 0 :]
        assert values(loader) == whole
    if batches != 3:  # a worker has only that state
        assert "raised IndexError" in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_a_map_style_dataset_that_cannot_load_its_state_is_an_error(workers: int) -> None:
    def make() -> Any:
        return DataLoader(_FailingMap(12), batch_size=2, num_workers=workers)

    loader = make()
    loader.load_state_dict(state_of(make, 2))
    with pytest.raises(ValueError, match="not this one"):
        list(loader)


class _FailingSampler(Remembers):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not this one")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_cannot_load_its_state_is_an_error_and_can_be_tried_again(
    workers: int,
) -> None:
    def make() -> Any:
        return DataLoader(Numbers(12), sampler=_FailingSampler(12), num_workers=workers)

    state, loader = state_of(make, 5), make()
    loader.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(ValueError, match="not this one"):
            iter(loader)
    assert loader.state_dict() == state  # it is still loaded


def test_sequential_needs_no_generators() -> None:
    state = state_of(lambda: numbers(sampler=SequentialSampler(Numbers(12))))
    assert state["sampler"]["default"] == [None, None, None]
    assert len(json.dumps(state)) < 1500


class StartsAgain(IterableDataset[int]):
    """Its state at the end of an epoch is that of the next beginning. The last batch is not full."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 5:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class GoesOnOnce(StartsAgain):
    """Goes on from a state that was loaded when it is begun next, and then begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: int | None = None

    def __iter__(self) -> Any:
        first, self.loaded = self.loaded or 0, None
        for self.at in range(first + 1, 6):
            yield self.at

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state["at"]


class GoesOnAlways(GoesOnOnce):
    """As Hugging Face's streams, as long as set_epoch is not called."""

    def __iter__(self) -> Any:
        first = self.loaded or 0
        for self.at in range(first + 1, 6):
            yield self.at


@pytest.mark.parametrize("kind", [StartsAgain, GoesOnOnce, GoesOnAlways])
def test_after_a_finished_epoch_a_stream_without_workers_begins_the_next_as_it_would(
    kind: Callable[[], IterableDataset[int]],
) -> None:
    first = DataLoader(kind(), batch_size=2)
    epoch = values(first)
    assert epoch == values(first) == [[1, 2], [3, 4], [5]]
    later = DataLoader(kind(), batch_size=2)
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [values(later) for _ in range(3)] == [epoch] * 3


class Rounds(torch.utils.data.Sampler[int]):
    """Begins each epoch where the last has ended, and keeps a tensor in its state."""

    def __init__(self, size: int = 12) -> None:
        self.size = size
        self.begun = torch.zeros(1, dtype=torch.int64)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        for _ in range(self.size):
            self.begun += 1
            yield int(self.begun) % 5

    def state_dict(self) -> Any:
        return {"begun": self.begun.clone()}

    def load_state_dict(self, state: Any) -> None:
        self.begun = state["begun"]


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_finished_epoch_no_index_of_a_sampler_is_lost(workers: int) -> None:
    def make() -> Any:
        return numbers(sampler=Rounds(), num_workers=workers)

    first = make()
    values(first)
    state = json.loads(json.dumps(first.state_dict()))
    assert resumed(state, make) == values(first)


class EndsWhereItBegins(torch.utils.data.Sampler[int]):
    """Its state at the end of an epoch is that of the next beginning."""

    def __init__(self) -> None:
        self.at = self.epoch = 0

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Any:
        while self.at < 11:
            self.at += 1
            yield (self.at + self.epoch) % 12
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> Any:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: Any) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("sampler", [EndsWhereItBegins, lambda: Remembers(11), Rounds])
@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_after_the_last_batch_a_sampler_with_a_state_has_no_more_in_this_epoch(
    workers: int, sampler: Any, again: bool
) -> None:
    """The last batch is not full: the batch sampler has had the end of the sampler when it gives it."""

    def make() -> Any:
        return DataLoader(Numbers(12), batch_size=5, sampler=sampler(), num_workers=workers)

    whole = make()
    expected = [values(whole) for _ in range(3)]
    first = make()
    values(first)
    iterator = iter(first)
    had = [next(iterator).tolist() for _ in range(3)]
    assert had == expected[1]
    state = json.loads(json.dumps(first.state_dict()))
    loader = make()
    loader.load_state_dict(state)
    if again:
        iterator = iter(loader)
        state = json.loads(json.dumps(loader.state_dict()))
        loader = make()
        loader.load_state_dict(state)
    assert [values(loader), values(loader)] == [[], expected[2]]


class Batches(Remembers):
    def __init__(self) -> None:
        super().__init__(11, batch=2)


@pytest.mark.parametrize("had", [0, 1, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", ["raise", "replace"])
@pytest.mark.parametrize("sampler", [EndsWhereItBegins, lambda: Remembers(11), Batches])
def test_after_an_epoch_that_was_left_the_next_goes_on_with_a_sampler_that_has_a_state(
    sampler: Any, policy: Any, workers: int, had: int
) -> None:
    def make() -> Any:
        own = sampler()
        given = (
            {"batch_sampler": own}
            if isinstance(own, Batches)
            else {"sampler": own, "batch_size": 2}
        )
        return DataLoader(Numbers(12), num_workers=workers, on_bad_sample=policy, **given)

    first = make()
    iterator = iter(first)
    for _ in range(2):
        next(iterator)
    del iterator
    iterator = iter(first)
    expected = [next(iterator).tolist() for _ in range(had)]
    state = json.loads(json.dumps(first.state_dict()))
    expected += [batch.tolist() for batch in iterator]
    for _ in range(2):
        loader = make()
        loader.load_state_dict(state)
        iterator = iter(loader)
        state = json.loads(json.dumps(loader.state_dict()))  # before its first batch
    rest = [batch.tolist() for batch in iterator]
    assert rest == expected[had:]
    assert values(loader) == values(first)


class Backwards(torch.utils.data.Sampler[int]):
    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter(range(11, -1, -1))

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        assert not state


def test_another_sampler_is_not_given_the_state_of_the_old_one() -> None:
    first = numbers(sampler=Rounds())
    values(first)
    other = numbers(sampler=Backwards())
    with pytest.warns(UserWarning, match="not exactly"):
        other.load_state_dict(first.state_dict(), strict=False)
    assert values(other) == values(numbers(sampler=Backwards()))
