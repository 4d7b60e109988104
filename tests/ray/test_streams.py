"""Workers on a Ray cluster give stock torch's batches, whatever becomes of actors and nodes."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
import torch
import torch.utils.data

import holdfast
from holdfast.engine.events import Limits
from holdfast.ray import method, ray_driver
from tests.ray.datasets import Noisy, Stream, digest

pytestmark = pytest.mark.timeout(240, method="thread")


def stock(dataset: Any, **options: Any) -> str:
    torch.manual_seed(7)
    return digest(torch.utils.data.DataLoader(dataset, num_workers=2, **options))


def on_ray(dataset: Any, **options: Any) -> Any:
    torch.manual_seed(7)
    return holdfast.DataLoader(dataset, num_workers=2, worker_method="ray", **options)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Noisy(), {"batch_size": 4, "shuffle": True}),
        (Noisy(), {"batch_size": None}),
        (Stream(), {"batch_size": 3}),
        (Noisy(20, size=300_000), {"batch_size": 2}),
    ],
    ids=["map", "samples", "stream", "large"],
)
def test_batches_are_those_of_stock_torch(cluster: Any, dataset: Any, options: Any) -> None:
    with on_ray(dataset, **options) as loader:
        assert digest(loader) == stock(dataset, **options)
        assert not loader.incidents


def test_persistent_actors_go_on_from_epoch_to_epoch(cluster: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "persistent_workers": True}
    torch.manual_seed(7)
    expected = torch.utils.data.DataLoader(Noisy(), num_workers=2, **options)
    wanted = [digest(expected) for _ in range(3)]
    with on_ray(Noisy(), **options) as loader:
        assert [digest(loader) for _ in range(3)] == wanted


def test_batches_are_the_users_to_change_and_to_keep(cluster: Any) -> None:
    with on_ray(Noisy(), batch_size=4) as loader:
        kept = list(loader)
        before = [batch.clone() for batch in kept]
        for batch in kept:
            batch += 1
        assert all(torch.equal(one, two + 1) for one, two in zip(kept, before, strict=True))


def test_an_actor_that_is_killed_costs_nothing(cluster: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    dataset = Noisy(seconds=0.005)
    expected = stock(dataset, **options)
    with on_ray(dataset, **options) as loader:
        iterator, seen = iter(loader), []
        for number, batch in enumerate(iterator):
            seen.append(batch)
            if number in (3, 9):
                os.kill(iterator._workers[number % 2].pid, 9)
        assert digest(seen) == expected
        assert {one.cause for one in loader.incidents} == {"ray-actor-died"}
        assert "Ray says" in loader.incidents[0].report()


@pytest.mark.parametrize("dataset", [Noisy, Stream])
def test_an_actor_that_ends_itself_in_a_sample_is_replaced(
    cluster: Any, tmp_path: Path, dataset: Any
) -> None:
    deadly = (
        Noisy(deadly={21: "die"}, marks=tmp_path)
        if dataset is Noisy
        else Stream(dies=tmp_path / "died")
    )
    expected = stock(dataset(), batch_size=4)
    with on_ray(deadly, batch_size=4) as loader:
        assert digest(loader) == expected
        assert len(loader.incidents) == 1


def test_a_node_that_is_removed_takes_its_actors_and_nothing_else(cluster: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    dataset = Noisy(160, seconds=0.01)
    expected = stock(dataset, **options)
    extra = cluster.add_node(num_cpus=1, object_store_memory=80 << 20, resources={"extra": 1})
    cluster.wait_for_nodes()
    with on_ray(
        dataset, ray_options={"num_cpus": 0, "scheduling_strategy": "SPREAD"}, **options
    ) as loader:
        iterator, seen, removed = iter(loader), [], False
        for number, batch in enumerate(iterator):
            seen.append(batch)
            if number >= 6 and not removed:
                removed = True
                cluster.remove_node(extra, allow_graceful=False)
        assert digest(seen) == expected
        causes = {one.cause for one in loader.incidents}
        assert causes <= {"ray-node-lost", "ray-actor-died", "ray-object-lost"}


def test_a_worker_that_hangs_is_named_with_its_stack_and_replaced(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(kill_after=1.0, abandon_after=2.0, check_interval=0.2)
    monkeypatch.setattr(method, "LIMITS", limits)
    expected = stock(Noisy(), batch_size=4)
    hangs = Noisy(deadly={21: "hang"}, marks=tmp_path)
    with on_ray(hangs, batch_size=4, stall_timeout=5.0) as loader:
        assert digest(loader) == expected
        (incident,) = loader.incidents
        assert incident.kind == "stalled"
        assert "__getitem__" in str(incident.stack)


def test_workers_for_which_there_is_no_processor_share_those_there_are(
    cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_driver, "PATIENCE", 1.0)
    dataset = Noisy()
    torch.manual_seed(7)
    expected = digest(torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=3))
    torch.manual_seed(7)
    caplog.set_level(logging.WARNING, "holdfast")
    with holdfast.DataLoader(dataset, batch_size=4, num_workers=3, worker_method="ray") as loader:
        assert digest(loader) == expected
    assert "has no room for worker" in caplog.text
    assert "num_cpus=0" in caplog.text


def test_errors_of_samples_are_torchs_and_bad_samples_may_be_left_out(cluster: Any) -> None:
    broken = Noisy(20, deadly={7: "raise"})
    with (
        on_ray(broken, batch_size=4) as loader,
        pytest.raises(ValueError, match="Caught ValueError in DataLoader worker actor 1"),
    ):
        list(loader)
    with on_ray(broken, batch_size=4, on_bad_sample="skip") as loader:
        indices = [int(one) for batch in loader for one in batch[:, 0]]
        assert indices == [number for number in range(20) if number != 7]
        assert [one.index for one in loader.bad_samples] == [7]


def test_a_dataset_that_cannot_be_pickled_is_an_error_before_any_actor_starts(cluster: Any) -> None:
    class Unpicklable(Noisy):
        def __reduce__(self) -> Any:
            raise TypeError("not this one")

    with pytest.raises(TypeError, match="not this one"):
        iter(on_ray(Unpicklable(), batch_size=4))


def test_a_closed_loader_leaves_no_actor(cluster: Any) -> None:
    with on_ray(Noisy(), batch_size=4) as loader:
        iterator = iter(loader)
        next(iterator)
        pids = [worker.pid for worker in iterator._workers]
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
