"""contract.md section 1: the class itself, its arguments and its attributes."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate
from torch.utils.data._utils.collate import default_convert
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tests.support.datasets import Images, Numbers, Pids, Stream
from tests.support.loaders import STOCK, Loader
from tests.support.parts import identity, mark
from tests.support.processes import alive, children, eventually, mappings, open_files

pytestmark = pytest.mark.timeout(60)


def test_holdfast_is_a_real_subclass_of_torchs_loader(holdfast_class: Any) -> None:
    assert holdfast_class is not STOCK
    assert issubclass(holdfast_class, STOCK)
    assert isinstance(holdfast_class(Numbers(3)), STOCK)
    assert holdfast_class.__name__ == "DataLoader"


def test_the_class_can_be_subscripted_in_annotations(loader_class: Any) -> None:
    def train(batches: loader_class[list[torch.Tensor]]) -> None: ...  # type: ignore[valid-type]

    assert loader_class[list[torch.Tensor]] is not None
    assert list(loader_class[int](Numbers(2))) == [0, 1]


def test_a_user_may_subclass_it_plainly_or_with_a_type(loader_class: Any) -> None:
    plain = types.new_class("Plain", (loader_class,))
    typed = types.new_class("Typed", (loader_class[int],))
    for kind in (plain, typed):
        assert [batch.tolist() for batch in kind(Numbers(3), batch_size=2)] == [[0, 1], [2]]


def test_the_signature_begins_with_torchs_and_adds_only_keyword_options(
    holdfast_class: Any,
) -> None:
    torchs = inspect.signature(STOCK.__init__).parameters
    ours = inspect.signature(holdfast_class.__init__).parameters
    positional = [name for name, each in torchs.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert [
        name for name, each in ours.items() if each.kind is each.POSITIONAL_OR_KEYWORD
    ] == positional
    for name, each in torchs.items():
        assert (ours[name].default, ours[name].kind) == (each.default, each.kind), name
    extra = [each for name, each in ours.items() if name not in torchs]
    assert {each.kind for each in extra} <= {inspect.Parameter.KEYWORD_ONLY}
    assert all(each.default is not each.empty for each in extra)


def test_this_version_has_these_options_of_its_own(holdfast_class: Any) -> None:
    extra = set(inspect.signature(holdfast_class.__init__).parameters) - set(
        inspect.signature(STOCK.__init__).parameters
    )
    assert extra == {
        "max_restarts",
        "snapshot_every_n_steps",
        "stall_timeout",
        "on_bad_sample",
        "max_bad_samples",
        "quarantine",
        "logbook",
        "memory_budget",
        "worker_memory_limit",
        "name",
        "iterable_recovery",
        "pin_in_place",
        "seeding",
        "worker_method",
        "ray_options",
    }
    with pytest.raises(TypeError, match="memory"):
        holdfast_class(Numbers(3), memory="auto")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_restarts", 3),
        ("max_restarts", 0),
        ("stall_timeout", 7),
        ("stall_timeout", 12.5),
        ("stall_timeout", None),
        ("name", None),
        ("name", "train"),
        ("logbook", None),
        ("logbook", Path("runs/today")),
    ],
)
def test_an_option_is_stored_unconverted_under_its_own_name(
    holdfast_class: Any, option: str, value: Any
) -> None:
    loader = holdfast_class(Numbers(3), num_workers=2, **{option: value})
    assert vars(loader)[option] is value


def test_an_option_left_alone_is_stored_as_the_default_object(holdfast_class: Any) -> None:
    """Frameworks tell by identity with the default whether an option was given."""
    loader = holdfast_class(Numbers(3))
    parameters = inspect.signature(holdfast_class.__init__).parameters
    for option in ("max_restarts", "stall_timeout"):
        assert vars(loader)[option] is parameters[option].default


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_restarts", -1),
        ("max_restarts", "many"),
        ("max_restarts", 2.5),
        ("max_restarts", (1, 2, 3)),
        ("max_restarts", (3, -1.0)),
        ("max_restarts", (-3, 10.0)),
        ("stall_timeout", -1),
        ("stall_timeout", 0),
        ("stall_timeout", "soon"),
        ("stall_timeout", float("nan")),
        ("stall_timeout", [5]),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_option_is_refused_at_construction_by_name_value_and_remedy(
    holdfast_class: Any, option: str, value: Any, num_workers: int
) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        holdfast_class(Numbers(3), num_workers=num_workers, **{option: value})
    text = str(refused.value)
    assert option in text
    assert repr(value) in text
    without = text.replace(option, "").replace(repr(value), "")
    assert len(without.split()) >= 4, f"does not say what would be right: {text}"


def test_torchs_arguments_may_be_given_by_position(loader_class: Loader) -> None:
    positional = (Numbers(5), 2, False, None, None, 0, identity, False, True, 0, None, None, None)
    assert list(loader_class(*positional)) == [[0, 1], [2, 3]]
    with pytest.raises(TypeError):
        loader_class(*positional, None)


def test_a_plain_loader_has_torchs_attributes(loader_class: Loader) -> None:
    dataset = Numbers(5)
    loader = loader_class(dataset)
    assert loader.dataset is dataset
    assert loader.batch_size == 1
    assert loader.num_workers == 0
    assert type(loader.sampler) is SequentialSampler
    assert type(loader.batch_sampler) is BatchSampler
    assert loader.drop_last is False
    assert loader.collate_fn is default_collate
    assert loader.generator is None
    assert loader.timeout == 0
    assert loader.pin_memory is False
    assert loader.pin_memory_device == ""
    assert loader.prefetch_factor is None
    assert loader.persistent_workers is False
    assert loader.worker_init_fn is None
    assert loader.multiprocessing_context is None
    assert loader.in_order is True


def test_given_objects_are_the_attributes_themselves(loader_class: Loader) -> None:
    dataset, generator = Numbers(5), torch.Generator()
    sampler = RandomSampler(dataset, generator=generator)
    context = multiprocessing.get_context("fork")
    loader = loader_class(
        dataset,
        batch_size=2,
        sampler=sampler,
        num_workers=2,
        collate_fn=identity,
        pin_memory=True,
        drop_last=True,
        timeout=7,
        worker_init_fn=mark,
        multiprocessing_context=context,
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
        pin_memory_device="cuda",
        in_order=False,
    )
    assert loader.dataset is dataset
    assert loader.sampler is sampler
    assert loader.batch_sampler.sampler is sampler
    assert loader.collate_fn is identity
    assert loader.worker_init_fn is mark
    assert loader.multiprocessing_context is context
    assert loader.generator is generator
    plain = ("batch_size", "num_workers", "pin_memory", "drop_last", "timeout", "prefetch_factor")
    assert [getattr(loader, name) for name in plain] == [2, 2, True, True, 7, 3]
    assert (loader.persistent_workers, loader.pin_memory_device, loader.in_order) == (
        True,
        "cuda",
        False,
    )


def test_prefetch_factor_becomes_two_with_workers_and_stays_none_without(
    loader_class: Loader,
) -> None:
    assert loader_class(Numbers(5), num_workers=2).prefetch_factor == 2
    assert loader_class(Numbers(5), num_workers=0).prefetch_factor is None


def test_a_start_method_by_name_becomes_its_context(loader_class: Loader) -> None:
    for name in ("fork", "spawn", "forkserver"):
        loader = loader_class(Numbers(5), num_workers=2, multiprocessing_context=name)
        assert isinstance(loader.multiprocessing_context, multiprocessing.context.BaseContext)
        assert loader.multiprocessing_context.get_start_method() == name


def test_with_a_batch_sampler_the_batch_size_is_none(loader_class: Loader) -> None:
    batches = [[0, 1], [2]]
    loader = loader_class(Numbers(5), batch_sampler=batches)
    assert loader.batch_size is None
    assert loader.batch_sampler is batches
    assert loader.drop_last is False
    assert isinstance(loader.sampler, SequentialSampler)


def test_without_batching_samples_are_converted_not_collated(loader_class: Loader) -> None:
    loader = loader_class(Numbers(5), batch_size=None)
    assert loader.collate_fn is default_convert
    assert loader.batch_sampler is None


@pytest.mark.parametrize(
    "attribute",
    ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"],
)
def test_what_decides_the_stream_cannot_be_set_later(loader_class: Any, attribute: str) -> None:
    loader = loader_class(Numbers(5))
    before = getattr(loader, attribute)
    with pytest.raises(
        ValueError,
        match=f"^{attribute} attribute should not be set after DataLoader is initialized$",
    ):
        setattr(loader, attribute, before)
    mine = type("Mine", (loader_class,), {})(Numbers(5))
    with pytest.raises(ValueError, match="after Mine is initialized"):
        setattr(mine, attribute, before)


def test_other_attributes_can_be_set_and_count_from_the_next_iter(loader_class: Loader) -> None:
    loader = loader_class(Pids(4), batch_size=2)
    assert {pid for _, pids, _ in loader for pid in pids.tolist()} == {os.getpid()}
    loader.num_workers = 2
    loader.prefetch_factor = 1
    assert [workers.tolist() for _, _, workers in loader] == [[0, 0], [1, 1]]
    loader.collate_fn = len
    assert list(loader) == [2, 2]
    loader.timeout = 20
    loader.pin_memory = False
    loader.generator = torch.Generator()
    loader.my_own_note = "kept"
    assert list(loader) == [2, 2]
    assert loader.my_own_note == "kept"


def test_a_worker_init_fn_set_later_is_run(loader_class: Loader) -> None:
    loader = loader_class(Stream(2), batch_size=None, num_workers=1)
    loader.worker_init_fn = mark
    assert [sample["mark"] for sample in loader] == [100, 100]


def test_a_context_set_later_is_used_and_checked(loader_class: Loader) -> None:
    loader = loader_class(Numbers(2), num_workers=1)
    loader.multiprocessing_context = "fork"
    assert loader.multiprocessing_context.get_start_method() == "fork"
    assert [batch.item() for batch in loader] == [0, 1]
    with pytest.raises(ValueError, match="should specify a valid start method in"):
        loader.multiprocessing_context = "spoon"


@pytest.mark.parametrize(
    ("arguments", "batches"),
    [
        ({}, True),
        ({"batch_size": None}, False),
        ({"batch_sampler": [[0]]}, True),
        ({"batch_size": None, "sampler": [0]}, False),
    ],
)
def test_auto_collation_is_off_only_without_any_batching(
    loader_class: Loader, arguments: dict[str, Any], batches: bool
) -> None:
    assert loader_class(Numbers(3), **arguments)._auto_collation is batches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_persistent_workers_the_iterator_is_not_kept(
    loader_class: Loader, num_workers: int
) -> None:
    loader = loader_class(Numbers(3), num_workers=num_workers)
    assert loader._iterator is None
    iterator = iter(loader)
    next(iterator)
    assert loader._iterator is None


@pytest.mark.parametrize("way", ["assign", "delete", "shut down"])
def test_dropping_the_kept_iterator_ends_persistent_workers(loader_class: Any, way: str) -> None:
    loader = loader_class(Pids(4), num_workers=2, persistent_workers=True)
    pids = {pid.item() for _, pid, _ in loader}
    assert len(pids) == 2
    assert all(map(alive, pids))
    assert loader._iterator is iter(loader)
    if way == "shut down":  # what Lightning does
        loader._iterator._shutdown_workers()
        loader._iterator = None
    elif way == "delete":
        del loader._iterator
        loader._iterator = None
    else:
        loader._iterator = None
    assert eventually(lambda: not any(map(alive, pids)))
    again = {pid.item() for _, pid, _ in loader}
    assert len(again) == 2
    assert not again & pids


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_iterator_is_of_torchs_base_class(loader_class: Loader, num_workers: int) -> None:
    """The declared return type of `__iter__`; that it is torch's multiprocessing one is not pinned
    anywhere."""
    iterator = iter(loader_class(Numbers(3), num_workers=num_workers))
    assert isinstance(iterator, _BaseDataLoaderIter)
    assert iter(iterator) is iterator
    assert len(iterator) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_can_be_pickled_and_copied(loader_class: Loader, num_workers: int) -> None:
    loader = loader_class(Numbers(5), batch_size=2, num_workers=num_workers)
    expected = [[0, 1], [2, 3], [4]]
    for copied in (pickle.loads(pickle.dumps(loader)), copy.copy(loader), copy.deepcopy(loader)):
        assert type(copied) is type(loader)
        assert [batch.tolist() for batch in copied] == expected
    assert [batch.tolist() for batch in loader] == expected
    assert [batch.tolist() for batch in pickle.loads(pickle.dumps(loader))] == expected


def test_a_pickled_loader_keeps_our_options(holdfast_class: Loader) -> None:
    loader = holdfast_class(Numbers(5), num_workers=2, max_restarts=3, stall_timeout=77)
    copied = pickle.loads(pickle.dumps(loader))
    assert (copied.max_restarts, copied.stall_timeout) == (3, 77)


def test_two_copies_of_a_loader_do_not_share_a_pool(loader_class: Loader) -> None:
    loader = loader_class(Pids(2), num_workers=1, persistent_workers=True)
    copied = copy.copy(loader)
    first = {pid.item() for _, pid, _ in loader}
    second = {pid.item() for _, pid, _ in copied}
    assert first.isdisjoint(second)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterator_refuses_to_be_pickled(loader_class: Loader, num_workers: int) -> None:
    iterator = iter(loader_class(Numbers(5), num_workers=num_workers))
    with pytest.raises(NotImplementedError):
        pickle.dumps(iterator)


def test_making_a_loader_starts_nothing_and_opens_nothing(loader_class: Loader) -> None:
    loader_class(Numbers(5), num_workers=2)  # whatever is loaded once
    gc.collect()
    before = open_files(), threading.active_count(), children(), mappings()
    made = [
        loader_class(
            Numbers(5),
            num_workers=2,
            persistent_workers=True,
            pin_memory=True,
            multiprocessing_context=name,
        )
        for name in (None, "fork", "spawn", "forkserver")
    ]
    assert (open_files(), threading.active_count(), children()) == before[:3]
    assert mappings() <= before[3] + 1  # the heap itself may grow
    assert len(made) == 4


def test_functools_partial_over_the_class_works(loader_class: Loader) -> None:
    assert len(list(functools.partial(loader_class, batch_size=2)(Images(5)))) == 3
