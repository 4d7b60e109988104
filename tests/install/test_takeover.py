"""``holdfast.install``: torch's own loaders, of any class, on our engine, and torch unbroken."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import multiprocessing.context
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

import holdfast
from holdfast import iteration
from tests.contract.test_frameworks import endless
from tests.faults.outside import kill_and_see_it_dead, pids
from tests.support.datasets import Numbers, Revealing, Stream
from tests.support.fingerprint import fingerprint
from tests.support.observe import seed_everything
from tests.support.processes import alive, children, eventually

pytestmark = pytest.mark.timeout(60, method="thread")


@pytest.fixture(autouse=True)
def torchs_own_afterwards() -> Iterator[None]:
    before = methods()
    iteration.say_that_it_stays.cache_clear()
    yield
    holdfast.uninstall()
    assert methods() == before


def methods() -> dict[str, Any]:
    """Without what `copyreg` keeps there."""
    return {name: one for name, one in vars(DataLoader).items() if name != "__slotnames__"}


def stream(loader: Any, deaths: int = 0, epochs: int = 2) -> list[Any]:
    """All batches, with as many workers killed on the way."""
    seed_everything(5)
    found = []
    for _ in range(epochs):
        iterator = iter(loader)
        for number, batch in enumerate(iterator):
            found.append(fingerprint(batch))
            if number < deaths:
                kill_and_see_it_dead(pids(iterator)[number % 2])
    return found


def ours(loader: Any) -> bool:
    return holdfast.of(loader).engine == "holdfast"


class Moving(DataLoader[Any]):
    """As loaders do that move batches to a device."""

    def __iter__(self) -> Any:
        return iter_of_batches(super().__iter__())


class iter_of_batches:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.inner)

    @property
    def _workers(self) -> Any:
        return self.inner._workers


class Making(DataLoader[Any]):
    """It has something to do when an iterator is made."""

    made = 0

    def _get_iterator(self) -> Any:
        self.made += 1
        return super()._get_iterator()


# -- the stream ------------------------------------------------------------------------------------


class KillsOnce(Revealing):
    """Two of its samples end their worker, each once."""

    def __init__(self, size: int, folder: Path | None = None) -> None:
        super().__init__(size)
        self.folder = folder

    def __getitem__(self, index: Any) -> Any:
        if self.folder is not None and index in (3, 8):
            with contextlib.suppress(FileExistsError):
                (self.folder / str(index)).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("kind", [DataLoader, Moving, Making], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_deaths_leave_the_stream_of_torchs_loader_as_it_is(
    kind: Any, persistent: bool, tmp_path: Path
) -> None:
    def make(folder: Path | None) -> Any:
        return kind(
            KillsOnce(14, folder),
            batch_size=2,
            shuffle=True,
            num_workers=2,
            persistent_workers=persistent,
        )

    expected = stream(make(None))
    with holdfast.install():
        loader = make(tmp_path)
        assert stream(loader) == expected
        assert ours(loader)
        assert [one.sample for one in holdfast.of(loader).incidents if one.kind == "killed"] in (
            [3, 8],
            [8, 3],
        )


@pytest.mark.slow
@pytest.mark.faults
def test_kills_leave_an_iterable_stream_as_it_is() -> None:
    make = functools.partial(DataLoader, Stream(20), batch_size=2, num_workers=2)
    expected = stream(make())
    with holdfast.install():
        assert stream(make(), deaths=2) == expected


@pytest.mark.faults
def test_a_loader_with_one_endless_iterator_survives_a_death() -> None:
    """As those of timm and Ultralytics."""
    with holdfast.install():
        loader: Any = endless(DataLoader)(Numbers(6), batch_size=2, num_workers=2, shuffle=False)
        for _ in range(3):
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
            kill_and_see_it_dead(pids(loader.iterator)[0])
            assert eventually(lambda: alive(pids(loader.iterator)[0])), "it is replaced"
        loader.end()


def test_loaders_that_are_there_already_are_taken_over_too() -> None:
    loader = DataLoader(Numbers(4), num_workers=1)
    assert len(list(loader)) == 4
    assert holdfast.of(loader).engine is None
    with holdfast.install():
        assert len(list(loader)) == 4
        assert ours(loader)
    assert holdfast.of(loader).stats()["batches"] == 4


def test_a_loader_without_workers_is_taken_over() -> None:
    class Bad(Numbers):
        def __getitem__(self, index: int) -> int:
            return index // (index - 2) and index

    loader = DataLoader(Bad(5), batch_size=5)
    with holdfast.install(on_bad_sample="skip"), pytest.warns(holdfast.BadSampleWarning):
        ((batch),) = loader
    assert len(batch) == 4
    assert [bad.index for bad in holdfast.of(loader).bad_samples] == [2]
    assert isinstance(iter(loader), _SingleProcessDataLoaderIter)


class Nested(Numbers):
    """Its samples come from a loader."""

    def __getitem__(self, index: int) -> Any:
        inner = DataLoader(Numbers(3))
        iterator = iter(inner)
        return type(iterator).__module__.partition(".")[0], len(list(iterator))


def test_a_loader_inside_a_worker_is_torchs() -> None:
    with holdfast.install():
        assert list(DataLoader(Nested(1), batch_size=None, num_workers=1)) == [["torch", 3]]


# -- what others do to a loader --------------------------------------------------------------------


@pytest.fixture
def begun() -> Iterator[Any]:
    """A loader whose persistent workers are there."""
    with holdfast.install():
        loader: Any = DataLoader(Numbers(6), batch_size=2, num_workers=1, persistent_workers=True)
        assert len(list(loader)) == 3
        yield loader
        loader._iterator = None


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_a_loader_in_use_has_workers_and_figures_of_its_own(
    begun: Any, duplicate: Any
) -> None:
    again = duplicate(begun)
    assert again._iterator is None
    assert len(list(again)) == len(list(begun)) == 3
    assert again._iterator is not begun._iterator
    assert pids(again._iterator) != pids(begun._iterator)
    assert holdfast.of(again).stats()["batches"] == 3
    assert holdfast.of(begun).stats()["batches"] == 6
    again._iterator = None


def test_an_iterator_that_another_loader_was_given_is_not_used_there(begun: Any) -> None:
    """As where attributes are copied one by one."""
    again: Any = DataLoader.__new__(DataLoader)
    again.__dict__.update(begun.__dict__)
    assert len(list(again)) == 3
    assert again._iterator is not begun._iterator
    assert len(list(begun)) == 3
    again._iterator = None


class Reduced(DataLoader[Any]):
    """It says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return type(self), (self.dataset,), {"kept": 1}


def test_what_a_subclass_says_of_its_pickling_holds() -> None:
    with holdfast.install():
        loader = pickle.loads(pickle.dumps(Reduced(Numbers(3), num_workers=1)))
        assert (type(loader), loader.kept, loader.num_workers) == (Reduced, 1, 0)


def test_an_iterator_itself_is_not_pickled(begun: Any) -> None:
    with pytest.raises(NotImplementedError):
        pickle.dumps(begun._iterator)


def test_persistent_workers_are_ended_through_the_iterator_as_lightning_does(begun: Any) -> None:
    workers = pids(begun._iterator)
    assert isinstance(begun._iterator, _MultiProcessingDataLoaderIter)
    begun._iterator._shutdown_workers()
    begun._iterator = None
    assert eventually(lambda: not any(map(alive, workers)))
    assert len(list(begun)) == 3


@pytest.mark.parametrize("how", ["dropped", "deleted", "with its loader"])
def test_persistent_workers_end_with_their_iterator(how: str) -> None:
    before = children()
    with holdfast.install():
        loader: Any = DataLoader(Numbers(2), num_workers=2, persistent_workers=True)
        list(loader)
        assert children() != before
        if how == "dropped":
            loader._iterator = None
        elif how == "deleted":
            del loader._iterator
        else:
            del loader
        assert eventually(lambda: children() == before)


class Whole(Numbers):
    """Dataset, hooks and loader in one, as modules that are given to a trainer have them."""

    def collate(self, samples: list[Any]) -> Any:
        return samples

    def begin(self, worker: int) -> None:
        pass

    def replace(self, bad: Any) -> Any:
        return "skip"


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("part", ["dataset", "collate_fn", "worker_init_fn", "on_bad_sample"])
def test_a_loader_that_what_it_was_given_refers_to_ends_with_its_workers(
    part: str, persistent: bool
) -> None:
    """As with torch, the garbage collector finds it."""
    before = children()
    whole: Any = Whole(4)
    data = whole if part == "dataset" else Numbers(4)
    more: dict[str, Any] = {"persistent_workers": persistent}
    if part == "collate_fn":
        more["collate_fn"] = whole.collate
    if part == "worker_init_fn":
        more["worker_init_fn"] = whole.begin
    own = {"on_bad_sample": whole.replace} if part == "on_bad_sample" else {}
    with holdfast.install(**own):
        whole.loader = DataLoader(data, num_workers=1, **more)
        whole.iterator = iter(whole.loader)
        next(whole.iterator)
        gone = weakref.ref(whole.loader)
        assert children() != before
    del whole, data, more, own
    gc.collect()
    assert gone() is None
    assert eventually(lambda: children() == before)


class Named(DataLoader[Any]):
    """It has attributes that a loader of ours has, with other meanings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.incidents = self.bad_samples = self.stats = self.close = 1
        self.name = self.quarantine = self.logbook = self.stall_timeout = object()
        self.on_bad_sample = "all of them"


def test_a_subclass_may_have_any_names_of_its_own() -> None:
    before = {name for name in dir(DataLoader) if not name.startswith("__")}
    with holdfast.install():
        assert {name for name in dir(DataLoader) if not name.startswith("__")} == before
        loader = Named(Numbers(4), num_workers=1)
        assert len(list(loader)) == 4
        assert loader.incidents == 1
        assert holdfast.of(loader).incidents == []


def test_nothing_is_added_to_a_loaders_attributes() -> None:
    with holdfast.install():
        loader = DataLoader(Numbers(4), num_workers=1)
        before = dict(vars(loader))
        list(loader)
        assert vars(loader) == before


class Equal(DataLoader[Any]):
    """All of them are equal, and none can be hashed."""

    def __eq__(self, other: object) -> bool:
        return True


def test_loaders_are_told_apart_by_identity() -> None:
    with holdfast.install():
        one, other = Equal(Numbers(4)), Equal(Numbers(3))
        list(one)
        assert holdfast.of(one).stats()["batches"] == 4
        assert holdfast.of(other).stats()["batches"] == 0


# -- those that keep torch's engine ----------------------------------------------------------------


class TheirIterator(_MultiProcessingDataLoaderIter):
    pass


class Theirs(DataLoader[Any]):
    """As torchdata's StatefulDataLoader: both methods are its own."""

    def __iter__(self) -> Any:
        return self._get_iterator()

    def _get_iterator(self) -> Any:
        return TheirIterator(self)


def test_a_loader_with_an_iterator_of_its_own_keeps_it_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with holdfast.install(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            loader = Theirs(Numbers(4), num_workers=1)
            assert type(iter(loader)) is TheirIterator
            assert len(list(loader)) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "Theirs keeps torch's engine: it makes an iterator of its own (TheirIterator). Its workers "
        "are not replaced when they die or hang, and holdfast's options have no effect on it"
    ]
    report = holdfast.of(loader)
    assert report.engine == "torch"
    assert report.why == "it makes an iterator of its own (TheirIterator)"
    assert "torch (it makes" in repr(report)


class TheirContext(multiprocessing.context.ForkContext):
    """Starts processes somewhere else."""


def test_a_context_that_is_not_pythons_own_is_left_to_torch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = TheirContext()
    loader = DataLoader(Numbers(4), num_workers=1, multiprocessing_context=context)
    with holdfast.install():
        iterator = iter(loader)
        assert type(iterator) is _MultiProcessingDataLoaderIter
        assert len(list(iterator)) == 4
    assert "its multiprocessing_context (tests.install.test_takeover.TheirContext)" in caplog.text
    assert len(caplog.records) == 1


def test_persistent_workers_begun_before_are_kept_until_they_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader: Any = DataLoader(Numbers(4), num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 4
    begun = loader._iterator
    with holdfast.install():
        for _ in range(2):
            assert len(list(loader)) == 4
            assert loader._iterator is begun
        assert len(caplog.records) == 1
        assert "were started before holdfast.install()" in caplog.text
        begun._shutdown_workers()
        loader._iterator = None
        assert len(list(loader)) == 4
        assert ours(loader)
        loader._iterator = None


def test_persistent_workers_of_ours_are_kept_after_uninstall() -> None:
    with holdfast.install():
        loader: Any = DataLoader(Numbers(4), num_workers=1, persistent_workers=True)
        list(loader)
        workers = pids(loader._iterator)
    assert len(list(loader)) == 4
    assert pids(loader._iterator) == workers
    loader._iterator = None
    assert len(list(loader)) == 4
    assert type(loader._iterator) is _MultiProcessingDataLoaderIter
    loader._iterator._shutdown_workers()


# -- install and uninstall -------------------------------------------------------------------------


def stall_timeout() -> Any:
    return holdfast.of(DataLoader(Numbers(1))).options["stall_timeout"]


def test_the_last_call_holds_and_one_uninstall_undoes_all() -> None:
    torchs = DataLoader.__iter__
    holdfast.uninstall()
    for seconds in range(1, 100):
        holdfast.install(stall_timeout=seconds)
    assert stall_timeout() == 99
    holdfast.install()
    assert stall_timeout() == 300
    assert DataLoader.__iter__ is not torchs
    holdfast.uninstall()
    holdfast.uninstall()
    assert DataLoader.__iter__ is torchs


def test_a_block_ends_with_what_was_before_it() -> None:
    with holdfast.install(stall_timeout=1) as outer:
        with holdfast.install(stall_timeout=2):
            assert stall_timeout() == 2
        assert stall_timeout() == 1
        assert repr(outer) == "<holdfast.install(stall_timeout=1)>"
    assert repr(outer) == "<holdfast.install(stall_timeout=1) (ended)>"
    assert not ours_is_installed()
    holdfast.install(stall_timeout=3)
    with contextlib.suppress(ZeroDivisionError), holdfast.install():
        raise ZeroDivisionError
    assert stall_timeout() == 3
    with holdfast.install(stall_timeout=4):
        holdfast.uninstall()
    assert not ours_is_installed()


def ours_is_installed() -> bool:
    return "__reduce_ex__" in vars(DataLoader)


def test_blocks_of_several_threads_do_not_end_each_other() -> None:
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with holdfast.install(stall_timeout=2):
            entered.set()
            assert left.wait(30)
            assert stall_timeout() == 2

    with holdfast.install(stall_timeout=1):
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(30)
    assert ours_is_installed()
    left.set()
    thread.join(30)
    assert not ours_is_installed()


def test_threads_may_install_and_iterate_at_once() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                with holdfast.install():
                    assert len(list(DataLoader(Numbers(3)))) == 3
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert failed == []
    assert not ours_is_installed()


def test_a_method_that_another_library_puts_around_ours_stays() -> None:
    torchs = DataLoader.__iter__
    calls = []
    holdfast.install()
    below = DataLoader.__iter__

    @functools.wraps(below)
    def theirs(self: Any) -> Any:
        calls.append(self)
        return below(self)

    DataLoader.__iter__ = theirs  # type: ignore[method-assign]
    try:
        holdfast.install()
        assert DataLoader.__iter__ is theirs
        assert len(list(DataLoader(Numbers(3)))) == 3
        holdfast.uninstall()
        assert DataLoader.__iter__ is theirs
        loader = DataLoader(Numbers(3))
        assert len(list(loader)) == 3
        assert not ours(loader)
        assert len(calls) == 2
    finally:
        DataLoader.__iter__ = torchs  # type: ignore[method-assign]


def test_an_iterator_in_use_goes_on_after_uninstall() -> None:
    with holdfast.install():
        iterator = iter(DataLoader(Numbers(6), num_workers=2))
        assert next(iterator) == 0
    assert [int(batch) for batch in iterator] == [1, 2, 3, 4, 5]


def test_a_loader_of_ours_is_as_ever_while_installed() -> None:
    with holdfast.install(stall_timeout=7):
        loader = holdfast.DataLoader(Numbers(4), num_workers=1, stall_timeout=8)
        assert len(list(loader)) == 4
        assert holdfast.of(loader).options["stall_timeout"] == 8
        assert loader.stats()["batches"] == holdfast.of(loader).stats()["batches"] == 4


# -- what is known ---------------------------------------------------------------------------------


@pytest.mark.faults
def test_incidents_of_the_process_are_those_of_all_its_loaders_also_those_that_are_gone() -> None:
    before = {id(one): one for one in holdfast.incidents()}  # the last thousand, of any test
    with holdfast.install(name="train"):
        for _ in range(2):
            iterator = iter(DataLoader(Numbers(8), num_workers=1))
            next(iterator)
            kill_and_see_it_dead(pids(iterator)[0])
            assert len(list(iterator)) == 7
            del iterator
    found = [one for one in holdfast.incidents() if id(one) not in before]
    assert [(one.kind, one.loader) for one in found] == [("killed", "train")] * 2


def test_of_finds_the_loader_in_a_wrapper() -> None:
    class Wrapper:
        def __init__(self, loader: Any) -> None:
            self.base_dataloader = loader

        @property
        def __class__(self) -> Any:
            return DataLoader

    loader = DataLoader(Numbers(2))
    assert holdfast.of(Wrapper(Wrapper(loader))).loader is loader
    for wrong in (3, "loader", Numbers(2), None):
        with pytest.raises(TypeError, match=r"holdfast.of\(\) takes a torch.utils.data.DataLoader"):
            holdfast.of(wrong)


def test_a_loader_that_was_not_iterated_has_an_empty_report() -> None:
    report = holdfast.of(DataLoader(Numbers(2), num_workers=2))
    assert (report.engine, report.why, report.incidents, report.bad_samples) == (None, "", [], [])
    assert report.stats()["batches"] == report.stats()["incidents"] == 0
    assert "not iterated yet" in repr(report)


class Sees(Dataset[Any]):
    """Whether the worker's process has our engine installed is its own affair."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return info.id, info.num_workers, torch.initial_seed() == info.seed


def test_a_worker_of_a_taken_over_loader_is_one_of_torchs_to_the_dataset() -> None:
    with holdfast.install():
        (seen,) = DataLoader(Sees(), batch_size=None, num_workers=1)
        assert tuple(seen) == (0, 1, True)


def test_torchs_iterators_are_as_before_after_uninstall() -> None:
    init = _BaseDataLoaderIter.__init__
    with holdfast.install():
        assert _BaseDataLoaderIter.__init__ is not init
        assert _BaseDataLoaderIter.__init__.__wrapped__ is init  # type: ignore[attr-defined]
    assert _BaseDataLoaderIter.__init__ is init
