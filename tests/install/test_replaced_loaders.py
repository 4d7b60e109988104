"""A loader of ours that Accelerate makes another of; here without Accelerate itself, whose own tests are in
`tests/frameworks`."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data

import holdfast
from holdfast.takeover import replaced_loaders
from tests.support.datasets import Numbers, Stream

AS_ACCELERATE_DOES = """
from torch.utils.data import DataLoader, IterableDataset

class DataLoaderAdapter:
    def __init__(self, dataset, use_stateful_dataloader=False, **kwargs):
        self.use_stateful_dataloader = use_stateful_dataloader
        self.base_dataloader = "torchdata's" if use_stateful_dataloader else DataLoader(dataset, **kwargs)

def prepare_data_loader(dataloader, shard=None, stateful=False):
    if isinstance(dataloader.dataset, IterableDataset):  # another dataset: only the caller knows whose it was
        dataset = shard or dataloader.dataset
        return DataLoaderAdapter(dataset, batch_size=dataloader.batch_size, prefetch_factor=dataloader.prefetch_factor,
                                 num_workers=dataloader.num_workers)
    return DataLoaderAdapter(dataloader.dataset, use_stateful_dataloader=stateful,
                             batch_sampler=dataloader.batch_sampler, num_workers=dataloader.num_workers)

def skip_first_batches(dataloader, num_batches=0):
    inner = getattr(dataloader, "base_dataloader", dataloader)
    if isinstance(dataloader, DataLoaderAdapter):
        return DataLoaderAdapter(inner.dataset, batch_sampler=list(inner.batch_sampler)[num_batches:])
    return DataLoader(inner.dataset, batch_sampler=list(inner.batch_sampler)[num_batches:])

class Accelerator:
    use_stateful_dataloader = False

    def prepare(self, loader):
        assert not getattr(loader, "_is_accelerate_prepared", False)
        return prepare_data_loader(loader, stateful=self.use_stateful_dataloader)
"""


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imported after the first loader of ours was made, unless a test makes one first."""
    replaced_loaders._said.clear()
    module = types.ModuleType("accelerate.data_loader")
    exec(AS_ACCELERATE_DOES, module.__dict__)
    monkeypatch.setitem(sys.modules, "accelerate.data_loader", module)
    return module


@pytest.fixture(autouse=True)
def torchs_own_afterwards() -> Iterator[None]:
    yield
    holdfast.uninstall()


def options(loader: Any) -> tuple[Any, ...]:
    return loader.name, loader.stall_timeout, loader.on_bad_sample, loader._prefetch_given


def test_a_loader_that_stands_for_ours_is_ours_with_its_options(
    accelerate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = holdfast.DataLoader(
        Numbers(8), batch_size=2, name="train", stall_timeout=8, on_bad_sample="skip"
    )
    prepared = accelerate.Accelerator().prepare(loader)
    skipped = accelerate.skip_first_batches(prepared, 1)
    directly = accelerate.skip_first_batches(loader, 3)
    found = [prepared.base_dataloader, skipped.base_dataloader, directly]
    for one in found:
        assert type(one) is holdfast.DataLoader
        assert options(one) == options(loader)
    assert [[batch.tolist() for batch in one] for one in found[1:]] == [
        [[2, 3], [4, 5], [6, 7]],
        [[6, 7]],
    ]
    assert not caplog.records


def test_one_with_another_dataset_is_ours_too(accelerate: Any) -> None:
    loader = holdfast.DataLoader(Stream(8), num_workers=1, prefetch_factor=4, name="stream")
    made = accelerate.prepare_data_loader(loader, Stream(4)).base_dataloader
    assert (type(made), made.name, made._prefetch_given) == (holdfast.DataLoader, "stream", True)


def test_a_loader_that_was_made_before_accelerate_was_imported_is_ours_when_it_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = holdfast.DataLoader(Numbers(4), name="early")
    module = types.ModuleType("accelerate.data_loader")
    exec(AS_ACCELERATE_DOES, module.__dict__)
    monkeypatch.setitem(sys.modules, "accelerate.data_loader", module)
    made = module.Accelerator().prepare(loader).base_dataloader
    assert (type(made), made.name) == (holdfast.DataLoader, "early")


def test_loaders_of_others_stay_what_they_are(accelerate: Any) -> None:
    ours = holdfast.DataLoader(Numbers(4))
    theirs = torch.utils.data.DataLoader(Numbers(4))
    made = accelerate.prepare_data_loader(theirs).base_dataloader
    assert type(made) is torch.utils.data.DataLoader
    assert isinstance(made, accelerate.DataLoader)
    assert isinstance(ours, accelerate.DataLoader)
    assert issubclass(holdfast.DataLoader, accelerate.DataLoader)
    assert not isinstance(accelerate, accelerate.DataLoader)
    assert type(pickle.loads(pickle.dumps(made))) is torch.utils.data.DataLoader


def test_a_stateful_one_is_ours_and_theirs_stays_torchdatas(
    accelerate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    accelerate.Accelerator.use_stateful_dataloader = True
    prepared = accelerate.Accelerator().prepare(holdfast.DataLoader(Numbers(4), name="train"))
    assert (type(prepared.base_dataloader), prepared.base_dataloader.name) == (
        holdfast.DataLoader,
        "train",
    )
    assert prepared.use_stateful_dataloader  # Accelerate saves its state
    theirs = accelerate.Accelerator().prepare(torch.utils.data.DataLoader(Numbers(4)))
    assert theirs.base_dataloader == "torchdata's"
    assert not caplog.records


def test_an_accelerate_in_which_it_cannot_be_kept_is_said(
    accelerate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = holdfast.DataLoader(Numbers(4), name="train")
    del accelerate.DataLoader
    with pytest.raises(NameError):
        accelerate.Accelerator().prepare(loader)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "[train] Accelerate replaces this holdfast loader by torch's own: workers are not replaced"
    )
    assert "holdfast.install() at the beginning" in record.getMessage()


def test_nothing_is_said_if_another_module_looks_at_the_attribute(
    accelerate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = holdfast.DataLoader(Numbers(4))
    for name in dir(loader):
        getattr(loader, name)
    assert not caplog.records
    assert loader._is_accelerate_prepared is False
    loader._is_accelerate_prepared = True
    assert loader._is_accelerate_prepared is True
