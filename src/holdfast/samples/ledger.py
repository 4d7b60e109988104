"""The main process's record of bad samples: which are known, how many, and whether too many.

A `Ledger` belongs to a loader and lasts as long as it does; an `Account` belongs to one epoch. The
workers find bad samples and deal with them. They are recorded here in the order in which batches
are delivered, so that warnings, the limit and ``loader.bad_samples`` do not depend on timing.

A sample that is known to be bad when an epoch begins is not tried in it. One that is found during
an epoch is left out from the next epoch on. How far ahead the sampler is when the report arrives is
chance, and chance must not decide what random numbers a sample gets. The exception is samples that
end or stall their workers: they are left out at once, because each try costs several workers. They
draw no random numbers either way.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from holdfast.autopsy.logbook import Logbook
from holdfast.errors import BadSampleWarning, TooManyBadSamples
from holdfast.origin import Origin
from holdfast.samples import policy as policies
from holdfast.samples.policy import Limit, Policy
from holdfast.samples.quarantine import Quarantine
from holdfast.samples.record import BadSample, Key, description_of, key_of, name_of
from holdfast.samples.substitute import Brief, Drawn, position_of, sample_of, seed_for

__all__ = ["Account", "Ledger"]


class Ledger:
    """What a loader knows of bad samples, over all its epochs."""

    def __init__(self) -> None:
        self.bad_samples: list[BadSample] = []
        self.known: dict[Key, BadSample] = {}
        self.counted: set[Key] = set()  # all distinct bad ones
        self.written: set[tuple[Key, str]] = set()  # with their verdicts
        self.warned: set[str] = set()
        self.quarantine: Quarantine | None = None
        self.logbook: Logbook | None = None
        self.origin = Origin()  # of the iterator that was made last
        self.epochs = 0
        self._unsaid: str | None = None

    def open(
        self, policy: Policy, limit: Limit, quarantine: str | None, dataset: Any, base_seed: int
    ) -> Account:
        """Begin an epoch: read what is new in the quarantine."""
        if quarantine is None:
            self.quarantine = None
        elif self.quarantine is None or self.quarantine.path != quarantine:
            self.quarantine = Quarantine.of(quarantine, dataset)
        if self.quarantine is not None:
            self._read(self.quarantine, dataset)
        account = Account(self, policy, limit, dataset, base_seed, self.epochs)
        self.epochs += 1
        if policy.on_bad_sample == "skip":
            self.warn_of_ranks()
        return account

    def _read(self, quarantine: Quarantine, dataset: Any) -> None:
        try:
            found = quarantine.read()
        except OSError as error:
            self.warn(
                "unreadable",
                f"the quarantine {quarantine.path} cannot be read ({error}); the samples listed "
                "there are loaded again.",
            )
            return
        for damage in found.damaged:
            self.warn(damage, f"{damage}. The line is ignored and left as it is.")
        for bad in found.records:
            key = description_of(bad.index)
            if bad.index is None or key is None:
                continue  # of an iterable dataset, or an object that cannot be recognised
            name = name_of(dataset, bad.index)
            if name is not None and bad.name is not None and name != bad.name:
                continue  # that index is another sample now
            if (key, bad.verdict) in self.written:
                continue  # written by this loader, or read before
            self.written.add((key, bad.verdict))
            if bad.verdict == "bad":
                self.known.setdefault(key, bad)

    def write(self, bad: BadSample) -> None:
        """Write it to the quarantine, once for each sample and verdict."""
        description = description_of(bad.index)
        mark = (key_of(bad.index) if description is None else description, bad.verdict)
        if self.quarantine is None or mark in self.written:
            return
        try:
            self.quarantine.append(bad)
        except OSError as error:
            self._unsaid = (  # no warning here: this may be the watch's thread
                f"the quarantine {self.quarantine.path} cannot be written ({error}); until it can "
                "be, bad samples are only in loader.bad_samples."
            )
        else:
            if bad.index is not None:
                self.written.add(mark)

    def say_what_is_left(self) -> None:
        """Give the warning that could not be given when it arose."""
        if self._unsaid is not None:
            text, self._unsaid = self._unsaid, None
            self.warn("unwritable", text)

    def warn(self, once: str, text: str) -> None:
        if once not in self.warned:
            self.warned.add(once)
            self.say(text)

    def say(self, text: str) -> None:
        whole = f"holdfast: {self.origin.prefix}{text}"
        warnings.warn(whole, BadSampleWarning, stacklevel=_users_level())

    def warn_of_ranks(self) -> None:
        distributed = torch.distributed
        if (
            distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        ):
            self.warn("ranks", policies.UNEVEN)


class Account:
    """One epoch: what the workers are told, and what they report."""

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
        self.policy = policy
        self.epoch = epoch
        self.bad: list[BadSample] = []
        self.seen = 0
        self.ended = False
        self._limit = limit
        self._dataset = dataset
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

    def brief(self, number: int, keys: Sequence[Any]) -> Brief | None:
        """For batch `number`, which is the next one drawn. None for an iterable dataset."""
        if self._iterable:
            return None
        known = self._known_in(keys)
        if not self.replaces:
            return Brief(known) if known else None
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
        return Brief(known, candidates, seed)

    def _known_in(self, keys: Sequence[Any]) -> dict[int, BadSample]:
        if not self._known:
            return {}
        found = {}
        for position, one in enumerate(keys):
            bad = _find(self._known, one)
            if bad is not None:
                found[position] = bad
        return found

    def refreshed(self, keys: Sequence[Any], brief: Brief | None) -> Brief | None:
        """The brief of a batch that is ordered again. It leaves out samples that have ended workers
        since, and only those, because they draw no random numbers either way.
        """
        if not self._killers:
            return brief
        brief = brief or Brief({})
        known = dict(brief.known)
        for position, one in enumerate(keys):
            bad = self._killers.get(key_of(one))
            if bad is not None:
                known.setdefault(position, bad)
        avoid = tuple(bad.index for bad in self._killers.values())
        return brief._replace(known=known, avoid=avoid if self.replaces else ())

    def convict(
        self, keys: Sequence[Any], brief: Brief | None, code: int, number: int, bad: BadSample
    ) -> Brief:
        """A sample has ended or stalled workers, also when it was loaded alone. Returns the brief
        for the same batch without it."""
        sample = sample_of(keys, brief, code)
        bad = dataclasses.replace(
            bad,
            index=sample,
            name=name_of(self._dataset, sample),
            position=position_of(code),
            batch=number,
            epoch=self.epoch,
            time=time.time(),
        )
        key = key_of(sample)
        self._known[key] = self._killers[key] = self.ledger.known[key] = bad
        self.ledger.write(bad)
        brief = brief or Brief({})
        itself = {place: bad for place, one in enumerate(keys) if key_of(one) == key}
        if not itself:  # it was a replacement for another, so no batch will report it
            self._to_report.append(dataclasses.replace(bad, action="skipped"))
        return brief._replace(known={**brief.known, **itself, code: bad})

    # -- what they report -----------------------------------------------------------------

    def settle(
        self, samples: int, reports: Sequence[BadSample], keys: Sequence[Any] | None = None
    ) -> None:
        """`note` a batch, and `judge`."""
        self.note(samples, reports, keys)
        self.judge()

    def note(
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
        why = self._limit.passed(
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
        key = key_of(bad.index)
        if bad.index is None:
            key = (bad.worker_id, bad.batch, bad.position, bad.digest)
        if key in self._keys:
            return  # the sampler gave the index twice
        self._keys.add(key)
        self.bad.append(bad)
        is_new = key not in ledger.counted
        if is_new:
            ledger.counted.add(key)
            ledger.bad_samples.append(bad)
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
        why = limit.passed(
            bad=len(ledger.counted), bad_now=len(self.bad), seen=self.seen, at_end=True
        )
        if why is None and not self._good and not limit.all_may_be_bad:
            why = f"all {self.seen} samples of this epoch were bad"
        if why is not None:
            raise TooManyBadSamples(ledger.origin.prefix + policies.too_many(why, self.bad))
        self.ended = True
        path = None if ledger.quarantine is None else ledger.quarantine.path
        ledger.say(policies.summary(self.bad, epoch=self.epoch, seen=self.seen, quarantine=path))

    def close(self) -> None:
        """`TooManyBadSamples` has reached the user: do not raise it again."""
        self.ended = True
        self._unjudged.clear()


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


def _users_level() -> int:
    """The stack level, for `warnings.warn` in our caller, of the line that asked for a batch."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] != "holdfast" and not module.startswith("torch.utils.data"):
            break
        frame = frame.f_back
        level += 1
    return level
