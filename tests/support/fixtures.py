"""Fixtures that conftest files import."""

from __future__ import annotations

import pytest

from tests.support.loaders import Loader, holdfast_loader, loader_named


@pytest.fixture(params=["stock", "holdfast"])
def which(request: pytest.FixtureRequest) -> str:
    """Names the loader class of this run of the test: stock torch's shows that the test itself is right."""
    return str(request.param)


@pytest.fixture
def loader_class(which: str) -> Loader:
    return loader_named(which)


@pytest.fixture
def holdfast_class() -> Loader:
    """For what stock torch does wrong, or not at all."""
    return holdfast_loader()
