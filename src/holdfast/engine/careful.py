"""Fetching with a policy for bad samples: what `fetch` does, one sample at a time, with a net.

It runs in the worker, where the samples are. The rules, which `docs/corrupt-data.md` states for
users:

- A failure that may pass is tried again, from the random state before its first try.
- After a failure that stays, the random state is as the last try left it: what a dataset that
  catches its own errors would leave. So the good samples after it are those of stock torch with
  such a dataset.
- A sample that is known to be bad (it ended or stalled its worker, or is in the quarantine) is not
  touched and draws nothing.
- A stand-in is loaded from a random state of its own, made from the seed, the epoch, the batch, the
  position and its number, and leaves the state of the worker as it was.
- Whatever is found is reported with the batch. A worker that dies before that has reported nothing:
  the batch is redone as a whole, which finds the same again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import itertools
import operator
import pickle
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from holdfast.autopsy.blackbox import FETCH
from holdfast.engine.exceptions import without_our_frames
from holdfast.engine.fetch import (
    Fetcher,
    IterableFetcher,
    MapFetcher,
    makes_batches,
    state_of,
)
from holdfast.engine.randomness import Randomness, Snapshot, bring_back
from holdfast.errors import NoSubstitute, PoisonSample, ReplicaLost, WorkerError
from holdfast.memory.collate import Placement
from holdfast.samples import oddity, record, substitute
from holdfast.samples.policy import Given, Policy, may_pass
from holdfast.samples.record import BadSample, key_of
from holdfast.samples.substitute import NOTHING, Brief

__all__ = ["DROPPED", "CarefulIterableFetcher", "CarefulMapFetcher"]

NO_PROGRESS: Final = 16  # equal failures of an iterator in a row, with nothing between them


class _Dropped:
    def __repr__(self) -> str:
        return "DROPPED"


DROPPED: Final = _Dropped()
"""In place of a batch with nothing left."""


@dataclass(slots=True, eq=False)
class _Row:
    """A sample of the batch being made."""

    position: int
    sample: Any
    number: int | None = None  # of the candidate, if it stands in for another
    given: bool = False  # by the policy function
    key: Any = None  # of the candidate


@dataclass(slots=True)
class _Batch:
    """The batch being made."""

    task: int
    keys: list[Any]
    brief: Brief
    rows: list[_Row]
    hopeless: set[int]  # candidates that turned out bad
    used: set[int]  # candidates in use
    placement: Placement | None = None  # has to live until the rows are collated


@dataclass(slots=True)
class _Trouble:
    """A bad sample with its exception, if there was one."""

    bad: BadSample
    error: BaseException | None = None


class _Fault(NamedTuple):
    """Why a sample does not collate.

    One that fails by itself is bad. One that is merely unlike the majority is odd, for this batch:
    in another it may be the majority that is wrong.
    """

    message: str
    verdict: str


class _Mark:
    """Stands where there is nothing."""


_UNLOADED: Final = _Mark()  # a sample that ``__getitems__`` is to load with the others
_FAILED: Final = _Mark()


class _Careful(Fetcher):
    """What both kinds of dataset have in common."""

    def __init__(
        self,
        dataset: Any,
        *,
        policy: Policy,
        worker_id: int | None,
        catch: type[BaseException] = BaseException,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.policy = policy
        self.worker_id = worker_id
        self.catch = catch  # in the main process Ctrl-C is no bad sample
        self.reports: list[BadSample] = []
        self._text: bool | None = None  # whether samples are text, once one was seen
        self._random_state = Randomness().snapshot

    # -- random states --------------------------------------------------------------------

    @contextlib.contextmanager
    def _with_own_randomness(self, *seed: int) -> Iterator[None]:
        before = self._random_state()
        if seed:
            number = substitute.seed_for(*seed)
            random.seed(number)
            torch.default_generator.manual_seed(number)  # torch.manual_seed would seed GPUs too
            np.random.seed(number & 0xFFFFFFFF)
        try:
            yield
        finally:
            bring_back(before)

    # -- trouble --------------------------------------------------------------------------

    def _bad(self, batch: _Batch, position: int, kind: str, **details: Any) -> BadSample:
        index = batch.keys[position]
        error: BaseException | None = details.pop("cause", None)
        if error is not None:
            trace = without_our_frames(error.__traceback__)
            details.setdefault("message", record.message_of(error))
            details.update(
                error=record.error_name(error),
                traceback=record.traceback_text(error, trace),
                digest=record.digest_of(error, trace),
            )
        return BadSample(
            index=index,
            kind=kind,
            name=None if index is None else record.name_of(self.dataset, index, error),
            position=position,
            batch=batch.task,
            worker_id=self.worker_id,
            time=time.time(),
            **details,
        )

    def _settle(self, batch: _Batch, trouble: _Trouble) -> _Row | None:
        """What the policy makes of it: another row, or none. Raises if that is the policy."""
        bad, error = trouble.bad, trouble.error
        decision = self.policy.decide(bad)
        position = bad.position
        assert position is not None
        if decision == "skip":
            self._report(bad, "skipped")
            return None
        if decision == "replace":
            self._report(bad, "replaced")
            return self._stand_in(batch, position)
        if isinstance(decision, Given):
            self._report(bad, "given")
            return _Row(position, decision.sample, given=True)
        self._report(bad, "raised")
        if error is not None:
            raise error
        if bad.kind == "none":
            return _Row(position, None, given=True)  # as without a policy
        self.recorder.note(batch.task, position, FETCH)
        if bad.kind in ("killed", "stalled"):
            poison = PoisonSample(
                f"DataLoader worker exited unexpectedly: {bad.who()} {bad.what()}"
            )
            poison.sample = bad.index
            raise poison
        raise WorkerError(f"{bad.who()} {bad.what()}. It was known, and was not tried again.")

    def _report(self, bad: BadSample, action: str) -> None:
        self.reports.append(dataclasses.replace(bad, action=action))

    def _stand_in(self, batch: _Batch, position: int) -> _Row | None:
        raise NotImplementedError

    # -- collating ------------------------------------------------------------------------

    def _together(self, batch: _Batch) -> Any:
        """Collate; if that fails, find whose fault it is and go on without it."""
        before = self._random_state()
        while True:
            self._complete(batch)
            if not batch.rows:
                return DROPPED
            if callable(self.policy.on_bad_sample):
                self._check_given(batch)
            try:
                return self._collate(batch.task, self._data(batch))
            except self.catch as error:
                guilty = self._guilty(batch, error)
                if not guilty:
                    raise
                caught = error
            bring_back(before)
            for row, fault in guilty:
                self._replace_row(batch, row, fault, caught)

    def _complete(self, batch: _Batch) -> None:
        """Whatever is left to do before the rows can be collated."""

    def _check_given(self, batch: _Batch) -> None:
        """Text from the policy function among samples that are none is a word it has wrong."""
        for row in batch.rows:
            if not row.given:
                self._text = isinstance(row.sample, str)
        if self._text is False:
            for row in batch.rows:
                if row.given and isinstance(row.sample, str):
                    self.recorder.note(batch.task, row.position, FETCH)
                    raise ValueError(self.policy.wrong_word(row.sample, batch.keys[row.position]))

    def _data(self, batch: _Batch) -> Any:
        return [row.sample for row in batch.rows] if self.auto_collation else batch.rows[0].sample

    def _replace_row(self, batch: _Batch, row: _Row, fault: _Fault, error: BaseException) -> None:
        at = batch.rows.index(row)
        if row.number is not None:  # a stand-in that does not fit either
            batch.hopeless.add(row.number)
            another = self._stand_in(batch, row.position)
        elif row.given:
            raise error
        else:
            details = {"message": fault.message, "verdict": fault.verdict, "cause": error}
            bad = self._bad(batch, row.position, "collate", **details)
            another = self._settle(batch, _Trouble(bad, error))
        batch.rows[at : at + 1] = [] if another is None else [another]

    def _guilty(self, batch: _Batch, error: BaseException) -> list[tuple[_Row, _Fault]]:
        """The rows that make collation fail, and what is wrong with each; none if all may be."""
        rows = batch.rows
        said = record.message_of(error)
        if isinstance(error, MemoryError):
            return []
        if not self.auto_collation:
            return [(rows[0], _Fault(said, "bad"))]
        forms = [oddity.form(row.sample) for row in rows]
        own = [form for row, form in zip(rows, forms, strict=True) if row.number is None]
        usual = oddity.majority(own) or oddity.majority(forms)  # stand-ins may be odd themselves
        with self._with_own_randomness():
            if usual is not None and len(set(forms)) > 1:
                like = [row for row, form in zip(rows, forms, strict=True) if form == usual]
                if self._collates(like[:2]):
                    return [
                        (row, _Fault(oddity.difference(form, usual), "odd"))
                        for row, form in zip(rows, forms, strict=True)
                        if form != usual and not self._collates([like[0], row])
                    ]
            alone = [row for row in rows if not self._collates([row])]
        return [(row, _Fault(said, "bad")) for row in alone] if len(alone) < len(rows) else []

    def _collates(self, rows: list[_Row]) -> bool:
        try:
            self.collate_fn([row.sample for row in rows])
        except self.catch:
            return False
        return True


class CarefulMapFetcher(_Careful, MapFetcher):
    """For datasets with ``__getitem__``."""

    def __init__(
        self,
        dataset: Any,
        *,
        more: Callable[[], Iterable[tuple[int, Any]]] = lambda: (),
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self._columns: bool | None = None  # whether ``__getitems__`` makes them, once it is seen
        self._load: Callable[[Any], Any] = functools.partial(operator.getitem, dataset)
        has_no_single = getattr(type(dataset), "__getitem__", None) in (None, Dataset.__getitem__)
        if has_no_single and hasattr(dataset, "__getitems__"):
            self._load = self._load_of_many
        self.more = more  # who may stand in when nobody else can

    def fetch(self, task: int, index: Any, brief: Brief | None = None) -> Any:
        self.reports = []
        self._begin(task)
        keys = list(index) if self.auto_collation else [index]
        batch = _Batch(task, keys, brief or NOTHING, [], set(), set())
        if self.auto_collation and makes_batches(self.dataset):
            return self._of_many(batch)
        self._one_after_the_other(batch)
        return self._together(batch)

    def alone(self, task: int, index: Any, brief: Brief | None, code: int) -> None:
        """Load one sample and drop it: does the worker live?"""
        keys = list(index) if self.auto_collation else [index]
        key = substitute.sample_of(keys, brief, code)
        with self._with_own_randomness():
            self.recorder.note(task, code, FETCH)
            try:
                self._load(key)
            except BaseException:  # it raised, so it lives
                return

    # -- one batch ------------------------------------------------------------------------

    def _one_after_the_other(self, batch: _Batch) -> None:
        """The loop of `fetch`, with a net. What goes well is to cost as little as it can."""
        placement = batch.placement = self._placement(batch.keys) if self.auto_collation else None
        task, known, rows = batch.task, batch.brief.known, batch.rows
        note, load, state = self.recorder.note, self._load, self._random_state
        row: _Row | None
        for position, key in enumerate(batch.keys):
            if position in known:
                row = self._settle(batch, self._known(batch, position))
            else:
                before = state()
                note(task, position, FETCH)
                try:
                    row = _Row(position, load(key))
                except self.catch as error:
                    row = self._after(batch, position, error, before)
                else:
                    if row.sample is None:
                        row = self._settle(batch, _Trouble(self._bad(batch, position, "none")))
            if row is None:
                continue
            if placement is not None and not row.given:
                row.sample = placement.place(row.sample)
                if placement.useless:
                    placement = None
            rows.append(row)
            if not position & 3:
                self.tidy()

    def _after(
        self, batch: _Batch, position: int, error: BaseException, before: Snapshot
    ) -> _Row | None:
        """A first try has failed: try again if that makes sense, else let the policy decide."""
        loaded = self._try(batch, position, position, batch.keys[position], error, before)
        if isinstance(loaded, _Trouble):
            return self._settle(batch, loaded)
        return _Row(position, loaded)

    def _known(self, batch: _Batch, position: int) -> _Trouble:
        return _Trouble(
            dataclasses.replace(
                batch.brief.known[position],
                index=batch.keys[position],
                position=position,
                batch=batch.task,
                worker_id=self.worker_id,
                action="",
            )
        )

    def _try(
        self,
        batch: _Batch,
        position: int,
        code: int,
        key: Any,
        error: BaseException | None = None,
        before: Snapshot | None = None,
    ) -> Any:
        """The sample, or a `_Trouble`. `error` and `before` belong to a first try, if there was."""
        before = before or self._random_state()
        tries = 0 if error is None else 1
        while True:
            if error is not None:
                wait = self.policy.wait_before_retry(error, tries)
                if wait is None:
                    verdict = "transient" if may_pass(error) else "bad"
                    bad = self._bad(
                        batch, position, "raised", cause=error, attempts=tries, verdict=verdict
                    )
                    return _Trouble(bad, error)
                gc.collect()  # what the failed try has left may be what it lacked
                time.sleep(wait)
                bring_back(before)
            tries += 1
            self.recorder.note(batch.task, code, FETCH)
            try:
                sample = self._load(key)
            except self.catch as another:
                error = another
                continue
            return _Trouble(self._bad(batch, position, "none")) if sample is None else sample

    # -- datasets that take many indices at once ------------------------------------------

    def _load_of_many(self, key: Any) -> Any:
        made = self.dataset.__getitems__([key])
        return made[0] if _are_rows(made, 1) else made

    def _of_many(self, batch: _Batch) -> Any:
        """A batch by ``__getitems__``, which makes a list of samples, or a batch as it likes it:
        columns.

        If it fails, samples are loaded one by one to find whose fault it is. Columns cannot be
        mended with single samples: they are made again, with the keys that are good.
        """
        before = self._random_state()
        known, at_once = batch.brief.known, not batch.brief.apart
        rest = [key for position, key in enumerate(batch.keys) if position not in known]
        if at_once and rest and not self._columns:
            made = self._ask(batch, rest)
            if _are_rows(made, len(rest)):
                self._columns = False
                self._take(batch, made)
                return self._together(batch)
            if made is not _FAILED:
                self._columns = True
                if not known:
                    return self._collate(batch.task, made)
            bring_back(before)
        if at_once and self._columns:
            self._settle_known(batch)
            made = self._ask(batch, _good_keys(batch)) if batch.rows else DROPPED
            if made is not _FAILED:
                return made if made is DROPPED else self._collate(batch.task, made)
            bring_back(before)
            batch = _Batch(batch.task, batch.keys, batch.brief, [], set(), set())
            self.reports = []
        self._one_after_the_other(batch)
        if self._columns is None:
            self._columns = self._makes_columns(batch)
        return self._made_again(batch, before) if self._columns else self._together(batch)

    def _ask(self, batch: _Batch, keys: list[Any]) -> Any:
        self.recorder.note(batch.task, -1, FETCH)
        try:
            return self.dataset.__getitems__(keys)
        except self.catch:  # it is raised again, by the sample whose fault it is
            return _FAILED

    def _makes_columns(self, batch: _Batch) -> bool | None:
        """Found out with one good sample; None if it cannot be."""
        row = next((row for row in batch.rows if not row.given), None)
        if row is None:
            return None
        with self._with_own_randomness():
            self.recorder.note(batch.task, substitute.code(row.position, row.number), FETCH)
            try:
                return not _are_rows(self.dataset.__getitems__([_key(batch, row)]), 1)
            except self.catch:  # then there is no batch to be had but from single samples
                return None

    def _settle_known(self, batch: _Batch) -> None:
        for position in range(len(batch.keys)):
            row: _Row | None = _Row(position, _UNLOADED)
            if position in batch.brief.known:
                row = self._settle(batch, self._known(batch, position))
            if row is not None:
                batch.rows.append(row)

    def _made_again(self, batch: _Batch, before: Snapshot) -> Any:
        """Columns, once it is known who is good: as if there had never been others."""
        if not batch.rows:
            return DROPPED
        keys = _good_keys(batch)
        for tries in itertools.count(1):
            bring_back(before)
            self.recorder.note(batch.task, -1, FETCH)
            try:
                made = self.dataset.__getitems__(keys)
                break
            except self.catch as error:
                wait = self.policy.wait_before_retry(error, tries)
                if wait is None:
                    raise
            time.sleep(wait)
        return self._collate(batch.task, made)

    def _take(self, batch: _Batch, loaded: Sequence[Any]) -> None:
        samples = iter(loaded)
        for position in range(len(batch.keys)):
            row: _Row | None
            if position in batch.brief.known:
                row = self._settle(batch, self._known(batch, position))
            else:
                row = _Row(position, next(samples))
                if row.sample is None:
                    row = self._settle(batch, _Trouble(self._bad(batch, position, "none")))
            if row is not None:
                batch.rows.append(row)

    # -- standing in ----------------------------------------------------------------------

    def _stand_in(self, batch: _Batch, position: int) -> _Row:
        brief = batch.brief
        bad_keys = {key_of(one.index) for one in (*self.reports, *brief.known.values())}
        bad_keys.update(map(key_of, brief.avoid))
        tried = 0
        ranked = substitute.order(brief, batch.keys, position)
        fresh = [one for one in ranked if one[0] not in batch.used]
        again = [one for one in ranked if one[0] in batch.used]
        for number, key in itertools.chain(fresh, again, self.more()):
            code = substitute.code(position, number)
            if code in brief.known or number in batch.hopeless or key_of(key) in bad_keys:
                continue
            tried += 1
            with self._with_own_randomness(brief.seed, position, number):
                loaded = self._try(batch, position, code, key)
            if not isinstance(loaded, _Trouble):
                batch.used.add(number)
                return _Row(position, loaded, number=number, key=key)
            batch.hopeless.add(number)
        self.recorder.note(batch.task, position, FETCH)
        raise NoSubstitute(
            f"no good sample was found to stand in for {self.reports[-1].who()}, which "
            f"{self.reports[-1].what()}: all {tried} others that were tried are bad too.\n"
            "What to do: so many bad ones together have one cause, most often a mount that is gone "
            'or a path that is wrong; mend that. on_bad_sample="skip" goes on without them.'
        )


def _are_rows(made: Any, count: int) -> bool:
    """Whether ``__getitems__`` has made a list of samples. A tuple is more often columns."""
    return isinstance(made, list) and len(made) == count


def _good_keys(batch: _Batch) -> list[Any]:
    """For ``__getitems__``: what the batch is to be made of."""
    keys = []
    for row in batch.rows:
        if row.given and row.sample is not None:
            raise TypeError(
                f"on_bad_sample returned a {type(row.sample).__name__} for sample "
                f"{batch.keys[row.position]!r}, but the dataset's __getitems__ makes whole batches "
                'in which there is no place for it; return "skip", "replace" or "raise"'
            )
        keys.append(_key(batch, row))
    return keys


def _key(batch: _Batch, row: _Row) -> Any:
    return batch.keys[row.position] if row.number is None else row.key


class CarefulIterableFetcher(_Careful, IterableFetcher):
    """For datasets with ``__iter__``.

    A Python generator that raised is finished, and asking it again looks like the end of the data.
    An iterator that is no generator can be asked again. A dataset with ``state_dict`` is taken up
    after the failure. Where neither helps, or helps no further, `ReplicaLost` says so.
    """

    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        # Of the failure just before; all forgotten with the next good element.
        self._failure: tuple[str, str, str] | None = None
        self._repeated = 0
        self._state_then: bytes | None = None
        self._through_generator: BaseException | None = None
        self._spare: Any = None  # a good one, for when no other comes

    def fetch(self, task: int, index: Any, brief: Brief | None = None) -> Any:
        self.reports = []
        if self.ended:
            raise StopIteration
        self._begin(task)
        size = len(index) if self.auto_collation else 1
        batch = _Batch(task, [], NOTHING, [], set(), set())
        placement = batch.placement = self._placement(index) if self.auto_collation else None
        for _ in range(size):
            try:
                row = self._from_ahead(batch) if self.ahead else self._row(batch)
            except StopIteration:
                self.ended = True
                break
            if row is None:
                continue
            if placement is not None and row.sample is not _PENDING and not row.given:
                row.sample = placement.place(row.sample)
            batch.rows.append(row)
            self.tidy()
        if self.ended and (not batch.rows or (self.drop_last and len(batch.keys) < size)):
            raise StopIteration
        made = self._together(batch)
        if made is DROPPED and self.ended:
            raise StopIteration
        return made

    def _from_ahead(self, batch: _Batch) -> _Row:
        row: _Row = self.ahead.pop(0)
        row.position = len(batch.keys)
        batch.keys.append(None)
        return row

    def _row(self, batch: _Batch) -> _Row | None:
        position = len(batch.keys)
        self.recorder.note(batch.task, position, FETCH)
        try:
            sample = next(self.iterator)
        except StopIteration:
            if self._through_generator is None:
                raise
            self._go_on_after(self._through_generator)  # no end: a generator inside had raised
            return self._row(batch)
        except self.catch as error:
            batch.keys.append(None)
            bad = self._bad(batch, position, "raised", cause=error)
            row = self._settle(batch, _Trouble(bad, error))
            self._count_failure(bad, error)
            return row
        batch.keys.append(None)
        self._failure = self._state_then = self._through_generator = None
        self._repeated = 0
        if sample is None:
            return self._settle(batch, _Trouble(self._bad(batch, position, "none")))
        return _Row(position, sample)

    # -- after a failure ------------------------------------------------------------------

    def _count_failure(self, bad: BadSample, error: BaseException) -> None:
        failure = (bad.error, bad.message, bad.digest)
        self._repeated = self._repeated + 1 if failure == self._failure else 1
        self._failure = failure
        if self._repeated >= NO_PROGRESS:
            self._lose(error, f"it raised the same {self._repeated} times in a row")
        if inspect.isgenerator(self.iterator):
            self._go_on_after(error)
        elif _passed_through_a_generator(error):
            self._through_generator = error  # if the next answer is the end, it is not the end

    def _go_on_after(self, error: BaseException) -> None:
        """The generator is finished: make another from the state after the failure."""
        self._through_generator = None
        iterator = self.iterator
        parts = (state_of(self.dataset), None if iterator is self.dataset else state_of(iterator))
        if parts == (None, None):
            self._lose(error, "a Python generator that has raised is finished")
        state = pickle.dumps(parts)
        if state == self._state_then:
            self._lose(error, "its state_dict() after the error leads back to the same error")
        self._state_then = state
        if parts[0] is not None:
            self.dataset.load_state_dict(parts[0])
        self.iterator = iter(self.dataset)
        if parts[1] is not None:
            self.iterator.load_state_dict(parts[1])  # type: ignore[attr-defined]

    def _lose(self, error: BaseException, why: str) -> None:
        self.ended = True
        raise ReplicaLost(
            f"the IterableDataset raised {record.error_name(error)}: {record.message_of(error)}, "
            f"and the elements after it cannot be had: {why}. The rest of this "
            f"{'worker' if self.worker_id is not None else 'epoch'}'s part is lost.\n"
            "What to do: catch the error inside __iter__ and go on there with the next element; "
            "or let __iter__ return an object with __next__ that moves on before it loads; or give "
            "the dataset state_dict() and load_state_dict() whose state, after an error, is past "
            "the bad element."
        ) from error

    # -- standing in ----------------------------------------------------------------------

    def _stand_in(self, batch: _Batch, position: int) -> _Row:
        return _Row(position, _PENDING, number=0)  # a good one may only come later in the batch

    def _complete(self, batch: _Batch) -> None:
        """Fill the places of bad ones with copies of good ones: of this batch, else the next.

        The next one is delivered in its own place too, so that the number of batches stays.
        """
        pending = [row for row in batch.rows if row.sample is _PENDING]
        good = [row.sample for row in batch.rows if row.number is None]
        if good and self.policy.replaces:
            self._spare = copy.deepcopy(good[-1])  # the batch itself is the consumer's
        if not pending:
            return
        if not good:
            good = self._look_ahead(batch)
        if not good:
            batch.rows.clear()
            return
        for row in pending:
            dice = random.Random(substitute.seed_for(batch.task, row.position))
            row.sample = copy.deepcopy(dice.choice(good))

    def _look_ahead(self, batch: _Batch) -> list[Any]:
        """The next good element, or at the end of the data the last one; none if there is none."""
        while not any(row.number is None for row in self.ahead):
            try:
                row = self._row(batch)
            except StopIteration:
                return [] if self._spare is None else [self._spare]
            if row is not None:
                self.ahead.append(row)
        return [row.sample for row in self.ahead if row.number is None]


class _Pending:
    def __reduce__(self) -> str:
        return "_PENDING"


_PENDING: Final = _Pending()


def _passed_through_a_generator(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_flags & inspect.CO_GENERATOR:
            return True
        trace = trace.tb_next
    return False
