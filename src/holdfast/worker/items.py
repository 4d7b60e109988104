"""Answering items: orders in, answers out, whatever kind of worker it is.

A worker becomes what torch's worker with its id would be, takes up where its predecessor was, and
then answers one item after the other: tasks, notices, and the start of another epoch. Everything
that can go wrong in the user's code is an answer and not the end of the worker: ``BaseException``
is caught, batches are encoded in the worker's own thread, and no item is left unanswered.

What the worker runs in, a process for example, is its `Host`. It receives the orders and sends the
answers.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any, Final

from holdfast.autopsy.blackbox import BROADCAST, SEND
from holdfast.engine.continuation import REST, TRUST, ResumptionResult
from holdfast.samples.bad_sample import message_of
from holdfast.samples.substitute import BatchHints
from holdfast.worker.batch_fingerprint import (
    DROPPED_BATCH,
    NO_BATCH,
    fingerprint,
    fingerprint_of_error,
)
from holdfast.worker.exceptions import describe
from holdfast.worker.fetch import IterableFetcher, MapFetcher, has_state
from holdfast.worker.interface import (
    BATCH,
    ENDED,
    ERROR,
    NOTHING_LEFT,
    RESUMED,
    TOLD,
    Blueprint,
    Host,
    WorkerSetup,
)
from holdfast.worker.pickling import find_unpicklable
from holdfast.worker.replica import Replica
from holdfast.worker.sample_seeding import EpochSeeds
from holdfast.worker.stream_resumption import (
    StreamResumption,
    draw_and_drop,
    state_between_epochs,
    state_now,
)
from holdfast.worker.tolerant import DROPPED
from holdfast.worker.tolerant_iterable import TolerantIterableFetcher
from holdfast.worker.tolerant_map import TolerantMapFetcher

UNKNOWN: Final = pickle.dumps({"dataset": None})
"""In place of a state that the dataset could not give: there is one for every answer."""


class Worker:
    """Carries out orders for one replica of the dataset."""

    def __init__(self, setup: WorkerSetup, blueprint: Blueprint, host: Host) -> None:
        self.setup = setup
        self.blueprint = blueprint
        self.host = host
        self.replica = Replica(setup, blueprint, host)
        self.randomness = self.replica.randomness
        self.answered = setup.answered
        self._tolerant = blueprint.policy is not None
        self._fresh = True  # has made no batch yet
        self._initialised = False  # whether worker_init_fn has run to its end
        self._loaded = False  # whether the dataset was given a state that nothing was drawn from
        self._exhausted = False  # and the other side knows
        self._gives_state = False  # whether the dataset is map-style and has a state
        self._remarked: set[str] = set()

    # -- beginning ------------------------------------------------------------------------

    def begin(self) -> None:
        """Become torch's worker with this id. An error is kept as the answer to every task."""
        try:
            self.replica.become()
            self._initialised = True
            own = self.host.own_dataset and not self.blueprint.iterable
            self._gives_state = own and has_state(self.replica.dataset)
            if self.host.faults:
                self.host.faults.strike("after-setup")
        except BaseException as error:
            self.replica.fail(error)

    def take_up(self) -> bool:
        """Go to where the predecessor was; whether this worker is the one to continue. The first
        worker of a seat has nothing to take up."""
        if self.replica.broken is None:
            try:
                if not self._take_up():
                    return False
            except BaseException as error:
                self.replica.fail(error)
        return self.setup.rehearsal is None  # if it could not even begin, its end says so

    def _take_up(self) -> bool:
        setup = self.setup
        self._exhausted = setup.exhausted
        result = None
        if setup.plan is not None:
            result = StreamResumption(self.replica, setup.plan)()
        elif not self._exhausted:
            self.replica.make_fetcher()
        if result is not None and not self._continues(result):
            return False
        self.replica.hear_past(None, setup.settled)
        if setup.dataset_state is not None and self._gives_state:
            self._load_state(setup.dataset_state)
        if setup.random_state is not None:
            # Whether a stream continues where it was is shown by what it yields.
            number = None if self.blueprint.iterable else setup.answered
            # If the dataset has done nothing since `begin`, what was found there is all there is.
            did = self.blueprint.iterable or setup.told or setup.dataset_state is not None
            self.randomness.restore(setup.random_state, number, search=bool(did))
            if not self.host.recorder.take_up(setup.answered):
                self.randomness.keep(self.host.recorder, setup.answered)
        if self.blueprint.iterable:  # its replay has made the generators that it will make
            self.randomness.own.give_up()
        return True

    def _continues(self, result: ResumptionResult) -> bool:
        """Tell the result; whether this worker is to continue after it."""
        self._loaded = result.way == TRUST
        fetcher = self.replica.fetcher
        if isinstance(fetcher, TolerantIterableFetcher):
            fetcher.reports = []  # they were sent when the batches were made first
        self.host.taken_up(dataclasses.replace(result, private=self.host.private()))
        return not (result.leaves or result.lost or self.setup.rehearsal is not None)

    # -- orders ---------------------------------------------------------------------------

    def carry_out(self, kind: str, number: int, content: Any) -> None:
        """Carry out one order, which `processes.protocol.Order` describes."""
        if kind == "task":
            self._make_batch(number, content)
        elif kind == "hinted":
            self._make_batch(number, *content)
        elif kind == "test":
            self._test_alone(number, *content)
        elif kind == "resume":
            self._begin_epoch(content)
        elif kind == "tell":
            self.host.recorder.note(-1, -1, BROADCAST)
            self.replica.hear(content)
            self._answer(TOLD, 0, b"")
        else:
            raise AssertionError(f"an order that no worker knows: {kind!r}")

    def _make_batch(self, number: int, index: Any, hints: BatchHints | None = None) -> None:
        if self._exhausted:
            return
        replica = self.replica
        if replica.broken is not None:
            self._answer(ERROR, number, replica.broken, replica.broken_mark)
            return
        if replica.told_error is not None:
            error, replica.told_error = replica.told_error, None
            failure = describe(error, position=None, step="broadcast")
            self._answer(ERROR, number, failure, fingerprint_of_error(error))
            return
        try:
            if self.randomness.own.waiting and not self.blueprint.iterable:
                state = self._state()  # it may be fetched twice

                def fetched() -> Any:
                    self._load_state(state)
                    return self._fetch(number, index, hints)

                batch = self.randomness.from_waiting_states(fetched)
            else:
                batch = self._fetch(number, index, hints)
        except StopIteration as stop:
            if self.blueprint.iterable:
                self._exhausted = True
                self._answer(ENDED, number, b"")
            else:
                self._fail(number, stop)
        except BaseException as error:
            if self._lacked_memory(error):
                self.host.retire()
            else:
                self._fail(number, error, fingerprint_of_error(error))
        else:
            if self._tolerant and self._lacked_memory(None):
                self.host.retire()
                return
            self._fresh = False
            if batch is DROPPED:
                self._answer(NOTHING_LEFT, number, b"", DROPPED_BATCH)
                return
            mark = fingerprint(batch) if self.setup.marks else NO_BATCH
            content = self._encode(number, batch, mark)
            del batch  # or its part of the arena would stay in use on this side
            if content is not None:
                self._answer(BATCH, number, content, mark)

    def _fetch(self, number: int, index: Any, hints: BatchHints | None) -> Any:
        fetcher = self.replica.fetcher
        assert fetcher is not None
        if hints is None:
            return fetcher.fetch(number, index)
        assert isinstance(fetcher, TolerantMapFetcher)
        return fetcher.fetch(number, index, hints)

    def _lacked_memory(self, error: BaseException | None) -> bool:
        """Whether a sample failed for lack of memory that others may have used up before it.

        Then a fresh worker makes this batch again. If it fails there too, the sample itself needs
        too much. If the stream could not be continued there, the failure is the answer.
        """
        if self._fresh or not self.host.limits_allocations:
            return False
        if error is not None:
            lacked = isinstance(error, MemoryError) or "can't allocate memory" in message_of(error)
        else:
            fetcher = self.replica.fetcher
            assert isinstance(fetcher, (TolerantMapFetcher, TolerantIterableFetcher))
            lacked = any("MemoryError" in bad.error for bad in fetcher.reports)
        return lacked and (not self.blueprint.iterable or self.host.may_retire())

    def _test_alone(
        self, number: int, index: Any, hints: BatchHints | None, position: int | None, pause: float
    ) -> None:
        """Load one sample by itself. It is no answer to a batch: the random state stays."""
        if self.replica.broken is None:
            fetcher = self.replica.fetcher
            assert isinstance(fetcher, MapFetcher)
            before, state = self.randomness.saved(), self._state()
            if not self.host.pause(pause):
                return  # there will be no more orders
            try:
                if isinstance(fetcher, TolerantMapFetcher):
                    fetcher.fetch_one(number, index, position, hints)
                else:
                    fetcher.fetch_one(number, index, position)
            except BaseException:
                pass  # the worker lives: the batch will have the exception
            self._load_state(state)
            self.randomness.go_back(before)
        self.host.survived()

    def _state(self) -> bytes:
        """The state of a map-style dataset; empty if it has none."""
        if not self._gives_state:
            return b""
        return state_between_epochs(self.replica.dataset, self._remark_once) or UNKNOWN

    def _load_state(self, state: bytes) -> None:
        known = pickle.loads(state)["dataset"] if state else None
        if known is not None:
            self.replica.dataset.load_state_dict(known)

    def _begin_epoch(self, seeds: EpochSeeds) -> None:
        if self.host.faults:
            self.host.faults.strike("before-resume")
        ended, self._exhausted = self._exhausted, False
        replica = self.replica
        if self._initialised:
            replica.broken = None
        epoch_state = self.randomness.saved()
        unchanged = self.answered == self.setup.answered
        if self._loaded and unchanged:
            # Nothing was drawn since a state was loaded: the dataset would continue from it now.
            assert isinstance(replica.fetcher, IterableFetcher)
            iterator = replica.fetcher.iterator
            draw_and_drop(lambda: iterator)
            self.randomness.restore(epoch_state)
        resting = None if self._gives_state else b""
        plan = self.setup.plan
        if self.setup.rests and ended and unchanged and plan is not None and plan.way == REST:
            resting = plan.state  # a dataset that has loaded it may give it when it is begun
        elif self.setup.rests and ended and isinstance(replica.fetcher, IterableFetcher):
            replica.fetcher.ended = True
            resting = state_now(replica.dataset, replica.fetcher, self._remark_once)
        elif self.setup.rests:
            resting = state_between_epochs(replica.dataset, self._remark_once, ended=ended)
        self.host.begin_epoch()
        try:
            replica.begin_epoch(seeds)
        except BaseException as error:
            if replica.broken is None:
                replica.fail(error)
        self._answer(RESUMED, 0, epoch_state, state=resting)
        if self.host.faults:
            self.host.faults.strike("after-resume")

    # -- answers --------------------------------------------------------------------------

    def _encode(self, number: int, batch: Any, mark: int) -> Any:
        """The batch as it will be sent. None if it cannot be, which is then the answer."""
        fetcher, host = self.replica.fetcher, self.host
        assert fetcher is not None
        fetcher.step = "send"
        host.recorder.note(number, -1, SEND)
        if host.faults:
            host.faults.strike("before-encode", number)
        try:
            return host.encode(batch)
        except BaseException as error:
            path = find_unpicklable(batch, "batch")
            if path is not None and len(error.args) == 1:
                error.args = (f"{error}: {path} cannot be sent to the main process",)
            self._fail(number, error, mark)
            return None

    def _fail(self, number: int, error: BaseException, mark: int = NO_BATCH) -> None:
        fetcher = self.replica.fetcher
        assert fetcher is not None
        failure = describe(error, position=self.host.recorder.position, step=fetcher.step)
        self._answer(ERROR, number, failure, mark)

    def _answer(
        self,
        kind: bytes,
        number: int,
        content: Any,
        mark: int = NO_BATCH,
        state: bytes | None = None,
    ) -> None:
        """Save the random state, then send: see the black box for why in this order."""
        host = self.host
        self.answered += 1
        self.randomness.keep(host.recorder, self.answered)
        if state is None:
            fetcher = self.replica.fetcher
            state = b""
            wanted = self.setup.rests if kind is ENDED else self.setup.states
            if self._gives_state:
                state = self._state()
            elif wanted and isinstance(fetcher, IterableFetcher):
                fetcher.ended |= kind is ENDED  # of single samples too
                state = state_now(self.replica.dataset, fetcher, self._remark_once)
        if self._tolerant and kind is not RESUMED and kind is not TOLD:
            self._report()
        if self.randomness.own.remarks:
            self._remark_on_generators()
        if kind is not BATCH:  # for a batch this was noted when its encoding began
            host.recorder.note(-1 if kind in (RESUMED, TOLD) else number, -1, SEND)
        host.answer(kind, number, content, mark, state)

    def _report(self) -> None:
        """Bad samples are sent just before the answer; without it they are forgotten."""
        fetcher = self.replica.fetcher
        if fetcher is None:
            return
        assert isinstance(fetcher, (TolerantMapFetcher, TolerantIterableFetcher))
        samples = None
        if isinstance(fetcher, TolerantIterableFetcher):
            asked = len(self.blueprint.batch_index or (None,))
            samples = fetcher.drawn if fetcher.drawn != asked else None
        if fetcher.reports or samples is not None:
            self.host.report(fetcher.reports, samples)
            fetcher.reports = []

    def _remark_on_generators(self) -> None:
        for about, words in self.randomness.own.remarks:
            self.host.remark(about, words)
        self.randomness.own.remarks.clear()

    def _remark_once(self, about: str, words: str) -> None:
        """For what may be found after every batch."""
        if about not in self._remarked:
            self._remarked.add(about)
            self.host.remark(about, words)
