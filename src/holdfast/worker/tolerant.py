"""Fetching with a policy for bad samples: as `fetch` does, with errors of single samples caught.

It runs in the worker, where the samples are. `docs/corrupt-data.md` states the rules for users:

- After a failure that may be temporary a sample is loaded again, from the random state before its
  first attempt.
- After a failure that is not, the random state is as the last attempt left it, as with a dataset
  that catches its own errors. So the good samples after it are those of stock torch with such a
  dataset.
- A sample that is known to be bad (it ended or stalled its worker, or is in the quarantine) is not
  loaded and draws nothing.
- A substitute is loaded from a random state of its own, made from the seed, the epoch, the batch,
  the position and its number, and leaves the state of the worker as it was. With
  ``seeding="sample"`` it has the random state that it has in its own place, too.
- Bad samples are reported with the batch. A worker that dies before that has reported nothing: the
  batch is made again as a whole, which finds the same again.

This module has what both kinds of dataset have in common. `tolerant_map` and `tolerant_iterable`
load the samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from holdfast.autopsy.blackbox import FETCH
from holdfast.errors import PoisonSample, WorkerError
from holdfast.samples import bad_sample, batch_outlier, substitute
from holdfast.samples.bad_sample import BadSample
from holdfast.samples.policy import Given, Policy
from holdfast.samples.substitute import BatchHints
from holdfast.worker.exceptions import without_our_frames
from holdfast.worker.fetch import Fetcher
from holdfast.worker.randomness import Randomness, restore_in_process
from holdfast.worker.sample_seeding import kept_states

if TYPE_CHECKING:
    from holdfast.transport.placement import Placement


class _Dropped:
    def __repr__(self) -> str:
        return "DROPPED"


DROPPED: Final = _Dropped()
"""In place of a batch in which no sample is left."""


@dataclass(slots=True, eq=False)
class Row:
    """A sample of the batch being made."""

    position: int
    sample: Any
    number: int | None = None  # of the candidate, if it is a substitute
    given: bool = False  # returned by the policy function
    key: Any = None  # of the candidate


@dataclass(slots=True)
class Batch:
    """The batch being made."""

    task: int
    keys: list[Any]
    hints: BatchHints
    rows: list[Row]
    hopeless: set[int]  # candidates that turned out bad
    used: set[int]  # candidates in use
    placement: Placement | None = None  # must live until the rows are collated


@dataclass(slots=True)
class Trouble:
    """A bad sample with its exception, if there was one."""

    bad: BadSample
    error: BaseException | None = None


class CollateFault(NamedTuple):
    """Why a sample does not collate.

    One that fails by itself is bad. One that only differs from the majority is odd: in another
    batch the majority may be wrong.
    """

    message: str
    verdict: str


class TolerantFetcher(Fetcher):
    """What both kinds of dataset have in common."""

    streams = False  # whether the dataset is an iterable one

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
        self.catch = catch  # in the main process Ctrl-C is not a bad sample
        self.reports: list[BadSample] = []
        self._text: bool | None = None  # whether samples are text, once one was seen
        if randomness is None:  # in the main process
            randomness = Randomness(self._roots, instead=kept_states(self.seeds, self.streams))
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
        if seed and self.seeds is None:
            self.randomness.seed(substitute.seed_for(*seed))
        try:
            yield
        finally:
            restore_in_process(before)

    # -- trouble --------------------------------------------------------------------------

    def _bad(self, batch: Batch, position: int, kind: str, **details: Any) -> BadSample:
        index = batch.keys[position]
        error: BaseException | None = details.pop("cause", None)
        if error is not None:
            trace = without_our_frames(error.__traceback__)
            details.setdefault("message", bad_sample.message_of(error))
            details.update(
                error=bad_sample.error_name(error),
                traceback=bad_sample.traceback_text(error, trace),
                digest=bad_sample.digest_of(error, trace),
            )
        return BadSample(
            index=index,
            kind=kind,
            name=None if index is None else bad_sample.name_of(self.dataset, index, error),
            position=position,
            batch=batch.task,
            worker_id=self.worker_id,
            time=time.time(),
            **details,
        )

    def _apply_policy(self, batch: Batch, trouble: Trouble) -> Row | None:
        """What the policy decides: another row, or none. Raises if it says so."""
        bad, error = trouble.bad, trouble.error
        decision = self.policy.decide(bad)
        position = bad.position
        assert position is not None
        if decision == "skip":
            self._report(bad, "skipped")
            return None
        if decision == "replace":
            self._report(bad, "replaced")
            return self._substitute(batch, position)
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
        raise WorkerError(f"{bad.who()} {bad.what()}. It was known, and was not loaded again.")

    def _report(self, bad: BadSample, action: str) -> None:
        self.reports.append(dataclasses.replace(bad, action=action))

    def _substitute(self, batch: Batch, position: int) -> Row | None:
        raise NotImplementedError

    # -- collating ------------------------------------------------------------------------

    def _together(self, batch: Batch) -> Any:
        """Collate; if that fails, find the samples that cause it and collate without them."""
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
            restore_in_process(before)
            for row, fault in guilty:
                self._replace_row(batch, row, fault, caught)

    def _complete(self, batch: Batch) -> None:
        """Called before the rows are collated."""

    def _check_given(self, batch: Batch) -> None:
        """If the policy function returned text, and samples are no text, it is a misspelt word."""
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

    def _replace_row(
        self, batch: Batch, row: Row, fault: CollateFault, error: BaseException
    ) -> None:
        at = batch.rows.index(row)
        if row.number is not None:  # a substitute that does not fit either
            batch.hopeless.add(row.number)
            another = self._substitute(batch, row.position)
        elif row.given:
            raise error
        else:
            details = {"message": fault.message, "verdict": fault.verdict, "cause": error}
            bad = self._bad(batch, row.position, "collate", **details)
            another = self._apply_policy(batch, Trouble(bad, error))
        batch.rows[at : at + 1] = [] if another is None else [another]

    def _guilty(self, batch: Batch, error: BaseException) -> list[tuple[Row, CollateFault]]:
        """The rows that make collation fail, and why; none if it may be all of them."""
        rows = batch.rows
        said = bad_sample.message_of(error)
        if isinstance(error, MemoryError):
            return []
        if not self.auto_collation:
            return [(rows[0], CollateFault(said, "bad"))]
        forms = [batch_outlier.form(row.sample) for row in rows]
        own = [form for row, form in zip(rows, forms, strict=True) if row.number is None]
        # Without substitutes if possible: they may be odd themselves.
        usual = batch_outlier.majority(own) or batch_outlier.majority(forms)
        with self._with_own_randomness():
            if usual is not None and len(set(forms)) > 1:
                like = [row for row, form in zip(rows, forms, strict=True) if form == usual]
                if self._collates(like[:2]):
                    return [
                        (row, CollateFault(batch_outlier.difference(form, usual), "odd"))
                        for row, form in zip(rows, forms, strict=True)
                        if form != usual and not self._collates([like[0], row])
                    ]
            alone = [row for row in rows if not self._collates([row])]
        return [(row, CollateFault(said, "bad")) for row in alone] if len(alone) < len(rows) else []

    def _collates(self, rows: list[Row]) -> bool:
        try:
            self.collate_fn([row.sample for row in rows])
        except self.catch:
            return False
        return True
