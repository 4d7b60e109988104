"""Worker threads make the batches of worker processes, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.data

from holdfast import DataLoader, PoisonSample, WorkerLost
from holdfast.engine.events import Limits
from holdfast.threads import thread_method
from tests.support.fingerprint import fingerprint
from tests.threads.datasets import Drawing, Gate, NotThreadSafe, OwnGenerator, Plain, Stream

STALL = 0.25


def batches(kind: Any, dataset: Any, epochs: int = 2, **options: Any) -> list[Any]:
    torch.manual_seed(11)
    options = {"batch_size": 4, "num_workers": 2, **options}
    loader = kind(dataset, **options)
    return [fingerprint(batch) for _ in range(epochs) for batch in loader]


def by_threads(dataset: Any, **options: Any) -> list[Any]:
    return batches(DataLoader, dataset, worker_method="thread", **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"persistent_workers": True, "shuffle": True},
        {"batch_size": None, "num_workers": 3},
        {"drop_last": True, "batch_size": 7, "prefetch_factor": 3},
        {"on_bad_sample": "replace"},
    ],
    ids=str,
)
def test_map_style(options: dict[str, Any]) -> None:
    expected = batches(DataLoader, Drawing(), **options)
    assert by_threads(Drawing(), **options) == expected


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=str)
def test_streams_in_shards(options: dict[str, Any]) -> None:
    assert by_threads(Stream(), **options) == batches(DataLoader, Stream(), **options)


def test_as_torchs_workers_without_randomness() -> None:
    expected = batches(torch.utils.data.DataLoader, Plain())
    assert by_threads(Plain()) == expected
    assert sorted(map(repr, by_threads(Plain(), in_order=False))) == sorted(map(repr, expected))


def test_a_dataset_that_is_not_thread_safe_is_copied_for_each_worker() -> None:
    assert by_threads(NotThreadSafe()) == batches(DataLoader, NotThreadSafe())
    both = torch.utils.data.ConcatDataset([NotThreadSafe(), Plain(0)])
    assert thread_method.is_thread_safe(torch.utils.data.Subset(both, [0])) is False
    own, length = NotThreadSafe(), len(NotThreadSafe())
    stack = torch.utils.data.StackDataset
    assert thread_method.is_thread_safe(stack(Plain(length), own)) is False
    assert thread_method.is_thread_safe(stack(a=own, b=Plain(length))) is False
    assert thread_method.is_thread_safe(OwnGenerator()) is None


@pytest.mark.parametrize("kind", [Drawing, Stream])
def test_a_thread_that_hangs_is_replaced_and_nothing_is_lost(kind: Any) -> None:
    gate = Gate(9, 22)
    dataset = kind(gate=gate)
    torch.manual_seed(11)
    loader = DataLoader(
        dataset, batch_size=4, num_workers=2, worker_method="thread", stall_timeout=STALL
    )
    found = [fingerprint(batch) for _ in range(2) for batch in loader]
    stuck = [one for one in loader.incidents if one.sample in (9, 22) or kind is Stream]
    gate.open.set()
    assert found == by_threads(kind())
    assert len(stuck) >= 2
    assert {one.kind for one in stuck} == {"unkillable"}
    assert all("in enter" in one.stack and "holdfast-worker-" in one.stack for one in stuck)
    assert "cannot be ended, being a thread" in str(stuck[0])


def test_a_sample_that_hangs_alone_too_is_to_blame() -> None:
    gate = Gate(6, always=True)
    options: Any = {"batch_size": 4, "worker_method": "thread", "stall_timeout": STALL}
    loader = DataLoader(Drawing(12, gate), num_workers=1, **options)
    try:
        with pytest.raises(PoisonSample, match=r"sample 6 .*ended 2 workers in a row"):
            list(loader)
        loader = DataLoader(Drawing(12, gate), num_workers=1, on_bad_sample="skip", **options)
        with pytest.warns(UserWarning, match="sample 6"):
            assert [len(batch[0]) for batch in loader] == [4, 3, 4]
        assert [bad.kind for bad in loader.bad_samples] == ["stalled"]
    finally:
        gate.open.set()


def test_no_more_threads_are_abandoned_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_method, "LIMITS", Limits(killable=False, stuck=0))
    gate = Gate(6)
    loader = DataLoader(
        Drawing(12, gate), num_workers=1, worker_method="thread", stall_timeout=STALL
    )
    try:
        with pytest.raises(WorkerLost, match="0 may be abandoned at a time") as caught:
            list(loader)
        assert "datasets.py" in str(caught.value)
    finally:
        gate.open.set()
