"""What is done about a bad sample: which failures are temporary, how often to retry, when to stop.

Pure functions of an error or a few numbers.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from holdfast.samples.bad_sample import BadSample

OnBadSample = Literal["raise", "skip", "replace"] | Callable[[BadSample], Any]

WAITS: Final = (0.1, 0.4)  # seconds before the second and the third try
ENOUGH: Final = 100  # samples before a fraction is judged, unless the epoch is shorter
STREAK: Final = 1000  # bad samples in a row that mean that all the data is gone
SHOWN: Final = 5

# Errors about the file itself, which a retry does not change.
_LASTING = frozenset(
    getattr(errno, name)
    for name in (
        "ENOENT", "EACCES", "EPERM", "EISDIR", "ENOTDIR", "ELOOP", "ENAMETOOLONG", "EINVAL",
        "EEXIST", "EROFS", "EFBIG", "ENXIO", "ENODEV", "ENOTEMPTY", "EILSEQ", "EOVERFLOW",
        "EDOM", "ERANGE", "ENOEXEC", "EBADF", "ENOSYS", "EXDEV",
    )
)  # fmt: skip

# By name, because the libraries need not be installed. Not subclasses of Python's ConnectionError.
_PASSING_NAMES = frozenset(
    {
        "ConnectionError", "ConnectTimeout", "ReadTimeout", "Timeout", "ChunkedEncodingError",
        "ProtocolError", "IncompleteRead", "RemoteDisconnected", "TransportError",
        "EndpointConnectionError", "ServiceUnavailable", "TooManyRequests", "SlowDown",
    }
)  # fmt: skip
_PASSING_CODES = frozenset({408, 425, 429, 500, 502, 503, 504})


def may_pass(error: BaseException) -> bool:
    """Whether the same sample may load another time: an I/O error that is not about the file."""
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    code = getattr(error, "code", None)
    if isinstance(error, OSError) and isinstance(code, int):  # urllib's HTTPError
        return code in _PASSING_CODES
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in _LASTING
    if any(kind.__name__ in _PASSING_NAMES for kind in type(error).__mro__):
        return True
    cause = getattr(error, "reason", None) or error.__cause__  # `reason`: urllib's URLError
    return isinstance(cause, BaseException) and cause is not error and may_pass(cause)


@dataclass(frozen=True, slots=True)
class Given:
    """A sample that the policy function returned, to be used instead."""

    sample: Any


_RIGHT: Final = 'it has to return "skip", "replace", "raise" or a sample to use instead'

Decision = Literal["raise", "skip", "replace"] | Given


@dataclass(frozen=True, slots=True)
class Policy:
    """The user's options for bad samples; sent to the workers with the dataset."""

    on_bad_sample: Any
    stall_timeout: float | None = None

    @property
    def replaces(self) -> bool:
        """Whether replacements may be needed."""
        return bool(self.on_bad_sample != "skip")

    def decide(self, bad: BadSample) -> Decision:
        wanted = self.on_bad_sample
        if not callable(wanted):
            return wanted  # type: ignore[no-any-return]
        answer = wanted(bad)
        if answer is None:
            raise TypeError(f"on_bad_sample={wanted!r} returned None for {bad.who()}; {_RIGHT}")
        if isinstance(answer, str) and answer in ("skip", "replace", "raise"):
            return answer  # type: ignore[return-value]
        return Given(answer)

    def wrong_word(self, answer: str, index: Any) -> str:
        """The error for a policy function that returned text where samples are not text."""
        who = "a bad element" if index is None else f"sample {index!r}"
        return (
            f"on_bad_sample={self.on_bad_sample!r} returned {answer!r} for {who}. That is not a "
            f"known action, and not a sample either, because the others are not text; {_RIGHT}"
        )

    def wait_before_retry(self, error: BaseException, tries: int) -> float | None:
        """Seconds to wait before a retry after `tries` failures; None for no retry."""
        if tries > len(WAITS) or not (may_pass(error) or isinstance(error, MemoryError)):
            return None
        wait = WAITS[tries - 1]
        return wait if self.stall_timeout is None else min(wait, self.stall_timeout / 4)


@dataclass(frozen=True, slots=True)
class Limit:
    """``max_bad_samples``: a count, a fraction, or neither.

    Even without a limit, data that is all bad is an error, except with `math.inf`.
    """

    count: int | None = None
    fraction: float | None = None
    all_may_be_bad: bool = False

    def exceeded(self, *, bad: int, bad_now: int, seen: int, at_end: bool = False) -> str | None:
        """Why there are too many, or None: `bad` in all, `bad_now` of `seen` in this epoch."""
        if self.count is not None and bad > self.count:
            return f"{bad} bad samples are more than max_bad_samples={self.count}"
        if self.fraction is None or not seen:
            return None
        enough = max(ENOUGH, round(3 / self.fraction))
        if (at_end or seen >= enough) and bad_now > self.fraction * seen:
            return (
                f"{bad_now} bad samples among {seen} are {bad_now / seen:.1%}, more than "
                f"max_bad_samples={self.fraction:g}"
            )
        return None


# -- words --------------------------------------------------------------------------------


def group_of(bad: BadSample) -> str:
    """The cause under which bad samples are counted together."""
    words = {
        "killed": f"ended the worker ({bad.error})",
        "none": "None",
        "collate": "unfit for the batch",
    }
    return words.get(bad.kind, bad.error or bad.kind)


def first_of_its_kind(bad: BadSample) -> str:
    """One line for the first of its kind; later ones of that kind are in the summary."""
    return f"{bad}. Further bad samples of this kind are only counted, and summed up per epoch."


def counted(bad: Iterable[BadSample]) -> str:
    groups = Counter(group_of(one) for one in bad)
    return ", ".join(f"{count} {group}" for group, count in groups.most_common())


def summary(bad: Sequence[BadSample], *, epoch: int, seen: int, quarantine: str | None) -> str:
    """One line for the end of an epoch."""
    actions = Counter(one.action for one in bad)
    done = ", ".join(f"{count} {action}" for action, count in actions.most_common())
    where = f"loader.bad_samples{f' and {quarantine}' if quarantine else ''}"
    samples = "bad sample" if len(bad) == 1 else "bad samples"
    return (
        f"{len(bad)} {samples} among {seen} in epoch {epoch}: {counted(bad)}; {done}. See {where}."
    )


def too_many(why: str, bad: Sequence[BadSample]) -> str:
    """The message of `TooManyBadSamples`."""
    first = "\n".join(f"  {one.who()} {one.what()}" for one in bad[:SHOWN])
    more = f"\n  … and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return (
        f"{why}.\nBy cause: {counted(bad)}.\nThe first of them:\n{first}{more}\n"
        "What to do: if all have one cause (a missing mount, a wrong path), fix that; "
        "loader.bad_samples lists every one with its traceback. If the data really has that many "
        "bad samples, allow more with max_bad_samples."
    )


UNEVEN: Final = (
    'on_bad_sample="skip" makes batches smaller and drops those that become empty. So the ranks of '
    "this distributed run may get different numbers of batches and wait for each other until a "
    'collective times out. on_bad_sample="replace" keeps the sizes and the number of batches.'
)
