"""What a worker process does, from its first instruction to its last.

It is forked from the nursery, so it has torch, NumPy and the dataset in memory already. It makes
itself safe (dies with the nursery, ignores the signals that are meant for the trainer, leaves its
stack in the black box when it crashes), becomes what torch's worker with its id would be (seeds,
``get_worker_info()``, ``worker_init_fn``), takes up where its predecessor was, and then answers one
item after the other until it is told to stop or its channel ends.

Everything that can go wrong in the user's code is an answer, not a death: the worker catches
``BaseException``, pickles in its own thread, and never leaves an item unanswered.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import functools
import gc
import os
import pickle
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import WorkerInfo
from torch.utils.data.graph_settings import apply_random_seed

from holdfast.autopsy import thread_notes
from holdfast.autopsy.blackbox import IDLE, REPLAY, SEND, START, STOP, Recorder
from holdfast.engine.careful import DROPPED
from holdfast.engine.careful_iterable import CarefulIterableFetcher
from holdfast.engine.careful_map import CarefulMapFetcher
from holdfast.engine.channel import Channel
from holdfast.engine.exceptions import Failure, describe
from holdfast.engine.faults import Faults
from holdfast.engine.fetch import IterableFetcher, MapFetcher, state_of
from holdfast.engine.lifeline import arm
from holdfast.engine.pickling import find_unpicklable
from holdfast.engine.protocol import (
    BATCH,
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
    Blueprint,
    Equipment,
    Setup,
)
from holdfast.engine.randomness import Randomness, restore, saved, seed_worker
from holdfast.memory import codec, collate
from holdfast.memory.arena import Arena
from holdfast.memory.housekeeping import Housekeeper
from holdfast.memory.leaks import Failed, Findings, Tracer
from holdfast.samples.substitute import Brief

__all__ = ["run"]

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def run(setup: Setup, equipment: Equipment, find_blueprint: Callable[[], Blueprint]) -> None:
    """The life of a worker. Returns when it is to exit with status 0."""
    gc.freeze()  # what is inherited: a collection would look at, and so copy, all of it
    _die_with(equipment.parent)
    arm(equipment.lifeline)
    channel = Channel(socket.socket(fileno=equipment.channel))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prefer_for_oom()
    _let_others_finish()
    keeper = Housekeeper(setup.allowance)
    faults = Faults.asked_for(setup.worker, setup.generation)
    recorder = Recorder(equipment.blackboxes, setup.workers, setup.worker)
    keeper.noted = recorder.measured
    # torch puts its own handlers first, which would hide the stack; we do not install them.
    faulthandler.disable()
    faulthandler.enable(file=recorder.dump_fd, all_threads=True)
    thread_notes.install(recorder.dump_fd)
    if faults:
        faults.strike("before-setup")
    try:
        blueprint = find_blueprint()
    except BaseException as error:
        _refuse(channel, describe(error, position=None, step="bootstrap"))
        channel.close()
        return
    arena = Arena(equipment.arena, setup.held)
    try:
        _Worker(setup, blueprint, channel, recorder, arena, faults, keeper).work()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent has closed the channel: it wants nothing more
    channel.close()
    recorder.note(-1, -1, STOP)
    if faults:
        faults.strike("before-stop")
    gc.freeze()  # nothing is worth collecting on the way out


class _Worker:
    def __init__(
        self,
        setup: Setup,
        blueprint: Blueprint,
        channel: Channel,
        recorder: Recorder,
        arena: Arena,
        faults: Faults | None,
        keeper: Housekeeper,
    ) -> None:
        self.setup = setup
        self.keeper = keeper
        self.fresh = True  # has made no batch yet
        self.retired = False
        self.tracer = Tracer(setup.trace, dataset=blueprint.dataset) if setup.trace else None
        self.blueprint = blueprint
        self.careful = blueprint.policy is not None  # with samples that may be bad
        self.dataset = blueprint.dataset
        self.channel = channel
        self.recorder = recorder
        self.arena = arena
        self.faults = faults
        self.randomness = Randomness()
        self.shared_rng = torch.Generator()
        self.fetcher: MapFetcher | IterableFetcher | None = None
        self.broken: Failure | None = None  # what went wrong in setting up
        self.uninitialised = True  # until worker_init_fn has run through
        self.loaded = False  # whether the dataset was given a state to go on from
        self.exhausted = False  # the parent knows: it told us, or we told it
        self.answered = setup.answered
        self.orders: deque[tuple[str, int, Any]] = deque()  # received and not carried out
        self.wishes: set[str] = set()  # orders that come before all others, once a batch is done
        self.rung = 0  # how often the bell had been
        arena.look_for_released = self._look_for_released

    def work(self) -> None:
        self.recorder.note(-1, -1, START)
        collate.install(self.arena)
        try:
            self._become()
            self.uninitialised = False
            if self.faults:
                self.faults.strike("after-setup")
            self._take_up()
        except BaseException as error:
            self.broken = describe(error, position=None, step="start-up")
        self.keeper.begin()
        if self.faults:
            self.faults.strike("before-ready")
        self.recorder.note(-1, -1, IDLE)
        if self.keeper.raised:
            self.channel.send(RAISED + SIZES.pack(self.keeper.private(), self.keeper.limit or 0))
        self.channel.send(READY)
        if self.faults:
            self.faults.strike("after-ready")
        keeper = self.keeper
        while True:
            if not (self.orders or self.wishes):
                message = self.channel.receive()
                if message is None:
                    return
                self._take_in(message)
            if self.wishes:
                if "retire" in self.wishes:
                    self._retire()
                    return
                self.wishes.clear()
                self.arena.shrink()
            if not self.orders:
                continue
            kind, number, content = self.orders.popleft()
            if kind == "task":
                self._do_task(number, content)
            elif kind == "briefed":
                self._do_task(number, *content)
            elif kind == "trial":
                self._do_trial(number, *content)
            elif kind == "resume":
                self._do_resume(content)
            else:
                raise AssertionError(f"an order that no worker knows: {kind!r}")
            if self.retired:
                return
            if self.tracer is not None and kind in ("task", "briefed"):
                self._look_for_leaks(Tracer.step)
            keeper.batches += 1
            now = time.monotonic()
            if now >= keeper.due_at:
                self.arena.trim()
                if not keeper.look(now, traced=self.tracer is not None):
                    self._retire()
                    return
                if keeper.measured:
                    self._tell_sizes()
            if self.recorder.bell[0] != self.rung:
                self.rung = self.recorder.bell[0]
                self._look_for_released()
            self.recorder.note(-1, -1, IDLE)

    def _look_for_released(self) -> bool:
        """In the middle of a batch: take in what has been sent meanwhile, for its blocks."""
        found = False
        while (message := self.channel.waiting()) is not None:
            found |= self._take_in(message)
        return found

    def _take_in(self, message: bytes) -> bool:
        """Note an order, and release the blocks that came with it; whether there were any."""
        kind, number, content, released = pickle.loads(message)
        for offset in released:
            self.arena.release(offset)
        if kind in ("retire", "shrink"):
            self.wishes.add(kind)
        elif kind != "released":
            self.orders.append((kind, number, content))
        return bool(released)

    def _tell_sizes(self) -> None:
        point = self.keeper.point(self.arena.reserved)
        self.channel.send(MEMORY + POINT.pack(*dataclasses.astuple(point)))

    def _retire(self) -> None:
        """The last word: all that was answered counts, all else is for a fresh process."""
        self.retired = True
        self._look_for_leaks(Tracer.end)
        self._tell_sizes()
        self.channel.send(RETIRED)

    def _look_for_leaks(self, look: Callable[[Tracer], Findings | None]) -> None:
        if self.tracer is None:
            return
        try:
            found = look(self.tracer)
        except MemoryError:  # no room to look: it is about to be replaced, and so is not the last
            self.tracer.close()
            self.tracer = None
            return
        except Exception:  # no reason to lose a healthy worker, and with it a batch
            self.tracer.close()
            self.tracer = None
            self.channel.send(FOUND + pickle.dumps(Failed(traceback.format_exc()), 5))
            return
        if found is not None:
            self.tracer = None
            self.channel.send(FOUND + pickle.dumps(found, 5))

    # -- becoming torch's worker ----------------------------------------------------------

    def _become(self) -> None:
        torch.multiprocessing._set_thread_name("pt_data_worker")
        torch.set_num_threads(1)
        worker, blueprint = self.setup.worker, self.blueprint
        seed = seed_worker(blueprint.base_seed, worker)
        self._seed_datapipe(self.setup.shared_seed)
        torch_worker._worker_info = WorkerInfo(
            id=worker, num_workers=blueprint.num_workers, seed=seed, dataset=self.dataset
        )
        if blueprint.worker_init_fn is not None:
            blueprint.worker_init_fn(worker)

    def _seed_datapipe(self, seed: int | None) -> None:
        if isinstance(self.dataset, IterDataPipe):
            if seed is None:
                raise AssertionError("shared_seed must be provided for IterDataPipe workers")
            self.shared_rng.manual_seed(seed)
            self.dataset = apply_random_seed(self.dataset, self.shared_rng)

    def _take_up(self) -> None:
        """Go to where the predecessor was; a first worker has nothing to catch up with."""
        setup = self.setup
        self.exhausted = setup.exhausted
        state = None if setup.dataset_state is None else pickle.loads(setup.dataset_state)
        knows = state is not None and state["dataset"] is not None
        self.loaded = knows and not self.exhausted
        if self.blueprint.iterable and not self.loaded:
            self._pass_epochs(state)
        if setup.epoch_state is not None:
            restore(setup.epoch_state)
        if not self.exhausted:
            self._make_fetcher(state)
            if isinstance(self.fetcher, IterableFetcher) and state is None:
                self._replay(setup.replica)
        if setup.random_state is not None:
            restore(setup.random_state)
            if not self.recorder.take_up(setup.answered):
                self.randomness.keep(self.recorder, setup.answered)

    def _make_fetcher(self, state: dict[str, Any] | None = None) -> None:
        blueprint = self.blueprint
        kind: Callable[..., MapFetcher | IterableFetcher]
        kind = IterableFetcher if blueprint.iterable else MapFetcher
        if blueprint.policy is not None:
            kind = functools.partial(
                CarefulIterableFetcher if blueprint.iterable else CarefulMapFetcher,
                policy=blueprint.policy,
                worker_id=self.setup.worker,
            )
        if state is not None and state["dataset"] is not None:
            self.dataset.load_state_dict(state["dataset"])
        self.fetcher = kind(
            self.dataset,
            auto_collation=blueprint.auto_collation,
            collate_fn=blueprint.collate_fn,
            drop_last=blueprint.drop_last,
            recorder=self.recorder,
            arena=self.arena,
            faults=self.faults,
        )
        self.fetcher.tidy = self.keeper.between_samples
        if isinstance(self.fetcher, IterableFetcher) and state is not None:
            if state["iterator"] is not None:
                self.fetcher.iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
            self.fetcher.ended = state["ended"]
            self.fetcher.ahead = state["ahead"]

    def _pass_epochs(self, state: dict[str, Any] | None) -> None:
        """Bring the dataset to where the epochs that are over have left it.

        Many datasets count them, or shuffle by their number, and do so when iter() is called or, if
        that is a generator, when the first sample is drawn. The state in which one ended saves
        going through all of them; but it is a state to go on from, so that end has to be met
        before another epoch can begin.
        """
        setup = self.setup
        epochs = setup.passed + (self.exhausted and setup.replica > 0)
        resting = None if setup.resting_state is None else pickle.loads(setup.resting_state)
        if self.exhausted:
            resting = state["dataset"] if state is not None else None
        if resting is not None:
            self.dataset.load_state_dict(resting)
            epochs = 1
        for _ in range(epochs):
            self.recorder.note(-1, -1, REPLAY)
            self._draw_and_drop(lambda: iter(self.dataset))
        if epochs:
            self._seed_datapipe(setup.shared_seed)  # the seed it had was for one iter() only

    def _draw_and_drop(self, samples: Callable[[], Iterator[Any]]) -> None:
        try:
            next(samples())
        except BaseException:  # the end, or what was delivered as an error when it was its turn
            return

    def _replay(self, batches: int) -> None:
        """Draw again what was delivered already, and drop it."""
        assert isinstance(self.fetcher, IterableFetcher)
        for _ in range(batches):
            self.recorder.note(-1, -1, REPLAY)
            try:
                self.fetcher.fetch(-1, self.blueprint.batch_index)
            except StopIteration:
                self.fetcher.ended = True  # the next task is answered with the end
                return
            except BaseException:  # it was delivered as an error the first time
                continue

    # -- items ----------------------------------------------------------------------------

    def _do_task(self, number: int, index: Any, brief: Brief | None = None) -> None:
        if self.exhausted:
            return
        if self.broken is not None:
            self._answer(ERROR, number, pickle.dumps(self.broken))
            return
        fetcher = self.fetcher
        assert fetcher is not None
        try:
            if brief is None:
                batch = fetcher.fetch(number, index)
            else:
                assert isinstance(fetcher, CarefulMapFetcher)
                batch = fetcher.fetch(number, index, brief)
        except StopIteration as stop:
            if self.blueprint.iterable:
                self.exhausted = True
                self._answer(ENDED, number, b"")
            else:
                self._fail(number, stop)
        except BaseException as error:
            if self._lacked_memory(error):
                self._retire()
            else:
                self._fail(number, error)
        else:
            if self.careful and self._lacked_memory(None):
                self._retire()
                return
            self.fresh = False
            if batch is DROPPED:
                self._answer(NOTHING_LEFT, number, b"")
                return
            frame = self._encode(number, batch)
            del batch  # or its part of the arena would stay in use on this side
            if frame is not None:
                self._answer(BATCH, number, frame)

    def _lacked_memory(self, error: BaseException | None) -> bool:
        """Whether a sample failed for lack of memory that others may have used up before it.

        Then a fresh process makes this batch again. If it fails there too it is the sample's own.
        """
        if self.fresh or not self.keeper.limits_allocations:
            return False
        if error is not None:
            return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        fetcher = self.fetcher
        assert isinstance(fetcher, (CarefulMapFetcher, CarefulIterableFetcher))
        return any("MemoryError" in bad.error for bad in fetcher.reports)

    def _do_trial(self, number: int, index: Any, brief: Brief | None, code: int) -> None:
        """Load one sample by itself. It is no answer to a batch: the random state stays."""
        if self.broken is None:
            assert isinstance(self.fetcher, CarefulMapFetcher)
            self.fetcher.alone(number, index, brief, code)
        self.channel.send(SURVIVED)

    def _encode(self, number: int, batch: Any) -> bytes | None:
        """The batch as it will be sent; None if it does not pickle, which is then the answer."""
        fetcher = self.fetcher
        assert fetcher is not None
        fetcher.step = "send"
        self.recorder.note(number, -1, SEND)
        if self.faults:
            self.faults.strike("before-encode", number)
        try:
            return codec.encode(batch, self.arena)
        except BaseException as error:
            path = find_unpicklable(batch, "batch")
            if path is not None and len(error.args) == 1:
                error.args = (f"{error}: {path} cannot be sent to the main process",)
            self._fail(number, error)
            return None

    def _fail(self, number: int, error: BaseException) -> None:
        fetcher = self.fetcher
        assert fetcher is not None
        failure = describe(error, position=self.recorder.position, step=fetcher.step)
        self._answer(ERROR, number, pickle.dumps(failure))

    def _do_resume(self, seed: int | None) -> None:
        if self.faults:
            self.faults.strike("before-resume")
        self.exhausted = False
        if not self.uninitialised:
            self.broken = None
        epoch_state = saved()
        fetcher = self.fetcher
        if self.loaded and self.answered == self.setup.answered:
            # Nothing was drawn since a state was loaded: the dataset would go on from it now.
            assert isinstance(fetcher, IterableFetcher)
            iterator = fetcher.iterator
            self._draw_and_drop(lambda: iterator)
            restore(epoch_state)
        resting_state = self._resting_state()
        try:
            self._seed_datapipe(seed)
            self._make_fetcher()
        except BaseException as error:
            self.broken = self.broken or describe(error, position=None, step="start-up")
        self._answer(RESUMED, 0, epoch_state, resting_state)
        if self.faults:
            self.faults.strike("after-resume")

    def _answer(self, kind: bytes, number: int, content: bytes, state: bytes | None = None) -> None:
        """Save the random state, then send: see the black box for why in this order."""
        self.answered += 1
        self.randomness.keep(self.recorder, self.answered)
        if state is None:
            state = self._dataset_state() if self.blueprint.iterable else b""
        if self.careful and self.fetcher is not None:
            self._report()
        message = b"".join((kind, HEAD.pack(number, len(state)), state, content))
        if kind is not BATCH:  # of which it is noted since its encoding began
            self.recorder.note(number, -1, SEND)
        faults = self.faults
        if faults is None:
            self.channel.send(message)
        else:
            faults.strike("before-send", number)
            self.channel.send(message, lambda: faults.strike("mid-send", number))
            faults.strike("after-send", number)

    def _report(self) -> None:
        """Bad samples travel just ahead of the answer; without it they are forgotten."""
        fetcher = self.fetcher
        assert isinstance(fetcher, (CarefulMapFetcher, CarefulIterableFetcher))
        if fetcher.reports:
            self.channel.send(REPORT + pickle.dumps(fetcher.reports, 5))
            fetcher.reports = []

    def _dataset_state(self) -> bytes:
        """The state of an iterable dataset that offers one, to take up from after a death."""
        fetcher = self.fetcher
        if not isinstance(fetcher, IterableFetcher):
            return b""
        try:
            dataset = state_of(self.dataset)
            iterator = None if fetcher.iterator is self.dataset else state_of(fetcher.iterator)
            if dataset is None and iterator is None:
                return b""
            return pickle.dumps(
                {
                    "dataset": dataset,
                    "iterator": iterator,
                    "ended": fetcher.ended,
                    "ahead": fetcher.ahead,
                }
            )
        except Exception:
            return b""  # it will be replayed from its start instead

    def _resting_state(self) -> bytes:
        """The dataset's own state between two epochs, if it offers one."""
        try:
            state = state_of(self.dataset) if self.blueprint.iterable else None
            return b"" if state is None else pickle.dumps(state)
        except Exception:
            return b""  # it will be sent through all epochs instead


def _refuse(channel: Channel, failure: Failure) -> None:
    """Tell the parent why this worker cannot even begin, and wait to be dismissed."""
    try:
        channel.send(REFUSED + pickle.dumps(failure))
        while channel.receive() is not None:
            pass
    except OSError:
        pass


def _die_with(parent: int) -> None:
    """Be killed when the nursery goes, whatever this process is doing then.

    The nursery has one thread that never ends, so the signal cannot come early; comparing the
    parent afterwards closes the gap before it was armed.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _let_others_finish() -> None:
    """Do not interrupt a process that is running when this one has something to do again.

    With small batches and few cores that happens several times in a millisecond: the trainer asks
    for a batch, and the worker that has waited for it takes the trainer's core before it has asked
    the next one. It is no lower priority: once it runs, it has the same share of the time. Whoever
    has chosen another policy keeps it.
    """
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        pass  # a sandbox does not let us: everything works as well, and a little slower


def _prefer_for_oom() -> None:
    """Let the kernel, when it must kill, take a worker and not the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            adjusted = min(1000, int(file.read()) + 500)
            file.seek(0)
            file.write(str(adjusted))
    except OSError:
        pass  # a kernel that does not let us: the default order holds
