"""Trainers on an accelerator that is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lifecycle.trainer import PATHS, Stage
from tests.support import slate
from tests.support.warm import Incubator


@pytest.fixture(scope="session")
def on_slate(pytestconfig: pytest.Config) -> Iterator[Incubator]:
    if not slate.can_be_built():
        pytest.skip("there is no C++ compiler, or no ninja")
    cache = pytestconfig.cache
    assert cache is not None
    built = slate.build(cache.mkdir("slate"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOLDFAST_TEST_SLATE", str(built))
        standing = Incubator(
            "tests.lifecycle.leaving",
            "tests.accelerators.on_slate",
            "holdfast.loader",
            "tests.accelerators.batches",
            path=PATHS,
        )
        yield standing
    standing.close()


@pytest.fixture
def stage(tmp_path: Path, on_slate: Incubator) -> Iterator[Stage]:
    """Runs scripts as trainers that have an accelerator, and kills what is left of them."""
    stage = Stage(tmp_path, on_slate)
    yield stage
    stage.close()
