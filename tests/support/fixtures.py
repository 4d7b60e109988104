"""Fixtures that conftest files import."""

from __future__ import annotations

import pytest

from tests.support.loaders import Loader, holdfast_loader, loader_named


@pytest.fixture(params=[pytest.param("stock", marks=pytest.mark.slow), "holdfast"])
def which(request: pytest.FixtureRequest) -> str:
    """Names the loader class of this run of the test. Stock's only shows that the test itself is
    right: `make test-all` will do."""
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
