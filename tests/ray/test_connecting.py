"""How a program that has not called ray.init() gets a cluster."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
import ray
from holdfast.ray import cluster


@pytest.fixture
def dead_address() -> str:
    """An address at which nothing answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(autouse=True)
def never_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise AssertionError("ray.init() would wait for minutes")

    monkeypatch.setattr(ray, "init", init)


def test_a_cluster_that_does_not_answer_is_an_error_at_once(
    dead_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", dead_address)
    with pytest.raises(ConnectionError, match=f"RAY_ADDRESS.* {dead_address}.*unset the variable"):
        cluster.connect()


def test_so_is_one_that_has_ended_without_ray_stop(
    dead_address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    named = tmp_path / "ray" / "ray_current_cluster"
    named.parent.mkdir()
    named.write_text(dead_address)
    with pytest.raises(ConnectionError, match=f"{named} names .*{dead_address}.*call ray stop"):
        cluster.connect()


@pytest.mark.parametrize("address", ["", "auto", "local", "ray://127.0.0.1:1"])
def test_other_addresses_are_left_to_ray(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(AssertionError, match="wait for minutes"):
        cluster.connect()
