"""The checks of a dataset, on datasets with one complaint each."""

from __future__ import annotations

import csv
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.autopsy.machine_facts import MachineFacts
from holdfast.autopsy.readers import procfs
from holdfast.doctor import dataset_checks as patient
from holdfast.doctor.dataset_changes import changed, fingerprint
from holdfast.doctor.findings import Check, bad, good, warning
from holdfast.doctor.open_handles import open_handles
from holdfast.doctor.probe import (
    Samples,
    ThreadGains,
    gain_of_two_threads,
    load_samples,
    rate,
    spread,
)
from holdfast.limits.gauge import MemoryReading
from holdfast.scan.dataset_source import SourceError, any_dataset, dataset
from tests.doctor import patients

GIB = 1 << 30
PLAN = patient.LoadingPlan(batch_size=16, num_workers=2, samples=8, seconds=0.1)
MACHINE = MachineFacts(
    cpus=2,
    memory=procfs.Meminfo(64 * GIB, 50 * GIB, 0, 0),
    shm=procfs.Fill(8 * GIB, 8 * GIB),
)
ROOM = MemoryReading(limit=64 * GIB, free=50 * GIB)


def examined(dataset: Any) -> dict[str, Check]:
    return {check.name: check for check in patient.examine(dataset, PLAN, MACHINE, ROOM)}


def test_a_healthy_dataset_is_good_in_all_that_depends_on_it() -> None:
    checks = examined(patients.Healthy())
    del checks["workers"], checks["sample time"], checks["goes wrong first"]  # the machine's too
    assert {name: check.status for name, check in checks.items()} == dict.fromkeys(checks, "good")


QUIET, CROWDED = (1.9, 0.5), (1.1, 0.5)  # what a calculation gains, and the load
WAITS, DECODES = 0.0, 1.0  # the part of the time on a processor


@pytest.mark.parametrize(
    ("samples", "machine", "busy", "words"),
    [
        (1.9, QUIET, DECODES, ["worker_method='thread' would do. Nothing is pickled"]),
        (1.9, CROWDED, WAITS, ["worker_method='thread' would do. Nothing is pickled"]),
        (1.0, QUIET, DECODES, ["processes: two threads load 1.0 times", "lock is held"]),
        (0.9, CROWDED, DECODES, ["cannot be told: two threads load 0.9 times"]),
        (1.8, (1.9, 9.0), DECODES, ["cannot be told: two threads load 1.8 times", "9.0 programs"]),
    ],
    ids=["decodes", "waits", "Python", "busy", "very busy"],
)
def test_a_worker_method_is_recommended_from_what_two_threads_gain_unless_the_machine_is_busy(
    samples: float,
    machine: tuple[float, float],
    busy: float,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patient, "gain_of_two_threads", lambda *_: ThreadGains(samples, *machine))
    meaning = recommended(patient.pickles(1), busy)
    assert all(one in meaning for one in words), meaning


def recommended(pickling: Check, busy: float = 1.0, nbytes: int = 4, collate_fn: Any = None) -> str:
    seen = Samples("fork", seconds=[1.0], busy=[busy], nbytes=[nbytes])
    plan = replace(PLAN, collate_fn=collate_fn)
    return patient.worker_method([1], plan, pickling, seen, lambda _: None).meaning


def test_that_threads_need_no_pickling_and_what_large_batches_of_an_own_collate_fn_cost_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patient, "gain_of_two_threads", lambda *_: ThreadGains(2.0, 2.0))
    assert "it cannot be pickled, which is no matter" in recommended(patient.pickles(lambda: 1))
    large: dict[str, Any] = {"pickling": patient.pickles(1), "nbytes": 4 << 20}
    assert "its batches have 64 MiB" in recommended(**large, collate_fn=torch.stack)
    assert "its batches have" not in recommended(**large)


@pytest.mark.parametrize("kind", [patients.Waiting, patients.Calculating])
def test_what_two_threads_gain_is_measured_in_a_worker(kind: Any) -> None:
    gain = gain_of_two_threads(kind(), 4)
    assert gain.samples > 0
    assert gain.possible > 0


@pytest.mark.parametrize(
    ("seconds", "busy", "nbytes", "words"),
    [
        (0.01, 0.01, 600_000, "'ray' pays if"),
        (0.001, 0.001, 600_000, "'ray' would not pay"),
        (0.05, 0.001, 400, "mostly waiting"),
    ],
    ids=["decodes", "copies", "waits"],
)
def test_other_machines_are_recommended_if_making_a_batch_takes_far_longer_than_receiving_it(
    seconds: float, busy: float, nbytes: int, words: str
) -> None:
    seen = Samples("fork", seconds=[seconds], busy=[busy], nbytes=[nbytes])
    assert words in patient.other_machines(PLAN, patient.pickles(1), seen).meaning
    lock = patient.pickles(lambda: 1)
    assert "cannot be pickled" in patient.other_machines(PLAN, lock, seen).meaning


@pytest.mark.slow
@pytest.mark.parametrize("crashing", [250, 3], ids=["loaded", "met later"])
def test_processes_are_recommended_for_samples_that_crash(crashing: int) -> None:
    checks = examined(patients.Crashing(crashing))
    assert "a thread that crashes ends the program" in checks["worker method"].meaning
    assert checks["goes wrong first"].status == "bad"
    assert "ends its worker" in checks["goes wrong first"].meaning


@pytest.mark.parametrize("size", [1, 31, 32, 33, 63, 64, 1000])
def test_samples_are_taken_from_all_of_the_dataset(size: int) -> None:
    taken = spread(range(size), 32)
    assert len(taken) == len(set(taken)) == min(size, 32)
    ends = [*taken, size]
    steps = [after - before for before, after in itertools.pairwise(ends)]
    assert taken[0] == 0
    assert max(steps) - min(steps) <= 1


@pytest.mark.slow
def test_what_a_sample_changes_is_named_and_happens_in_the_worker_only() -> None:
    dataset = patients.Counting()
    checks = examined(dataset)
    for name in (
        "dataset.cache",
        "dataset.calls",
        "dataset.generator",
        "patients.COUNTED",
        "patients.TOTAL",
    ):
        assert name in checks["state"].meaning
    assert "dataset.data" not in checks["state"].meaning
    assert dataset.calls == 0
    assert patients.TOTAL == 0
    assert checks["generators"].status == "warning"


def test_a_sample_that_raises_is_quoted_and_ends_the_trial() -> None:
    checks = examined(patients.Raising())
    assert checks["samples"].status == "bad"
    assert checks["samples"].meaning == "sample 0: ValueError: broken file 0.jpg"
    assert checks["goes wrong first"].status == "bad"
    assert "in flight" not in checks


def test_what_does_not_pickle_is_named_and_only_forked() -> None:
    checks = examined(patients.Unpicklable())
    assert "dataset.transform (builtins.function)" in checks["pickling"].meaning
    assert "spawned: not possible" in checks["worker cost"].meaning


@pytest.mark.slow
def test_an_iterable_dataset_is_tried_too() -> None:
    checks = examined(patients.Streaming())
    assert checks["samples"].meaning == "8 loaded in a worker without an error"


# -- by looking ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", patients.SHARING)
def test_handles_that_workers_would_share_are_named(name: str, tmp_path: Path) -> None:
    make, expected = patients.SHARING[name]
    dataset = make(tmp_path)
    try:
        assert open_handles(dataset) == expected
        assert patient.handles(dataset).status == "bad"
    finally:
        dataset.close()
    assert open_handles(dataset) == []


@pytest.mark.parametrize("name", patients.SPARED)
def test_what_workers_may_share_is_no_complaint(name: str, tmp_path: Path) -> None:
    assert open_handles(patients.SPARED[name](tmp_path)) == []


def test_generators_are_named() -> None:
    dataset: Any = patients.Healthy()
    dataset.choose = np.random.default_rng(1)
    assert patient.generators(dataset).status == "warning"
    begun = (number for number in range(5))
    for stream in (begun, iter([1]), map(str, [1]), csv.reader(["a,b"])):
        dataset.stream = stream
        check = patient.generators(dataset)
        assert check.status == "bad"
        assert "dataset.stream" in check.meaning


def test_tensors_elsewhere_than_on_the_cpu_are_named() -> None:
    assert patient.accelerator_tensors(patients.Healthy()).status == "good"

    class OnAnotherDevice(torch.Tensor):
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    dataset: Any = patients.Healthy()
    dataset.tables = {"a": torch.zeros(2).as_subclass(OnAnotherDevice)}
    check = patient.accelerator_tensors(dataset)
    assert check.status == "bad"
    assert "dataset.tables['a'] (cuda:0)" in check.meaning


def test_large_containers_are_counted_for_all_workers() -> None:
    dataset = patients.Listed()
    check = patient.containers(dataset, PLAN)
    assert check.status == "warning"
    assert "dataset.paths: list of 900,000" in check.meaning
    assert "holdfast.pack" in check.command


# -- judgement without a process -------------------------------------------------------------


def seen(**changes: Any) -> Samples:
    figures: dict[str, Any] = {
        "seconds": [0.01] * 8,
        "nbytes": [1 << 20] * 8,
        "private": [8 << 20] * 9,
    }
    return Samples("fork", **{**figures, **changes})


@pytest.mark.filterwarnings("error")
def test_to_measure_with_more_workers_than_cores_is_no_reason_for_torchs_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert rate(patients.Healthy(), 4, 2, 0.01, None) > 0


def test_memory_in_flight_is_reckoned_with_the_largest_sample() -> None:
    plan = patient.LoadingPlan(batch_size=10, num_workers=4, prefetch_factor=2)
    check = patient.in_flight(seen(nbytes=[1 << 20, 10 << 20]), plan, MACHINE, ROOM)
    # torch: 4 × 2 batches of 100 MiB, and 4 being made; ours makes them in place
    assert "torch 1.2 GiB, holdfast 840 MiB (memory_budget: 12 GiB)" in check.meaning
    assert check.status == "good"
    small = replace(MACHINE, shm=procfs.Fill(64 << 20, 64 << 20))
    check = patient.in_flight(seen(nbytes=[10 << 20]), plan, small, ROOM)
    assert "/dev/shm" in check.meaning
    assert check.status == "warning"


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("auto", 2 * 100 + 40),  # 25 % of 1 GiB, less what workers begin with: two of 100 MiB
        (250 << 20, 2 * 100 + 40),
        (1, 100 + 40),  # one that is larger passes alone
        (None, 8 * 100 + 40),  # prefetch_factor alone
    ],
)
def test_our_memory_in_flight_is_what_the_budget_lets_through(budget: Any, expected: int) -> None:
    plan = patient.LoadingPlan(10, 4, 2, budget)
    room = MemoryReading(limit=4 * GIB, free=GIB)
    check = patient.in_flight(seen(nbytes=[10 << 20]), plan, MACHINE, room)
    assert f"torch 1.2 GiB, holdfast {expected} MiB" in check.meaning
    assert check.status == "warning"
    assert ("too much for torch's loader" in check.meaning) is (expected < 500)


def test_less_is_in_flight_where_memory_is_short_already() -> None:
    plan = patient.LoadingPlan(batch_size=10, num_workers=4, prefetch_factor=2)
    room = MemoryReading(limit=20 * GIB, free=GIB // 2)  # nearly full: a sixteenth of the rest
    check = patient.in_flight(seen(), plan, MACHINE, room)
    assert "torch 120 MiB, holdfast 34 MiB" in check.meaning


def test_a_batch_that_does_not_fit_is_bad() -> None:
    plan = patient.LoadingPlan(batch_size=10, num_workers=4)
    room = MemoryReading(limit=GIB, free=GIB // 16)
    assert patient.in_flight(seen(nbytes=[10 << 20]), plan, MACHINE, room).status == "bad"


def test_workers_that_do_not_fit_are_bad() -> None:
    tight = MemoryReading(limit=2 * GIB, free=GIB)
    fat = seen(private=[100 << 20, 600 << 20])
    assert patient.worker_cost(fat, None, PLAN, tight).status == "bad"
    assert patient.worker_cost(seen(private=[400 << 20]), None, PLAN, tight).status == "warning"


@pytest.mark.parametrize(
    ("rates", "workers", "status", "words"),
    [
        ({1: 100.0, 2: 195.0, 4: 200.0}, 4, "good", "2 saturate this machine"),
        ({1: 100.0, 2: 101.0}, 8, "warning", "1 saturates this machine; 8 only cost memory"),
        ({1: 100.0, 2: 200.0, 4: 390.0}, 4, "good", "4 saturate this machine"),
        ({}, 4, "warning", "no rate"),
    ],
)
def test_as_many_workers_as_help(
    rates: dict[int, float], workers: int, status: str, words: str
) -> None:
    check = patient.saturation(patient.Rates(rates), replace(PLAN, num_workers=workers))
    assert check.status == status
    assert words in check.meaning


def test_what_stopped_the_measuring_is_said() -> None:
    broken = patient.saturation(patient.Rates({}, error="lmdb.ReadersFullError: full"), PLAN)
    assert broken.meaning == "no rate could be measured: lmdb.ReadersFullError: full"
    later = patient.saturation(patient.Rates({1: 10.0}, error="OSError: no more"), PLAN)
    assert later.meaning.endswith("1 saturates this machine. With more workers: OSError: no more")
    assert later.status == "warning"


def test_samples_that_cannot_be_put_together_are_measured_without() -> None:
    rates = patient.measure_rates(patients.Ragged(), PLAN, MACHINE, lambda _: None)
    assert "stack expects each tensor to be equal size" in rates.uncollated
    assert rates.by_workers[1] > 0
    check = patient.saturation(rates, PLAN)
    assert "without collating" in check.meaning
    batches = patient.collation(rates)
    assert batches.status == "warning"
    assert "stack expects each tensor to be equal size" in batches.meaning
    assert "collate_fn" in batches.command
    assert "the first batch fails" in patient.first_trouble([check, batches]).meaning


def test_a_cost_that_could_not_be_measured_is_not_good() -> None:
    unseen = patient.worker_cost(seen(private=[]), None, PLAN, ROOM)
    assert unseen.status == "warning"
    assert "could not be measured" in unseen.meaning


def test_a_crash_is_told_by_its_cause_and_ends_nothing_else() -> None:
    found = load_samples(patients.Crashing(), 8, "fork")
    assert found.error == "sample 250: the worker crashed with a segmentation fault (SIGSEGV)"
    assert found.remedy == "holdfast explain native-segv"
    assert len(found.seconds) == 5


def test_what_is_opened_or_built_when_first_used_is_no_state(tmp_path: Path) -> None:
    found = load_samples(patients.Lazy(tmp_path), 8, "fork")
    assert found.error == ""
    assert found.changed == []


def test_state_is_seen_wherever_it_lies() -> None:
    found = load_samples(patients.Remembering(), 8, "fork")
    assert found.changed == [
        "Remembering.of_the_class",
        "Remembering.remember.<defaults>[0]",
        "dataset.array",
        "dataset.in_the_middle",
        "dataset.tensor",
        "tests.doctor.patients.cached",
    ]


@pytest.mark.parametrize("count", [0, 3])
def test_a_short_stream_ends_without_an_error(count: int) -> None:
    found = load_samples(patients.Short(count), 8, "fork")
    assert (found.error, len(found.seconds)) == ("", count)
    assert patient.loads(found, None).status == ("good" if count else "bad")


def test_spread_is_noticed() -> None:
    assert patient.sample_times(seen(seconds=[5.0, 0.01, 0.01, 0.01])).status == "good"  # the first
    assert patient.sample_times(seen(seconds=[0.01, 0.01, 0.01, 0.5])).status == "warning"
    assert patient.sample_sizes(seen(nbytes=[1 << 20, 1 << 20, 100 << 20])).status == "warning"


def test_the_worst_comes_first_then_the_most_likely() -> None:
    checks = [warning("containers", ""), bad("in flight", ""), good("samples", "")]
    assert "memory runs out while batches wait" in patient.first_trouble(checks).meaning
    assert "copy the dataset" in patient.first_trouble(checks[:1]).meaning
    assert patient.first_trouble([]).status == "good"


def test_changes_are_seen_in_every_kind_of_state() -> None:
    dataset: Any = patients.Healthy()
    dataset.list, dataset.dict, dataset.set = [1], {}, set()
    dataset.array, dataset.tensor = np.zeros(3), torch.zeros(3)
    dataset.random, dataset.numpy = random.Random(1), np.random.default_rng(1)
    dataset.torch, dataset.text, dataset.same = torch.Generator(), "a", [1, 2, 3]
    before = fingerprint(dataset)
    assert changed(before, fingerprint(dataset)) == []
    dataset.list[0] = object()
    dataset.dict["a"] = 1
    dataset.set.add(1)
    dataset.array[0] = dataset.tensor[0] = 1
    dataset.random.random()
    dataset.numpy.random()
    torch.rand(1, generator=dataset.torch)
    dataset.text += "b"
    dataset.new = None
    names = ["array", "dict", "list", "new", "numpy", "random", "set", "tensor", "text", "torch"]
    assert changed(before, fingerprint(dataset)) == [f"dataset.{name}" for name in names]


# -- finding it ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["healthy", "Healthy", "make", "loader"])
def test_a_dataset_a_class_a_function_and_a_loader_are_found(name: str) -> None:
    found = any_dataset(f"tests.doctor.patients:{name}", {})
    assert isinstance(found.dataset, patients.Healthy)
    assert isinstance(dataset(f"tests.doctor.patients:{name}", {}), patients.Healthy)
    if name == "loader":
        assert found.settings["batch_size"] == 7
        assert found.settings["memory_budget"] == GIB


def test_a_function_is_given_what_it_needs() -> None:
    found = any_dataset("tests.doctor.patients:needs", {"argument": 1})
    assert isinstance(found.dataset, patients.Healthy)


@pytest.mark.parametrize(
    ("spec", "given", "words"),
    [
        ("tests.doctor.patients", {}, "names nothing"),
        ("tests.doctor.nobody:x", {}, "there is no module 'tests.doctor.nobody'"),
        ("tests.doctor.patients:nothing", {}, "has no 'nothing'"),
        ("tests.doctor.patients:number", {}, "is of type int: expected a dataset"),
        ("tests.doctor.patients:EMPTY", {}, "its length is 0"),
        (
            "tests.doctor.patients:needs",
            {},
            "missing a required argument: 'argument'. Give arguments as",
        ),
        ("tests.doctor.patients:needs", {"root": 1}, "--arg name=value"),
        ("tests.doctor.patients:healthy", {"root": 1}, "--arg root= cannot be passed to anything"),
    ],
)
def test_what_cannot_be_examined_is_said(spec: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises(SourceError, match=words):
        any_dataset(spec, given)
