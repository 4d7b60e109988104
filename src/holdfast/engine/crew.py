"""Worker processes: what has happened to them becomes events, actions become system calls.

It is the driver of worker processes: see `driver`. What is read of a dead worker is facts, not
decisions: which sample is to blame, whether a kill may have come from outside and whether a death
counts is for the machine to say.

Everything here runs under the pool's lock, in the consumer's thread or in the watch's. It waits for
the workers' end when the pool is closed; else never long, and `pool` says where. What the consumer
sees of it is in `pool` too.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import select
import signal
import time
from collections import deque
from collections.abc import Collection
from functools import partial
from typing import Any

from holdfast.autopsy.coroner import INTERVAL, Coroner
from holdfast.autopsy.incident import describe_end, describe_status
from holdfast.autopsy.logbook import Logbook
from holdfast.engine import leak_probe, registry
from holdfast.engine import vocabulary as v
from holdfast.engine.answers import Failed, Refused, Reported
from holdfast.engine.beside import PAYS, Beside, Tried, outcome
from holdfast.engine.careful import DROPPED
from holdfast.engine.channel import PACKET, Channel
from holdfast.engine.continuation import (
    ATTEMPTS,
    REST,
    STATE,
    Course,
    Finding,
    NoWay,
    Plan,
    Way,
    choose,
    no_way,
)
from holdfast.engine.driver import Urgent
from holdfast.engine.epoch import Epoch
from holdfast.engine.holdings import Holdings, Place
from holdfast.engine.machine import Machine
from holdfast.engine.nurse import Born, Died, NotBorn, Report, Signalled
from holdfast.engine.obituaries import Obituaries
from holdfast.engine.protocol import (
    BATCH,
    CONTENT,
    ENDED,
    ERROR,
    GROWN,
    HEAD,
    MEMORY,
    NOTHING_LEFT,
    POINT,
    RAISED,
    READY,
    REFUSED,
    REMARK,
    REPORT,
    RESUMED,
    RETIRED,
    SIZES,
    SURVIVED,
    TAKEN_UP,
    Order,
    Probe,
    Setup,
    order,
)
from holdfast.engine.relief import Relief
from holdfast.engine.silence import Silence
from holdfast.engine.stats import Stats
from holdfast.engine.supervisor import Supervisor
from holdfast.engine.take_up import STATE_FAILED
from holdfast.engine.warden import TRACED, Search, Warden
from holdfast.memory import codec
from holdfast.memory.budget import Share
from holdfast.memory.growth import Point, Said
from holdfast.samples.substitute import Brief

__all__ = ["Crew"]

log = logging.getLogger("holdfast")

LONGEST_WAIT = INTERVAL  # seconds between two looks of the watch, at most
LAST_WORDS = 0.5  # seconds a nursery that is to be ended has to report deaths that are known of


class Crew:
    """The workers of one pool."""

    def __init__(
        self,
        machine: Machine,
        holdings: Holdings,
        epoch: Epoch,
        share: Share,
        *,
        silence: Silence,
        coroner: Coroner,
        warden: Warden,
        obituaries: Obituaries,
        stats: Stats,
        said: Said,
        logbook: Logbook | None = None,
    ) -> None:
        self.machine = machine
        self.supervisor = Supervisor(machine, share, epoch, self)
        self._tell = self.supervisor.tell
        self._hints = self.supervisor.hints
        self.refused: Refused | None = None
        self._coroner = coroner
        self._holdings = holdings
        self._places = holdings.places
        self._silence = silence
        self._warden = warden
        self.relief = Relief(machine, holdings, warden, logbook)
        self._obituaries = obituaries
        self._stats = stats
        self._said = said
        self._logbook = logbook
        for place in holdings.places:
            place.course.seed = epoch.shared_seed
        self._beside = Beside(holdings, machine.workers, silence.timeout)
        self._reports: deque[Report] = deque()  # of the nursery, read and not taken in yet
        self._orders: dict[int, tuple[Channel, list[tuple[Order, int, Any]]]] = {}  # not sent yet
        self._told_of_renewal = False
        # The last that workers of a map-style dataset were sent, for a leak probe.
        self._sent: deque[bytes] = deque(maxlen=leak_probe.ROUNDS * TRACED)

    # -- what the watch has to know -------------------------------------------------------

    def watched(self) -> dict[int, int]:
        """The descriptors whose readiness wakes the watch, and what they have to be ready for."""
        nursery = self._holdings.nursery
        if nursery.closed:
            return {}
        # The rest of a large order goes out when there is room for it, whatever the consumer does.
        watched = dict.fromkeys(self._holdings.take_backlog(), select.POLLOUT)
        if self.machine.held_back:
            # A batch that arrives says how large they are: what waits for that can be handed out.
            for fd in self._holdings.channels:
                watched[fd] = watched.get(fd, 0) | select.POLLIN
        watched[nursery.process.fileno()] = select.POLLIN
        orders = select.POLLOUT if nursery.pending else 0
        watched[nursery.control.fileno()] = select.POLLIN | orders
        return watched

    def interval(self) -> float:
        """Seconds until the next look, at most."""
        interval = self._longest_interval()
        wanted = self.machine.deadline()
        if wanted is not None:
            interval = min(interval, max(0.01, wanted - time.monotonic()))
        return interval

    def _longest_interval(self) -> float:
        """The watch looks at least this often."""
        longest = min(LONGEST_WAIT, self._warden.interval())
        return self._silence.interval(longest)

    # -- hearing --------------------------------------------------------------------------

    def hear_awaited(self) -> bool:
        """Take in one message of the worker the consumer waits for, if it has sent one."""
        awaited = self.machine.awaited()
        channel = None if awaited is None else self._places[awaited].channel
        message = None if channel is None else channel.poll()
        if awaited is None or message is None:
            return False
        self._message(awaited, message)
        return True

    def attend(self, fd: int, mask: int) -> bool:
        """One descriptor is ready."""
        worker = self._holdings.channels.get(fd)
        if worker is None:
            self._attend_nursery(fd, mask)
            return False
        if self._beside.owns(worker):
            self._beside.hear(worker)
            return False
        channel = self._places[worker].channel
        if channel is None or channel.fileno() != fd:
            return False  # replaced by what we dealt with a moment ago
        if mask & select.POLLOUT:
            self._holdings.flush(channel)
        if not mask & ~select.POLLOUT:
            return False
        heard = self._hear(worker, channel)
        if not channel.open and self._places[worker].channel is channel:
            self._holdings.drop_channel(worker)  # its death is reported by the nursery
        return heard

    def _hear(self, worker: int, channel: Channel) -> bool:
        """Take in what a worker has sent."""
        heard = False
        while (message := channel.poll()) is not None:
            heard = True
            self._message(worker, message)
        return heard

    def _message(self, worker: int, message: bytes) -> None:
        place = self._places[worker]
        generation = self.machine.seats[worker].generation
        place.pulse.busy_since = time.monotonic()
        place.pulse.spoke = True
        kind = message[:1]
        event: v.Event
        if kind == BATCH:  # first, because nearly all are
            number, content = self._open(place, message)
            parcel = codec.receive(memoryview(message)[content:], place.window)
            told = place.reports or place.samples is not None
            answer = self._with_reports(place, parcel) if told else parcel
            event = v.BatchReady(worker, generation, number, answer, parcel.nbytes)
            if self._hints:
                self.supervisor.drop_hint(place.epoch, number)
        elif kind == READY:
            event = v.WorkerReady(worker, generation)
            self._note_late_start(worker)
        elif kind == REFUSED:
            self.refused = Refused(worker, place.pid, pickle.loads(message[1:]))
            event = v.WorkerRefused(worker, generation)
        elif kind == REPORT:
            reports, place.samples = pickle.loads(message[1:])
            place.reports = tuple(reports)
            return
        elif kind == TAKEN_UP:
            self._taken_up(worker, pickle.loads(message[1:]))
            return
        elif kind == GROWN:
            self._grown(worker, message)
            return
        elif kind == RAISED:
            self._warden.raised(worker, *SIZES.unpack_from(message, 1))
            return
        elif kind == MEMORY:
            self._warden.measured(worker, Point(*POINT.unpack_from(message, 1)))
            return
        elif kind == REMARK:
            self._remark(worker, *pickle.loads(message[1:]))
            return
        elif kind == RETIRED:
            event = v.WorkerRetired(worker, generation, place.pulse.busy_since)
        elif kind == SURVIVED:
            event = v.Survived(worker, generation)
        else:
            event = self._answer(worker, generation, kind, message)
        self._tell(event)

    def _answer(self, worker: int, generation: int, kind: bytes, message: bytes) -> v.Event:
        """The event that an answer is which brings no batch."""
        place = self._places[worker]
        number, content = self._open(place, message)
        self.supervisor.drop_hint(place.epoch, number)
        if kind == ERROR:
            answer: Any = Failed(pickle.loads(message[content:]))
            if place.reports or place.samples is not None:
                answer = self._with_reports(place, answer)
            return v.BatchReady(worker, generation, number, answer)
        if kind == NOTHING_LEFT:
            return v.BatchReady(worker, generation, number, self._with_reports(place, DROPPED))
        if kind == ENDED:
            if place.epoch == self.machine.epoch:  # else they are of one that was broken off
                self.supervisor.epoch.unclaimed.extend(place.reports)
            place.reports, place.samples = (), None
            return v.ReplicaEnded(worker, generation, number)
        assert kind == RESUMED, kind
        begun = place.resumptions.popleft()
        place.course.resumed(message[content:], begun.seed)
        place.epoch = begun.epoch
        return v.Resumed(worker, generation)

    def _open(self, place: Place, message: bytes) -> tuple[int, int]:
        """The number of the task that is answered, and where the content begins."""
        number, size, mark = HEAD.unpack_from(message, 1)
        content: int = CONTENT + size
        if self.machine.iterable:
            place.course.received(mark, message[CONTENT:content] if size else None)
        return number, content

    def _with_reports(self, place: Place, result: Any) -> Reported:
        """The answer, and the bad samples that were reported just before it."""
        told = Reported(result, place.reports, place.samples)
        place.reports, place.samples = (), None
        return told

    def _remark(self, worker: int, about: str, text: str) -> None:
        """Something the user should know: of many workers, and epochs, one word is enough."""
        if about == STATE_FAILED:
            self._places[worker].course.state_error = text
        if self._said.first(about):
            log.warning("%sworker %d: %s", self._obituaries.origin.prefix, worker, text)
            if self._logbook is not None:
                self._logbook.event(about, text, worker=worker)

    def _note_late_start(self, worker: int) -> None:
        tries = self.machine.seats[worker].tries
        if tries and self._logbook is not None:
            times = "once" if tries == 1 else f"{tries} times"
            text = f"worker {worker} has started, after there had been no room for it {times}"
            self._logbook.event("started-late", text, worker=worker, tries=tries)

    # -- streams --------------------------------------------------------------------------

    def _taken_up(self, worker: int, finding: Finding) -> None:
        """A process has tried to take up the stream of the one before it."""
        generation, now = self.machine.generation(worker), time.monotonic()
        course = self._places[worker].course
        if finding.leaves:
            self._remark_on_the_way(worker, course, finding)
            self._tell(v.WentAstray(worker, generation, now, finding.unfit))
            return
        course.raised = 0
        place = self._places[worker]
        self._obituaries.taken_up(worker, place.pid, finding, place.gone)
        if finding.lost:
            self._tell(v.StreamLost(worker, generation, now, finding.in_words()))

    def _remark_on_the_way(self, worker: int, course: Course, finding: Finding) -> None:
        """A process has left because of an exception: that must not be lost."""
        if finding.to_be_tried_again:
            course.raised += 1
            text = (
                f"drawn again after a death, its stream raised {finding.error} where it had not "
                f"before; another process tries it, {ATTEMPTS} in all"
            )
            self._remark(worker, "stream-raised", text)
        elif finding.error is not None:
            text = (
                f"to go on from the state that the dataset gave raised {finding.error}; the stream "
                "is continued in another way, if there is one"
            )
            self._remark(worker, "stream-state-not-loaded", text)

    def _grown(self, worker: int, message: bytes) -> None:
        """A worker of an iterable dataset is too large."""
        place = self._places[worker]
        place.size, _ = SIZES.unpack_from(message, 1)
        # Not from its black box: it goes on, and writes there.
        place.random_before = message[1 + SIZES.size :] or None
        self._tell(v.WorkerGrown(worker, self.machine.generation(worker)))

    def rehearse(self, action: v.Rehearse) -> None:
        """See `Driver`."""
        place = self._places[action.worker]
        setup = self._setup(action, None, place.random_before)
        if not isinstance(setup, NoWay):
            setup = dataclasses.replace(setup, rehearsal=int(PAYS * place.size))
            if self._beside.begin(setup):
                return
        self._tell(v.Rehearsed(action.worker, action.generation, None))

    # -- processes beside the workers -----------------------------------------------------

    def _look_for_leak(self, worker: int, search: Search) -> None:
        """Have it found in a process beside the workers which lines leak."""
        orders = list(self._sent)[-leak_probe.ROUNDS * search.batches :]
        if not orders and not self.machine.iterable:
            return
        setup = Setup(
            worker=worker,
            generation=self.machine.generation(worker),
            shared_seed=self._places[worker].course.seed,
            held=(),
            answered=0,
            passed=0,
            replica=0,
            exhausted=False,
            random_state=None,
            epoch_state=None,
            allowance=dataclasses.replace(self._warden.allowance, private=search.nbytes),
            regions=self._holdings.boxes.workers,
            probe=Probe(tuple(orders), search.batches),
        )
        if self._beside.begin(setup):
            self._warden.searched()

    def _tried(self, tried: Tried) -> None:
        """A process beside the workers has ended."""
        if tried.setup.probe is None:
            finding = tried.finding
            if finding is not None and finding.leaves:
                course = self._places[tried.setup.worker].course
                self._remark_on_the_way(tried.setup.worker, course, finding)
            self._tell(outcome(tried))
        elif tried.finding is not None:
            self._warden.found(tried.setup.worker, tried.finding)

    # -- deaths ---------------------------------------------------------------------------

    def _attend_nursery(self, fd: int, mask: int) -> None:
        nursery = self._holdings.nursery
        if mask & select.POLLOUT and fd == nursery.control.fileno() and not nursery.closed:
            self._holdings.flush_nursery()
        if mask & ~select.POLLOUT:
            self._hear_nursery()

    def _mind_the_nursery(self, now: float) -> None:
        """End one that takes no orders. Its end is noticed as any other."""
        nursery = self._holdings.nursery
        if nursery.closed or nursery.given_up or not nursery.has_backlog:
            return
        self._holdings.flush_nursery()  # it may have begun to read a moment ago
        if nursery.deaf(now):
            nursery.give_up("took no orders and was ended")

    def _hear_nursery(self) -> None:
        nursery = self._holdings.nursery
        if nursery.closed:
            return
        gone = nursery.gone()  # before the last reports are read
        ended = not self._read_reports()
        self._take_in_reports()
        if (ended or gone) and self._holdings.nursery is nursery and not nursery.closed:
            self._nursery_lost()

    def _read_reports(self) -> bool:
        """Read what the nursery has reported; False if it is gone and has said everything."""
        reports = self._holdings.nursery.reports()
        self._reports.extend(reports or ())
        return reports is not None

    def _take_in_reports(self) -> None:
        """One may lead to the end of the nursery, and those behind it are still true then."""
        while self._reports:
            self._report(self._reports.popleft())

    def _report(self, report: Report) -> None:
        if self._beside.owns(report.worker):
            tried = self._beside.report(report)
            if tried is not None:
                self._tried(tried)
            return
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
            self._died(report.worker, report.status, at=report.at, grown=report.grown)

    def _died(
        self,
        worker: int,
        status: int | None,
        errno: int | None = None,
        *,
        at: float | None = None,
        **facts: Any,
    ) -> None:
        """A worker is dead: hear its last words, then tell of its end. `at` is when that was seen,
        `facts` are more of its `Exit`."""
        place = self._places[worker]
        if not place.occupied:
            return
        place.occupied = False
        if place.channel is not None:
            self._hear(worker, place.channel)
        self._holdings.drop_channel(worker)
        kind, name, place.exitcode = describe_status(status)
        if place.dumped:
            kind = "stalled"
        elif errno is not None:
            kind = "start-failed"
        self._tell_of_exit(worker, at, kind, signal=name, errno=errno, **facts)

    def _tell_of_exit(self, worker: int, at: float | None, kind: str, **facts: Any) -> None:
        place, machine = self._places[worker], self.machine
        none = no_way(machine.recovery, place.course) if machine.iterable else None
        exit, remains = self._obituaries.read(
            worker,
            place.pid,
            v.Exit(
                time.monotonic(),
                kind,
                exitcode=None if kind == "unkillable" else place.exitcode,
                no_way=none.why if none else "",
                **facts,
            ),
            at,
        )
        self._tell(v.WorkerExited(worker, machine.generation(worker), exit, remains))

    def report(self, report: v.Report, sample: Any) -> None:
        """See `Driver`. The examination comes after the replacement, which need not wait for it."""
        place = self._places[report.worker]
        place.gone = "died"
        if report.outcome is v.Outcome.SAMPLE_GIVEN_UP:
            place.course.forget_states()  # the one before that sample is none to go on from
        if report.restart is not v.Restart.NO:
            self._stats.restarts += 1
            place.pid = None
        self.supervisor.after(partial(self._obituaries.file, report, sample))

    def forget(self, worker: int, recycled: bool) -> None:
        """See `Driver`."""
        if recycled:
            search = self._warden.retired(worker)
            if search is not None:  # once its successor is ordered, which comes first
                self.supervisor.after(partial(self._look_for_leak, worker, search))
            self._stats.recycled += 1
            self._places[worker].gone = "recycled"
        self._coroner.left(worker)

    def _nursery_lost(self, how: str = "") -> None:
        """The nursery is dead, so all workers are: their replacements come from another."""
        self._take_in_reports()
        if self._holdings.nursery.closed:
            return  # one of these has led to another
        status = self._holdings.drop_nursery()
        error = self._holdings.nursery.error or ""
        how = how or self._holdings.nursery.given_up
        kind, name, exitcode = describe_status(status)
        # One that has raised may be killed by us, on its way out; so is one that we have given up.
        killed = status is not None and kind == "killed" and not (error or how)
        if status is not None and not how:
            how = describe_end(name, exitcode)
        with self.supervisor.together():  # all have been read before another is started
            for tried in self._beside.lost():
                self._tried(tried)
            for worker in self._living():
                self._spoil_arena(worker)  # its old worker may take a moment to die
                self._died(
                    worker, None, with_nursery=True, nursery_killed=killed, nursery=(how, error)
                )

    def _living(self) -> list[int]:
        """The workers whose end has not been told."""
        return [worker for worker, place in enumerate(self._places) if place.occupied]

    def renew(self) -> None:
        """Make another, as the trainer is now; workers that lived are no deaths to be counted."""
        if not self._told_of_renewal:
            self._told_of_renewal = True
            log.warning(
                "%sworkers stall on a lock that was held when they were forked, and so it is in "
                "all that come from the same process: they are forked from the trainer anew, where "
                "it is probably free by now, and the run goes on. To be safe from it, use "
                "multiprocessing_context='forkserver'.",
                self._obituaries.origin.prefix,
            )
        if self._holdings.nursery.closed:
            return  # the next start makes another in any case
        self._hear_of_deaths()
        self._holdings.drop_nursery()
        self._beside.lost()  # with the workers that asked for them
        for worker in self._living():
            self._spoil_arena(worker)  # its old worker may take a moment to die
            place = self._places[worker]
            place.occupied = False
            place.exitcode, place.gone = -signal.SIGKILL, "renewed"
            self._tell_of_exit(worker, None, "killed", renewed=True)

    def _hear_of_deaths(self) -> None:
        """A worker that died of something else before the nursery is ended has a death of its own,
        with a cause. One whose channel has ended is about to be reported dead: wait for that."""
        control = select.poll()
        control.register(self._holdings.nursery.control, select.POLLIN)
        deadline = time.monotonic() + LAST_WORDS
        while True:
            if not self._read_reports():
                self._take_in_reports()
                return
            self._take_in_reports()
            if not any(self._has_hung_up(worker) for worker in self._living()):
                return
            left = deadline - time.monotonic()
            if left <= 0 or not control.poll(left * 1000):
                return

    def _has_hung_up(self, worker: int) -> bool:
        """Whether the channel of a living worker has ended, once what it had sent is taken in."""
        channel = self._places[worker].channel
        if channel is not None:
            self._hear(worker, channel)
        return channel is None or not channel.open

    def _abandon(self, worker: int, generation: int) -> None:
        """A worker that does not even die: never use its memory again."""
        place = self._places[worker]
        if not place.occupied or generation != self.machine.generation(worker):
            return  # another that was abandoned with it has shown that the nursery is to blame
        if not place.kill_confirmed:
            self._nursery_lost("did not answer and was ended")  # it is not the worker's fault
            return
        with self.supervisor.together():
            self._spoil_arena(worker)
            place.occupied = False
            self._tell_of_exit(worker, None, "unkillable")

    def _spoil_arena(self, worker: int) -> None:
        place = self._places[worker]
        if place.channel is not None:
            self._hear(worker, place.channel)  # what it sent lies in the old one
        # And what it may send yet is never looked for in the new one.
        self._holdings.drop_channel(worker)
        place.spoiled = True

    # -- time -----------------------------------------------------------------------------

    def mind_the_time(self) -> None:
        """Do what is due, whether or not anything has happened."""
        machine, silence, now = self.machine, self._silence, time.monotonic()
        silence.awake(now, self._longest_interval())
        self._coroner.look(now)
        self._beside.look(now)
        self._mind_the_nursery(now)
        self._mind_the_memory(now)
        wanted = machine.deadline()
        if wanted is not None and now >= wanted:
            self._tell(v.Ticked(now))
        if silence.timeout is None or not silence.due(now, self._longest_interval()):
            return
        note_of = self._holdings.boxes.note
        for seat in machine.seats:
            if not seat.busy:
                continue
            channel = self._places[seat.id].channel
            parts = 0 if channel is None else channel.parts
            patience = silence.timeout * (1 << seat.stalls)  # longer after a stall at this batch
            if silence.too_long(seat.id, note_of, patience, now, parts):
                self._tell(v.WorkerStalled(seat.id, seat.generation, now))

    def _mind_the_memory(self, now: float) -> None:
        for at in self._obituaries.deaths_of_memory():
            self._warden.died_of_memory(at)
        self.relief.look(now, self._coroner.pids)
        self.supervisor.look_for_room()

    # -- orders ---------------------------------------------------------------------------

    def urge(self, worker: int, kind: Urgent, content: object = None) -> None:
        """See `Driver`."""
        if isinstance(content, v.Stay):
            self._warden.stays(worker, self._places[worker].size, content.because)
            content = content.for_good
        self.relief.wish(worker, kind, content)

    def dump(self, worker: int, generation: int) -> None:
        """See `Driver`."""
        self._places[worker].dumped = True
        self._coroner.before_kill(worker)
        self._order_signal(worker, generation, signal.SIGABRT)

    def kill(self, worker: int, generation: int) -> None:
        """See `Driver`."""
        self._order_signal(worker, generation, signal.SIGKILL)

    def _order_signal(self, worker: int, generation: int, number: int) -> None:
        self._places[worker].kill_confirmed = False
        self._holdings.nursery.signal(worker, generation, number)

    def abandon(self, worker: int, generation: int) -> None:
        """See `Driver`."""
        self.supervisor.after(partial(self._abandon, worker, generation))

    def send(self, worker: int, item: v.Item, hint: Brief | None) -> None:
        """See `Driver`."""
        place = self._places[worker]
        if place.channel is None:
            return  # it died a moment ago; its replacement will be asked
        place.tidied = False
        one: tuple[Order, int, Any]
        if isinstance(item, v.Task):
            one = ("task", item.number, item.index)
            if hint is not None:
                one = ("briefed", item.number, (item.index, hint))
        elif isinstance(item, v.Trial):
            task = item.task
            one = ("trial", task.number, (task.index, hint, item.sample, item.pause))
        else:
            place.resumptions.append(item)
            one = ("resume", 0, item.seed)
        orders = self._orders.get(worker)
        if orders is None or orders[0] is not place.channel:  # else it is for a process before it
            self._orders[worker] = place.channel, [one]
        else:
            orders[1].append(one)

    def flush(self) -> None:
        """See `Driver`. Each worker gets what it was given in one message."""
        now = time.monotonic()
        for worker, (channel, orders) in self._orders.items():
            place = self._places[worker]
            if place.channel is not channel:
                continue  # it died a moment ago; its replacement is asked
            released = place.window.take_released()
            place.pulse.busy_since = now
            if len(orders) == 1:
                message = order(*orders[0], released=released)
            else:
                message = order("several", 0, orders, released)
            self._holdings.post(channel, message)
            if not self.machine.iterable and len(message) <= PACKET:
                self._sent.append(message)
        self._orders.clear()

    def give_back(self) -> None:
        """Tell the workers at once what the user has let go of, before they reserve more for what
        they are making now. What small batches leave goes with the next task."""
        for place in self._places:
            if place.channel is not None and place.window.released:
                released = place.window.take_released()
                self._holdings.post(place.channel, order("released", 0, None, released))

    def start(self, action: v.Start) -> None:
        """See `Driver`."""
        worker, place = action.worker, self._places[action.worker]
        place.reports, place.samples = (), None  # of an answer that never came
        place.resumptions.clear()
        place.occupied, place.pid = True, None
        place.kill_confirmed = place.dumped = False
        place.pulse.busy_since = time.monotonic()
        self._warden.started(worker)
        setup = self._setup(action, *self._random_states(action))
        if isinstance(setup, NoWay):
            place.occupied = False
            now = time.monotonic()
            self._tell(v.StreamLost(worker, action.generation, now, setup.why, started=False))
            return
        self._holdings.boxes.clear(worker)
        try:
            self._holdings.prepare(worker, action.generation)
            self._holdings.start(dataclasses.replace(setup, held=self._held(worker)))
        except OSError as error:
            if action.generation == 0:
                raise  # in iter(loader), where torch would raise it too
            unborn = NotBorn(worker, action.generation, error.errno or 0)
            self.supervisor.after(partial(self._report, unborn))

    def _held(self, worker: int) -> tuple[tuple[int, int], ...]:
        """Parts of its arena that the consumer still uses; of that which it is started with."""
        return tuple(self._places[worker].window.handover())

    def _random_states(self, action: v.Start) -> tuple[bytes | None, bytes | None]:
        """Before the first item it will be asked for, and before the last one answered."""
        if not action.answered:
            return None, None
        boxes = self._holdings.boxes
        now = boxes.random_state(action.worker, action.answered)
        before = boxes.random_state(action.worker, action.answered - 1)
        return now or before, before  # the last item may have been given up

    def _setup(
        self,
        action: v.Start | v.Rehearse,
        random_state: bytes | None,
        random_before: bytes | None,
    ) -> Setup | NoWay:
        """Where the worker takes up, and with what."""
        worker, place = action.worker, self._places[action.worker]
        plan = self._plan(action, random_before)
        if isinstance(plan, NoWay):
            return plan
        return Setup(
            worker=worker,
            generation=action.generation,
            shared_seed=place.course.seed,
            held=(),
            answered=action.answered,
            passed=action.passed,
            replica=action.replica,
            exhausted=action.exhausted,
            random_state=random_state,
            epoch_state=place.course.epoch_state,
            accused=isinstance(action, v.Start) and action.accused,
            allowance=self._warden.allowance,
            plan=plan,
            marks=self.machine.iterable and self.machine.recovery != "raise",
            states=self._uses_states(STATE, action.unfit),
            rests=self._uses_states(REST, action.unfit),
            region=worker,
            regions=self._holdings.boxes.workers,
        )

    def _uses_states(self, way: Way, unfit: Collection[str]) -> bool:
        """Whether a stream may be taken up this way, so that the worker has to give states."""
        machine = self.machine
        if not machine.iterable or machine.recovery in ("replay", "raise"):
            return False
        return machine.recovery == "state" or way not in unfit

    def _plan(
        self, action: v.Start | v.Rehearse, random_before: bytes | None
    ) -> Plan | NoWay | None:
        """How its stream is taken up; None if there is nothing to take up."""
        machine = self.machine
        if not machine.iterable or (action.generation == 0 and isinstance(action, v.Start)):
            return None
        return choose(
            machine.recovery,
            self._places[action.worker].course,
            exhausted=action.exhausted,
            passed=action.passed,
            persistent=machine.persistent,
            unfit=action.unfit,
            random_before=random_before,
        )

    # -- the end --------------------------------------------------------------------------

    def signal(self, worker: int, generation: int, number: int) -> None:
        """The user sends a worker a signal, through us."""
        if generation == self.machine.generation(worker):
            self._coroner.sent(worker)
            self._holdings.nursery.signal(worker, generation, number)

    def end(self, deadline: float) -> None:
        """Tell all workers to go, and wait for their end."""
        self.supervisor.stop()
        self._beside.stop()
        self._holdings.send_all_away()
        self._wait_for_all(deadline)

    def _wait_for_all(self, deadline: float) -> None:
        """Wait for the nursery's end, and for what it has to say of the workers' ends."""
        if self._holdings.nursery.closed:
            return
        nursery = self._holdings.nursery
        poll = select.poll()
        while (left := deadline - time.monotonic()) > 0:
            orders = select.POLLOUT if nursery.pending else 0
            poll.register(nursery.control, select.POLLIN | orders)
            if not poll.poll(left * 1000):
                continue
            nursery.flush()
            reports = nursery.reports()
            if reports is None:
                break
            for report in reports:
                if self._beside.owns(report.worker):
                    continue
                place = self._places[report.worker]
                if report.generation != self.machine.generation(report.worker):
                    continue
                if isinstance(report, Born):
                    place.pid = report.pid
                elif isinstance(report, Died):
                    place.exitcode = describe_status(report.status)[2]
        if not nursery.wait(max(0.0, deadline - time.monotonic())):
            nursery.kill()
            nursery.wait(registry.KILL_WITHIN)
        for place in self._places:
            if place.exitcode is None:
                place.exitcode = -signal.SIGKILL
