"""How another process continues the stream of an iterable dataset, and whether that was exact:
pure.

A stream cannot be asked for its batch number 57. The process that takes a worker's place has two
ways to get there. It can load the state that the dataset or its iterator gave (``state_dict``). Or
it can *replay*: draw again, from the start of the epoch, everything that was delivered, and drop
it. Either way may lead to another stream. A state may not include a shuffle buffer; a replay may be
shuffled by the time of day. So neither is trusted:

- The main process keeps a fingerprint (see `batch_fingerprint`) of every batch that is delivered.
- With a state: the state from *before* the last delivered batch is loaded, with the random state
  from before it. The batch is made again and compared. If it is equal, the stream goes on from
  there. If it is not, or ``load_state_dict`` raised, that copy of the dataset cannot be used any
  more, because loading a state cannot be undone. The process exits, and another one from the same
  nursery (the process that forks workers) is told to replay instead. That is no death: it is
  neither counted nor reported.
- In a replay every dropped batch is compared. If one differs, the stream is not deterministic. It
  cannot be continued exactly, and the log says so.
- An exception where there was none before (a lost connection, for example) says nothing about the
  stream. Another process tries the same way again, up to `ATTEMPTS` processes in all, and the
  exception is logged.
- If a replay ends earlier than what was delivered, the stream cannot be continued at all. The epoch
  would have too few batches, and other ranks would wait for them for ever. That is an error.

What the comparison shows: after a replay, that everything delivered came again, in order; after
loading a state, that the last delivered batch came again. Both only as far as fingerprints can
tell. It shows nothing about the batches that follow. A state that is right for the last batch and
wrong for the next is not noticed. A stream that is shorter from there on is noticed at the end of
the epoch, and only if the user has asked for its length. If nothing of this epoch had been
delivered, there is nothing to compare, and nothing is claimed.

Persistent workers begin another epoch with the dataset they have. Some datasets keep a loaded state
and begin every later epoch from it (Hugging Face's, unless ``set_epoch`` is called): after a
successful comparison the next epoch would be too short. So before a state of a dataset is loaded
for the first time in such a pool, a separate process tests that (`PROBE`): it loads the state and
calls ``iter()`` twice. If the second iterator begins where the first did, this pool does not use
states. The state of an iterator has no such effect.

A run that is continued in another process (``loader.load_state_dict``) begins its streams in the
same ways. What was delivered before, up to the last batch, is then known by one number, its
`digest`, instead of one for each batch: a replay computes the same number, and compares it when it
gets there.

`REST` is a replay in a later epoch of a persistent worker. It begins with the state that the
dataset had between the epochs. `REPLAY` loads nothing, and passes the earlier epochs by drawing one
sample of each.

This module has what both sides know. What the new process does is in `worker.stream_resumption`.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from holdfast.worker.batch_fingerprint import NO_BATCH
from holdfast.worker.sample_seeding import NO_SEEDS, EpochSeeds

Recovery = Literal["auto", "state", "replay", "raise"]
Way = Literal["probe", "state", "trust", "rest", "replay"]
PROBE: Final = "probe"  # test whether a loaded state affects one epoch only
STATE: Final = "state"  # load the state before the last batch, which is made again
TRUST: Final = "trust"  # load the state after it, and compare nothing
REST: Final = "rest"  # replay from the state before this epoch
REPLAY: Final = "replay"  # replay without any state
AGAIN: Final = frozenset({REST, REPLAY})
ATTEMPTS: Final = 3  # processes that try one way, if each ends with a new exception
NO_STATE: Final = (
    'iterable_recovery="state" continues a stream from its state only, and neither the dataset nor '
    "its iterator gave one (state_dict() and load_state_dict())"
)
_STATE_FAILED: Final = 'iterable_recovery="state" continues a stream from its state only; '
RAISED_AGAIN: Final = "drawn again the stream raised"
TO_DO: Final = "To have it repeat itself, and how: holdfast explain stream-not-repeatable"


def extended(digest: int, mark: int) -> int:
    """The digest of a sequence of fingerprints, from that of all but the last, and the last."""
    return (digest * _FACTOR + mark) & _WORD


_FACTOR: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


class StreamPoint(NamedTuple):
    """A stream after one of its answers in this epoch."""

    mark: int  # of this answer
    digest: int | None  # of all fingerprints before it; None if they are not known
    state: bytes | None
    state_before: bytes | None


@dataclass(slots=True)
class StreamProgress:
    """What the main process keeps about one worker's stream: its position, and how to get there."""

    marks: array[int] = field(default_factory=lambda: array("Q"))
    """The fingerprints of the batches delivered in this epoch, except for the first few, if these
    were delivered by another run: see `earlier`."""
    earlier: int = 0
    """How many batches were delivered before those in `marks`,"""
    earlier_digest: int | None = None
    """and the digest of their fingerprints; None if it is not known."""
    state: bytes | None = None
    """Of the dataset, after the last answer; see `stream_resumption.state_now`."""
    state_before: bytes | None = None
    """Of the dataset, before the last answer, if that was a batch and not the first of its
    epoch."""
    epoch_state: bytes | None = None
    """The random state at the start of this epoch, if it is not the first."""
    state_between_epochs: bytes | None = None
    """Of the dataset, before this epoch."""
    seeds: EpochSeeds = NO_SEEDS
    """Those of this epoch, which the consumer may have left already."""
    state_error: str = ""
    """Why there is no state, if the dataset should have given one."""
    raised: int = 0
    """How many processes in a row have failed with an exception on the way."""
    digest: int | None = 0
    """Of all fingerprints of this epoch."""
    trusted: bool = False
    """Go on from the state, although there is nothing to compare it with."""
    recent: deque[StreamPoint] = field(default_factory=deque)
    """After each of the last answers of this epoch, for ``loader.state_dict()``."""

    @property
    def delivered(self) -> int:
        """Batches of this epoch that were delivered."""
        return self.earlier + len(self.marks)

    def received(self, mark: int, state: bytes | None, keep: int = 2) -> None:
        """An answer has arrived. What is known after each of the last `keep` answers is kept."""
        before = self.state if self.marks and mark != NO_BATCH else None
        self.state_before, self.state, self.trusted = before, state, False
        if state is not None:
            self.state_error = ""
        self.recent.append(StreamPoint(mark, self.digest, state, before))
        while len(self.recent) > keep:
            self.recent.popleft()
        if mark != NO_BATCH:
            self.marks.append(mark)
            if self.digest is not None:
                self.digest = extended(self.digest, mark)

    def resumed(self, epoch_state: bytes, seeds: EpochSeeds = NO_SEEDS) -> None:
        """Another epoch has begun. The last state that arrived is that before it."""
        self.epoch_state, self.seeds = epoch_state, seeds
        self.state_between_epochs, self.state, self.state_before = self.state, None, None
        self.marks = array("Q")
        self.earlier, self.earlier_digest, self.digest = 0, None, 0
        self.recent.clear()

    def forget_states(self) -> None:
        """Drop the dataset's states: they lead to a sample that is given up."""
        self.state = self.state_before = None


@dataclass(frozen=True, slots=True)
class ResumptionPlan:
    """How a process continues a stream."""

    way: Way
    marks: bytes  # fingerprints of the last delivered batches, to compare with
    delivered: int = 0  # batches in this epoch
    state: bytes | None = None  # to be loaded
    random_before: bytes | None = None  # random state before the last batch, if it is made again
    last: bool = True  # there is no other way: go on whatever the result is
    digest: int | None = None  # of the batches before `marks`, for a replay; None if not known
    attempts: int = 1  # processes that may still try this way, including this one
    tried: bool = False  # the way `STATE` has failed before
    rests: bool = False  # of `PROBE`: the state is one between epochs


@dataclass(frozen=True, slots=True)
class CannotResume:
    """The stream cannot be continued in the way that the user has asked for."""

    why: str


@dataclass(frozen=True, slots=True)
class ResumptionResult:
    """The result of continuing a stream."""

    way: Way
    exact: bool | None = None  # None if nothing was compared, or not everything could be
    delivered: int = 0  # batches that had been delivered in this epoch
    differs: int | None = None  # the first of them that differs, counted from 0
    different: int = 0  # how many differ
    unseen: int = 0  # how many hold objects that fingerprints cannot look into
    ended: int | None = None  # the replay ended after this many of them
    error: str | None = None  # what was raised on the way, and had not been raised before
    tried: bool = False  # the way `STATE` had failed before
    leaves: bool = False  # the process exits, and another way is to be tried
    unfit: frozenset[str] = frozenset()  # ways that need not be tried again in this pool
    private: int | None = None  # private bytes of the process, when it had got there
    too_large: bool = False  # it grew too much on the way to be of use

    @property
    def to_be_tried_again(self) -> bool:
        """Whether another process is to try the same way."""
        return self.leaves and self.error is not None and not self.unfit

    @property
    def lost(self) -> bool:
        """Whether the stream cannot be continued with the number of batches it had."""
        if self.leaves:
            return False
        return self.ended is not None or (self.way == TRUST and self.error is not None)

    def in_words(self) -> str:
        """What was compared and found, as the end of a sentence."""
        many = _batches(self.delivered)
        if self.error is not None and self.way != TRUST and self.delivered and not self.exact:
            then = "" if self.ended is None else f", and ended after {self.ended}"
            return (
                f"{many} of this epoch had been delivered, and {RAISED_AGAIN} "
                f"{self.error} where it had not before{then}; "
                f"{ATTEMPTS} processes in a row have tried it"
            )
        if self.ended is not None:
            return (
                f"this stream is not deterministic: {many} of this epoch had been delivered, and "
                f"drawn again it ended after {self.ended}"
            )
        if self.error is not None:
            what = "its state could not be loaded" if self.way == TRUST else "it raised"
            return f"{what} ({self.error})"
        if self.exact and self.way == STATE:
            return (
                f"the last of {many} delivered in this epoch was made again from the state before "
                "it, and its fingerprint is equal"
            )
        if self.exact:
            equal = "was drawn again, and its fingerprint is equal"
            if self.delivered != 1:
                equal = "were drawn again, and their fingerprints are equal"
            return f"{many} delivered in this epoch {equal}"
        if self.way == TRUST:
            shown = (
                "and the state before the last batch, which was tried first, did not give that "
                "batch again"
                if self.tried
                else "and the last batch was not compared, because there was no state before it"
            )
            return (
                f'it goes on from the state that the dataset gave, as iterable_recovery="state" '
                f"asks for, {shown}"
            )
        if self.exact is None and self.unseen:
            made = "made again from a state" if self.way == STATE else "drawn again"
            return (
                f"what was delivered was {made} and could not be compared: of {many}, "
                f"{self.unseen} had objects that holdfast cannot look into (of extension types, "
                "for example). The rest is equal"
            )
        if self.exact is None:
            return (
                "this worker had delivered nothing of this epoch, or all of its part, so there "
                "was nothing to compare"
            )
        return (
            f"this stream is not deterministic: drawn again, at least {self.different} of {many} "
            "delivered in this epoch came out different"
            + (
                ""
                if self.differs is None
                else f", the first of them batch {self.differs} of this worker"
            )
        )


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"


def cannot_resume(recovery: Recovery, progress: StreamProgress) -> CannotResume | None:
    """Why a stream that has not ended cannot be continued, if so."""
    if recovery != "state" or not progress.delivered or progress.state is not None:
        return None
    error = progress.state_error
    return CannotResume(_STATE_FAILED + error if error else NO_STATE)


def choose_plan(
    recovery: Recovery,
    progress: StreamProgress,
    *,
    exhausted: bool,
    epochs_done: int,
    persistent: bool,
    unfit: Collection[str],
    random_before: bytes | None,
) -> ResumptionPlan | CannotResume:
    """The first way to try.

    - `exhausted`: the stream had ended, so only another epoch can follow.
    - `epochs_done`: the number of epochs before this one.
    - `unfit`: the ways that have failed.
    """
    delivered, attempts = progress.delivered, max(1, ATTEMPTS - progress.raised)
    ways: list[ResumptionPlan] = []
    if exhausted or not delivered:
        # Nothing to compare. The state between epochs may contain what earlier epochs changed.
        resting = progress.state if exhausted else progress.state_between_epochs
        if resting is not None and recovery != "replay":
            ways.append(ResumptionPlan(REST, b"", state=resting))
        ways.append(ResumptionPlan(REPLAY, b""))
    else:
        if recovery != "replay" and progress.state_before is not None and random_before is not None:
            last = progress.marks[-1:].tobytes()
            ways.append(
                ResumptionPlan(STATE, last, delivered, progress.state_before, random_before)
            )
        if progress.trusted and recovery == "auto":
            ways.append(ResumptionPlan(TRUST, b"", delivered, progress.state))
        if recovery == "state":
            none = cannot_resume(recovery, progress)
            if none is not None:
                return none
            ways.append(ResumptionPlan(TRUST, b"", delivered, progress.state, tried=STATE in unfit))
        else:
            again = ResumptionPlan(
                REPLAY, progress.marks.tobytes(), delivered, digest=progress.earlier_digest
            )
            if recovery == "auto" and epochs_done and progress.state_between_epochs is not None:
                ways.append(replace(again, way=REST, state=progress.state_between_epochs))
            ways.append(again)
    left = [plan for plan in ways if plan.way not in unfit] or ways[-1:]
    plan = left[0]
    if persistent and recovery == "auto" and plan.state is not None and PROBE not in unfit:
        rests = plan.way == REST
        return ResumptionPlan(PROBE, b"", plan.delivered, plan.state, last=False, rests=rests)
    return replace(plan, last=len(left) == 1, attempts=attempts)
