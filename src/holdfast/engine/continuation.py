"""How the stream of an iterable dataset is continued by another process, and what that has shown.

Nobody can ask a stream for its batch number 57. The process that takes a worker's place has two
ways to get there: it loads the state that the dataset or its iterator gave (``state_dict``), or it
draws again, from the start of the epoch, all that was delivered and drops it. Either may lead
somewhere else. A state may leave out a shuffle buffer; what is drawn again may be shuffled by the
time of day. So neither is trusted:

- Every batch that is delivered leaves a fingerprint (see `fingerprint`) in the main process.
- With a state: that from *before* the last delivered batch is loaded, and the random state from
  before it; the batch is made again and compared. Equal, the stream goes on from there. Else, or if
  ``load_state_dict`` raised, that copy of the dataset is of no use any more, since nobody can take
  a state back. The process leaves and another one, forked from the same nursery, is told to draw
  again instead. That is no death: nothing is counted or reported.
- Drawn again, every batch that is dropped is compared. Where one differs, this stream does not
  repeat itself: there is no way to continue it exactly, and that is said.
- An exception where there was none before (a connection that is lost, perhaps) says nothing about
  the stream: another process tries the same again, up to `ATTEMPTS` times, and the exception is
  told.
- A stream that ends, drawn again, before what it had delivered cannot be continued at all: the
  epoch would have fewer batches than it would have had, and ranks that count on it would wait for
  each other for ever. That is an error.

What that shows, and what it does not. After a replay: all that had been delivered came again, in
order. After loading a state: the last delivered batch came again. In both cases as far as a
fingerprint sees, and what comes after it is the dataset's: a state that is right about the last
batch and wrong about the next is not noticed. A stream that gives less from there on than it would
have given is noticed at the end of the epoch, and only if the user has asked for its length. If
nothing of this epoch had been delivered there is nothing to compare, and nothing is claimed.

Persistent workers begin another epoch with the dataset they have. Some datasets keep a state that
was loaded and begin every later epoch from it too (Hugging Face's, unless ``set_epoch`` is called):
after a proof as above the next epoch would be short. So before a state of a dataset is loaded in
such a pool for the first time, a process of its own tries that (`PROBE`): it loads the state and
calls ``iter()`` twice. If the second begins where the first did, states are not used in this pool.
The state of an iterator has no such effect.

`REST` is a replay in a later epoch of a persistent worker that begins with the state the dataset
had between the epochs; `REPLAY` loads nothing, and goes through the epochs before by drawing one
sample of each.

Here is what both sides know. What the new process does is in `take_up`.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from holdfast.engine.fingerprint import NO_BATCH

__all__ = [
    "AGAIN",
    "ATTEMPTS",
    "NO_STATE",
    "PROBE",
    "RAISED_AGAIN",
    "REPLAY",
    "REST",
    "STATE",
    "TO_DO",
    "TRUST",
    "Course",
    "Finding",
    "NoWay",
    "Plan",
    "Recovery",
    "Way",
    "choose",
    "no_way",
]

Recovery = Literal["auto", "state", "replay", "raise"]
Way = Literal["probe", "state", "trust", "rest", "replay"]
PROBE: Final = "probe"  # whether a state that was loaded is used once only
STATE: Final = "state"  # from the state before the last batch, which is made again
TRUST: Final = "trust"  # from the state after it, and nothing is compared
REST: Final = "rest"  # drawn again from the state before this epoch
REPLAY: Final = "replay"  # drawn again, without any state
AGAIN: Final = frozenset({REST, REPLAY})
ATTEMPTS: Final = 3  # processes that try one way, if an exception ends it that was not there before
NO_STATE: Final = (
    'iterable_recovery="state" continues a stream from its state only, and neither the dataset nor '
    "its iterator gave one (state_dict() and load_state_dict())"
)
_STATE_FAILED: Final = 'iterable_recovery="state" continues a stream from its state only; '
RAISED_AGAIN: Final = "drawn again the stream raised"
TO_DO: Final = "To have it repeat itself, and how: holdfast explain stream-not-repeatable"


@dataclass(slots=True)
class Course:
    """What the main process keeps of one worker's stream: where it is, and how one gets there."""

    marks: array[int] = field(default_factory=lambda: array("Q"))
    """The fingerprints of what was delivered in this epoch."""
    state: bytes | None = None
    """Of the dataset, after the last answer; see `take_up.state_now`."""
    state_before: bytes | None = None
    """And before it, if that was a batch and not the first of its epoch."""
    epoch_state: bytes | None = None
    """The random state when this epoch began, if it was not the first."""
    resting_state: bytes | None = None
    """Of the dataset alone, before this epoch."""
    seed: int | None = None
    """What all workers share in this epoch; it may be one that the consumer has left already."""
    state_error: str = ""
    """Why there is no state, in words, if the dataset should have given one."""
    raised: int = 0
    """Processes in a row that met an exception on their way there."""

    def received(self, mark: int, state: bytes | None) -> None:
        """An answer has come."""
        self.state_before = self.state if self.marks and mark != NO_BATCH else None
        self.state = state
        if state is not None:
            self.state_error = ""
        if mark != NO_BATCH:
            self.marks.append(mark)

    def resumed(self, epoch_state: bytes, seed: int | None = None) -> None:
        """Another epoch has begun; the state that came with that is the one before it."""
        self.epoch_state, self.seed = epoch_state, seed
        self.resting_state, self.state, self.state_before = self.state, None, None
        self.marks = array("Q")

    def forget_states(self) -> None:
        """Those of the dataset lead to something that is given up."""
        self.state = self.state_before = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a process takes up a stream."""

    way: Way
    marks: bytes  # what it is compared with: of the last batches that were delivered,
    delivered: int = 0  # of so many
    state: bytes | None = None  # to be loaded
    random_before: bytes | None = None  # before the last batch, if that is made again
    last: bool = True  # there is no other way: go on whatever is found
    attempts: int = 1  # processes that may still try this way, with this one
    tried: bool = False  # another state did not give the last batch again


@dataclass(frozen=True, slots=True)
class NoWay:
    """It cannot be continued as the user wants it."""

    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of it."""

    way: Way
    exact: bool | None = None  # None if nothing was compared, or not all could be
    delivered: int = 0  # batches that had been, in this epoch
    differs: int | None = None  # the first of them that came out another, counted from 0
    different: int = 0  # how many did
    unseen: int = 0  # how many hold something that fingerprints do not see
    ended: int | None = None  # it ended after so many of them
    error: str | None = None  # what was raised on the way, and was not before
    tried: bool = False  # a state did not give the last batch again, and one is used all the same
    leaves: bool = False  # the process goes: another way is to be tried
    unfit: frozenset[str] = frozenset()  # ways that need not be tried again in this pool
    private: int | None = None  # bytes of its own, when it was there
    too_large: bool = False  # it had grown too much on the way for this to be of use

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
        """What was shown, to be read after a colon."""
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
                "nothing of this epoch had been delivered by this worker, or all of it, so there "
                "was nothing to compare"
            )
        return (
            f"this stream is not deterministic: drawn again, at least {self.different} of {many} "
            "delivered in this epoch came out different, the first of them batch "
            f"{self.differs} of this worker"
        )


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"


def no_way(recovery: Recovery, course: Course) -> NoWay | None:
    """Why a stream of which something is still to come cannot be taken up, if so: pure."""
    if recovery != "state" or not course.marks or course.state is not None:
        return None
    return NoWay(_STATE_FAILED + course.state_error if course.state_error else NO_STATE)


def choose(
    recovery: Recovery,
    course: Course,
    *,
    exhausted: bool,
    passed: int,
    persistent: bool,
    unfit: Collection[str],
    random_before: bytes | None,
) -> Plan | NoWay:
    """The first way that can be tried, from what is known: pure.

    `exhausted` if the stream had ended and only another epoch can follow; `passed` epochs were
    before this one; `unfit` are the ways that have been shown not to lead there.
    """
    delivered, attempts = len(course.marks), max(1, ATTEMPTS - course.raised)
    ways: list[Plan] = []
    if exhausted or not course.marks:
        # Nothing to compare. A dataset at rest may have learned from the epochs before.
        resting = course.state if exhausted else course.resting_state
        if resting is not None and recovery != "replay":
            ways.append(Plan(REST, b"", state=resting))
        ways.append(Plan(REPLAY, b""))
    else:
        if recovery != "replay" and course.state_before is not None and random_before is not None:
            last = course.marks[-1:].tobytes()
            ways.append(Plan(STATE, last, delivered, course.state_before, random_before))
        if recovery == "state":
            none = no_way(recovery, course)
            if none is not None:
                return none
            ways.append(Plan(TRUST, b"", delivered, course.state, tried=STATE in unfit))
        else:
            marks = course.marks.tobytes()
            if recovery == "auto" and passed and course.resting_state is not None:
                ways.append(Plan(REST, marks, delivered, course.resting_state))
            ways.append(Plan(REPLAY, marks, delivered))
    left = [plan for plan in ways if plan.way not in unfit] or ways[-1:]
    plan = left[0]
    if persistent and recovery == "auto" and plan.state is not None and PROBE not in unfit:
        return Plan(PROBE, b"", plan.delivered, plan.state, last=False)
    return replace(plan, last=len(left) == 1, attempts=attempts)
