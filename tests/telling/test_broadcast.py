"""``loader.broadcast`` and ``loader.set_epoch``: every worker hears it once, in order, before the same batches."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import DataLoader
from tests.telling.datasets import DieOnce, Hear, Told, ToldStream, as_is, raise_in_a_worker

END = [0, 0]  # the epoch and the strength


def loader_of(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    arguments = {"batch_size": 1, "collate_fn": as_is, "prefetch_factor": 2, **arguments}
    if not arguments.get("num_workers"):
        del arguments["prefetch_factor"]
    return DataLoader(dataset, **arguments)


def words(
    loader: DataLoader[Any], *, after: dict[int, Any], kill: dict[int, int] | None = None
) -> list[Any]:
    """What each sample of an epoch has heard. After so many batches something is broadcast, or a worker killed."""
    found: list[Any] = []
    iterator = iter(loader)
    for number, batch in enumerate(iterator, 1):
        found += [(key, heard[:-2]) for key, heard in batch]
        if number in after:
            loader.broadcast(after[number])
        if kill and number in kill:
            os.kill(iterator._workers[kill[number]].pid, signal.SIGKILL)
    return sorted(found)


def expected(size: int, *changes: tuple[int, Any]) -> list[Any]:
    """Of changes, each with the first key for which it holds."""
    return [(key, [word for first, word in changes if key >= first]) for key in range(size)]


@pytest.mark.parametrize("dataset", [Told, ToldStream])
def test_without_workers_it_holds_from_the_next_batch_on(dataset: Any) -> None:
    loader = loader_of(dataset(8))
    assert words(loader, after={3: Hear("a"), 5: lambda it: it.heard.append("b")}) == expected(
        8, (3, "a"), (5, "b")
    )


@pytest.mark.parametrize("dataset", [Told, ToldStream])
@pytest.mark.parametrize("kill", [{}, {4: 0, 9: 1}, {9: 0, 10: 0}], ids=str)
def test_with_workers_it_holds_for_all_batches_that_are_drawn_later(
    dataset: Any, kill: dict[int, int]
) -> None:
    """After the batches that were made ahead, whichever workers die before and after."""
    with loader_of(dataset(20), num_workers=2) as loader:
        found = words(loader, after={3: Hear("a"), 8: Hear("b")}, kill=kill)
        assert found == expected(20, (3 + 4, "a"), (8 + 4, "b"))
        assert loader.dataset.heard == ["a", "b"]  # type: ignore[attr-defined]
        assert words(loader, after={}) == expected(20, (0, "a"), (0, "b"))


@pytest.mark.parametrize("dataset", [Told, ToldStream])
def test_persistent_workers_hear_what_is_told_between_epochs_and_so_do_their_replacements(
    dataset: Any,
) -> None:
    with loader_of(dataset(8), num_workers=2, persistent_workers=True) as loader:
        assert words(loader, after={}) == expected(8)
        loader.broadcast(Hear("a"))
        loader.broadcast(Hear("b"))
        assert words(loader, after={}, kill={2: 0}) == expected(8, (0, "a"), (0, "b"))
        loader.broadcast(Hear("c"))
        assert words(loader, after={}, kill={1: 1, 3: 0}) == expected(
            8, (0, "a"), (0, "b"), (0, "c")
        )


def test_out_of_order_it_reaches_every_worker_too() -> None:
    with loader_of(Told(30), num_workers=2, in_order=False) as loader:
        found = words(loader, after={2: Hear("a")})
        assert [heard for _, heard in found[:2]] == [[], []]
        assert [heard for _, heard in found[-10:]] == [["a"]] * 10


def test_a_sampler_may_tell_the_workers_what_its_next_batch_needs() -> None:
    def indices() -> Any:
        for key in range(6):
            loader.broadcast(Hear(key))
            yield key

    class Sampler:
        def __iter__(self) -> Any:
            return indices()

    for workers in (0, 2):
        loader = loader_of(Told(6), num_workers=workers, sampler=Sampler())
        with loader:
            assert words(loader, after={}) == [(key, list(range(key + 1))) for key in range(6)]


# -- attributes -----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_attributes_are_set_by_name(workers: int) -> None:
    with loader_of(Told(2), num_workers=workers, persistent_workers=bool(workers)) as loader:
        list(loader)
        values = {"part.strength": 5, "heard": ["x"]}
        loader.broadcast(values)
        values["part.strength"] = 6  # as it was when it was called
        assert [batch[0][1] for batch in loader] == [["x", 0, 5]] * 2


@pytest.mark.parametrize("change", [5, None, {"a b": 1}, {3: 4}, {"": 1}, {"a..b": 1}], ids=str)
def test_what_cannot_be_told_is_an_error_that_says_what_can(change: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"broadcast.*image_size"):
        loader_of(Told(2)).broadcast(change)


@pytest.mark.parametrize("path", ["size.x", "missing.x"])
def test_a_path_that_leads_nowhere_is_an_error_that_names_it(path: str) -> None:
    with pytest.raises(AttributeError, match=rf"broadcast\(\) cannot set '{path}' .*\(Told\)"):
        loader_of(Told(2)).broadcast({path: 1})


def test_an_attribute_that_the_dataset_did_not_have_is_set_and_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = loader_of(Told(2))
    for strength in (1, 2):
        loader.broadcast({"part.strength": strength, "part.strenght": strength})
    assert loader.dataset.part.strenght == 2  # type: ignore[attr-defined]
    (record,) = caplog.records
    assert "(Told) had no attribute 'part.strenght' before" in record.getMessage()


# -- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Told, ToldStream])
@pytest.mark.parametrize("dies", [False, True])
def test_an_error_in_a_worker_takes_the_place_of_its_next_batch(dataset: Any, dies: bool) -> None:
    with loader_of(dataset(8), num_workers=1, persistent_workers=True) as loader:
        list(loader)
        loader.broadcast(raise_in_a_worker)
        loader.broadcast(Hear("later"))
        iterator = iter(loader)
        with pytest.raises(
            ValueError,
            match=r"cannot be told[\s\S]*loader.broadcast\(\) told worker 0, before batch 0",
        ):
            next(iterator)
        found = [next(iterator) for _ in range(2)]
        if dies:
            os.kill(
                iterator._workers[0].pid, signal.SIGKILL
            )  # what was told is told again, and its error is known
        found += list(iterator)
        keys = range(1, 8) if dataset is Told else range(8)
        assert found == [[(key, ["later", *END])] for key in keys]


def test_an_error_in_the_trainer_is_raised_at_once_and_nothing_is_sent() -> None:
    with loader_of(Told(2), num_workers=1, persistent_workers=True) as loader:
        list(loader)
        with pytest.raises(AttributeError, match="nothing"):
            loader.broadcast({"nothing.strength": 5})
        assert [batch[0][1] for batch in loader] == [END] * 2


def test_a_function_that_does_not_pickle_is_named_before_anything_is_changed() -> None:
    with loader_of(Told(2), num_workers=1, persistent_workers=True) as loader:
        list(loader)
        with pytest.raises(
            TypeError, match=r"broadcast\(\) cannot send.*<lambda>[\s\S]*Nothing was changed"
        ):
            loader.broadcast(lambda dataset: dataset.heard.append("a"))
        with pytest.raises(TypeError, match=r"the argument\['part'\]"):
            loader.broadcast({"part": lambda: 0})
        assert loader.dataset.heard == []  # type: ignore[attr-defined]
        loader.broadcast(partial(Told.set_epoch, epoch=3))
        assert [batch[0][1] for batch in loader] == [[3, 0]] * 2


@pytest.mark.faults
def test_a_worker_that_dies_of_it_is_replaced_and_told_again(tmp_path: Path) -> None:
    with loader_of(Told(6), num_workers=2, persistent_workers=True) as loader:
        list(loader)
        loader.broadcast(Hear("before"))
        loader.broadcast(DieOnce(str(tmp_path / "died")))
        assert words(loader, after={}) == expected(6, (0, "before"), (0, "survived"))
        assert [incident.step for incident in loader.incidents] == ["broadcast"]
        assert "while it was told something" in str(loader.incidents[0])


# -- set_epoch ------------------------------------------------------------------------------


class Sampler:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("dataset", [Told, ToldStream])
@pytest.mark.parametrize(
    "arguments", [{}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}], ids=str
)
def test_set_epoch_reaches_sampler_and_dataset_everywhere(
    dataset: Any, arguments: dict[str, Any]
) -> None:
    sampler = None if dataset is ToldStream else Sampler()
    with loader_of(dataset(4), sampler=sampler, **arguments) as loader:
        for epoch in (0, 3, 4):
            loader.set_epoch(epoch)
            assert [batch[0][1] for batch in loader] == [[epoch, 0]] * 4
        if sampler is not None:
            assert sampler.epochs == [0, 3, 4]
        assert loader.dataset.epoch == 4  # type: ignore[attr-defined]


def test_set_epoch_numbers_the_epochs_of_sample_seeding() -> None:
    from tests.seeding.datasets import Draws

    def of(loader: DataLoader[Any], *epochs: int | None) -> list[Any]:
        found = []
        for epoch in epochs:
            if epoch is not None:
                loader.set_epoch(epoch)
            found.append(list(loader))
        return found

    def new() -> DataLoader[Any]:
        return DataLoader(Draws(3), collate_fn=as_is, seeding=("sample", 1))

    assert of(new(), 5, None, 0) == [*of(new(), 5), *of(new(), 6), *of(new(), None)]


@pytest.mark.parametrize(
    ("epoch", "error"), [(1.5, TypeError), (None, TypeError), (True, TypeError), (-1, ValueError)]
)
def test_set_epoch_takes_a_whole_number_from_0_on(epoch: Any, error: Any) -> None:
    """A state with another one would be refused."""
    loader = loader_of(Told(2), sampler=Sampler())
    with pytest.raises(error, match=rf"set_epoch\({epoch}\): it takes a whole number, 0 or more"):
        loader.set_epoch(epoch)
    assert (loader.dataset.epoch, loader.sampler.epochs) == (0, [])  # type: ignore[attr-defined]


def test_set_epoch_takes_whole_numbers_of_other_types() -> None:
    loader = loader_of(Told(2))
    loader.set_epoch(np.int64(3))  # type: ignore[arg-type]
    assert type(loader.dataset.epoch) is int  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_it_is_the_same_with_every_start_method(method: str) -> None:
    with loader_of(Told(20), num_workers=2, multiprocessing_context=method) as loader:
        found = words(
            loader, after={3: Hear("a"), 8: {"part.strength": 1}, 9: Hear("b")}, kill={9: 0}
        )
        assert found == expected(20, (7, "a"), (13, "b"))


def test_a_logbook_counts_the_time_it_takes(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "logbook": tmp_path}
    with loader_of(Told(3), **arguments) as loader:
        list(loader)
        loader.broadcast(Hear("a"))
        assert words(loader, after={}) == expected(3, (0, "a"))
        assert loader.incidents == []
