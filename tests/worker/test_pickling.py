"""Finding the part that does not pickle."""

from __future__ import annotations

import functools
import io
import pickle
import threading
import types
from typing import Any

import pytest

from holdfast.worker.pickling import explain_pickle_error, find_unpicklable


class Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Holder(a=1, b=Holder(lock=threading.Lock())), "it.b.lock"),
        (Holder(steps=[1, {"f": lambda: 0}]), "it.steps[1]['f']"),
        (functools.partial(print, threading.Lock()), "it.args[0]"),
        ({("a", 1): (1, 2, lambda: 0)}, "it[('a', 1)][2]"),
        (lambda: 0, "it"),
    ],
)
def test_the_path_leads_to_the_innermost_part(value: Any, path: str) -> None:
    found = find_unpicklable(value, "it")
    assert found is not None
    assert found.startswith(f"{path} (")


def test_a_cycle_does_not_lead_astray() -> None:
    value = Holder(bad=lambda: 0)
    value.me = value
    found = find_unpicklable(value, "it")
    assert found is not None
    assert found.startswith("it.bad (")


def test_what_pickles_has_no_such_part() -> None:
    assert find_unpicklable(Holder(a=[1, {"b": 2}]), "it") is None


class TakesFunctions(pickle.Pickler):
    """As cloudpickle does."""

    def reducer_override(self, value: Any) -> Any:
        return (str, ()) if isinstance(value, types.FunctionType) else NotImplemented


def test_what_takes_functions_has_no_word_about_them() -> None:
    dataset = Holder(transform=lambda: 0, lock=threading.Lock())
    blueprint = Holder(dataset=dataset)
    error, other = TypeError("no"), TypeError("no")
    explain_pickle_error(error, blueprint, lambda value: TakesFunctions(io.BytesIO()).dump(value))
    assert "dataset.lock (_thread.lock) cannot be pickled" in str(error)
    assert "lambda" not in str(error)
    explain_pickle_error(other, blueprint)
    assert "dataset.transform (builtins.function) cannot be pickled" in str(other)
    assert "lambda" in str(other)
