"""Takes up the stream of a worker that is gone, and finds out whether it is continued exactly.

`continuation` says why, and what that shows. This runs in the worker, before its first task; or,
without workers, in the trainer (`serial_stream`). In a worker every exception is the dataset's. In
the trainer's main thread a signal handler may have raised it, for example that of Ctrl-C: then it
is raised again.
"""

from __future__ import annotations

import functools
import pickle
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from torch.utils.data import get_worker_info

from holdfast.autopsy.blackbox import REPLAY as REPLAYING
from holdfast.engine import signals
from holdfast.engine.continuation import (
    AGAIN,
    PROBE,
    REST,
    STATE,
    TRUST,
    ResumptionPlan,
    ResumptionResult,
    extended,
)
from holdfast.worker import loaded_state
from holdfast.worker.batch_fingerprint import (
    DROPPED_BATCH,
    NO_BATCH,
    fingerprint,
    fingerprint_of_error,
    unseen,
)
from holdfast.worker.fetch import IterableFetcher, state_of
from holdfast.worker.generator_states import global_states
from holdfast.worker.interface import WorkerSetup
from holdfast.worker.randomness import Randomness
from holdfast.worker.tolerant import DROPPED

STATE_FAILED: Final = "stream-state-failed"
"""What a worker's remark is about if the state of its dataset cannot be read."""
Remark = Callable[[str, str], None]


# -- states ---------------------------------------------------------------------------------


def state_now(dataset: Any, fetcher: IterableFetcher, remark: Remark) -> bytes:
    """The state of an iterable dataset, pickled, to continue from after a death; empty if it has
    none."""
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
        _remark_failure(remark, error)
        return b""  # it will be replayed from its start instead


def state_between_epochs(dataset: Any, remark: Remark, **more: bool) -> bytes:
    """The dataset's own state between two epochs, pickled, with `more`; empty if it has none. Of a
    stream: whether it has ended."""
    try:
        state = state_of(dataset)
        return b"" if state is None else pickle.dumps({"dataset": state, **more})
    except Exception as error:
        _remark_failure(remark, error)
        return b""  # its epochs will be passed one by one instead


def _remark_failure(remark: Remark, error: Exception) -> None:
    remark(
        STATE_FAILED,
        "the state of the dataset or of its iterator cannot be kept: state_dict() raised, or what "
        f"it gave does not pickle ({_in_words(error)}). After a death the stream cannot go on "
        "from a state",
    )


def draw_and_drop(samples: Callable[[], Iterator[Any]]) -> bool:
    """Draw one sample and drop it; whether there was one, or an error in its place."""
    try:
        next(samples())
    except StopIteration:
        return False
    except BaseException as error:  # it was delivered in its turn
        _raise_what_a_handler_raised(error)
        return True
    return True


def _raise_what_a_handler_raised(error: BaseException) -> None:
    """Without workers: raise this again if it is a signal handler's. It says nothing of the
    stream, and the program waits for it."""
    if (
        signals.handlers_run_here()
        and get_worker_info() is None
        and signals.raised_by_handler(error)
    ):
        raise error


def opened(state: bytes) -> dict[str, Any]:
    """What `state_now` or `state_between_epochs` has pickled: a new one for each use, because a
    dataset may change what it is given."""
    known: dict[str, Any] = pickle.loads(state)
    return known


def at_the_end(state: bytes) -> bytes:
    """The same state, of a stream that has ended."""
    return pickle.dumps({**opened(state), "ended": True})


def begun_from(dataset: Any, state: bytes) -> Iterator[Any]:
    """Begin to iterate over a dataset that has loaded its part of a state, and go to where its
    iterator was."""
    samples: Any = iter(dataset)
    iterator = opened(state).get("iterator")
    if iterator is not None:
        samples.load_state_dict(iterator)
    return samples  # type: ignore[no-any-return]


def end_epoch(dataset: Any, state: bytes) -> None:
    """Bring a dataset to the end of an epoch, given its state there: when it is begun again, it
    begins the next one."""
    if opened(state)["dataset"] is None:
        return
    there = functools.partial(begun_from, dataset, state)
    loaded_state.load(dataset, opened(state)["dataset"])
    if draw_and_drop(there):  # the state at an end is that of the next beginning
        loaded_state.keep(dataset)
        dataset.load_state_dict(opened(state)["dataset"])
    elif draw_and_drop(lambda: iter(dataset)):  # it goes on from a state once
        loaded_state.keep(dataset)
        dataset.load_state_dict(opened(state)["dataset"])
        draw_and_drop(there)
    else:  # it would go on from the state in all epochs
        loaded_state.take_back(dataset, everything=True)


def leave_epoch(dataset: Any, state: bytes) -> None:
    """Bring a dataset to where an epoch was left early, given its state before the last batch."""
    there = functools.partial(begun_from, dataset, state)
    loaded_state.load(dataset, opened(state)["dataset"])
    if begins_again_there(dataset, there):  # it would go on from the state in all epochs
        loaded_state.take_back(dataset, everything=True)
        return
    loaded_state.keep(dataset)
    dataset.load_state_dict(opened(state)["dataset"])
    _draw_some(there(), opened(state)["drawn"])


def begins_again_there(dataset: Any, there: Callable[[], Iterator[Any]]) -> bool:
    """Whether a dataset that has loaded a state and was begun from it (`there`) begins its next
    epoch from it too, as far as the first elements of both show."""
    states = [(one, one.read()) for one in global_states()]

    def first(begin: Callable[[], Iterator[Any]]) -> int:
        for one, raw in states:
            one.write(raw)
        try:
            return fingerprint(next(begin()))
        except StopIteration:
            return NO_BATCH
        except BaseException as error:
            _raise_what_a_handler_raised(error)
            return fingerprint_of_error(error)

    one = first(there)
    return one != NO_BATCH and one == first(lambda: iter(dataset))


def _draw_some(samples: Iterator[Any], count: int) -> None:
    for _ in range(count):
        draw_and_drop(lambda: samples)


def _in_words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:  # its __str__ raised
        return type(error).__name__


# -- taking up ------------------------------------------------------------------------------


class _Recorder(Protocol):
    def note(self, task: int, position: int, step: int) -> None: ...


class _Host(Protocol):
    @property
    def recorder(self) -> _Recorder: ...
    def private(self) -> int: ...


class _Blueprint(Protocol):
    @property
    def batch_index(self) -> Any: ...


class StreamReplica(Protocol):
    """What takes up a stream: a worker's `Replica`, or without workers what `serial_stream` has in
    place of it. The members are explained there and in `interface`."""

    told_error: BaseException | None

    @property
    def dataset(self) -> Any: ...
    @property
    def setup(self) -> WorkerSetup: ...
    @property
    def host(self) -> _Host: ...
    @property
    def blueprint(self) -> _Blueprint: ...
    @property
    def randomness(self) -> Randomness: ...
    @property
    def fetcher(self) -> Any: ...
    def make_fetcher(self, state: dict[str, Any] | None = None) -> None: ...
    def seed_datapipe(self, seed: int | None) -> None: ...
    def hear_past(self, before: tuple[int, int] | None, settled: int) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class StreamResumption:
    """One attempt."""

    def __init__(self, replica: StreamReplica, plan: ResumptionPlan) -> None:
        self._replica = replica
        self._plan = plan
        self._setup = replica.setup
        self._marks = array("Q")
        self._marks.frombytes(plan.marks)
        self._first_mark = plan.delivered - len(self._marks)  # number of the first batch compared

    def __call__(self) -> ResumptionResult:
        """Go to where the predecessor was."""
        plan = self._plan
        try:
            if plan.way == PROBE:
                return self._probe()
            if plan.way in AGAIN:
                return self._from_the_start()
            return self._from_state()
        except BaseException as error:
            _raise_what_a_handler_raised(error)
            if plan.last and plan.way != TRUST:
                raise
            return self._found(exact=False, error=_in_words(error), leaves=not plan.last)

    def _found(self, **found: Any) -> ResumptionResult:
        if found.get("leaves"):
            found.setdefault("unfit", frozenset({self._plan.way}))
        return ResumptionResult(self._plan.way, delivered=self._plan.delivered, **found)

    def _from_state(self) -> ResumptionResult:
        plan = self._plan
        assert plan.state is not None
        state = opened(plan.state)
        if state["dataset"] is None:
            self._pass_epochs(None)
        # Those that came after the last batch are heard after it.
        self._replica.hear_past((self._setup.epochs_done, plan.delivered), self._setup.settled)
        self._to_the_epochs_start()
        self._replica.make_fetcher(state)
        if plan.way != STATE:
            return self._found(exact=False, tried=plan.tried)  # nothing was compared
        assert plan.random_before is not None
        self._replica.randomness.restore(plan.random_before)
        return self._compare()

    def _from_the_start(self) -> ResumptionResult:
        plan = self._plan
        self._pass_epochs(plan.state if plan.way == REST else None)
        # Errors that were delivered in this epoch come again.
        self._replica.hear_past((self._setup.epochs_done, 0), self._setup.settled_earlier)
        self._to_the_epochs_start()
        if self._setup.exhausted:
            return self._found()
        try:
            self._replica.make_fetcher()
        except BaseException as error:
            _raise_what_a_handler_raised(error)
            exact = set(self._marks) == {fingerprint_of_error(error)} if self._marks else None
            if exact is False and plan.attempts > 1:
                return self._to_be_tried_again(error)
            if not plan.last:
                raise
            self._replica.fail(error)  # the answer to every task, perhaps as it was before
            return self._found(exact=exact, error=_in_words(error))
        return self._compare() if plan.delivered else self._found()

    def _to_the_epochs_start(self) -> None:
        if self._setup.epoch_state is not None:
            self._replica.randomness.restore(self._setup.epoch_state)

    def _pass_epochs(self, resting: bytes | None) -> None:
        """Bring the dataset to the state in which the epochs that are over have left it: given that
        state, or by beginning each of them. Many datasets count epochs, or shuffle by their number,
        when iter() is called or, if that is a generator, when the first sample is drawn."""
        replica, setup = self._replica, self._setup
        epochs = setup.epochs_done + (setup.exhausted and setup.batches_done > 0)
        known: dict[str, Any] = {"dataset": None}
        if resting is not None:
            known = opened(resting)
        if resting is not None and known["dataset"] is not None:
            epochs = 1
            replica.host.recorder.note(-1, -1, REPLAYING)
            if setup.exhausted or known["ended"]:
                end_epoch(replica.dataset, resting)
            elif "drawn" in known:
                leave_epoch(replica.dataset, resting)
            else:  # it was left early, and would go on there
                replica.dataset.load_state_dict(known["dataset"])
                draw_and_drop(lambda: iter(replica.dataset))
        for drawn in known.get("begun", ()):
            _draw_some(iter(replica.dataset), drawn)
        for number in range(epochs if known["dataset"] is None else 0):
            replica.hear_past((number, 0), setup.settled_earlier)
            replica.host.recorder.note(-1, -1, REPLAYING)
            draw_and_drop(lambda: iter(replica.dataset))
        if epochs:
            replica.seed_datapipe(setup.seeds.shared)  # the seed it had was for one iter() only

    def _compare(self) -> ResumptionResult:
        """Make again the delivered batches of which there are fingerprints, and drop them."""
        plan, bound = self._plan, self._setup.rehearsal
        differs, different, raised, known = None, 0, None, True
        if plan.way in AGAIN and self._first_mark:  # delivered by a run before this one
            digest, blind = 0, 0
            for number in range(self._first_mark):
                self._replica.host.recorder.note(-1, -1, REPLAYING)
                self._replica.hear_past((self._setup.epochs_done, number + 1), 0)
                mark, _ = self._one_more()
                if mark == NO_BATCH:
                    return self._found(exact=False, ended=number, leaves=not plan.last)
                digest = extended(digest, mark)
                blind += unseen((mark,))
            known = plan.digest is not None and not blind
            if plan.digest is not None and digest != plan.digest:
                different = 1
                if not plan.last or bound is not None:
                    return self._found(exact=False, different=1, leaves=not plan.last)
        for number, expected in enumerate(self._marks, self._first_mark):
            self._replica.host.recorder.note(-1, -1, REPLAYING)
            self._replica.hear_past((self._setup.epochs_done, number + 1), 0)
            mark, error = self._one_more()
            if error is not None and mark != expected and raised is None:
                if plan.last and plan.attempts > 1:  # otherwise there is another way to try
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
            if bound is not None and self._replica.host.private() > bound:
                return self._found(too_large=True)
        blind = unseen(self._marks)
        return self._found(
            exact=False if different else None if blind or not known else True,
            differs=differs,
            different=different,
            unseen=blind,
            error=raised,
        )

    def _to_be_tried_again(self, error: BaseException) -> ResumptionResult:
        """An exception where there was none: a connection may have been lost."""
        return self._found(error=_in_words(error), leaves=True, unfit=frozenset())

    def _one_more(self) -> tuple[int, BaseException | None]:
        """The fingerprint of the next batch, or of an exception, and that exception."""
        fetcher: Any = self._replica.fetcher
        if self._replica.told_error is not None:
            told, self._replica.told_error = self._replica.told_error, None
            return fingerprint_of_error(told), told
        try:
            batch = fetcher.fetch(-1, self._replica.blueprint.batch_index)
        except StopIteration:
            return NO_BATCH, None
        except BaseException as error:
            _raise_what_a_handler_raised(error)
            return fingerprint_of_error(error), error
        return (DROPPED_BATCH if batch is DROPPED else fingerprint(batch)), None

    # -- whether a state is used once only ------------------------------------------------

    def _probe(self) -> ResumptionResult:
        """Load the state and begin twice: the second time must not begin where the first did."""
        plan, setup = self._plan, self._setup
        assert plan.state is not None
        self._replica.hear_past(None, setup.settled)
        state = opened(plan.state)
        unfit, raised = {PROBE}, None
        if state["dataset"] is not None:
            random_state = setup.random_state or self._replica.randomness.saved()
            first = NO_BATCH
            try:
                self._replica.dataset.load_state_dict(state["dataset"])
                first, error = self._first(random_state)
                kept = first == self._first(random_state)[0]
                raised = None if error is None else _in_words(error)
            except BaseException as error:  # it cannot even be loaded
                _raise_what_a_handler_raised(error)
                kept, raised = True, _in_words(error)
            if kept:
                unfit |= {STATE, REST}
            begins = first != NO_BATCH and raised is None
            if plan.rests and begins and (setup.exhausted or state["ended"]):
                unfit -= {REST}  # for its own next beginning, where this state is
        return self._found(leaves=True, unfit=frozenset(unfit), error=raised)

    def _first(self, random_state: bytes) -> tuple[int, BaseException | None]:
        """The fingerprint of the first sample of another epoch, or of an exception, and that."""
        self._replica.host.recorder.note(-1, -1, REPLAYING)
        self._replica.seed_datapipe(self._setup.seeds.shared)
        self._replica.randomness.restore(random_state)
        samples = iter(self._replica.dataset)
        try:
            return fingerprint(next(samples)), None
        except StopIteration:
            return NO_BATCH, None
        except BaseException as error:
            _raise_what_a_handler_raised(error)
            return fingerprint_of_error(error), error
