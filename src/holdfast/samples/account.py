"""One epoch's bad samples: what the workers are told of them, and what they report.

Bad samples are recorded in the order in which batches are delivered, so that warnings, the limit
and ``loader.bad_samples`` do not depend on timing.

A sample that is known to be bad when an epoch begins is not tried in it. One that is found during
an epoch is left out from the next epoch on. How far ahead the sampler is when the report arrives is
chance, and chance must not decide what random numbers a sample gets. The exception is samples that
end or stall their workers: they are left out at once, because each try costs several workers. They
draw no random numbers either way.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from holdfast.errors import TooManyBadSamples
from holdfast.introspection.attributes import weakly
from holdfast.samples import policy as policies
from holdfast.samples.bad_sample import BadSample, name_of
from holdfast.samples.policy import Limit, Policy
from holdfast.samples.sample_keys import Key, decoded, description_of, encoded, key_of
from holdfast.samples.substitute import BatchHints, Drawn, position_of, sample_of, seed_for

if TYPE_CHECKING:
    from holdfast.samples.ledger import Ledger


class Account:
    """One epoch."""

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        limit: Limit,
        dataset: Any,
        base_seed: int,
        epoch: int,
    ) -> None:
        self.ledger = ledger
        self.epoch = epoch
        self.bad: list[BadSample] = []
        self.seen = 0
        self.ended = False
        self._limit = limit
        self._dataset = weakly(dataset)  # a pool holds this, and the dataset may refer to it
        self._iterable = isinstance(dataset, IterableDataset)
        self._seed = seed_for(base_seed, epoch)
        self._known = dict(ledger.known)
        self._killers: dict[Key, BadSample] = {}  # found in this epoch
        self._keys: set[Key] = set()
        self._drawn = Drawn()
        self._ahead = 0
        self._unjudged: list[BadSample] = []
        self._unwritten: deque[Callable[[], None]] = deque()
        self._to_report: list[BadSample] = []  # candidates that ended workers
        self._good = 0
        self._streak = 0
        self.replaces = policy.replaces

    # -- what the workers are told --------------------------------------------------------

    def look_ahead(self, batches: Iterable[Sequence[Any]]) -> None:
        """Batches the sampler has already given. They are the candidates for the first batches,
        which have no earlier ones."""
        for keys in batches:
            self._drawn.add(keys)
            self._ahead += 1

    def hints_for(self, number: int, keys: Sequence[Any]) -> BatchHints | None:
        """For batch `number`, which is the next one drawn. None for an iterable dataset."""
        if self._iterable:
            return None
        known = self._known_in(keys)
        if not self.replaces:
            return BatchHints(known) if known else None
        seed = seed_for(self._seed, number)
        candidates = tuple(
            (place, one)
            for place, one in enumerate(self._drawn.candidates(seed))
            if not self._known or _find(self._known, one) is None
        )
        if self._ahead:
            self._ahead -= 1  # added by `look_ahead`
        else:
            self._drawn.add(keys)
        return BatchHints(known, candidates, seed)

    def _known_in(self, keys: Sequence[Any]) -> dict[int, BadSample]:
        if not self._known:
            return {}
        found = {}
        for position, one in enumerate(keys):
            bad = _find(self._known, one)
            if bad is not None:
                found[position] = bad
        return found

    def refreshed(self, keys: Sequence[Any], hints: BatchHints | None) -> BatchHints | None:
        """The hints for a batch that is ordered again. They leave out samples that have ended
        workers since, and only those, because they draw no random numbers either way.
        """
        if not self._killers:
            return hints
        hints = hints or BatchHints({})
        known = dict(hints.known)
        for position, one in enumerate(keys):
            bad = self._killers.get(key_of(one))
            if bad is not None:
                known.setdefault(position, bad)
        avoid = tuple(bad.index for bad in self._killers.values())
        return hints._replace(known=known, avoid=avoid if self.replaces else ())

    def ban(
        self, keys: Sequence[Any], hints: BatchHints | None, code: int, number: int, bad: BadSample
    ) -> BatchHints:
        """A sample has ended or stalled workers, also when it was loaded alone. Returns the hints
        for the same batch without it."""
        sample = sample_of(keys, hints, code)
        bad = dataclasses.replace(
            bad,
            index=sample,
            name=name_of(self._dataset(), sample),
            position=position_of(code),
            batch=number,
            epoch=self.epoch,
            time=time.time(),
        )
        key = key_of(sample)
        self._known[key] = self._killers[key] = self.ledger.known[key] = bad
        self.ledger.write(bad)
        hints = hints or BatchHints({})
        itself = {place: bad for place, one in enumerate(keys) if key_of(one) == key}
        if not itself:  # it was a replacement for another, so no batch will report it
            self._to_report.append(dataclasses.replace(bad, action="skipped"))
        return hints._replace(known={**hints.known, **itself, code: bad})

    # -- what they report -----------------------------------------------------------------

    def record_and_judge(self, samples: int, reports: Sequence[BadSample]) -> None:
        self.record_batch(samples, reports)
        self.judge()

    def record_batch(
        self, samples: int, reports: Sequence[BadSample], keys: Sequence[Any] | None = None
    ) -> None:
        """Count a batch of `samples`. `keys` are given if the reports come from another process.

        This is quick, and must not be interrupted half-way.
        """
        self.seen += samples
        self._good += max(0, samples - len(reports))
        self._streak = self._streak + len(reports) if len(reports) >= samples else 0
        found = [*self._to_report, *(_as_drawn(bad, keys) for bad in reports)]
        if not found:
            return
        del self._to_report[: len(found) - len(reports)]
        for bad in found:
            self._count(bad)
        self._unjudged += found

    def judge(self) -> None:
        """Write down what is new, warn of it, and raise `TooManyBadSamples` beyond the limit.

        This may wait for a disk. A caller that is interrupted in it, or before the exception has
        reached the user, calls it again with the same result, until the account is closed.
        """
        if not self._unjudged:
            return
        ledger = self.ledger
        while self._unwritten:
            self._unwritten[0]()
            self._unwritten.popleft()
        # Only when all is written: with ``-W error`` a warning raises.
        for bad in self._unjudged:
            self.ledger.warn(f"{bad.kind} {bad.error}", policies.first_of_its_kind(bad))
            if bad.action == "skipped":
                self.ledger.warn_of_ranks()
        self.ledger.say_what_is_left()
        why = self._limit.exceeded(
            bad=len(self.ledger.counted), bad_now=len(self.bad), seen=self.seen
        )
        if why is None and self._streak >= policies.STREAK and not self._limit.all_may_be_bad:
            why = f"{self._streak} samples in a row were bad and not one was good"
        if why is not None:
            raise TooManyBadSamples(ledger.origin.prefix + policies.too_many(why, self.bad))
        self._unjudged.clear()

    def _count(self, bad: BadSample) -> None:
        ledger = self.ledger
        bad = dataclasses.replace(bad, epoch=self.epoch, time=bad.time or time.time())
        key = key_in_epoch(bad)
        if key in self._keys:
            return  # the sampler gave the index twice
        self._keys.add(key)
        self.bad.append(bad)
        is_new = key not in ledger.counted
        if is_new:
            ledger.counted.add(key)
            ledger.bad_samples.append(bad)
            if ledger.noted is not None:
                ledger.noted(bad)
            if ledger.logbook is not None:
                self._unwritten.append(partial(ledger.logbook.bad_sample, bad.to_json()))
        if bad.verdict == "bad" and bad.index is not None:
            ledger.known.setdefault(key, bad)
        if is_new or bad.index is not None:
            self._unwritten.append(partial(ledger.write, bad))

    def end(self) -> None:
        """The epoch is over: give a summary if there were bad samples.

        Raises `TooManyBadSamples` if they were too many, at every call until the account is closed.
        """
        if self.ended or not self.bad:
            return
        limit, ledger = self._limit, self.ledger
        why = limit.exceeded(
            bad=len(ledger.counted), bad_now=len(self.bad), seen=self.seen, at_end=True
        )
        if why is None and not self._good and not limit.all_may_be_bad:
            why = f"all {self.seen} samples of this epoch were bad"
        if why is not None:
            raise TooManyBadSamples(ledger.origin.prefix + policies.too_many(why, self.bad))
        self.ended = True
        path = None if ledger.quarantine is None else ledger.quarantine.path
        ledger.say(policies.summary(self.bad, epoch=self.epoch, seen=self.seen, quarantine=path))

    # -- for another run that continues this epoch ----------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What was counted so far; see `Ledger.restore`."""
        new = [bad for bad in self.bad if key_of(bad.index) not in self._known]
        return {
            "epoch": self.epoch,
            "seen": self.seen,
            "good": self._good,
            "streak": self._streak,
            "records": self.ledger.records(),
            "in_epoch": [bad.to_json() for bad in self.bad],
            "found_in_epoch": [encoded(bad.index) for bad in new if bad.index is not None],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue an epoch of another run. What that run found in this epoch is not left out in
        the rest of it, as it would not have been there."""
        self.seen, self._good, self._streak = saved["seen"], saved["good"], saved["streak"]
        self.bad = [BadSample.from_json(one) for one in saved["in_epoch"]]
        for bad in self.bad:
            self._keys.add(key_in_epoch(bad))
        for index in saved["found_in_epoch"]:
            self._known.pop(key_of(decoded(index)), None)

    def close(self) -> None:
        """`TooManyBadSamples` has reached the user: do not raise it again."""
        self.ended = True
        self._unjudged.clear()


def key_in_epoch(bad: BadSample) -> Key:
    """What tells a bad sample from the others of an epoch."""
    if bad.index is None:
        return (bad.worker_id, bad.batch, bad.position, bad.digest)
    return key_of(bad.index)


def _find(known: Mapping[Key, BadSample], index: Any) -> BadSample | None:
    key = key_of(index)
    bad = known.get(key)
    if bad is None and not isinstance(key, (int, str)):  # an object that a file may describe
        bad = known.get(description_of(index))
        return None if bad is None else dataclasses.replace(bad, index=index)
    return bad


def _as_drawn(bad: BadSample, keys: Sequence[Any] | None) -> BadSample:
    """With the sampler's own object as index: a worker has a copy, which may not be equal."""
    if keys is None or bad.position is None or isinstance(key_of(bad.index), (int, str)):
        return bad
    return dataclasses.replace(bad, index=keys[bad.position])
