"""Workers that grow are replaced between two batches, and the stream does not show it."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import logging
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from click.testing import CliRunner
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import holdfast
from holdfast.engine.memory_control import MemoryController, _Warned
from holdfast.limits.budget import Budget, Share
from holdfast.limits.gauge import MemoryReading
from holdfast.limits.growth import Point
from holdfast.run_report import logged_run
from holdfast.verbs.incidents import incidents
from holdfast.worker.housekeeping import trim
from tests.support.processes import eventually, kill

MIB = 1 << 20
_leaked: list[Any] = []


def leak(mebibytes: int = 4) -> None:
    _leaked.append(np.ones(mebibytes * MIB, np.uint8))


class Leaks(Dataset[Any]):
    """With a generator of its own, besides."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        leak()
        return torch.rand(8) + index + self.rng.random()


class LeaksInTurn(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        for index in range(worker.id, 64, worker.num_workers):
            leak()
            yield torch.rand(8) + index


class LeaksInTurnAndKnowsWhere(LeaksInTurn):
    at = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        while worker.id + self.at * worker.num_workers < 64:
            leak()
            self.at += 1
            yield torch.rand(8) + self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def stream(
    loader_class: Any,
    dataset: Any,
    epochs: int = 1,
    wait_for: Callable[[Any], bool] | None = None,
    then_for: Callable[[], bool] | None = None,
    **more: Any,
) -> tuple[str, Any]:
    """`wait_for`, given the loader, comes true before the consumer goes on in the middle of the
    first epoch: a worker of a stream works on until it is known that it can be replaced. `then_for`
    comes true before it goes on near its end."""
    torch.manual_seed(3)
    more.setdefault("num_workers", 2)
    loader = loader_class(dataset, batch_size=2, **more)
    seen = hashlib.sha256()
    for epoch in range(epochs):
        for number, batch in enumerate(loader):
            seen.update(batch.numpy().tobytes())
            if wait_for is not None and (epoch, number) == (0, 14):
                assert eventually(lambda: wait_for(loader), 60)
            if then_for is not None and (epoch, number) == (0, 28):
                assert eventually(then_for, 60)
    return seen.hexdigest(), loader


def has_recycled(loader: Any) -> bool:
    return bool(loader.stats()["recycled"])


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (Leaks, "fork"),
        (LeaksInTurnAndKnowsWhere, "fork"),
        pytest.param(Leaks, "spawn", marks=pytest.mark.slow),
        pytest.param(LeaksInTurnAndKnowsWhere, "spawn", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_grows_is_replaced_and_the_stream_stays(
    kind: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "holdfast.engine.memory_control._warned", _Warned(leak=True)
    )  # tracing comes below
    expected, _ = stream(torch.utils.data.DataLoader, kind())
    found, loader = stream(
        holdfast.DataLoader,
        kind(),
        wait_for=has_recycled,
        worker_memory_limit="48MiB",
        multiprocessing_context=method,
    )
    assert found == expected
    stats = loader.stats()
    assert stats["recycled"] >= (2 if kind is Leaks else 1)
    assert stats["restarts"] == 0
    assert loader.incidents == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_stream_that_leaks_what_it_draws_again_is_not_drawn_again_and_again(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A successor would have to draw all that was delivered, and be as large when it is there."""
    expected, _ = stream(torch.utils.data.DataLoader, LeaksInTurn(), epochs=2)
    with caplog.at_level(logging.WARNING, "holdfast"):
        found, loader = stream(
            holdfast.DataLoader,
            LeaksInTurn(),
            epochs=2,
            wait_for=lambda loader: "would be as large" in caplog.text,
            worker_memory_limit="48MiB",
            multiprocessing_context=method,
        )
    assert found == expected
    assert loader.stats()["recycled"] == 0
    assert loader.incidents == []
    told = [one for one in caplog.messages if "would be as large" in one]
    assert len(told) == 1, "once for each loader"


class Copied(Dataset[Any]):
    """A long list that every sample reads a part of, and so copies: resident memory stays."""

    def __init__(self) -> None:
        self.names = [f"a/path/to/somewhere/that/is/long/{n:09d}.jpg" for n in range(640_000)]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        total = sum(len(name) for name in self.names[index * 10_000 : (index + 1) * 10_000])
        return torch.rand(8) + total + index


def test_a_worker_that_copies_what_it_inherited_is_replaced_before_pages_are_walked_by_the_clock() -> (
    None
):
    dataset = Copied()  # 60 MB, of which each worker reads half
    expected, _ = stream(torch.utils.data.DataLoader, dataset)
    found, loader = stream(holdfast.DataLoader, dataset, worker_memory_limit="16MiB")
    assert found == expected
    assert loader.stats()["recycled"] >= 2
    assert loader.incidents == []


@pytest.mark.slow
def test_persistent_workers_are_replaced_over_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned(leak=True))
    options = {"persistent_workers": True, "shuffle": True}
    expected, _ = stream(torch.utils.data.DataLoader, Leaks(), epochs=2, **options)
    found, loader = stream(
        holdfast.DataLoader, Leaks(), epochs=2, worker_memory_limit="48MiB", **options
    )
    loader.close()
    assert found == expected
    assert loader.stats()["recycled"] >= 4


# -- and a process beside them says where it leaks ----------------------------------------


class LeaksNatively(Dataset[Any]):
    """What native code does not give back: no object of Python's knows of it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.memset(ctypes.c_void_p(libc.malloc(4 * MIB)), 1, 4 * MIB)
        return torch.rand(8) + index


def on_a_busy_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe runs when nothing else does, which a test cannot wait for. Forked processes inherit this."""
    monkeypatch.setattr("holdfast.kernel.let_others_run", lambda: None)


def line_of_the_leak() -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{1 + next(n for n, line in enumerate(lines) if '_leaked.append' in line)}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        (Leaks, "raise"),
        # The probe looks after each batch, whatever makes it.
        pytest.param(Leaks, "skip", marks=pytest.mark.slow),
        pytest.param(LeaksInTurnAndKnowsWhere, "raise", marks=pytest.mark.slow),
        (LeaksNatively, "raise"),
    ],
)
@pytest.mark.usefixtures("few_modules")
def test_after_a_worker_was_replaced_for_a_leak_a_process_beside_the_workers_names_the_line(
    kind: Any,
    policy: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned())
    on_a_busy_machine_too(monkeypatch)
    trim()  # what others have left free here would serve a leak for a while, and nothing would grow
    expected, _ = stream(torch.utils.data.DataLoader, kind())
    with caplog.at_level(logging.WARNING, "holdfast"):
        found, loader = stream(
            holdfast.DataLoader,
            kind(),
            wait_for=has_recycled,
            then_for=lambda: "what piles up" in caplog.text,
            worker_memory_limit="48MiB",
            on_bad_sample=policy,
            logbook=tmp_path,
        )
    assert found == expected
    assert loader.incidents == []
    told = [one.message for one in caplog.records if "what piles up" in one.message]
    (record,) = logged_run.read(tmp_path).leaks
    assert told == [f"[{kind.__name__}] {record['text']}"], (
        "once in a run, in the log and in the logbook"
    )
    shown = CliRunner().invoke(incidents, [str(tmp_path)])
    assert shown.exit_code == 1
    assert "what piles up" in shown.output
    leak = record["leak"]
    assert not [one for one in leak["types"] if "holdfast" in one["name"]], "our own books"
    if kind is LeaksNatively:
        assert leak["native"] == pytest.approx(8 * MIB, rel=0.3)
        assert "were not allocated by Python" in told[0]
        assert leak["lines"] == []
    else:
        assert leak["lines"][0]["name"] == line_of_the_leak()
        assert leak["python"] == pytest.approx(8 * MIB, rel=0.3)
        assert leak["native"] == 0
        assert leak["containers"][0]["name"] == f"{__name__}._leaked (list of numpy.ndarray)"


@pytest.mark.usefixtures("few_modules")
def test_if_tracing_fails_that_is_told_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(dataset: object) -> None:
        raise ValueError("an unexpected object")

    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned())
    monkeypatch.setattr(
        "holdfast.worker.leak_tracer.take_snapshot", fail
    )  # inherited by forked processes
    on_a_busy_machine_too(monkeypatch)
    expected, _ = stream(torch.utils.data.DataLoader, Leaks())
    with caplog.at_level(logging.WARNING, "holdfast"):
        found, loader = stream(
            holdfast.DataLoader,
            Leaks(),
            wait_for=has_recycled,
            then_for=lambda: "cannot be said" in caplog.text,
            worker_memory_limit="48MiB",
        )
    assert found == expected
    assert loader.incidents == []
    (told,) = [one.message for one in caplog.records if "cannot be said" in one.message]
    assert "ValueError: an unexpected object" in told


class Witnessed(Leaks):
    """Each process that loads a sample leaves a note of itself. The probe then waits, on demand."""

    def __init__(self, folder: Path, *, stays: bool) -> None:
        super().__init__()
        self.folder = folder
        self.stays = stays

    def __getitem__(self, index: int) -> Any:
        name = Path("/proc/self/comm").read_text().strip()
        traced = tracemalloc.is_tracing()
        if traced or name == "hf_leak_probe":
            worker = get_worker_info()
            assert worker is not None
            note = {
                "name": name,
                "worker": worker.id,
                "seed": worker.seed,
                "nice": os.nice(0),
                "idle": os.sched_getscheduler(0) == os.SCHED_IDLE,
                "oom": int(Path("/proc/self/oom_score_adj").read_text()),
            }
            path = self.folder / f"{os.getpid()}{'-traced' if traced else ''}"
            path.with_suffix(".new").write_text(json.dumps(note))
            path.with_suffix(".new").rename(path)
            while self.stays:
                time.sleep(0.1)
        return super().__getitem__(index)


def has_left_a_note(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix != ".new"]


@pytest.mark.usefixtures("few_modules")
def test_only_the_probe_is_traced_and_it_is_the_last_to_run_and_the_first_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned())
    with caplog.at_level(logging.WARNING, "holdfast"):
        _, loader = stream(
            holdfast.DataLoader,
            Witnessed(tmp_path, stays=False),
            wait_for=lambda loader: has_recycled(loader) and has_left_a_note(tmp_path),
            worker_memory_limit="48MiB",
        )
    notes = [json.loads(path.read_text()) for path in has_left_a_note(tmp_path)]
    assert {note["name"] for note in notes} == {"hf_leak_probe"}, "no worker is traced"
    (note,) = {tuple(sorted(note.items())) for note in notes}
    found = dict(note)
    assert (found["nice"], found["idle"], found["oom"]) == (19, True, 1000)
    assert found["worker"] in (0, 1)
    assert loader.incidents == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "closed"])
def test_whatever_ends_the_probe_is_no_incident(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is left of it (see conftest), also if it hangs when the loader is closed."""
    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned())
    on_a_busy_machine_too(monkeypatch)
    ended: list[int] = []

    def is_there(loader: Any) -> bool:
        pids = [int(path.name) for path in has_left_a_note(tmp_path)]
        if end == "killed":
            for pid in pids:
                if pid not in ended:
                    kill(pid)
                    ended.append(pid)
        return has_recycled(loader) and bool(pids)

    expected, _ = stream(torch.utils.data.DataLoader, Leaks())
    with caplog.at_level(logging.WARNING, "holdfast"):
        found, loader = stream(
            holdfast.DataLoader,
            Witnessed(tmp_path, stays=True),
            wait_for=is_there,
            worker_memory_limit="48MiB",
        )
    assert found == expected
    assert loader.incidents == []
    assert loader.stats()["restarts"] == 0
    assert "what piles up" not in caplog.text


def _leaks(n: int) -> Point:
    """Both grow, and Python's blocks with them."""
    return Point(float(n), n, n << 22, n << 22, 0, 1000 + 9 * n, 0)


def _copies(n: int) -> Point:
    """Private memory grows, anonymous does not: copy-on-write."""
    return Point(float(n), n, n * 100, n << 22, 0, 1000, 0)


def _caches(n: int) -> Point:
    """Grows as much in the first batches as a leak, and then no more."""
    full = min(n, 8)
    return Point(float(n), n, full << 22, full << 22, 0, 1000 + 9 * full, 0)


@pytest.mark.parametrize(
    ("grows", "is_traced"), [(_leaks, True), (_copies, False), (_caches, False)]
)
def test_no_leak_is_looked_for_where_a_worker_grows_by_a_cache_or_by_copying(
    grows: Callable[[int], Point], is_traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned())
    mind = MemoryController(Share(Budget(None)), 1 << 30, 2)
    for n in range(20):
        mind.measured(0, grows(n))
    assert (mind.retired(0) is not None) is is_traced


@pytest.mark.parametrize(
    ("free", "search"),
    [
        (1 << 40, (4, 1 << 38)),  # which leave eight mebibytes
        (1 << 26, (1, 1 << 24)),  # seven times that fits
        (1 << 24, None),  # not even one at a time
        (None, None),
    ],
)
def test_a_leak_is_looked_for_as_long_as_there_is_room(
    free: int | None, search: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned())
    monkeypatch.setattr("holdfast.limits.gauge.read", lambda roots: MemoryReading(1 << 41, free))
    mind = MemoryController(Share(Budget(None)), 1 << 30, 2)
    for n in range(20):
        mind.measured(0, Point(float(n), 4 * n, n << 23, n << 23, 0, 1000 + 9 * n, 0))
    for _ in range(3):
        assert mind.retired(0) == search
        mind.searched()
    assert mind.retired(0) is None, "three have been tried"


@pytest.mark.slow
def test_growth_is_said_once_and_not_in_every_epoch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "holdfast.engine.memory_control._warned", _Warned(leak=True)
    )  # no process is traced
    monkeypatch.setattr("holdfast.limits.growth.WORSE", 1e9)  # however busy the machine is
    _, loader = stream(
        holdfast.DataLoader, Leaks(), epochs=3, worker_memory_limit="60MiB", logbook=tmp_path
    )
    recycled = loader.stats()["recycled"]
    assert recycled >= 3
    said = [one for one in caplog.messages if " per batch, " in one]
    assert len(said) == 1, said
    shown = CliRunner().invoke(incidents, [str(tmp_path)])  # no incident, and not nothing either
    assert shown.exit_code == 0
    assert "Nothing went wrong" not in shown.output
    assert "more than its limit of 60 MiB; replaced" in shown.output
    assert f"replaced because they had grown: {recycled} times" in shown.output
    assert said[0] in shown.output


class Heavy(Dataset[Any]):
    """100 MB before the first batch: a fresh process has as much."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index


def eat(worker: int) -> None:
    leak(100)


def test_what_is_too_large_from_the_start_is_told_and_not_replaced_for_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned())
    with caplog.at_level(logging.WARNING, "holdfast"):
        loader = holdfast.DataLoader(
            Heavy(), num_workers=2, worker_init_fn=eat, worker_memory_limit="50MiB"
        )
        assert [int(batch) for batch in loader] == list(range(8))
    told = [one.message for one in caplog.records if "before its first batch" in one.message]
    assert len(told) == 1
    assert loader.stats()["recycled"] == 0


class Explodes(Dataset[Any]):
    """Sample 5 asks for 2 GB at once."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            return torch.from_numpy(np.ones(2 << 30, np.uint8)).sum()
        return torch.tensor(index)


def test_a_sample_that_asks_for_far_too_much_is_a_bad_sample_and_no_death() -> None:
    with pytest.raises(MemoryError):
        list(holdfast.DataLoader(Explodes(), num_workers=1, worker_memory_limit="256MiB"))
    loader = holdfast.DataLoader(
        Explodes(), num_workers=1, worker_memory_limit="256MiB", on_bad_sample="skip"
    )
    assert [int(batch) for batch in loader] == [0, 1, 2, 3, 4, 6, 7]
    (bad,) = loader.bad_samples
    assert (bad.index, loader.incidents) == (5, [])


class LeaksFast(Dataset[Any]):
    """Two batches are more than fit; one is not."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        leak(45)
        return torch.rand(8) + index


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_sample_that_lacks_what_others_have_used_up_is_made_again_in_a_fresh_process(
    policy: Any,
) -> None:
    expected, _ = stream(torch.utils.data.DataLoader, LeaksFast())
    found, loader = stream(
        holdfast.DataLoader, LeaksFast(), worker_memory_limit="100MiB", on_bad_sample=policy
    )
    assert found == expected
    assert loader.bad_samples == loader.incidents == []
    assert loader.stats()["recycled"] >= 2


# -- the budget in real runs -----------------------------------------------------------------


class Megabytes(Dataset[Any]):
    def __init__(self, mebibytes: int = 1) -> None:
        self.mebibytes = mebibytes

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.mebibytes * MIB,), index, dtype=torch.uint8)


@pytest.mark.parametrize("in_order", [True, False])
def test_no_more_is_in_flight_than_the_budget_allows_whatever_the_consumer_keeps(
    in_order: bool,
) -> None:
    loader = holdfast.DataLoader(
        Megabytes(), num_workers=4, prefetch_factor=4, memory_budget="5MiB", in_order=in_order
    )
    kept = []
    for batch in loader:
        kept.append(batch)
        figures = loader.stats()
        assert figures["in_flight_bytes"] <= 5 * MIB
        assert figures["held_bytes"] >= len(kept) * MIB
    assert sorted(int(batch[0, 0]) for batch in kept) == list(range(40))
    assert loader.stats()["most_in_flight_bytes"] <= 5 * MIB
    assert loader.stats()["budget_bytes"] == 5 * MIB


@pytest.mark.parametrize("persistent", [True, False])
def test_what_the_consumer_keeps_is_told_as_long_as_it_is_kept(persistent: bool) -> None:
    loader = holdfast.DataLoader(Megabytes(), num_workers=2, persistent_workers=persistent)

    def held() -> float:
        gc.collect()
        return loader.stats()["held_bytes"]

    kept = list(loader)
    assert held() >= 40 * MIB, "the epoch is over, the batches are not"
    del kept[:30]
    kept.append(next(iter(loader)))
    assert 11 * MIB <= held() < 12 * MIB
    loader.close()
    assert 11 * MIB <= held() < 12 * MIB
    del kept[5:]
    assert 5 * MIB <= held() < 6 * MIB
    kept.clear()
    assert held() == 0


def test_a_batch_that_is_larger_than_the_budget_passes_alone() -> None:
    loader = holdfast.DataLoader(Megabytes(2), num_workers=3, memory_budget=1000)
    assert [int(batch[0, 0]) for batch in loader] == list(range(40))
    assert loader.stats()["most_in_flight_bytes"] < 3 * MIB


def test_two_loaders_with_a_full_budget_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(holdfast.limits.budget._for_all, "all", holdfast.limits.budget.Budget(MIB))
    one, other = (holdfast.DataLoader(Megabytes(), num_workers=2) for _ in range(2))
    pairs = [(int(a[0, 0]), int(b[0, 0])) for a, b in zip(one, other, strict=True)]
    assert pairs == [(n, n) for n in range(40)]
    assert one.stats()["budget_bytes"] == MIB


def test_small_batches_are_prefetched_as_ever() -> None:
    loader = holdfast.DataLoader(list(range(64)), num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    next(iterator)
    machine = iterator._pool.machine
    assert not machine.held_back
    assert len(machine._tasks) == 8
    loader.close()


# -- what lies free in the arenas -------------------------------------------------------------


def resident(loader: Any) -> int:
    """Bytes of memory behind the arenas."""
    (pool,) = loader._runtime.pools()
    return sum(os.fstat(place.arena).st_blocks * 512 for place in pool.driver.resources.slots)


def test_workers_without_anything_to_do_give_back_what_they_do_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two thirds are in use: no pressure, and it is looked at a few times a second.
    monkeypatch.setattr(
        "holdfast.limits.gauge.read", lambda roots: MemoryReading(15 << 30, 5 << 30)
    )
    monkeypatch.setattr("holdfast.engine.upkeep.IDLE_SECONDS", 0.2)
    loader = holdfast.DataLoader(
        Megabytes(4), num_workers=2, prefetch_factor=4, persistent_workers=True
    )
    kept = list(loader)[::10]
    assert eventually(lambda: resident(loader) <= 20 * MIB), "four batches are kept, and no more"
    assert [int(batch.max()) for batch in kept] == [0, 10, 20, 30]
    kept.pop()
    assert eventually(lambda: resident(loader) <= 16 * MIB), "also what is let go of later"
    assert [int(batch[0, 0]) for batch in loader] == list(range(40))
    assert [int(batch.max()) for batch in kept] == [0, 10, 20]
    loader.close()


def test_under_pressure_what_lies_free_is_given_back_without_waiting_for_the_consumer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = {"free": 5 << 30}
    monkeypatch.setattr(
        "holdfast.limits.gauge.read", lambda roots: MemoryReading(16 << 30, **readings)
    )
    monkeypatch.setattr("holdfast.engine.upkeep.IDLE_SECONDS", 1e9)
    batches = iter(loader := holdfast.DataLoader(Megabytes(8), num_workers=2))
    kept = [next(batches) for _ in range(20)]
    found = [int(batch[0, 0]) for batch in kept]
    kept.clear()
    assert resident(loader) >= 160 * MIB, "it is kept for the next batches"
    readings["free"] = 2 << 30  # of 16: what is in flight, four batches, is allowed
    assert eventually(lambda: resident(loader) <= 80 * MIB)
    assert [*found, *(int(batch[0, 0]) for batch in batches)] == list(range(40))


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return torch.rand(4) + index


def test_a_worker_that_is_to_go_does_not_finish_all_that_it_was_asked_for_before() -> None:
    def stream_of(loader_class: Any, **more: Any) -> Iterator[Any]:
        torch.manual_seed(2)
        loader = loader_class(Slow(), num_workers=1, prefetch_factor=30, **more)
        batches = iter(loader)
        yield loader, batches
        yield from batches

    expected = list(stream_of(torch.utils.data.DataLoader))[1:]
    found = stream_of(holdfast.DataLoader)
    loader, batches = next(found)
    got = [next(found)]
    with batches._pool.lock:
        batches._pool.driver.urge(0, "retire")
    while not loader.stats()["recycled"]:
        got.append(next(found))
    assert len(got) < 15, "thirty were ordered"
    assert torch.equal(torch.stack([*got, *found]), torch.stack(expected))


class SaysWhenItBegins(Slow):
    """Takes half a second for each sample, and says that it has begun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        (self.folder / str(index)).touch()
        time.sleep(0.5)
        return torch.tensor(index)


def test_a_wish_that_is_heard_after_the_last_order_does_not_wait_for_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Or an order to give back memory would wake it.
    monkeypatch.setattr("holdfast.engine.upkeep.IDLE_SECONDS", 1e9)
    monkeypatch.setattr(
        "holdfast.limits.gauge.read", lambda roots: MemoryReading(16 << 30, 15 << 30)
    )
    loader = holdfast.DataLoader(SaysWhenItBegins(tmp_path), num_workers=1, prefetch_factor=1)
    batches = iter(loader)
    assert int(next(batches)) == 0
    assert eventually(lambda: (tmp_path / "1").exists())
    with batches._pool.lock:
        assert batches._pool.driver.urge(0, "retire")
    assert eventually(lambda: loader.stats()["recycled"] == 1), "without a next() in between"
    assert int(next(batches)) == 1
    loader.close()
