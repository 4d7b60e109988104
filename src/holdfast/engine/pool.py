"""A pool: the workers of one iterator, as the consumer sees them.

Two threads use a pool. The consumer's thread does everything inside ``next()``. The background
thread sleeps until a worker dies or a deadline passes. So a death during a long training step is
handled at once, and nothing is raised in the user's code outside ``next()``. If batches are pinned,
the background thread also hears of each batch, and a third thread pins it: see `pinning`.

The rules of the lock, for this module and all below it:

- Machine, supervisor, driver and epoch are used under `Pool.lock` only. The consumer holds it while
  it waits for workers too, but every wait has a deadline, and `Driver.wake` ends it early.
- These need no lock: `BackgroundThread.dismiss`, which finalizers and signal handlers call;
  `BackgroundThread.stage`; statistics; and the memory of batches that the consumer keeps.
- Any thread may use the handles of workers, while the consumer holds the lock for minutes. So
  `pid` and `exitcode` wait for the lock for `TURN` seconds only. A thread that holds it for longer
  is waiting for workers, and keeps up to date what is read here. `terminate` writes its order to
  `_wanted_ends` and wakes the thread that holds the lock, or gets it next.
- The pinning thread never takes the lock: the consumer may wait for it, and so may the background
  thread when it closes the pool.
- The thread that has the lock may take it again: two threads may share an iterator, and a signal
  handler may ask for a pid. So the lock does not show that something is half done; `_work` does
  (`signals.Undivided`).
- A thread that has it may take the lock of `Deaths` and that of the descriptors, never the other
  way round.
- What is read and written under it takes a few milliseconds: /proc and control groups, every few
  seconds and after a death, and sockets. Examinations of deaths and the logbook may take longer, so
  they run without it (`do_slow_work`). Two exceptions: 50 ms before a stalled worker is killed, to
  see whether it uses CPU time; and up to a second for the end of a nursery that died, because no
  worker can be started before there is another.

Processes, descriptors and mappings belong to the driver, which releases them when the pool is
closed: at the iterator's end, at its garbage collection, at interpreter exit, or by the user. A
child forked from this process inherits a pool that is not its own; there nothing here has an
effect.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from holdfast.autopsy.readers import HERE, Roots
from holdfast.engine import background, signals
from holdfast.engine import events as ev
from holdfast.engine.background import CLOSED, OPEN, BackgroundThread
from holdfast.engine.checkpoint import Bookmark, Checkpoint
from holdfast.engine.checkpointing import Checkpointing
from holdfast.engine.deaths import Deaths
from holdfast.engine.drawing import Announcement, Drawing
from holdfast.engine.driver import DriverOptions, WorkerMethod, hand_over_backlog
from holdfast.engine.epoch import NO_BATCH, Epoch, Reported, Taken
from holdfast.engine.loader_records import LoaderRecords
from holdfast.engine.machine import Machine
from holdfast.engine.memory_control import MemoryController
from holdfast.engine.pinning import PinnedBatch, Pinner, PinningThread
from holdfast.engine.progress_log import ProgressLog
from holdfast.engine.sampler_draws import SamplerDraws
from holdfast.engine.supervisor import Supervisor
from holdfast.engine.upkeep import Upkeep
from holdfast.errors import LoaderClosed
from holdfast.limits.budget import Share
from holdfast.samples.account import Account
from holdfast.samples.bad_sample import name_of
from holdfast.worker.sample_seeding import EpochSeeds

TURN = 0.02  # seconds that a question about a worker waits for the lock, or keeps it
BRISK = 0.0005  # seconds: if the last wait was shorter than this, spin before sleeping
LOOKS = 100  # rounds of that, which take about 150 microseconds
PACED = 32  # batches after which their pace is measured,
QUICK = 0.005  # which is quick below so many seconds for each
LARGE = 1 << 20  # bytes of a batch whose memory is worth a message of its own
SHOWN = 4  # workers in the message of a timeout


class TimedOut(Exception):
    """Nothing arrived within the loader's `timeout`; what is awaited, in words."""


class Pool:
    """The workers of one iterator."""

    def __init__(
        self,
        method: WorkerMethod,
        machine: Machine,
        share: Share,
        records: LoaderRecords,
        *,
        dataset: Any,
        auto_collation: bool,
        seeds: EpochSeeds,
        stall_timeout: float | None,
        worker_memory_limit: int | str | None = None,
        users_sampler: bool = True,
        may_hurry: bool = False,
        base_seed: int = 0,
        resumed: Checkpoint | None = None,
        bookmark: Bookmark | None = None,
        roots: Roots = HERE,
    ) -> None:
        """With `users_sampler` drawing an index runs code of the user: it may take any time, and
        signal handlers run in it. `may_hurry` if the machine may deepen. `resumed`: where the run
        begins, if another has begun it. `bookmark` is told where it ended. `roots`: where the free
        memory is read."""
        self.owner = os.getpid()
        self.origin = origin = records.origin
        self.machine = machine
        self.stats = records.stats
        self.user: Callable[[], object] | None = None  # a weak reference to the iterator
        self.lock = threading.RLock()
        self.broken: BaseException | None = None  # what closed it, if it was not asked for
        self._work = signals.Undivided(self._break)
        self._wanted_ends: deque[tuple[int, int]] = deque()  # workers and their generations
        self._may_hurry = may_hurry
        self._paced = 0  # batches, as long as it may hurry,
        self._pace_began = 0.0  # and when the last few of them began
        self._brisk = False  # the last batch came soon
        self._logbook = logbook = records.logbook
        self.progress: ProgressLog | None = None  # told to the logbook, if there is one
        self._share = share
        self._pinning: PinningThread | None = None
        self._has_copied = False  # memory of large batches may go back to the workers
        memory = MemoryController(
            share,
            worker_memory_limit,
            machine.workers,
            roots,
            logbook=logbook,
            growth_warnings=records.growth_warnings,
            origin=origin,
            start_method=method.name,
            largest_batch=machine.largest,
        )
        self.driver = method.driver(
            DriverOptions(
                workers=machine.workers,
                iterable=machine.iterable,
                persistent=machine.persistent,
                recovery=machine.recovery,
                seeds=seeds,
                stall_timeout=stall_timeout,
                allowance=memory.allowance,
                origin=origin,
                logbook=logbook,
                answers_ahead=machine.answers_ahead(machine.iterable),
                restored=() if resumed is None else resumed.workers,
            )
        )
        self.deaths = Deaths(self.driver, dataset, records, machine.recovery)
        if logbook is not None:
            name = partial(name_of, dataset)
            self.progress = ProgressLog(logbook, machine, self.driver, share.budget, name)
        upkeep = Upkeep(
            machine,
            self.driver,
            records,
            deaths=self.deaths,
            memory=memory,
            stall_timeout=stall_timeout,
            progress=self.progress,
            resumes=resumed is not None and machine.iterable,
        )
        self.supervisor = Supervisor(machine, share, Epoch(), self.driver, upkeep)
        self.checkpointing = Checkpointing(self.supervisor, self.driver, base_seed, bookmark)
        self.drawing = Drawing(
            self.supervisor,
            self.driver,
            self._work,
            auto_collation=auto_collation,
            users_sampler=users_sampler,
        )
        self.background = BackgroundThread(self, self.driver.wake)
        try:
            self.supervisor.tell(ev.Began(None if resumed is None else resumed.position()))
        except BaseException:
            self.background.close_now()
            raise

    def pin(self, pinner: Pinner) -> None:
        """Have batches pinned in a thread. Called before the first task is drawn."""
        thread = PinningThread(
            pinner,
            in_order=self.machine.in_order,
            may_copy=self._share.may_copy,
            copied=self._copied,
        )
        background.exempt(thread.start())
        self._pinning = self.supervisor.pinning = thread

    def _copied(self, nbytes: int) -> None:
        """In the pinning thread. What small batches leave goes with the next task."""
        if nbytes >= LARGE:
            self._has_copied = True
            self.driver.wake()

    # -- the consumer's side --------------------------------------------------------------

    def next(self, draw: Callable[[], Any], timeout: float) -> Taken:
        """The next delivery, in the order the machine decides. Call it under the lock.

        It stays in `Epoch.taken` until the consumer has made its batch of it, however often a
        signal handler raises in between.
        """
        machine, supervisor, work = self.machine, self.supervisor, self._work
        epoch = supervisor.epoch
        try:
            work.enter()
            if self.background.stage is not OPEN:
                if epoch.ended:
                    self._leave()
                    return ev.END  # and stays so, however often it is asked
                self._check()
            if (machine.largest or 0) >= LARGE:
                self.driver.release()
            if epoch.due:
                self.drawing.draw_due(draw)
            if epoch.delivered is None:
                supervisor.tell(ev.ASKED)
                if epoch.delivered is None:
                    worker = machine.awaited()
                    if worker is not None:
                        self.driver.hear(worker)
                if epoch.delivered is None:
                    self._wait(draw, timeout)
            taken: Any = epoch.delivered
            if isinstance(taken, ev.GaveUp) and taken.reason == "refused":
                taken = supervisor.refusal
            epoch.taken, epoch.delivered = taken, None
            if isinstance(taken, ev.Delivery):
                if epoch.unfinished is not None:
                    epoch.finish()  # it was lost to the consumer: a warning raised, as with torch
                epoch.unfinished = taken.task
                self._count(taken.result)
                if self.progress is not None:
                    self.progress.delivered(taken)
                if self._may_hurry:
                    self._look_at_the_pace()
                if epoch.due > 0:
                    self.drawing.draw_due(draw)
            else:
                epoch.ended = taken is ev.END
                if epoch.ended and epoch.sampler_error is not None:
                    self._say_that_it_is_incomplete()
            self._leave()
        except BaseException as error:
            self._fail(error)
            raise
        return taken  # type: ignore[no-any-return]

    def _look_at_the_pace(self) -> None:
        """Tell the machine, once, if batches follow each other quickly."""
        self._paced += 1
        if self._paced % PACED:
            return
        now = self.driver.clock()
        if now - self._pace_began < PACED * QUICK:
            self._may_hurry = False
            self.supervisor.tell(ev.HURRIED)
        self._pace_began = now

    def _count(self, result: Any) -> None:
        stats, machine = self.stats, self.machine
        if isinstance(result, Reported):
            result = result.result
        if type(result) not in NO_BATCH:
            stats.bytes += result.nbytes
            stats.batches += 1
        if machine.peak > stats.most_in_flight_bytes:
            stats.most_in_flight_bytes = machine.peak
        if machine.largest and machine.largest > stats.largest_batch_bytes:
            stats.largest_batch_bytes = machine.largest

    def _say_that_it_is_incomplete(self) -> None:
        """In place of the first end: the sampler failed, and had no more to give after that."""
        epoch = self.supervisor.epoch
        epoch.taken = None
        error = LoaderClosed(
            f"{self.origin.prefix}this epoch is incomplete: the sampler ended with "
            f"{epoch.sampler_error} in an earlier next(); iter(loader) begins a new one"
        )
        self._leave()  # a handler that raises must not replace an error that is raised only once
        epoch.sampler_error = None
        raise error

    def unpacked(self) -> None:
        """The consumer has its batch: what it keeps is not in flight."""
        try:
            self._work.enter()
            if self.background.stage is OPEN:
                self.supervisor.tell(ev.UNPACKED)
                if self._pinning is not None:
                    self._pinning.look_again()
            self._leave()
        except BaseException as error:
            self._fail(error)
            raise

    def await_pinned(self, batch: PinnedBatch, timeout: float) -> None:
        """Wait until a batch that has arrived is pinned. Call it without the lock, so that the
        background thread can go on."""
        began = time.monotonic()
        if batch.wait(timeout if timeout > 0 else None):
            self._count_wait(time.monotonic() - began)
            return
        with self.lock:
            self._check()
        if self._pinning is None or not self._pinning.serves:
            raise RuntimeError("Pin memory thread exited unexpectedly")
        raise TimedOut("; the batch has come, and is not pinned yet")

    def done_with(self, taken: Taken) -> None:
        """The consumer has had this."""
        with self.lock:
            epoch = self.supervisor.epoch
            if epoch.taken is taken:  # and not, meanwhile, what another thread has taken
                epoch.taken = None
            if isinstance(taken, ev.Delivery):
                epoch.finish()
                self.supervisor.drop_hint(taken.task)

    def _wait(self, draw: Callable[[], Any], timeout: float) -> None:
        """Wait for what the consumer is to get."""
        epoch, clock = self.supervisor.epoch, self.driver.clock
        began = now = clock()
        deadline = began + timeout if timeout > 0 else None
        progress = self.progress
        if progress is not None:
            progress.waits_since = began
        try:
            while epoch.delivered is None:
                if self._pump(None if deadline is None else deadline - now):
                    if deadline is not None:
                        deadline = clock() + timeout
                elif deadline is not None and clock() >= deadline:
                    self._check()  # if it was closed meanwhile, there is nothing to look at
                    awaited = self._awaited_in_words()
                    self._work.half_done = False
                    raise TimedOut(awaited)
                now = clock()
                self._check()
                self.drawing.draw_due(draw)  # a replica that ended leaves room for another task
        finally:
            if progress is not None:
                progress.waits_since = None
        if not isinstance(epoch.delivered, ev.GaveUp):
            self._count_wait(now - began)

    def _count_wait(self, seconds: float) -> None:
        self.stats.waits += 1
        self.stats.wait_seconds += seconds
        if self.progress is not None:
            self.progress.waited += seconds

    def resume(
        self,
        seeds: EpochSeeds,
        draw: Callable[[], Any],
        account: Account | None,
        draws: SamplerDraws | None = None,
    ) -> None:
        """Begin another epoch on the same workers."""
        self.check_owner()
        with self._undivided():
            self._check()
            self.supervisor.epoch = Epoch(account, seeds=seeds, draws=draws)
            self.supervisor.tell(ev.EpochBegan(seeds))
            self.drawing.draw_due(draw)

    def announce(self, change: bytes, noted: Callable[[int], None] | None = None) -> None:
        """Have every worker told this before the tasks that are drawn from now on. `noted` is
        called with the first of these draws, before a checkpoint can be taken that has it."""
        self.check_owner()
        announcement = Announcement(change, noted)
        self.drawing.announced.append(announcement)
        with self.lock:
            if not self._work.half_done:  # else the sampler calls: before the index it is asked for
                with self._undivided():
                    if self.running:
                        self.drawing.tell_announced()
            self.drawing.note_draw(announcement)

    def fill(
        self,
        draw: Callable[[], Any],
        account: Account | None,
        draws: SamplerDraws | None = None,
        resumed: Checkpoint | None = None,
    ) -> None:
        """Give the workers their first tasks."""
        with self._undivided():
            epoch = self.supervisor.epoch
            epoch.account, epoch.draws = account, draws
            if resumed is not None:
                epoch.drawn = epoch.done = resumed.done
                epoch.yielded, epoch.turn = resumed.yielded, resumed.turn
            self.drawing.draw_due(draw)

    # -- where the consumer is ------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Where the run is, for another process to go on from there. Any thread may ask.

        A thread that waits in ``next()`` has the lock. It is woken, and answers.
        """
        self.check_owner()
        wanted = self.checkpointing.ask()
        while not wanted.done():
            if self.lock.acquire(timeout=TURN):
                try:
                    if not self._work.half_done:
                        self._await_epoch()
                    self.checkpointing.answer()
                finally:
                    self.lock.release()
            else:
                self.driver.wake()
        return wanted.result()

    def _await_epoch(self) -> None:
        while self.background.stage is OPEN and self.checkpointing.waits_for_workers:
            with self._undivided():
                self._pump(TURN)

    # -- waiting for workers --------------------------------------------------------------

    def _pump(self, timeout: float | None) -> bool:
        """Wait for something to happen and handle it; whether a worker sent something."""
        awaited, hear = self.machine.awaited, self.driver.hear
        worker = awaited()
        if worker is not None:
            if hear(worker):
                return True
            spin = self.driver.spin
            if self._brisk and spin is not None:
                # Batches follow each other so quickly that to sleep and be woken takes longer: let
                # other processes run for a moment, and look again.
                for _ in range(LOOKS):
                    self._work.half_done = False
                    spin()
                    self._work.half_done = True
                    if hear(worker):
                        return True
        limit, clock = self.supervisor.upkeep.interval(), self.driver.clock
        began = clock()
        heard = self._attend(limit if timeout is None else min(limit, max(0.0, timeout)))
        self._brisk = clock() - began < BRISK
        if self.deaths.pending:
            self.background.do_slow_work_soon()
        return heard

    def _attend(self, wait: float) -> bool:
        """Handle what happens within so many seconds, and what is due."""
        found = self._work.wait(partial(self.driver.poll, wait))
        if self.background.stage is not OPEN:
            return False  # since a signal handler or the garbage collector ran in this thread
        heard = self.driver.take_in(found)
        if self.background.stage is not OPEN:
            self.driver.wake()  # `take_in` has cleared that; the background thread still needs it
        if self._has_copied:
            self._has_copied = False
            self.driver.release()
        if self._wanted_ends:
            self._end_wanted()
        self.checkpointing.answer_if_settled()  # else `_await_epoch` waits for them
        self.supervisor.run_upkeep()
        return heard

    def _awaited_in_words(self) -> str:
        """Which worker the consumer waits for, where that is, and what it is doing."""
        machine, driver = self.machine, self.driver
        if machine.in_order:
            worker = machine.awaited()
            workers = [] if worker is None else [worker]
        else:
            workers = [one for one in range(machine.workers) if machine.undelivered(one)]
        said = [
            f"worker {one} ({driver.place(one)}): "
            f"{driver.progress(one).note.in_words(driver.clock())}"
            for one in workers[:SHOWN]
        ]
        if not said:
            return ""
        more = f"; and {len(workers) - SHOWN} more" if len(workers) > SHOWN else ""
        return f"; awaited is {'' if machine.in_order else 'any of '}{'; '.join(said)}{more}"

    # -- handles --------------------------------------------------------------------------

    def pid(self, worker: int, timeout: float = 30.0) -> int | None:
        """The pid of a worker, waiting until it is known; None if it is no process."""
        if not self.driver.limits.killable:
            return None
        deadline = time.monotonic() + timeout
        while (pid := self.driver.handle(worker).pid) is None and self.machine.failure is None:
            if not self._learn(deadline - time.monotonic()):
                return self.driver.handle(worker).pid
        return pid

    def exitcode(self, worker: int) -> int | None:
        self._learn(0)
        return self.driver.handle(worker).exitcode

    def _learn(self, timeout: float) -> bool:
        """Handle what has happened; whether it makes sense to ask again."""
        if self.owner != os.getpid() or self.background.stage is not OPEN:
            return False
        if not self.lock.acquire(timeout=TURN):
            return timeout > 0  # another thread waits for the workers, and handles that
        try:
            if self.background.stage is not OPEN or self._work.half_done:
                return False  # half done: a signal handler of this thread asks
            with self._undivided():
                self._pump(min(timeout, TURN))
            return timeout > 0
        finally:
            self.lock.release()

    def terminate(self, worker: int) -> None:
        """End the process that is this worker now."""
        self.check_owner()
        self._wanted_ends.append((worker, self.machine.generation(worker)))
        if self.lock.acquire(blocking=False):
            try:
                if not self._work.half_done:  # else a signal handler of this thread asks
                    self._end_wanted()
                    return
            finally:
                self.lock.release()
        self.driver.wake()

    def _end_wanted(self) -> None:
        while self._wanted_ends:
            worker, generation = self._wanted_ends.popleft()
            if self.background.stage is not CLOSED:
                self.driver.terminate(worker, generation)

    @property
    def running(self) -> bool:
        """Whether there are workers, or will be."""
        return self.owner == os.getpid() and self.background.stage is OPEN

    @property
    def usable(self) -> bool:
        """Whether another epoch can begin on these workers."""
        with self.lock:
            over = self.background.stage is not OPEN or self._work.half_done
            return not over and self.machine.failure is None

    # -- the background thread's side -----------------------------------------------------

    def service(self) -> float | None:
        """Handle what has happened. Seconds until this must be called again; None when the pool is
        to be closed."""
        with self._undivided():
            if self.background.stage is not OPEN:
                return None
            self._attend(0)
            # A batch that arrives can be pinned. And it says how large batches are: what waits for
            # that can be sent.
            batches = self._pinning is not None or bool(self.machine.held_back)
            self.driver.prepare_watch(batches=batches)
            return self.supervisor.upkeep.interval()

    def has_slow_work(self) -> bool:
        """Whether there is something for `do_slow_work`."""
        return self.deaths.pending or (self._logbook is not None and self._logbook.pending)

    def do_slow_work(self) -> None:
        """Do what takes long and needs no lock. It may never return: a disk may be gone, and
        handlers of the user are called."""
        self.deaths.examine_pending()
        if self._logbook is not None:
            self._logbook.flush()

    def has_no_user(self) -> bool:
        """Whether the iterator is gone.

        Its finalizer closes the pool. But an interrupt that strikes just as Python calls the
        finalizer is raised in there, and the call is lost.
        """
        return self.user is not None and self.user() is None

    # Bound here: a finalizer of the user may call it when modules have been taken apart.
    def close(
        self, close_all: Callable[[list[BackgroundThread]], None] = background.close_all
    ) -> None:
        """End the workers and release everything but the batches that the consumer keeps."""
        close_all([self.background])

    def end_workers(self, deadline: float) -> None:
        """End all workers by then, and release processes, descriptors and mappings."""
        with contextlib.suppress(Exception):  # it could not even begin
            self.checkpointing.keep_last()
        if self._pinning is not None:
            self._pinning.stop()
        self.supervisor.stop()
        try:
            self.driver.stop(deadline)
        finally:
            if self.progress is not None:
                self.progress.end()
            self.driver.close()
            if self._pinning is not None:
                self._pinning.join(deadline)

    # -- nothing half done ----------------------------------------------------------------

    def check_owner(self) -> None:
        if os.getpid() != self.owner:
            raise LoaderClosed(
                f"this iterator belongs to process {self.owner}, not to its child {os.getpid()}; "
                "iter(loader) makes one that is the child's own"
            )

    def _check(self) -> None:
        if self.background.stage is not OPEN:
            self._work.half_done = False
            if (
                background.interpreter_exiting()
                and threading.current_thread() is not threading.main_thread()
            ):
                # Ends a daemon thread without a message (only if it is exactly this type).
                raise SystemExit
            how = "closed or interrupted"
            if self.broken is not None:
                how = f"closed because of {self.broken!r} in an earlier next() or between two"
            raise LoaderClosed(
                f"{self.origin.prefix}this iterator was {how}; iter(loader) makes a new one"
            ) from self.broken

    def _leave(self) -> None:
        hand_over_backlog(self.driver)
        self._work.leave()

    def _fail(self, error: BaseException) -> None:
        try:
            hand_over_backlog(self.driver)
        finally:
            self._work.fail(error)

    @contextlib.contextmanager
    def _undivided(self) -> Iterator[None]:
        """The lock and `_work`, for everything that is done less often than `next`."""
        with self.lock:
            try:
                self._work.enter()
                yield
                self._leave()
            except BaseException as error:
                self._fail(error)
                raise

    def _break(self, error: BaseException | None) -> None:
        """Something was interrupted half done: the pool cannot go on from there."""
        if self.background.stage is OPEN:
            self.broken = error
        self.background.dismiss()
