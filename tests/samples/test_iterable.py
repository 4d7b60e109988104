"""Streams: continue after a bad element where possible, and raise where it is not."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from holdfast import DataLoader, PoisonSample, ReplicaLost
from tests.samples.datasets import (
    CaughtStream,
    Generator,
    Hidden,
    Moving,
    Patient,
    Stuck,
    WithState,
    drawn,
)
from tests.samples.streams import indices, ours, rows, stock

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")]

# First, two in a row, a whole batch of worker 0 of 2 (16, 18, 20, 22), and the last.
BAD = {
    0: "raises",
    6: "raises late",
    8: "None",
    **dict.fromkeys((16, 18, 20, 22), "raises"),
    38: "raises",
}


class PatientWithState(Patient):
    """Its iterator says where it is."""

    def __iter__(self) -> Any:
        return _MovingWithState(self)


class _MovingWithState(Moving):
    def __init__(self, stream: Generator) -> None:
        super().__init__(stream)
        self.place = 0

    def __next__(self) -> Any:
        self.place += 1
        return super().__next__()

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.left = iter(self.stream.numbers()[state["place"] :])
        self.place = state["place"]


class HiddenWithState(WithState):
    """A generator behind an object, and a dataset that can say where it is."""

    def __iter__(self) -> Any:
        return itertools.chain(super().__iter__())


PASSABLE = [
    Patient,
    WithState,
    pytest.param(PatientWithState, marks=pytest.mark.slow),
    pytest.param(HiddenWithState, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", PASSABLE)
def test_past_it_where_that_can_be(kind: Any, workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
    streams, loader = ours(kind(BAD), on_bad_sample="skip", epochs=2, **options)
    assert streams == stock(CaughtStream(BAD), epochs=2, **options)
    assert [one.kind for one in loader.bad_samples].count("none") == 1
    assert len(loader.bad_samples) == len(BAD)


@pytest.mark.parametrize("kind", PASSABLE)
def test_past_it_also_after_a_death(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2}
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6;after-send:SIGSEGV@task=1")
    (stream,), loader = ours(kind(BAD), on_bad_sample="skip", **options)
    assert [one.exact for one in loader.incidents] == [True, True]
    monkeypatch.delenv("HOLDFAST_FAULTS")
    assert [stream] == stock(CaughtStream(BAD), **options)
    assert len(loader.bad_samples) == len(BAD)


@pytest.mark.parametrize("kind", PASSABLE)
def test_one_taken_ahead_is_not_lost_with_its_worker(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {**dict.fromkeys(range(8, 12), "raises"), 13: "raises"}
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1, "on_bad_sample": "replace"}
    (calm,), _ = ours(kind(bad, 20), **options)
    assert [len(batch) for batch in calm] == [4] * 5
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=3")
    (stormy,), loader = ours(kind(bad, 20), **options)
    assert [one.exact for one in loader.incidents] == [True], "stand-ins are chosen as before"
    assert stormy == calm


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", PASSABLE)
def test_replacing_takes_another_of_the_batch_or_the_next(kind: Any, workers: int) -> None:
    bad = {1: "raises", 2: "None", **dict.fromkeys(range(8, 12), "raises")}
    (stream,), loader = ours(
        kind(bad, 20), batch_size=4, num_workers=workers, on_bad_sample="replace"
    )
    found = [[int(row[0]) for row in batch] for batch in stream]
    assert [len(batch) for batch in found] == [4] * 5
    assert found[0][0] == 0
    assert found[0][3] == 3
    assert set(found[0]) <= {0, 3}
    assert found[1] == [4, 5, 6, 7]
    assert found[2] == [12, 12, 12, 12]  # all bad: the next good one
    assert found[3] == [12, 13, 14, 15]  # which has its own place too
    assert set(indices(stream)) == set(range(20)) - set(bad)
    assert len(loader.bad_samples) == len(bad)
    assert ours(kind(bad, 20), batch_size=4, num_workers=workers, on_bad_sample="replace")[0] == [
        stream
    ]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "place", "why"),
    [
        (Generator, 5, "a Python generator that has raised is finished"),
        (Hidden, 5, "a Python generator that has raised is finished"),
        (Hidden, 39, "a Python generator that has raised is finished"),
        (functools.partial(WithState, past=False), 5, "leads back to the same error"),
        (Stuck, 5, "it raised the same 16 times in a row"),
    ],
    ids=["generator", "hidden", "hidden, at the end", "state before it", "stuck"],
)
@pytest.mark.parametrize("policy", ["skip", pytest.param("replace", marks=pytest.mark.slow)])
def test_where_there_is_no_way_past_it_says_so_and_ends(
    kind: Any, place: int, why: str, workers: int, policy: str
) -> None:
    loader = DataLoader(
        kind({place: "raises"}), batch_size=4, num_workers=workers, on_bad_sample=policy
    )
    iterator = iter(loader)
    seen = []
    with pytest.raises(ReplicaLost, match=why) as caught:
        seen.extend(map(rows, iterator))
    assert indices(seen)[:4] == [0, 1, 2, 3]
    assert "ValueError: sample" in str(caught.value)
    assert "What to do: catch the error inside __iter__" in str(caught.value)
    with pytest.raises(StopIteration):  # nothing begins again
        next(iterator)
    loader.close()


def test_the_other_workers_go_on() -> None:
    loader = DataLoader(Generator({4: "raises"}), batch_size=4, num_workers=2, on_bad_sample="skip")
    iterator = iter(loader)
    seen, lost = [], 0
    while True:
        try:
            seen.append(rows(next(iterator)))
        except ReplicaLost:
            lost += 1
        except StopIteration:
            break
    assert lost == 1
    assert indices(seen) == list(range(1, 40, 2))
    loader.close()


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_an_element_that_kills_cannot_be_passed_and_it_says_so(policy: str) -> None:
    loader = DataLoader(
        Patient({5: "segfault"}, 12), batch_size=4, num_workers=1, on_bad_sample=policy
    )
    iterator = iter(loader)
    assert indices([rows(next(iterator))]) == [0, 1, 2, 3]
    with pytest.raises(
        PoisonSample, match="an element of an IterableDataset cannot be skipped"
    ) as caught:
        next(iterator)
    loader.close()
    assert "on_bad_sample=" not in str(caught.value)


def test_of_an_element_that_kills_it_says_how_to_find_it() -> None:
    loader = DataLoader(Patient({5: "segfault"}, 12), batch_size=4, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(PoisonSample) as caught:
        next(iterator)
    loader.close()
    told = str(caught.value)
    assert "an element of the stream (position 1 of batch 1, worker 0) ended 2 workers" in told
    assert "dataset[None]" not in told
    assert "on_bad_sample" not in told, "it cannot leave out an element of a stream"
    assert "worker._worker_info = types.SimpleNamespace(id=0" in told
    assert "leave it out in the dataset's __iter__" in told


class Genexpr(Patient):
    """A generator that lives for one element only is no reason to give up."""

    def load(self, number: int) -> Any:
        return list(super(Genexpr, self).load(one) for one in [number])[0]  # noqa: C400, RUF015


def test_a_generator_inside_one_element_does_no_harm() -> None:
    (stream,), loader = ours(
        Genexpr({5: "raises", 6: "raises"}, 12), batch_size=4, num_workers=1, on_bad_sample="skip"
    )
    assert indices(stream) == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert len(loader.bad_samples) == 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("drop_last", "last"), [(False, [8, 9]), (True, [])])
def test_the_last_batch_is_counted_with_its_bad_ones(
    drop_last: bool, last: list[int], workers: int
) -> None:
    """drop_last drops what the data leaves incomplete, not what bad samples do."""
    (stream,), loader = ours(
        Patient({1: "raises", 6: "raises"}, 10),
        batch_size=4,
        num_workers=workers,
        drop_last=drop_last,
        on_bad_sample="skip",
    )
    assert indices(stream) == [0, 2, 3, 4, 5, 7, *last]
    assert len(loader.bad_samples) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_ones_at_the_very_end_are_told(workers: int) -> None:
    for policy, rest in (("skip", []), ("replace", [7, 7])):
        (stream,), loader = ours(
            Patient({8: "raises", 9: "None"}, 10), batch_size=4, num_workers=workers,
            on_bad_sample=policy,
        )  # fmt: skip
        assert indices(stream) == [*range(8), *rest]
        assert [one.kind for one in loader.bad_samples] == ["raised", "none"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_without_batches(policy: str, workers: int) -> None:
    (stream,), loader = ours(
        Patient({1: "raises", 5: "None"}, 8), batch_size=None, num_workers=workers,
        on_bad_sample=policy,
    )  # fmt: skip
    expected = [0, 2, 3, 4, 6, 7] if policy == "skip" else [0, 2, 2, 3, 4, 6, 6, 7]
    assert indices(stream) == expected
    assert len(loader.bad_samples) == 2


class Ragged(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for number in range(12):
            yield drawn(number)[: 3 if number == 6 else 4]


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_one_that_does_not_fit_its_batch(policy: str) -> None:
    (stream,), loader = ours(Ragged(), batch_size=4, num_workers=1, on_bad_sample=policy)
    assert [len(batch) for batch in stream] == [4, 3 if policy == "skip" else 4, 4]
    assert set(indices(stream)) == set(range(12)) - {6}
    assert [(one.kind, one.position) for one in loader.bad_samples] == [("collate", 2)]
