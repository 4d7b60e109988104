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

Here is what both kinds of dataset have in common: `careful_map` and `careful_iterable` load the
samples, each in its own way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from holdfast.autopsy.blackbox import FETCH
from holdfast.engine.exceptions import without_our_frames
from holdfast.engine.fetch import (
    Fetcher,
)
from holdfast.engine.randomness import Randomness, bring_back
from holdfast.errors import PoisonSample, WorkerError
from holdfast.memory.collate import Placement
from holdfast.samples import oddity, record, substitute
from holdfast.samples.policy import Given, Policy
from holdfast.samples.record import BadSample
from holdfast.samples.substitute import Brief

__all__ = ["DROPPED", "Batch", "Careful", "Row", "Trouble"]


class _Dropped:
    def __repr__(self) -> str:
        return "DROPPED"


DROPPED: Final = _Dropped()
"""In place of a batch with nothing left."""


@dataclass(slots=True, eq=False)
class Row:
    """A sample of the batch being made."""

    position: int
    sample: Any
    number: int | None = None  # of the candidate, if it stands in for another
    given: bool = False  # by the policy function
    key: Any = None  # of the candidate


@dataclass(slots=True)
class Batch:
    """The batch being made."""

    task: int
    keys: list[Any]
    brief: Brief
    rows: list[Row]
    hopeless: set[int]  # candidates that turned out bad
    used: set[int]  # candidates in use
    placement: Placement | None = None  # has to live until the rows are collated


@dataclass(slots=True)
class Trouble:
    """A bad sample with its exception, if there was one."""

    bad: BadSample
    error: BaseException | None = None


class Fault(NamedTuple):
    """Why a sample does not collate.

    One that fails by itself is bad. One that is merely unlike the majority is odd, for this batch:
    in another it may be the majority that is wrong.
    """

    message: str
    verdict: str


class Careful(Fetcher):
    """What both kinds of dataset have in common."""

    def __init__(
        self,
        dataset: Any,
        *,
        policy: Policy,
        worker_id: int | None,
        randomness: Randomness | None = None,
        catch: type[BaseException] = BaseException,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.policy = policy
        self.worker_id = worker_id
        self.catch = catch  # in the main process Ctrl-C is no bad sample
        self.reports: list[BadSample] = []
        self._text: bool | None = None  # whether samples are text, once one was seen
        if randomness is None:  # in the main process
            randomness = Randomness(self._roots)
        self.randomness = randomness
        self._random_state = randomness.snapshot

    # -- random states --------------------------------------------------------------------

    def _roots(self) -> list[tuple[str, Any]]:
        return [
            ("dataset", self.dataset),
            ("collate_fn", self.collate_fn),
            ("on_bad_sample", self.policy.on_bad_sample),
        ]

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

    def _bad(self, batch: Batch, position: int, kind: str, **details: Any) -> BadSample:
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

    def _settle(self, batch: Batch, trouble: Trouble) -> Row | None:
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
            return Row(position, decision.sample, given=True)
        self._report(bad, "raised")
        if error is not None:
            raise error
        if bad.kind == "none":
            return Row(position, None, given=True)  # as without a policy
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

    def _stand_in(self, batch: Batch, position: int) -> Row | None:
        raise NotImplementedError

    # -- collating ------------------------------------------------------------------------

    def _together(self, batch: Batch) -> Any:
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

    def _complete(self, batch: Batch) -> None:
        """Whatever is left to do before the rows can be collated."""

    def _check_given(self, batch: Batch) -> None:
        """Text from the policy function among samples that are none is a word it has wrong."""
        for row in batch.rows:
            if not row.given:
                self._text = isinstance(row.sample, str)
        if self._text is False:
            for row in batch.rows:
                if row.given and isinstance(row.sample, str):
                    self.recorder.note(batch.task, row.position, FETCH)
                    raise ValueError(self.policy.wrong_word(row.sample, batch.keys[row.position]))

    def _data(self, batch: Batch) -> Any:
        return [row.sample for row in batch.rows] if self.auto_collation else batch.rows[0].sample

    def _replace_row(self, batch: Batch, row: Row, fault: Fault, error: BaseException) -> None:
        at = batch.rows.index(row)
        if row.number is not None:  # a stand-in that does not fit either
            batch.hopeless.add(row.number)
            another = self._stand_in(batch, row.position)
        elif row.given:
            raise error
        else:
            details = {"message": fault.message, "verdict": fault.verdict, "cause": error}
            bad = self._bad(batch, row.position, "collate", **details)
            another = self._settle(batch, Trouble(bad, error))
        batch.rows[at : at + 1] = [] if another is None else [another]

    def _guilty(self, batch: Batch, error: BaseException) -> list[tuple[Row, Fault]]:
        """The rows that make collation fail, and what is wrong with each; none if all may be."""
        rows = batch.rows
        said = record.message_of(error)
        if isinstance(error, MemoryError):
            return []
        if not self.auto_collation:
            return [(rows[0], Fault(said, "bad"))]
        forms = [oddity.form(row.sample) for row in rows]
        own = [form for row, form in zip(rows, forms, strict=True) if row.number is None]
        usual = oddity.majority(own) or oddity.majority(forms)  # stand-ins may be odd themselves
        with self._with_own_randomness():
            if usual is not None and len(set(forms)) > 1:
                like = [row for row, form in zip(rows, forms, strict=True) if form == usual]
                if self._collates(like[:2]):
                    return [
                        (row, Fault(oddity.difference(form, usual), "odd"))
                        for row, form in zip(rows, forms, strict=True)
                        if form != usual and not self._collates([like[0], row])
                    ]
            alone = [row for row in rows if not self._collates([row])]
        return [(row, Fault(said, "bad")) for row in alone] if len(alone) < len(rows) else []

    def _collates(self, rows: list[Row]) -> bool:
        try:
            self.collate_fn([row.sample for row in rows])
        except self.catch:
            return False
        return True
