"""What a worker thread is to a dataset, and how it ends."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import itertools
import logging
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import get_worker_info

import holdfast
from holdfast import DataLoader, LoaderClosed
from tests.threads.datasets import Drawing, Gate, OwnGenerator, Plain


def threads(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        dataset, **{"batch_size": 4, "num_workers": 2, **options}, worker_method="thread"
    )


def workers() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("holdfast-worker")]


class Telling(Plain):
    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        assert info.dataset is self
        assert info.num_workers == 2
        time.sleep(0.001)
        return info.id, info.worker_method, threading.current_thread().name, torch.get_num_threads()


def test_each_thread_has_its_worker_info_and_the_main_thread_has_none() -> None:
    before = torch.get_num_threads()
    dataset = Telling()
    seen = set()
    for batch in threads(dataset, batch_size=None):
        assert get_worker_info() is None
        seen.add(tuple(batch))
    assert seen == {(n, "thread", f"holdfast-worker-{n}", 1) for n in (0, 1)}
    assert torch.get_num_threads() == before
    assert not workers()
    # torch's own workers are as before.
    stock = torch.utils.data.DataLoader(Ids(), batch_size=None, num_workers=2)
    assert list(stock) == [0, 1, 0, 1]


class Ids(Plain):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return get_worker_info().id  # type: ignore[union-attr]


def test_batches_are_handed_over_as_they_are() -> None:
    made = [object() for _ in range(6)]
    found = list(threads(made, batch_size=None, collate_fn=lambda sample: sample))
    assert all(one is other for one, other in zip(found, made, strict=True))
    batch = next(iter(threads(Plain())))["x"]
    assert not batch.is_shared()


def test_errors_have_torchs_words_and_name_the_thread() -> None:
    batches = iter(threads(Plain(bad=5)))
    next(batches)
    with pytest.raises(ValueError, match="sample 5 is broken") as caught:
        next(batches)
    assert str(caught.value).startswith(
        "Caught ValueError in DataLoader worker thread 1 (holdfast-worker-1).\nOriginal Traceback"
    )
    assert caught.value.holdfast_sample.index == 5  # type: ignore[attr-defined]
    next(batches)


@pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")
def test_bad_samples_fall_under_the_policy() -> None:
    state = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tobytes()
    loader = threads(Plain(bad=5), on_bad_sample="replace", generator=torch.Generator())
    assert [len(batch["x"]) for batch in loader] == [4] * 6
    assert [one.index for one in loader.bad_samples] == [5]
    assert random.getstate() == state[0]  # the trainer's own
    assert torch.equal(torch.get_rng_state(), state[1])
    assert np.random.get_state()[1].tobytes() == state[2]


class Global(Plain):
    def __getitem__(self, index: int) -> float:
        time.sleep(0.01)
        return float(np.random.rand())


class SlowOwn(OwnGenerator):
    def __getitem__(self, index: int) -> float:
        time.sleep(0.01)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Global(), "numpy.random, .*get_worker_info().rng.numpy_generator"),
        (SlowOwn(), "dataset.rng, .*thread_safe = False"),
    ],
)
def test_a_generator_that_threads_share_is_mentioned_once(
    dataset: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = threads(dataset, num_workers=1)
    with caplog.at_level(logging.WARNING, "holdfast"):
        list(loader), list(loader)
    said = [one.getMessage() for one in caplog.records if "threads share" in one.getMessage()]
    assert len(said) == 1
    assert all(part in said[0] for part in words.split(".*"))


def test_the_consumers_own_draws_are_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        for _ in threads(Plain(), batch_size=2):
            torch.rand(3)
            time.sleep(0.005)
    assert "threads share" not in caplog.text


class Marked(Plain):
    def mark(self, worker: int) -> None:
        self.worker = worker

    def __getitem__(self, index: int) -> int:
        return self.worker


def test_worker_init_fn_changes_a_copy_or_that_is_mentioned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = Marked(4)
    list(threads(dataset, worker_init_fn=dataset.mark))
    assert "worker_init_fn changes the dataset's worker." in caplog.text
    dataset.thread_safe = False  # type: ignore[attr-defined]
    loader = threads(dataset, batch_size=None, worker_init_fn=dataset.mark)
    assert list(loader) == [0, 1, 0, 1]


def test_samples_that_cannot_be_stacked_give_the_error_of_a_worker() -> None:
    ragged = [torch.zeros(4), torch.zeros(3)]
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        list(threads(ragged))


@pytest.mark.parametrize("thread_safe", [True, False])
def test_a_broadcast_reaches_each_dataset_once(thread_safe: bool) -> None:
    dataset = Counting(8)
    dataset.thread_safe = thread_safe  # type: ignore[attr-defined]
    loader = threads(dataset, batch_size=1, persistent_workers=True, prefetch_factor=1)
    list(loader)
    loader.broadcast(Counting.count)
    assert [int(batch) for batch in loader] == [1] * 8
    loader.close()


class Counting(Plain):
    told = 0

    def count(self) -> None:
        self.told += 1

    def __getitem__(self, index: int) -> int:
        return self.told


def test_timeout_is_torchs() -> None:
    gate = Gate(0)
    loader = threads(Drawing(8, gate), timeout=0.1)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.1 seconds"):
        next(iter(loader))
    gate.open.set()
    loader.close()


def test_a_closed_loader_leaves_a_stuck_thread_and_says_where_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate(4)
    loader = threads(Drawing(40, gate))
    batches = iter(loader)
    next(batches)
    deadline = time.monotonic() + 20
    while gate.at and time.monotonic() < deadline:  # until the other worker is in there
        time.sleep(0.01)
    with caplog.at_level(logging.WARNING, "holdfast"):
        loader.close()  # does not wait until the gate is opened
        deadline = time.monotonic() + 20
        while not caplog.text and time.monotonic() < deadline:  # said by the background thread
            time.sleep(0.01)
    assert "still running, although the loader was closed" in caplog.text
    assert "in enter" in caplog.text
    with pytest.raises(LoaderClosed):
        next(batches)
    gate.open.set()
    deadline = time.monotonic() + 20
    while workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not workers()
    assert gate.passed == [4]
    assert len(list(loader)) == 10  # it can be iterated again


def test_a_batch_that_is_not_wanted_any_more_ends_between_two_samples() -> None:
    dataset = Slowly()
    batches = iter(threads(dataset, batch_size=1000, num_workers=1))
    deadline = time.monotonic() + 20
    while not dataset.loaded and time.monotonic() < deadline:
        time.sleep(0.01)
    del batches
    while workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not workers()
    assert dataset.loaded < 500


class Slowly(Plain):
    def __init__(self) -> None:
        super().__init__(1000)
        self.loaded = 0

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        self.loaded += 1
        return index


class Nested(Plain):
    """Each sample is a sum over another loader."""

    def __init__(self, workers: int) -> None:
        super().__init__(4)
        self.workers = workers

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        outer: Any = get_worker_info()
        inner = DataLoader(Inner(), batch_size=3, num_workers=self.workers, worker_method="thread")
        total = sum(int(batch.sum()) for batch in inner)
        assert get_worker_info() is outer
        return index, outer.id, total


class Inner(Plain):
    def __getitem__(self, index: int) -> int:
        return index + 100 * get_worker_info().num_workers  # type: ignore[union-attr]


@pytest.mark.parametrize(("workers", "total"), [(0, 276 + 24 * 200), (1, 276 + 24 * 100)])
def test_nested_loaders_have_their_own_worker_info(workers: int, total: int) -> None:
    found = list(threads(Nested(workers), batch_size=None))
    assert found == [[n, n % 2, total] for n in range(4)]


def test_the_option_is_checked_and_can_be_given_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"worker_method='fibre' is not one .*\"thread\""):
        DataLoader([1], worker_method="fibre")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="worker_method=3 is of the wrong type"):
        DataLoader([1], worker_method=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seeding='sample' is not possible"):
        DataLoader([1], num_workers=1, worker_method="thread", seeding="sample")
    assert DataLoader([1]).worker_method == "multiprocessing"
    monkeypatch.setenv("HOLDFAST_WORKER_METHOD", "thread")
    assert {one[1] for one in DataLoader(Telling(), batch_size=None, num_workers=2)} == {"thread"}
    monkeypatch.setenv("HOLDFAST_WORKER_METHOD", "rope")
    with pytest.raises(ValueError, match="HOLDFAST_WORKER_METHOD='rope'"):
        DataLoader([1])


def test_a_dataset_that_cannot_be_copied_is_an_error_that_says_so() -> None:
    dataset = Plain()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    dataset.thread_safe = False  # type: ignore[attr-defined]
    with pytest.raises(holdfast.WorkerStartError, match=r"cannot pickle '_thread\.lock'"):
        list(threads(dataset))


class Copied(Plain):
    """Knows the copies of it that are there."""

    thread_safe = False

    def __init__(self) -> None:
        super().__init__()
        self.copies: weakref.WeakSet[Any] = weakref.WeakSet()

    def __deepcopy__(self, memo: Any) -> Copied:
        made = Copied()
        made.copies = self.copies
        self.copies.add(made)
        return made


class Closing(torch.utils.data.IterableDataset[int]):
    """A stream that is longer than anyone reads, and says in which thread it was closed."""

    def __init__(self) -> None:
        self.closed_in: list[str] = []

    def __deepcopy__(self, memo: Any) -> Closing:
        return self

    def __iter__(self) -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            self.closed_in.append(threading.current_thread().name)


class Manners(Plain):
    def __getitem__(self, index: int) -> Any:
        return torch.is_grad_enabled(), str(np.geterr()["divide"]), MANNER.get()


MANNER: contextvars.ContextVar[str] = contextvars.ContextVar("MANNER", default="")


@pytest.mark.parametrize("method", ["thread", "multiprocessing"])
def test_what_belongs_to_a_thread_is_that_of_the_consumer(method: Any) -> None:
    loader: Any = DataLoader(Manners(), batch_size=None, num_workers=2, worker_method=method)
    assert {tuple(one) for one in loader} == {(True, "warn", "")}
    token = MANNER.set("mine")
    try:
        with torch.no_grad(), np.errstate(divide="raise"):
            assert {tuple(one) for one in loader} == {(False, "raise", "mine")}
    finally:
        MANNER.reset(token)


def test_a_thread_that_takes_anothers_place_has_its_manner() -> None:
    gate = Gate(4)

    class Stuck(Manners):
        def __getitem__(self, index: int) -> Any:
            gate.enter(index)
            return super().__getitem__(index)

    with torch.no_grad():
        batches = iter(threads(Stuck(), stall_timeout=0.2, num_workers=1))
    assert not any(batch[0].any() for batch in batches)
    gate.open.set()


class FileSystem:
    """One for each thread, as fsspec's are: a copy of one is that of the thread which copies."""

    cache: ClassVar[dict[int, FileSystem]] = {}

    def __deepcopy__(self, memo: Any) -> FileSystem:
        return self.cache.setdefault(threading.get_ident(), FileSystem())


class OnFileSystem(torch.utils.data.IterableDataset[int]):
    """Has the cache of all file systems, as datasets of Hugging Face do."""

    def __init__(self) -> None:
        self.cache = FileSystem.cache

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state, cache=FileSystem.cache)

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        assert info.dataset is self
        yield from range(info.id, 10, info.num_workers)


def test_a_dataset_with_a_cache_that_grows_as_it_is_copied_is_copied() -> None:
    FileSystem.cache.update({0: FileSystem(), threading.get_ident(): FileSystem()})
    try:
        batches = list(threads(OnFileSystem()))
    finally:
        FileSystem.cache.clear()
    assert sorted(int(one) for batch in batches for one in batch) == list(range(10))


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"on_bad_sample": "skip"}])
def test_copies_of_the_dataset_are_released_with_their_workers(
    options: dict[str, Any],
) -> None:
    dataset = Copied()
    with no_garbage_collection():
        loader = threads(dataset, **options)
        assert len(list(loader)) == 6
        batches = iter(loader)
        next(batches)
        loader.close()
        del batches
        deadline = time.monotonic() + 20
        while dataset.copies and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not dataset.copies


def test_a_stream_that_is_left_is_closed_in_its_thread() -> None:
    stream = Closing()
    with no_garbage_collection():
        loader = threads(stream)
        batches = iter(loader)
        for _ in range(2):  # one of each worker: both have begun
            next(batches)
        loader.close()
        del batches
        deadline = time.monotonic() + 20
        while len(stream.closed_in) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sorted(stream.closed_in) == ["holdfast-worker-0", "holdfast-worker-1"]


class CopiedOnce(Plain):
    """Its copy cannot be copied, and that takes a moment to find out."""

    thread_safe = False
    is_copy = False

    def __deepcopy__(self, memo: Any) -> CopiedOnce:
        if self.is_copy:
            time.sleep(0.05)
            raise TypeError("not again")
        made = CopiedOnce()
        made.is_copy = True
        return made


def test_a_worker_that_has_no_copy_is_no_incident_besides(caplog: pytest.LogCaptureFixture) -> None:
    loader = threads(CopiedOnce(), num_workers=3)
    with pytest.raises(holdfast.WorkerStartError, match="not again"):
        list(loader)
    assert loader.incidents == []
    assert not caplog.text


# -- in programs of their own ---------------------------------------------------------------


def run(script: str, *args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended


@pytest.mark.slow
def test_a_script_ends_well_although_a_thread_computes() -> None:
    """One that comes back from torch's code when the interpreter is gone would abort it."""
    ended = run(
        """
        import torch
        from holdfast import DataLoader
        from tests.threads.datasets import Plain

        class Busy(Plain):
            def __getitem__(self, index):
                matrix = torch.eye(700)
                while index:
                    matrix = matrix @ matrix

        loader = DataLoader(Busy(), batch_size=1, num_workers=2, worker_method="thread", collate_fn=list)
        batches = iter(loader)
        print(next(batches))
        """
    )
    assert ended.stdout == "[None]\n"
    assert "still running, although the loader was closed" in ended.stderr
    assert "Error" not in ended.stderr


@pytest.mark.slow
def test_a_script_with_an_interrupt_and_forks_ends_although_a_thread_is_stuck() -> None:
    ended = run(
        """
        import os, signal, threading, warnings
        warnings.simplefilter("ignore")
        import torch.utils.data as data
        from holdfast import DataLoader, LoaderClosed
        from tests.threads.datasets import Drawing, Gate

        class Forking(Drawing):
            def __getitem__(self, index):
                if index != 2:
                    return index
                read, write = os.pipe()
                child = os.fork()
                if not child:
                    info = data.get_worker_info()
                    stock = data.DataLoader([0, 1], num_workers=0)
                    os.write(write, b"yes" if info.id == 0 and len(list(stock)) == 2 else b"no")
                    os._exit(0)
                os.waitpid(child, 0)
                return os.read(read, 3) == b"yes"

        loader = DataLoader(Drawing(400), batch_size=4, num_workers=2, worker_method="thread")
        batches = iter(loader)
        next(batches)
        child = os.fork()
        if not child:
            try:
                next(batches)
            except LoaderClosed:
                os._exit(0 if len(list(loader)) == 100 else 2)
            os._exit(3)
        print(os.waitpid(child, 0)[1], sum(1 for _ in batches))
        forking = DataLoader(Forking(3), batch_size=None, num_workers=1, worker_method="thread")
        print(list(forking)[2], data.get_worker_info())
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        loader = DataLoader(Drawing(8, Gate(1)), batch_size=4, num_workers=2, worker_method="thread")
        try:
            next(iter(loader))
        except KeyboardInterrupt:
            print("interrupted")
        print(len(list(loader)))
        """
    )
    assert ended.stdout == "0 99\nTrue None\ninterrupted\n2\n", ended.stderr
    assert "still running" in ended.stderr
    assert "Fatal" not in ended.stderr
    assert "Traceback" not in ended.stderr


FOREIGN = """
import importlib.abc, os, select, signal, sys
import numpy, torch, torch.utils.data  # these exist on that platform, in a form of its own

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in missing:
            raise ImportError(f"there is no {name} on this platform")

missing = {"fcntl", "resource", "termios", "_posixshmem"}
for name in missing:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
sys.platform = sys.argv[1]
lacking = [(os, "memfd_create pidfd_open posix_fallocate sched_getaffinity sched_setscheduler")]
if sys.platform == "win32":
    lacking += [
        (os, "fork register_at_fork sched_yield uname getuid WIFSIGNALED pread O_DIRECTORY"),
        (signal, "SIGALRM SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGCHLD"),
        (select, "poll"),
    ]
for module, names in lacking:
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

import warnings
warnings.simplefilter("ignore")
from holdfast import DataLoader
from tests.threads.datasets import Gate, Plain

class Dataset(Plain):
    gate = Gate(9)
    def __getitem__(self, index):
        self.gate.enter(index)
        return super().__getitem__(index)["x"][0]

for workers in (0, 2):
    Dataset.gate.at = {9} if workers else set()
    loader = DataLoader(Dataset(bad=5), batch_size=4, num_workers=workers, stall_timeout=0.25,
                        on_bad_sample="skip", worker_method="thread", logbook=sys.argv[2])
    print(sum(int(batch.sum()) for batch in loader), [one.index for one in loader.bad_samples],
          [one.kind for one in loader.incidents])
print([name for name in sys.modules if name.startswith("holdfast.processes") or name in missing])
"""


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["win32", pytest.param("darwin", marks=pytest.mark.slow)])
def test_without_what_only_linux_has(platform: str, tmp_path: Path) -> None:
    ended = run(FOREIGN, platform, str(tmp_path))
    assert ended.stdout == "271 [5] []\n271 [5] ['unkillable']\n[]\n", ended.stderr
