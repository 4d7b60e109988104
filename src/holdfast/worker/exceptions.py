"""Exceptions on their way from a worker to the consumer.

torch sends type and text, and rebuilds the exception as ``type(text)``. That loses the type of
exceptions that need other arguments, hangs on those that do not pickle, ends the epoch silently on
a ``StopIteration``, and never says which sample it was. Here the worker sends, besides the same
text, everything of the exception that survives pickling, which it tries first. The consumer gets an
instance of the original type, or of the nearest base that can be found, with torch's words,
followed by the sample, the batch and the worker.
"""

from __future__ import annotations

import builtins
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from holdfast.errors import UnusualExit, WorkerError
from holdfast.private_names import key_error_message

_Group: Any = getattr(builtins, "BaseExceptionGroup", None)  # Python 3.11 and later


class SampleRef(NamedTuple):
    """Where an error came from: attached to it as ``holdfast_sample``."""

    index: Any
    position: int | None
    batch: int
    worker_id: int
    name: str | None = None  # what the dataset calls it, if it has names


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as a worker sends it; everything in it can be pickled."""

    name: str
    text: str
    types: tuple[bytes, ...]  # the type and its bases that pickle, nearest first
    original: bytes | None
    attributes: dict[str, bytes]  # of its __dict__, those that pickle
    cause: bytes | None
    errno: int | None
    position: int | None
    step: str


def describe(error: BaseException, *, position: int | None, step: str) -> Failure:
    """In the worker: put `error` into a form that can be sent."""
    types = tuple(
        pickled
        for kind in type(error).__mro__
        if kind is not object and (pickled := _pickled(kind)) is not None
    )
    errno = getattr(error, "errno", None)
    return Failure(
        name=type(error).__name__,
        text=_text_of(error),
        types=types,
        original=_pickled(error),
        attributes={
            name: pickled
            for name, value in getattr(error, "__dict__", {}).items()
            if (pickled := _pickled(value)) is not None
        },
        cause=None if error.__cause__ is None else _pickled(error.__cause__),
        errno=errno if isinstance(errno, int) else None,
        position=position,
        step=step,
    )


def rebuild(
    failure: Failure,
    *,
    index: Any,
    keys: Sequence[Any] | None,
    batch: int,
    worker_id: int,
    called: str,
    name_of: Callable[[Any], str | None],
    whose: str,
) -> BaseException:
    """In the main process: the exception to raise. `keys`: of the samples in `index`, if that is a
    batch of them; `called`: what the worker is called; `whose`: words before it, see
    `loader_identity`."""
    message = f"Caught {failure.name} in DataLoader {called}.\nOriginal {failure.text}"
    sample, words = _origin(failure, index, keys, batch, worker_id, name_of)
    message = f"{message}\nholdfast: {whose}{words}"
    kind = _first_type(failure.types)
    original = _unpickled(failure.original)
    error = _construct(kind, failure.name, message, original)
    _attach(error, failure, sample)
    return error


def rebuild_here(error: BaseException, where: str) -> BaseException:
    """The exception to raise for one that was raised in another thread of this process, in torch's
    words. It holds no reference to the frames in which that was raised."""
    name = type(error).__name__
    message = f"Caught {name} {where}.\nOriginal {_text_of(error)}"
    rebuilt = _construct(type(error), name, message, error)
    for attribute, value in getattr(error, "__dict__", {}).items():
        try:
            setattr(rebuilt, attribute, value)
        except Exception:  # read-only
            continue
    return rebuilt


def _text_of(error: BaseException) -> str:
    trace = without_our_frames(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, trace))


def _origin(
    failure: Failure,
    index: Any,
    keys: Sequence[Any] | None,
    batch: int,
    worker_id: int,
    name_of: Callable[[Any], str | None],
) -> tuple[SampleRef, str]:
    position = failure.position
    sample = index
    if keys is not None and position is not None and position < len(keys):
        sample = keys[position]
    ref = SampleRef(sample, position, batch, worker_id)
    if failure.step == "start-up":
        return ref, f"raised while worker {worker_id} was being set up"
    if failure.step == "broadcast":
        return (
            ref,
            f"raised by what loader.broadcast() told worker {worker_id}, before batch {batch}",
        )
    if index is None or (keys is not None and all(one is None for one in keys)):  # a stream
        place = "" if position is None else f"sample {position} of "
        return ref, f"raised by {place}batch {batch} of worker {worker_id}"
    if failure.step == "fetch" and position is not None:
        name = name_of(sample)
        place = "" if name is None else f"{name}; "
        place += f"position {position} of {len(keys)} in " if keys is not None else ""
        words = f"raised by sample {_short(sample)} ({place}batch {batch}, worker {worker_id})"
        return ref._replace(name=name), words
    doing = {"fetch": "loading", "collate": "collating", "send": "sending"}[failure.step]
    samples = f"sample {_short(index)}" if keys is None else f"samples {_short(index)}"
    return ref, f"raised while {doing} batch {batch} ({samples}) in worker {worker_id}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _construct(
    kind: type[BaseException], name: str, message: str, original: BaseException | None
) -> BaseException:
    if issubclass(kind, StopIteration):
        # Raised from next(), it would end the epoch silently.
        return WorkerError(message)
    if not issubclass(kind, Exception):
        return UnusualExit(message)
    if issubclass(kind, KeyError):
        message = key_error_message(message)  # KeyError prints the repr of its argument
    members = getattr(original, "exceptions", None)
    if _Group is not None and issubclass(kind, _Group) and members:
        attempts: list[Any] = [lambda: kind(message, members)]
    elif getattr(kind, "message", None):
        attempts = [lambda: kind(message=message), lambda: kind(message)]  # type: ignore[call-arg]
    else:
        attempts = [lambda: kind(message)]
    for attempt in attempts:
        try:
            error = attempt()
        except Exception:
            continue
        if type(error) is kind:
            # A base that stands for a type we could not find still shows that type's name.
            return error if kind.__name__ == name else _stand_in(kind, name, message)
    return _stand_in(kind, name, message)


def _stand_in(kind: type[BaseException], name: str, message: str) -> BaseException:
    """An instance of `kind` and of RuntimeError (torch's answer) that skips `kind.__init__`."""
    bases = (kind,) if issubclass(kind, RuntimeError) else (kind, RuntimeError)
    body = {
        "__module__": kind.__module__,
        "__init__": lambda self, *args, **kwargs: None,
        "__str__": lambda self: message,
        "__reduce__": lambda self: (_stand_in, (kind, name, message)),
    }
    try:
        stand_in: Any = type(name, bases, body)
        error: BaseException = stand_in.__new__(stand_in, message)
        error.args = (message,)
    except Exception:
        return WorkerError(message)
    return error


def _attach(error: BaseException, failure: Failure, sample: SampleRef) -> None:
    attributes = {name: _unpickled(pickled) for name, pickled in failure.attributes.items()}
    if failure.errno is not None and getattr(error, "errno", None) is None:
        attributes["errno"] = failure.errno
    attributes["holdfast_sample"] = sample
    for name, value in attributes.items():
        try:
            setattr(error, name, value)
        except Exception:  # a read-only attribute of the user's class keeps its own value
            continue
    if failure.cause is not None:
        cause = _unpickled(failure.cause)
        error.__cause__ = cause if isinstance(cause, BaseException) else None


def _first_type(types: tuple[bytes, ...]) -> type[BaseException]:
    for pickled in types:
        try:
            kind = pickle.loads(pickled)
        except Exception:
            continue
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind
    return RuntimeError


def _pickled(value: Any) -> bytes | None:
    """`value` pickled, if it comes back the same."""
    try:
        pickled = pickle.dumps(value)
        back = pickle.loads(pickled)
    except Exception:
        return None
    return pickled if type(back) is type(value) else None


def _unpickled(pickled: bytes | None) -> Any:
    """What was pickled in the worker; None if it does not come back in this process."""
    if pickled is None:
        return None
    try:
        return pickle.loads(pickled)
    except Exception:
        return None


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The user's part of a traceback: from the first frame that is not the engine's own."""
    package = __name__.partition(".")[0]
    rest = trace
    while rest is not None:
        module = rest.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] != package:
            return rest
        rest = rest.tb_next
    return trace
