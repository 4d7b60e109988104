"""The driver of the machine: what has happened becomes events, actions become system calls.

Everything here runs under the pool's lock, in the consumer's thread or in the watch's. It waits for
the workers' end when the pool is closed; else never long, and `pool` says where. What the consumer
sees of it is in `pool` too.
"""

from __future__ import annotations

import pickle
import select
import signal
import time
from collections import deque
from typing import Any

from holdfast.autopsy.coroner import INTERVAL, Coroner
from holdfast.autopsy.incident import describe_status
from holdfast.autopsy.logbook import Logbook
from holdfast.engine import registry
from holdfast.engine import vocabulary as v
from holdfast.engine.answers import Failed, Refused, Reported
from holdfast.engine.careful import DROPPED
from holdfast.engine.channel import Channel
from holdfast.engine.epoch import Epoch
from holdfast.engine.holdings import Holdings, Place
from holdfast.engine.machine import Machine
from holdfast.engine.nurse import Born, Died, NotBorn, Report, Signalled
from holdfast.engine.obituaries import Ending, Obituaries, starts
from holdfast.engine.protocol import (
    BATCH,
    CONTENT,
    ENDED,
    ERROR,
    FOUND,
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
    Setup,
    order,
)
from holdfast.engine.relief import Relief
from holdfast.engine.silence import Silence
from holdfast.engine.stats import Stats
from holdfast.engine.warden import Warden
from holdfast.memory import codec
from holdfast.memory.growth import Point
from holdfast.samples.record import BadSample, digest_of_stack
from holdfast.samples.substitute import NOTHING

__all__ = ["Crew"]

LONGEST_WAIT = INTERVAL  # seconds between two looks of the watch, at most


class Crew:
    """The workers of one pool."""

    def __init__(
        self,
        machine: Machine,
        holdings: Holdings,
        epoch: Epoch,
        *,
        silence: Silence,
        coroner: Coroner,
        warden: Warden,
        obituaries: Obituaries,
        stats: Stats,
        logbook: Logbook | None = None,
    ) -> None:
        self.machine = machine
        self.epoch = epoch
        self.refused: Refused | None = None
        self._coroner = coroner
        self._holdings = holdings
        self._places = holdings.places
        self._silence = silence
        self._warden = warden
        self.relief = Relief(machine, holdings, warden, logbook)
        self._obituaries = obituaries
        self._stats = stats
        self._logbook = logbook
        self._unborn: deque[NotBorn] = deque()  # starts that did not get as far as the nursery
        self._todo: deque[v.Action] = deque()  # the first is being carried out

    # -- what the watch has to know -------------------------------------------------------

    def watched(self) -> tuple[int, ...]:
        """The descriptors whose readiness wakes the watch."""
        nursery = self._holdings.nursery
        if nursery.closed:
            return ()
        always = (nursery.control.fileno(), nursery.pidfd)
        # A batch that arrives says how large they are: those that wait for that can be handed out.
        return (*always, *self._holdings.channels) if self.machine.held_back else always

    def interval(self) -> float:
        """Seconds until the next look, at most."""
        if self._unborn:
            return 0.0
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
            self._hear_nursery()
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
        place, machine = self._places[worker], self.machine
        generation = machine.generation(worker)
        place.pulse.busy_since = time.monotonic()
        place.pulse.spoke = True
        kind = message[:1]
        event: v.Event
        if kind == BATCH:  # first, because nearly all are
            number, content = self._open(place, message)
            parcel = codec.receive(memoryview(message)[content:], place.window)
            answer = self._with_reports(place, parcel) if place.reports else parcel
            event = v.BatchReady(worker, generation, number, answer, parcel.nbytes)
        elif kind == READY:
            event = v.WorkerReady(worker, generation)
            self._note_late_start(worker)
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
        elif kind == FOUND:
            self._warden.found(worker, pickle.loads(message[1:]))
            return
        elif kind == RETIRED:
            event = v.WorkerRetired(worker, generation, place.pulse.busy_since)
        elif kind == SURVIVED:
            event = v.Survived(worker, generation)
        else:
            event = self._answer(worker, generation, kind, message)
        actions = machine.handle(event)
        if actions:
            self.carry_out(actions)

    def _answer(self, worker: int, generation: int, kind: bytes, message: bytes) -> v.Event:
        """The event that an answer is which brings no batch."""
        place = self._places[worker]
        number, content = self._open(place, message)
        if kind == ERROR:
            answer: Any = Failed(pickle.loads(message[content:]))
            if place.reports:
                answer = self._with_reports(place, answer)
            return v.BatchReady(worker, generation, number, answer)
        if kind == NOTHING_LEFT:
            return v.BatchReady(worker, generation, number, self._with_reports(place, DROPPED))
        if kind == ENDED:
            self.epoch.unclaimed.extend(place.reports)
            place.reports = ()
            return v.ReplicaEnded(worker, generation, number)
        assert kind == RESUMED, kind
        place.epoch_state = message[content:]
        # That was the dataset's state before the epoch; there is none in it yet.
        place.resting_state, place.dataset_state = place.dataset_state, None
        return v.Resumed(worker, generation)

    def _open(self, place: Place, message: bytes) -> tuple[int, int]:
        """The number of the task that is answered, and where the content begins."""
        number, size = HEAD.unpack_from(message, 1)
        content = CONTENT + size
        place.dataset_state = message[CONTENT:content] if size else None
        return number, content

    def _with_reports(self, place: Place, result: Any) -> Reported:
        """The answer, and the bad samples that were reported just before it."""
        reports, place.reports = place.reports, ()
        return Reported(result, reports)

    def _note_late_start(self, worker: int) -> None:
        tries = self.machine.tries(worker)
        if tries and self._logbook is not None:
            times = "once" if tries == 1 else f"{tries} times"
            text = f"worker {worker} has started, after there had been no room for it {times}"
            self._logbook.event("started-late", text, worker=worker, tries=tries)

    # -- deaths ---------------------------------------------------------------------------

    def _hear_nursery(self) -> None:
        nursery = self._holdings.nursery
        if nursery.closed:
            return
        gone = nursery.gone()  # before the last reports are read
        reports = nursery.reports()
        for report in reports or ():
            self._report(report)
        if (reports is None or gone) and self._holdings.nursery is nursery:
            self._nursery_lost()

    def _report(self, report: Report) -> None:
        place = self._places[report.worker]
        current = report.generation == self.machine.generation(report.worker)
        if isinstance(report, Born):
            if current:
                place.pid, place.exitcode = report.pid, None
                self._coroner.born(report.worker, report.pid)
                self._warden.born(report.worker)
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

    def _died(
        self,
        worker: int,
        status: int | None,
        errno: int | None = None,
        *,
        outside: bool = False,
    ) -> None:
        """A worker is dead: hear its last words, then let the machine decide. `outside` if it went
        with a nursery that was killed."""
        place, machine = self._places[worker], self.machine
        if not machine.alive(worker):
            return
        if place.channel is not None:
            self._hear(worker, place.channel)
        self._holdings.drop_channel(worker)
        cause, name, exitcode = describe_status(status)
        place.exitcode = exitcode
        if machine.retiring(worker) and errno is None:
            self._succeed(worker)
            return
        if machine.condemned(worker):
            cause = "stalled"
        elif errno is not None:
            cause = "start-failed"
        outside = cause == "killed" and (outside or name is not None)
        self._bury(worker, Ending(cause, name, exitcode, errno=errno, outside=outside))

    def _succeed(self, worker: int) -> None:
        """A worker has gone because of its size: that is no incident."""
        self._coroner.left(worker)
        self._warden.retired(worker)
        self._stats.recycled += 1
        generation = self.machine.generation(worker)
        actions = self.machine.handle(
            v.WorkerDied(worker, generation, v.Death(at=time.monotonic()))
        )
        self._places[worker].pid = None if actions else self._places[worker].pid
        self.carry_out(actions)

    def _bury(self, worker: int, ending: Ending) -> None:
        place, machine = self._places[worker], self.machine
        obituary = self._obituaries.open(worker, place.pid, ending)
        event = v.WorkerDied(worker, machine.generation(worker), obituary.death)
        actions = machine.handle(event)
        if obituary.death.shortage and machine.failure is None and machine.tries(worker) > 1:
            self.carry_out(actions)
            return  # it has been said that it is tried again
        later = machine.put_off(worker) and not obituary.death.shortage
        replaced = starts(actions, worker) or later
        if obituary.gives_up_sample:
            place.dataset_state = None  # the state before that sample is none to go on from
        self._stats.restarts += replaced
        place.pid = None if replaced else place.pid
        done = obituary.done(machine, actions)
        self.carry_out(actions)  # first the replacement; it need not wait for the autopsy
        self._obituaries.file(obituary, done)

    def _nursery_lost(self) -> None:
        """The nursery is dead, so all workers are: their replacements come from another."""
        status = self._holdings.drop_nursery()
        outside = status is not None and describe_status(status)[0] == "killed"
        for worker in range(self.machine.workers):
            if self.machine.alive(worker):
                self._spoil_arena(worker)  # its old worker may take a moment to die
                self._died(worker, None, outside=outside)

    def _abandon(self, worker: int) -> None:
        """A worker that does not even die: never use its memory again."""
        place = self._places[worker]
        if not place.kill_confirmed:
            self._nursery_lost()  # it is the nursery that does not answer
            return
        self._spoil_arena(worker)
        self._bury(worker, Ending("unkillable", None, None))

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
        while self._unborn:
            self._report(self._unborn.popleft())
        machine, silence, now = self.machine, self._silence, time.monotonic()
        silence.awake(now, self._longest_interval())
        self._coroner.look(now)
        self._mind_the_memory(now)
        wanted = machine.deadline()
        if wanted is not None and now >= wanted:
            self.carry_out(machine.handle(v.Ticked(now)))
        if silence.timeout is None or not silence.due(now, self._longest_interval()):
            return
        note_of = self._holdings.boxes.note
        for worker in range(machine.workers):
            if not machine.busy(worker):
                continue
            if silence.too_long(worker, note_of, machine.patience(worker, silence.timeout), now):
                event = v.WorkerStalled(worker, machine.generation(worker), now)
                self.carry_out(machine.handle(event))

    def _mind_the_memory(self, now: float) -> None:
        for at in self._obituaries.deaths_of_memory():
            self._warden.died_of_memory(at)
        self.relief.look(now, self._coroner.pids)
        self.carry_out(self.machine.relieved())

    # -- actions --------------------------------------------------------------------------

    def carry_out(self, actions: list[v.Action]) -> None:
        """Do this, in the order in which it was decided.

        What is done may itself be an event (an `Abandon` is a death) that leads to more actions:
        those have to wait for what was decided before, or a task would be sent to a worker whose
        start is still to come.
        """
        todo = self._todo
        if todo:
            todo.extend(actions)
            return  # somebody further up is at it
        todo.extend(actions)
        try:
            while todo:
                self._carry_out(todo[0])
                todo.popleft()
        except BaseException:
            todo.clear()
            raise

    def _carry_out(self, action: v.Action) -> None:
        if isinstance(action, v.Dispatch):
            self._dispatch(action)
        elif isinstance(action, v.Convict):
            self._convict(action)
        elif isinstance(action, v.Separate):
            action.task.brief = (action.task.brief or NOTHING)._replace(apart=True)
        elif action.generation != self.machine.generation(action.worker):
            return  # an action before this one has replaced it already
        elif not self.machine.alive(action.worker):
            return  # or has found it dead, and nobody is to replace it
        elif isinstance(action, v.Start):
            self._start(action)
        elif isinstance(action, v.Abandon):
            self._abandon(action.worker)
        else:
            if isinstance(action, v.Dump):
                self._coroner.before_kill(action.worker)
            number = signal.SIGABRT if isinstance(action, v.Dump) else signal.SIGKILL
            self._places[action.worker].kill_confirmed = False
            self._holdings.nursery.signal(action.worker, action.generation, number)

    def _dispatch(self, action: v.Dispatch) -> None:
        place, item = self._places[action.worker], action.item
        channel = place.channel
        if channel is None:
            return  # it died a moment ago; its replacement will be asked
        released = place.window.take_released()
        place.tidied = False
        if isinstance(item, v.Task):
            account = self.epoch.account
            if account is not None:
                item.brief = account.refreshed(item.keys, item.brief)
            if item.brief is None:
                message = order("task", item.number, item.index, released)
            else:
                content = (item.index, item.brief)
                message = order("briefed", item.number, content, released)
        elif isinstance(item, v.Trial):
            task = item.task
            suspect = (task.index, task.brief, item.sample)
            message = order("trial", task.number, suspect, released)
        else:
            message = order("resume", 0, item.seed, released)
        place.pulse.busy_since = time.monotonic()
        self._holdings.post(channel, message)

    def give_back(self) -> None:
        """Tell the workers at once what the user has let go of, before they reserve more for what
        they are making now. What small batches leave goes with the next task."""
        for place in self._places:
            if place.channel is not None and place.window.released:
                released = place.window.take_released()
                self._holdings.post(place.channel, order("released", 0, None, released))

    def _convict(self, action: v.Convict) -> None:
        """A sample ends its workers, alone too: the batch goes on without it."""
        account = self.epoch.account
        assert account is not None
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
        task.brief = account.convict(task.keys, task.brief, action.sample, task.number, bad)

    def _start(self, action: v.Start) -> None:
        worker, place = action.worker, self._places[action.worker]
        place.reports = ()  # of an answer that never came
        place.kill_confirmed = False
        place.pulse.busy_since = time.monotonic()
        trace = self._warden.started(worker)
        self._holdings.boxes.clear(worker)
        try:
            self._holdings.prepare(worker, action.generation)
            self._holdings.start(self._setup(action, trace))
        except OSError as error:
            if action.generation == 0:
                raise  # in iter(loader), where torch would raise it too
            self._unborn.append(NotBorn(worker, action.generation, error.errno or 0))

    def _setup(self, action: v.Start, trace: int) -> Setup:
        """Where the worker takes up, and with what."""
        worker, place = action.worker, self._places[action.worker]
        random_state = None
        if action.answered:
            random_state = self._holdings.boxes.random_state(worker, action.answered)
            if random_state is None:  # the last item was given up: from the state before it
                random_state = self._holdings.boxes.random_state(worker, action.answered - 1)
        return Setup(
            worker=worker,
            workers=self.machine.workers,
            generation=action.generation,
            shared_seed=self.epoch.shared_seed,
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
            trace=trace,
        )

    # -- the end --------------------------------------------------------------------------

    def signal(self, worker: int, number: int) -> None:
        """The user sends a worker a signal, through us."""
        self._coroner.sent(worker)
        self._holdings.nursery.signal(worker, self.machine.generation(worker), number)

    def end(self, deadline: float) -> None:
        """Tell all workers to go, and wait for their end."""
        self.machine.stop()
        self._holdings.send_all_away()
        self._wait_for_all(deadline)

    def _wait_for_all(self, deadline: float) -> None:
        """Wait for the nursery's end, and for what it has to say of the workers' ends."""
        if self._holdings.nursery.closed:
            return
        nursery = self._holdings.nursery
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
            nursery.wait(registry.KILL_WITHIN)
        for place in self._places:
            if place.exitcode is None:
                place.exitcode = -signal.SIGKILL
