"""Calls of next() that may fail, without leaving a traceback that holds the iterator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def error_of(call: Callable[[], Any]) -> Exception:
    """The exception that the call raises; it is an AssertionError if there is none.

    Its traceback is cut off: kept, it would put the iterator into a reference cycle, and torch then
    waits 5 s for each worker when the cycle is collected.
    """
    try:
        got = call()
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError(f"no error, but {got!r}")


def error_of_next(iterator: Any) -> Exception:
    return error_of(lambda: next(iterator))


def outcomes(iterator: Any, limit: int = 1000) -> list[Any]:
    """Batches and exceptions, as they come, until the end."""
    found: list[Any] = []
    while len(found) < limit:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(error.with_traceback(None))
    raise AssertionError(f"no end after {limit} calls of next()")
