"""One bad sample: what it is called, what it did, and what was done about it.

The same record is passed to a policy function, kept in ``loader.bad_samples`` and written to the
quarantine. As JSON it holds only text, numbers and lists, so it is safe to read a file of unknown
origin.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import traceback as tracebacks
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, get_type_hints

from holdfast.samples.sample_keys import decoded, encoded

KINDS: Final = ("raised", "killed", "stalled", "none", "collate")
ACTIONS: Final = ("", "skipped", "replaced", "raised", "given")
VERDICTS: Final = ("bad", "transient", "odd")
LONGEST_MESSAGE: Final = 2000
LONGEST_TRACEBACK: Final = 6000


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be used. ``print`` shows it in one line."""

    index: Any
    """As the sampler gave it; None for an ``IterableDataset``."""
    kind: str
    """``raised``, ``killed``, ``stalled``, ``none`` (it was None) or ``collate``."""
    error: str = ""
    """The exception's type, or the signal or exit code its worker ended with."""
    message: str = ""
    name: str | None = None
    """What the dataset calls it (``dataset.sample_name(index)``), or the file its error names."""
    position: int | None = None
    """Its place in the batch."""
    batch: int | None = None
    worker_id: int | None = None
    epoch: int | None = None
    """How many epochs of its loader came before."""
    traceback: str = ""
    digest: str = ""
    """A hash of the traceback: equal for equal places in the code, whatever the message."""
    attempts: int = 1
    time: float = 0.0
    """When it was found, in seconds since 1970."""
    action: str = ""
    """``skipped``, ``replaced``, ``raised`` or ``given`` (by the policy function)."""
    verdict: str = "bad"
    """``bad``, ``transient`` or ``odd``. A ``transient`` error may be temporary. An ``odd`` sample
    is unlike the others of its batch, but the others may be the wrong ones. Both are tried again
    another time."""

    def __str__(self) -> str:
        done = f"; {self.action}" if self.action else ""
        return f"{self.who()} {self.what()}{done}"

    def who(self) -> str:
        """The sample, in words."""
        if self.index is None:
            who = f"sample {self.position} of batch {self.batch} of worker {self.worker_id}"
        else:
            who = f"sample {self.index!r}"
        return f"{who} ({self.name})" if self.name else who

    def what(self) -> str:
        """What it did, in words."""
        message = _first_line(self.message)
        if self.kind == "none":
            return "was None"
        if self.kind == "collate":
            return f"does not fit its batch: {message}"
        if self.kind == "raised":
            tries = f" ({self.attempts} times)" if self.attempts > 1 else ""
            return f"raised {self.error or 'an error'}: {message}{tries}"
        doing = "stalled" if self.kind == "stalled" else "ended"
        return f"{doing} {self.attempts} workers: {message}"

    # -- JSON -----------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Text, numbers and lists: what the quarantine holds."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["index"] = encoded(self.index)
        return fields

    @classmethod
    def from_json(cls, fields: Any) -> BadSample:
        """The record; a ValueError says what is wrong with it. Unknown fields are ignored."""
        if not isinstance(fields, dict):
            raise ValueError(f"it is a {type(fields).__name__} and not an object")
        for required in ("index", "kind"):
            if required not in fields:
                raise ValueError(f"it has no {required!r}")
        values: dict[str, Any] = {"index": decoded(fields["index"])}
        for name, allowed in _TYPES.items():
            if name not in fields or name == "index":
                continue
            value = fields[name]
            numbers = allowed is float and isinstance(value, int)
            if not (numbers or isinstance(value, allowed)) or isinstance(value, bool):
                raise ValueError(f"its {name} is {value!r}")
            values[name] = value
        for name, words in (("kind", KINDS), ("action", ACTIONS), ("verdict", VERDICTS)):
            if name in values and values[name] not in words:
                raise ValueError(f"its {name} is {values[name]!r}")
        return cls(**values)


_TYPES: Final = get_type_hints(BadSample)


# -- errors -------------------------------------------------------------------------------


def error_name(error: BaseException) -> str:
    """The type as a user would import it."""
    kind = type(error)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def message_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as another:  # an error whose own __str__ fails is still reported
        text = f"(its message is not available: str() of it raised {type(another).__name__})"
    return text[:LONGEST_MESSAGE]


def traceback_text(error: BaseException, trace: TracebackType | None) -> str:
    """The traceback; only the end, where the cause is, if it is long."""
    text = "".join(tracebacks.format_exception(type(error), error, trace))
    return text if len(text) <= LONGEST_TRACEBACK else f"…{text[-LONGEST_TRACEBACK:]}"


def digest_of(error: BaseException, trace: TracebackType | None) -> str:
    """A short hash, equal for errors of one type from one place."""
    frames = tracebacks.extract_tb(trace, limit=-30)
    places = [f"{os.path.basename(f.filename)}:{f.lineno}:{f.name}" for f in frames]
    return hashlib.sha256("\n".join([error_name(error), *places]).encode()).hexdigest()[:12]


def digest_of_stack(stack: str) -> str:
    """The same for the stack that a dying worker left."""
    places = re.findall(r'File "(?:[^"]*/)?([^"/]*)", line (\d+) in (\S+)', stack)
    return hashlib.sha256(repr(places).encode()).hexdigest()[:12] if places else ""


_PATH = re.compile(
    r"""['"]((?:/|\.{1,2}/|[A-Za-z]:\\|\w+://)[^'"\n]+)['"]"""
    r"""|['"]((?:[^'"/\n]+/)+[^'"/\n]*\.\w+)['"]"""  # train/7.jpg, but not image/jpeg
    r"""|((?:/[^\s'":,]+){2,})"""
)


def name_of(dataset: Any, index: Any, error: BaseException | None = None) -> str | None:
    """The dataset's name for the sample, or the path that the error names."""
    sample_name: Callable[[Any], Any] | None
    try:
        base, inner = dataset, index
        while not callable(sample_name := getattr(base, "sample_name", None)):
            base, inner = base.dataset, base.indices[inner]  # through torch's Subset
        return str(sample_name(inner))
    except Exception:  # the dataset has no names, or none for this sample
        pass
    if error is None:
        return None
    for attribute in ("filename", "path"):
        path = getattr(error, attribute, None)
        if isinstance(path, (str, bytes, os.PathLike)):
            return os.fsdecode(path)
    found = _PATH.search(message_of(error))
    return found[found.lastindex or 0] if found else None


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    if not lines:
        return ""
    return lines[0] if len(lines[0]) <= 200 else f"{lines[0][:200]}…"
