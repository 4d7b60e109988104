"""What happens next: every decision of the engine, and nothing else.

The machine has no process, no clock and no file. It is told what happened (events, in the past
tense) and answers with what is to be done (actions, in the imperative). A driver turns actions into
system calls and system calls into events; times come in with the events. So every history, however
unlikely, can be played in a test within microseconds.

What it promises (each has a property in ``tests/engine/test_machine.py``):

- every task is delivered exactly once, in order (or, with ``in_order=False``, as it arrives);
- a worker is given tasks in the order torch would give them, whatever dies in between, because the
  random state of a worker depends on which tasks it does;
- no more tasks are out than ``prefetch * workers``, and no more bytes than the budget allows, but
  for one batch that is larger than it, alone;
- after a death the replacement is asked for exactly the items the dead worker had not answered, in
  their order; an answer that was received is never asked for again;
- as long as workers may be replaced, there is always a way forward; when they may not be, the
  failure is delivered where the first missing batch would have been.

A sample of map-style data that was being loaded when its worker died is put on trial before it is
blamed: the next process in that seat first loads it alone. If that one dies of it too, the sample
is convicted: the driver is told to leave it out (`Convict`) and the batch is redone, or, without a
policy for bad samples, the batch is given up (`Poisoned`). If it lives, the sample is acquitted and
the batch redone with it. What can be convicted of what:

- A worker that ended by itself (a crash, an exit, a stall, a signal it sent to itself) needs one
  death in the batch, and one alone.
- One that was killed (SIGKILL) while memory was short: one, and two alone.
- One that was killed, and nothing says by whom: two, and then alone three times in a row *in the
  same instant*. Somebody may be killing workers from outside, at any rate, and then whatever is
  being loaded dies with them; how often it does so proves nothing. So the worker waits before it
  loads the sample, for a time drawn at random that is at least `CLOSE` times as long as the sample
  then takes to kill. A kill that has nothing to do with the sample strikes while the worker waits:
  that it comes so soon after it, by chance, happens once in `CLOSE` times at most, whatever
  the rate and the rhythm of the killing. Who is killed while it waits has shown that it needs no
  sample for that, and the suspicion is dropped.

Everything else counts as a restart and as nothing else. Without a way to tell, nobody is convicted:
`max_restarts` is what ends such a run. Elements of a stream cannot be loaded alone: there it takes
two deaths in a row that were its own doing, or three that were that or for memory. With a policy,
deaths that convict a sample do not count as restarts: how many may be bad is for another limit to
say.

A worker answers *items* one after the other: tasks, and resumptions (the start of another epoch on
persistent workers); trials stand between them and leave no trace in what a worker does later.

Which worker makes a batch is decided when its indices are drawn, and they are drawn when torch
would draw them: both show in random states. What the budget decides is when a task is *handed* to
its worker. Until then it waits, in one queue for all, so that the batch the consumer needs next is
always among those in flight.

A worker that has grown too large says so after an answer and goes (`WorkerRetired`). That is no
death: nothing is counted, and its successor takes up from the same random state.

The stream of an iterable dataset may not come again as it was: `continuation` says how a successor
gets to where its predecessor was, and sees whether it has. One that has not says so and goes
(`WentAstray`), which is no death either; the next one is told not to try that way, and so are those
of all other seats. Where no way keeps the number of batches the run ends (`StreamLost`), and so it
does at the first death if the user wants that (``recovery="raise"``). A worker of such a dataset
that has grown too large asks (`WorkerGrown`) and goes on meanwhile: first a process of its own
tries to take up its stream (`Rehearse`), and only if that was exact, and made a smaller process, it
is told to go (`Retire`). If it was not, no worker of this pool is replaced for its size any more.

A start that fails because something is short (processes, memory, descriptors) is no death either:
somebody else may give it back in a moment. It is tried again after a pause, each twice as long as
the one before up to a limit, while the other workers go on. When that has been so for about half a
minute, the failure tells of all the tries.

A worker that ends by itself before it is ready, three times in a row, cannot start; nor can one go
on that ends three times in a row while it catches up with its predecessor. One that is killed from
outside (SIGKILL) says nothing about whether it could: it is started again, if it was not ready yet
from the second time on after such pauses too. That counts towards the limit of restarts, and is
nothing else.

A worker that waits for a lock which was held when it was forked cannot be helped by another from
the same nursery, and no sample is to blame. After two of them the nursery is made anew (`Renew`),
from the trainer as it is then. It is not done for ever: the lock may be one that is always held.

Tasks left over when the consumer starts a new epoch early are still executed,
because torch's workers execute them too and their random state shows it; their results are dropped.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.engine.continuation import Recovery
from holdfast.engine.vocabulary import (
    END,
    Abandon,
    Action,
    Ask,
    BatchReady,
    Convict,
    Death,
    Delivery,
    Dispatch,
    Dump,
    End,
    Event,
    GaveUp,
    Item,
    Kill,
    Poisoned,
    Rehearse,
    Rehearsed,
    Renew,
    ReplicaEnded,
    RestartPolicy,
    Resumed,
    Resumption,
    Retire,
    Separate,
    Start,
    Stay,
    StreamLost,
    Survived,
    Task,
    Ticked,
    Trial,
    WentAstray,
    WorkerGrown,
    WorkerReady,
    WorkerRetired,
    WorkerStalled,
)
from holdfast.memory.budget import Share

__all__ = ["ABANDON_AFTER", "FAILED_STARTS", "KILL_AFTER", "Machine"]

KILL_AFTER: Final = 0.5  # seconds a worker has to dump its stack before SIGKILL
ABANDON_AFTER: Final = 1.0  # seconds after SIGKILL when the run goes on without the worker
ACQUITTALS: Final = 3  # trials of samples of one batch that prove nothing, before it is given up
CLOSE: Final = 40  # a death is telling if the pause before was so many times as long,
TELLING: Final = 3  # and so many of them in a row convict
LONGEST_TRIAL: Final = 6  # deaths in one trial that prove nothing, before it is dropped
FIRST_WAIT: Final = 1.5  # seconds to wait before a sample that may be innocent is loaded alone;
WIDE: Final = 3 * CLOSE  # from the second time on so many times as long as it took to kill,
LONGEST_WAIT: Final = 10.0  # but no longer
REMEMBERED: Final = 100  # deaths kept for the story when there is no limit
REMEMBERED_STRIKES: Final = 10  # deaths in a row at one sample that are kept
FAILED_STARTS: Final = 3  # deaths before "ready", in a row, after which a seat is given up
INHERITED: Final = 2  # stalls on a lock that was held at the fork, before there is another fork,
RENEWALS: Final = 3  # and how often that is done
FIRST_PAUSE: Final = 0.1  # seconds before a start that could not be, or was killed, is tried again
LONGEST_PAUSE: Final = 5.0
RAISES: Final = 'iterable_recovery="raise": no stream is continued by another process'
TRIES: Final = 12  # such starts in a row after which a seat is given up: 31 s in all


@dataclass(slots=True)
class _Seat:
    """A worker's place: it keeps its id while the processes in it come and go."""

    id: int
    generation: int = 0
    alive: bool = True
    ready: bool = False
    ended: bool = False  # takes no more tasks in this epoch
    exhausted: bool = False  # its replica has nothing more, whichever epoch it is in
    items: deque[Item] = field(default_factory=deque)
    answered: int = 0
    epoch: int = 0
    passed: int = 0
    replica: int = 0
    failed_starts: int = 0  # by itself, since it was last ready,
    killed_starts: int = 0  # and from outside
    failed_catching_up: int = 0  # by itself, since it last answered
    unborn: list[Death] = field(default_factory=list)  # since it was last ready
    start_at: float | None = None  # when its start is tried again
    condemned_at: float | None = None
    killed_at: float | None = None
    retiring: bool = False
    leaving: bool = False  # it has not found its way, and another process is to try another
    rehearsed: bool = False  # it has grown too large, and it is being tried whether it may go
    stalls: int = 0
    renewals: int = 0  # of the nursery, before it was started
    victim: Hashable = None
    strikes: list[Death] = field(default_factory=list)


class Machine:
    """Events in, actions out. See the module's text for what it promises."""

    def __init__(
        self,
        *,
        workers: int,
        prefetch: int,
        in_order: bool = True,
        iterable: bool = False,
        persistent: bool = False,
        restarts: RestartPolicy,
        leaves_out: bool = False,
        share: Share | None = None,
        recovery: Recovery = "auto",
    ) -> None:
        """`leaves_out` if there is a policy for bad samples, so that a batch can do without one."""
        self.workers = workers
        self.limit = workers * prefetch
        self.in_order = in_order
        self.iterable = iterable
        self.persistent = persistent
        self.restarts = restarts
        self.leaves_out = leaves_out and not iterable  # there is no way past one but through it
        self.share = Share() if share is None else share  # of the memory budget
        self.recovery = recovery  # of streams
        self.recycles = not iterable or recovery != "raise"
        """Whether workers are replaced for their size."""
        self.continued: int | None = None
        """A worker whose stream another process has gone on with, in this epoch."""
        self.epoch = 0
        self.failure: GaveUp | None = None
        self.draws_due = self.limit
        self.restarted: deque[Death] = deque()
        self._seats = [_Seat(worker) for worker in range(workers)]
        self._tasks: dict[int, Task] = {}
        self._arrived: deque[Task] = deque()  # only without order
        self._waiting: deque[Task | tuple[_Seat, Resumption]] = deque()  # not handed out yet
        self._unread = 0  # bytes of the batch the consumer has been given and not unpacked
        self._next_number = 0
        self._next_out = 0
        self._turn = 0
        self._load = [0] * workers
        self._drained = False
        self._stopped = False
        self._dice = random.Random(0)  # for pauses that no rhythm of kills can follow
        self._inherited = 0  # stalls on a lock that was held at the fork, since the last
        self._renewals = 0
        self._unfit: frozenset[str] = frozenset()  # ways to take up a stream

    # -- the consumer's side --------------------------------------------------------------

    def begin(self) -> list[Action]:
        """The first epoch: start all workers."""
        return [Start(seat.id, 0, 0, 0, 0, False) for seat in self._seats]

    def resume(self, seed: int | None) -> list[Action]:
        """Another epoch on persistent workers. What is still out is executed and dropped."""
        self.epoch += 1
        self.continued = None
        self.draws_due = self.limit
        self.share.give(self._unread)
        self._unread = 0
        for task in self._tasks.values():
            if task.done:
                self._uncount(task)
        self._tasks.clear()
        self._arrived.clear()
        self._next_number = self._next_out = self._turn = 0
        self._load = [0] * self.workers
        self._drained = False
        for seat in self._seats:
            seat.ended = False
            self._waiting.append((seat, Resumption(self.epoch, seed)))
        return self._hand_out()

    @property
    def next_number(self) -> int:
        """The number of the batch that is drawn next."""
        return self._next_number

    def draw(self, index: Any, keys: Sequence[Any] = (), brief: Any = None) -> list[Action]:
        """The sampler gave `index`: which worker makes this batch?"""
        self.draws_due -= 1
        worker = self._whose_turn()
        if worker is None:
            return []
        task = Task(self._next_number, index, self.epoch, worker, keys=keys, brief=brief)
        self._tasks[task.number] = task
        self._next_number += 1
        self._load[worker] += 1
        if self._waiting or not self._fits(task):
            self._waiting.append(task)
            return []
        return self._hand(self._seats[worker], task)

    def drained(self) -> None:
        """The sampler had nothing to give."""
        self.draws_due -= 1
        self._drained = True

    def take(self) -> Delivery | End | GaveUp | None:
        """What the consumer gets now; None if it has to wait."""
        if self._arrived:
            return self._deliver(self._arrived.popleft())
        while self._next_out < self._next_number:
            task = self._tasks.get(self._next_out)
            if task is not None:
                if task.done:
                    self._next_out += 1
                    return self._deliver(task)
                if not self._seats[task.worker].ended:
                    return self.failure
                del self._tasks[task.number]  # its replica ended before it
            self._next_out += 1
        return END

    def unpacked(self) -> list[Action]:
        """The consumer has made its batch of what it was given: it is not in flight any more."""
        unread, self._unread = self._unread, 0
        self.share.give(unread)
        return self._hand_out() if self._waiting else []

    @property
    def held_back(self) -> int:
        """Tasks that wait for memory."""
        return len(self._waiting)

    def relieved(self) -> list[Action]:
        """There may be more room than there was: somebody else has given some back."""
        return [] if self._stopped or not self._waiting else self._hand_out()

    def awaited(self) -> int | None:
        """The worker that makes the batch the consumer waits for, if it can be told."""
        task = self._tasks.get(self._next_out)
        return None if task is None else task.worker

    def stop(self) -> None:
        """Nothing that happens from now on has a consequence."""
        self._stopped = True
        self.share.close()

    # -- the workers' side ----------------------------------------------------------------

    def handle(self, event: Event) -> list[Action]:
        if self._stopped:
            return []
        actions = self._handle(event)
        return [*actions, *self._hand_out()] if self._waiting else actions

    def _handle(self, event: Event) -> list[Action]:
        if isinstance(event, BatchReady):
            return self._batch_ready(event)
        if isinstance(event, Ticked):
            return self._ticked(event.at)
        seat = self._seats[event.worker]
        if event.generation != seat.generation:
            return []  # from a worker we have gone on without
        if isinstance(event, WorkerReady):
            seat.ready = True
            seat.failed_starts = seat.killed_starts = 0
            seat.unborn.clear()
        elif isinstance(event, ReplicaEnded):
            self._replica_ended(seat, event.task)
        elif isinstance(event, Resumed):
            self._answered(seat)
        elif isinstance(event, Survived):
            self._acquit(seat)
        elif isinstance(event, WorkerRetired):
            seat.retiring = True
            seat.condemned_at, seat.killed_at = event.at, None  # it has a moment to exit by itself
        elif isinstance(event, WentAstray):
            self._unfit |= event.unfit
            self._let_go(seat, event.at)
        elif isinstance(event, StreamLost):
            if event.started:
                self._let_go(seat, event.at)
            else:
                seat.alive = False
            self._lose(seat, event.why)
        elif isinstance(event, WorkerGrown):
            return self._grown(seat)
        elif isinstance(event, Rehearsed):
            return self._rehearsed(seat, event)
        elif isinstance(event, WorkerStalled):
            return self._stalled(seat, event.at)
        else:
            return self._died(seat, event.death)
        return []

    def patience(self, worker: int, stall_timeout: float) -> float:
        """How long this worker may be silent: longer after a stall on the same batch."""
        return stall_timeout * (1 << self._seats[worker].stalls)

    def busy(self, worker: int) -> bool:
        """Whether this worker owes an answer, or its start."""
        seat = self._seats[worker]
        return seat.alive and seat.condemned_at is None and (bool(seat.items) or not seat.ready)

    def alive(self, worker: int) -> bool:
        return self._seats[worker].alive

    def generation(self, worker: int) -> int:
        return self._seats[worker].generation

    def head(self, worker: int) -> Task | None:
        """The task this worker has to answer next, or of which it has a sample on trial."""
        items = self._seats[worker].items
        if items and isinstance(items[0], Trial):
            return items[0].task
        return items[0] if items and isinstance(items[0], Task) else None

    def next_seed(self, worker: int) -> int | None:
        """That of the epoch which this worker is to begin next."""
        items = self._seats[worker].items
        return items[0].seed if items and isinstance(items[0], Resumption) else None

    def on_trial(self, worker: int) -> bool:
        items = self._seats[worker].items
        return bool(items) and isinstance(items[0], Trial)

    def ready(self, worker: int) -> bool:
        """Whether this worker has come through its start."""
        return self._seats[worker].ready

    def condemned(self, worker: int) -> bool:
        """Whether we have sent this worker a fatal signal ourselves."""
        return self._seats[worker].condemned_at is not None

    def tries(self, worker: int) -> int:
        """How often in a row its start has failed for lack of something."""
        return len(self._seats[worker].unborn)

    def put_off(self, worker: int) -> bool:
        """Whether its next start waits for its time."""
        return self._seats[worker].start_at is not None

    def retiring(self, worker: int) -> bool:
        """Whether this worker has said that it goes, because of its size."""
        return self._seats[worker].retiring

    def leaving(self, worker: int) -> bool:
        """Whether this worker has said that it goes, because it has not got to its stream."""
        return self._seats[worker].leaving

    def up_to_date(self, worker: int) -> bool:
        """Whether what this worker answers is of the consumer's epoch, and not left over."""
        return self._seats[worker].epoch == self.epoch

    def deadline(self) -> float | None:
        """When the machine wants to hear `Ticked` at the latest."""
        times = [
            seat.condemned_at + KILL_AFTER
            if seat.killed_at is None
            else seat.killed_at + ABANDON_AFTER
            for seat in self._seats
            if seat.alive and seat.condemned_at is not None
        ]
        if self.failure is None:
            times += [seat.start_at for seat in self._seats if seat.start_at is not None]
        return min(times, default=None)

    # -- how it is done -------------------------------------------------------------------

    def _fits(self, task: Task) -> bool:
        """Whether there is room for another batch; if so, it is counted from now on."""
        share = self.share
        largest = share.largest
        if largest is None:
            # How large they are is not known yet: nothing but one to see, or one for each worker
            # where nobody has set a limit that they might exceed.
            largest = 1
            limited = share.budget.total is not None and not share.budget.auto
            if limited and share.in_flight:
                return False
            if share.budget.auto and self._seats[task.worker].items:
                return False
        if not share.take(largest):
            return False
        task.counted = largest
        return True

    def _count_anew(self, largest: int) -> None:
        """Batches are larger than we thought: so may be those that are being made."""
        for seat in self._seats:
            for item in seat.items:
                if isinstance(item, Task):
                    self.share.became(item.counted, largest)
                    item.counted = largest

    def _uncount(self, task: Task) -> None:
        self.share.give(task.counted)
        task.counted = 0

    def _hand(self, seat: _Seat, item: Task | Resumption) -> list[Action]:
        seat.items.append(item)
        if seat.alive:
            return [Dispatch(seat.id, item)]
        if isinstance(item, Resumption) or seat.start_at is not None:
            return []  # nobody is started for that alone, or before its time
        return self._restart(seat) if self.failure is None else []

    def _hand_out(self) -> list[Action]:
        actions: list[Action] = []
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, Task):
                if not self._fits(first):
                    break
                actions += self._hand(self._seats[first.worker], first)
            else:
                actions += self._hand(*first)
            self._waiting.popleft()
        return actions

    def _whose_turn(self) -> int | None:
        """torch's rule: the next worker in turn that can take a task."""
        for _ in range(self.workers):
            worker = self._turn
            self._turn = (worker + 1) % self.workers
            if not self._seats[worker].ended and (self.in_order or self._has_room(worker)):
                return worker
        return None

    def _has_room(self, worker: int) -> bool:
        active = sum(not seat.ended for seat in self._seats)
        return self._load[worker] < self.limit // active

    def _deliver(self, task: Task) -> Delivery:
        self._tasks.pop(task.number, None)
        self._load[task.worker] -= 1
        self.draws_due += 1
        self.share.give(self._unread)
        self._unread, task.counted = task.counted, 0
        return Delivery(task, task.result)

    def _batch_ready(self, event: BatchReady) -> list[Action]:
        seat = self._seats[event.worker]
        if event.generation != seat.generation:
            return []
        task = self._answered(seat)
        _agree(task, event.task)
        assert isinstance(task, Task)
        nbytes = max(1, event.nbytes or 0)  # what is out counts: "nothing in flight" is to be true
        self.share.became(task.counted, nbytes)
        task.counted = nbytes
        if event.nbytes is not None and self.share.saw(nbytes):
            self._count_anew(nbytes)
        self._finish(task, event.result)
        return []

    def _finish(self, task: Task, result: Any) -> None:
        if task.epoch != self.epoch:
            self._uncount(task)
            return  # left over from an epoch the consumer broke off
        task.done = True
        task.result = result
        if not self.in_order:
            self._arrived.append(task)

    def _answered(self, seat: _Seat) -> Item:
        item = seat.items.popleft()
        seat.answered += 1
        seat.failed_catching_up = 0
        _absolve(seat)
        if isinstance(item, Task):
            seat.replica += 1
        else:
            assert isinstance(item, Resumption), item
            seat.epoch = item.epoch
            seat.passed += seat.replica > 0
            seat.replica = 0
            seat.exhausted = False
        return item

    def _replica_ended(self, seat: _Seat, number: int) -> None:
        task = self._answered(seat)
        _agree(task, number)
        assert isinstance(task, Task)
        self._uncount(task)
        self._close_replica(seat)

    def _close_replica(self, seat: _Seat) -> None:
        """The worker answers nothing more of what it was given for this epoch."""
        seat.exhausted = True
        while seat.items and isinstance(seat.items[0], Task):
            dropped = seat.items.popleft()
            assert isinstance(dropped, Task)
            self._uncount(dropped)
        if self._waiting:
            self._waiting = deque(one for one in self._waiting if not _is_of(one, seat))
        if seat.epoch == self.epoch:
            seat.ended = True
            self.draws_due += 1

    def _stalled(self, seat: _Seat, at: float) -> list[Action]:
        if seat.condemned_at is not None or not seat.alive:
            return []
        seat.condemned_at = at
        seat.killed_at = None
        return [Dump(seat.id, seat.generation)]

    def _ticked(self, at: float) -> list[Action]:
        actions: list[Action] = []
        for seat in self._seats:
            if seat.start_at is not None and at >= seat.start_at and self.failure is None:
                seat.start_at = None
                actions += self._restart(seat) if self._needed(seat) else []
            if not seat.alive or seat.condemned_at is None:
                continue
            if seat.killed_at is None:
                if at >= seat.condemned_at + KILL_AFTER:
                    seat.killed_at = at
                    actions.append(Kill(seat.id, seat.generation))
            elif at >= seat.killed_at + ABANDON_AFTER:
                actions.append(Abandon(seat.id, seat.generation))
        return actions

    def _let_go(self, seat: _Seat, at: float) -> None:
        seat.leaving = True
        seat.condemned_at, seat.killed_at = at, None  # it has a moment to exit by itself

    def _lose(self, seat: _Seat, why: str, *deaths: Death) -> None:
        if self.failure is None:
            self.failure = GaveUp("stream", seat.id, deaths, why)

    def _grown(self, seat: _Seat) -> list[Action]:
        if seat.rehearsed or seat.retiring or not seat.alive or seat.condemned_at is not None:
            return []
        if not self.recycles:
            return [Stay(seat.id, seat.generation, for_good=True)]
        seat.rehearsed = True
        place = seat.answered, seat.passed, seat.replica, seat.exhausted
        return [Rehearse(seat.id, seat.generation, *place, self._unfit)]

    def _rehearsed(self, seat: _Seat, event: Rehearsed) -> list[Action]:
        if not seat.rehearsed:
            return []
        seat.rehearsed = False
        if event.unfit:  # perhaps another worker has found the same meanwhile
            self._unfit |= event.unfit
            return [Ask(seat.id, seat.generation)]  # it is further now
        if event.exact and event.pays:
            return [Retire(seat.id, seat.generation)]
        if event.exact is False:
            self.recycles = False
        return [Stay(seat.id, seat.generation, for_good=event.exact is False)]

    def _died(self, seat: _Seat, death: Death) -> list[Action]:
        if seat.retiring or seat.leaving:
            return self._succeed(seat)
        was_ready, was_stalled = seat.ready, seat.condemned_at is not None
        seat.alive = seat.ready = seat.rehearsed = False
        seat.condemned_at = seat.killed_at = None
        if was_stalled:
            seat.stalls += 1
        if self.failure is not None:
            return []
        if death.shortage:
            self._put_off(seat, death)
            return []
        reason = self._cannot_go_on(seat, death, was_ready)
        if reason is not None:
            self.failure = GaveUp(reason, seat.id, (death,))
            return []
        first = self._draw_conclusions(seat, death)
        idle = was_ready and not seat.items
        if idle and not self.persistent and (seat.ended or self._drained):
            return []  # it has nothing left to do
        if self.iterable and self.recovery == "raise":
            self._lose(seat, RAISES, death)
            return []
        if death.no_way and not seat.exhausted:
            self._lose(seat, death.no_way, death)
            return []
        if not self._is_spared(seat, death, first) and not self._may_restart(death):
            self.failure = GaveUp("restart-limit", seat.id, tuple(self.restarted))
            return []
        if not was_ready and seat.killed_starts > 1:
            seat.start_at = death.at + _pause(seat.killed_starts - 1)
            return first
        return [*first, *self._restart(seat)]

    def _cannot_go_on(self, seat: _Seat, death: Death, was_ready: bool) -> str | None:
        """One more death before it could do anything: why that is enough to give it up, if so."""
        if death.perhaps_from_outside:
            seat.killed_starts += not was_ready
        elif not was_ready:
            seat.failed_starts += 1
            if seat.failed_starts >= FAILED_STARTS:
                return "cannot-start"
        elif death.catching_up:
            seat.failed_catching_up += 1
            if seat.failed_catching_up >= FAILED_STARTS:
                return "cannot-catch-up"
        return None

    def _draw_conclusions(self, seat: _Seat, death: Death) -> list[Action]:
        """What this death says of a sample, or of the nursery."""
        if death.inherited and seat.renewals < self._renewals:
            return []  # it came from a nursery that has been replaced since
        if death.inherited and self._renewals < RENEWALS:
            self._inherited += 1
            if self._inherited < INHERITED:
                return []
            self._inherited = 0
            self._renewals += 1
            for one in self._seats:
                one.stalls = 0
            return [Renew()]
        trial = seat.items[0] if seat.items and isinstance(seat.items[0], Trial) else None
        if trial is None:
            return self._strike(seat, death)
        if death.sample == (trial.task.number, trial.sample):
            return self._judge(seat, trial, death)
        if _unproven(death) and all(map(_unproven, trial.before)):
            self._dismiss(seat, trial)  # it takes no sample to be killed here
        return []

    def _is_spared(self, seat: _Seat, death: Death, conclusions: list[Action]) -> bool:
        """Whether this death does not count as a restart: it has convicted a sample that is left
        out, or may yet do so (and is counted when that sample is acquitted)."""
        if not self.leaves_out:
            return False
        if any(isinstance(one, Convict) for one in conclusions):
            return True
        trial = seat.items[0] if seat.items else None
        on_trial = isinstance(trial, Trial) and (death in trial.before or death in trial.alone)
        return on_trial and not _unproven(death)

    def _succeed(self, seat: _Seat) -> list[Action]:
        """One that said it would is gone; what it left undone is its successor's."""
        seat.alive = seat.ready = seat.retiring = seat.leaving = seat.rehearsed = False
        seat.condemned_at = seat.killed_at = None
        return self._restart(seat) if self.failure is None and self._needed(seat) else []

    def _needed(self, seat: _Seat) -> bool:
        """Whether there is, or may be, something for a worker in this seat to do."""
        return bool(seat.items) or self.persistent or not (seat.ended or self._drained)

    def _put_off(self, seat: _Seat, failed: Death) -> None:
        """Try this start again later, or never."""
        seat.unborn.append(failed)
        tries = len(seat.unborn)
        if tries >= TRIES:
            self.failure = GaveUp("shortage", seat.id, tuple(seat.unborn))
        else:
            seat.start_at = failed.at + _pause(tries)

    def _judge(self, seat: _Seat, trial: Trial, death: Death) -> list[Action]:
        """A sample has ended its worker alone: guilty, unless that may have come from outside."""
        trial.alone.append(death)
        telling = death.after is not None and death.after * CLOSE <= trial.base
        trial.telling = trial.telling + 1 if telling else 0
        own = not death.perhaps_from_outside
        if not own and sum(one.memory for one in trial.alone) < 2 and trial.telling < TELLING:
            if len(trial.alone) >= LONGEST_TRIAL:
                self._dismiss(seat, trial)
            else:
                self._let_wait(trial)
            return []
        seat.items.popleft()
        _absolve(seat)
        deaths = (*trial.before, *trial.alone)
        if not self.leaves_out:
            self._give_up(seat, trial.task, trial.sample, deaths, len(trial.alone))
            return []
        self.restarted = deque(one for one in self.restarted if one not in deaths)
        assert trial.sample is not None, "taken apart before"
        return [Convict(seat.id, trial.task, trial.sample, deaths)]

    def _let_wait(self, trial: Trial) -> None:
        """How long the worker waits before it loads the sample on trial; see the module's text."""
        if not all(map(_unproven, trial.before)):
            return  # it is not suspected for having been killed
        longest = max((one.after or 0.0 for one in trial.alone), default=0.0)
        trial.base = min(LONGEST_WAIT, max(FIRST_WAIT, WIDE * longest))
        trial.pause = trial.base * (1 + self._dice.random())

    def _acquit(self, seat: _Seat) -> None:
        trial = seat.items[0]
        assert isinstance(trial, Trial), trial
        trial.task.acquittals += 1
        self._end_trial(seat, trial)

    def _dismiss(self, seat: _Seat, trial: Trial) -> None:
        """Nothing can be found out about this sample."""
        trial.task.dismissals += 1
        self._end_trial(seat, trial)

    def _end_trial(self, seat: _Seat, trial: Trial) -> None:
        seat.items.popleft()
        stalls = seat.stalls
        _absolve(seat)
        seat.stalls = stalls  # who has taken long alone will take as long in its batch
        if self.leaves_out:
            spared = [one for one in (*trial.before, *trial.alone) if not _unproven(one)]
            # In the order of time: whatever has expired is looked for at the front.
            self.restarted = deque(sorted((*self.restarted, *spared), key=lambda one: one.at))

    def _strike(self, seat: _Seat, death: Death) -> list[Action]:
        """Suspect the sample in flight; try it when there is reason enough to."""
        head = seat.items[0] if seat.items else None
        if death.sample is None or not isinstance(head, Task):
            return []
        if death.sample[0] != head.number:
            return []
        if death.sample != seat.victim:
            seat.victim = death.sample
            seat.strikes.clear()
        seat.strikes.append(death)
        del seat.strikes[:-REMEMBERED_STRIKES]
        sample = death.sample[1]
        unproven = all(map(_unproven, seat.strikes))
        suspect = len(seat.strikes) >= (2 if unproven else 1)
        if not self.iterable and head.acquittals + unproven * head.dismissals < ACQUITTALS:
            if not suspect:
                return []
            if self.leaves_out and sample is None and not head.apart:
                head.apart = True
                _absolve(seat)
                return [Separate(head)]
            if sample is not None or not self.leaves_out:
                trial = Trial(head, sample, tuple(seat.strikes))
                self._let_wait(trial)
                seat.items.appendleft(trial)
                return []
        own = sum(not one.perhaps_from_outside for one in seat.strikes)
        if own >= 2 or own + sum(one.memory for one in seat.strikes) >= 3:
            self._give_up(seat, head, sample, tuple(seat.strikes))
        return []

    def _give_up(
        self,
        seat: _Seat,
        task: Task,
        sample: int | None,
        deaths: tuple[Death, ...],
        alone: int = 0,
    ) -> None:
        """There is no way to make this batch: say so in its place."""
        self._answered(seat)
        self._uncount(task)
        self._finish(task, Poisoned(task, sample, deaths, task.acquittals, alone))
        if self.iterable:
            seat.replica -= 1  # it was answered, and not made
            self._close_replica(seat)  # there is no way past the sample but through it

    def _may_restart(self, death: Death) -> bool:
        self.restarted.append(death)
        if self.restarts.intensity is None:
            if len(self.restarted) > REMEMBERED:
                self.restarted.popleft()
            return True
        while self.restarted[0].at < death.at - self.restarts.period:
            self.restarted.popleft()
        return len(self.restarted) <= self.restarts.intensity

    def _restart(self, seat: _Seat) -> list[Action]:
        seat.generation += 1
        seat.alive = True
        seat.renewals = self._renewals
        if self.iterable and not seat.exhausted:
            self.continued = seat.id
        place = seat.answered, seat.passed, seat.replica, seat.exhausted
        start = Start(seat.id, seat.generation, *place, self._unfit, bool(seat.strikes))
        return [start, *(Dispatch(seat.id, item) for item in seat.items)]


def _pause(tries: int) -> float:
    """Seconds after so many starts in a row that came to nothing."""
    return min(FIRST_PAUSE * (1 << min(tries - 1, 32)), LONGEST_PAUSE)


def _unproven(death: Death) -> bool:
    """Whether somebody outside may have done it, and nothing says anything else."""
    return death.perhaps_from_outside and not death.memory


def _absolve(seat: _Seat) -> None:
    """What was there when workers died in this seat is not suspected of it any more."""
    seat.stalls = 0
    seat.victim = None
    seat.strikes.clear()


def _agree(item: Item, number: int) -> None:
    """Also without assertions: batches that are mixed up must never be delivered."""
    if not isinstance(item, Task) or item.number != number:
        raise RuntimeError(f"a worker answered task {number}, and {item} was to be answered first")


def _is_of(item: Task | tuple[_Seat, Resumption], seat: _Seat) -> bool:
    """Whether it is a task of the epoch this seat's replica is in."""
    return isinstance(item, Task) and item.worker == seat.id and item.epoch == seat.epoch
