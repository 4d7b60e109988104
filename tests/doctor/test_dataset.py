"""The checks of a dataset, on datasets with one complaint each."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from holdfast.autopsy.machine import Machine
from holdfast.autopsy.readers import filesystem, process
from holdfast.doctor import dataset as patient
from holdfast.doctor.check import Check, bad, good, warning
from holdfast.doctor.fingerprint import changed, fingerprint
from holdfast.doctor.probe import Samples
from holdfast.samples.source import SourceError
from tests.doctor import patients

GIB = 1 << 30
PLAN = patient.Plan(batch_size=16, num_workers=2, samples=8, seconds=0.1)
MACHINE = Machine(
    cpus=2,
    memory=process.Meminfo(64 * GIB, 50 * GIB, 0, 0),
    shm=filesystem.Fill(8 * GIB, 8 * GIB),
)


def examined(dataset: Any) -> dict[str, Check]:
    return {check.name: check for check in patient.examine(dataset, PLAN, MACHINE)}


def test_a_healthy_dataset_is_good_in_all_that_depends_on_it() -> None:
    checks = examined(patients.Healthy())
    del checks["workers"], checks["sample time"], checks["goes wrong first"]  # the machine's too
    assert {name: check.status for name, check in checks.items()} == dict.fromkeys(checks, "good")


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


def test_handles_that_workers_would_share_are_named(tmp_path: Path) -> None:
    opened = patients.Opened()
    try:
        check = patient.handles(opened)
        assert check.status == "bad"
        assert "dataset.file is an open file" in check.meaning
        assert "dataset.database is a database connection" in check.meaning
    finally:
        opened.close()
    assert "dataset.file" not in patient.handles(opened).meaning
    zipped = patients.Zipped(tmp_path / "a.zip")
    assert "dataset.inside['archive'] is an open zip archive" in patient.handles(zipped).meaning
    zipped.inside["archive"].close()
    dataset: Any = patients.Healthy()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset.table = file.create_dataset("x", data=np.zeros(3))
        assert "dataset.table is an open HDF5 file" in patient.handles(dataset).meaning
    assert patient.handles(patients.Healthy()).status == "good"


def test_generators_are_named() -> None:
    dataset: Any = patients.Healthy()
    dataset.choose = np.random.default_rng(1)
    assert patient.generators(dataset).status == "warning"
    dataset.stream = (number for number in range(5))
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


def test_memory_in_flight_is_reckoned_with_the_largest_sample() -> None:
    plan = patient.Plan(batch_size=10, num_workers=4, prefetch_factor=2)
    check = patient.in_flight(seen(nbytes=[1 << 20, 10 << 20]), plan, MACHINE)
    # torch: 4 × 2 batches of 100 MiB, and 4 being made; ours makes them in place
    assert "torch 1.2 GiB, holdfast 840 MiB" in check.meaning
    assert check.status == "good"
    tight = replace(MACHINE, memory=process.Meminfo(GIB, GIB, 0, 0))
    assert patient.in_flight(seen(nbytes=[10 << 20]), plan, tight).status == "warning"
    tighter = replace(tight, memory_limit=GIB // 2)
    assert patient.in_flight(seen(nbytes=[10 << 20]), plan, tighter).status == "bad"
    small = replace(MACHINE, shm=filesystem.Fill(64 << 20, 64 << 20))
    check = patient.in_flight(seen(nbytes=[10 << 20]), plan, small)
    assert "/dev/shm" in check.meaning
    assert check.status == "warning"


def test_workers_that_do_not_fit_are_bad() -> None:
    tight = replace(MACHINE, memory=process.Meminfo(GIB, GIB, 0, 0))
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
    check = patient.saturation(rates, replace(PLAN, num_workers=workers))
    assert check.status == status
    assert words in check.meaning


def test_spread_is_noticed() -> None:
    assert patient.sample_times(seen(seconds=[5.0, 0.01, 0.01, 0.01])).status == "good"  # the first
    assert patient.sample_times(seen(seconds=[0.01, 0.01, 0.01, 0.5])).status == "warning"
    assert patient.sample_sizes(seen(nbytes=[1 << 20, 1 << 20, 100 << 20])).status == "warning"


def test_the_worst_comes_first_then_the_most_likely() -> None:
    checks = [warning("containers", ""), bad("in flight", ""), good("samples", "")]
    assert "memory ends while batches wait" in patient.first_trouble(checks).meaning
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


@pytest.mark.parametrize("name", ["healthy", "Healthy", "make"])
def test_a_dataset_a_class_and_a_function_are_found(name: str) -> None:
    assert isinstance(patient.find(f"tests.doctor.patients:{name}", {}), patients.Healthy)


def test_a_function_is_given_what_it_needs() -> None:
    assert isinstance(
        patient.find("tests.doctor.patients:needs", {"argument": 1}), patients.Healthy
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("tests.doctor.patients", "names nothing"),
        ("tests.doctor.nobody:x", "there is no module 'tests.doctor.nobody'"),
        ("tests.doctor.patients:nothing", "has no 'nothing'"),
        ("tests.doctor.patients:number", "is of type int: expected a dataset"),
        ("tests.doctor.patients:EMPTY", "its length is 0"),
    ],
)
def test_what_cannot_be_examined_is_said(spec: str, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        patient.find(spec, {})
