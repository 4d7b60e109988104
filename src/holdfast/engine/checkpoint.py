"""Where a run is between two batches: what is kept so that another process can go on from there.

A checkpoint is of the last batch that the consumer has *had*. Workers are ahead of that by the
batches that wait, and so is the sampler. So for each worker it says what was true after its last
answer that was delivered: the driver keeps its random states and the states of its stream until the
batches have been delivered.

`resumption` makes plain data of it, and reads that again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.engine.continuation import StreamPoint, StreamProgress, extended
from holdfast.engine.events import Position, SeatPosition
from holdfast.told_changes import DueChange
from holdfast.worker.batch_fingerprint import NO_BATCH
from holdfast.worker.sample_seeding import NO_SEEDS, EpochSeeds


def random_states_at(
    answered: int, find: Callable[[int], bytes | None]
) -> tuple[bytes | None, bytes | None]:
    """The random states before the first item that a worker will be asked for, and before the last
    one it answered. `find` has the state after so many answers, if it was kept."""
    if not answered:
        return None, None
    before = find(answered - 1)
    return find(answered) or before, before  # or: the last item was given up


@dataclass(frozen=True, slots=True)
class StreamCheckpoint:
    """A worker's stream of an iterable dataset."""

    point: StreamPoint  # after the last batch that was delivered; without one, before the first
    delivered: int = 0  # batches in this epoch
    epoch_state: bytes | None = None  # these four as in `StreamProgress`
    state_between_epochs: bytes | None = None
    seeds: EpochSeeds = NO_SEEDS
    trusted: bool = False  # go on from the state, although there is nothing to compare it with
    shares_draws: bool = False  # without workers: the program draws from the same generators

    @classmethod
    def of(cls, progress: StreamProgress, back: int, batches: int) -> StreamCheckpoint:
        """As it was before its last `back` answers, when it had delivered `batches`."""
        points = progress.recent
        if len(points) > back:
            point = points[-1 - back]
        else:
            point = StreamPoint(NO_BATCH, 0 if not batches else None, None, None)
        between, epoch = progress.state_between_epochs, progress.epoch_state
        return cls(point, batches, epoch, between, progress.seeds)

    def progress(self) -> StreamProgress:
        """The same, for the driver of a run that begins here."""
        point = self.point
        made = StreamProgress(
            earlier=self.delivered,
            earlier_digest=point.digest,
            state=point.state,
            state_before=point.state_before,
            epoch_state=self.epoch_state,
            state_between_epochs=self.state_between_epochs,
            seeds=self.seeds,
            digest=point.digest,
            trusted=self.trusted,
        )
        made.recent.append(point)
        if point.mark != NO_BATCH and self.delivered:
            made.earlier -= 1
            made.marks.append(point.mark)
            if made.digest is not None:
                made.digest = extended(made.digest, point.mark)
        return made


@dataclass(frozen=True, slots=True)
class WorkerCheckpoint:
    """One worker."""

    seat: SeatPosition
    random_state: bytes | None = None  # None if it has answered nothing: then it follows from seeds
    random_before: bytes | None = None  # before the last batch of a stream
    stream: StreamCheckpoint | None = None
    dataset: bytes | None = None  # the state of a map-style dataset, pickled

    @classmethod
    def of(
        cls,
        seat: SeatPosition,
        back: int,
        progress: StreamProgress,
        random_state: Callable[[int], bytes | None],
        *,
        iterable: bool,
    ) -> WorkerCheckpoint:
        """As it was before its last `back` answers. `progress` is that of its dataset;
        `random_state` gives the state after so many answers."""
        if not seat.answered:
            return cls(seat)
        state, before = random_states_at(seat.answered, random_state)
        if not iterable:
            points = progress.recent
            dataset = points[-1 - back].state if len(points) > back else None
            return cls(seat, state, dataset=dataset)
        return cls(seat, state, before, StreamCheckpoint.of(progress, back, seat.batches_done))

    def progress(self, seeds: EpochSeeds) -> StreamProgress:
        """The same, for the driver of a run that begins here, in an epoch with these seeds."""
        if self.stream is not None:
            return self.stream.progress()
        made = StreamProgress(state=self.dataset, seeds=seeds)
        if self.dataset is not None:
            made.recent.append(StreamPoint(NO_BATCH, None, self.dataset, None))
        return made

    def random_states(self) -> Iterator[tuple[int, int, bytes]]:
        """Those it has: the first and the last number of answers for which each is valid."""
        answered = self.seat.answered
        for number, state in ((answered - 1, self.random_before), (answered, self.random_state)):
            if state is not None:
                yield number, number, state


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loader in an epoch, or after one."""

    finished: bool  # the end of the epoch was reached, and told
    yielded: int  # batches that the consumer has had in this epoch
    done: int  # tasks: these, those that raised, and those of which no sample was left
    turn: int  # the worker that makes the next batch
    base_seed: int
    shared_seed: int | None
    epoch: int  # its number among those that the loader has begun
    sample_seed: tuple[int, int] | None  # with seeding="sample": the seed and the epoch
    begun: Any  # a `SamplerStart`; None for an iterable dataset
    drawn: int = 0  # how often the sampler was asked; -1 if that is not known
    waiting: int = 0  # and how often besides, for indices that are no task yet
    first_missing: int = 0  # the first draw whose batch the consumer has not had
    had_later: tuple[int, ...] = ()  # draws after it whose batch it has had (in_order=False)
    index: int | None = None  # the fingerprint of the index of the last batch
    sampler_state: Any = None  # what the sampler's own state_dict() gave after the last batch
    sampler_ended: bool = False  # that batch is its last: its state may be that of the next epoch
    workers: tuple[WorkerCheckpoint, ...] = ()
    account: Any = None  # of bad samples
    unsettled: bool = False  # workers were still busy with an epoch that was left early
    dataset: Any = None  # without workers: the state of a map-style dataset
    now: Any = None  # a `SamplerStart`: the generators of loader and samplers when it was taken
    shuffled: bytes | None = None  # the state of a generator that gives this epoch's order
    due: deque[DueChange] = field(default_factory=deque)
    """Changes of the dataset that were told and are not made yet. The iterator takes those it
    makes."""
    told_later: tuple[Callable[[Any], object], ...] = ()
    """Changes that were told after this was taken, and are made already: again after states of the
    dataset are loaded, which would undo them."""
    samples: int | None = None  # to leave out, where batches have another size now
    program: Any = None  # `KeptGenerators`, while an iterator is made that goes on from here

    def position(self) -> Position:
        """For the machine that goes on from here."""
        return Position(self.done, self.turn, tuple(one.seat for one in self.workers))


class Bookmark:
    """Outlives an iterator and its pool: where they were last."""

    def __init__(self) -> None:
        self.last: Checkpoint | None = None
        self.now: weakref.WeakMethod[Callable[[], Checkpoint]] | None = None
        self.waiting: bytes | None = None
        """Without workers: states of the dataset's own generators that the next epoch begins with,
        because it has not made these generators yet."""
        self.before: Checkpoint | None = None  # where the loader's last epoch has come to its end
        self.left: Checkpoint | None = None
        """Without workers: where an iterable dataset's last epoch was left early."""
        self.draw: weakref.WeakMethod[Callable[[], int]] | None = None
        """Without workers: the draw before which a change holds that is told now."""
        self.due: weakref.WeakMethod[Callable[[], None]] | None = None
        """See `make_what_is_due`."""

    def make_what_is_due(self) -> None:
        """Make changes that the run before was told, and that hold from the next draw on."""
        make = None if self.due is None else self.due()
        if make is not None:
            make()

    def next_draw(self, otherwise: int) -> int:
        """The draw before which a change holds that is told now, if the iterator knows."""
        ask = None if self.draw is None else self.draw()
        if ask is not None:
            return ask()
        last = self.last
        return last.first_missing if last is not None and self.draw is not None else otherwise

    def checkpoint(self) -> Checkpoint | None:
        """Where the iterator is, or was; None if it never began."""
        ask = None if self.last is not None or self.now is None else self.now()
        return self.last if ask is None else ask()
