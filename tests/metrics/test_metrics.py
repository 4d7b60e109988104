"""``holdfast.metrics``: what a real Prometheus client serves, and what callbacks get."""

from __future__ import annotations

import gc
import os
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data

import holdfast
from holdfast import metrics
from tests.support.datasets import Numbers
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(60, method="thread")


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Name and values of labels -> value, as a Prometheus reads it."""
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (one.name.removeprefix("holdfast_"), tuple(one.labels.values())): one.value
        for family in parser.text_string_to_metric_families(text)
        for one in family.samples
    }


def scraped(exporter: metrics.Exporter) -> dict[tuple[str, tuple[str, ...]], float]:
    address = f"http://127.0.0.1:{exporter.port}/metrics"
    with urllib.request.urlopen(address, timeout=20) as answer:
        return samples(answer.read().decode())


@pytest.fixture
def registry() -> Any:
    return pytest.importorskip("prometheus_client").CollectorRegistry()


def in_registry(registry: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    return samples(pytest.importorskip("prometheus_client").generate_latest(registry).decode())


class Mortal(Numbers):
    """Its sample 5 kills the worker that loads it, once, and sample 3 is bad."""

    def __init__(self, mark: Path) -> None:
        super().__init__(24)
        self.mark = mark

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise ValueError("bad")
        if index == 5 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")
def test_a_scrape_over_http_has_the_figures_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    loader = holdfast.DataLoader(
        Mortal(tmp_path / "mark"), 2, num_workers=1, on_bad_sample="skip", name="train"
    )
    with metrics.prometheus(loader, port=0) as exporter:
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        assert len(loader.incidents) == 1  # it is counted once its death was examined
        found: dict[tuple[str, tuple[str, ...]], float] = {}

        def told() -> bool:
            found.update(scraped(exporter))
            return ("worker_private_bytes", ("train", "", "0")) in found

        assert eventually(told)
        stats = loader.stats()
        for name in ("batches", "bytes", "restarts", "incidents"):
            assert found[f"{name}_total", ("train", "")] == stats[name] > 0
        assert found["bad_samples_total", ("train", "")] == 1
        assert found["wait_seconds_total", ("train", "")] == pytest.approx(stats["wait_seconds"])
        assert found["budget_bytes", ("train", "")] > 0
        assert found["worker_private_bytes", ("train", "", "0")] > 1e6
        port = exporter.port
    # The workers, which are still there, have inherited the socket.
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5):
        pass
    del batches
    loader.close()


def test_loaders_of_one_name_and_ranks_are_told_apart(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    one, other = (holdfast.DataLoader(Numbers(size)) for size in (2, 3))
    with metrics.prometheus(one, other, registry=registry):
        assert (len(list(one)), len(list(other))) == (2, 3)
        found = in_registry(registry)
        assert found["batches_total", ("Numbers", "3")] == 2
        assert found["batches_total", ("Numbers 2", "3")] == 3
        # Without workers nothing is awaited: no figure, rather than a wrong one.
        assert ("wait_seconds_total", ("Numbers", "3")) not in found
        del other
        gc.collect()
        assert ("batches_total", ("Numbers 2", "3")) not in in_registry(registry)
    assert in_registry(registry) == {}


class OfTorchsLoader(Numbers):
    pass


def test_without_loaders_it_is_all_that_run_on_our_engine(registry: Any) -> None:
    # Loaders of other tests may still be there: these names are of this one alone.
    ours = holdfast.DataLoader(Numbers(2), name="of our engine")
    torchs = torch.utils.data.DataLoader(OfTorchsLoader(2))
    assert len(list(ours)) == len(list(torchs)) == 2
    assert holdfast.of(torchs).stats()["batches"] == 0
    with metrics.prometheus(registry=registry):
        found = in_registry(registry)
    assert found["batches_total", ("of our engine", "")] == 2
    assert not [labels for _, labels in found if "OfTorchsLoader" in labels]


def test_what_is_wrong_is_said_before_anything_is_served(registry: Any) -> None:
    loader = holdfast.DataLoader([1])
    with pytest.raises(TypeError, match="none was given"):
        metrics.prometheus(loader)
    with pytest.raises(TypeError, match="both were given"):
        metrics.prometheus(loader, port=0, registry=registry)
    with pytest.raises(TypeError, match="not 'x'"):
        metrics.prometheus(loader, registry="x")
    with pytest.raises(TypeError, match="takes a torch"):
        metrics.prometheus([1], port=0)
    with pytest.raises(TypeError, match="a function of one dict"):
        metrics.watch(loader, "print")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every is -1"):
        metrics.watch(loader, print, every=-1)
    with pytest.raises(TypeError, match="has to be a SummaryWriter"):
        metrics.TensorBoard(print)


# -- callbacks ------------------------------------------------------------------------------


def test_a_callback_gets_rates_and_totals_between_batches() -> None:
    seen: list[dict[str, float]] = []
    loader = holdfast.DataLoader(Numbers(6), batch_size=2, num_workers=1, name="train")
    found = [batch.tolist() for batch in metrics.watch(loader, seen.append, every=0)]
    assert found == [[0, 1], [2, 3], [4, 5]]
    assert [one["holdfast/train/batches"] for one in seen] == [1, 2, 3, 3]
    assert all(0 <= one["holdfast/train/waited_share"] <= 1 for one in seen)
    assert seen[1]["holdfast/train/batches_per_second"] > 0
    assert seen[0]["holdfast/train/worker_bytes/0"] > 1e6
    names = {name.removeprefix("holdfast/train/") for name in seen[0]}
    assert {"restarts", "incidents", "bad_samples", "in_flight_bytes", "held_bytes"} <= names


def test_a_callback_is_called_rarely_by_default() -> None:
    seen: list[dict[str, float]] = []
    loader = holdfast.DataLoader(Numbers(50), name="train")
    assert len(list(metrics.watch(loader, seen.append))) == 50
    assert [one["holdfast/train/batches"] for one in seen] == [50]


@pytest.mark.frameworks
def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    board = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loader = holdfast.DataLoader(Numbers(6), batch_size=2, name="train")
    with board.SummaryWriter(str(tmp_path)) as writer:
        for _ in metrics.watch(loader, metrics.TensorBoard(writer), every=0):
            pass
    read = accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    points = read.Scalars("holdfast/train/batches")
    assert [(one.step, one.value) for one in points] == [(1, 1), (2, 2), (3, 3), (3, 3)]
    assert "holdfast/train/in_flight_bytes" in read.Tags()["scalars"]
