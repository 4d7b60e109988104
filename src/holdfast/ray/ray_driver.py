"""The driver of workers that are actors of a Ray cluster.

Actors are called, and every call returns what the worker says about some orders (`actor`). Results
arrive in threads of Ray's (`calls`), in any order; those of one actor are taken in the order of the
calls. When a call fails, the actor is dead for us, whatever it does later: what comes from an
earlier generation is never looked at. An actor whose node has lost its connection may go on
answering for a while.

Calls are sent ahead, and of a dead actor it is not known which of them it was in. So after a death
the orders that were not answered are given one at a time: another death shows its batch.

While orders are given one at a time, the actor announces each step before it begins it
(`actor.Announcements`). So the sample is known at which it dies, and can be tested alone, as with
processes (`engine.restarts`).

An actor that finds no room in the cluster waits there, without an error. If others have started by
then, or other loaders of this program have processors, which they may keep until this one is done,
it is started with ``num_cpus=0``: all run, and some share a processor. Another actor goes on
waiting for a processor in its stead (the *stand-by*), so that an autoscaler sees what is needed.
When there is room for that one, the worker moves there. If the stand-by fails, because its node is
lost or its options cannot be met any more, another is made after a pause, a few times. If none has
started, the log says what is waited for, again and again.

If the head of the cluster does not answer, Ray itself ends the program, after a minute. So that is
looked for (`cluster.HeadWatch`), and becomes an error that a program can catch and save a
checkpoint after. So does a connection that the program has closed: then nothing of Ray's may be
called any more, because most of it would start a cluster.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

import holdfast
from holdfast.autopsy.blackbox import Note
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.stack import tidy
from holdfast.autopsy.tally import Tally
from holdfast.autopsy.worker_status import StatusFile, WorkerStatus
from holdfast.engine import events as ev
from holdfast.engine.driver import DriverOptions, Handle, Progress
from holdfast.engine.message_driver import MessageDriver, MessageRecord
from holdfast.engine.seats import SeatState
from holdfast.engine.worker_records import Order
from holdfast.ray.actor import NOTES, STEPS, ActorWorker
from holdfast.ray.calls import Announced, Call
from holdfast.ray.cluster import LEFT, Death, HeadWatch, describe_death
from holdfast.samples.substitute import BatchHints
from holdfast.worker.message_host import GONE, READY, SURVIVED, Message

log = logging.getLogger("holdfast")

PATIENCE = 10.0  # seconds that an actor may wait for room in the cluster before that is said
SLOW_START = 60.0  # the same, if it may have its processor and be slow to start
SAY_AGAIN = 60.0  # seconds between two log lines about that
STANDBY_TRIES = 6  # stand-by actors that fail in a row, before no more are made
TOGETHER = 4 << 20  # bytes of batches that are made in one call, if one is not larger
_NOT_STARTED = Note(None, None, "boot", 0.0)

_Actor: Any = ray.remote(
    max_restarts=0, max_task_retries=0, concurrency_groups={NOTES: 1, STEPS: 1}
)(ActorWorker)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise an error if Ray does not know one of them, or not its value."""
    strategy = options.get("scheduling_strategy")
    try:
        _Actor.options(**options)
        if isinstance(strategy, str) and strategy not in ("DEFAULT", "SPREAD"):
            raise ValueError(  # Ray looks at it when the actor is made
                f'scheduling_strategy={strategy!r} is neither "DEFAULT" nor "SPREAD"; other '
                "strategies are objects of ray.util.scheduling_strategies"
            )
    except (TypeError, ValueError) as error:
        raise type(error)(f"ray_options={options!r}: {error}") from None


@dataclasses.dataclass(slots=True)
class _Seat(MessageRecord):
    """What is kept for a worker id. Its worker is the handle of an actor."""

    setup: Any = None
    standby: Any = None  # an actor that waits for a processor, while `worker` has none of its own
    standby_look: Call | None = None  # it is answered when that has started
    standby_failures: int = 0  # in a row
    standby_due: float | None = None  # monotonic, when the next is made after a failure
    announced: Announced | None = None  # what `worker` is about to do, while it is `careful`
    count: int = 0  # items answered in all
    actor_id: str = ""
    node: str = ""  # its id, and the name of its host
    pid: int | None = None
    calls: deque[Call] = dataclasses.field(default_factory=deque)  # not taken yet, oldest first
    inbox: deque[Message] = dataclasses.field(default_factory=deque)  # of calls that have arrived
    note: Note = _NOT_STARTED  # as seen last, with the time at which that was seen first
    noted: Note = _NOT_STARTED  # the same, with the time of its machine
    look: Call | None = None  # on its way
    born: bool = False  # its process is there, so it does not wait for room any more
    stack: Call | None = None
    asked: deque[tuple[ev.Item, Order]] = dataclasses.field(default_factory=deque)  # not answered
    held: deque[Order] = dataclasses.field(default_factory=deque)  # those of them not sent yet
    careful: int = 0  # so many answers are asked for one at a time, because of a death
    since: float = 0.0  # monotonic, when its start was ordered
    moves: bool = False  # to a processor of its own, and has not died
    squeezed: bool = False  # it is started without a processor of its own
    stalled: bool = False  # it is being ended because of that
    largest: int = 0  # bytes of a batch

    def place(self) -> str:
        """Where the actor is, as far as that is known."""
        if self.worker is None:
            return f"actor {self.actor_id}, which has ended"
        if self.node:
            return f"actor {self.actor_id} on node {self.node}, pid {self.pid} there"
        if self.born:
            return f"actor {self.actor_id}, whose process has started and is not ready yet"
        return f"actor {self.actor_id}, which waits for its start"


_drivers: dict[int, RayDriver] = {}  # of this process, by id, because each change is one step


class RayDriver(MessageDriver[_Seat]):
    """Implements `Driver`, where the methods are described."""

    def __init__(
        self,
        blueprint: Any,
        ray_options: Mapping[str, Any],
        limits: ev.Limits,
        options: DriverOptions,
    ) -> None:
        super().__init__(_Seat, limits, options)
        self._blueprint = blueprint
        self._ray_options = dict(ray_options)
        self._said_at = 0.0
        self._born_at = 0.0  # when the last actor started
        self._head = HeadWatch(self.wake)
        self._lost = False  # the cluster, and that was told
        self._status = StatusFile("ray")
        _drivers[id(self)] = self

    # -- orders ---------------------------------------------------------------------------

    def start(self, order: ev.Start) -> None:
        if not self._connected():
            return
        setup = self._begin(order)
        if setup is not None:
            seat = self._seats[order.worker]
            died = bool(order.generation) and not seat.moves
            seat.careful = len(seat.asked) + 1 if died else 0  # and a test of a sample
            seat.moves = False
            seat.asked.clear()
            if _answered(seat.standby_look):
                standby, seat.standby, seat.standby_look = seat.standby, None, None
                seat.standby_failures = 0
                self._start(seat, setup, standby)
            else:
                waits = seat.standby is not None or seat.standby_due is not None
                self._start(seat, setup, squeezed=waits)

    def _connected(self) -> bool:
        """Whether this program still belongs to the cluster. That it does not is told, once."""
        if not self._head.left:
            return True
        if not self._lost:
            self._lost = True
            self._supervisor.after(partial(self._supervisor.tell, ev.WorkersLost(LEFT)))
        return False

    def _end(self, actor: Any) -> None:
        if self._connected():
            ray.kill(actor)

    def _new_actor(self, **chosen: Any) -> Any:
        options = {"num_cpus": 1, **self._ray_options, **chosen}
        return _Actor.options(**options).remote(self._blueprint, holdfast.__version__)

    def _start(self, seat: _Seat, setup: Any, actor: Any = None, *, squeezed: bool = False) -> None:
        """`actor`: one that has begun nothing yet. `squeezed`: without a processor of its own."""
        seat.calls.clear()
        seat.inbox.clear()
        seat.held.clear()
        seat.node, seat.pid, seat.look, seat.stack, seat.announced = "", None, None, None, None
        seat.note = seat.noted = _NOT_STARTED._replace(since=self.clock())
        seat.stalled, seat.born, seat.since = False, False, self.clock()
        seat.setup, seat.count = setup, setup.answered
        seat.squeezed = squeezed
        seat.worker = actor or self._new_actor(**{"num_cpus": 0} if squeezed else {})
        seat.actor_id = seat.worker._actor_id.hex()
        self._call(seat, seat.worker.begin.remote(setup), "start-up")
        self._call(seat, seat.worker.take_up.remote(), "replay")
        seat.look = Call(seat.worker.look.remote())

    def send(self, worker: int, item: ev.Item, hint: BatchHints | None) -> None:
        seat = self._seats[worker]
        one = seat.order(item, hint)
        seat.asked.append((item, one))
        self._orders.setdefault(worker, []).append(one)

    def _pass_on(self, seat: _Seat, orders: list[Order]) -> None:
        seat.held.extend(orders)
        self._call_next(seat)

    def _call_next(self, seat: _Seat) -> None:
        """Send what may be sent now."""
        if seat.held and not self._connected():
            return
        while seat.held and not (seat.careful and seat.calls):
            # Several in one call save time; but none of them arrives before the last is made.
            count = 1 if seat.careful or not seat.largest else max(1, TOGETHER // seat.largest)
            some = [seat.held.popleft() for _ in range(min(count, len(seat.held)))]
            step = "fetch" if len(some) == 1 else "unknown"
            careful = bool(seat.careful)
            if careful and seat.announced is None:
                seat.announced = Announced(seat.worker)
            self._call(seat, seat.worker.carry_out.remote(some, careful), step)

    def _call(self, seat: _Seat, reference: Any, step: str) -> None:
        seat.calls.append(Call(reference, self._arrived, step))

    def _arrived(self) -> None:
        """In a thread of Ray's: the result of a call is there."""
        if self._bell.waiting:
            self._bell.ring()
        elif self._watch_bell.waiting:
            self._watch_bell.ring()

    def dump(self, worker: int, generation: int) -> None:
        seat = self._seats[worker]
        seat.stalled = True
        if seat.worker is not None and self._connected():
            seat.stack = Call(seat.worker.stack.remote(), self.wake)

    def kill(self, worker: int, generation: int) -> None:
        seat = self._seats[worker]
        if seat.worker is not None:
            self._end(seat.worker)
            # Its calls fail when the node has done that, which may take longer than we wait.
            self._supervisor.after(partial(self._gone, worker, generation, "killed"))

    def terminate(self, worker: int, generation: int) -> None:
        seat = self._seats[worker]
        if seat.worker is not None and seat.generation == generation:
            self._end(seat.worker)

    def abandon(self, worker: int, generation: int) -> None:
        self._supervisor.after(partial(self._gone, worker, generation, "unkillable"))

    # -- waiting --------------------------------------------------------------------------

    def hear(self, worker: int) -> bool:
        seat = self._seats[worker]
        while not seat.inbox:
            if not seat.calls or not seat.calls[0].done:
                return False
            call = seat.calls.popleft()
            if call.error is not None:
                if self._connected():
                    self._failed(worker, call)
                return False
            seat.inbox.extend(call.result)
            self._call_next(seat)
        self._take(worker, seat.inbox.popleft())
        return True

    def _has_results(self) -> bool:
        return any(seat.inbox or (seat.calls and seat.calls[0].done) for seat in self._seats)

    def poll(self, timeout: float) -> None:
        self._bell.wait(timeout, self._has_results)

    def watch(self, timeout: float) -> None:
        # A failed call cannot be told from a batch before it is looked at: both end this.
        self._watch_bell.wait(timeout, self._has_results if self._watches_batches else bool)

    def tick(self, now: float) -> None:
        if not self._connected():
            return
        if self._head.lost and not self._lost:
            self._lost = True
            self._supervisor.tell(ev.WorkersLost(self._head.words()))
            return
        for worker, seat in enumerate(self._seats):
            if seat.worker is None:
                if self._supervisor.machine.seats[worker].state is SeatState.EMPTY:
                    self._dismiss_standby(seat)  # no worker will take over its processor
                continue
            if seat.look is not None and seat.look.done:
                if seat.look.error is None:
                    if not seat.born:
                        seat.born, self._born_at = True, now
                    if seat.look.result != seat.noted:
                        seat.noted = seat.look.result
                        seat.note = seat.noted._replace(since=now)
                seat.look = None
            if seat.look is None and seat.calls:
                seat.look = Call(seat.worker.look.remote())
            if seat.standby_look is not None and seat.standby_look.done:
                self._supervisor.after(partial(self._move, worker, seat.generation))
            elif seat.standby_due is not None and now >= seat.standby_due:
                self._stand_by(seat)
        self._wait_for_room(now)
        if self._status.due(now):
            self._status.write(
                (
                    WorkerStatus(worker, seat.pid, self.place(worker), seat.note)
                    for worker, seat in enumerate(self._seats)
                    if seat.worker is not None
                ),
                now,
            )

    def _wait_for_room(self, now: float) -> None:
        """See whether actors have not started yet. While others start, they may follow."""
        late = [
            (worker, seat)
            for worker, seat in enumerate(self._seats)
            if seat.worker is not None
            and not seat.born
            and now - max(seat.since, self._born_at) > PATIENCE
        ]
        if not late:
            return
        short = self._head.lacks_processors(self._ray_options)
        waiting = [one for one in late if not one[1].squeezed]
        ours = sum(seat.worker is not None and not seat.squeezed for seat in self._seats)
        others = sum(one.processors() for one in list(_drivers.values()) if one is not self)
        if short and self._head.may_have_processors(self._ray_options, ours, others):
            short = any(now - seat.since > SLOW_START for _, seat in waiting)
        if short and waiting and (others or any(one.born for one in self._seats)):
            log.warning(
                "%sthe Ray cluster has no room for %s (%s): started with num_cpus=0, sharing "
                "processors with the others until there is room",
                self._options.origin.prefix,
                _named([worker for worker, _ in waiting]),
                self._head.ask_for(self._ray_options),
            )
            for _, seat in waiting:
                self._end(seat.worker)
                self._start(seat, seat.setup, squeezed=True)
                seat.standby_failures = 0
                self._stand_by(seat)
                self._pass_on(seat, [order for _, order in seat.asked])
            return
        late = waiting or late
        since = min(seat.since for _, seat in late)
        soon = short and waiting and not self._said_at
        if soon or now - max(since, self._said_at) > SAY_AGAIN:
            self._said_at = now
            log.warning(
                "%s%s waiting for a start in the Ray cluster, for %.0f s now: %s",
                self._options.origin.prefix,
                _named([worker for worker, _ in late], "is", "are"),
                now - since,
                self._head.ask_for({**self._ray_options, **({} if waiting else {"num_cpus": 0})}),
            )

    def processors(self) -> float:
        """How many its actors have. Any thread may ask: what it misses counts at the next time."""
        each = float(self._ray_options.get("num_cpus", 1))
        have = (one.worker is not None and one.born and not one.squeezed for one in self._seats)
        return each * sum(have)

    def _stand_by(self, seat: _Seat) -> None:
        """Let another actor wait for a processor."""
        seat.standby_due = None
        seat.standby = self._new_actor()
        seat.standby_look = Call(seat.standby.look.remote(), self.wake)

    def _dismiss_standby(self, seat: _Seat) -> None:
        seat.standby_due = None
        if seat.standby is not None:
            self._end(seat.standby)
            seat.standby = seat.standby_look = None

    def _standby_failed(self, worker: int, error: BaseException) -> None:
        """Its node is lost, for example. If Ray refuses every one, it does so at once: without a
        pause, actors would be made as fast as they fail."""
        seat = self._seats[worker]
        self._dismiss_standby(seat)
        seat.standby_failures += 1
        given_up = seat.standby_failures >= STANDBY_TRIES
        if not given_up:
            seat.standby_due = self.clock() + self.limits.pause(seat.standby_failures)
        if given_up or seat.standby_failures == 1:
            log.warning(
                "%sthe actor that waited for a processor for worker %d has failed%s. %s. Ray "
                "says: %s",
                self._options.origin.prefix,
                worker,
                f", {STANDBY_TRIES} times in a row" if given_up else "",
                "The worker goes on without one of its own, and no other actor waits for one"
                if given_up
                else "Another is started after a pause",
                describe_death(error).reason,
            )

    def _move(self, worker: int, generation: int) -> None:
        """There is a processor for a worker that had none: the actor that waited for it takes over,
        and makes again what is not answered."""
        seat = self._seats[worker]
        look = seat.standby_look
        if look is None or seat.worker is None or seat.generation != generation:
            return
        if look.error is not None:
            self._standby_failed(worker, look.error)
            return
        while self.hear(worker):
            pass
        if seat.worker is None or seat.generation != generation:
            return  # it has died: its replacement takes the place
        prefix = self._options.origin.prefix
        if self._options.iterable and seat.count:
            # Its stream would have to be drawn again, from the start.
            self._dismiss_standby(seat)
            log.warning(
                "%sthe Ray cluster has room for worker %d now. It stays where it is, because it "
                "has begun a stream; %s",
                prefix,
                worker,
                "with persistent_workers=True it stays in later epochs too"
                if self._options.persistent
                else "workers of later epochs will use that room",
            )
            return
        log.warning("%sthe Ray cluster has room for worker %d now: it moves there", prefix, worker)
        self._end(seat.worker)
        seat.moves = True
        self._exit(worker, None, "idle", kind="killed", renewed=True)

    # -- what they say --------------------------------------------------------------------

    def _take(self, worker: int, message: Message) -> None:
        seat = self._seats[worker]
        seat.active = self.clock()
        kind, *content = message
        if kind == "batch":
            if self._supervisor.machine.seats[worker].state is SeatState.DUMPING:
                seat.stalled, seat.stack = False, None  # it was slow, and has not been ended yet
                self._supervisor.tell(ev.WorkerWentOn(worker, seat.generation))
            number, batch, mark, state, random = content
            self._answered(seat, random)
            seat.largest = max(seat.largest, batch.nbytes)
            self._answers.batch(worker, number, batch, mark, state)
            return
        if kind == GONE:
            self._gone(worker, seat.generation, "exited")
            return
        if kind == READY:
            seat.node, seat.pid = content.pop()
        elif kind == SURVIVED:
            seat.asked.popleft()
        elif isinstance(kind, bytes):  # an answer
            self._answered(seat, content.pop())
        self._heard(worker, kind, *content)

    def _answered(self, seat: _Seat, random: bytes | None) -> None:
        """Keep the random state that came with an answer, or that it has stayed the same."""
        seat.asked.popleft()
        seat.careful = max(0, seat.careful - 1)
        seat.count += 1
        states = seat.notes
        if random is not None:
            states.free_slot()[: len(random)] = memoryview(random)
            states.commit(seat.count, len(random))
        else:
            states.still(seat.count)

    # -- deaths ---------------------------------------------------------------------------

    def _failed(self, worker: int, call: Call) -> None:
        """A call has failed: the actor cannot be used any more."""
        seat, error = self._seats[worker], call.error
        if not isinstance(error, RayError):
            raise error or AssertionError  # a mistake of ours: the user's errors are answers
        self._end(seat.worker)  # if only an object was lost, or its node cannot be reached
        death = describe_death(error)
        step = call.step
        if (seat.calls and seat.ready) or death.cause == "ray-object-lost":
            step = "unknown"  # it was in one of the calls after that, with this result on its way
        self._exit(worker, death, step, call.at, **death.facts)

    def _gone(self, worker: int, generation: int, kind: str) -> None:
        """It has been told to end, and is not waited for."""
        seat = self._seats[worker]
        if seat.worker is None or seat.generation != generation:
            return
        while self.hear(worker):
            pass
        if seat.worker is not None:
            self._end(seat.worker)
            self._exit(worker, None, "unknown", kind="stalled" if seat.stalled else kind)

    def _exit(
        self, worker: int, death: Death | None, step: str, at: float = 0.0, **facts: Any
    ) -> None:
        """`step`: what it was doing, if it was not looked at meanwhile. `at`: when Ray said so."""
        seat = self._seats[worker]
        seat.worker = None
        seat.calls.clear()
        seat.inbox.clear()
        head = seat.asked[0][0] if seat.asked else None
        task = head.task if isinstance(head, ev.IsolationTest) else head
        number = task.number if isinstance(task, ev.Task) else None
        # An actor that died has gone on since it was looked at; one that stalled has not.
        fresh = seat.note.task == number and (seat.stalled or facts.get("memory"))
        note = seat.note if fresh else None
        seconds = None
        if seat.announced is not None and seat.careful and step == "fetch":
            note, began = seat.announced.last
            if note is not None and note.task == number:
                seconds = at - began
            else:
                step, note = "idle", None  # it has begun nothing, or pauses
        if death is not None and death.cause == "ray-actor-died" and seconds is not None:
            facts = {**facts, "nursery_killed": False, "unexplained": True}
        if number is None and step not in ("start-up", "replay"):
            step = "idle"
        stack = ""
        if seat.stack is not None and seat.stack.done and seat.stack.error is None:
            stack = tidy(seat.stack.result)
        exit = ev.Exit(
            self.clock(),
            task=number,
            position=None if note is None else note.position,
            step=step if note is None else note.step,
            seconds=seconds,
            stack=stack,
            no_way=self._no_way(seat),
            **facts,
        )
        evidence = Evidence(
            start_method="ray",
            pid=seat.pid,
            signal=facts.get("signal"),
            stalled=seat.stalled,
            sent_by_us=seat.stalled,
            node=seat.node,
            actor=seat.actor_id,
            silent=self.clock() - max(seat.note.since, seat.active) if seat.stalled else None,
            said_by_ray="" if death is None else death.reason,
            ray_cause="" if death is None else death.cause,
        )
        self._supervisor.tell(ev.WorkerExited(worker, seat.generation, exit, evidence))

    # -- facts ----------------------------------------------------------------------------

    def progress(self, worker: int) -> Progress:
        seat = self._seats[worker]
        # To wait for room in the cluster is no stall, however long that takes.
        return Progress(seat.note, 0 if seat.born else int(self.clock() * 1000), seat.active)

    def place(self, worker: int) -> str:
        return self._seats[worker].place()

    def tally(self) -> Tally:
        return Tally()  # actors do not count

    def handle(self, worker: int) -> Handle:
        seat = self._seats[worker]
        return Handle(seat.pid, None if seat.worker is not None else 0)

    # -- the end --------------------------------------------------------------------------

    def stop(self, deadline: float) -> None:
        if self._head.lost or self._head.left:
            return
        for seat in self._seats:
            self._dismiss_standby(seat)
            if seat.worker is not None:
                self._end(seat.worker)

    def close(self) -> None:
        _drivers.pop(id(self), None)
        self._head.close()
        self._status.close()
        for seat in self._seats:
            seat.worker = None
            seat.calls.clear()
            seat.inbox.clear()


def _answered(call: Call | None) -> bool:
    return call is not None and call.done and call.error is None


def _named(workers: list[int], *verbs: str) -> str:
    """As the subject of a sentence; `verbs` are those for one and for more."""
    several = len(workers) > 1
    name = f"worker {workers[0]}"
    if several:
        shown = ", ".join(map(str, workers[:8]))
        name = f"{len(workers)} workers ({shown}{', …' if len(workers) > 8 else ''})"
    return f"{name} {verbs[several]}" if verbs else name
