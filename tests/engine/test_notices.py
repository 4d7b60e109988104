"""Notices: what every worker is told, between the same tasks in every process of its seat."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.engine import events as ev
from holdfast.limits.budget import Budget
from tests.engine.playing import Player, died
from tests.support.fake_driver import Consumer, FakeDriver

A, B = b"a", b"b"


def items(actions: list[ev.Action]) -> list[tuple[int, Any]]:
    """What was dispatched: the worker, and the index or the change."""
    found = []
    for action in actions:
        if isinstance(action, ev.Dispatch):
            item: Any = action.item
            found.append((action.worker, getattr(item, "change", getattr(item, "index", "resume"))))
    return found


def test_a_notice_goes_to_every_worker_behind_what_was_drawn() -> None:
    player = Player(2, 1)
    player.begin()
    assert items(player.fill([0, 1])) == [(0, 0), (1, 1)]
    assert items(player.handle(ev.Announced(A))) == [(0, A), (1, A)]
    player.handle(ev.BatchReady(0, 0, 0, "batch"))
    player.take()
    assert items(player.fill([2])) == [(0, 2)]


def test_a_replacement_is_told_again_what_was_heard_and_sent_what_was_not() -> None:
    player = Player(1, 4)
    player.begin()
    player.draw(0)
    player.draw(1)
    player.handle(ev.Announced(A))
    player.handle(ev.Announced(B))
    for event in (ev.WorkerReady(0, 0), ev.BatchReady(0, 0, 0, ""), ev.BatchReady(0, 0, 1, "")):
        player.handle(event)
    player.handle(ev.Told(0, 0))
    start, *rest = player.handle(died(0, 0, outside=True))
    assert isinstance(start, ev.Start)
    assert start.told == (ev.PastNotice(A, 0, 2),)
    assert (start.answered, start.settled) == (3, 0)
    assert items(rest) == [(0, B)]
    player.handle(ev.Told(0, 1))
    player.draw(2)
    player.handle(ev.BatchReady(0, 1, 2, ""))
    start, *rest = player.handle(died(0, 1, outside=True))
    assert isinstance(start, ev.Start)
    assert start.told == (ev.PastNotice(A, 0, 2), ev.PastNotice(B, 0, 2))
    assert (start.settled, rest) == (2, [])


def test_notices_wait_behind_tasks_that_wait_for_room() -> None:
    player = Player(2, 1, before_sizes_are_known="one")
    player.begin()
    player.handle(ev.RoomChanged(10))
    assert items(player.fill([0, 1])) == [(0, 0)]
    assert items(player.handle(ev.Announced(A))) == []
    player.handle(ev.BatchReady(0, 0, 0, "batch", 1))
    player.take()
    assert items(player.handle(ev.UNPACKED)) in ([], [(1, 1), (0, A), (1, A)])
    assert not player.machine.held_back


def test_a_stream_that_ends_still_hears_what_was_sent_behind_its_tasks() -> None:
    player = Player(1, 3, iterable=True, persistent=True)
    player.begin()
    player.fill([None, None])
    player.handle(ev.Announced(A))
    player.draw(None)
    player.handle(ev.ReplicaEnded(0, 0, 0))
    seat = player.machine.seats[0]
    assert [type(item) for item in seat.items] == [ev.Notice]
    player.handle(ev.Told(0, 0))
    player.handle(ev.EpochBegan())
    assert [type(item) for item in seat.items] == [ev.Resumption]
    player.handle(ev.Resumed(0, 0))


def test_no_process_is_started_for_a_notice_alone() -> None:
    player = Player(1, 1)
    player.begin()
    player.fill([0])
    player.fill([])
    player.handle(ev.WorkerReady(0, 0))
    player.handle(ev.BatchReady(0, 0, 0, "batch"))
    player.take()
    player.fill([])
    player.handle(ev.Announced(A))
    assert player.handle(died(0, 0)) == []


def test_an_answer_that_no_notice_was_sent_for_is_an_error() -> None:
    player = Player(1, 1)
    player.begin()
    player.fill([0])
    with pytest.raises(RuntimeError, match="answered a notice"):
        player.handle(ev.Told(0, 0))


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("kills", [set(), {4}, {4, 5, 9}, {6, 7, 8}], ids=str)
def test_batches_know_what_was_told_before_they_were_drawn(
    kills: set[int], budget: int | None
) -> None:
    driver = FakeDriver(hangs=kills)
    with Consumer(driver, persistent=True, budget=Budget(budget)) as consumer:
        consumer.begin(12)
        for number in range(6):
            consumer.next()
            if number in (1, 4):
                consumer.pool.announce(b"%d" % number)
        consumer.rest()
        consumer.pool.announce(b"between")
        consumer.begin(4, again=True)
        consumer.rest()
    expected = {(0, key): [b"1"] * (key >= 6) + [b"4"] * (key >= 9) for key in range(12)}
    expected |= {(1, key): [b"1", b"4", b"between"] for key in range(4)}
    assert driver.heard == expected
