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

import dataclasses
import faulthandler
import functools
import gc
import os
import pickle
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import WorkerInfo
from torch.utils.data.graph_settings import apply_random_seed

from holdfast import kernel
from holdfast.autopsy import thread_notes
from holdfast.autopsy.blackbox import IDLE, SEND, START, STATE, STOP, Recorder
from holdfast.engine import alone, leak_probe
from holdfast.engine.careful import DROPPED
from holdfast.engine.careful_iterable import CarefulIterableFetcher
from holdfast.engine.careful_map import CarefulMapFetcher
from holdfast.engine.channel import Channel
from holdfast.engine.continuation import TRUST, Finding
from holdfast.engine.exceptions import Failure, describe
from holdfast.engine.faults import Faults
from holdfast.engine.fetch import IterableFetcher, MapFetcher
from holdfast.engine.fingerprint import (
    DROPPED_BATCH,
    NO_BATCH,
    fingerprint,
    fingerprint_of_error,
)
from holdfast.engine.lifeline import arm
from holdfast.engine.pickling import find_unpicklable
from holdfast.engine.protocol import (
    BATCH,
    ENDED,
    ERROR,
    FOUND,
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
    Blueprint,
    Equipment,
    Probe,
    Setup,
)
from holdfast.engine.randomness import OWN_AT, Randomness, seed_worker
from holdfast.engine.take_up import TakeUp, draw_and_drop, resting_state, state_now
from holdfast.memory import codec, collate
from holdfast.memory.arena import Arena
from holdfast.memory.housekeeping import Housekeeper
from holdfast.samples.record import message_of
from holdfast.samples.substitute import Brief

__all__ = ["run"]

WAITING = 0.5  # seconds between two signs of life of a worker that waits to be told something


def run(setup: Setup, equipment: Equipment, find_blueprint: Callable[[], Blueprint]) -> None:
    """The life of a worker. Returns when it is to exit with status 0."""
    gc.freeze()  # what is inherited: a collection would look at, and so copy, all of it
    _die_with(equipment.parent)
    arm(equipment.lifeline)
    channel = Channel(socket.socket(fileno=equipment.channel))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prefer_for_oom(1000 if setup.beside else 500)
    if setup.probe is None:
        kernel.let_others_finish()
    else:
        kernel.let_others_run()
    keeper = Housekeeper(setup.allowance)
    faults = Faults.asked_for(setup.worker, setup.generation)
    recorder = Recorder(equipment.blackboxes, setup.regions, setup.region, equipment.dump)
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
        if not setup.beside:
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
        self.blueprint = blueprint
        self.careful = blueprint.policy is not None  # with samples that may be bad
        self.dataset = blueprint.dataset
        self.channel = channel
        self.recorder = recorder
        self.arena = arena
        self.faults = faults
        self.randomness = Randomness(self._roots, STATE - OWN_AT)
        self.shared_rng = torch.Generator()
        self.fetcher: MapFetcher | IterableFetcher | None = None
        self.broken: Failure | None = None  # what went wrong in setting up
        self.broken_mark = NO_BATCH  # which stands for it
        self.uninitialised = True  # until worker_init_fn has run through
        self.loaded = False  # whether the dataset was given a state that nothing was drawn from yet
        self.exhausted = False  # the parent knows: it told us, or we told it
        self.answered = setup.answered
        self.orders: deque[tuple[str, int, Any]] = deque()  # received and not carried out
        self.wishes: dict[str, Any] = {}  # orders that come before all others, once a batch is done
        self.rung = 0  # how often the bell had been
        self.remarked: set[str] = set()
        arena.look_for_released = self._look_for_released

    def work(self) -> None:
        self.recorder.note(-1, -1, START)
        if self.setup.probe is None:
            collate.install(self.arena)
        if self.setup.accused:
            alone.listen(self.recorder)
        try:
            self._become()
            self.uninitialised = False
            if self.faults:
                self.faults.strike("after-setup")
        except BaseException as error:
            self.fail(error)
        if self.faults:
            self.faults.strike("before-ready")
        if not self.setup.beside:
            # To catch up with its predecessor may take long, and is no longer a part of the start.
            self.channel.send(READY)
        if self.broken is None:
            try:
                if not self._take_up():
                    return
            except BaseException as error:
                self.fail(error)
        if self.setup.rehearsal is not None:
            return  # it could not even begin: its end says so, and the worker stays
        self.keeper.begin()
        if self.setup.probe is not None:
            self._probe(self.setup.probe)
            return
        self.recorder.note(-1, -1, IDLE)
        if self.keeper.raised:
            self.channel.send(RAISED + SIZES.pack(self.keeper.private(), self.keeper.limit or 0))
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
                if "stay" in self.wishes:
                    keeper.stay(for_good=self.wishes["stay"])
                if "ask" in self.wishes:
                    self._ask_to_go()
                if "shrink" in self.wishes:
                    self.arena.shrink()
                self.wishes.clear()
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
            keeper.batches += 1
            now = time.monotonic()
            if now >= keeper.due_at:
                self.arena.trim()
                if not keeper.look(now):
                    if not self.blueprint.iterable:
                        self._retire()
                        return
                    self._ask_to_go()
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
        if kind in ("retire", "shrink", "ask", "stay"):
            self.wishes[kind] = content
        elif kind == "several":
            self.orders.extend(content)
        elif kind != "released":
            self.orders.append((kind, number, content))
        return bool(released)

    def _tell_sizes(self) -> None:
        point = self.keeper.point(self.arena.reserved)
        self.channel.send(MEMORY + POINT.pack(*dataclasses.astuple(point)))

    def _retire(self) -> None:
        """The last word: all that was answered counts, all else is for a fresh process."""
        self.retired = True
        self._tell_sizes()
        self.channel.send(RETIRED)

    def _ask_to_go(self) -> None:
        """It is too large; but first it must be known that its stream can be continued."""
        self.keeper.ask()
        sizes = SIZES.pack(self.keeper.private(), self.keeper.limit or 0)
        self.channel.send(GROWN + sizes + (self.recorder.kept(self.answered - 1) or b""))

    def _may_go(self) -> bool:
        """Ask, and wait for the answer: it cannot go on without."""
        self._ask_to_go()
        position = self.recorder.cell[0]  # of the sample that failed: it is named if we stay
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        while not ({"retire", "stay"} & self.wishes.keys()):
            self.recorder.note(-1, -1, IDLE)  # waiting is no stall, however long that takes
            if not poll.poll(WAITING * 1000):
                continue
            message = self.channel.receive()
            if message is None:
                raise BrokenPipeError
            self._take_in(message)
            if "ask" in self.wishes:
                del self.wishes["ask"]
                self._ask_to_go()
        if "retire" in self.wishes:
            return True
        self.recorder.cell[0] = position
        self.keeper.stay(for_good=self.wishes.pop("stay"))
        return False

    def _probe(self, probe: Probe) -> None:
        found = None if self.broken is not None else leak_probe.find(self, probe)
        if found is not None:
            self.channel.send(FOUND + pickle.dumps(found, 5))

    # -- becoming torch's worker ----------------------------------------------------------

    def _become(self) -> None:
        name = "pt_data_worker" if self.setup.probe is None else "hf_leak_probe"
        torch.multiprocessing._set_thread_name(name)
        torch.set_num_threads(1)
        worker, blueprint = self.setup.worker, self.blueprint
        seed = seed_worker(blueprint.base_seed, worker)
        self.seed_datapipe(self.setup.shared_seed)
        torch_worker._worker_info = WorkerInfo(
            id=worker, num_workers=blueprint.num_workers, seed=seed, dataset=self.dataset
        )
        if blueprint.worker_init_fn is not None:
            blueprint.worker_init_fn(worker)
        self.randomness.begin(self.answered)

    def seed_datapipe(self, seed: int | None) -> None:
        if isinstance(self.dataset, IterDataPipe):
            if seed is None:
                raise AssertionError("shared_seed must be provided for IterDataPipe workers")
            self.shared_rng.manual_seed(seed)
            self.dataset = apply_random_seed(self.dataset, self.shared_rng)

    def _roots(self) -> Iterator[tuple[str, Any]]:
        """What may have random generators of its own."""
        yield "dataset", self.dataset
        yield "collate_fn", self.blueprint.collate_fn
        yield "on_bad_sample", self.blueprint.on_bad_sample
        if isinstance(self.fetcher, IterableFetcher):
            yield "iterator", self.fetcher.iterator

    def fail(self, error: BaseException) -> None:
        """It could not be set up: that is the answer to all it is asked for."""
        self.broken = describe(error, position=None, step="start-up")
        self.broken_mark = fingerprint_of_error(error)

    def private(self) -> int:
        return self.keeper.private()

    def _take_up(self) -> bool:
        """Go to where the predecessor was; whether this process is the one to go on from there. A
        first worker has nothing to catch up with."""
        setup = self.setup
        self.exhausted = setup.exhausted
        finding = None
        if setup.plan is not None:
            finding = TakeUp(self, setup.plan)()
        elif not self.exhausted:
            self.make_fetcher()
        if finding is not None and not self._goes_on(finding):
            return False
        if setup.random_state is not None:
            # Whether a stream goes on where it was is shown by what it yields.
            number = None if self.blueprint.iterable else setup.answered
            self.randomness.restore(setup.random_state, number)
            if not self.recorder.take_up(setup.answered):
                self.randomness.keep(self.recorder, setup.answered)
        return True

    def _goes_on(self, finding: Finding) -> bool:
        """Tell what was found; whether that is no reason to leave."""
        self.loaded = finding.way == TRUST
        if isinstance(self.fetcher, CarefulIterableFetcher):
            self.fetcher.reports = []  # they were told when it was their turn
        finding = dataclasses.replace(finding, private=self.private())
        self.channel.send(TAKEN_UP + pickle.dumps(finding, 5))
        return not (finding.leaves or finding.lost or self.setup.rehearsal is not None)

    def make_fetcher(self, state: dict[str, Any] | None = None) -> None:
        blueprint = self.blueprint
        kind: Callable[..., MapFetcher | IterableFetcher]
        kind = IterableFetcher if blueprint.iterable else MapFetcher
        if blueprint.policy is not None:
            kind = functools.partial(
                CarefulIterableFetcher if blueprint.iterable else CarefulMapFetcher,
                policy=blueprint.policy,
                worker_id=self.setup.worker,
                randomness=self.randomness,
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
        self.fetcher.remark = self._remark
        if isinstance(self.fetcher, IterableFetcher) and state is not None:
            if state["iterator"] is not None:
                self.fetcher.iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
            self.fetcher.ended = state["ended"]
            self.fetcher.ahead = state["ahead"]
            self.fetcher.made = state["made"]

    # -- items ----------------------------------------------------------------------------

    def _do_task(self, number: int, index: Any, brief: Brief | None = None) -> None:
        if self.exhausted:
            return
        if self.broken is not None:
            self._answer(ERROR, number, pickle.dumps(self.broken), self.broken_mark)
            return
        try:
            if self.randomness.own.waiting:
                batch = self._fetch_for_those_that_wait(number, index, brief)
            else:
                batch = self._fetch(number, index, brief)
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
                self._fail(number, error, fingerprint_of_error(error))
        else:
            if self.careful and self._lacked_memory(None):
                self._retire()
                return
            self.fresh = False
            if batch is DROPPED:
                self._answer(NOTHING_LEFT, number, b"", DROPPED_BATCH)
                return
            mark = fingerprint(batch) if self.setup.marks else NO_BATCH
            frame = self._encode(number, batch, mark)
            del batch  # or its part of the arena would stay in use on this side
            if frame is not None:
                self._answer(BATCH, number, frame, mark)

    def _fetch(self, number: int, index: Any, brief: Brief | None) -> Any:
        fetcher = self.fetcher
        assert fetcher is not None
        if brief is None:
            return fetcher.fetch(number, index)
        assert isinstance(fetcher, CarefulMapFetcher)
        return fetcher.fetch(number, index, brief)

    def _fetch_for_those_that_wait(self, number: int, index: Any, brief: Brief | None) -> Any:
        """The predecessor had made generators as it went. If a batch brings some of them into being
        here, go back to where it began and make it again, from the states that have waited. (A
        stream cannot be asked twice.)"""
        randomness = self.randomness
        own = randomness.own
        if self.blueprint.iterable:
            own.arrived()
            own.give_up()
            return self._fetch(number, index, brief)
        while True:
            places = own.places()
            own.arrived(looked=True)
            before = randomness.saved(looked=True)
            randomness.born()  # before this batch
            batch, error = None, None
            try:
                batch = self._fetch(number, index, brief)
            except BaseException as raised:
                error = raised
            if not (own.may_arrive(randomness.born()) and own.some_are_there()):
                break
            del batch, error
            own.take_back(places)
            randomness.restore(before)
        own.missing()
        if error is not None:
            raise error
        return batch

    def _lacked_memory(self, error: BaseException | None) -> bool:
        """Whether a sample failed for lack of memory that others may have used up before it.

        Then a fresh process makes this batch again. If it fails there too it is the sample's own;
        and it stays the answer if the stream could not be continued there.
        """
        if self.fresh or not self.keeper.limits_allocations:
            return False
        if error is not None:
            lacked = isinstance(error, MemoryError) or "can't allocate memory" in message_of(error)
        else:
            fetcher = self.fetcher
            assert isinstance(fetcher, (CarefulMapFetcher, CarefulIterableFetcher))
            lacked = any("MemoryError" in bad.error for bad in fetcher.reports)
        return lacked and (not self.blueprint.iterable or self._may_go())

    def _do_trial(
        self, number: int, index: Any, brief: Brief | None, position: int | None, pause: float
    ) -> None:
        """Load one sample by itself. It is no answer to a batch: the random state stays."""
        if self.broken is None:
            fetcher = self.fetcher
            assert isinstance(fetcher, MapFetcher)
            places = self.randomness.own.places()
            before = self.randomness.saved(looked=True)
            if not alone.wait(pause, self.recorder, self.channel.fileno()):
                return  # and there is nothing to be received either
            try:
                if isinstance(fetcher, CarefulMapFetcher):
                    fetcher.alone(number, index, position, brief)
                else:
                    fetcher.alone(number, index, position)
            except BaseException:
                pass  # it raised, so it lives: the batch will say what
            self.randomness.own.take_back(places)
            self.randomness.restore(before)
        self.channel.send(SURVIVED)

    def _encode(self, number: int, batch: Any, mark: int) -> bytes | None:
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
            self._fail(number, error, mark)
            return None

    def _fail(self, number: int, error: BaseException, mark: int = NO_BATCH) -> None:
        fetcher = self.fetcher
        assert fetcher is not None
        failure = describe(error, position=self.recorder.position, step=fetcher.step)
        self._answer(ERROR, number, pickle.dumps(failure), mark)

    def _do_resume(self, seed: int | None) -> None:
        if self.faults:
            self.faults.strike("before-resume")
        self.exhausted = False
        if not self.uninitialised:
            self.broken = None
        epoch_state = self.randomness.saved()
        fetcher = self.fetcher
        if self.loaded and self.answered == self.setup.answered:
            # Nothing was drawn since a state was loaded: the dataset would go on from it now.
            assert isinstance(fetcher, IterableFetcher)
            iterator = fetcher.iterator
            draw_and_drop(lambda: iterator)
            self.randomness.restore(epoch_state)
        resting = b""
        if self.setup.rests:
            resting = resting_state(self.dataset, self._remark_once)
        self.keeper.begin_epoch()
        try:
            self.seed_datapipe(seed)
            self.make_fetcher()
        except BaseException as error:
            if self.broken is None:
                self.fail(error)
        self._answer(RESUMED, 0, epoch_state, state=resting)
        if self.faults:
            self.faults.strike("after-resume")

    def _answer(
        self,
        kind: bytes,
        number: int,
        content: bytes,
        mark: int = NO_BATCH,
        state: bytes | None = None,
    ) -> None:
        """Save the random state, then send: see the black box for why in this order."""
        self.answered += 1
        self.randomness.keep(self.recorder, self.answered)
        if state is None:
            fetcher = self.fetcher
            state = b""
            wanted = self.setup.rests if kind is ENDED else self.setup.states
            if wanted and isinstance(fetcher, IterableFetcher):
                state = state_now(self.dataset, fetcher, self._remark_once)
        if self.careful and self.fetcher is not None and kind is not RESUMED:
            self._report()
        if self.randomness.own.remarks:
            self._tell()
        message = b"".join((kind, HEAD.pack(number, len(state), mark), state, content))
        if kind is not BATCH:  # of which it is noted since its encoding began
            self.recorder.note(-1 if kind is RESUMED else number, -1, SEND)
        faults = self.faults
        if faults is None:
            self.channel.send(message)
        else:
            faults.strike("before-send", number)
            self.channel.send(message, lambda: faults.strike("mid-send", number))
            faults.strike("after-send", number)

    def _tell(self) -> None:
        for about, words in self.randomness.own.remarks:
            self._remark(about, words)
        self.randomness.own.remarks.clear()

    def _remark_once(self, about: str, words: str) -> None:
        """Of something that may be so after every batch."""
        if about not in self.remarked:
            self.remarked.add(about)
            self._remark(about, words)

    def _remark(self, about: str, words: str) -> None:
        self.channel.send(REMARK + pickle.dumps((about, words), 5))

    def _report(self) -> None:
        """Bad samples travel just ahead of the answer; without it they are forgotten."""
        fetcher = self.fetcher
        assert isinstance(fetcher, (CarefulMapFetcher, CarefulIterableFetcher))
        samples = None
        if isinstance(fetcher, CarefulIterableFetcher):
            asked = len(self.blueprint.batch_index or (None,))
            samples = fetcher.drawn if fetcher.drawn != asked else None
        if fetcher.reports or samples is not None:
            self.channel.send(REPORT + pickle.dumps((fetcher.reports, samples), 5))
            fetcher.reports = []


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
    kernel.die_with_parent()
    if os.getppid() != parent:
        os._exit(0)


def _prefer_for_oom(by: int) -> None:
    """Let the kernel, when it must kill, take a worker and not the trainer, and first one that only
    tries something."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            adjusted = min(1000, int(file.read()) + by)
            file.seek(0)
            file.write(str(adjusted))
    except OSError:
        pass  # a kernel that does not let us: the default order holds
