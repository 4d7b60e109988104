"""Finding the generators of a dataset, keeping their states, and bringing them back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import random
import types
from collections import OrderedDict
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from holdfast.autopsy.blackbox import STATE, BlackBoxes, NoRecorder, Recorder
from holdfast.samples.policy import Policy
from holdfast.samples.substitute import NOTHING
from holdfast.worker import generator_search
from holdfast.worker import randomness as randomness_module
from holdfast.worker.generator_search import MOST
from holdfast.worker.generator_states import plain_loads
from holdfast.worker.generators import Generators
from holdfast.worker.randomness import OWN_AT, Randomness, restore_in_process
from holdfast.worker.tolerant_map import TolerantMapFetcher
from tests.support.generators import Compose, Drawing, Jitter, Slotted, Transform
from tests.support.here import worker_here


class Bundle(Dataset[Any]):
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 9


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def paths(thing: Any, name: str = "dataset") -> list[str]:
    found = Generators(lambda: [(name, thing)])
    found.find_all()
    assert not found.remarks
    return found.paths


def of(thing: Any) -> Generators:
    found = Generators(lambda: [("dataset", thing)])
    found.find_all()
    return found


def enclosing() -> Any:
    own = rng()
    return lambda samples: own.random()


def by_default(samples: Any, own: Any = rng()) -> float:  # noqa: B008
    return float(own.random())


class Evil:
    """All that might run because it is looked at."""

    def __init__(self) -> None:
        object.__setattr__(self, "rng", rng())

    def touch(self, *_: object) -> NoReturn:
        raise AssertionError("something of the user's has run")

    __getattr__ = __getattribute__ = __eq__ = __len__ = __iter__ = __bool__ = touch  # type: ignore[assignment]
    __hash__ = __repr__ = __str__ = touch  # type: ignore[assignment]
    __class__ = property(touch)  # type: ignore[assignment]
    value = property(touch)


class EvilKey:
    def __repr__(self) -> NoReturn:
        raise AssertionError("it must not be asked")


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (Bundle(rng=rng()), ["dataset.rng"]),
        (Bundle(a={"x": [rng()]}, b=(1, rng())), ["dataset.b[1]", "dataset.a['x'][0]"]),
        (Bundle(a={EvilKey(): rng()}), ["dataset.a[<key 0>]"]),
        (Bundle(t=Slotted(1)), ["dataset.t.rng"]),
        (Subset(Bundle(rng=rng()), [1]), ["dataset.dataset.rng"]),
        (ConcatDataset([Bundle(rng=rng())] * 2), ["dataset.datasets[0].rng"]),
        (Bundle(call=functools.partial(max, key=random.Random(1).gauss)), [
            "dataset.call.keywords['key'].__self__"]),
        (Bundle(call=rng().normal), ["dataset.call.__self__"]),
        (Bundle(call=random.Random(1).random), ["dataset.call.__self__"]),
        (Bundle(bits=np.random.PCG64(1)), ["dataset.bits"]),
        (Jitter(1), ["dataset.rng"]),
        (Jitter(1).__call__, ["dataset.__self__.rng"]),
        (enclosing(), ["dataset.<closure>.own"]),
        (by_default, ["dataset.<defaults>[0]"]),
        (types.SimpleNamespace(rng=rng()), ["dataset.rng"]),
        (Bundle(evil=Evil()), ["dataset.evil.rng"]),
        (Bundle(a=random.choice, b=np.random.rand, c=torch.default_generator), []),
        (Bundle(deep=[[[[[[[rng()]]]]]]]), ["dataset.deep[0][0][0][0][0][0][0]"]),
    ],
)  # fmt: skip
def test_generators_are_found(thing: Any, expected: list[str]) -> None:
    assert paths(thing) == expected


def test_generators_of_the_module_and_the_class_are_found() -> None:
    found = paths(Drawing())
    module = Drawing.__module__
    assert f"{module}.GLOBAL" in found
    assert f"{module}.TABLE['global'][0]" in found
    assert "Sharing.rng" in found


class Settings:
    """Of no object: only its name is used."""

    rng = rng()


def test_generators_of_a_class_that_is_only_named_are_found() -> None:
    found = paths(lambda samples: Settings.rng.random(), "collate_fn")
    assert found == ["Settings.rng"]


def test_a_generator_that_many_share_counts_once() -> None:
    shared = rng()
    transforms = Compose(*(Transform(shared, seed) for seed in range(5)))
    transforms.transforms.append(transforms)  # and a circle is no trap
    found = paths(Bundle(a=transforms, b=np.random.Generator(shared.bit_generator)))
    assert len(found) == 6


def test_what_is_large_is_not_looked_through() -> None:
    large = Bundle(samples=[Bundle(rng=None) for _ in range(50_000)], rng=rng())
    assert paths(large) == ["dataset.rng"]


def test_those_that_are_too_many_are_told_of_once() -> None:
    thing = Bundle(**{f"rng{number}": rng(number) for number in range(MOST + 5)})
    found = of(thing)
    assert len(found.paths) == MOST
    ((about, words),) = found.remarks
    assert about == "generators-left-out"
    assert f"dataset.rng{MOST} and 4 more" in words


def test_those_beyond_the_part_of_a_list_that_is_looked_at_are_told_of() -> None:
    found = of(Bundle(rngs=[rng(number) for number in range(300)]))
    assert len(found.paths) == 256
    assert "dataset.rngs[256]" in found.remarks[0][1]


def test_there_is_room_for_a_hundred_twisters_and_no_more_than_fit_are_kept() -> None:
    room = STATE - OWN_AT
    found = Generators(lambda: [("dataset", [random.Random(n) for n in range(150)])], room)
    found.find_all()
    assert 90 <= len(found.paths) < 100
    memory = memoryview(bytearray(room))
    assert found.changed()
    assert found.save(memory) <= room
    assert "and 5" in found.remarks[0][1]


def test_one_that_does_not_give_its_state_away_is_told_of() -> None:
    class Secret(np.random.PCG64):
        @property
        def state(self) -> Any:
            raise RuntimeError("no")

    found = of(Bundle(a=np.random.Generator(Secret(1)), b=rng()))
    assert found.paths == ["dataset.b"]
    assert "dataset.a" in found.remarks[0][1]


def test_a_failure_in_looking_costs_the_generators_and_not_the_worker() -> None:
    def roots() -> Any:
        raise RuntimeError("odd")

    found = Generators(roots)
    found.find_all()
    assert not found
    assert "RuntimeError: odd" in found.remarks[0][1]


def test_states_come_back_in_another_copy_of_the_dataset() -> None:
    one, another = Drawing(), Drawing()
    one[0]
    another[0]
    first, second = of(one), of(another)
    state, saved = first.snapshot(), first.saved()
    expected = [one[number].tolist()[:-1] for number in range(3)]
    second.restore(saved)
    assert not second.waiting
    for its, raw in state:  # what both have in common: globals and attributes of classes
        its.write(raw)
    assert [another[number].tolist()[:-1] for number in range(3)] == expected


def test_one_that_was_exchanged_is_the_one_that_counts() -> None:
    thing = Bundle(rng=rng(1), inner=Bundle(rng=rng(2)))
    found = of(thing)
    found.changed()
    memory = memoryview(bytearray(4096))
    found.save(memory)
    assert not found.changed()
    thing.rng = rng(7)
    assert found.changed()
    thing.inner = Bundle(rng=rng(8))
    other = Bundle(rng=rng(1), inner=Bundle(rng=rng(2)))
    of(other).restore(found.saved())
    assert other.rng.random() == rng(7).random()
    assert other.inner.rng.random() == rng(8).random()
    thing.rng = np.random.RandomState(3)  # even of another kind
    thing.inner = None
    assert found.changed()
    assert found.paths == ["dataset.rng"]
    size = found.save(memory)
    kind = Bundle(rng=np.random.RandomState(1))
    of(kind).restore(bytes(memory[:size]))
    assert kind.rng.randn() == np.random.RandomState(3).randn()
    del thing.rng
    assert found.changed(), "that there are none any more has to be written too"
    size = found.save(memory)
    of(other).restore(bytes(memory[:size]))
    assert not found.changed()


def test_a_state_waits_for_a_generator_that_is_not_there_yet() -> None:
    thing = Bundle(rng=rng(1), lazy=rng(2))
    thing.lazy.random()
    saved = of(thing).saved()
    fresh = Bundle(rng=rng(1), lazy=None)
    found = of(fresh)
    found.restore(saved)
    assert found.waiting == ["dataset.lazy"]
    again = of(Bundle(rng=rng(1), lazy=None))
    again.restore(found.saved())  # it dies before anything was made
    assert again.waiting == ["dataset.lazy"]
    assert not found.made_some()
    fresh.lazy = rng(99)
    assert found.made_some()
    found.restore(saved)
    assert not found.waiting
    assert fresh.lazy.random() == thing.lazy.random()
    again.give_up()
    assert not again.waiting
    assert "dataset.lazy" in again.remarks[0][1]


def test_a_new_kind_of_state_grows_into_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    philox = np.random.Generator(np.random.Philox(1))
    thing = Bundle(philox=philox, rng=rng(4))
    found, memory = of(thing), memoryview(bytearray(8192))
    for _ in range(70):
        philox.random(977)
        assert found.changed()
        size = found.save(memory)
    other = Bundle(philox=np.random.Generator(np.random.Philox(3)), rng=rng(5))
    of(other).restore(bytes(memory[:size]))
    assert other.philox.random() == philox.random()
    assert other.rng.random() == thing.rng.random()


def test_a_snapshot_brings_back_what_a_failed_try_has_drawn() -> None:
    thing = Bundle(rng=rng(1), dice=[random.Random(2)], t=torch.Generator().manual_seed(3))
    randomness = Randomness(lambda: [("dataset", thing)])

    def some() -> list[float]:
        return [
            thing.rng.random(),
            thing.dice[0].gauss(0, 1),
            torch.rand((), generator=thing.t).item(),
            random.random(),
        ]

    before = randomness.snapshot()
    expected = some()
    restore_in_process(before)
    assert some() == expected


def test_states_in_the_black_box_survive_with_the_global_ones() -> None:
    """Where nothing is drawn nothing is written; what is written is found by its number."""
    boxes = BlackBoxes(1)
    recorder = Recorder(boxes.fd, 1, 0)
    thing = Bundle(rng=rng(1), torch=torch.Generator().manual_seed(2))
    randomness = Randomness(lambda: [("dataset", thing)], STATE - OWN_AT)
    drawn = {}
    for number in range(1, 20):
        if number % 3:
            thing.rng.random()
        randomness.keep(recorder, number)
        drawn[number] = rng_copy(thing.rng).random()
    for number in (18, 19):
        saved = boxes.random_state(0, number)
        assert saved is not None
        other = Bundle(rng=rng(5), torch=torch.Generator())
        Randomness(lambda: [("dataset", other)]).restore(saved)  # noqa: B023
        assert other.rng.random() == drawn[number]
        assert torch.equal(other.torch.get_state(), thing.torch.get_state())
    boxes.close()


def rng_copy(generator: np.random.Generator) -> np.random.Generator:
    copy = rng()
    copy.bit_generator.state = generator.bit_generator.state
    return copy


def test_where_there_are_none_nothing_is_looked_at_between_the_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = []
    real = generator_search.wide
    monkeypatch.setattr(
        generator_search, "wide", lambda *given, **more: looks.append(1) or real(*given, **more)
    )
    monkeypatch.setattr(randomness_module, "_SHARE", 10**12)  # there is no time for more of them
    boxes = BlackBoxes(1)
    recorder = Recorder(boxes.fd, 1, 0)
    randomness = Randomness(lambda: [("dataset", Bundle(size=3))], STATE - OWN_AT)
    for number in range(1, 1025):
        randomness.keep(recorder, number)
    assert len(looks) == 11  # with the first batch, the second, the fourth, ...
    state = boxes.random_state(0, 1024)
    assert state is not None
    assert len(state) < OWN_AT
    boxes.close()


def test_a_sample_that_stands_in_leaves_them_as_they_were() -> None:
    class Poor(Bundle):
        def __getitem__(self, index: int) -> Any:
            drawn = self.rng.random()
            if index == 4:
                raise ValueError("bad")
            return torch.tensor(index + drawn)

    fetcher = TolerantMapFetcher(
        Poor(rng=rng(1)),
        auto_collation=True,
        collate_fn=torch.stack,
        drop_last=False,
        recorder=NoRecorder(),
        memory=None,
        faults=None,
        policy=Policy("replace"),
        worker_id=0,
    )
    brief = NOTHING._replace(candidates=((0, 7), (1, 8)), seed=3)
    drawn = rng(1).random(3)
    made = fetcher.fetch(0, [3, 4, 5], brief)
    assert made[0] == 3 + drawn[0]
    assert made[2] == 5 + drawn[2], "sample 4 has drawn, and the one in its place has not"


def test_of_one_that_may_have_been_made_between_two_searches_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(randomness_module, "_SHARE", 10**12)
    boxes = BlackBoxes(1)
    recorder = Recorder(boxes.fd, 1, 0)
    thing = Bundle(torch=None)
    randomness = Randomness(lambda: [("dataset", thing)], STATE - OWN_AT)
    randomness.begin(0)
    remarks = []
    for number in range(1, 8):
        if number == 6:
            thing.torch = torch.Generator()
        randomness.keep(recorder, number)
        saved = boxes.random_state(0, number)
        assert saved is not None
        fresh = Bundle(torch=None)
        other = Randomness(lambda: [("dataset", fresh)], STATE - OWN_AT)  # noqa: B023
        other.restore(saved, number)
        fresh.torch = torch.Generator()
        other.own.find_all()
        remarks.append([(about, "dataset.torch" in words) for about, words in other.own.remarks])
    doubt = [("generators-late", True)]
    assert remarks == [[], [], doubt, [], doubt, doubt, doubt]  # searches are at 1, 2 and 4
    boxes.close()


class Picky(Bundle):
    """Has another of its transforms in hand for each sample."""

    def pick(self, number: int) -> Any:
        self.current = self.transforms[number]
        return self.current.rng


@pytest.mark.parametrize("begun", [False, True])
def test_a_shorter_path_that_comes_later_does_not_take_the_place_of_the_first(begun: bool) -> None:
    def make() -> Picky:
        made = Picky(transforms=[Bundle(rng=rng(seed)) for seed in range(3)])
        if begun:
            made.pick(0)
        return made

    one, another = make(), make()
    found = of(one)
    one.pick(2).random()
    one.pick(1).random(5)
    found.find_all()
    of(another).restore(found.saved())
    for number in range(3):
        assert another.pick(number).random() == one.pick(number).random()


def test_one_that_was_moved_and_one_in_its_place_are_told_apart() -> None:
    thing = Bundle(rng=rng(1), inner=Bundle(rng=rng(2)))
    found = of(thing)
    thing.old, thing.rng = thing.rng, rng(3)
    thing.before, thing.inner = thing.inner, Bundle(rng=rng(4))
    other = Bundle(rng=rng(1), inner=Bundle(rng=rng(2)))
    again = of(other)
    again.restore(found.saved())
    assert other.rng.random() == rng(3).random()
    assert other.inner.rng.random() == rng(4).random()
    assert again.waiting == ["dataset.old", "dataset.before.rng"]


def test_one_that_was_made_by_a_sample_that_did_not_count_stays_and_is_told_of() -> None:
    thing = Bundle(table={1: "x"}, rng=rng(1))
    randomness = Randomness(lambda: [("dataset", thing)])
    before = randomness.saved()
    expected = rng_copy(thing.rng).random()
    thing.rng.random()
    thing.table[7] = rng(7)
    randomness.go_back(before)
    assert thing.rng.random() == expected
    ((about, words),) = randomness.own.remarks
    assert about == "generators-changed"
    assert "dataset.table[7]" in words


@functools.cache
def cached(seed: int) -> np.random.Generator:
    return rng(seed)


@pytest.mark.parametrize(
    "hiding",
    [
        {rng()},
        frozenset([rng()]),
        itertools.cycle([rng()]),
        map(str, (rng(),)),
        iter([rng()]),
        types.MappingProxyType({"a": rng()}),
        cached,
    ],
    ids=lambda hiding: type(hiding).__name__,
)
def test_one_that_hides_where_nobody_looks_is_told_of(hiding: Any) -> None:
    cached(1)
    found = of(Bundle(a=hiding))
    assert not found.paths
    ((about, words),) = found.remarks
    assert about == "generators-left-out"
    assert "dataset.a.<inside>" in words


def test_one_that_hides_and_is_elsewhere_too_is_found() -> None:
    own = rng()
    assert paths(Bundle(a={own}, b=own)) == ["dataset.b"]


class HostileKey:
    """Once it is in a dict."""

    asked = 0

    def __hash__(self) -> int:
        HostileKey.asked += 1
        return 1234567

    def __eq__(self, other: object) -> bool:
        HostileKey.asked += 1
        return self is other


def test_keys_of_the_users_classes_are_not_asked_for_anything() -> None:
    thing = Bundle(table={HostileKey(): rng(1), 7: rng(2)}, sub=OrderedDict({HostileKey(): rng(3)}))
    (key, _), before = thing.table, HostileKey.asked
    found = of(thing)
    found.changed()
    found.save(memoryview(bytearray(4096)))
    assert not found.changed()
    found.find_all()
    assert HostileKey.asked == before
    thing.table[key] = rng(9)
    before = HostileKey.asked
    assert found.changed(), "another generator for the same key"
    assert HostileKey.asked == before
    assert {rng(9).bit_generator.state["state"]["state"]} <= {
        one.state.subject.state["state"]["state"] for one in found._kept
    }
    del thing.table[key]
    found.changed()
    assert found.paths == ["dataset.table[7]", "dataset.sub[<key 0>]"]


def test_a_link_that_raises_whatever_it_is_leads_to_another_look() -> None:
    class Odd:
        def __getitem__(self, key: Any) -> Any:
            raise RuntimeError("odd")

    found = of(Bundle(rng=rng(1)))
    found._links[0].holder = Odd()  # type: ignore[assignment]
    assert found.changed()
    assert found.paths == ["dataset.rng"]
    assert not found.remarks


class Lazily(Bundle):
    def draw(self) -> float:
        if self.rng is None:
            self.rng = rng(1)
        return float(self.rng.random())


class LazyDataset(Dataset[float]):
    """Makes its generator when it loads a sample, if it ever does."""

    def __init__(self, *, makes: bool = True, fails: bool = False) -> None:
        self.lazily = Lazily(rng=None)
        self.makes = makes
        self.fails = fails
        self.tries: list[float] = []

    def __getitem__(self, index: int) -> float:
        if not self.makes:
            return float(index)
        self.tries.append(self.lazily.draw())
        if self.fails:
            raise OSError("as it did before")
        return self.tries[-1]


@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_that_makes_what_is_waited_for_is_made_once_more_from_its_state(
    fails: bool,
) -> None:
    dead, fresh = LazyDataset(), LazyDataset(fails=fails)
    dead[0]
    saved = Randomness(lambda: [("dataset", dead)]).saved()
    with worker_here(fresh) as worker:
        worker.replica.make_fetcher()
        worker.randomness.restore(saved, 1)
        with pytest.raises(OSError, match="as it did") if fails else contextlib.nullcontext():
            worker.randomness.from_waiting_states(lambda: worker._fetch(1, [0], None))
        assert fresh.tries == [rng(1).random(), dead[0]]
        assert not worker.randomness.own.waiting
        assert not worker.randomness.own.remarks


def test_of_one_that_the_first_batch_does_not_make_that_is_said() -> None:
    dead = LazyDataset()
    dead[0]
    with worker_here(LazyDataset(makes=False)) as worker:
        worker.replica.make_fetcher()
        worker.randomness.restore(Randomness(lambda: [("dataset", dead)]).saved(), 1)
        made = worker.randomness.from_waiting_states(lambda: worker._fetch(1, [7], None))
        assert made == [7.0]
        assert not worker.randomness.own.waiting
        ((about, words),) = worker.randomness.own.remarks
    assert about == "generators-missing"
    assert "dataset.lazily.rng" in words


def test_one_that_was_taken_away_is_told_of() -> None:
    thing, boxes = Bundle(a=rng(1), b=rng(2)), BlackBoxes(1)
    recorder = Recorder(boxes.fd, 1, 0)
    randomness = Randomness(lambda: [("dataset", thing)], STATE - OWN_AT)
    randomness.begin(0)
    thing.b = thing.a
    randomness.keep(recorder, 1)
    saved = boxes.random_state(0, 1)
    assert saved is not None
    other = Randomness(lambda: [("dataset", Bundle(a=rng(1), b=rng(2)))], STATE - OWN_AT)
    other.restore(saved, 1)
    ((about, words),) = other.own.remarks
    assert about == "generators-changed"
    assert "dataset.b" in words
    boxes.close()


def test_a_random_state_that_would_run_code_is_refused() -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    with pytest.raises(pickle.UnpicklingError, match="a random state has no"):
        plain_loads(pickle.dumps({"state": Runs()}))


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.SFC64, np.random.Philox])
def test_the_state_of_a_bit_generator_is_read_without_running_code(kind: Any) -> None:
    state = kind(7).state
    assert repr(plain_loads(pickle.dumps(state, 5))) == repr(state)
