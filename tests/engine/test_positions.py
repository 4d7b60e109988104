"""A machine that begins in the middle of an epoch gives the rest of its stream."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine import events as ev
from tests.engine.playing import Player

Batch = tuple[int, int]
"""The worker that made it, and how many it had made before."""


def stream(
    player: Player,
    position: ev.Position | None,
    indices: list[int],
    lengths: list[int] | None,
    order: list[int],
) -> list[Batch]:
    """All that is delivered. Workers answer in turns as `order` says, which is to make no
    difference; `lengths` are those of the replicas of a stream."""
    inboxes: dict[int, deque[ev.Task]] = {}
    made: dict[int, int] = {}
    seen: list[Batch] = []

    def obey(actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.Start):
                inboxes[action.worker] = deque()
                made[action.worker] = action.batches_done
                assert action.answered == action.batches_done
            elif isinstance(action, ev.Dispatch):
                assert isinstance(action.item, ev.Task)
                inboxes[action.worker].append(action.item)

    def work(worker: int) -> None:
        if not inboxes.get(worker):
            return
        task = inboxes[worker].popleft()
        if lengths is not None and made[worker] >= lengths[worker]:
            inboxes[worker].clear()
            obey(player.handle(ev.ReplicaEnded(worker, 0, task.number)))
            return
        result = (worker, made[worker] if lengths is not None else task.index)
        made[worker] += 1
        obey(player.handle(ev.BatchReady(worker, 0, task.number, result, 1)))

    obey(player.begin(position))
    turns = deque(order)
    while True:
        obey(player.fill(indices) if lengths is None else endless(player))
        taken = player.take()
        if taken is ev.END:
            return seen
        if isinstance(taken, ev.Delivery):
            seen.append(taken.result)
            continue
        turns.rotate(-1)
        work(turns[0])


def endless(player: Player) -> list[ev.Action]:
    actions: list[ev.Action] = []
    while player.due > 0:
        actions += player.draw(None)
    return actions


orders = st.lists(st.integers(0, 3), max_size=12).map(lambda some: [*some, 0, 1, 2, 3])


@given(
    workers=st.integers(1, 4),
    prefetch=st.integers(1, 3),
    length=st.integers(0, 20),
    batches=st.integers(0, 20),
    order=orders,
)
def test_from_a_position_of_map_style_data_the_rest_comes(
    workers: int, prefetch: int, length: int, batches: int, order: list[int]
) -> None:
    batches = min(batches, length)
    whole = stream(Player(workers, prefetch), None, list(range(length)), None, order)
    assert [index for _, index in whole] == list(range(length))
    position = ev.Position.after(batches, workers)
    rest = list(range(batches, length))
    assert stream(Player(workers, prefetch), position, rest, None, order) == whole[batches:]


@given(
    prefetch=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    share=st.floats(0, 1),
    order=orders,
    again=orders,
)
def test_from_a_position_of_streams_the_rest_comes(
    prefetch: int, lengths: list[int], share: float, order: list[int], again: list[int]
) -> None:
    workers = len(lengths)
    whole = stream(Player(workers, prefetch, iterable=True), None, [], lengths, order)
    assert sorted(whole) == [(one, n) for one in range(workers) for n in range(lengths[one])]
    batches = int(share * len(whole))
    made = [sum(one == worker for one, _ in whole[:batches]) for worker in range(workers)]
    seats = tuple(
        ev.SeatPosition(count, batches_done=count, exhausted=count == length and length > 0)
        for count, length in zip(made, lengths, strict=True)
    )
    turn = whole[batches][0] if batches < len(whole) else 0
    position = ev.Position(batches, turn, seats)
    rest = stream(Player(workers, prefetch, iterable=True), position, [], lengths, again)
    assert rest == whole[batches:]


def test_what_had_ended_is_not_started_unless_another_epoch_may_come() -> None:
    seats = (ev.SeatPosition(3, batches_done=3, exhausted=True), ev.SeatPosition(3, batches_done=3))
    for persistent in (False, True):
        player = Player(2, 2, iterable=True, persistent=persistent)
        starts = player.begin(ev.Position(6, 1, seats))
        expected = [ev.Start(1, 0, 3, 0, 3, False)]
        if persistent:
            expected.insert(0, ev.Start(0, 0, 3, 0, 3, exhausted=True))
        assert starts == expected
        assert all(one.worker == 1 for one in endless(player) if isinstance(one, ev.Dispatch))


def test_a_position_after_some_batches() -> None:
    found = ev.Position.after(7, 3)
    assert (found.number, found.turn) == (7, 1)
    assert [one.answered for one in found.seats] == [3, 2, 2]
