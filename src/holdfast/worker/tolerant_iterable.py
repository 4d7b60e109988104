"""Iterable datasets with a policy for bad samples: how to continue after an element that raised.

The rules are in `tolerant`. A Python generator that raised is finished: the next call looks like
the end of the data. An iterator that is no generator can be called again. A dataset with
``state_dict`` is continued from its state after the failure, if its states are exact
(`stream_states`). If neither helps, `ReplicaLost` says so.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import random
from typing import Any, Final, NoReturn

from holdfast.autopsy.blackbox import FETCH
from holdfast.errors import ReplicaLost
from holdfast.samples import bad_sample, substitute
from holdfast.samples.bad_sample import BadSample
from holdfast.samples.substitute import NOTHING, BatchHints
from holdfast.worker.fetch import SELDOM, IterableFetcher
from holdfast.worker.stream_states import StreamStates
from holdfast.worker.tolerant import DROPPED, Batch, Row, TolerantFetcher, Trouble

NO_PROGRESS: Final = 16  # equal failures of an iterator in a row


class TolerantIterableFetcher(TolerantFetcher, IterableFetcher):
    """For datasets with ``__iter__``."""

    streams = True

    def __init__(self, dataset: Any, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        # About the failure just before; reset by the next good element.
        self._failure: tuple[str, str, str] | None = None
        self._repeated = 0
        self._state_then: bytes | None = None
        self._through_generator: BaseException | None = None
        self._states = StreamStates(self.dataset, self.catch, self._random_state, self.draw)
        self._spare: Any = None  # a good element, if no other follows
        self.drawn = 0  # elements of the stream that the last batch took, good or bad

    def fetch(self, task: int, index: Any, hints: BatchHints | None = None) -> Any:
        self.reports = []
        self.drawn = 0
        self.made += 1
        if self.ended:
            raise StopIteration
        self._begin(task, self.position)
        if self._through_generator is None:
            self._states.remember(self.iterator, first=self.made == 1)
        else:
            self._states.let_go()
        size = len(index) if self.auto_collation else 1
        batch = Batch(task, [], NOTHING, [], set(), set())
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
                if placement.useless:
                    self._leave_out = SELDOM
                    placement = None
            batch.rows.append(row)
            self.tidy()
        if self.ended and (not batch.rows or (self.drop_last and len(batch.keys) < size)):
            raise StopIteration
        made = self._together(batch)
        if made is DROPPED and self.ended:
            raise StopIteration
        return made

    def _from_ahead(self, batch: Batch) -> Row:
        row: Row = self.ahead.pop(0)
        row.position = len(batch.keys)
        batch.keys.append(None)
        return row

    def _row(self, batch: Batch) -> Row | None:
        position = len(batch.keys)
        self.recorder.note(batch.task, position, FETCH)
        try:
            if self.watch is None:
                sample = self.draw(self.iterator)
            else:
                plain = functools.partial(self.draw, self.iterator)
                sample = self.watch.draw(plain, self.made - 1, position)
        except StopIteration:
            self._states.ended()
            if self._through_generator is None:
                raise
            self._continue_after(self._through_generator)  # no end: a generator inside had raised
            return self._row(batch)
        except self.catch as error:
            self._states.failed()
            self.drawn += 1
            batch.keys.append(None)
            bad = self._bad(batch, position, "raised", cause=error)
            row = self._apply_policy(batch, Trouble(bad, error))
            self._count_failure(bad, error)
            return row
        self._states.came(sample)
        self.drawn += 1
        batch.keys.append(None)
        self._failure = self._state_then = self._through_generator = None
        self._repeated = 0
        if sample is None:
            return self._apply_policy(batch, Trouble(self._bad(batch, position, "none")))
        return Row(position, sample)

    # -- after a failure ------------------------------------------------------------------

    def _count_failure(self, bad: BadSample, error: BaseException) -> None:
        failure = (bad.error, bad.message, bad.digest)
        self._repeated = self._repeated + 1 if failure == self._failure else 1
        self._failure = failure
        if self._repeated >= NO_PROGRESS:
            self._lose(error, f"it raised the same {self._repeated} times in a row")
        if inspect.isgenerator(self.iterator):
            self._continue_after(error)
        elif _passed_through_a_generator(error):
            self._through_generator = error  # if it ends next, that is not the end of the data

    def _continue_after(self, error: BaseException) -> None:
        """The generator is finished: make another from the state after the failure."""
        self._through_generator = None
        states = self._states.now(self.iterator)
        if states is None:
            self._lose(error, "a Python generator that has raised is finished")
        pickled = pickle.dumps(states)
        if pickled == self._state_then:
            self._lose(error, "its state_dict() after the error leads back to the same error")
        self._state_then = pickled
        if not self._states.are_exact(states, error):
            self._lose(
                error,
                "what its state_dict() gives leaves something out (the contents of a shuffle "
                "buffer, for example), or not enough comes after the error to try that",
            )
        self.iterator = self._states.load(states)
        self._states.remember(self.iterator, first=False)

    def _lose(self, error: BaseException, why: str) -> NoReturn:
        self.ended = True
        raise ReplicaLost(
            f"the IterableDataset raised {bad_sample.error_name(error)}: "
            f"{bad_sample.message_of(error)}, and the elements after it cannot be read: {why}. The "
            f"rest of this {'worker' if self.worker_id is not None else 'epoch'}'s part is lost.\n"
            "What to do: catch the error inside __iter__ and continue there with the next element; "
            "or let __iter__ return an object with __next__ that moves on before it loads; or give "
            "the dataset state_dict() and load_state_dict() whose state, after an error, is past "
            "the bad element."
        ) from error

    # -- substitutes ----------------------------------------------------------------------

    def _substitute(self, batch: Batch, position: int) -> Row:
        return Row(position, _PENDING, number=0)  # good elements may come later in the batch

    def _complete(self, batch: Batch) -> None:
        """Replace bad elements by copies of good ones: of this batch, else the next good one.

        That one is delivered in its own place too, so that the number of batches stays the same.
        """
        pending = [row for row in batch.rows if row.sample is _PENDING]
        good = [row.sample for row in batch.rows if row.number is None]
        if good and self.policy.replaces:
            self._spare = copy.deepcopy(good[-1])  # the consumer may change the batch itself
        if not pending:
            return
        if not good:
            good = self._look_ahead(batch)
        if not good:
            batch.rows.clear()
            return
        for row in pending:
            # Chosen by the batch's number in the stream: a replay does not know the task.
            dice = random.Random(substitute.seed_for(self.made - 1, row.position))
            row.sample = copy.deepcopy(dice.choice(good))

    def _look_ahead(self, batch: Batch) -> list[Any]:
        """The next good element, or at the end of the data the last one, if there is one."""
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
