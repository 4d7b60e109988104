"""Workers on a Ray cluster give stock torch's batches."""

from __future__ import annotations

import json
import operator
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
import torch

import holdfast
import ray
from tests.ray.datasets import Noisy, Stream, digest
from tests.ray.loaders import on_ray
from tests.ray.stock import stock
from tests.support import warm


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Noisy(), {"batch_size": 4, "shuffle": True}),
        (Noisy(), {"batch_size": None}),
        (Stream(), {"batch_size": 3}),
    ],
    ids=["map", "samples", "stream"],
)
def test_batches_are_those_of_stock_torch(cluster: Any, dataset: Any, options: Any) -> None:
    with on_ray(dataset, **options) as loader:
        assert digest(loader) == stock(dataset, **options)
        assert not loader.incidents


def test_large_batches_of_a_slow_consumer_do_not_fill_the_object_store(cluster: Any) -> None:
    dataset = Noisy(40, size=300_000)  # 380 MB in all, through stores of 120
    with on_ray(dataset, batch_size=2, prefetch_factor=8) as loader:
        seen = []
        for batch in loader:
            seen.append(batch)
            time.sleep(0.2)  # workers are ahead
        assert digest(seen) == stock(dataset, batch_size=2)
        assert not loader.incidents
    folder = Path(cluster.head.get_logs_dir_path())
    assert not [one for one in folder.glob("raylet*.out") if "Spilled " in one.read_text()]
    counted = "".join(one.read_text() for one in folder.glob("debug_state*.txt"))
    assert set(re.findall(r"cumulative spill requests: (\d+)", counted)) <= {"0"}


def test_persistent_actors_go_on_from_epoch_to_epoch(cluster: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "persistent_workers": True}
    with on_ray(Noisy(), **options) as loader:
        assert [digest(loader) for _ in range(3)] == stock(Noisy(), epochs=3, **options)


def test_batches_are_the_users_to_change_and_to_keep(cluster: Any) -> None:
    with on_ray(Noisy(), batch_size=4) as loader:
        kept = list(loader)
        before = [batch.clone() for batch in kept]
        for batch in kept:
            batch += 1
        assert all(torch.equal(one, two + 1) for one, two in zip(kept, before, strict=True))


def test_the_dataset_is_stored_once_for_all_workers(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[int] = []
    real = ray.put

    def counted(value: Any) -> Any:
        put.append(value.nbytes)
        return real(value)

    monkeypatch.setattr(ray, "put", counted)
    with on_ray(torch.zeros(100_000, 4), batch_size=25_000) as loader:
        assert len(list(loader)) == 4
    (stored,) = put
    assert 1_600_000 < stored < 2_000_000


# -- resumption ---------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Noisy(), Stream()], ids=["map", "stream"])
def test_another_loader_goes_on_from_the_state_of_one(cluster: Any, dataset: Any) -> None:
    shuffled = {"shuffle": True} if isinstance(dataset, Noisy) else {}
    options: dict[str, Any] = {"batch_size": 4, **shuffled}
    whole = stock(dataset, **options)
    with on_ray(dataset, **options) as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(3)]
        state = json.loads(json.dumps(loader.state_dict()))
    torch.manual_seed(99)
    with holdfast.DataLoader(dataset, num_workers=2, worker_method="ray", **options) as other:
        other.load_state_dict(state)
        assert digest([*first, *other]) == whole
    with holdfast.DataLoader(dataset, num_workers=2, **options) as processes:
        processes.load_state_dict(state)
        assert digest([*first, *processes]) == whole


IN_ANOTHER_PROCESS = """
import json, sys
import ray, torch
from tests.ray.datasets import Noisy, Stream
from tests.ray.loaders import on_ray

address, state, rest = sys.argv[1:]
ray.init(address, log_to_driver=False)
with open(state) as file:
    kind, options, state = json.load(file)
with on_ray({"Noisy": Noisy, "Stream": Stream}[kind](), **options) as loader:
    torch.manual_seed(99)
    loader.load_state_dict(state)
    torch.save(list(loader), rest)
"""


@pytest.mark.parametrize("kind", [Noisy, Stream])
def test_another_process_goes_on_from_the_state_of_this_one(
    cluster: Any, tmp_path: Path, kind: Any
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True if kind is Noisy else None}
    state, rest = tmp_path / "state.json", tmp_path / "rest.pt"
    with on_ray(kind(), **options) as loader:
        iterator = iter(loader)
        first = [next(iterator) for _ in range(3)]
        state.write_text(json.dumps([kind.__name__, options, loader.state_dict()]))
    command = ["-c", IN_ANOTHER_PROCESS, cluster.cluster.address, str(state), str(rest)]
    ended = warm.run(command, timeout=90, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0, ended.stderr
    assert digest([*first, *torch.load(rest)]) == stock(kind(), **options)


# -- seeds and changes of the dataset -----------------------------------------------------


def test_seeds_of_samples_do_not_depend_on_the_kind_of_worker(cluster: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4, "seeding": ("sample", 5)}
    with on_ray(Noisy(20), **options) as actors:
        torch.manual_seed(7)
        processes = holdfast.DataLoader(Noisy(20), num_workers=1, **options)
        assert digest(actors) == digest(processes)


def test_changes_of_the_dataset_reach_every_actor_before_the_same_batch(cluster: Any) -> None:
    options: dict[str, Any] = {"batch_size": 4, "persistent_workers": True}

    def epochs(loader: Any) -> list[str]:
        found = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            found.append(digest(loader))
        loader.broadcast(operator.methodcaller("set_epoch", 7))
        return [*found, digest(loader)]

    with on_ray(Noisy(20), **options) as actors:
        found = epochs(actors)
    torch.manual_seed(7)
    with holdfast.DataLoader(Noisy(20), num_workers=2, **options) as processes:
        assert found == epochs(processes)
    assert len(set(found)) == 3


# -- errors and ends ----------------------------------------------------------------------


def test_errors_of_samples_are_torchs_and_bad_samples_may_be_left_out(cluster: Any) -> None:
    broken = Noisy(20, deadly={7: "raise"})
    with (
        on_ray(broken, batch_size=4) as loader,
        pytest.raises(ValueError, match="Caught ValueError in DataLoader worker actor 1"),
    ):
        list(loader)
    with on_ray(broken, batch_size=4, on_bad_sample="skip") as loader:
        with pytest.warns(holdfast.BadSampleWarning):
            batches = list(loader)
        indices = [int(one) for batch in batches for one in batch[:, 0]]
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
