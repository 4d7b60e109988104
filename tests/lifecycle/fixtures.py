"""Fixtures that conftest files import."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lifecycle.trainer import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Runs scripts as trainers, and kills what is left of them."""
    stage = Stage(tmp_path)
    yield stage
    stage.close()
