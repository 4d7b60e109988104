"""contract.md section 6: what code finds that runs inside a worker."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.context
import multiprocessing.util
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from tests.support.datasets import Calls, Counting, Numbers, Pids, Revealing, Telling, Unpicklable
from tests.support.errors import error_of_next
from tests.support.loaders import STOCK, Loader
from tests.support.parts import mark
from tests.support.processes import eventually
from tests.support.scripts import run_script

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*excessive worker creation"),
]

# Our workers start under forkserver as under spawn.
FORKSERVER = pytest.param("forkserver", marks=pytest.mark.slow)
SPAWN = pytest.param("spawn", marks=pytest.mark.slow)  # where others show it too
START_METHODS = pytest.mark.parametrize("context", ["fork", "spawn", FORKSERVER])


def about_me(index: int) -> dict[str, Any]:
    info = get_worker_info()
    assert info is not None
    return {
        "id": info.id,
        "num_workers": info.num_workers,
        "seed": info.seed,
        "more": {name: getattr(info, name, "nothing") for name in ("rng", "worker_method")},
        "repr": repr(info),
        "type": f"{type(info).__module__}.{type(info).__name__}",
        "initial seed": torch.initial_seed(),
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "comm": Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip(),
        "daemon": multiprocessing.current_process().daemon,
        "is a child": multiprocessing.parent_process() is not None,
        "main thread": threading.current_thread() is threading.main_thread(),
        "argv": sys.argv,
    }


@functools.cache
def torchs_worker_info() -> dict[str, Any]:
    """What a worker of the torch that is installed says."""
    (told,) = STOCK(Calls(1, about_me), batch_size=None, num_workers=1)
    return told  # type: ignore[no-any-return]


@START_METHODS
def test_get_worker_info_tells_all_that_torchs_tells(loader_class: Loader, context: str) -> None:
    loader = loader_class(
        Calls(2, about_me), batch_size=None, num_workers=2, multiprocessing_context=context
    )
    expected = torchs_worker_info()
    for worker, told in enumerate(loader):
        assert told["id"] == worker
        assert told["num_workers"] == 2
        assert told["seed"] == told["initial seed"]
        if loader_class is STOCK:
            assert told["more"] == expected["more"]  # none of it before torch 2.13
        else:  # ours has generators of its own there: docs/worker-methods.md
            assert told["more"].pop("rng", None) is not None
            assert told["more"].get("worker_method", "multiprocessing") == "multiprocessing"
        assert told["type"] == "torch.utils.data._utils.worker.WorkerInfo"
        assert set(re.findall(r"\w+=", expected["repr"])) <= set(re.findall(r"\w+=", told["repr"]))
        assert told["threads"] == 1
        assert told["comm"] == "pt_data_worker"
        assert told["main thread"]
        assert told["argv"] == sys.argv


def test_a_worker_is_a_daemonic_child_to_multiprocessing(loader_class: Loader) -> None:
    loader = loader_class(Calls(1, about_me), batch_size=None, num_workers=1)
    (told,) = loader
    assert told["daemon"] is True
    assert told["is a child"]


def test_get_worker_info_is_none_in_the_main_process(loader_class: Loader) -> None:
    assert get_worker_info() is None
    loader = loader_class(Numbers(4), num_workers=2)
    for _ in loader:
        assert get_worker_info() is None
    assert get_worker_info() is None
    assert list(
        loader_class(Calls(2, lambda index: get_worker_info() is None), batch_size=None)
    ) == [True, True]


class Everywhere(IterableDataset[Any]):
    """Notes the worker id in every place where user code runs."""

    def __init__(self) -> None:
        self.places: dict[str, Any] = {"made": get_worker_info()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.places["unpickled"] = get_worker_info() is None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        self.places["iter"] = (info.id, info.dataset is self)
        yield from self.samples()

    def samples(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        yield {**self.places, "next": info.id}


def note_init(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.places["init"] = (worker_id, info.id)  # type: ignore[attr-defined]


def note_collate(sample: dict[str, Any]) -> dict[str, Any]:
    info = get_worker_info()
    assert info is not None
    return {**sample, "collate": info.id}


@pytest.mark.slow
@START_METHODS
def test_get_worker_info_works_in_every_place_where_user_code_runs(
    loader_class: Loader, context: str
) -> None:
    loader = loader_class(
        Everywhere(),
        batch_size=None,
        num_workers=2,
        worker_init_fn=note_init,
        collate_fn=note_collate,
        multiprocessing_context=context,
    )
    for worker, places in enumerate(loader):
        if context != "fork":
            assert places.pop("unpickled") is True, (
                "torch has no worker info yet while it unpickles"
            )
        assert places == {
            "made": None,
            "init": (worker, worker),
            "iter": (worker, True),
            "next": worker,
            "collate": worker,
        }


def test_worker_init_fn_changes_the_workers_own_dataset_only(loader_class: Loader) -> None:
    dataset = Revealing(4)
    loader = loader_class(dataset, batch_size=None, num_workers=2, worker_init_fn=mark)
    assert [(sample["mark"], sample["own"]) for sample in loader] == [(100, True), (200, True)] * 2
    assert dataset.mark == 0


class Configurable(Numbers):
    """worker_init_fn is a method of the dataset itself."""

    value = -1

    def set_up(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        self.value = 10 * worker_id

    def __getitem__(self, index: int) -> int:
        return self.value


@pytest.mark.parametrize("context", ["fork", SPAWN])
def test_worker_init_fn_may_be_a_bound_method_of_the_dataset(
    loader_class: Loader, context: str
) -> None:
    dataset = Configurable(4)
    loader = loader_class(
        dataset,
        batch_size=None,
        num_workers=2,
        worker_init_fn=dataset.set_up,
        multiprocessing_context=context,
    )
    assert list(loader) == [0, 10, 0, 10]
    assert dataset.value == -1


class CountsInits:
    def __init__(self, counter: Any) -> None:
        self.counter = counter

    def __call__(self, worker_id: int) -> None:
        with self.counter.get_lock():
            self.counter.value += 1


def test_worker_init_fn_runs_once_for_each_worker(loader_class: Loader) -> None:
    counter = multiprocessing.Value("i", 0)
    loader = loader_class(
        Numbers(9), num_workers=2, worker_init_fn=CountsInits(counter), persistent_workers=True
    )
    for _ in range(3):
        list(loader)
    assert counter.value == 2
    loader = loader_class(Numbers(9), num_workers=2, worker_init_fn=CountsInits(counter))
    list(loader)
    assert counter.value == 4


def pin_to_one_core(worker_id: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[worker_id % len(cores)]})


def affinity(index: int) -> list[int]:
    return sorted(os.sched_getaffinity(0))


def test_an_affinity_set_by_worker_init_fn_lasts(loader_class: Loader) -> None:
    cores = sorted(os.sched_getaffinity(0))
    loader = loader_class(
        Calls(4, affinity), batch_size=None, num_workers=2, worker_init_fn=pin_to_one_core
    )
    assert list(loader) == [[cores[0]], [cores[1 % len(cores)]]] * 2
    plain = loader_class(Calls(1, affinity), batch_size=None, num_workers=1)
    assert list(plain) == [cores]


class Redirects:
    """Sends the worker's stderr into a file, at the level of the descriptor."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, worker_id: int) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 2)
        os.close(file)


def write_to_stderr(index: int) -> int:
    os.write(2, f"line {index}\n".encode())
    return index


def test_worker_init_fn_may_redirect_stderr(loader_class: Loader, tmp_path: Path) -> None:
    file = tmp_path / "stderr"
    loader = loader_class(
        Calls(4, write_to_stderr),
        batch_size=None,
        num_workers=2,
        worker_init_fn=Redirects(str(file)),
    )
    assert list(loader) == [0, 1, 2, 3]
    assert sorted(file.read_text().split("\n")) == ["", "line 0", "line 1", "line 2", "line 3"]


def test_what_a_worker_prints_comes_out_where_the_trainer_prints(
    loader_class: Loader, capfd: pytest.CaptureFixture[str]
) -> None:
    assert list(loader_class(Calls(2, write_to_stderr), batch_size=None, num_workers=1)) == [0, 1]
    assert capfd.readouterr().err == "line 0\nline 1\n"


@pytest.mark.parametrize("context", ["fork", SPAWN])
def test_the_iterator_names_the_pid_of_each_worker(loader_class: Loader, context: str) -> None:
    loader = loader_class(Pids(4), batch_size=None, num_workers=2, multiprocessing_context=context)
    iterator = iter(loader)
    pids = [worker.pid for worker in iterator._workers]
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    assert [pid for _, pid, _ in iterator] == pids * 2


def test_worker_handles_tell_that_they_live_and_can_be_joined(loader_class: Loader) -> None:
    iterator = iter(loader_class(Numbers(20), num_workers=2))
    next(iterator)
    workers = list(iterator._workers)
    assert all(worker.is_alive() for worker in workers)
    assert [worker.exitcode for worker in workers] == [None, None]
    del iterator
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
        assert worker.exitcode == 0


def convolve(index: int) -> torch.Tensor:
    return torch.nn.functional.conv1d(torch.ones(1, 1, 1000), torch.ones(1, 1, 3)).sum()


def test_tensors_can_be_computed_on_in_a_worker_after_the_parent_did_so(
    loader_class: Loader,
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        expected = convolve(0)
        torch.randperm(2**17)
        loader = loader_class(Calls(4, convolve), num_workers=2)
        assert torch.cat(list(loader)).tolist() == [expected.item()] * 4
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)


def start_a_child(index: int) -> int:
    child = multiprocessing.Process(target=print)
    child.start()
    child.join()
    return index


def test_a_worker_may_not_start_children_by_multiprocessing(loader_class: Loader) -> None:
    iterator = iter(loader_class(Calls(1, start_a_child), num_workers=1))
    error = error_of_next(iterator)
    assert type(error) is AssertionError
    assert "daemonic processes are not allowed to have children" in str(error)


def fork_by_hand(index: int) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(index + 3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_worker_may_fork_by_hand_and_wait_for_its_own_child(loader_class: Loader) -> None:
    loader = loader_class(Calls(2, fork_by_hand), batch_size=None, num_workers=1)
    assert list(loader) == [3, 4]


def use_threads(index: int) -> int:
    found: list[int] = []
    threads = [threading.Thread(target=found.append, args=(number,)) for number in range(index + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(found)


def test_a_worker_may_use_threads(loader_class: Loader) -> None:
    assert list(loader_class(Calls(4, use_threads), batch_size=None, num_workers=2)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("context", "as_object"),
    [
        ("fork", False),
        ("fork", True),
        # The data under spawn are compared with torch's in tests/differential, in each run.
        pytest.param("spawn", False, marks=pytest.mark.slow),
        pytest.param("spawn", True, marks=pytest.mark.slow),
        pytest.param("forkserver", False, marks=pytest.mark.slow),
        pytest.param("forkserver", True, marks=pytest.mark.slow),
    ],
)
def test_every_start_method_gives_the_same_data(
    loader_class: Loader, context: str, as_object: bool
) -> None:
    given = multiprocessing.get_context(context) if as_object else context
    loader = loader_class(Numbers(5), batch_size=2, num_workers=2, multiprocessing_context=given)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def start_method_of_me(index: int) -> str:
    return str(multiprocessing.get_start_method(allow_none=True))


def test_no_context_means_the_default_start_method_of_that_time(loader_class: Loader) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    loader = loader_class(Unpicklable(2), num_workers=1)
    try:
        multiprocessing.set_start_method("fork", force=True)
        assert len(list(loader)) == 2
        multiprocessing.set_start_method("spawn", force=True)
        with (
            pytest.warns(UserWarning, match="Got pickle error when"),
            pytest.raises((AttributeError, TypeError, RuntimeError)),
        ):
            list(loader)
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.slow
def test_where_forkserver_is_the_default_workers_are_started_so(
    holdfast_class: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Python 3.14, where no program has to ask for it."""
    default: Any = multiprocessing.context._default_context
    monkeypatch.setattr(default, "_default_context", multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(default, "_actual_context", None)
    loader = holdfast_class(Calls(1, start_method_of_me), batch_size=None, num_workers=1)
    assert list(loader) == ["forkserver"]
    with (
        pytest.warns(UserWarning, match="Got pickle error when"),
        pytest.raises((AttributeError, TypeError, RuntimeError)),
    ):
        list(holdfast_class(Unpicklable(2), num_workers=1))


@pytest.mark.slow
@START_METHODS
def test_a_dataset_may_hold_multiprocessing_locks_and_values(
    loader_class: Loader, context: str
) -> None:
    """They pickle only while a child is being started; sharing a counter this way is common
    advice."""
    counter = multiprocessing.get_context(context).Value("i", 0)
    loader = loader_class(
        Counting(6, counter), batch_size=2, num_workers=2, multiprocessing_context=context
    )
    assert torch.cat(list(loader)).tolist() == list(range(6))
    assert counter.value == 6


def test_a_shared_value_reaches_persistent_workers(loader_class: Loader) -> None:
    value = multiprocessing.Value("i", 1)
    loader = loader_class(
        Telling(4, value), batch_size=None, num_workers=2, persistent_workers=True
    )
    assert list(loader) == [1] * 4
    value.value = 2
    assert list(loader) == [2] * 4


def test_persistent_workers_keep_their_copy_and_fresh_ones_see_changes(
    loader_class: Loader,
) -> None:
    dataset = Revealing(2)
    kept = loader_class(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    fresh = loader_class(dataset, batch_size=None, num_workers=2)
    assert [sample["mark"] for sample in kept] == [0, 0]
    dataset.mark = 7
    assert [sample["mark"] for sample in kept] == [0, 0]
    assert [sample["mark"] for sample in fresh] == [7, 7]


def environment(index: int) -> tuple[str | None, str]:
    return os.environ.get("SET_BY_THE_TRAINER"), os.getcwd()


def test_workers_see_the_environment_and_folder_of_the_time_of_iter(
    loader_class: Loader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loader = loader_class(Calls(1, environment), batch_size=None, num_workers=1)
    monkeypatch.setenv("SET_BY_THE_TRAINER", "yes")
    monkeypatch.chdir(tmp_path)
    assert [tuple(sample) for sample in loader] == [("yes", str(tmp_path))]


def read_stdin(index: int) -> str:
    return sys.stdin.read()


def test_a_worker_that_reads_stdin_gets_its_end(loader_class: Loader) -> None:
    assert list(loader_class(Calls(2, read_stdin), batch_size=None, num_workers=1)) == ["", ""]


def parent(index: int) -> int:
    process = multiprocessing.parent_process()
    assert process is not None
    assert process.pid is not None
    return process.pid


@pytest.mark.parametrize("context", ["fork", SPAWN])
def test_the_parent_process_of_a_worker_is_the_trainer(loader_class: Loader, context: str) -> None:
    loader = loader_class(
        Calls(1, parent), batch_size=None, num_workers=1, multiprocessing_context=context
    )
    assert list(loader) == [os.getpid()]


class WritesAtExit:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, worker_id: int) -> None:
        finalize = (self.folder / f"finalized {worker_id}").touch
        multiprocessing.util.Finalize(None, finalize, exitpriority=1)
        atexit.register((self.folder / f"left {worker_id}").touch)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_workers_own_cleaning_up_is_run_at_its_end(
    loader_class: Loader, tmp_path: Path, persistent_workers: bool
) -> None:
    """torch ends workers politely so that they can let go of what they hold. Since 3.13 that includes what they have
    registered with `atexit`; what the trainer has is not theirs."""
    atexit.register(by_the_trainer := (tmp_path / "trainer").touch)
    try:
        loader = loader_class(
            Numbers(4),
            num_workers=2,
            worker_init_fn=WritesAtExit(tmp_path),
            persistent_workers=persistent_workers,
        )
        list(loader)
        del loader
    finally:
        atexit.unregister(by_the_trainer)
    expected = [f"finalized {worker}" for worker in (0, 1)]
    if sys.version_info >= (3, 13):
        expected += [f"left {worker}" for worker in (0, 1)]
    assert eventually(lambda: sorted(file.name for file in tmp_path.iterdir()) == expected)


PRINTS = """
    from tests.support.datasets import Calls
    def say(index):
        print("sample", index)
        return index
    if __name__ == "__main__":
        print("before")
        print(list(DataLoader(Calls(4, say), batch_size=None, num_workers=2)))
"""


def test_what_workers_print_comes_out_once_and_nothing_twice(which_script: str) -> None:
    """Into a file, where Python keeps it back: it must be written at the worker's end, and what the
    trainer has kept back must not be written by the workers too."""
    ended = run_script(which_script, PRINTS)
    assert (ended.code, ended.err) == (0, "")
    assert sorted(ended.out.splitlines()) == [
        "[0, 1, 2, 3]",
        "before",
        *(f"sample {n}" for n in range(4)),
    ]


CLOSED = """
    import os, sys
    for number in (0, 1, 2):
        os.close(number)
    from tests.support.datasets import Images
    try:
        found = [label.tolist() for _, label in DataLoader(Images(6), batch_size=2, num_workers=2)]
    except BaseException as error:
        found = repr(error)
    open({path!r}, "w").write(str(found))
    os._exit(0)
"""


def test_a_trainer_without_standard_streams_gets_its_batches(
    which_script: str, tmp_path: Path
) -> None:
    """A daemon: our descriptors may then have the numbers 0, 1 and 2."""
    path = tmp_path / "found"
    run_script(which_script, CLOSED.format(path=str(path)))
    assert path.read_text() == "[[0, 1], [2, 0], [1, 2]]"


@pytest.mark.slow
def test_python_itself_has_nothing_to_warn_about(tmp_path: Path) -> None:
    """Not one unclosed file, under Python's development mode with warnings as errors."""
    ended = run_script(
        "holdfast",
        """
        from tests.support.datasets import Images
        for persistent in (False, True):
            loader = DataLoader(Images(6), num_workers=2, persistent_workers=persistent)
            for _ in range(2):
                assert len(list(loader)) == 6
                next(iter(loader))
            del loader
        """,
        options=("-X", "dev", "-W", "error"),
    )
    assert (ended.code, ended.err) == (0, "")
