"""Whatever becomes of actors, nodes and objects: every batch once, in order, and stock torch's."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
import psutil
import torch

import holdfast
from holdfast.engine.events import Limits
from holdfast.ray import ray_driver, ray_method
from holdfast.views.workers import WorkerMonitor
from tests.ray.datasets import Noisy, Stream, Waits, digest
from tests.ray.loaders import on_ray
from tests.ray.stock import stock
from tests.support.processes import eventually


def test_a_storm_of_kills_costs_nothing(cluster: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    with on_ray(Noisy(120, seconds=0.005), max_restarts=None, **options) as loader:
        iterator, seen = iter(loader), []
        for number, batch in enumerate(iterator):
            seen.append(batch)
            if number in (2, 3, 9, 14, 15):
                os.kill(iterator._workers[number % 2].pid, signal.SIGKILL)
        assert digest(seen) == stock(Noisy(120), **options)
        incidents = loader.incidents
    assert len(incidents) >= 4
    assert {one.cause for one in incidents} == {"ray-actor-died"}
    assert "Ray says" in incidents[0].report()
    assert incidents[0].evidence["actor"] in incidents[0].report()
    assert incidents[0].evidence["node"] in incidents[0].report()


@pytest.mark.parametrize("kind", [Noisy, Stream])
def test_an_actor_that_ends_itself_in_a_sample_is_replaced(
    cluster: Any, tmp_path: Path, kind: Any
) -> None:
    deadly = (
        Noisy(deadly={21: "die"}, marks=tmp_path)
        if kind is Noisy
        else Stream(dies=tmp_path / "died")
    )
    with on_ray(deadly, batch_size=4) as loader:
        assert digest(loader) == stock(kind(), batch_size=4)
        assert len(loader.incidents) == 1


def test_a_sample_that_ends_its_actor_each_time_ends_the_run_with_its_batch_and_indices(
    cluster: Any,
) -> None:
    deadly = Noisy(400, deadly={335: "die each time"})  # in a call with many small batches
    with on_ray(deadly, batch_size=2, max_restarts=3) as loader:
        iterator, seen = iter(loader), []
        pids = [worker.pid for worker in iterator._workers]
        with pytest.raises(holdfast.RestartLimitExceeded) as error:
            seen.extend(iterator)
        incidents = loader.incidents
    assert digest(seen) == stock(Noisy(334), batch_size=2)
    said = str(error.value)
    assert "4 deaths within 60 s are more than max_restarts allows (3)" in said
    assert re.search(r"(All|3) of them were at batch 167 \(worker 1, indices 334, 335\)", said)
    assert "while loading batch 167" in said
    assert "Ray says" in said
    assert {one.batch for one in incidents[1:]} == {167}
    pids += [one.pid for one in incidents]
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 20)


@pytest.mark.timeout(300, method="thread")  # seven actors start in a row, and pause
def test_a_sample_that_ends_its_actor_each_time_is_left_out(
    cluster: Any,
) -> None:
    deadly = Noisy(80, deadly={41: "die each time"})
    with on_ray(deadly, batch_size=4, max_restarts=None, on_bad_sample="skip") as loader:
        with pytest.warns(holdfast.BadSampleWarning, match="nothing says how"):
            indices = [int(one) for batch in loader for one in batch[:, 0]]
        assert indices == [number for number in range(80) if number != 41]
        assert [one.index for one in loader.bad_samples] == [41]
        deaths = loader.incidents[1:]
        assert len(deaths) >= 5  # and one more if Ray took long to notice the first one alone
        assert {one.sample for one in deaths} == {41}
    assert "because it did so alone too" in loader.incidents[-1].report()


def test_an_actor_that_rays_memory_monitor_ends_is_replaced(spots: Any, tmp_path: Path) -> None:
    memory = psutil.virtual_memory()
    room = min(1 << 30, memory.available // 8)
    threshold = (memory.total - memory.available + room) / memory.total
    settings = {
        "RAY_memory_usage_threshold": f"{threshold:.4f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }
    spots.add(env_vars=settings)
    hungry = Noisy(deadly={21: "eat"}, marks=tmp_path, uses=5 * room)
    with on_ray(hungry, batch_size=4, max_restarts=None, ray_options=spots.options) as loader:
        assert digest(loader) == stock(Noisy(), batch_size=4)
        assert "ray-out-of-memory" in [one.cause for one in loader.incidents]


# What Ray says depends on what it notices first.
LOST = {"ray-node-lost", "ray-actor-died", "ray-object-lost"}


def test_a_node_that_is_lost_takes_its_actors_and_nothing_else(spots: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    dataset = Noisy(200, seconds=0.03)
    spots.add()
    with on_ray(dataset, prefetch_factor=2, ray_options=spots.options, **options) as loader:
        seen = []
        for number, batch in enumerate(loader):
            seen.append(batch)
            if number == 6:
                spots.remove()
                spots.add()
        assert digest(seen) == stock(Noisy(200), **options)
        causes = {one.cause for one in loader.incidents}
    assert causes
    assert causes <= LOST


def test_batches_that_are_lost_before_they_are_fetched_are_made_again(
    cluster: Any, spots: Any
) -> None:
    dataset = Noisy(24, seconds=0.02, size=40_000)  # batches of 5 MB
    raylet = psutil.Process(cluster.head.all_processes["raylet"][0].process.pid)
    spots.add()
    with on_ray(dataset, batch_size=4, ray_options=spots.options) as loader:
        iterator = iter(loader)
        seen = [next(iterator)]
        raylet.suspend()  # it would fetch them
        try:
            time.sleep(0.5)
            spots.remove()
        finally:
            raylet.resume()
        spots.add()
        seen += iterator
        assert digest(seen) == stock(Noisy(24, size=40_000), batch_size=4)
        causes = {one.cause for one in loader.incidents}
    assert causes
    assert causes <= LOST


def test_workers_without_room_start_when_a_node_is_added(
    spots: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_driver, "PATIENCE", 0.5)
    monkeypatch.setattr(ray_driver, "SAY_AGAIN", 0.5)
    caplog.set_level(logging.WARNING, "holdfast")
    seen: list[Any] = []
    with on_ray(Noisy(), batch_size=4, ray_options=spots.options) as loader:
        consumer = threading.Thread(target=lambda: seen.extend(loader))
        consumer.start()
        # What is free is asked when there is a reason to: the first line may be without it.
        free = "each asks for spot 1; free in the whole cluster: spot 0"
        assert eventually(lambda: free in caplog.text, 30)
        assert "waiting for a start" in caplog.text
        spots.add()
        consumer.join(60)
        assert digest(seen) == stock(Noisy(), batch_size=4)
        assert not loader.incidents


def test_workers_for_which_there_is_no_processor_share_those_there_are(
    cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_driver, "PATIENCE", 1.0)
    caplog.set_level(logging.WARNING, "holdfast")
    with on_ray(Noisy(), num_workers=3, batch_size=4) as loader:
        assert digest(loader) == stock(Noisy(), num_workers=3, batch_size=4)
        assert not loader.incidents
    assert "has no room for worker" in caplog.text
    assert "num_cpus=0" in caplog.text


def test_a_worker_that_goes_on_before_it_is_ended_is_left_alone(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(kill_after=30.0, abandon_after=2.0, check_interval=0.2)
    monkeypatch.setattr(ray_method, "LIMITS", limits)
    dumped, go_on = [], tmp_path / "go on"
    dump = ray_driver.RayDriver.dump

    def goes_on(driver: Any, worker: int, generation: int) -> None:
        dumped.append(worker)
        dump(driver, worker, generation)
        go_on.touch()

    monkeypatch.setattr(ray_driver.RayDriver, "dump", goes_on)
    with on_ray(Waits(go_on), batch_size=4, stall_timeout=3.0) as loader:
        iterator: Any = iter(loader)
        seen = [*next(iterator), *next(iterator), *next(iterator)]
        (worker,) = dumped
        assert iterator._pool.machine.seats[worker].deadline is None  # for its end
        assert torch.stack([*seen, *torch.cat(list(iterator))]).tolist() == list(range(24))
        assert not loader.incidents


def test_a_loader_shares_the_processors_of_another_that_has_them_all(
    cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a validation in the middle of an epoch: to wait for the end of that is for ever."""
    monkeypatch.setattr(ray_driver, "PATIENCE", 1.0)
    caplog.set_level(logging.WARNING, "holdfast")
    with on_ray(Noisy(), batch_size=4) as outer:
        batches = iter(outer)
        seen = [next(batches)]
        with on_ray(Noisy(24), batch_size=4) as inner:
            assert digest(inner) == stock(Noisy(24), batch_size=4)
            assert not inner.incidents
        assert digest([*seen, *batches]) == stock(Noisy(), batch_size=4)
    assert "has no room for 2 workers (0, 1)" in caplog.text


def test_a_worker_that_hangs_is_named_with_its_node_and_stack_and_replaced(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(kill_after=1.0, abandon_after=2.0, check_interval=0.2)
    monkeypatch.setattr(ray_method, "LIMITS", limits)
    hangs = Noisy(deadly={21: "hang"}, marks=tmp_path)
    with on_ray(hangs, batch_size=4, stall_timeout=5.0) as loader:
        assert digest(loader) == stock(Noisy(), batch_size=4)
        (incident,) = loader.incidents
    assert incident.kind == "stalled"
    assert incident.sample == 21
    assert "__getitem__" in str(incident.stack)
    node = incident.evidence["node"]
    assert f"on node {node} made no progress for " in incident.report()


def test_what_is_awaited_is_shown_by_top_and_in_the_error_of_a_timeout(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_method, "LIMITS", Limits(check_interval=0.2))
    hangs = Noisy(8, deadly={5: "hang"}, marks=tmp_path)
    with on_ray(hangs, batch_size=4, timeout=60) as loader:
        iterator = iter(loader)
        next(iterator)
        iterator._timeout = 8  # the workers have started by now
        pid = iterator._workers[1].pid
        monitor = WorkerMonitor(os.getpid())
        seen: list[Any] = []

        def look() -> bool:
            seen[:] = [row for row in monitor.refresh() if row.pid == pid and row.note is not None]
            return bool(seen) and seen[0].note.position == 1

        watching = threading.Thread(target=eventually, args=(look, 6))
        watching.start()
        with pytest.raises(RuntimeError, match="timed out after 8") as error:
            next(iterator)
        watching.join()
    (row,) = seen
    assert (row.method, row.number, row.note.step, row.note.task) == ("ray", 1, "fetch", 1)
    assert "on node " in row.command
    assert f"awaited is worker 1 ({row.command}): fetch batch 1 sample 1, " in str(error.value)
