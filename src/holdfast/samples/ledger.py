"""The main process's record of bad samples: which are known, and how many.

The workers find bad samples and deal with them. A `Ledger` belongs to a loader and lasts as long as
it does; an `Account` belongs to one epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.autopsy.logbook import Logbook
from holdfast.code_origin import users_level
from holdfast.errors import BadSampleWarning
from holdfast.loader_identity import LoaderIdentity
from holdfast.samples import policy as policies
from holdfast.samples.account import Account, key_in_epoch
from holdfast.samples.bad_sample import BadSample, name_of
from holdfast.samples.policy import Limit, Policy
from holdfast.samples.quarantine import Quarantine
from holdfast.samples.sample_keys import Key, description_of, key_of


class Ledger:
    """What a loader knows of bad samples, over all its epochs."""

    def __init__(self, noted: Callable[[BadSample], None] | None = None) -> None:
        """`noted` is called for every new bad sample."""
        self.noted = noted
        self.bad_samples: list[BadSample] = []
        self.known: dict[Key, BadSample] = {}
        self.counted: set[Key] = set()  # all distinct bad ones
        self.written: set[tuple[Key, str]] = set()  # with their verdicts
        self.warned: set[str] = set()
        self.quarantine: Quarantine | None = None
        self.logbook: Logbook | None = None
        self.origin = LoaderIdentity()  # of the iterator that was made last
        self.epochs = 0
        self._unsaid: str | None = None
        self._as_json: list[dict[str, Any]] = []

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

    def records(self) -> list[dict[str, Any]]:
        """All bad samples so far, as JSON."""
        for bad in self.bad_samples[len(self._as_json) :]:
            self._as_json.append(bad.to_json())
        return list(self._as_json)

    def restore(self, saved: Mapping[str, Any], *, finished: bool) -> None:
        """Go on from what another run had found, before the next epoch is opened."""
        self.epochs = saved["epoch"] + finished
        for one in saved["records"]:
            bad = BadSample.from_json(one)
            key = key_in_epoch(bad)
            if key in self.counted:
                continue
            self.counted.add(key)
            self.bad_samples.append(bad)
            if bad.verdict == "bad" and bad.index is not None:
                self.known.setdefault(key, bad)

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
        warnings.warn(whole, BadSampleWarning, stacklevel=users_level())

    def warn_of_ranks(self) -> None:
        distributed = torch.distributed
        if (
            distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        ):
            self.warn("ranks", policies.UNEVEN)
