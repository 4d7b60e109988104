"""peers.md 3.4: what Lightning, Fabric and accelerate do to a loader, done here without them.

Each helper repeats, in our own words, what the named framework does to any DataLoader it is given.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from tests.support.datasets import Numbers, Pids, QuietStream, Revealing, Stream
from tests.support.fingerprint import fingerprint
from tests.support.loaders import STOCK, Loader
from tests.support.observe import seed_everything
from tests.support.parts import draw_once, identity
from tests.support.processes import alive, children, eventually, open_files

pytestmark = pytest.mark.timeout(60)


# --- Lightning, path P: rebuilt from its attributes -----------------------------------------------


def arguments_from_attributes(loader: Any, **replaced: Any) -> dict[str, Any]:
    """Public attributes that are constructor arguments and are not the default object itself."""
    attributes = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    attributes["multiprocessing_context"] = loader.multiprocessing_context
    parameters = dict(inspect.signature(type(loader).__init__).parameters)
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        parameters |= inspect.signature(STOCK.__init__).parameters
    given = {
        name: attributes[name]
        for name, each in parameters.items()
        if name in attributes and (each.default is not attributes[name] or name == "dataset")
    }
    missing = [
        name
        for name, each in parameters.items()
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        and name not in (*given, "self")
    ]
    assert not missing, f"required and not an attribute: {missing}"
    if isinstance(loader.dataset, IterableDataset):
        given |= {"batch_sampler": None, "sampler": None}
    elif type(loader.batch_sampler) is not BatchSampler and loader.batch_sampler is not None:
        given |= {
            "batch_sampler": loader.batch_sampler,
            "batch_size": 1,
            "sampler": None,
            "shuffle": False,
        }
        given["drop_last"] = False
    else:
        given |= {"sampler": loader.sampler, "shuffle": False, "batch_sampler": None}
    return given | replaced


REBUILT: list[tuple[Any, dict[str, Any]]] = [
    (Revealing(7), {}),
    (Revealing(7), {"batch_size": 3, "shuffle": True, "num_workers": 2, "drop_last": True}),
    (Revealing(7), {"batch_size": None, "num_workers": 1, "prefetch_factor": 5}),
    (Revealing(7), {"batch_sampler": [[0, 1], [2]], "num_workers": 2, "persistent_workers": True}),
    (
        Revealing(7),
        {"num_workers": 2, "multiprocessing_context": "fork", "worker_init_fn": draw_once},
    ),
    (Revealing(7), {"collate_fn": identity, "sampler": [3, 1], "timeout": 0}),
    (Stream(5), {"batch_size": 2, "num_workers": 2, "timeout": 20, "in_order": True}),
]


@pytest.mark.parametrize(
    ("dataset", "arguments"), REBUILT, ids=[str(sorted(each)) for _, each in REBUILT]
)
def test_a_loader_rebuilt_from_its_attributes_gives_the_same_batches(
    loader_class: Loader, dataset: Any, arguments: dict[str, Any]
) -> None:
    def stream(loader: Any) -> list[Any]:
        seed_everything(4)
        return [fingerprint(batch) for batch in loader]

    loader = loader_class(dataset, **arguments)
    again = type(loader)(**arguments_from_attributes(loader))
    assert type(again) is type(loader)
    expected = stream(loader)
    assert stream(again) == expected
    twice = type(again)(**arguments_from_attributes(again))
    assert stream(twice) == expected


def test_a_rebuilt_loader_keeps_our_options(holdfast_class: Any) -> None:
    loader = holdfast_class(Numbers(7), num_workers=2, max_restarts=(3, 60.0), stall_timeout=12)
    again = type(loader)(**arguments_from_attributes(loader))
    assert again.max_restarts is loader.max_restarts
    assert again.stall_timeout is loader.stall_timeout
    plain = holdfast_class(Numbers(7), num_workers=2)
    assert not {"max_restarts", "stall_timeout"} & set(arguments_from_attributes(plain))


def test_a_distributed_sampler_can_be_injected(loader_class: Any) -> None:
    loader = loader_class(Numbers(8), batch_size=2, shuffle=True, num_workers=2)
    sampler = DistributedSampler(loader.dataset, num_replicas=2, rank=1, shuffle=False)
    again = loader_class(**arguments_from_attributes(loader, sampler=sampler))
    assert again.sampler is sampler
    assert again.batch_sampler.sampler is sampler
    again.sampler.set_epoch(1)
    again.batch_sampler.sampler.set_epoch(2)
    assert sampler.epoch == 2
    assert [batch.tolist() for batch in again] == [[1, 3], [5, 7]]


# --- Lightning, path H, and Fabric: `__init__` and `__setattr__` are patched ----------------------


@contextlib.contextmanager
def recording(*classes: type) -> Iterator[list[tuple[str, str]]]:
    """Records the arguments of the outermost constructor on the instance, and every later
    assignment and deletion."""
    writes: list[tuple[str, str]] = []
    before = [
        {name: vars(each).get(name) for name in ("__init__", "__setattr__", "__delattr__")}
        for each in classes
    ]

    def patch(owner: type) -> None:
        init, set_, delete = owner.__init__, owner.__setattr__, owner.__delattr__  # type: ignore[misc]

        @functools.wraps(init)
        def new_init(self: Any, *args: Any, **kwargs: Any) -> None:
            outermost = not getattr(self, "_inside_init", False)
            if outermost:
                object.__setattr__(self, "_inside_init", True)
                object.__setattr__(self, "_saved", (args, kwargs))
            init(self, *args, **kwargs)
            if outermost:
                object.__setattr__(self, "_inside_init", False)

        def new_set(self: Any, name: str, value: Any) -> None:
            if not getattr(self, "_inside_init", False) and (
                not writes or writes[-1] != ("set", name)
            ):
                writes.append(("set", name))
            set_(self, name, value)

        def new_delete(self: Any, name: str) -> None:
            writes.append(("delete", name))
            delete(self, name)

        owner.__init__, owner.__setattr__, owner.__delattr__ = new_init, new_set, new_delete  # type: ignore[assignment,method-assign,misc]

    for each in classes:
        patch(each)
    try:
        yield writes
    finally:
        for each, old in zip(classes, before, strict=True):
            for name, value in old.items():
                if value is None:
                    delattr(each, name)
                else:
                    setattr(each, name, value)


def test_a_loader_made_under_patched_dunders_can_be_rebuilt_from_its_recorded_arguments(
    loader_class: Any,
) -> None:
    mine = types.new_class("Mine", (loader_class,))
    with recording(STOCK, *([loader_class] if loader_class is not STOCK else []), mine):
        for kind in (loader_class, mine):
            loader = kind(Numbers(6), 2, num_workers=2, shuffle=True)
            args, kwargs = loader._saved
            assert args[1:] == (2,)
            again = kind(
                *args, **{**kwargs, "shuffle": False, "sampler": SequentialSampler(loader.dataset)}
            )
            assert [batch.tolist() for batch in again] == [[0, 1], [2, 3], [4, 5]]
            assert sorted(torch.cat(list(loader)).tolist()) == list(range(6))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [Numbers(6), QuietStream(6)], ids=["map", "iterable"])
def test_nothing_is_written_on_the_loader_while_it_is_iterated(
    loader_class: Any, num_workers: int, dataset: Any
) -> None:
    writes: list[str] = []

    def set_and_record(self: Any, name: str, value: Any) -> None:
        writes.append(name)
        loader_class.__setattr__(self, name, value)

    def delete_and_record(self: Any, name: str) -> None:
        writes.append(name)
        loader_class.__delattr__(self, name)

    methods = {"__setattr__": set_and_record, "__delattr__": delete_and_record}
    watched = types.new_class("Watched", (loader_class,), {}, lambda body: body.update(methods))
    loader = watched(dataset, batch_size=2, num_workers=num_workers)
    assert "num_workers" in writes, "the recorder works"
    writes.clear()
    before = dict(vars(loader))
    for _ in range(2):
        for _ in loader:
            pass
        next(iter(loader))
    assert writes == []
    assert vars(loader) == before


def test_with_persistent_workers_at_most_the_kept_iterator_is_written(loader_class: Any) -> None:
    with recording(STOCK, *([loader_class] if loader_class is not STOCK else [])) as writes:
        loader = loader_class(Numbers(6), num_workers=2, persistent_workers=True)
        writes.clear()
        before = dict(vars(loader))
        for _ in range(3):
            list(loader)
            next(iter(loader))
        assert {name for _, name in writes} <= {"_iterator"}
        assert len(writes) <= 1
        changed = {
            name for name, value in vars(loader).items() if before.get(name, loader) is not value
        }
        assert changed <= {"_iterator"}


def test_a_wrapper_with_a_copy_of_the_loaders_dict_works(loader_class: Any) -> None:
    """Fabric's wrapper: iterates the loader it was given, and looks like it."""

    class Wrapper:
        def __init__(self, loader: Any) -> None:
            self.__dict__.update(loader.__dict__)
            self._loader = loader

        def __len__(self) -> int:
            return len(self._loader)

        def __iter__(self) -> Iterator[Any]:
            return iter(self._loader)

    wrapper: Any = Wrapper(
        loader_class(Numbers(6), batch_size=2, num_workers=2, persistent_workers=True)
    )
    for _ in range(2):
        assert [batch.tolist() for batch in wrapper] == [[0, 1], [2, 3], [4, 5]]
    assert (wrapper.batch_size, wrapper.num_workers, len(wrapper)) == (2, 2, 3)


def test_a_framework_may_put_attributes_on_the_loader(loader_class: Any) -> None:
    loader = loader_class(Numbers(3))
    loader._lightning_note = [1]
    assert vars(loader)["_lightning_note"] == [1]
    del loader._lightning_note
    assert list(loader)


# --- The kept iterator ----------------------------------------------------------------------------


def test_setting_the_kept_iterator_to_none_in_mid_epoch_starts_afresh(loader_class: Any) -> None:
    loader = loader_class(Pids(20), batch_size=None, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    first = {next(iterator)[1] for _ in range(4)}
    del iterator
    loader._iterator = None
    assert eventually(lambda: not any(map(alive, first)))
    samples = [tuple(sample) for sample in loader]
    assert [index for index, _, _ in samples] == list(range(20))
    assert {pid for _, pid, _ in samples}.isdisjoint(first)


def test_an_iterator_still_held_goes_on_after_the_loader_forgot_it(loader_class: Any) -> None:
    loader = loader_class(Numbers(8), batch_size=None, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    assert next(iterator) == 0
    loader._iterator = None
    other = iter(loader)
    assert other is not iterator
    assert list(other) == list(range(8))
    assert list(iterator) == list(range(1, 8))


def test_shutdown_may_be_called_more_than_once(loader_class: Any) -> None:
    before = children()
    loader = loader_class(Numbers(8), num_workers=2, persistent_workers=True)
    list(loader)
    iterator = loader._iterator
    iterator._shutdown_workers()
    iterator._shutdown_workers()
    assert eventually(lambda: children() == before)


def test_the_loader_made_again_each_epoch_leaves_nothing(loader_class: Any) -> None:
    """Hugging Face's trainer makes its evaluation loader anew each time, with persistent
    workers."""
    before, files = children(), open_files()
    for _ in range(5):
        assert len(list(loader_class(Numbers(4), num_workers=2, persistent_workers=True))) == 4
    assert eventually(lambda: children() == before)
    assert eventually(lambda: open_files() <= files + 2)  # closed after them, by a thread


# --- accelerate -----------------------------------------------------------------------------------


def test_accelerate_finds_all_it_reads(loader_class: Any) -> None:
    """It rebuilds every loader as a plain one from these."""
    read = [
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "pin_memory_device",
        "in_order",
    ]
    loader = loader_class(Numbers(7), batch_size=2, num_workers=2, generator=torch.Generator())
    assert isinstance(loader, STOCK)
    kwargs = {name: getattr(loader, name) for name in read}
    plain = STOCK(loader.dataset, batch_sampler=loader.batch_sampler, **kwargs)
    assert [batch.tolist() for batch in plain] == [batch.tolist() for batch in loader]
    back = loader_class(plain.dataset, batch_sampler=plain.batch_sampler, **kwargs)
    assert [batch.tolist() for batch in back] == [batch.tolist() for batch in loader]


def test_reading_one_batch_ahead_and_holding_two_works(loader_class: Any) -> None:
    """As accelerate's adapter does."""
    iterator = iter(loader_class(Numbers(9), batch_size=2, num_workers=2))
    held = next(iterator)
    seen = []
    for ahead in iterator:
        seen.append(held.tolist())
        held = ahead
    assert [*seen, held.tolist()] == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_samplers_are_the_real_objects(loader_class: Any) -> None:
    dataset = Numbers(4)
    sampler = RandomSampler(dataset)
    batch_sampler = BatchSampler(sampler, 2, False)
    loader = loader_class(dataset, batch_sampler=batch_sampler, num_workers=2)
    assert loader.batch_sampler is batch_sampler
    assert loader.batch_sampler.sampler is sampler
    assert loader.dataset is dataset
    list(loader)
    assert loader.batch_sampler is batch_sampler
    assert loader.dataset is dataset


def test_no_thread_is_left_when_the_loader_is_gone(loader_class: Any) -> None:
    before = threading.active_count()
    for _ in range(3):
        loader = loader_class(Numbers(6), num_workers=2, persistent_workers=True)
        list(loader)
        del loader
    assert eventually(
        lambda: threading.active_count() <= before + 1
    )  # torch keeps one thread for all its file sharing


# --- Subclasses in the wild -----------------------------------------------------------------------


class Repeats:
    """A sampler that never ends."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


def endless(loader_class: Any) -> type:
    """As timm's and Ultralytics' loaders that keep one iterator over all epochs."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        loader_class.__init__(self, *args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeats(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = loader_class.__iter__(self)

    def length(self: Any) -> int:
        return len(self.batch_sampler.sampler)

    def iterate(self: Any) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)

    def end(self: Any) -> None:
        for worker in self.iterator._workers:
            if worker.is_alive():
                worker.terminate()
        self.iterator._shutdown_workers()

    methods = {"__init__": init, "__len__": length, "__iter__": iterate, "end": end}
    return types.new_class("Endless", (loader_class,), {}, lambda body: body.update(methods))


def test_a_subclass_with_one_endless_iterator_works(loader_class: Any) -> None:
    before = children()
    loader: Any = endless(loader_class)(Numbers(6), batch_size=2, num_workers=2, shuffle=False)
    for _ in range(4):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    loader.iterator._shutdown_workers()
    assert eventually(lambda: children() == before)


def test_workers_may_be_terminated_by_their_handles_before_shutdown(loader_class: Any) -> None:
    before = children()
    loader: Any = endless(loader_class)(Numbers(6), batch_size=2, num_workers=2)
    next(iter(loader))
    try:
        loader.end()
    except RuntimeError:
        # In the middle of its shutdown, torch's own handler of SIGCHLD may find that workers died.
        assert loader_class is STOCK
    assert eventually(lambda: not multiprocessing.active_children() and children() == before)


def test_a_subclass_may_wrap_the_iterator_it_gets(loader_class: Any) -> None:
    """As loaders do that move batches to a device."""

    def iterate(self: Any) -> Iterator[Any]:
        for batch in loader_class.__iter__(self):
            yield batch + 100

    kind: Any = types.new_class(
        "Moves", (loader_class,), {}, lambda body: body.update(__iter__=iterate)
    )
    loader = kind(Numbers(4), batch_size=2, num_workers=2)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[100, 101], [102, 103]]


def test_a_subclass_may_replace_the_making_of_the_iterator(loader_class: Any) -> None:
    def make(self: Any) -> Any:
        self.made += 1
        return loader_class._get_iterator(self)

    kind: Any = types.new_class(
        "Counts", (loader_class,), {}, lambda body: body.update(_get_iterator=make, made=0)
    )
    loader = kind(Numbers(4), batch_size=2, num_workers=1)
    assert len(list(loader)) == len(list(loader)) == 2
    assert loader.made == 2
