"""Fixtures that conftest files import."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lifecycle.trainer import Stage, incubator


@pytest.fixture(scope="session")
def incubated() -> Iterator[socket.socket]:
    with incubator() as control:
        yield control


@pytest.fixture
def stage(tmp_path: Path, incubated: socket.socket) -> Iterator[Stage]:
    """Runs scripts as trainers, and kills what is left of them."""
    stage = Stage(tmp_path, incubated)
    yield stage
    stage.close()
