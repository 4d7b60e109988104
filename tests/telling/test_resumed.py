"""What a dataset was told reaches the workers of a resumed run, before the same batches."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import pytest

from holdfast import DataLoader, StateError, runtime, told_changes
from holdfast.engine.pool import Pool
from tests.telling.datasets import (
    Hear,
    Told,
    ToldStream,
    ToldStreamWithState,
    ToldWithState,
    as_is,
)


def make(dataset: Any = Told, size: int = 20, **options: Any) -> Any:
    options = {"batch_size": 1, "collate_fn": as_is, **options}
    if options.get("num_workers"):
        options.setdefault("prefetch_factor", 2)
    return DataLoader(dataset(size), **options)


TELL = {2: {"part.strength": 1}, 3: {"heard": ["a"]}, 7: {"part.strength": 2, "heard": ["b"]}}
"""After so many batches of the second epoch."""


def run(
    loader: Any, state: Any, stop: int | None, kill: int | None = None
) -> tuple[list[Any], Any]:
    """The samples of the second epoch, from a state if there is one, up to a place; and the state there."""
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
        number = state["batches"]
    else:
        list(loader)
        loader.broadcast({"part.strength": -1})
        number = 0
    found = []
    iterator = iter(loader)
    for batch in iterator:
        number += 1
        found += batch
        if number in TELL:
            loader.broadcast(TELL[number])
        if number == kill:
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
        if number == stop:
            break
    state = loader.state_dict()
    del iterator
    loader.close()
    return found, state


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Told, {}),
        pytest.param(Told, {"num_workers": 2}, marks=pytest.mark.slow),
        (Told, {"num_workers": 2, "persistent_workers": True}),
        pytest.param(ToldStream, {"num_workers": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attributes_hold_from_the_same_batch_on(dataset: Any, options: dict[str, Any]) -> None:
    """Also if the state was taken before they did: after batch 7, of which four were drawn already."""
    workers = options.get("num_workers", 0)
    whole, _ = run(make(dataset, **options), None, None)
    assert len({tuple(heard) for _, heard in whole}) == 4
    for stop in (1, 3, 8, 15):
        first, state = run(make(dataset, **options), None, stop, kill=stop - 1 if workers else None)
        again = make(dataset, **options)
        rest, _ = run(again, state, None, kill=stop + 1 if workers else None)
        assert first + rest == whole
        assert (again.dataset.part.strength, again.dataset.heard) == (2, ["b"])


def test_a_state_of_a_resumed_run_has_it_too() -> None:
    whole, _ = run(make(num_workers=2), None, None)
    found, state = run(make(num_workers=2), None, 7)
    for stop in (8, 9, 12, None):
        more, state = run(make(num_workers=2), state, stop)
        found += more
    assert found == whole


@pytest.mark.parametrize(
    ("dataset", "here"),
    [(Told, (2, 2)), (Told, (2, 1)), (Told, (0, None)), (ToldStream, (2, 2)), (ToldStream, (2, 1))],
)
def test_what_is_told_later_is_not_undone_by_what_was_due(dataset: Any, here: Any) -> None:
    """Before the break 1 is told for batch 10 and all after it. The resumed run tells 2."""
    loader = make(dataset, num_workers=2, prefetch_factor=2, seeding="sample")
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    loader.broadcast({"part.strength": 1})
    state = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    for after in (0, 1):
        again = make(dataset, num_workers=here[0], prefetch_factor=here[1], seeding="sample")
        again.load_state_dict(state)
        iterator = iter(again)
        for _ in range(after):
            next(iterator)
        again.broadcast({"part.strength": 2})
        again.broadcast(Hear("a"))
        *_, last = iterator
        assert last[0][1] == ["a", 0, 2]
        assert again.dataset.part.strength == 2
        assert again.state_dict()["told"]["held"] == {"part.strength": 2}
        again.close()


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "is left"])
def test_what_is_due_after_the_end_of_the_epoch_holds_in_the_next(
    persistent: bool, ends: bool
) -> None:
    """Streams of three workers with eight elements each: what is told after batch 4 is due after
    more draws than the rest of the epoch has; so is it, if that epoch is left."""
    kind: dict[str, Any] = {"num_workers": 3, "persistent_workers": persistent, "batch_size": 4}
    loader = make(ToldStream, 24, prefetch_factor=3, **kind)
    iterator = iter(loader)
    for _ in range(6 if ends else 2):
        next(iterator)
    loader.broadcast({"part.strength": 7})
    state = json.loads(json.dumps(loader.state_dict()))
    del iterator
    loader.close()
    again = make(ToldStream, 24, prefetch_factor=3, **kind)
    again.load_state_dict(state)
    iterator = iter(again)
    if ends:
        assert list(iterator) == []
    del iterator
    assert {tuple(heard) for batch in again for _, heard in batch} == {(0, 7)}
    assert again.dataset.part.strength == 7
    again.close()


def test_after_an_epoch_it_holds_from_the_start_of_the_next() -> None:
    loader = make(num_workers=1)
    loader.set_epoch(4)
    next(iter(loader))
    loader.broadcast({"heard": ["late"]})
    list(loader)
    state = loader.state_dict()
    assert state["told"]["due"] == []
    again = make(num_workers=1)
    again.load_state_dict(state)
    assert again.dataset.epoch == 4
    assert [heard for batch in again for _, heard in batch] == [["late", 4, 0]] * 20


def test_what_a_state_cannot_hold_is_named_unless_it_is_told_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = make(num_workers=1)
    iterator = iter(loader)
    next(iterator)
    loader.broadcast(Hear("a"))
    loader.broadcast({"part": Hear("an object"), "heard": ["b"]})
    state = json.loads(json.dumps(loader.state_dict()))
    del iterator
    loader.close()
    assert state["told"]["not_held"] == ["tests.telling.datasets.Hear", "part"]
    assert "pickle" not in json.dumps(state["told"])
    again = make(num_workers=1)
    again.load_state_dict(state)
    again.broadcast(Hear("a"))
    next(iter(again))
    (record,) = caplog.records
    assert "loader.broadcast() was given part, which a state cannot hold" in record.getMessage()
    assert again.state_dict()["told"]["not_held"] == state["told"]["not_held"]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"held": {"missing.strength": 1}, "due": [], "not_held": []}, "does not have it"),
        ({"held": {"__class__": 1}, "due": [], "not_held": []}, "damaged"),
        ({"held": {"heard": {"__holdfast__": "pickle", "data": ""}}, "due": [], "not_held": []}, "damaged"),
        ({"held": {}, "due": [[-1, "heard", 1]], "not_held": []}, "damaged"),
        ({"held": {}}, "damaged"),
    ],
)  # fmt: skip
def test_what_is_no_state_of_it_is_refused_and_changes_nothing(told: Any, words: str) -> None:
    loader = make()
    next(iter(loader))
    state = {**loader.state_dict(), "told": told}
    again = make()
    with pytest.raises(StateError, match=words):
        again.load_state_dict(state)
    assert again.dataset.heard == []
    assert len(list(again)) == 20


def test_changes_that_are_due_are_made_without_workers_too() -> None:
    whole, _ = run(make(num_workers=2, seeding="sample"), None, None)
    first, state = run(make(num_workers=2, seeding="sample"), None, 4)
    rest, _ = run(make(seeding="sample"), state, 7)  # what is told then holds at once there
    assert first + rest == whole[:7]
    assert whole[3][1] != whole[6][1]


def test_what_no_state_can_hold_replaces_what_it_held() -> None:
    loader = make()
    loader.broadcast({"heard": ["a"]})
    loader.broadcast({"heard": object()})
    assert loader.state_dict()["told"] == {"held": {}, "due": [], "not_held": ["heard"]}
    loader.broadcast({"heard": ["b"]})
    assert loader.state_dict()["told"]["not_held"] == []


def test_what_is_told_after_a_state_was_loaded_is_in_a_state_that_is_taken_then() -> None:
    loader = make()
    iterator = iter(loader)
    next(iterator)
    loader.broadcast({"heard": ["a"]})
    again = make()
    again.load_state_dict(loader.state_dict())
    again.broadcast({"part.strength": 3})
    third = make()
    third.load_state_dict(json.loads(json.dumps(again.state_dict())))
    assert (third.dataset.heard, third.dataset.part.strength) == (["a"], 3)
    assert list(third) == list(again)


def test_a_state_that_another_thread_takes_has_a_change_with_its_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without workers the dataset is changed at once: a state waits until that is noted too."""
    loader = make()
    loader.broadcast({"heard": ["a"], "part.strength": 1})
    states: list[Any] = []
    other = threading.Thread(target=lambda: states.append(loader.state_dict()["told"]))

    def hold(told: Any, *where: Any) -> Any:
        monkeypatch.undo()
        other.start()
        other.join(0.3)  # it would be done by then if it did not wait
        return told.at(*where)

    monkeypatch.setattr(told_changes.ToldChanges, "at", hold)
    loader.broadcast({"heard": ["b"]})
    other.join(60)
    assert [told["held"] for told in states] == [{"part.strength": 1, "heard": ["b"]}]


def test_a_function_that_waits_for_a_thread_that_takes_a_state_is_not_waited_for_in_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "CHANGE_SECONDS", 0.1)
    loader = make()
    loader.broadcast({"heard": ["a"]})
    states: list[Any] = []
    other = threading.Thread(target=lambda: states.append(loader.state_dict()["told"]))

    def wait_for_it(dataset: Any) -> None:
        other.start()
        other.join(20)
        assert not other.is_alive()

    loader.broadcast(wait_for_it)
    assert [told["held"] for told in states] == [{"heard": ["a"]}]
    assert "while another thread" in caplog.text
    caplog.clear()
    assert len(loader.state_dict()["told"]["not_held"]) == 1
    assert not caplog.text


def test_a_state_has_what_workers_were_told_before_broadcast_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread is just leaving `Pool.announce`, and the consumer goes on meanwhile."""
    told, go_on = threading.Event(), threading.Event()
    announce = Pool.announce

    def announce_and_wait(*args: Any) -> Any:
        announce(*args)
        told.set()
        assert go_on.wait(60)

    monkeypatch.setattr(Pool, "announce", announce_and_wait)
    with make(num_workers=1) as loader:
        iterator = iter(loader)
        found = [next(iterator)]
        other = threading.Thread(target=loader.broadcast, args=({"heard": ["a"]},))
        other.start()
        assert told.wait(60)
        found += [next(iterator) for _ in range(2)]
        state = loader.state_dict()
        go_on.set()
        other.join(60)
        monkeypatch.undo()
        found += iterator
    with make(num_workers=1) as again:
        again.load_state_dict(state)
        assert found[:3] + list(again) == found


def test_the_draw_that_a_state_names_is_the_one_before_which_workers_were_told() -> None:
    """The consumer draws while another thread waits for the pool with its announcement."""
    with make(num_workers=1) as loader:
        iterator = iter(loader)
        found = [next(iterator)]
        pool = iterator._pool
        other = threading.Thread(target=loader.broadcast, args=({"heard": ["a"]},))
        with pool.lock:
            other.start()
            while not pool.drawing.announced:
                time.sleep(0.001)
            found += [next(iterator) for _ in range(3)]
        other.join(60)
        state = loader.state_dict()
        found += iterator
    with make(num_workers=1) as again:
        again.load_state_dict(state)
        assert found[:4] + list(again) == found


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("loads", [False, True])
def test_what_is_told_after_the_epoch_was_set_in_the_middle_is_due_in_this_epoch(
    options: dict[str, Any], loads: bool
) -> None:
    """The number that was set is that of a later epoch; also in a run that goes on from a state."""
    with make(size=12, **options) as first, make(size=12, **options) as other:
        loader = first
        iterator = iter(loader)
        found = [next(iterator), next(iterator)]
        loader.set_epoch(7)
        if loads:
            loader = other
            loader.load_state_dict(first.state_dict())
            iterator = iter(loader)
        found.append(next(iterator))
        loader.broadcast({"heard": ["a"]})
        state = json.dumps(loader.state_dict())
        found += iterator
    with make(size=12, **options) as again:
        again.load_state_dict(json.loads(state))
        assert found[:3] + list(again) == found


# -- datasets whose own state has what they were told ---------------------------------------


WORKERS = [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]


def tell_at_once(loader: Any) -> None:
    loader.set_epoch(2)
    loader.broadcast({"heard": ["new"], "part.strength": 7})


def tell_function(loader: Any) -> None:
    loader.broadcast({"part.strength": 7})
    loader.broadcast(Hear("once"))


@pytest.mark.parametrize("options", WORKERS, ids=str)
@pytest.mark.parametrize("dataset", [ToldWithState, ToldStreamWithState])
@pytest.mark.parametrize("tell", [tell_at_once, tell_function])
@pytest.mark.parametrize("before_state", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_told_after_an_epoch_is_not_undone_by_the_state_of_the_dataset(
    dataset: Any, options: dict[str, Any], tell: Any, before_state: bool
) -> None:
    """Told before the state is taken, or after it was loaded."""
    with make(dataset, size=6, **options) as loader:
        loader.set_epoch(1)
        loader.broadcast({"heard": ["old"]})
        list(loader)
        state = json.dumps(loader.state_dict())
        tell(loader)
        if before_state:
            state = json.dumps(loader.state_dict())
        whole = list(loader)
        later = list(loader)
    with make(dataset, size=6, **options) as again:
        again.load_state_dict(json.loads(state))
        if not before_state:
            tell(again)
        elif tell is tell_function:  # no state holds it
            again.broadcast(Hear("once"))
        assert list(again) == whole
        assert list(again) == later


@pytest.mark.parametrize("options", WORKERS, ids=str)
@pytest.mark.parametrize("dataset", [ToldWithState, ToldStreamWithState])
@pytest.mark.parametrize("count", [2, 4, 6])
def test_what_is_told_in_the_middle_holds_from_the_same_batch_on_whatever_the_state_has(
    dataset: Any, options: dict[str, Any], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The last batch is made again as it was, with what the dataset had been told before it. Without
    workers nothing is drawn again for it."""

    with make(dataset, size=10, **options) as loader:
        list(loader)
        loader.set_epoch(1)
        found = []
        for number, batch in enumerate(loader, 1):
            found.append(batch)
            if number == 2:
                loader.broadcast({"heard": ["new"], "part.strength": 7})
            if number == count:
                state = json.dumps(loader.state_dict())
    with make(dataset, size=10, **options) as again:
        again.load_state_dict(json.loads(state))
        assert list(again) == found[count:]
    if not options:
        assert not [one for one in caplog.records if one.levelname == "WARNING"]


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_a_state_that_is_taken_before_a_loaded_one_was_used_has_what_was_told(
    options: dict[str, Any],
) -> None:
    with make(ToldWithState, size=6, **options) as loader:
        loader.broadcast({"heard": ["old"]})
        list(loader)
        loader.broadcast({"heard": ["new"]})
        state = loader.state_dict()
    with make(ToldWithState, size=6, **options) as loader:
        loader.load_state_dict(state)
        assert loader.dataset.heard == ["new"]
        loader.set_epoch(5)
        state = json.loads(json.dumps(loader.state_dict()))
    with make(ToldWithState, size=6, **options) as loader:
        loader.load_state_dict(state)
        assert [heard for batch in loader for _, heard in batch] == [["new", 5, 0]] * 6


@pytest.mark.parametrize("options", WORKERS, ids=str)
@pytest.mark.parametrize("dataset", [Told, ToldWithState])
def test_what_is_told_last_holds(dataset: Any, options: dict[str, Any]) -> None:
    """Also a function that no state has, after values of the same attribute that the state has."""
    with make(dataset, size=6, **options) as loader:
        list(loader)
        loader.broadcast({"heard": ["new"]})
        state = loader.state_dict()
    with make(dataset, size=6, **options) as loader:
        loader.load_state_dict(state)
        loader.broadcast(Hear("newer"))
        assert [heard[:-2] for batch in loader for _, heard in batch] == [["new", "newer"]] * 6
    with make(dataset, size=6, **options) as loader:
        loader.load_state_dict(state)
        loader.broadcast({"heard": ["newest"]})
        loader.broadcast(Hear("newer"))
        assert [heard[:-2] for batch in loader for _, heard in batch] == [["newest", "newer"]] * 6


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_what_was_told_before_holds_in_an_epoch_that_has_the_same_number(
    options: dict[str, Any],
) -> None:
    with make(size=6, **options) as loader:
        for word in ("a", "b"):
            loader.broadcast({"heard": [word]})
            loader.set_epoch(0)
            for number, _ in enumerate(loader, 1):
                if number == 2:
                    state = loader.state_dict()
    assert state["told"]["due"] == []
    with make(size=6, **options) as loader:
        loader.load_state_dict(state)
        assert [heard for batch in loader for _, heard in batch] == [["b", 0, 0]] * 4


class Hidden:
    """A sampler that does not show which epoch it was told."""

    _told = 0

    def set_epoch(self, epoch: int) -> None:
        self._told = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return iter([(key + self._told) % 6 for key in range(6)])


def test_a_sampler_that_hides_its_epoch_has_to_be_told_again_and_the_error_says_so() -> None:
    loader = make(size=6, sampler=Hidden())
    loader.set_epoch(2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    again = make(size=6, sampler=Hidden())
    again.load_state_dict(state)
    with pytest.raises(StateError, match=r"or loader.set_epoch\(\), call it again with the same"):
        iter(again)
    again.set_epoch(2)
    assert list(again) == list(iterator)
