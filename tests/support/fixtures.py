"""Fixtures that conftest files import."""

from __future__ import annotations

import pytest

from tests.support.loaders import Loader, holdfast_loader, loader_named


@pytest.fixture(params=["stock", "holdfast"])
def which(request: pytest.FixtureRequest) -> str:
    """Names the loader class of this run of the test: stock's shows that the test itself is
    right."""
    return str(request.param)


@pytest.fixture(params=[pytest.param("stock", marks=pytest.mark.slow), "holdfast"])
def which_script(request: pytest.FixtureRequest) -> str:
    """The same for tests that start interpreters, which takes seconds."""
    return str(request.param)


@pytest.fixture
def loader_class(which: str) -> Loader:
    return loader_named(which)


@pytest.fixture
def holdfast_class() -> Loader:
    """For what stock torch does wrong, or not at all."""
    return holdfast_loader()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stock torch under a slow start method only shows that the test is right: `make test-all` will
    do."""
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if given.get("which") == "stock" and given.get("context") in ("spawn", "forkserver"):
            item.add_marker(pytest.mark.slow)
