"""How worker processes end: what the nursery reports, and the end of the nursery itself.

What is read about a dead worker are facts. Which sample is to blame, whether a kill may have come
from outside and whether a death counts is decided by the machine.
"""

from __future__ import annotations

import dataclasses
import logging
import select
import signal
import time
from collections import deque
from typing import Any

from holdfast.autopsy.evidence import signal_name
from holdfast.autopsy.incident import describe_end, describe_status
from holdfast.autopsy.investigator import Investigator
from holdfast.autopsy.stack import tidy
from holdfast.engine import background
from holdfast.engine import events as ev
from holdfast.engine.continuation import cannot_resume
from holdfast.engine.driver import DriverOptions
from holdfast.engine.supervisor import Supervisor
from holdfast.limits import gauge
from holdfast.processes.auxiliary import AuxiliaryProcesses, AuxiliaryResult, outcome
from holdfast.processes.inbox import Inbox
from holdfast.processes.nursery_reports import Died, Forked, ForkFailed, Report, Signalled
from holdfast.processes.resources import ProcessResources

log = logging.getLogger("holdfast")

NEARLY_ALL = 0.85  # of the free memory that a worker left behind: then it had used up nearly all


class Exits:
    """The exits of one pool's workers."""

    def __init__(
        self,
        supervisor: Supervisor,
        resources: ProcessResources,
        investigator: Investigator,
        auxiliary: AuxiliaryProcesses,
        inbox: Inbox,
        limits: ev.Limits,
        options: DriverOptions,
    ) -> None:
        self._supervisor = supervisor
        self._resources = resources
        self._slots = resources.slots
        self._investigator = investigator
        self._auxiliary = auxiliary
        self._inbox = inbox
        self._limits = limits
        self._options = options
        self._reports: deque[Report] = deque()  # read and not handled yet
        self._told_of_renewal = False

    # -- the nursery ----------------------------------------------------------------------

    def attend(self, fd: int, mask: int) -> None:
        """A descriptor of the nursery is ready."""
        nursery = self._resources.nursery
        if mask & select.POLLOUT and fd == nursery.control.fileno() and not nursery.closed:
            self._resources.flush_nursery()
        if mask & ~select.POLLOUT:
            self.hear_nursery()

    def end_deaf_nursery(self, now: float) -> None:
        """End a nursery that takes no orders. Its end is noticed as any other."""
        nursery = self._resources.nursery
        if nursery.closed or nursery.given_up or not nursery.has_backlog:
            return
        self._resources.flush_nursery()  # it may have begun to read a moment ago
        if nursery.is_unresponsive(now):
            nursery.give_up("took no orders and was ended")

    def hear_nursery(self) -> None:
        """Handle what the nursery reports, and its end."""
        nursery = self._resources.nursery
        if nursery.closed:
            return
        gone = nursery.gone()  # before the last reports are read
        ended = not self._read_reports()
        self._handle_reports()
        if (ended or gone) and self._resources.nursery is nursery and not nursery.closed:
            self._nursery_lost()

    def _read_reports(self) -> bool:
        """Read what the nursery has reported; False if it is gone and all was read."""
        reports = self._resources.nursery.reports()
        self._reports.extend(reports or ())
        return reports is not None

    def _handle_reports(self) -> None:
        """One may lead to the end of the nursery; those behind it are still true then."""
        while self._reports:
            self.report(self._reports.popleft())

    def report(self, report: Report) -> None:
        """Handle one report."""
        if self._auxiliary.owns(report.worker):
            tried = self._auxiliary.report(report)
            if tried is not None:
                self._finished(tried)
            return
        slot = self._slots[report.worker]
        if report.generation != slot.generation:
            return
        if isinstance(report, Forked):
            slot.pid, slot.exitcode = report.pid, None
            self._investigator.born(report.worker, report.pid)
        elif isinstance(report, Signalled):
            slot.kill_confirmed |= report.signal == signal.SIGKILL
        elif isinstance(report, ForkFailed):
            self._died(report.worker, None, report.errno)
        else:
            self._investigator.reaped(
                report.worker,
                cpu=report.cpu,
                cpu_limit=report.cpu_limit,
                handlers=report.handlers,
                group=report.group,
            )
            self._died(report.worker, report.status, at=report.at, grown=report.grown)

    def _finished(self, tried: AuxiliaryResult) -> None:
        """A process beside the workers has ended."""
        worker, finding = tried.setup.worker, tried.finding
        if tried.setup.probe is None:
            if finding is not None and finding.leaves:
                self._inbox.answers.remark_on_resumption(worker, finding)
            self._supervisor.tell(outcome(tried))
        elif finding is not None:
            self._supervisor.upkeep.memory.found(worker, finding)

    def _nursery_lost(self, how: str = "") -> None:
        """The nursery is dead, so all workers are: their replacements come from another."""
        self._handle_reports()
        if self._resources.nursery.closed:
            return  # one of these has led to another
        status = self._resources.drop_nursery()
        error = self._resources.nursery.error or ""
        how = how or self._resources.nursery.given_up
        kind, name, exitcode = describe_status(status)
        # We may have killed one that raised, or that we have given up.
        killed = status is not None and kind == "killed" and not (error or how)
        if status is not None and not how:
            how = describe_end(name, exitcode)
        with self._supervisor.together():  # all have been read before another is started
            for tried in self._auxiliary.lost():
                self._finished(tried)
            for worker in self._living():
                self._spoil_arena(worker)  # its old worker may take a moment to die
                self._died(
                    worker, None, with_nursery=True, nursery_killed=killed, nursery=(how, error)
                )

    def renew(self) -> None:
        if not self._told_of_renewal:
            self._told_of_renewal = True
            log.warning(
                "%sworkers stall on a lock that was held when they were forked. All workers that "
                "come from the same process would, so workers are forked from the trainer again, "
                "where the lock is probably free by now. The run goes on. To avoid this, use "
                "multiprocessing_context='forkserver'.",
                self._options.origin.prefix,
            )
        if self._resources.nursery.closed:
            return  # the next start makes another in any case
        self._wait_for_deaths()
        self._resources.drop_nursery()
        self._auxiliary.lost()  # with the workers that asked for them
        for worker in self._living():
            self._spoil_arena(worker)  # its old worker may take a moment to die
            self._slots[worker].exitcode = -signal.SIGKILL
            self._tell_exit(worker, None, "killed", renewed=True)

    def _wait_for_deaths(self) -> None:
        """A worker that died before the nursery is ended has a death of its own, with a cause. If
        its channel has ended, its death is about to be reported: wait for that."""
        control = select.poll()
        control.register(self._resources.nursery.control, select.POLLIN)
        deadline = time.monotonic() + self._limits.exit_report_wait
        while True:
            ended = not self._read_reports()
            self._handle_reports()
            if ended or not any(self._has_hung_up(worker) for worker in self._living()):
                return
            left = deadline - time.monotonic()
            if left <= 0 or not control.poll(left * 1000):
                return

    def _has_hung_up(self, worker: int) -> bool:
        """Whether the channel of a living worker has ended, once its messages are taken."""
        channel = self._slots[worker].channel
        if channel is not None:
            self._inbox.take_all(worker, channel)
        return channel is None or not channel.open

    # -- one worker -----------------------------------------------------------------------

    def _living(self) -> list[int]:
        """The workers whose end has not been told."""
        return [worker for worker, slot in enumerate(self._slots) if slot.occupied]

    def _died(
        self,
        worker: int,
        status: int | None,
        errno: int | None = None,
        *,
        at: float | None = None,
        **facts: Any,
    ) -> None:
        """A worker is dead: take its last messages, then tell its exit. `at` is when the nursery
        saw that, `facts` are more of its `Exit`."""
        slot = self._slots[worker]
        if not slot.occupied:
            return
        slot.occupied = False
        if slot.channel is not None:
            self._inbox.take_all(worker, slot.channel)
        self._resources.drop_channel(worker)
        kind, name, slot.exitcode = describe_status(status)
        if slot.dumped:
            kind = "stalled"
        elif errno is not None:
            kind = "start-failed"
        self._tell_exit(worker, at, kind, signal=name, errno=errno, **facts)

    def abandon(self, worker: int, generation: int) -> None:
        slot = self._slots[worker]
        if not slot.occupied or generation != slot.generation:
            return  # another that was abandoned with it has shown that the nursery is to blame
        if not slot.kill_confirmed:
            self._nursery_lost("did not answer and was ended")  # it is not the worker's fault
            return
        with self._supervisor.together():
            self._spoil_arena(worker)
            self._tell_exit(worker, None, "unkillable")

    def _spoil_arena(self, worker: int) -> None:
        """A process may still write to it: use another from now on."""
        slot = self._slots[worker]
        if slot.channel is not None:
            self._inbox.take_all(worker, slot.channel)  # what it sent lies in the old one
        # And what it may send yet is never looked for in the new one.
        self._resources.drop_channel(worker)
        slot.spoiled = True

    def _tell_exit(
        self,
        worker: int,
        at: float | None,
        kind: str,
        *,
        signal: str | None = None,
        grown: int | None = None,
        **facts: Any,
    ) -> None:
        """Read what the worker left behind, before another process takes its place, and tell."""
        slot, boxes, options = self._slots[worker], self._resources.boxes, self._options
        slot.occupied = False
        note = boxes.note(worker)
        step = note.phase
        own, stack = boxes.own_signal(worker), tidy(boxes.take_dump(worker))
        stalled = kind in ("stalled", "unkillable")
        inherited = kind == "stalled" and self._investigator.stalled_on_inherited_lock(
            worker, stack
        )
        none = cannot_resume(options.recovery, slot.progress) if options.iterable else None
        exit = ev.Exit(
            time.monotonic(),
            kind,
            signal=signal,
            exitcode=None if kind == "unkillable" else slot.exitcode,
            by_itself=bool(own) and signal_name(own) == signal,
            inherited=inherited,
            task=note.task,
            position=note.position,
            step=step,
            seconds=None if at is None else max(0.0, at - note.since),
            stack=stack,
            no_way=none.why if none else "",
            **facts,
        )
        if exit.from_outside and step == "fetch" and self._was_short(worker, grown):
            exit = dataclasses.replace(exit, memory=True)
        slot.short = exit.memory or kind not in ("killed", "crashed", "stalled")
        evidence = self._investigator.remains(
            worker, stalled=stalled, stderr=boxes.stderr_tail(worker), size=boxes.size(worker)
        )
        self._supervisor.tell(ev.WorkerExited(worker, slot.generation, exit, evidence))

    def _was_short(self, worker: int, grown: int | None) -> bool:
        """Whether lack of memory may be why it was killed: the kernel has counted that, or nearly
        nothing was left while this worker lived."""
        if self._investigator.killed_for_memory(worker):
            return True
        left = gauge.read().free  # now that it is gone
        return grown is not None and left is not None and grown >= NEARLY_ALL * left

    # -- the end of the pool --------------------------------------------------------------

    def wait_for_all(self, deadline: float) -> None:
        """Wait for the nursery's end, and for its reports on the workers' ends."""
        nursery = self._resources.nursery
        if nursery.closed:
            return
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
                if self._auxiliary.owns(report.worker):
                    continue
                slot = self._slots[report.worker]
                if report.generation != slot.generation:
                    continue
                if isinstance(report, Forked):
                    slot.pid = report.pid
                elif isinstance(report, Died):
                    slot.exitcode = describe_status(report.status)[2]
        if not nursery.wait(max(0.0, deadline - time.monotonic())):
            nursery.kill()
            nursery.wait(background.KILL_WITHIN)
        for slot in self._slots:
            if slot.exitcode is None:
                slot.exitcode = -signal.SIGKILL
