"""Map-style datasets with a policy for bad samples.

The rules are in `tolerant`. A dataset with ``__getitems__`` loads all samples at once, as with
torch, and sample by sample only if that fails.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from torch.utils.data import Dataset

from holdfast.autopsy.blackbox import FETCH
from holdfast.errors import NoSubstitute
from holdfast.samples import substitute
from holdfast.samples.policy import may_pass
from holdfast.samples.sample_keys import key_of
from holdfast.samples.substitute import NOTHING, BatchHints
from holdfast.worker.fetch import SELDOM, MapFetcher, makes_batches
from holdfast.worker.randomness import Snapshot, restore_in_process
from holdfast.worker.tolerant import DROPPED, Batch, Row, TolerantFetcher, Trouble

_UNLOADED: Final = object()  # a sample that ``__getitems__`` is to load with the others
_FAILED: Final = object()


class TolerantMapFetcher(TolerantFetcher, MapFetcher):
    """For datasets with ``__getitem__``."""

    def __init__(
        self,
        dataset: Any,
        *,
        more: Callable[[], Iterable[tuple[int, Any]]] = lambda: (),
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self._columns: bool | None = None  # whether ``__getitems__`` returns columns, if known
        self._load: Callable[[Any], Any] = functools.partial(operator.getitem, self.source)
        has_no_single = getattr(type(dataset), "__getitem__", None) in (None, Dataset.__getitem__)
        if has_no_single and hasattr(dataset, "__getitems__"):
            self._load = self._load_of_many
        self.more = more  # further candidates for substitutes, if all others are bad

    def fetch(self, task: int, index: Any, hints: BatchHints | None = None) -> Any:
        self.reports = []
        self._begin(task, self._key_of_batch(index))
        keys = list(index) if self.auto_collation else [index]
        batch = Batch(task, keys, hints or NOTHING, [], set(), set())
        if self.auto_collation and makes_batches(self.dataset):
            return self._of_many(batch)
        self._one_after_the_other(batch)
        return self._together(batch)

    def fetch_one(
        self, task: int, index: Any, position: int | None, hints: BatchHints | None = None
    ) -> None:
        """Load one sample and drop it; `position` may also be the code of a substitute."""
        keys = list(index) if self.auto_collation else [index]
        key = substitute.sample_of(keys, hints, position)
        self.recorder.note(task, -1 if position is None else position, FETCH)
        self._load(key)

    # -- one batch ------------------------------------------------------------------------

    def _one_after_the_other(self, batch: Batch) -> None:
        """The loop of `fetch`, with errors caught. It should add little time for good samples."""
        placement = batch.placement = self._placement(batch.keys) if self.auto_collation else None
        task, known, rows = batch.task, batch.hints.known, batch.rows
        note, load, state = self.recorder.note, self._load, self._random_state
        watch = self.watch
        row: Row | None
        for position, key in enumerate(batch.keys):
            if position in known:
                row = self._apply_policy(batch, self._known(batch, position))
            else:
                before = state()
                note(task, position, FETCH)
                began = 0.0 if watch is None else time.monotonic()
                try:
                    row = Row(position, load(key))
                except self.catch as error:
                    row = self._after(batch, position, error, before)
                else:
                    if watch is not None:
                        watch.add(key, time.monotonic() - began, row.sample)
                    if row.sample is None:
                        row = self._apply_policy(batch, Trouble(self._bad(batch, position, "none")))
            if row is None:
                continue
            if placement is not None and not row.given:
                row.sample = placement.place(row.sample)
                if placement.useless:
                    self._leave_out = SELDOM
                    placement = None
            rows.append(row)
            if not position & 3:
                self.tidy()

    def _after(
        self, batch: Batch, position: int, error: BaseException, before: Snapshot
    ) -> Row | None:
        """A first attempt has failed: load again if that may help, else let the policy decide."""
        loaded = self._try(batch, position, position, batch.keys[position], error, before)
        if isinstance(loaded, Trouble):
            return self._apply_policy(batch, loaded)
        return Row(position, loaded)

    def _known(self, batch: Batch, position: int) -> Trouble:
        return Trouble(
            dataclasses.replace(
                batch.hints.known[position],
                index=batch.keys[position],
                position=position,
                batch=batch.task,
                worker_id=self.worker_id,
                action="",
            )
        )

    def _try(
        self,
        batch: Batch,
        position: int,
        code: int,
        key: Any,
        error: BaseException | None = None,
        before: Snapshot | None = None,
    ) -> Any:
        """The sample, or a `Trouble`. `error` and `before` are from the first attempt, if it was
        made."""
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
                    return Trouble(bad, error)
                gc.collect()  # it may have failed for lack of memory or descriptors
                time.sleep(wait)
                restore_in_process(before)
            tries += 1
            self.recorder.note(batch.task, code, FETCH)
            try:
                sample = self._load(key)
            except self.catch as another:
                error = another
                continue
            return Trouble(self._bad(batch, position, "none")) if sample is None else sample

    # -- datasets that take many indices at once ------------------------------------------

    def _load_of_many(self, key: Any) -> Any:
        made = self.source.__getitems__([key])
        return made[0] if _are_rows(made, 1) else made

    def _of_many(self, batch: Batch) -> Any:
        """A batch by ``__getitems__``, which returns a list of samples, or a batch in some other
        form: columns.

        If it fails, samples are loaded one by one to find the bad ones. Single samples cannot be
        put into columns: these are made again, with the good keys.
        """
        before = self._random_state()
        known, at_once = batch.hints.known, not batch.hints.apart
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
            restore_in_process(before)
        if at_once and self._columns:
            self._apply_policy_to_known(batch)
            made = self._ask(batch, _good_keys(batch)) if batch.rows else DROPPED
            if made is not _FAILED:
                return made if made is DROPPED else self._collate(batch.task, made)
            restore_in_process(before)
            batch = Batch(batch.task, batch.keys, batch.hints, [], set(), set())
            self.reports = []
        self._one_after_the_other(batch)
        if self._columns is None:
            self._columns = self._makes_columns(batch)
        return self._made_again(batch, before) if self._columns else self._together(batch)

    def _ask(self, batch: Batch, keys: list[Any]) -> Any:
        self.recorder.note(batch.task, -1, FETCH)
        try:
            return self.source.__getitems__(keys)
        except self.catch:  # the bad sample raises again when it is loaded alone
            return _FAILED

    def _makes_columns(self, batch: Batch) -> bool | None:
        """Whether ``__getitems__`` returns columns, tried with one good sample; None if unknown."""
        row = next((row for row in batch.rows if not row.given), None)
        if row is None:
            return None
        with self._with_own_randomness():
            self.recorder.note(batch.task, substitute.code(row.position, row.number), FETCH)
            try:
                return not _are_rows(self.source.__getitems__([_key(batch, row)]), 1)
            except self.catch:  # then only single samples can be loaded
                return None

    def _apply_policy_to_known(self, batch: Batch) -> None:
        for position in range(len(batch.keys)):
            row: Row | None = Row(position, _UNLOADED)
            if position in batch.hints.known:
                row = self._apply_policy(batch, self._known(batch, position))
            if row is not None:
                batch.rows.append(row)

    def _made_again(self, batch: Batch, before: Snapshot) -> Any:
        """Columns of the good samples, as if there had been no others."""
        if not batch.rows:
            return DROPPED
        keys = _good_keys(batch)
        for tries in itertools.count(1):
            restore_in_process(before)
            self.recorder.note(batch.task, -1, FETCH)
            try:
                made = self.source.__getitems__(keys)
                break
            except self.catch as error:
                wait = self.policy.wait_before_retry(error, tries)
                if wait is None:
                    raise
            time.sleep(wait)
        return self._collate(batch.task, made)

    def _take(self, batch: Batch, loaded: Sequence[Any]) -> None:
        samples = iter(loaded)
        for position in range(len(batch.keys)):
            row: Row | None
            if position in batch.hints.known:
                row = self._apply_policy(batch, self._known(batch, position))
            else:
                row = Row(position, next(samples))
                if row.sample is None:
                    row = self._apply_policy(batch, Trouble(self._bad(batch, position, "none")))
            if row is not None:
                batch.rows.append(row)

    # -- substitutes ----------------------------------------------------------------------

    def _substitute(self, batch: Batch, position: int) -> Row:
        hints = batch.hints
        bad_keys = {key_of(one.index) for one in (*self.reports, *hints.known.values())}
        bad_keys.update(map(key_of, hints.avoid))
        tried = 0
        ranked = substitute.order(hints, batch.keys, position)
        fresh = [one for one in ranked if one[0] not in batch.used]
        again = [one for one in ranked if one[0] in batch.used]
        for number, key in itertools.chain(fresh, again, self.more()):
            code = substitute.code(position, number)
            if code in hints.known or number in batch.hopeless or key_of(key) in bad_keys:
                continue
            tried += 1
            with self._with_own_randomness(hints.seed, position, number):
                loaded = self._try(batch, position, code, key)
            if not isinstance(loaded, Trouble):
                batch.used.add(number)
                return Row(position, loaded, number=number, key=key)
            batch.hopeless.add(number)
        self.recorder.note(batch.task, position, FETCH)
        raise NoSubstitute(
            f"no good sample was found to replace {self.reports[-1].who()}, which "
            f"{self.reports[-1].what()}: all {tried} others that were tried are bad too.\n"
            "What to do: so many bad samples together have one cause, most often a mount that is "
            'gone or a wrong path; repair that. on_bad_sample="skip" continues without them.'
        )


def _are_rows(made: Any, count: int) -> bool:
    """Whether ``__getitems__`` has returned a list of samples. A tuple is more often columns."""
    return isinstance(made, list) and len(made) == count


def _good_keys(batch: Batch) -> list[Any]:
    """The keys for ``__getitems__`` to make the batch of."""
    keys = []
    for row in batch.rows:
        if row.given and row.sample is not None:
            raise TypeError(
                f"on_bad_sample returned a {type(row.sample).__name__} for sample "
                f"{batch.keys[row.position]!r}, but the dataset's __getitems__ makes whole batches "
                'that it cannot be put into; return "skip", "replace" or "raise"'
            )
        keys.append(_key(batch, row))
    return keys


def _key(batch: Batch, row: Row) -> Any:
    return batch.keys[row.position] if row.number is None else row.key
