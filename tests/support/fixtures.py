"""Fixtures that conftest files import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import processes
from tests.support.loaders import Loader, holdfast_loader, loader_named


@pytest.fixture(params=["stock", "holdfast"])
def which(request: pytest.FixtureRequest) -> str:
    """Names the loader class of this run of the test: stock's shows that the test itself is right."""
    return str(request.param)


@pytest.fixture
def loader_class(which: str) -> Loader:
    return loader_named(which)


@pytest.fixture
def holdfast_class() -> Loader:
    """For what stock torch does wrong, or not at all."""
    return holdfast_loader()


@pytest.fixture(autouse=True)
def nobody_left_behind() -> Iterator[None]:
    """Our descendants only, in place of tests/conftest.py's look at all of /dev/shm.

    A name there does not tell whose it is: on a shared machine, other runs' semaphores would fail
    our tests, and be deleted by them.
    """
    with processes.nobody_left_behind():
        yield
