"""Fixtures that conftest files import."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lifecycle.trainer import Stage, incubator
from tests.support.warm import Incubator


@pytest.fixture(scope="session")
def incubated() -> Iterator[Incubator]:
    standing = incubator()
    yield standing
    standing.close()


@pytest.fixture
def stage(tmp_path: Path, incubated: Incubator) -> Iterator[Stage]:
    """Runs scripts as trainers, and kills what is left of them."""
    stage = Stage(tmp_path, incubated)
    yield stage
    stage.close()
