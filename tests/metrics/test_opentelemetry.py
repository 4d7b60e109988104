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


def collected(reader: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    """Name and values of attributes -> value."""
    data = reader.get_metrics_data()
    return {
        (metric.name.removeprefix("holdfast."), tuple(point.attributes.values())): point.value
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
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
        assert found["in_flight_bytes", ("train", "")] == 0
        assert found["wait_seconds", ("train", "")] > 0
        assert found["worker_private_bytes", ("train", "", "1")] > 0
        names = {name for name, _ in found}
        assert names == {*metrics.readings.COUNTERS, *metrics.readings.GAUGES}
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
    assert ("wait_seconds", ("val", "")) not in found
    del loader
    gc.collect()
    assert collected(reader) == {}


def test_a_meter_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="meter has to be a Meter"):
        metrics.opentelemetry(meter=5)
