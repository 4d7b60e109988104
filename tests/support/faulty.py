"""Samples that fail, each in its own way. Every function takes the index and fails at `BAD`.

With batches of four, sample 35 is at position 3 of batch 8, which two workers give to worker 0.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any

BAD = 35
SIZE = 44
BATCH_SIZE = 4
BAD_BATCH = 8
BAD_WORKER = 0

Sample = Callable[[int], int]


def failing(fail: Callable[[int], Any]) -> Sample:
    """The sample itself, but for `BAD`, where `fail` is called."""
    return functools.partial(_sample, fail)


def _sample(fail: Callable[[int], Any], index: int) -> int:
    return int(fail(index)) if index == BAD else index


class TakesThree(Exception):
    """As botocore's and urllib's: needs several arguments, keeps them as attributes."""

    def __init__(self, code: int, reason: str, url: str) -> None:
        super().__init__(f"{reason} ({code}) at {url}")
        self.code = code
        self.url = url


class TakesKeywords(ValueError):
    def __init__(self, *, what: str) -> None:
        super().__init__(what)
        self.what = what


class HasMessage(Exception):
    """torch calls such a class with message=…"""

    message = "a default"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class HasMessageButTakesAnother(Exception):
    """torch calls it with message=… too, and raises a TypeError instead."""

    message = "a default"

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class MessageProperty(Exception):
    @property
    def message(self) -> str:
        return f"property of {self.args}"


class CannotBePickled(Exception):
    """The exception's type is fine; its content does not pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.handle = lambda: None


class RefusesPickle(Exception):
    def __reduce__(self) -> Any:
        raise pickle.PicklingError("I never pickle")


class BreaksOnUnpickle(Exception):
    def __init__(self, text: str, extra: str = "") -> None:
        super().__init__(text)

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("cannot come back")

    def __reduce__(self) -> Any:
        return type(self), self.args, {"state": 1}


class ReadOnly(Exception):
    """A class whose attributes cannot be assigned."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is read-only")


class BadStr(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code


def three(index: int) -> None:
    raise TakesThree(503, "come back later", f"https://example.org/{index}")


def keywords(index: int) -> None:
    raise TakesKeywords(what=f"sample {index} is bad")


def with_message(index: int) -> None:
    raise HasMessage(f"message of {index}")


def with_message_but_another(index: int) -> None:
    raise HasMessageButTakesAnother(index)


def with_message_property(index: int) -> None:
    raise MessageProperty(f"text of {index}")


def unpicklable(index: int) -> None:
    raise CannotBePickled(f"holds a lambda at {index}")


def refuses_pickle(index: int) -> None:
    raise RefusesPickle(f"refuses at {index}")


def breaks_on_unpickle(index: int) -> None:
    raise BreaksOnUnpickle(f"breaks at {index}")


def read_only(index: int) -> None:
    raise ReadOnly(f"read only at {index}")


def bad_str(index: int) -> None:
    raise BadStr(f"bad at {index}")


def slotted(index: int) -> None:
    raise Slotted(index)


def local_class(index: int) -> None:
    class Local(LookupError):
        pass

    raise Local(f"local at {index}")


def value(index: int) -> None:
    raise ValueError(f"value at {index}")


def key(index: int) -> None:
    raise KeyError(f"key\nof {index}")


def missing_file(index: int) -> None:
    open(f"/no/such/file/{index}").close()


def permission(index: int) -> None:
    raise PermissionError(13, "Permission denied", f"sample {index}")


def with_note(index: int) -> None:
    error = ValueError(f"noted at {index}")
    if sys.version_info >= (3, 11):
        error.add_note("the file came from the second disk")
    raise error


def with_cause(index: int) -> None:
    try:
        missing_file(index)
    except OSError as error:
        raise ValueError(f"no sample {index}") from error


def with_context(index: int) -> None:
    try:
        missing_file(index)
    except OSError:
        raise ValueError(f"no sample {index}")  # noqa: B904


def with_unpicklable_cause(index: int) -> None:
    try:
        unpicklable(index)
    except CannotBePickled as error:
        raise ValueError(f"caused at {index}") from error


def group(index: int) -> None:
    raise ExceptionGroup(f"several at {index}", [ValueError("one"), OSError(5, "two")])  # noqa: F821


def unicode_error(index: int) -> None:
    b"\xff".decode()


def json_error(index: int) -> None:
    import json

    json.loads("{")


def deep_recursion(index: int) -> None:
    deep_recursion(index)


def stop_iteration(index: int) -> None:
    raise StopIteration(f"stop at {index}")


def next_of_an_empty_iterator(index: int) -> None:
    next(iter(()))


def stop_async_iteration(index: int) -> None:
    raise StopAsyncIteration(f"stop at {index}")


def system_exit(index: int) -> None:
    sys.exit(f"leaving at {index}")


def system_exit_0(index: int) -> None:
    sys.exit(0)


def keyboard_interrupt(index: int) -> None:
    raise KeyboardInterrupt(f"interrupted at {index}")


def generator_exit(index: int) -> None:
    raise GeneratorExit(f"closed at {index}")


class OfItsOwn(BaseException):
    pass


def base_exception(index: int) -> None:
    raise OfItsOwn(f"base at {index}")
