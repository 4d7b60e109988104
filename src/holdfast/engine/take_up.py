"""A process takes up the stream of the one before it: what it does, and what it finds.

Why, and what that shows, is in `continuation`. This runs in the worker, before its first task.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from holdfast.autopsy.blackbox import REPLAY as REPLAYING
from holdfast.autopsy.blackbox import Recorder
from holdfast.engine.careful import DROPPED
from holdfast.engine.continuation import AGAIN, PROBE, REST, STATE, TRUST, Finding, Plan
from holdfast.engine.fetch import IterableFetcher, state_of
from holdfast.engine.fingerprint import (
    DROPPED_BATCH,
    NO_BATCH,
    fingerprint,
    fingerprint_of_error,
    unseen,
)
from holdfast.engine.protocol import Blueprint, Setup
from holdfast.engine.randomness import Randomness

__all__ = ["STATE_FAILED", "TakeUp", "draw_and_drop", "resting_state", "state_now"]

STATE_FAILED: Final = "stream-state-failed"
"""What a remark is about that a worker makes if its dataset's state cannot be had."""
Remark = Callable[[str, str], None]


# -- states, as they travel ----------------------------------------------------------------


def state_now(dataset: Any, fetcher: IterableFetcher, remark: Remark) -> bytes:
    """The state of an iterable dataset that offers one, to take up from after a death."""
    try:
        own = state_of(dataset)
        iterator = None if fetcher.iterator is dataset else state_of(fetcher.iterator)
        if own is None and iterator is None:
            return b""
        return pickle.dumps(
            {
                "dataset": own,
                "iterator": iterator,
                "ended": fetcher.ended,
                "ahead": fetcher.ahead,
                "made": fetcher.made,
            }
        )
    except Exception as error:
        _tell_that_it_failed(remark, error)
        return b""  # it will be replayed from its start instead


def resting_state(dataset: Any, remark: Remark) -> bytes:
    """The dataset's own state between two epochs, if it offers one."""
    try:
        state = state_of(dataset)
        return b"" if state is None else pickle.dumps({"dataset": state})
    except Exception as error:
        _tell_that_it_failed(remark, error)
        return b""  # it will be sent through all epochs instead


def _tell_that_it_failed(remark: Remark, error: Exception) -> None:
    remark(
        STATE_FAILED,
        "the state of the dataset or of its iterator cannot be kept: state_dict() raised, or what "
        f"it gave does not pickle ({_in_words(error)}). After a death the stream cannot go on "
        "from a state",
    )


def draw_and_drop(samples: Callable[[], Iterator[Any]]) -> None:
    """One sample of it."""
    try:
        next(samples())
    except BaseException:  # the end, or what was delivered as an error when it was its turn
        return


def _in_words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:  # of its own __str__
        return type(error).__name__


# -- taking up ------------------------------------------------------------------------------


class Taker(Protocol):
    """The worker, as far as this needs it."""

    setup: Setup
    blueprint: Blueprint
    recorder: Recorder
    dataset: Any
    fetcher: Any
    randomness: Randomness

    def make_fetcher(self, state: dict[str, Any] | None = None) -> None: ...
    def seed_datapipe(self, seed: int | None) -> None: ...
    def fail(self, error: BaseException) -> None: ...
    def private(self) -> int: ...


class TakeUp:
    """One attempt."""

    def __init__(self, taker: Taker, plan: Plan) -> None:
        self._taker = taker
        self._plan = plan
        self._setup = taker.setup
        self._marks = array("Q")
        self._marks.frombytes(plan.marks)
        self._first_mark = plan.delivered - len(self._marks)  # batches delivered before those

    def __call__(self) -> Finding:
        """Go to where the predecessor was."""
        plan = self._plan
        try:
            if plan.way == PROBE:
                return self._probe()
            if plan.way in AGAIN:
                return self._from_the_start()
            return self._from_state()
        except BaseException as error:
            if plan.last and plan.way != TRUST:
                raise
            return self._found(exact=False, error=_in_words(error), leaves=not plan.last)

    def _found(self, **found: Any) -> Finding:
        if found.get("leaves"):
            found.setdefault("unfit", frozenset({self._plan.way}))
        return Finding(self._plan.way, delivered=self._plan.delivered, **found)

    def _from_state(self) -> Finding:
        plan = self._plan
        assert plan.state is not None
        state = pickle.loads(plan.state)
        if state["dataset"] is None:
            self._pass_epochs(None)
        self._to_the_epochs_start()
        self._taker.make_fetcher(state)
        if plan.way != STATE:
            return self._found(exact=False, tried=plan.tried)  # nothing has shown that it is
        assert plan.random_before is not None
        self._taker.randomness.restore(plan.random_before)
        return self._compare()

    def _from_the_start(self) -> Finding:
        plan = self._plan
        resting = None
        if plan.way == REST and plan.state is not None:
            resting = pickle.loads(plan.state)["dataset"]
        self._pass_epochs(resting)
        self._to_the_epochs_start()
        if self._setup.exhausted:
            return self._found()
        try:
            self._taker.make_fetcher()
        except BaseException as error:
            exact = set(self._marks) == {fingerprint_of_error(error)} if self._marks else None
            if exact is False and plan.attempts > 1:
                return self._to_be_tried_again(error)
            if not plan.last:
                raise
            self._taker.fail(error)  # all that it can answer, and perhaps all that was answered
            return self._found(exact=exact, error=_in_words(error))
        return self._compare() if self._marks else self._found()

    def _to_the_epochs_start(self) -> None:
        if self._setup.epoch_state is not None:
            self._taker.randomness.restore(self._setup.epoch_state)

    def _pass_epochs(self, resting: Any) -> None:
        """Bring the dataset to where the epochs that are over have left it.

        Many datasets count them, or shuffle by their number, and do so when iter() is called or, if
        that is a generator, when the first sample is drawn. The state in which one ended saves
        going through all of them; but it is a state to go on from, so that end has to be met
        before another epoch can begin.
        """
        taker, setup = self._taker, self._setup
        epochs = setup.passed + (setup.exhausted and setup.replica > 0)
        if resting is not None:
            taker.dataset.load_state_dict(resting)
            epochs = 1
        for _ in range(epochs):
            taker.recorder.note(-1, -1, REPLAYING)
            draw_and_drop(lambda: iter(taker.dataset))
        if epochs:
            taker.seed_datapipe(setup.shared_seed)  # the seed it had was for one iter() only

    def _compare(self) -> Finding:
        """Make again what was delivered, as far as there are marks of it, and drop it."""
        plan, bound = self._plan, self._setup.rehearsal
        differs, different, raised = None, 0, None
        for number, expected in enumerate(self._marks, self._first_mark):
            self._taker.recorder.note(-1, -1, REPLAYING)
            mark, error = self._one_more()
            if error is not None and mark != expected and raised is None:
                if plan.last and plan.attempts > 1:  # else there is another way to try
                    return self._to_be_tried_again(error)
                raised = _in_words(error)
            if mark == NO_BATCH:
                return self._found(exact=False, ended=number, error=raised, leaves=not plan.last)
            if mark != expected:
                differs = number if differs is None else differs
                different += 1
                if not plan.last or bound is not None:
                    return self._found(
                        exact=False,
                        differs=differs,
                        different=1,
                        error=raised,
                        leaves=not plan.last,
                    )
            if bound is not None and self._taker.private() > bound:
                return self._found(too_large=True)
        blind = unseen(self._marks)
        return self._found(
            exact=False if different else None if blind else True,
            differs=differs,
            different=different,
            unseen=blind,
            error=raised,
        )

    def _to_be_tried_again(self, error: BaseException) -> Finding:
        """An exception where there was none: of a connection, perhaps, and not of the stream."""
        return self._found(error=_in_words(error), leaves=True, unfit=frozenset())

    def _one_more(self) -> tuple[int, BaseException | None]:
        """The mark of the next batch, and the exception if that is one."""
        fetcher = self._taker.fetcher
        try:
            batch = fetcher.fetch(-1, self._taker.blueprint.batch_index)
        except StopIteration:
            return NO_BATCH, None
        except BaseException as error:
            return fingerprint_of_error(error), error
        return (DROPPED_BATCH if batch is DROPPED else fingerprint(batch)), None

    # -- whether a state is used once only ------------------------------------------------

    def _probe(self) -> Finding:
        """Load the state and begin twice: the second must not begin where the first did."""
        plan, setup = self._plan, self._setup
        assert plan.state is not None
        own = pickle.loads(plan.state)["dataset"]
        unfit, raised = {PROBE}, None
        if own is not None:
            random_state = setup.random_state or self._taker.randomness.saved()
            try:
                self._taker.dataset.load_state_dict(own)
                kept = self._first(random_state) == self._first(random_state)
            except BaseException as error:  # it does not even load
                kept, raised = True, _in_words(error)
            if kept:
                unfit |= {STATE, REST}
        return self._found(leaves=True, unfit=frozenset(unfit), error=raised)

    def _first(self, random_state: bytes) -> int:
        """What comes first of another epoch."""
        self._taker.recorder.note(-1, -1, REPLAYING)
        self._taker.seed_datapipe(self._setup.shared_seed)
        self._taker.randomness.restore(random_state)
        samples = iter(self._taker.dataset)
        try:
            return fingerprint(next(samples))
        except StopIteration:
            return NO_BATCH
        except BaseException as error:
            return fingerprint_of_error(error)
