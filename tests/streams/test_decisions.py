"""Which way a stream is taken up, and who is replaced for its size: decisions, without a process."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.engine import events as ev
from holdfast.engine.continuation import (
    PROBE,
    REPLAY,
    REST,
    STATE,
    TRUST,
    CannotResume,
    ResumptionPlan,
    ResumptionResult,
    StreamProgress,
    choose_plan,
)
from holdfast.engine.seats import SeatState
from holdfast.worker.batch_fingerprint import NO_BATCH
from tests.engine.playing import Player, died

ENDED = object()


def course(*answers: Any, resumed: bool = False) -> StreamProgress:
    """After such answers: the state that came with each, if any."""
    made = StreamProgress()
    if resumed:
        made.received(NO_BATCH, b"at rest")
        made.resumed(b"random")
    for number, state in enumerate(answers, 10):
        if state is ENDED:
            made.received(NO_BATCH, b"at the end")
        else:
            made.received(number, state)
    return made


def plan(recovery: Any, made: StreamProgress, **given: Any) -> ResumptionPlan | CannotResume:
    options: dict[str, Any] = {
        "exhausted": False,
        "epochs_done": 0,
        "persistent": False,
        "unfit": frozenset(),
        "random_before": b"before",
    }
    return choose_plan(recovery, made, **{**options, **given})


def way(*args: Any, **given: Any) -> tuple[str, bytes | None, bool]:
    found = plan(*args, **given)
    assert isinstance(found, ResumptionPlan)
    return found.way, found.state, found.last


def test_the_state_before_the_last_batch_is_tried_and_then_all_is_drawn_again() -> None:
    three = course(b"1", b"2", b"3")
    assert way("auto", three) == (STATE, b"2", False)
    assert way("auto", three, unfit={STATE}) == (REPLAY, None, True)
    assert way("auto", three, random_before=None) == (REPLAY, None, True)
    assert way("auto", course(b"1")) == (REPLAY, None, True), "there is none before the first"
    assert way("auto", course(None, None)) == (REPLAY, None, True)
    assert way("replay", three) == (REPLAY, None, True)
    assert way("state", three) == (STATE, b"2", False)
    assert way("state", three, unfit={STATE}) == (TRUST, b"3", True)
    assert way("state", course(b"1")) == (TRUST, b"1", True)
    assert isinstance(plan("state", course(None)), CannotResume)


def test_a_state_that_is_used_all_the_same_says_whether_one_was_tried() -> None:
    delivered = course((7, b"1"), (8, b"2"))
    tried = plan("state", delivered, unfit={"state"})
    assert isinstance(tried, ResumptionPlan)
    assert (tried.way, tried.tried) == ("trust", True)
    untried = plan("state", course((7, b"1")))
    assert isinstance(untried, ResumptionPlan)
    assert (untried.way, untried.tried) == ("trust", False)
    first = ResumptionResult("trust", False, tried=True).in_words()
    assert "which was tried first, did not give that batch again" in first
    second = ResumptionResult("trust", False).in_words()
    assert "was not compared, because there was no state before it" in second


def test_what_was_delivered_is_compared() -> None:
    found = plan("auto", course(b"1", b"2"))
    assert isinstance(found, ResumptionPlan)
    marks = course(b"1", b"2").marks
    assert (found.marks, found.random_before) == (marks[-1:].tobytes(), b"before")
    found = plan("auto", course(b"1", b"2"), unfit={STATE})
    assert isinstance(found, ResumptionPlan)
    assert (found.marks, found.random_before) == (marks.tobytes(), None)
    assert len(found.marks) == 16, "eight bytes for each batch"


def test_where_nothing_was_delivered_nothing_is_compared() -> None:
    assert way("auto", course()) == (REPLAY, None, True)
    assert way("auto", course(b"1", ENDED), exhausted=True) == (REST, b"at the end", False)
    assert way("replay", course(b"1", ENDED), exhausted=True) == (REPLAY, None, True)


def test_in_later_epochs_of_persistent_workers_states_are_probed_before_they_are_used() -> None:
    later = course(b"1", b"2", resumed=True)
    given: dict[str, Any] = {"epochs_done": 1, "persistent": True}
    assert way("auto", later, **given) == (PROBE, b"1", False)
    assert way("auto", later, **given, unfit={PROBE}) == (STATE, b"1", False)
    assert way("auto", later, **given, unfit={PROBE, STATE}) == (REST, b"at rest", False)
    assert way("auto", later, **given, unfit={PROBE, STATE, REST}) == (REPLAY, None, True)
    assert way("replay", later, **given) == (REPLAY, None, True)
    assert way("auto", course(None, resumed=True), **given) == (PROBE, b"at rest", False)


@pytest.mark.parametrize(
    ("finding", "lost"),
    [
        (ResumptionResult(REPLAY, exact=True, delivered=3), False),
        (ResumptionResult(REPLAY, exact=False, delivered=3, ended=2), True),
        (ResumptionResult(REST, exact=False, delivered=3, ended=2, leaves=True), False),
        (ResumptionResult(TRUST, exact=False, delivered=3), False),
        (ResumptionResult(TRUST, exact=False, delivered=3, error="OSError: gone"), True),
    ],
)
def test_a_stream_is_lost_only_where_its_number_of_batches_is(
    finding: ResumptionResult, lost: bool
) -> None:
    assert finding.lost is lost
    assert ("not deterministic" in finding.in_words()) is (finding.ended is not None)


def test_a_plan_carries_the_marks_that_are_compared_and_no_others() -> None:
    made = course(*range(1000))
    by_state, by_trust = plan("state", made), plan("state", made, unfit={STATE})
    drawn_again = plan("auto", made, unfit={STATE})
    assert isinstance(by_state, ResumptionPlan)
    assert isinstance(by_trust, ResumptionPlan)
    assert isinstance(drawn_again, ResumptionPlan)
    assert (by_state.way, len(by_state.marks), by_state.delivered) == (STATE, 8, 1000)
    assert (by_trust.way, by_trust.marks, by_trust.delivered) == (TRUST, b"", 1000)
    assert (drawn_again.way, len(drawn_again.marks)) == (REPLAY, 8000)


def test_an_exception_is_tried_again_by_so_many_processes() -> None:
    made = course(b"0", b"1")
    left = []
    for made.raised in range(4):
        found = plan("auto", made)
        assert isinstance(found, ResumptionPlan)
        left.append(found.attempts)
    assert left == [3, 2, 1, 1]


@pytest.mark.parametrize("way", [STATE, REST, REPLAY])
def test_an_exception_is_the_first_that_is_said(way: Any) -> None:
    found = ResumptionResult(way, exact=False, delivered=3, ended=2, error="ConnectionError: reset")
    assert "raised ConnectionError: reset" in found.in_words()
    assert "not deterministic" not in found.in_words()
    expected = ResumptionResult(REPLAY, exact=True, delivered=3, error="ConnectionError: reset")
    assert "had not before" not in expected.in_words()


# -- the machine ----------------------------------------------------------------------------


def running(**options: Any) -> Player:
    player = Player(2, 2, iterable=True, **options)
    player.begin()
    for worker in range(2):
        player.handle(ev.WorkerReady(worker, 0))
    while player.due > 0:
        player.draw(None)
    for worker in range(2):
        player.handle(ev.BatchReady(worker, 0, worker, "batch", 1))
    return player


def death(worker: int, generation: int = 0) -> ev.WorkerExited:
    return died(worker, generation, 1.0, outside=True)


def test_one_that_went_astray_is_followed_by_another_and_counts_for_nothing() -> None:
    player = running(restarts=ev.RestartPolicy(1, 60.0))
    (start, *asked) = player.handle(death(0))
    assert isinstance(start, ev.Start)
    assert start.unfit == frozenset()
    assert player.handle(ev.ResumptionFailed(0, 1, 2.0, frozenset({STATE}))) == []
    assert player.state(0) is SeatState.LEAVING
    (again, *asked_again) = player.handle(death(0, 1))
    assert isinstance(again, ev.Start)
    assert again.unfit == {STATE}
    assert asked_again == asked, "for what the first was asked for"
    assert player.failure is None
    assert player.forgotten == [ev.Forget(0, recycled=False)]
    (other, *_) = player.handle(death(1)) or [None]
    assert other is None, "one death is allowed, and this is the second"
    assert player.failure is not None


def test_what_one_has_learned_holds_for_all() -> None:
    player = running()
    player.handle(death(0))
    player.handle(ev.ResumptionFailed(0, 1, 2.0, frozenset({STATE})))
    (start, *_) = player.handle(death(1))
    assert isinstance(start, ev.Start)
    assert start.unfit == {STATE}


def test_a_lost_stream_ends_the_run_where_its_next_batch_would_have_been() -> None:
    player = running()
    player.handle(death(0))
    player.handle(ev.WorkerStreamLost(0, 1, 2.0, "it is shorter"))
    assert player.handle(death(0, 1)) == []
    assert isinstance(player.take(), ev.Delivery)
    assert isinstance(player.take(), ev.Delivery)
    assert player.take() == ev.GaveUp("stream", 0, (), "it is shorter")


def test_where_deaths_are_to_raise_none_is_replaced() -> None:
    player = running(recovery="raise")
    assert player.handle(death(0)) == []
    assert player.failure is not None
    assert player.failure.reason == "stream"


def test_one_that_is_too_large_goes_only_when_that_was_tried() -> None:
    player = running()
    (tried,) = player.handle(ev.WorkerGrown(0, 0))
    assert tried == ev.Rehearse(0, 0, 1, 0, 1, False, frozenset())
    assert player.handle(ev.WorkerGrown(0, 0)) == [], "it is being tried"
    assert player.handle(ev.Rehearsed(0, 0, None, unfit=frozenset({STATE}))) == [ev.Ask(0, 0)]
    (tried,) = player.handle(ev.WorkerGrown(0, 0))
    assert isinstance(tried, ev.Rehearse)
    assert tried.unfit == {STATE}
    assert player.handle(ev.Rehearsed(0, 0, True)) == [ev.Retire(0, 0)]
    player.handle(ev.WorkerRetired(0, 0, 3.0))
    (start, *_) = player.handle(death(0))
    assert isinstance(start, ev.Start)
    assert player.forgotten == [ev.Forget(0, recycled=True)]


@pytest.mark.parametrize(
    ("exact", "pays", "for_good"),
    [(False, True, True), (True, False, False), (None, True, False), (None, False, False)],
)
def test_one_that_is_too_large_stays_where_nothing_is_won_or_something_lost(
    exact: bool | None, pays: bool, for_good: bool
) -> None:
    player = running()
    player.handle(ev.WorkerGrown(0, 0))
    outcome = ev.Rehearsed(0, 0, exact, pays)
    assert player.handle(outcome) == [ev.Stay(0, 0, for_good, outcome)]
    assert player.machine.recycles is not for_good
    (action,) = player.handle(ev.WorkerGrown(1, 0))
    assert isinstance(action, ev.Stay if for_good else ev.Rehearse)


def test_what_was_tried_for_one_that_died_meanwhile_is_forgotten() -> None:
    player = running()
    player.handle(ev.WorkerGrown(0, 0))
    player.handle(death(0))
    assert player.handle(ev.Rehearsed(0, 0, True)) == []
    assert player.handle(ev.Rehearsed(0, 1, True)) == []


def test_a_second_one_that_finds_the_same_way_unfit_is_asked_again_too() -> None:
    """Both had been tried at the same time: what the first has found is no answer to the second."""
    player = running()
    for worker in (0, 1):
        player.handle(ev.WorkerGrown(worker, 0))
    for worker in (0, 1):
        found = ev.Rehearsed(worker, 0, None, unfit=frozenset({STATE}))
        assert player.handle(found) == [ev.Ask(worker, 0)]
    for worker in (0, 1):
        (tried,) = player.handle(ev.WorkerGrown(worker, 0))
        assert isinstance(tried, ev.Rehearse)
        assert tried.unfit == {STATE}
