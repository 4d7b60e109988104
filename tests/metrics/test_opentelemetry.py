"""``holdfast.metrics.opentelemetry``: what OpenTelemetry's own SDK collects."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import metrics
from tests.metrics.test_metrics import Mortal
from tests.support.datasets import Numbers
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(60, method="thread")


@pytest.fixture
def reader() -> Any:
    return pytest.importorskip("opentelemetry.sdk.metrics.export").InMemoryMetricReader()


@pytest.fixture
def meter(reader: Any) -> Any:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    provider = sdk.MeterProvider([reader])
    yield provider.get_meter("tests")
    provider.shutdown()


def metrics_of(reader: Any) -> list[Any]:
    data = reader.get_metrics_data()
    scopes = [
        scope for one in (data.resource_metrics if data else ()) for scope in one.scope_metrics
    ]
    return [metric for scope in scopes for metric in scope.metrics]


def collected(reader: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    """Name and values of attributes -> value."""
    return {
        (metric.name.removeprefix("holdfast."), tuple(point.attributes.values())): point.value
        for metric in metrics_of(reader)
        for point in metric.data.data_points
    }


@pytest.mark.faults
def test_a_reader_collects_what_went_on(reader: Any, meter: Any, tmp_path: Path) -> None:
    loader = holdfast.DataLoader(
        Mortal(tmp_path / "mark"), batch_size=4, num_workers=2, persistent_workers=True,
        on_bad_sample="skip", name="train",
    )  # fmt: skip
    with loader:
        instruments = metrics.opentelemetry(loader, meter=meter)
        list(loader)
        found = collected(reader)
        assert found["batches", ("train", "")] == 6
        assert found["restarts", ("train", "")] == 1
        assert found["bad_samples", ("train", "")] == 1
        assert found["in_flight", ("train", "")] == 0
        assert found["wait", ("train", "")] > 0
        # The pid of the replacement may be known a moment after its batches.
        replacement = "worker_private", ("train", "", "1")
        assert eventually(lambda: collected(reader).get(replacement, 0) > 0)
        units = {metric.name: metric.unit for metric in metrics_of(reader)}
        assert len(units) == len(metrics.readings.COUNTERS) + len(metrics.readings.GAUGES)
        assert (units["holdfast.wait"], units["holdfast.in_flight"]) == ("s", "By")
        assert (units["holdfast.bytes"], units["holdfast.batches"]) == ("By", "{batch}")
        instruments.close()
        assert collected(reader) == {}


def test_loaders_are_not_kept_alive_and_those_without_workers_do_not_wait(
    reader: Any, meter: Any
) -> None:
    loader = holdfast.DataLoader(Numbers(8), batch_size=4, name="val")
    metrics.opentelemetry(loader, meter=meter)
    list(loader)
    found = collected(reader)
    assert found["batches", ("val", "")] == 2
    assert ("wait", ("val", "")) not in found
    del loader
    gc.collect()
    assert collected(reader) == {}


def test_a_loader_is_asked_once_for_each_collection_and_anew_for_the_next(
    reader: Any, meter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    real = metrics.opentelemetry_exporter.figures
    monkeypatch.setattr(
        metrics.opentelemetry_exporter, "figures", lambda one: asked.append(one) or real(one)
    )
    loader = holdfast.DataLoader(Numbers(8), batch_size=4, name="val")
    metrics.opentelemetry(loader, meter=meter)
    for epoch in (1, 2, 3):
        list(loader)
        assert collected(reader)["batches", ("val", "")] == 2 * epoch
        assert len(asked) == epoch


def test_a_meter_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="meter has to be a Meter"):
        metrics.opentelemetry(meter=5)
