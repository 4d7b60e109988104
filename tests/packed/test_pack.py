"""What `pack` finds, replaces, and leaves alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import holdfast
from holdfast import PackedDict, PackedList
from holdfast.packed import large_containers
from holdfast.packed.mutation import changes


def records(count: int = 20_000) -> list[tuple[str, int]]:
    return [(f"/data/{number:07d}.jpg", number % 10) for number in range(count)]


class Images(Dataset[Any]):
    def __init__(self) -> None:
        self.samples = records()
        self.targets = [label for _, label in self.samples]
        self.imgs = self.samples  # as torchvision has it
        self.captions = {path: f"caption of {path}" for path, _ in self.samples}
        self.small = ["a", "b"]
        self.weights = np.zeros(1_000_000)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        return self.captions[path], label


def test_large_containers_are_replaced_and_the_rest_is_left() -> None:
    dataset = Images()
    before = dataset[77]
    report = holdfast.pack(dataset, minimum=100_000)
    assert isinstance(dataset.samples, PackedList)
    assert dataset.imgs is dataset.samples
    assert isinstance(dataset.captions, PackedDict)
    assert type(dataset.targets) is list  # ten numbers again and again: ten reference counts
    assert type(dataset.small) is list
    assert dataset[77] == before
    assert not report.refused
    assert 0 < report.saved < sum(one.before for one in report.packed)
    assert "dataset.samples = dataset.imgs: list of 20,000" in str(report)
    assert "in every worker" in str(report)


def test_it_finds_datasets_inside_datasets() -> None:
    first, second = Images(), Images()
    whole = ConcatDataset([Subset(first, range(100)), second])
    report = holdfast.pack(whole)
    assert isinstance(first.samples, PackedList)
    assert isinstance(second.samples, PackedList)
    paths = [one.path for one in report.packed]
    assert "dataset.datasets[0].dataset.samples = dataset.datasets[0].dataset.imgs" in paths


class Splits(Dataset[Any]):
    def __init__(self) -> None:
        self.parts = {"train": records(), "test": records(10)}

    def __getitem__(self, index: int) -> Any:
        return self.parts["train"][index]


def test_it_looks_into_small_containers() -> None:
    dataset = Splits()
    report = holdfast.pack(dataset)
    assert [one.path for one in report.packed] == ["dataset.parts['train']"]
    assert isinstance(dataset.parts["train"], PackedList)


class Appending(Images):
    def __getitem__(self, index: int) -> Any:
        self.samples.append(("x", 1))


class Assigning(Images):
    def __getitem__(self, index: int) -> Any:
        self.samples[index] = ("x", 1)


class Shuffling(Images):
    def set_epoch(self, epoch: int) -> None:
        random.Random(epoch).shuffle(self.samples)


class ThroughAName(Images):
    def __getitem__(self, index: int) -> Any:
        mine = self.samples
        mine[index] = ("x", 1)


class InALoop(Images):
    def clean(self) -> None:
        for record in self.samples:
            record[0] += "x"  # type: ignore[index]


@pytest.mark.parametrize("kind", [Appending, Assigning, Shuffling, ThroughAName, InALoop])
def test_what_the_datasets_own_methods_change_stays_a_list(kind: type[Images]) -> None:
    dataset = kind()
    report = holdfast.pack(dataset)
    assert type(dataset.samples) is list
    (refused,) = [one for one in report.refused if "dataset.samples" in one.path]
    assert f"{kind.__name__}." in refused.reason
    assert "changes it (line" in refused.reason
    assert isinstance(dataset.captions, PackedDict)


class Asking(Images):
    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        if isinstance(path, str) and isinstance(self.samples, list):
            return path
        return label


def test_what_is_asked_for_its_type_stays_what_it_is() -> None:
    dataset = Asking()
    (refused,) = holdfast.pack(dataset).refused
    assert "Asking.__getitem__ asks for its type (line" in refused.reason
    assert "isinstance(self.samples, list)" in refused.reason
    assert type(dataset.samples) is list


def test_reading_is_not_changing() -> None:
    assert "captions" not in changes(Images)
    assert "samples" not in changes(Images)


def test_what_somebody_else_holds_is_left_with_a_word_who() -> None:
    dataset = Images()
    elsewhere = {"mine": dataset.captions}
    report = holdfast.pack(dataset)
    (refused,) = report.refused
    assert refused.path == "dataset.captions"
    assert "under 'mine'" in refused.reason
    assert type(dataset.captions) is dict
    trusted = holdfast.pack(dataset, trust=["dataset.captions"])
    assert [one.path for one in trusted.packed] == ["dataset.captions"]
    assert elsewhere["mine"] == dataset.captions


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number


class Odd(Dataset[Any]):
    def __init__(self) -> None:
        self.things = [Thing(number) for number in range(20_000)]
        self.names = {str(number) for number in range(20_000)}
        self.pairs = tuple(records())
        self.arrays = [np.zeros(1_000_000) for _ in range(3)]
        self.objects = np.array([str(number) for number in range(40_000)], object)
        self.keyed = {Thing(number): number for number in range(20_000)}

    def __getitem__(self, index: int) -> Any:
        return index


def test_what_has_no_safe_form_is_left_with_the_reason() -> None:
    dataset = Odd()
    report = holdfast.pack(dataset)
    assert not report.packed
    reasons = {one.path: one.reason for one in report.refused}
    for name, word in {
        "things": "unpickled at every access",
        "names": "a set has no packed form",
        "pairs": "it is a tuple",
        "objects": "array of Python objects",
        "keyed": "keys of a PackedDict",
    }.items():
        assert word in reasons[f"dataset.{name}"]
    kinds = {name: type(value) for name, value in vars(dataset).items()}
    assert kinds == {name: type(value) for name, value in vars(Odd()).items()}


class Fixed(Dataset[Any]):
    def __init__(self) -> None:
        self.__dict__["samples"] = records()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is fixed")

    def __getitem__(self, index: int) -> Any:
        return index


def test_an_attribute_that_cannot_be_set_stays() -> None:
    dataset = Fixed()
    report = holdfast.pack(dataset)
    assert "cannot be set: samples is fixed" in report.refused[0].reason
    assert type(vars(dataset)["samples"]) is list


def test_code_that_cannot_be_read_is_not_trusted_unless_you_say_so() -> None:
    space: dict[str, Any] = {"records": records, "__name__": "typed"}
    exec(
        "class Typed:\n  def __init__(self): self.samples = records()\n  def look(self): pass",
        space,
    )
    dataset = space["Typed"]()
    report = holdfast.pack(dataset)
    assert "cannot be read" in report.refused[0].reason
    assert holdfast.pack(dataset, trust="dataset.samples").packed


def test_a_path_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"trust=\['dataset.x'\].*dataset.samples"):
        holdfast.pack(Images(), trust=["dataset.x"])


def test_items_that_can_be_changed_are_noted() -> None:
    class Boxes(Dataset[Any]):
        def __init__(self) -> None:
            self.boxes = [{"box": [1.0, number * 1.0]} for number in range(20_000)]

    report = holdfast.pack(Boxes())
    assert "a new dict" in report.packed[0].note


def test_nothing_to_do_is_said() -> None:
    assert str(holdfast.pack(torch.utils.data.TensorDataset(torch.zeros(3)))).startswith("nothing")


def test_the_loader_says_once_what_a_dataset_would_save(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_containers, "_WORTH_A_WORD", 1 << 20)
    monkeypatch.setattr(large_containers, "_ALWAYS_WORTH_A_WORD", 0)  # whatever is available
    loader = holdfast.DataLoader(Images(), batch_size=10_000, num_workers=2)
    for _ in range(2):
        list(loader)
    (record,) = caplog.records
    assert "in dataset.captions, dataset.samples = dataset.imgs:" in record.getMessage()
    assert "for 2 workers" in record.getMessage()
    caplog.clear()
    dataset = Images()
    holdfast.pack(dataset)
    list(holdfast.DataLoader(dataset, batch_size=10_000, num_workers=2))
    assert not caplog.records


def test_a_small_share_of_memory_is_not_worth_a_word() -> None:
    dataset = Images()
    assert large_containers.advice(dataset, 8, 64 << 30) is None
    words = large_containers.advice(dataset, 1000, 1 << 30)
    assert words is not None
    assert "for 1000 workers" in words
    assert "PackedList(dataset)" in (large_containers.advice(records(), 1000, 1 << 30) or "")  # type: ignore[arg-type]


def test_on_a_large_machine_a_large_copy_is_worth_a_word_too() -> None:
    dataset = Images()
    assert large_containers.advice(dataset, 10_000, 1 << 40) is not None


class Uncountable(list):  # type: ignore[type-arg]
    def __len__(self) -> int:
        raise RuntimeError("not now")


class Pretender:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("__class__ must not be read")


def test_a_container_that_cannot_be_measured_does_not_keep_the_loader_from_starting() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(4))
    dataset.strange = Uncountable([1])
    batches = list(holdfast.DataLoader(dataset, num_workers=1, batch_size=4))
    assert len(batches) == 1


def test_an_object_is_not_asked_what_it_takes_itself_for() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(4))
    dataset.lazy = Pretender()
    assert large_containers.advice(dataset, 10_000, 1 << 40) is None


class Slotted:
    __slots__ = ("samples", "unset")

    def __init__(self) -> None:
        self.samples = records()

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def test_attributes_in_slots_are_packed_too() -> None:
    dataset = Slotted()
    before = dataset[7]
    (done,) = holdfast.pack(dataset).packed
    assert done.path == "dataset.samples"
    assert type(dataset.samples) is holdfast.PackedList
    assert dataset[7] == before


def test_a_list_that_is_the_dataset_itself_is_left_with_the_way_out() -> None:
    (left,) = holdfast.pack(records()).refused
    assert "PackedList(dataset)" in left.reason


def test_items_that_another_container_holds_are_noted() -> None:
    dataset = Slotted()
    others = set(dataset.samples)
    (done,) = holdfast.pack(dataset).packed
    assert "in another container too" in done.note
    del others
    (done,) = holdfast.pack(Slotted()).packed
    assert done.note == ""
