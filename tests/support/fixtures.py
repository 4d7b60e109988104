"""Fixtures that conftest files import."""

from __future__ import annotations

import sys

import pytest

from tests.support.loaders import Loader, holdfast_loader, loader_named


@pytest.fixture(
    params=[
        pytest.param("stock", marks=pytest.mark.slow),
        "holdfast",
        pytest.param("installed", marks=pytest.mark.slow),
    ]
)
def which(request: pytest.FixtureRequest) -> str:
    """Names the loader class of this run of the test. Stock's only shows that the test itself is
    right, and "installed" is stock's with our engine: `make test-all` will do."""
    return str(request.param)


@pytest.fixture
def which_script(which: str) -> str:
    """The same, for tests that start interpreters."""
    return which


@pytest.fixture
def loader_class(which: str) -> Loader:
    return loader_named(which)


@pytest.fixture
def holdfast_class() -> Loader:
    """For what stock torch does wrong, or not at all."""
    return holdfast_loader()


@pytest.fixture
def few_modules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that has imported this test alone: whatever looks through all modules need not look through
    those of hundreds of tests."""
    for name in list(sys.modules):
        if name.startswith("tests.") and name != request.module.__name__:
            monkeypatch.delitem(sys.modules, name)
