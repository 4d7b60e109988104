"""The driver of the machine: processes, sockets, memory and time.

One pool belongs to one iterator. Two threads may work on it, one at a time, under one lock: the
consumer's, inside ``next()``, and the watch, which sleeps until a worker dies or a deadline passes
and otherwise does nothing. So a death during a long training step is dealt with at once, and
nothing is ever raised in the user's code outside ``next()``.

Every wait here has a deadline. Whatever must not be forgotten (a process, a descriptor, a mapping)
is owned by the pool and let go in `close`, which takes two seconds at most and is called by the
iterator's end, by its garbage collection, at interpreter exit, or by the user. A child forked from
this process inherits a pool that is not its own: everything here does nothing there.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import io
import logging
import os
import pickle
import select
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.autopsy import thread_notes
from holdfast.autopsy.blackbox import BlackBoxes, Note
from holdfast.autopsy.coroner import INTERVAL, Coroner
from holdfast.autopsy.incident import Incident, describe_end, describe_status
from holdfast.autopsy.logbook import Logbook
from holdfast.autopsy.stack import tidy
from holdfast.engine import interrupts
from holdfast.engine import machine as m
from holdfast.engine.careful import DROPPED
from holdfast.engine.channel import Channel, pair
from holdfast.engine.exceptions import Failure
from holdfast.engine.lifeline import Lifeline
from holdfast.engine.nursery import Born, Died, NotBorn, Nursery, Payload, Report, Signalled
from holdfast.engine.stats import Stats
from holdfast.engine.warden import Warden
from holdfast.engine.worker import (
    BATCH,
    ENDED,
    ERROR,
    HEAD,
    MEMORY,
    NOTHING_LEFT,
    POINT,
    RAISED,
    READY,
    REFUSED,
    REPORT,
    RESUMED,
    RETIRED,
    SIZES,
    SURVIVED,
    Blueprint,
    Equipment,
    Setup,
    run,
)
from holdfast.errors import LoaderClosed
from holdfast.memory import arena as arenas
from holdfast.memory import codec, threads
from holdfast.memory.arena import Window
from holdfast.memory.growth import Point
from holdfast.samples.keys import keep, keys_of
from holdfast.samples.ledger import Account
from holdfast.samples.record import BadSample, digest_of_stack, name_of
from holdfast.samples.substitute import NOTHING, position_of, sample_of

__all__ = ["Failed", "Pool", "Refused", "Reported", "TimedOut", "WorkerHandle", "close_all"]

log = logging.getLogger("holdfast")

GRACE = 1.0  # seconds a worker has to finish what it does when the pool closes
CLOSE_WITHIN = 1.8  # seconds closing may take in all
BOOT_ALLOWANCE = 120.0  # seconds to import torch and the main module, no matter how short a sample
REMEMBERED = 100  # incidents a pool keeps for the story it may have to tell
LONGEST_WAIT = INTERVAL  # seconds between two looks of the watch, at most

_CONTENT = 1 + HEAD.size

_pools: dict[int, Pool] = {}  # all that are open, by id
_leaving: set[Pool] = set()  # pools whose watch has been told to close them
_not_ours: list[Pool] = []  # in a forked process: those of its ancestors
_ONE = (1).to_bytes(8, sys.byteorder)
_descriptors = threading.Lock()
"""Held while descriptors are closed, or made and passed on by a fork: a number that one thread has
just closed may already be another's."""
_exiting = False  # the interpreter is


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker's answer that is an error."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Reported:
    """A worker's answer, and the bad samples it met on the way."""

    result: Any  # a parcel, `Failed` or `DROPPED`
    bad: tuple[BadSample, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker could not begin: the main module or the blueprint did not load."""

    worker: int
    pid: int | None
    failure: Failure


class TimedOut(Exception):
    """Nothing arrived within the loader's `timeout`."""


Taken = m.Delivery | m.GaveUp | Refused | m._End


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a worker ended: what a sample is accused of."""

    cause: str
    signal: str | None
    exitcode: int | None
    stack: str

    def in_words(self) -> tuple[str, str, str]:
        """For a bad sample: its kind, its error and its message."""
        if self.cause in ("stalled", "unkillable"):
            return "stalled", "stalled", "made no progress"
        error = self.signal or f"exit code {self.exitcode}"
        return "killed", error, describe_end(self.signal, self.exitcode)


@dataclass(slots=True)
class _Place:
    """What the pool keeps for each worker id."""

    window: Window
    arena: int  # the arena's descriptor, for replacements
    channel: Channel | None = None
    pid: int | None = None
    exitcode: int | None = None
    busy_since: float = 0.0
    note: Note | None = None  # of its black box, when we last looked, and since when it is so
    note_since: float = 0.0
    epoch_state: bytes | None = None
    resting_state: bytes | None = None
    dataset_state: bytes | None = None
    heard: bool = False
    kill_confirmed: bool = False
    reports: tuple[BadSample, ...] = ()  # of the batch whose answer comes next


class Pool:
    """The workers of one iterator."""

    def __init__(
        self,
        blueprint: Blueprint,
        *,
        payload: Payload | None,
        machine: m.Machine,
        shared_seed: int | None,
        stall_timeout: float | None,
        on_incident: Callable[[Incident], None],
        stats: Stats,
        logbook: Logbook | None = None,
        worker_memory_limit: int | str | None = None,
    ) -> None:
        self.owner = os.getpid()
        self.machine = machine
        self.stats = stats
        self.closed = False
        self.closing = False
        self.broken: BaseException | None = None  # what closed it, if nobody wanted that
        self._midway = False  # in the middle of something that nobody can go on from
        self._sampler_error: str | None = None  # the last word of the sampler
        self.taken: Taken | None = None
        self.user: Callable[[], object] | None = None  # a weak reference to the iterator
        self.ended = False
        self.refused: Refused | None = None
        self.obituaries: deque[Incident] = deque(maxlen=REMEMBERED)
        self.account: Account | None = None  # of bad samples; None to let them raise
        self.unclaimed: list[BadSample] = []  # reported with the end of a replica
        self._blueprint = blueprint
        self._payload = payload
        self._shared_seed = shared_seed
        self._stall_timeout = stall_timeout
        self._on_incident = on_incident
        method = "fork" if payload is None else "spawn"
        self._coroner = Coroner(method, machine.workers, logbook)
        self._warden = Warden(machine.share, worker_memory_limit, machine.workers)
        self._explained: set[str] = set()
        self.lock = threading.RLock()
        self._awake_since = self._last_look = self._next_look = time.monotonic()
        # A file object, because that knows when it is closed; a number may be another's by then.
        self._bell = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")
        self.wake = self._bell.fileno()
        self._done = threading.Event()
        self._poll = select.poll()
        self._channels: dict[int, int] = {}  # descriptor -> worker
        self._places: list[_Place] = []
        with _descriptors, contextlib.ExitStack() as undo:
            undo.callback(self._bell.close)
            if payload is not None:
                undo.callback(payload.close)
            self._lifeline = Lifeline()
            undo.callback(self._lifeline.cut)
            self._boxes = BlackBoxes(machine.workers)
            undo.callback(self._boxes.close)
            for worker in range(machine.workers):
                fd = arenas.create(f"holdfast-{worker}")
                undo.callback(os.close, fd)
                self._places.append(_Place(Window(fd), fd))
            self._nursery = self._new_nursery()
            undo.pop_all()
        self._poll.register(self.wake, select.POLLIN)
        _pools[id(self)] = self
        self._watch = threading.Thread(
            target=_watch, args=(self, self.wake), name="holdfast-watch", daemon=True
        )
        try:
            self._carry_out(machine.begin())
            self._watch.start()
        except BaseException:
            self.close_now()
            raise

    # -- the consumer's side --------------------------------------------------------------

    def next(self, draw: Callable[[], Any], timeout: float) -> Taken:
        """The next delivery, in the order the machine decides.

        It stays in `taken` until the consumer has made its batch of it, however often a signal
        handler raises in between.
        """
        self.check_owner()
        machine = self.machine
        with self.lock:
            self._enter()
            try:
                if self.closing:
                    if self.ended:
                        self._midway = False
                        return m.END  # and stays so, however often it is asked
                    self._check()
                if machine.held_back:
                    self._carry_out(machine.unpacked())
                if machine.draws_due:
                    self._draw(draw)
                taken: Any = machine.take()
                if taken is None and self._hear_awaited():
                    taken = machine.take()
                if taken is None or isinstance(taken, m.GaveUp):
                    taken = self._wait(draw, timeout)
                self.taken = taken
                if isinstance(taken, m.Delivery):
                    stats = self.stats
                    stats.batches += 1
                    result = taken.result
                    if isinstance(result, codec.Parcel):
                        stats.bytes += result.nbytes
                    elif isinstance(result, Reported):
                        self._count_reported(result)
                    share = machine.share
                    if share.peak > stats.most_in_flight_bytes:
                        stats.most_in_flight_bytes = share.peak
                    if share.largest and share.largest > stats.largest_batch_bytes:
                        stats.largest_batch_bytes = share.largest
                    self._draw(draw)
                else:
                    self.ended = taken is m.END
                    if self.ended and self._sampler_error is not None:
                        self._say_that_it_is_incomplete()
            except BaseException as error:
                if self._midway:
                    self._break(error)
                raise
            self._midway = False
            return taken  # type: ignore[no-any-return]

    def _say_that_it_is_incomplete(self) -> None:
        """Instead of the first end: the sampler has failed, and had no more to give after that."""
        error, self._sampler_error = self._sampler_error, None
        self.taken = None
        self._midway = False
        raise LoaderClosed(
            f"this epoch is incomplete: the sampler ended with {error} in an earlier next(); "
            "iter(loader) begins a new one"
        )

    def unpacked(self) -> None:
        """The consumer has its batch: what it keeps is not in flight."""
        actions = self.machine.unpacked()
        if actions and not self.closing:
            with self._undivided():
                self._carry_out(actions)

    def _enter(self) -> None:
        """From here until `_midway` is False again nothing may be left half done.

        A signal handler may raise between any two instructions. While we only wait that does no
        harm; elsewhere a message or an index may be lost, and the pool must not go on as if
        nothing had been. The flag also tells when not even the ``except`` clause has run, because
        a second signal struck there.
        """
        if self._midway:
            self._break(None)
        self._midway = True

    @contextlib.contextmanager
    def _undivided(self) -> Iterator[None]:
        """The lock, and `_enter`, for all that is less often done than `next`."""
        with self.lock:
            self._enter()
            try:
                yield
            except BaseException as error:
                if self._midway:
                    self._break(error)
                raise
            self._midway = False

    def _count_reported(self, reported: Reported) -> None:
        if reported.result is DROPPED:
            self.stats.batches -= 1  # there is none
        elif isinstance(reported.result, codec.Parcel):
            self.stats.bytes += reported.result.nbytes

    def _wait(self, draw: Callable[[], Any], timeout: float) -> Taken:
        """Wait for what the consumer is to get."""
        began = now = time.monotonic()
        deadline = began + timeout if timeout > 0 else None
        while True:
            taken = self.machine.take()
            if taken is not None and not isinstance(taken, m.GaveUp):
                break
            if self.refused is not None:
                return self.refused
            if taken is not None:
                return taken
            if self._pump(None if deadline is None else deadline - now):
                if deadline is not None:
                    deadline = time.monotonic() + timeout
            elif deadline is not None and time.monotonic() >= deadline:
                self._midway = False
                raise TimedOut
            now = time.monotonic()
            self._check()
            self._draw(draw)  # a replica that ended leaves room for another task
        self.stats.waits += 1
        self.stats.wait_seconds += now - began
        return taken

    def _hear_awaited(self) -> bool:
        """Take in one message of the worker the consumer waits for, if it has sent one."""
        awaited = self.machine.awaited()
        channel = None if awaited is None else self._places[awaited].channel
        message = None if channel is None else channel.poll()
        if awaited is None or message is None:
            return False
        self._message(awaited, message)
        return True

    def resume(
        self, shared_seed: int | None, draw: Callable[[], Any], account: Account | None
    ) -> None:
        """Begin another epoch on the same workers."""
        self.check_owner()
        with self._undivided():
            self._check()
            self.taken = self._sampler_error = None
            self.ended = False
            self.account = account
            self.unclaimed.clear()
            self._shared_seed = shared_seed
            self._carry_out(self.machine.resume(shared_seed))
            self._draw(draw)

    def fill(self, draw: Callable[[], Any], account: Account | None) -> None:
        """Give the workers their first tasks."""
        with self._undivided():
            self.account = account
            self._draw(draw)

    def pid(self, worker: int, timeout: float = 30.0) -> int | None:
        """The pid of a worker, waiting until it is known."""
        deadline = time.monotonic() + timeout
        place = self._places[worker]
        while place.pid is None and self.machine.failure is None:
            if not self._learn(deadline - time.monotonic()):
                break
        return place.pid

    def exitcode(self, worker: int) -> int | None:
        self._learn(0)
        return self._places[worker].exitcode

    def _learn(self, timeout: float) -> bool:
        """Take in what has happened; whether it makes sense to ask again."""
        if self.owner != os.getpid():
            return False
        with self.lock:
            if self.closing or self._midway:  # midway: a signal handler of this thread asks
                return False
            with self._undivided():
                self._pump(timeout)
            return timeout > 0

    def signal(self, worker: int, number: int) -> None:
        self.check_owner()
        with self.lock:
            if not self.closed:
                self._coroner.sent(worker)
                self._nursery.signal(worker, self.machine.generation(worker), number)

    @property
    def usable(self) -> bool:
        """Whether another epoch can begin on these workers."""
        with self.lock:
            over = self.closing or self._midway
            return not over and self.refused is None and self.machine.failure is None

    def held_bytes(self) -> int:
        """Bytes of batches that the consumer keeps."""
        return sum(place.window.kept_bytes for place in self._places)

    def close(self) -> None:
        """End the workers and let go of everything but the batches the consumer keeps."""
        close_all([self])

    def dismiss(self) -> None:
        """Have the watch close the pool, and wait for nobody.

        Finalizers and signal handlers may call it. Closing takes its time, and a Ctrl-C that
        strikes in a finalizer is lost; in the watch's thread nothing strikes.
        """
        if self.owner != os.getpid():
            return
        if self._done.is_set():
            return
        _leaving.add(self)  # or nobody might hold it until the watch comes to it
        self.closing = True
        try:
            self._bell.write(_ONE)  # also wakes whoever waits with the lock in hand
        except (ValueError, OSError):
            pass  # it is closed already

    def wait_closed(self, deadline: float) -> None:
        """Wait until it is closed, unless that depends on this very thread."""
        here = threading.current_thread()
        if self.owner != os.getpid() or self.lock._is_owned() or here in _watches:  # type: ignore[attr-defined]
            return
        if self._watch.is_alive():
            self._done.wait(max(0.0, deadline - time.monotonic()))

    def close_now(self) -> None:
        """The closing itself, in the watch's thread."""
        with self.lock:
            self.closing = True
            try:
                self._send_all_away()
                self._wait_for_all(time.monotonic() + CLOSE_WITHIN)
            finally:
                self._let_go()

    def _let_go(self) -> None:
        """Of everything, even if one of them makes trouble."""
        with contextlib.ExitStack() as ends:
            ends.callback(self._done.set)
            ends.callback(_leaving.discard, self)
            ends.enter_context(_descriptors)
            ends.callback(self._bell.close)
            if self._payload is not None:
                ends.callback(self._payload.close)
            ends.callback(self._boxes.close)
            for place in self._places:
                ends.callback(os.close, place.arena)
                ends.callback(place.window.close)
            ends.callback(self._lifeline.cut)
            ends.callback(self._nursery.close)

    def _send_all_away(self) -> None:
        """Tell everybody; wait for nobody."""
        self.closed = True
        self.machine.stop()
        _pools.pop(id(self), None)
        with _descriptors:
            for place in self._places:
                if place.channel is not None:
                    place.channel.close()  # idle workers see the end, sending ones a broken pipe
        if self._nursery.closed:
            return
        if self._payload is not None and all(place.pid is None for place in self._places):
            self._nursery.kill()  # still importing torch; there is nobody to be let finish
        else:
            self._nursery.stop(GRACE)

    def disown(self) -> None:
        """In a process forked from this one: let go of descriptors that are not ours to hold."""
        self._lifeline.let_go()
        for place in self._places:
            if place.channel is not None:
                place.channel.disown()
        if hasattr(self, "_nursery"):
            self._nursery.control.close()

    # -- watching -------------------------------------------------------------------------

    def look(self) -> tuple[float, tuple[int, ...]] | None:
        """One look of the watch: deal with what has happened. Seconds until the next look, and
        the descriptors that call for one earlier; None when the pool is to be closed."""
        with self._undivided():
            if self.closing:
                return None
            self._pump(0)
            return self._interval(), self._watched()

    def forsaken(self) -> bool:
        """Whether nobody can use this pool any more.

        The iterator's finalizer closes it then; but an interrupt that strikes just as Python calls
        the finalizer is raised in there, and the call is lost.
        """
        return self.user is not None and self.user() is None

    def _watched(self) -> tuple[int, ...]:
        """The descriptors whose readiness wakes the watch."""
        nursery = self._nursery
        if nursery.closed:
            return ()
        always = (nursery.control.fileno(), nursery.pidfd)
        # A batch that arrives says how large they are: those that wait for that can be handed out.
        return (*always, *self._channels) if self.machine.held_back else always

    def _interval(self) -> float:
        interval = self._longest_interval()
        wanted = self.machine.deadline()
        if wanted is not None:
            interval = min(interval, max(0.01, wanted - time.monotonic()))
        return interval

    def _longest_interval(self) -> float:
        """The watch looks at least this often."""
        longest = min(LONGEST_WAIT, self._warden.interval())
        if self._stall_timeout is None:
            return longest
        return min(longest, max(0.05, self._stall_timeout / 10))

    def check_owner(self) -> None:
        if os.getpid() != self.owner:
            raise LoaderClosed(
                f"this iterator belongs to process {self.owner}, not to its child {os.getpid()}; "
                "iter(loader) makes one that is the child's own"
            )

    def _check(self) -> None:
        if self.closing:
            if _exiting and threading.current_thread() is not threading.main_thread():
                # Ends a daemon thread without a word (only if it is exactly this type).
                self._midway = False
                raise SystemExit
            self._midway = False
            how = "closed or interrupted"
            if self.broken is not None:
                how = f"closed because of {self.broken!r} in an earlier next() or between two"
            raise LoaderClosed(
                f"this iterator was {how}; iter(loader) makes a new one"
            ) from self.broken

    def _draw(self, draw: Callable[[], Any]) -> None:
        while self.machine.draws_due > 0:
            try:
                index = draw()
            except StopIteration:
                self.machine.drained()
            except BaseException as error:
                self._sampler_error = repr(error)
                if not interrupts.struck(error):  # else the index may be lost
                    self._midway = False
                raise
            else:
                self._sampler_error = None
                index = keep(index)
                keys = keys_of(index, self._blueprint.auto_collation)
                brief = None
                if self.account is not None:
                    brief = self.account.brief(self.machine.next_number, keys)
                self._carry_out(self.machine.draw(index, keys, brief))

    def _pump(self, timeout: float | None) -> bool:
        """Wait for something to happen and deal with it; whether a worker was heard."""
        if self._hear_awaited():
            return True
        limit = self._interval()
        wait = limit if timeout is None else min(limit, max(0.0, timeout))
        self._midway = False
        events = self._poll.poll(wait * 1000)
        self._midway = True
        heard = False
        for fd, mask in events:
            if self.closing:  # by a signal handler or the garbage collector, in this thread
                return heard
            heard |= self._attend(fd, mask)
        self._mind_the_time()
        return heard

    def _break(self, error: BaseException | None) -> None:
        """Something struck in the middle of something: nobody can go on from there."""
        if not self.closing:
            self.broken = error
        self.dismiss()
        self._midway = False

    def _attend(self, fd: int, mask: int) -> bool:
        """One descriptor is ready."""
        if fd == self.wake:
            return False
        worker = self._channels.get(fd)
        if worker is None:
            self._hear_nursery()
            return False
        channel = self._places[worker].channel
        if channel is None or channel.fileno() != fd:
            return False  # replaced by what we dealt with a moment ago
        if mask & select.POLLOUT:
            channel.flush()
            if not channel.pending:
                self._poll.modify(fd, select.POLLIN)
        if not mask & ~select.POLLOUT:
            return False
        heard = self._hear(worker, channel)
        if not channel.open and self._places[worker].channel is channel:
            self._drop_channel(worker)  # its death is reported by the nursery
        return heard

    def _hear(self, worker: int, channel: Channel) -> bool:
        """Take in what a worker has sent."""
        heard = False
        while (message := channel.poll()) is not None:
            heard = True
            self._message(worker, message)
        return heard

    def _message(self, worker: int, message: bytes) -> None:
        place, machine = self._places[worker], self.machine
        generation = machine.generation(worker)
        place.busy_since = time.monotonic()
        place.heard = True
        kind = message[:1]
        event: m.Event
        if kind == READY:
            event = m.WorkerReady(worker, generation)
        elif kind == REFUSED:
            self.refused = Refused(worker, place.pid, pickle.loads(message[1:]))
            return
        elif kind == REPORT:
            place.reports = tuple(pickle.loads(message[1:]))
            return
        elif kind == RAISED:
            self._warden.raised(worker, *SIZES.unpack_from(message, 1))
            return
        elif kind == MEMORY:
            self._warden.measured(worker, Point(*POINT.unpack_from(message, 1)))
            return
        elif kind == RETIRED:
            event = m.WorkerRetired(worker, generation, place.busy_since)
        elif kind == SURVIVED:
            event = m.Survived(worker, generation)
        else:
            number, size = HEAD.unpack_from(message, 1)
            content = _CONTENT + size
            place.dataset_state = message[_CONTENT:content] or None
            reports, place.reports = place.reports, ()
            answer: Any
            if kind == BATCH:
                parcel = codec.receive(memoryview(message)[content:], place.window)
                answer = Reported(parcel, reports) if reports else parcel
                event = m.BatchReady(worker, generation, number, answer, parcel.nbytes)
            elif kind == ERROR:
                failed = Failed(pickle.loads(message[content:]))
                answer = Reported(failed, reports) if reports else failed
                event = m.BatchReady(worker, generation, number, answer)
            elif kind == NOTHING_LEFT:
                event = m.BatchReady(worker, generation, number, Reported(DROPPED, reports))
            elif kind == ENDED:
                self.unclaimed.extend(reports)
                event = m.ReplicaEnded(worker, generation, number)
            else:
                assert kind == RESUMED, kind
                place.epoch_state = message[content:]
                # That was the dataset's state before the epoch; there is none in it yet.
                place.resting_state, place.dataset_state = place.dataset_state, None
                event = m.Resumed(worker, generation)
        self._carry_out(machine.handle(event))

    # -- deaths ---------------------------------------------------------------------------

    def _hear_nursery(self) -> None:
        nursery = self._nursery
        if nursery.closed:
            return
        gone = nursery.gone()  # before the last reports are read
        reports = nursery.reports()
        for report in reports or ():
            self._report(report)
        if (reports is None or gone) and self._nursery is nursery:
            self._nursery_lost()

    def _report(self, report: Report) -> None:
        place = self._places[report.worker]
        current = report.generation == self.machine.generation(report.worker)
        if isinstance(report, Born):
            if current:
                place.pid, place.exitcode = report.pid, None
                self._coroner.born(report.worker, report.pid)
        elif isinstance(report, Signalled):
            if current and report.signal == signal.SIGKILL:
                place.kill_confirmed = True
        elif isinstance(report, NotBorn):
            if current:
                self._died(report.worker, None, report.errno)
        elif current:
            self._coroner.reaped(
                report.worker,
                cpu=report.cpu,
                cpu_limit=report.cpu_limit,
                handlers=report.handlers,
                group=report.group,
            )
            self._died(report.worker, report.status)

    def _died(self, worker: int, status: int | None, errno: int | None = None) -> None:
        """A worker is dead: hear its last words, then let the machine decide."""
        place, machine = self._places[worker], self.machine
        if not machine.alive(worker):
            return
        if place.channel is not None:
            self._hear(worker, place.channel)
        self._drop_channel(worker)
        cause, name, exitcode = describe_status(status)
        place.exitcode = exitcode
        if machine.retiring(worker) and errno is None:
            self._succeed(worker)
            return
        if machine.condemned(worker):
            cause = "stalled"
        elif errno is not None:
            cause = "start-failed"
        self._bury(worker, cause, name, exitcode, errno)

    def _succeed(self, worker: int) -> None:
        """A worker has gone because of its size: that is no incident."""
        self._coroner.left(worker)
        self.stats.recycled += 1
        generation = self.machine.generation(worker)
        actions = self.machine.handle(
            m.WorkerDied(worker, generation, m.Death(at=time.monotonic()))
        )
        self._places[worker].pid = None if actions else self._places[worker].pid
        self._carry_out(actions)

    def _bury(
        self,
        worker: int,
        cause: str,
        name: str | None,
        exitcode: int | None,
        errno: int | None = None,
    ) -> None:
        place, machine = self._places[worker], self.machine
        note = self._boxes.note(worker)
        stack = tidy(self._boxes.take_dump(worker))
        left = {"stderr": self._boxes.words(worker), "size": self._boxes.size(worker)}
        pid, ready = place.pid, machine.ready(worker)
        head = machine.head(worker)
        batch = head.number if head is not None else note.task
        sample = None
        in_flight = head is not None and note.task == head.number and note.step == "fetch"
        if in_flight and head is not None:
            sample = sample_of(head.keys, head.brief, note.position)
        with_the_nursery = cause == "killed" and name is None  # which is no sample's doing
        blamed = in_flight and not with_the_nursery
        death = m.Death(
            at=time.monotonic(),
            sample=(head.number, note.position) if blamed and head is not None else None,
            perhaps_from_outside=cause == "killed" and name is not None,
            evidence=_Ending(cause, name, exitcode, thread_notes.split(stack)[1]),
        )
        before = machine.generation(worker)
        actions = machine.handle(m.WorkerDied(worker, before, death))
        replaced = any(isinstance(one, m.Start) and one.worker == worker for one in actions)
        if machine.failure is not None:
            action = "gave up"
        elif head is not None and isinstance(head.result, m.Poisoned):
            action = "replaced; the sample is given up" if replaced else "the sample is given up"
            place.dataset_state = None  # the state before that sample is none to go on from
        elif any(isinstance(one, m.Convict) for one in actions):
            action = "replaced; the sample is left out, because it did so alone too"
        elif replaced and machine.on_trial(worker):
            action = "replaced; the sample is tried alone"
        else:
            action = "replaced, nothing lost" if replaced else "none needed"
        self.stats.restarts += replaced
        place.pid = None if replaced else place.pid
        self._carry_out(actions)  # first the replacement; it need not wait for the autopsy
        incident = Incident(
            kind=cause,
            worker_id=worker,
            pid=pid,
            signal=name,
            exitcode=exitcode,
            batch=batch,
            sample=sample,
            position=position_of(note.position) if in_flight else None,
            step=note.step,
            stack=stack,
            action=action,
            time=time.time(),
        )
        try:
            incident = self._examine(incident, errno=errno, ready=ready, **left)
            self._on_incident(incident)
        except Exception:  # the worker is replaced already; why it died is not worth the run
            log.exception("the examination of a death failed; the run goes on")
        self.obituaries.append(incident)
        if incident.cause == "oom-killed":
            self._warden.died_of_memory(death.at)
        # Why, and what to do, once for each cause: what happens again is a line.
        known = incident.cause in self._explained
        self._explained.add(incident.cause)
        log.warning("%s", incident if known else incident.report())

    def _examine(self, incident: Incident, **known: Any) -> Incident:
        """The incident, with its cause."""
        found = self._coroner.examine(
            incident.worker_id,
            kind=incident.kind,
            signal=incident.signal,
            exitcode=incident.exitcode,
            stack=incident.stack,
            step=incident.step,
            batch=incident.batch,
            sample=incident.sample,
            **known,
        )
        sample, dataset = incident.sample, self._blueprint.dataset
        return dataclasses.replace(
            incident,
            stack=found.evidence.stack,
            cause=found.verdict.cause,
            confidence=found.verdict.confidence,
            because=found.verdict.because,
            evidence=found.evidence.to_json(),
            remedies=found.verdict.remedies,
            sample_name=None if sample is None else name_of(dataset, sample),
        )

    def _nursery_lost(self) -> None:
        """The nursery is dead, so all workers are: make another and go on."""
        self._poll.unregister(self._nursery.control)
        self._poll.unregister(self._nursery.pidfd)
        self._nursery.kill()
        self._nursery.wait(1.0)
        self._nursery.close()
        if self.machine.failure is None:
            self._nursery = self._new_nursery()
        for worker in range(self.machine.workers):
            if self.machine.alive(worker):
                self._new_arena(worker)  # its old worker may take a moment to die
                self._died(worker, None)

    def _abandon(self, worker: int) -> None:
        """A worker that does not even die: never use its memory again."""
        place = self._places[worker]
        if not place.kill_confirmed:
            self._nursery_lost()  # it is the nursery that does not answer
            return
        self._new_arena(worker)
        self._bury(worker, "unkillable", None, None)

    def _new_arena(self, worker: int) -> None:
        place = self._places[worker]
        if place.channel is not None:
            self._hear(worker, place.channel)  # what it sent lies in the old one
        self._drop_channel(worker)  # and what it may send yet is never looked for in the new one
        fd = arenas.create(f"holdfast-{worker}")
        place.window.close()
        os.close(place.arena)
        place.arena, place.window = fd, Window(fd)

    def _mind_the_time(self) -> None:
        now = time.monotonic()
        if now - self._last_look > self._longest_interval() + 1.0:
            # We were stopped ourselves (Ctrl-Z, a suspended machine): nobody else made progress.
            self._awake_since = now
        self._last_look = now
        self._coroner.look(now)
        self._mind_the_memory(now)
        wanted = self.machine.deadline()
        if wanted is not None and now >= wanted:
            self._carry_out(self.machine.handle(m.Ticked(now)))
        if self._stall_timeout is None or now < self._next_look:
            return
        self._next_look = now + self._longest_interval()
        for worker, place in enumerate(self._places):
            if not self.machine.busy(worker):
                continue
            if place.heard:
                place.heard = False  # it has spoken since the last look
                continue
            note = self._boxes.note(worker)
            if note != place.note:
                place.note, place.note_since = note, now
            silent_since = max(place.busy_since, place.note_since, self._awake_since)
            patience = self.machine.patience(worker, self._stall_timeout)
            if note.step == "boot":
                patience = max(patience, BOOT_ALLOWANCE)
            if now - silent_since > patience:
                event = m.WorkerStalled(worker, self.machine.generation(worker), now)
                self._carry_out(self.machine.handle(event))

    def _mind_the_memory(self, now: float) -> None:
        fattest = self._warden.look(now, self._coroner.pids)
        if fattest is not None:
            channel = self._places[fattest].channel
            if channel is not None and self.machine.ready(fattest):
                self._post(channel, pickle.dumps(("retire", 0, None, ()), 5))
        self._carry_out(self.machine.relieved())

    # -- actions --------------------------------------------------------------------------

    def _carry_out(self, actions: list[m.Action]) -> None:
        for action in actions:
            if isinstance(action, m.Dispatch):
                self._dispatch(action)
            elif isinstance(action, m.Start):
                self._start(action)
            elif isinstance(action, m.Convict):
                self._convict(action)
            elif isinstance(action, m.Separate):
                action.task.brief = (action.task.brief or NOTHING)._replace(apart=True)
            elif action.generation != self.machine.generation(action.worker):
                continue  # an action before this one has replaced it already
            elif isinstance(action, m.Abandon):
                self._abandon(action.worker)
            else:
                if isinstance(action, m.Dump):
                    self._coroner.before_kill(action.worker)
                number = signal.SIGABRT if isinstance(action, m.Dump) else signal.SIGKILL
                self._places[action.worker].kill_confirmed = False
                self._nursery.signal(action.worker, action.generation, number)

    def _dispatch(self, action: m.Dispatch) -> None:
        place, item = self._places[action.worker], action.item
        channel = place.channel
        if channel is None:
            return  # it died a moment ago; its replacement will be asked
        released = place.window.take_released()
        if isinstance(item, m.Task):
            if self.account is not None:
                item.brief = self.account.refreshed(item.keys, item.brief)
            if item.brief is None:
                message = pickle.dumps(("task", item.number, item.index, released), 5)
            else:
                content = (item.index, item.brief)
                message = pickle.dumps(("briefed", item.number, content, released), 5)
        elif isinstance(item, m.Trial):
            task = item.task
            suspect = (task.index, task.brief, item.sample)
            message = pickle.dumps(("trial", task.number, suspect, released), 5)
        else:
            message = pickle.dumps(("resume", 0, item.seed, released), 5)
        place.busy_since = time.monotonic()
        self._post(channel, message)

    def _post(self, channel: Channel, message: bytes) -> None:
        channel.post(message)
        if channel.pending:
            self._poll.modify(channel.fileno(), select.POLLIN | select.POLLOUT)

    def _convict(self, action: m.Convict) -> None:
        """A sample ends its workers, alone too: the batch goes on without it."""
        assert self.account is not None
        task, last = action.task, action.deaths[-1].evidence
        kind, error, words = last.in_words()
        bad = BadSample(
            index=None,
            kind=kind,
            error=error,
            message=words,
            traceback=last.stack,
            digest=digest_of_stack(last.stack),
            worker_id=action.worker,
            attempts=len(action.deaths),
        )
        task.brief = self.account.convict(task.keys, task.brief, action.sample, task.number, bad)

    def _start(self, action: m.Start) -> None:
        worker, place = action.worker, self._places[action.worker]
        place.reports = ()  # of an answer that never came
        self._warden.started(worker)
        self._boxes.clear(worker)
        random_state = None
        if action.answered:
            random_state = self._boxes.random_state(worker, action.answered)
            if random_state is None:  # the last item was given up: from the state before it
                random_state = self._boxes.random_state(worker, action.answered - 1)
        setup = Setup(
            worker=worker,
            workers=self.machine.workers,
            generation=action.generation,
            shared_seed=self._shared_seed,
            held=tuple(place.window.handover()),
            answered=action.answered,
            passed=action.passed,
            replica=action.replica,
            exhausted=action.exhausted,
            random_state=random_state,
            epoch_state=place.epoch_state,
            resting_state=place.resting_state,
            dataset_state=place.dataset_state,
            allowance=self._warden.allowance,
        )
        channel, theirs = pair()
        place.channel = channel
        place.kill_confirmed = False
        place.busy_since = time.monotonic()
        self._channels[channel.fileno()] = worker
        self._poll.register(channel.fileno(), select.POLLIN)
        self._nursery.start(
            worker, action.generation, pickle.dumps(setup, 5), theirs.fileno(), place.arena
        )
        theirs.close()

    def _drop_channel(self, worker: int) -> None:
        channel = self._places[worker].channel
        if channel is None:
            return
        self._channels.pop(channel.fileno(), None)
        self._poll.unregister(channel.fileno())
        channel.close()
        self._places[worker].channel = None

    # -- the nursery ----------------------------------------------------------------------

    def _new_nursery(self) -> Nursery:
        if self._payload is not None:
            nursery = Nursery.spawn(self._payload, self._boxes.fd, self._lifeline.reading)
        else:
            nursery = Nursery.fork(self._nurse, self._boxes.fd, self._lifeline.reading)
        self._poll.register(nursery.control, select.POLLIN)
        self._poll.register(nursery.pidfd, select.POLLIN)
        return nursery

    def _nurse(self, nurse: Any) -> None:
        """In the forked nursery."""
        for pool in {self, *_not_ours}:
            pool.disown()
        threads.limit()
        blueprint, boxes, line = self._blueprint, self._boxes.fd, self._lifeline.reading

        def deliver(setup: bytes, channel: int, arena: int, parent: int) -> None:
            run(
                pickle.loads(setup),
                Equipment(channel, arena, boxes, parent, line),
                lambda: blueprint,
            )

        nurse.serve(deliver)

    def _wait_for_all(self, deadline: float) -> None:
        """Wait for the nursery's end, and for what it has to say of the workers' ends."""
        if self._nursery.closed:
            return
        nursery = self._nursery
        poll = select.poll()
        poll.register(nursery.control, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if not poll.poll(left * 1000):
                continue
            reports = nursery.reports()
            if reports is None:
                break
            for report in reports:
                place = self._places[report.worker]
                if report.generation != self.machine.generation(report.worker):
                    continue
                if isinstance(report, Born):
                    place.pid = report.pid
                elif isinstance(report, Died):
                    place.exitcode = describe_status(report.status)[2]
        if not nursery.wait(max(0.0, deadline - time.monotonic())):
            nursery.kill()
            nursery.wait(0.5)
        for place in self._places:
            if place.exitcode is None:
                place.exitcode = -signal.SIGKILL


def close_all(pools: Iterable[Pool]) -> None:
    """Close several pools within one deadline. Safe to call twice, from anywhere."""
    pools = list(pools)
    for pool in pools:
        pool.dismiss()
    deadline = time.monotonic() + CLOSE_WITHIN + 0.5
    for pool in pools:
        pool.wait_closed(deadline)


@atexit.register
def _close_at_exit() -> None:
    global _exiting
    _exiting = True
    close_all({*list(_pools.values()), *list(_leaving)})


def _in_child() -> None:
    global _descriptors
    _descriptors = threading.Lock()  # whoever held it is not here
    _not_ours.extend((*_pools.values(), *_leaving))  # beside those that were not our parent's
    _pools.clear()
    _leaving.clear()


os.register_at_fork(after_in_child=_in_child)


_watches: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _watch(pool: Pool, wake: int) -> None:
    """The watch: it holds no lock while it waits, and the pool only until nobody uses it."""
    _watches.add(threading.current_thread())
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    watched: tuple[int, ...] = ()
    while True:
        try:
            found = pool.look()
            if found is None or pool.forsaken():
                break
            wait, now_watched = found
            if now_watched != watched:
                for fd in watched:
                    poll.unregister(fd)
                watched = now_watched
                for fd in watched:
                    poll.register(fd, select.POLLIN)
        except Exception:
            log.exception("the watch over the workers failed; the loader is closed")
            break
        poll.poll(wait * 1000)
    pool.close_now()


class WorkerHandle:
    """What torch's iterator shows in ``_workers``: the process in a worker's place."""

    daemon = True

    def __init__(self, pool: Pool, worker: int) -> None:
        self._pool = pool
        self._worker = worker
        self.name = f"Process-{worker + 1}"

    @property
    def pid(self) -> int | None:
        return self._pool.pid(self._worker)

    @property
    def exitcode(self) -> int | None:
        return self._pool.exitcode(self._worker)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive():
            left = 0.05 if deadline is None else min(0.05, deadline - time.monotonic())
            if left <= 0:
                return
            time.sleep(left)

    def terminate(self) -> None:
        self._pool.signal(self._worker, signal.SIGKILL)

    kill = terminate

    def __repr__(self) -> str:
        return f"<holdfast worker {self._worker} pid={self.pid} exitcode={self.exitcode}>"
