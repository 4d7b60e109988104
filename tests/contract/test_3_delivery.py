"""contract.md section 3: which batches are delivered, and what `len` and `iter` say."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections import OrderedDict, UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from tests.support.datasets import (
    Arrays,
    Calls,
    Images,
    Numbers,
    Objects,
    Pair,
    QuietStream,
    RevealingInBulk,
    SizedStream,
    Stream,
    Views,
)
from tests.support.fingerprint import fingerprint
from tests.support.loaders import Loader
from tests.support.parts import identity
from tests.support.processes import eventually, mappings, open_files

pytestmark = pytest.mark.timeout(60)

WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 2])


@WORKERS
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_follow_the_sampler_as_a_plain_loop_would(
    loader_class: Loader, num_workers: int, drop_last: bool
) -> None:
    images, labels = torch.rand(11, 2, 3), torch.arange(11)
    loader = loader_class(
        TensorDataset(images, labels), batch_size=4, drop_last=drop_last, num_workers=num_workers
    )
    batches = list(loader)
    assert len(batches) == len(loader) == (2 if drop_last else 3)
    for number, (some_images, some_labels) in enumerate(batches):
        part = slice(4 * number, 4 * number + 4)
        assert torch.equal(some_images, images[part])
        assert torch.equal(some_labels, labels[part])


@WORKERS
def test_shuffle_delivers_every_sample_once(loader_class: Loader, num_workers: int) -> None:
    loader = loader_class(Numbers(50), batch_size=7, shuffle=True, num_workers=num_workers)
    first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


@WORKERS
def test_without_batching_samples_come_one_by_one_and_unbatched(
    loader_class: Loader, num_workers: int
) -> None:
    assert fingerprint(
        list(loader_class(Numbers(3), batch_size=None, num_workers=num_workers))
    ) == fingerprint([0, 1, 2])
    images = list(loader_class(Images(2), batch_size=None, num_workers=num_workers))
    assert [type(sample) for sample in images] == [tuple, tuple] or [
        type(sample) for sample in images
    ] == [list, list]
    assert images[1][0].shape == (3, 4, 4)


def various(index: int) -> Any:
    return {
        "int": index,
        "str": "text",
        "array": np.full(2, index, dtype=np.int16),
        "scalar": np.float32(index),
        "pair": Pair(np.zeros(1), "right"),
        "tuple": (np.ones(1), 2),
        "list": [np.ones(1), b"bytes"],
        "ordered": OrderedDict(a=np.zeros(1)),
        "mine": UserDict(a=np.zeros(1)),
        "objects": np.array(["a", "b"]),
        "none": None,
    }


@WORKERS
def test_default_conversion_makes_tensors_of_numpy_and_keeps_the_containers(
    loader_class: Loader, num_workers: int
) -> None:
    sample = next(iter(loader_class(Calls(3, various), batch_size=None, num_workers=num_workers)))
    assert fingerprint(sample["int"]) == fingerprint(0)
    assert sample["str"] == "text"
    assert fingerprint(sample["array"]) == fingerprint(torch.zeros(2, dtype=torch.int16))
    assert fingerprint(sample["scalar"]) == fingerprint(torch.tensor(0.0))
    assert type(sample["pair"]) is Pair
    assert isinstance(sample["pair"].left, torch.Tensor)
    assert type(sample["tuple"]) is list
    assert type(sample["list"]) is list
    assert sample["list"][1] == b"bytes"
    assert type(sample["ordered"]) is OrderedDict
    assert isinstance(sample["ordered"]["a"], torch.Tensor)
    assert type(sample["mine"]) is UserDict
    assert isinstance(sample["objects"], np.ndarray)
    assert sample["none"] is None


class Rows(Numbers):
    """Answers to a whole list of keys at once."""

    def __getitem__(self, keys: Any) -> Any:
        return torch.tensor(keys), type(keys).__name__


@WORKERS
def test_a_sampler_of_lists_asks_the_dataset_once_with_the_whole_list(
    loader_class: Loader, num_workers: int
) -> None:
    loader = loader_class(
        Rows(10), batch_size=None, sampler=[[1, 2, 3], [4], (5, 6)], num_workers=num_workers
    )
    assert [(rows.tolist(), kind) for rows, kind in loader] == [
        ([1, 2, 3], "list"),
        ([4], "list"),
        ([5, 6], "tuple"),
    ]


@WORKERS
def test_sampler_and_batch_sampler_may_be_any_iterable(
    loader_class: Loader, num_workers: int
) -> None:
    loader = loader_class(
        Numbers(10), batch_size=2, sampler=range(9, -1, -3), num_workers=num_workers
    )
    assert [batch.tolist() for batch in loader] == [[9, 6], [3, 0]]
    loader = loader_class(
        Numbers(10), batch_sampler=[(1,), (2, 3), (4, 5, 6)], num_workers=num_workers
    )
    assert [batch.tolist() for batch in loader] == [[1], [2, 3], [4, 5, 6]]
    assert len(loader) == 3


def key_type(key: Any) -> str:
    return type(key).__name__


@WORKERS
def test_the_dataset_gets_the_samplers_own_keys(loader_class: Loader, num_workers: int) -> None:
    kinds = loader_class(Calls(4, key_type), batch_size=2, num_workers=num_workers)
    assert list(kinds) == [["int", "int"], ["int", "int"]]
    kinds = loader_class(Calls(4, key_type), batch_size=2, shuffle=True, num_workers=num_workers)
    assert list(kinds) == [["int", "int"], ["int", "int"]]
    keys = ["a", ("b", 1), 2.5, None, torch.tensor(3), np.int64(4), frozenset([1])]
    kinds = loader_class(Calls(4, key_type), batch_size=7, sampler=keys, num_workers=num_workers)
    assert list(kinds) == [["str", "tuple", "float", "NoneType", "Tensor", "int64", "frozenset"]]


@WORKERS
def test_a_dataset_with_getitems_is_asked_through_it(
    loader_class: Loader, num_workers: int
) -> None:
    for dataset in (RevealingInBulk(5), Subset(RevealingInBulk(9), [8, 1, 2, 3, 4])):
        batches = list(loader_class(dataset, batch_size=2, num_workers=num_workers))
        assert [batch["asked for"].tolist() for batch in batches] == [[2, 2], [2, 2], [1]]
    single = next(iter(loader_class(RevealingInBulk(5), batch_size=None, num_workers=num_workers)))
    assert "asked for" not in single


@WORKERS
def test_torchs_own_datasets_work(loader_class: Loader, num_workers: int) -> None:
    whole = ConcatDataset([Numbers(3), Subset(Numbers(9), [7, 8])])
    assert torch.cat(list(loader_class(whole, batch_size=2, num_workers=num_workers))).tolist() == [
        0,
        1,
        2,
        7,
        8,
    ]


@WORKERS
def test_a_plain_list_is_a_dataset(loader_class: Loader, num_workers: int) -> None:
    assert list(loader_class(["a", "b", "c"], batch_size=2, num_workers=num_workers)) == [
        ["a", "b"],
        ["c"],
    ]


@WORKERS
def test_a_loader_can_be_listed_and_iterated_again(loader_class: Loader, num_workers: int) -> None:
    loader = loader_class(Numbers(4), batch_size=2, collate_fn=identity, num_workers=num_workers)
    assert list(loader) == [[0, 1], [2, 3]]
    assert tuple(loader) == ([0, 1], [2, 3])
    assert [batch for _ in range(3) for batch in loader] == 3 * [[0, 1], [2, 3]]


@WORKERS
def test_an_ended_iterator_stays_ended(loader_class: Loader, num_workers: int) -> None:
    iterator = iter(loader_class(Numbers(2), num_workers=num_workers))
    assert len(list(iterator)) == 2
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


@WORKERS
def test_an_empty_dataset_gives_an_empty_epoch(loader_class: Loader, num_workers: int) -> None:
    for arguments in ({"batch_size": 3}, {"batch_size": None}, {"batch_sampler": []}):
        loader = loader_class(Numbers(0), num_workers=num_workers, **arguments)
        assert list(loader) == []
        assert len(loader) == 0
    assert list(loader_class(Stream(0), num_workers=num_workers)) == []


@WORKERS
def test_two_iterators_of_one_loader_are_independent(
    loader_class: Loader, num_workers: int
) -> None:
    loader = loader_class(Numbers(6), batch_size=2, collate_fn=identity, num_workers=num_workers)
    assert list(zip(loader, loader, strict=True)) == [
        ([0, 1], [0, 1]),
        ([2, 3], [2, 3]),
        ([4, 5], [4, 5]),
    ]
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second) == [0, 1]
    assert next(first) == [2, 3]
    del second
    assert next(first) == [4, 5]


def test_with_persistent_workers_iter_returns_the_same_iterator_reset(loader_class: Loader) -> None:
    loader = loader_class(
        Numbers(6), batch_size=2, collate_fn=identity, num_workers=2, persistent_workers=True
    )
    first = iter(loader)
    assert next(first) == [0, 1]
    second = iter(loader)
    assert second is first
    assert list(second) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(StopIteration):
        next(first)


def test_len_is_asked_anew_each_time(loader_class: Loader) -> None:
    dataset = Numbers(4)
    loader = loader_class(dataset, batch_size=2)
    assert len(loader) == 2
    dataset.size = 7
    assert len(loader) == 4
    growing = [[0]]
    loader = loader_class(dataset, batch_sampler=growing)
    growing.append([1, 2])
    assert len(loader) == 2
    assert [batch.tolist() for batch in loader] == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("batch_size", "drop_last"),
    [(None, False), *((size, drop) for size in (1, 2, 3, 7, 10) for drop in (False, True))],
)
def test_len_of_an_iterable_is_computed_from_the_datasets_len(
    loader_class: Loader, batch_size: int | None, drop_last: bool
) -> None:
    loader = loader_class(SizedStream(7, claims=7), batch_size=batch_size, drop_last=drop_last)
    whole = 7 / (batch_size or 1)
    assert len(loader) == (math.floor(whole) if drop_last else math.ceil(whole))


def test_len_without_a_length_is_a_type_error(loader_class: Loader) -> None:
    with pytest.raises(TypeError, match="has no len"):
        len(loader_class(Stream(3)))
    with pytest.raises(TypeError, match="has no len"):
        len(loader_class(Numbers(3), sampler=iter([0, 1]), batch_size=None))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:.*excessive worker creation")
def test_each_worker_iterates_its_own_whole_copy_of_an_iterable(
    loader_class: Loader, num_workers: int
) -> None:
    samples = [
        sample["index"]
        for sample in loader_class(Stream(4), batch_size=None, num_workers=num_workers)
    ]
    assert sorted(samples) == sorted(num_workers * list(range(4)))


def test_workers_form_batches_of_their_own_and_end_short(loader_class: Loader) -> None:
    def batches(**arguments: Any) -> list[tuple[list[int], int]]:
        loader = loader_class(QuietStream(10, "sharded"), batch_size=3, num_workers=2, **arguments)
        return [(batch[:, 0].tolist(), batch[0, 1].item()) for batch in loader]

    assert batches() == [([0, 2, 4], 0), ([1, 3, 5], 1), ([6, 8], 0), ([7, 9], 1)]
    assert batches(drop_last=True) == [([0, 2, 4], 0), ([1, 3, 5], 1)]


@pytest.mark.filterwarnings("ignore:.*excessive worker creation")
def test_a_worker_with_nothing_delivers_nothing_and_the_others_go_on(loader_class: Loader) -> None:
    for _ in range(2):
        loader = loader_class(QuietStream(4, "late"), batch_size=None, num_workers=3)
        assert [sample.tolist() for sample in loader] == [
            [i, worker] for i in range(4) for worker in (1, 2)
        ]


def test_all_iterable_workers_go_on_to_their_own_end(loader_class: Loader) -> None:
    loader = loader_class(
        QuietStream(7, "uneven"), batch_size=2, num_workers=2, persistent_workers=True
    )
    expected = [([0, 1], 0), ([0, 1], 1), ([2, 3], 0), ([2, 3], 1), ([4, 5], 0), ([4], 1), ([6], 0)]
    for _ in range(3):
        assert [(batch[:, 0].tolist(), batch[0, 1].item()) for batch in loader] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_that_delivers_more_than_len_said_warns_each_time_after(
    loader_class: Loader, num_workers: int
) -> None:
    size = 6 // (num_workers or 1)
    loader = loader_class(SizedStream(size, claims=4), batch_size=None, num_workers=num_workers)
    assert len(loader) == 4
    iterator = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            next(iterator)
    text = (
        r"reported to be 4\(when accessing len\(dataloader\)\), but {} samples have been fetched\. "
    )
    text += "For multiprocessing data-loading, this" if num_workers else "$"
    for count in (5, 6):
        with pytest.warns(UserWarning, match=text.format(count)):
            next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterator_older_than_the_question_for_len_does_not_warn(
    loader_class: Loader, num_workers: int
) -> None:
    loader = loader_class(SizedStream(4, claims=1), batch_size=None, num_workers=num_workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iterator = iter(loader)
        assert len(loader) == 1
        assert len(list(iterator)) == 4 * (num_workers or 1)
    iterator = iter(loader)
    next(iterator)
    with pytest.warns(UserWarning, match="but 2 samples have been fetched"):
        next(iterator)


def test_the_warning_of_a_persistent_loader_counts_from_the_epochs_start(
    loader_class: Loader,
) -> None:
    loader = loader_class(
        SizedStream(3, claims=3), batch_size=None, num_workers=1, persistent_workers=True
    )
    assert len(loader) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert len(list(loader)) == 3


# --- A batch is the user's ------------------------------------------------------------------------


def counted(index: int) -> torch.Tensor:
    return torch.full((1000,), index)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_kept_batches_stay_as_they_were_after_the_epoch_and_the_loader(
    loader_class: Loader, persistent_workers: bool
) -> None:
    loader = loader_class(
        Calls(300, counted), batch_size=10, num_workers=2, persistent_workers=persistent_workers
    )
    kept = list(loader)
    for batch in loader:
        batch.fill_(-1)  # the consumer may write into a batch
    del loader
    assert [batch[:, 0].tolist() for batch in kept] == [
        list(range(n, n + 10)) for n in range(0, 300, 10)
    ]
    assert all((batch == batch[:, :1]).all() for batch in kept)


def test_a_view_keeps_its_batch_alive(loader_class: Loader) -> None:
    loader = loader_class(Calls(60, counted), batch_size=4, num_workers=2)
    rows = [batch[3, 10:20] for batch in loader]
    assert [row.tolist() for row in rows] == [[n + 3] * 10 for n in range(0, 60, 4)]
    arrays = [batch.numpy()[0] for batch in loader]
    assert [array.tolist() for array in arrays] == [[n] * 1000 for n in range(0, 60, 4)]


@pytest.mark.parametrize(
    "dataset", [Views(4), Objects(4), Arrays(4)], ids=lambda each: type(each).__name__
)
def test_what_a_collate_fn_returns_arrives_as_it_was(loader_class: Loader, dataset: Any) -> None:
    loader = loader_class(dataset, batch_size=2, num_workers=2, collate_fn=identity)
    assert fingerprint([sample for batch in loader for sample in batch]) == fingerprint(
        [dataset[i] for i in range(4)]
    )


@pytest.mark.slow  # tests/lifecycle/test_growth.py counts more, in fewer epochs
def test_files_and_mappings_do_not_grow_with_epochs_and_loaders(loader_class: Loader) -> None:
    def use(count: int) -> None:
        for _ in range(count):
            loader = loader_class(Images(8), batch_size=2, num_workers=2)
            list(loader)
            next(iter(loader))

    use(2)
    files, maps = open_files(), mappings()
    use(13)
    assert eventually(lambda: open_files() <= files + 2)  # threads of torch's queues close theirs
    assert mappings() <= maps + 10


@pytest.mark.parametrize("collate_fn", [None, torch.stack], ids=["default", "own"])
def test_a_batch_can_be_saved_and_copied_for_no_more_than_its_own_size(
    loader_class: Loader, collate_fn: Any
) -> None:
    """torch.save and deepcopy take the whole storage: it must not be a large arena."""
    loader = loader_class(Calls(40, counted), batch_size=4, num_workers=2, collate_fn=collate_fn)
    for batch in loader:
        size = batch.numel() * batch.element_size()
        assert batch.untyped_storage().nbytes() <= size + 4096
        assert batch.storage_offset() == 0
        file = io.BytesIO()
        torch.save(batch, file)
        assert file.tell() < size + 10_000
        assert torch.equal(copy.deepcopy(batch), batch)
        assert torch.equal(pickle.loads(pickle.dumps(batch)), batch)


def test_a_batch_can_be_used_like_any_tensor(loader_class: Loader) -> None:
    for batch in loader_class(Images(6), batch_size=2, num_workers=2):
        pixels = batch[0]
        assert pixels.is_leaf
        assert not pixels.requires_grad
        assert pixels.numpy().flags.writeable
        pixels.requires_grad_()
        (pixels * 2).sum().backward()
        assert torch.equal(pixels.grad, torch.full_like(pixels, 2))
        pixels.detach().add_(1).mul_(0)
        assert pixels.sum() == 0
        assert pixels.is_contiguous()


def as_arrays(samples: list[Any]) -> Any:
    return np.stack([pixels.numpy() for pixels, _ in samples])


def test_arrays_in_a_batch_are_writable(loader_class: Loader) -> None:
    for array in loader_class(Images(6), batch_size=2, num_workers=2, collate_fn=as_arrays):
        assert array.flags.writeable
        array += 1
        assert array.shape == (2, 3, 4, 4)


def send_back(given: Any, answers: Any) -> None:
    answers.put(given.get().sum().item())


def test_a_batch_can_be_sent_on_to_another_process(loader_class: Loader) -> None:
    context = torch.multiprocessing.get_context("fork")
    given, answers = context.SimpleQueue(), context.SimpleQueue()
    batch = next(iter(loader_class(Calls(4, counted), batch_size=4, num_workers=1)))
    process = context.Process(target=send_back, args=(given, answers))
    process.start()
    given.put(batch)
    assert answers.get() == 6000
    process.join(20)
    assert process.exitcode == 0
    assert batch.sum() == 6000
