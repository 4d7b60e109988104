"""A pool: the workers of one iterator, as the consumer sees them.

What happens to the workers is in `crew`; here is who may do what, and when. Two threads work on a
pool: the consumer's, inside ``next()``, and the watch, which sleeps until a worker dies or a
deadline passes and otherwise does nothing. So a death during a long training step is dealt with at
once, and nothing is ever raised in the user's code outside ``next()``.

The rules of the lock, for this module and all below it:

- Machine, crew, holdings and epoch are touched under `Pool.lock` only. It is held while waiting for
  the workers too, but every wait has a deadline, and the waker of the watch ends it early.
- Without the lock: `Watch.dismiss` (finalizers and signal handlers call it), `Watch.stage` and
  figures for whoever only reads them, and the memory of batches that the consumer keeps.
- Handles on workers are used by any thread, while the consumer waits with the lock in hand for
  minutes, perhaps. So a question (`pid`, `exitcode`) waits for the lock for `TURN` only: a holder
  that has it longer is waiting itself, hears of each birth and death at once, and keeps what is
  read here up to date. A signal to a worker is put down in `_wishes` and the bell of the watch is
  rung: who holds the lock, or gets it next, sends it.
- The lock is taken again by the thread that has it (two threads may share an iterator, and a signal
  handler may ask for a pid), so it says nothing about being half-way: `_midway` does. A signal
  handler may raise between any two instructions; see `_enter`.
- Under it, `registry.descriptors` and the lock of the obituaries may be taken; never the other way
  round.
- What is read and written under it takes a few milliseconds: /proc and control groups, every few
  seconds and when somebody has died; the sockets of workers and nursery. The examination of a death
  is not (the kernel's log, what a dataset calls a sample), nor is the logbook: a clerk of the
  watch's sees to them without the lock (`settle`). What may take longer under it all the same:
  50 ms before a worker that stalls is killed, to see whether it uses CPU time while it still can;
  and a second for the end of a nursery that died, since no worker can be started before another
  is made.

Whatever must not be forgotten (a process, a descriptor, a mapping) is in `holdings` and let go when
the pool is closed: by the iterator's end, by its garbage collection, at interpreter exit, or by the
user. A child forked from this process inherits a pool that is not its own: everything here does
nothing there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from holdfast import kernel
from holdfast.autopsy.coroner import Coroner
from holdfast.autopsy.incident import Incident
from holdfast.autopsy.logbook import Logbook
from holdfast.engine import interrupts, registry
from holdfast.engine import vocabulary as v
from holdfast.engine.answers import Reported
from holdfast.engine.crew import Crew
from holdfast.engine.epoch import Epoch, Taken
from holdfast.engine.holdings import Holdings
from holdfast.engine.machine import Machine
from holdfast.engine.obituaries import Obituaries
from holdfast.engine.payload import Payload
from holdfast.engine.protocol import Blueprint
from holdfast.engine.silence import Silence
from holdfast.engine.stats import Stats
from holdfast.engine.warden import Warden
from holdfast.engine.watch import CLOSED, OPEN, Watch
from holdfast.errors import LoaderClosed
from holdfast.memory import codec
from holdfast.memory.budget import Share
from holdfast.memory.growth import Said
from holdfast.origin import Origin
from holdfast.samples.keys import keep, keys_of
from holdfast.samples.ledger import Account

__all__ = ["Pool", "TimedOut"]

TURN = 0.02  # seconds that a question about a worker waits for the lock, or keeps it
BRISK = 0.0005  # seconds: who had to wait no longer for a batch looks for the next one itself
LOOKS = 100  # for so many times, which takes about 150 microseconds
PACED = 32  # batches after which it is looked at how quickly they come,
QUICK = 0.005  # which is quicker than so many seconds for each
LARGE = 1 << 20  # bytes of a batch whose memory is worth a message of its own
_NOBODYS = Origin()


class TimedOut(Exception):
    """Nothing arrived within the loader's `timeout`."""


class Pool:
    """The workers of one iterator."""

    def __init__(
        self,
        blueprint: Blueprint,
        *,
        payload: Payload | None,
        machine: Machine,
        share: Share,
        shared_seed: int | None,
        stall_timeout: float | None,
        on_incident: Callable[[Incident], None],
        on_amended: Callable[[Incident, Incident, str], None],
        stats: Stats,
        logbook: Logbook | None = None,
        worker_memory_limit: int | str | None = None,
        said: Said | None = None,
        origin: Origin = _NOBODYS,
        explained: set[Hashable] | None = None,
        open_draws: bool = True,
        may_hurry: bool = False,
    ) -> None:
        """`origin` says whose pool it is, `explained` which kinds of death its loader has explained
        so far; `open_draws` if the sampler is the user's own: it may take any time, or wait, and
        signal handlers run in it; `may_hurry` if the machine may deepen."""
        self.owner = os.getpid()
        self.origin = origin
        self.machine = machine
        self.stats = stats
        self.user: Callable[[], object] | None = None  # a weak reference to the iterator
        self.broken: BaseException | None = None  # what closed it, if nobody wanted that
        self._wishes: deque[tuple[int, int, int]] = deque()  # signals: worker, generation, number
        self._midway = False  # in the middle of something that nobody can go on from
        self._shielded = False  # the user's signal handlers are put aside meanwhile
        self._open_draws = open_draws
        self._may_hurry = may_hurry
        self._paced = 0  # batches, as long as it may hurry,
        self._pace_began = 0.0  # and when the last few of them began
        self._brisk = False  # the last batch came soon
        self._let_run = kernel.yield_processor()
        self._auto_collation = blueprint.auto_collation
        self._logbook = logbook
        said = Said() if said is None else said
        self.lock = threading.RLock()
        method = "fork" if payload is None else payload.method
        with contextlib.ExitStack() as undo:
            if payload is not None:
                undo.callback(payload.close)
            coroner = Coroner(method, machine.workers, logbook, stall_timeout=stall_timeout)
            warden = Warden(
                share,
                worker_memory_limit,
                machine.workers,
                logbook=logbook,
                said=said,
                origin=origin,
                start_method=method,
                largest_batch=machine.largest,
            )
            self.watch = Watch(self)
            undo.callback(self.watch.cancel)
            with registry.descriptors():
                self.holdings = Holdings(
                    blueprint, payload, machine.workers, self.watch.wake, coroner.before_fork
                )
            undo.pop_all()
        self.obituaries = Obituaries(
            machine.recovery,
            self.holdings.boxes,
            coroner,
            blueprint.dataset,
            on_incident,
            origin,
            explained,
            on_amended,
        )
        pulses = [place.pulse for place in self.holdings.places]
        self.crew = Crew(
            machine,
            self.holdings,
            Epoch(shared_seed),
            share,
            silence=Silence(pulses, stall_timeout, time.monotonic()),
            coroner=coroner,
            warden=warden,
            obituaries=self.obituaries,
            stats=stats,
            said=said,
            logbook=logbook,
        )
        self.supervisor = self.crew.supervisor
        registry.enrol(self.watch)
        try:
            self.supervisor.tell(v.Began())
            coroner.begin()  # reads much; meanwhile the first worker is being born
            self.watch.start()
        except BaseException:
            self.watch.close_now()
            raise

    # -- the consumer's side --------------------------------------------------------------

    def next(self, draw: Callable[[], Any], timeout: float) -> Taken:
        """The next delivery, in the order the machine decides. Call it under the lock.

        It stays in `taken` until the consumer has made its batch of it, however often a signal
        handler raises in between.
        """
        crew = self.crew
        epoch = self.supervisor.epoch
        try:
            self._enter()
            if self.watch.stage is not OPEN:
                if epoch.ended:
                    self._leave()
                    return v.END  # and stays so, however often it is asked
                self._check()
            if (self.machine.largest or 0) >= LARGE:
                crew.give_back()
            if epoch.due:
                self._draw(draw)
            if epoch.delivered is None:
                self.supervisor.tell(v.ASKED)
                if epoch.delivered is None:
                    crew.hear_awaited()
                if epoch.delivered is None:
                    self._wait(draw, timeout)
            taken: Any = epoch.delivered
            if isinstance(taken, v.GaveUp) and taken.reason == "refused":
                taken = crew.refused
            epoch.taken, epoch.delivered = taken, None
            if isinstance(taken, v.Delivery):
                self._count(taken.result)
                if self._may_hurry:
                    self._look_at_the_pace()
                if epoch.due > 0:
                    self._draw(draw)
            else:
                epoch.ended = taken is v.END
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
        now = time.monotonic()
        if now - self._pace_began < PACED * QUICK:
            self._may_hurry = False
            self.supervisor.tell(v.HURRIED)
        self._pace_began = now

    def _count(self, result: Any) -> None:
        stats, machine = self.stats, self.machine
        if isinstance(result, Reported):
            result = result.result
        if isinstance(result, codec.Parcel):
            stats.bytes += result.nbytes
            stats.batches += 1  # else there is none: all its samples were left out, or it failed
        if machine.peak > stats.most_in_flight_bytes:
            stats.most_in_flight_bytes = machine.peak
        if machine.largest and machine.largest > stats.largest_batch_bytes:
            stats.largest_batch_bytes = machine.largest

    def _say_that_it_is_incomplete(self) -> None:
        """Instead of the first end: the sampler has failed, and had no more to give after that."""
        epoch = self.supervisor.epoch
        epoch.taken = None
        error = LoaderClosed(
            f"{self.origin.prefix}this epoch is incomplete: the sampler ended with "
            f"{epoch.sampler_error} in an earlier next(); iter(loader) begins a new one"
        )
        self._leave()  # a handler that raises must not take the place of what is said only once
        epoch.sampler_error = None
        raise error

    def unpacked(self) -> None:
        """The consumer has its batch: what it keeps is not in flight."""
        try:
            self._enter()
            if self.watch.stage is OPEN:
                self.supervisor.tell(v.UNPACKED)
            self._leave()
        except BaseException as error:
            self._fail(error)
            raise

    def done_with(self, taken: Taken) -> None:
        """The consumer has had this."""
        with self.lock:
            epoch = self.supervisor.epoch
            if epoch.taken is taken:  # and not, meanwhile, what another thread has taken
                epoch.taken = None
            if isinstance(taken, v.Delivery):
                self.supervisor.drop_hint(taken.task.epoch, taken.task.number)

    def _wait(self, draw: Callable[[], Any], timeout: float) -> None:
        """Wait for what the consumer is to get."""
        epoch = self.supervisor.epoch
        began = now = time.monotonic()
        deadline = began + timeout if timeout > 0 else None
        while epoch.delivered is None:
            if self._pump(None if deadline is None else deadline - now):
                if deadline is not None:
                    deadline = time.monotonic() + timeout
            elif deadline is not None and time.monotonic() >= deadline:
                self._midway = False
                raise TimedOut
            now = time.monotonic()
            self._check()
            self._draw(draw)  # a replica that ended leaves room for another task
        if not isinstance(epoch.delivered, v.GaveUp):
            self.stats.waits += 1
            self.stats.wait_seconds += now - began

    def resume(
        self, shared_seed: int | None, draw: Callable[[], Any], account: Account | None
    ) -> None:
        """Begin another epoch on the same workers."""
        self.check_owner()
        with self._undivided():
            self._check()
            self.supervisor.epoch = Epoch(shared_seed, account)
            self.supervisor.tell(v.EpochBegan(shared_seed))
            self._draw(draw)

    def fill(self, draw: Callable[[], Any], account: Account | None) -> None:
        """Give the workers their first tasks."""
        with self._undivided():
            self.supervisor.epoch.account = account
            self._draw(draw)

    def _draw(self, draw: Callable[[], Any]) -> None:
        """Draw what is due. A worker gets all that is drawn now in one message, unless to draw may
        take long."""
        if self.supervisor.epoch.due > 1 and not self._open_draws:
            with self.supervisor.gathering():
                self._draw_each(draw)
        else:
            self._draw_each(draw)

    def _draw_each(self, draw: Callable[[], Any]) -> None:
        supervisor, epoch = self.supervisor, self.supervisor.epoch
        while epoch.due > 0:
            open_ = self._open_draws and self._shielded
            if open_:
                self._leave()  # one that raises here has not struck the sampler
                self._midway = True
            try:
                try:
                    index = draw()
                finally:
                    if open_:
                        self._shield()
            except StopIteration:
                epoch.due -= 1
                supervisor.tell(v.DRAINED)
            except BaseException as error:
                epoch.sampler_error = repr(error)
                if not interrupts.struck(error):  # else the index may be lost
                    self._midway = False
                raise
            else:
                epoch.due -= 1
                epoch.sampler_error = None
                index = keep(index)
                keys = keys_of(index, self._auto_collation)
                if epoch.account is not None:
                    supervisor.hint_at(epoch.drawn, epoch.account.brief(epoch.drawn, keys))
                    epoch.drawn += 1
                supervisor.tell(v.Drawn(index, keys))

    # -- the workers ----------------------------------------------------------------------

    def pid(self, worker: int, timeout: float = 30.0) -> int | None:
        """The pid of a worker, waiting until it is known."""
        deadline = time.monotonic() + timeout
        place = self.holdings.places[worker]
        while place.pid is None and self.machine.failure is None:
            if not self._learn(deadline - time.monotonic()):
                break
        return place.pid

    def exitcode(self, worker: int) -> int | None:
        self._learn(0)
        return self.holdings.places[worker].exitcode

    def _learn(self, timeout: float) -> bool:
        """Take in what has happened; whether it makes sense to ask again."""
        if self.owner != os.getpid() or self.watch.stage is not OPEN:
            return False
        if not self.lock.acquire(timeout=TURN):
            return timeout > 0  # another thread waits for the workers, and hears what there is
        try:
            if self.watch.stage is not OPEN or self._midway:
                return False  # midway: a signal handler of this thread asks
            with self._undivided():
                self._pump(min(timeout, TURN))
            return timeout > 0
        finally:
            self.lock.release()

    def signal(self, worker: int, number: int) -> None:
        """Have a signal sent to the process that is in this worker's place now."""
        self.check_owner()
        self._wishes.append((worker, self.machine.generation(worker), number))
        if self.lock.acquire(blocking=False):
            try:
                if not self._midway:  # else a signal handler of this thread asks
                    self._send_signals()
                    return
            finally:
                self.lock.release()
        self.watch.ring()

    def _send_signals(self) -> None:
        """Those that were asked for. If the process meant is gone by now, the nursery knows."""
        while self._wishes:
            worker, generation, number = self._wishes.popleft()
            if self.watch.stage is not CLOSED:
                self.crew.signal(worker, generation, number)

    @property
    def usable(self) -> bool:
        """Whether another epoch can begin on these workers."""
        with self.lock:
            over = self.watch.stage is not OPEN or self._midway
            return not over and self.machine.failure is None

    def _pump(self, timeout: float | None) -> bool:
        """Wait for something to happen and deal with it; whether a worker was heard."""
        if self.crew.hear_awaited():
            return True
        if self._brisk and self._hear_soon():
            return True
        limit = self.crew.interval()
        began = time.monotonic()
        heard = self._attend(limit if timeout is None else min(limit, max(0.0, timeout)))
        self._brisk = time.monotonic() - began < BRISK
        if self.obituaries.pending:
            self.watch.settle_soon()
        return heard

    def _attend(self, wait: float) -> bool:
        """Deal with what happens within so many seconds, and with what is due."""
        shielded = self._shielded
        self._open_up()
        events = self.holdings.poll.poll(wait * 1000)
        if shielded and not self._shielded:
            self._shield()
        self._midway = True
        heard = False
        for fd, mask in events:
            if self.watch.stage is not OPEN:
                return heard  # by a signal handler or the garbage collector, in this thread
            if fd == self.watch.wake:
                self.watch.heard_bell()
            else:
                heard |= self.crew.attend(fd, mask)
        if self._wishes:
            self._send_signals()
        self.crew.mind_the_time()
        return heard

    def _hear_soon(self) -> bool:
        """Batches follow each other so quickly that to sleep and be woken would take longer: let
        others run for a moment, and look again."""
        for _ in range(LOOKS):
            self._midway = False
            self._let_run()
            self._midway = True
            if self.crew.hear_awaited():
                return True
        return False

    # -- watching and closing -------------------------------------------------------------

    def look(self) -> tuple[float, dict[int, int]] | None:
        """One look of the watch: see `Watched`."""
        with self._undivided():
            if self.watch.stage is not OPEN:
                return None
            self._attend(0)
            return self.crew.interval(), self.crew.watched()

    def unsettled(self) -> bool:
        """See `Watched`."""
        return self.obituaries.pending or (self._logbook is not None and self._logbook.pending)

    def settle(self) -> None:
        """What is done without the lock: see `Watched`."""
        self.obituaries.settle()
        if self._logbook is not None:
            self._logbook.flush()

    def forsaken(self) -> bool:
        """Whether nobody can use this pool any more.

        The iterator's finalizer closes it then; but an interrupt that strikes just as Python calls
        the finalizer is raised in there, and the call is lost.
        """
        return self.user is not None and self.user() is None

    # Bound here: a finaliser of the user's may call it when modules have been taken apart.
    def close(
        self, close_all: Callable[[list[registry.Member]], None] = registry.close_all
    ) -> None:
        """End the workers and let go of everything but the batches the consumer keeps."""
        close_all([self.watch])

    def end_workers(self, deadline: float) -> None:
        """By the watch."""
        self.crew.end(deadline)

    def let_go(self) -> None:
        """By the watch."""
        self.holdings.let_go()

    def disown(self) -> None:
        """In a process forked from the owner."""
        self.holdings.disown()

    # -- nothing half done ----------------------------------------------------------------

    def check_owner(self) -> None:
        if os.getpid() != self.owner:
            raise LoaderClosed(
                f"this iterator belongs to process {self.owner}, not to its child {os.getpid()}; "
                "iter(loader) makes one that is the child's own"
            )

    def _check(self) -> None:
        if self.watch.stage is not OPEN:
            if registry.exiting() and threading.current_thread() is not threading.main_thread():
                # Ends a daemon thread without a word (only if it is exactly this type).
                self._midway = False
                raise SystemExit
            self._midway = False
            how = "closed or interrupted"
            if self.broken is not None:
                how = f"closed because of {self.broken!r} in an earlier next() or between two"
            raise LoaderClosed(
                f"{self.origin.prefix}this iterator was {how}; iter(loader) makes a new one"
            ) from self.broken

    def _enter(self) -> None:
        """From here until `_midway` is False again nothing may be left half done.

        A signal handler may raise between any two instructions. While we only wait that does no
        harm; elsewhere a message or an index may be lost, and the pool must not go on as if
        nothing had been. So the user's handlers are put aside until we wait or are done. What
        is left is Ctrl-C, signals that nobody expects to raise, and a sampler of the user's own.
        The flag also tells when not even the ``except`` clause has run, because a second signal
        struck there. Whoever enters also sees to it that what is raised gets to `_fail`.
        """
        if self._midway:
            self._break(None)
        if not self._shielded or interrupts.bring_back():  # else `_fail` never came to its end
            self._shield()
        self._midway = True

    def _shield(self) -> None:
        self._shielded = True  # before they are: a handler that we leave alone may raise in between
        self._shielded = interrupts.put_aside()

    def _leave(self) -> None:
        """Nothing is half done, and this thread goes its way: what an order has left unsent is the
        watch's now. Signal handlers that had to wait run now, and may raise."""
        if self.holdings.backlog:
            self.watch.ring()
        self._open_up()

    def _open_up(self) -> None:
        """Nothing is half done. Signal handlers that had to wait run now, and may raise."""
        self._midway = False
        if self._shielded and interrupts.bring_back():
            self._shielded = False

    def _fail(self, error: BaseException) -> None:
        """Something was raised after `_enter`."""
        try:
            if self._midway:
                self._break(error)
        finally:
            self._leave()

    @contextlib.contextmanager
    def _undivided(self) -> Iterator[None]:
        """The lock, and `_enter`, for all that is less often done than `next`."""
        with self.lock:
            try:
                self._enter()
                yield
                self._leave()
            except BaseException as error:
                self._fail(error)
                raise

    def _break(self, error: BaseException | None) -> None:
        """Something struck in the middle of something: nobody can go on from there."""
        if self.watch.stage is OPEN:
            self.broken = error
        self.watch.dismiss()
        self._midway = False
