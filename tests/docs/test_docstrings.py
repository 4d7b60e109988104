"""The examples in docstrings of the public names run, and give what they say."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

import holdfast
from holdfast import metrics, runtime

PUBLIC: list[Any] = [
    getattr(module, name) for module in (holdfast, metrics) for name in module.__all__
]
FINDER = doctest.DocTestFinder()
EXAMPLES = [test for one in PUBLIC for test in FINDER.find(one, one.__qualname__) if test.examples]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: str(example.name))
def test_every_example_of_a_docstring_runs(example: doctest.DocTest) -> None:
    # As after `from holdfast import *`: not the globals of the module that it stands in.
    example.globs = {name: getattr(holdfast, name) for name in holdfast.__all__}
    runtime.totals.incidents.clear()  # of earlier tests in this process
    said: list[str] = []
    result = doctest.DocTestRunner().run(example, out=said.append)
    assert result.failed == 0, "".join(said)
