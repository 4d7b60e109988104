"""contract.md section 7, second half: timeouts, and every way in which loading comes to its end.

The scripts run in interpreters of their own: how one ends, and what it then prints, shows nowhere
else. Bounds of time are generous; they stand between "ends" and "hangs", not between fast and slow.
"""

from __future__ import annotations

import atexit
import gc
import time
import warnings
from typing import Any

import pytest
import torch

from tests.support.datasets import Images, Numbers, Pids, Sleeper, Stream
from tests.support.errors import error_of_next
from tests.support.loaders import STOCK, Loader
from tests.support.processes import alive, children, eventually
from tests.support.scripts import run_script

pytestmark = pytest.mark.timeout(120)


def started(loader: Any) -> tuple[Any, set[int]]:
    """An iterator under way and the pids of its workers."""
    iterator = iter(loader)
    next(iterator)
    return iterator, {worker.pid for worker in iterator._workers}


def test_a_timeout_is_a_runtime_error_in_torchs_words(loader_class: Loader) -> None:
    iterator = iter(loader_class(Sleeper(4, at=1), batch_size=None, num_workers=1, timeout=1))
    assert next(iterator) == 0
    error = error_of_next(iterator)
    assert type(error) is RuntimeError
    assert str(error).startswith("DataLoader timed out after 1 seconds")


def test_a_timeout_that_is_not_reached_changes_nothing(loader_class: Loader) -> None:
    loader = loader_class(Numbers(6), batch_size=2, num_workers=2, timeout=30)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("dataset", [Numbers(100), Stream(100)], ids=["map", "iterable"])
def test_dropping_the_iterator_half_way_ends_the_workers(
    loader_class: Loader, dataset: Any, persistent_workers: bool
) -> None:
    loader = loader_class(dataset, num_workers=2, persistent_workers=persistent_workers)
    iterator, pids = started(loader)
    workers = list(iterator._workers)
    del iterator, loader
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert eventually(lambda: not any(map(alive, pids)))


def test_an_iterable_that_is_used_up_ends_its_workers_with_code_0(loader_class: Loader) -> None:
    iterator = iter(loader_class(Stream(4), num_workers=2))
    workers = list(iterator._workers)
    assert len(list(iterator)) == 8
    del iterator
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0


def test_the_end_of_an_epoch_ends_the_workers_though_the_iterator_is_kept(
    loader_class: Loader,
) -> None:
    iterator, pids = started(loader_class(Numbers(4), num_workers=2))
    assert len(list(iterator)) == 3
    assert eventually(lambda: not any(map(alive, pids)))
    assert iterator is not None


def test_a_break_ends_the_workers(loader_class: Loader) -> None:
    before = children()
    for _, _, _ in loader_class(Pids(50), num_workers=2):
        break
    assert eventually(lambda: children() == before)


def test_an_exception_in_the_loop_ends_the_workers_once_it_is_dealt_with(
    loader_class: Loader,
) -> None:
    before = children()
    try:
        for _ in loader_class(Numbers(50), num_workers=2):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert eventually(lambda: children() == before)


def test_a_cycle_with_a_live_iterator_is_collected_without_delay(holdfast_class: Loader) -> None:
    """torch blocks the main thread for 5 s per worker."""

    class Keeps:
        def __init__(self) -> None:
            self.me = self
            self.iterator = iter(holdfast_class(Numbers(50), num_workers=2))

    before = children()
    keeper = Keeps()
    next(keeper.iterator)
    del keeper
    began = time.monotonic()
    gc.collect()
    assert time.monotonic() - began < 4
    assert eventually(lambda: children() == before)


def told(loader: Any) -> tuple[Any, list[str]]:
    """The batches of an epoch, or the error that ends it, and what is warned of meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found: Any = list(loader)
        except Exception as error:
            found = type(error)
    return found, [str(one.message) for one in caught if one.category is UserWarning]


def test_pin_memory_without_accelerator_warns_as_torch_and_gives_plain_memory(
    loader_class: Loader,
) -> None:
    """torch 2.13 says that there is none; 2.6 says nothing."""
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    for num_workers in (0, 2):
        arguments: dict[str, Any] = {"num_workers": num_workers, "pin_memory": True}
        batches, said = told(loader_class(Images(4), batch_size=2, **arguments))
        assert [label.tolist() for _, label in batches] == [[0, 1], [2, 0]]
        assert not any(image.is_pinned() for image, _ in batches)
        assert said == told(STOCK(Images(4), batch_size=2, **arguments))[1]


def test_pin_memory_device_says_what_it_says_with_torch(loader_class: Loader) -> None:
    """2.13 that it is deprecated; 2.6 pins, and raises where that cannot be done."""
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    for asked in (True, False):
        arguments = {"pin_memory": asked, "pin_memory_device": "cuda"}
        found, said = told(loader_class(Images(2), **arguments))
        expected, said_by_torch = told(STOCK(Images(2), **arguments))
        assert said == said_by_torch
        assert type(found) is type(expected)
        assert isinstance(found, list) or found is expected


# --- Interpreters that end ------------------------------------------------------------------------


def assert_quiet_end(which: str, body: str, out: str = "") -> None:
    ended = run_script(which, body)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == out
    assert not ended.left


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_exit_right_after_a_break_with_persistent_workers(which_script: str, context: str) -> None:
    assert_quiet_end(
        which_script,
        f"""
        from tests.support.datasets import Images
        import warnings; warnings.simplefilter("ignore")
        if __name__ == "__main__":
            loader = DataLoader(Images(50), batch_size=2, num_workers=2, persistent_workers=True,
                                pin_memory=True, multiprocessing_context={context!r})
            for batch in loader:
                break
        """,
    )


@pytest.mark.slow  # tests/lifecycle has it with workers in every state
def test_exit_with_a_live_iterator(which_script: str) -> None:
    assert_quiet_end(
        which_script,
        """
        from tests.support.datasets import Images
        iterator = iter(DataLoader(Images(50), batch_size=2, num_workers=2))
        next(iterator)
        print("done")
        """,
        "done\n",
    )


@pytest.mark.slow
def test_exit_with_several_loaders_in_different_states(which_script: str) -> None:
    assert_quiet_end(
        which_script,
        """
        from tests.support.datasets import Images, Stream
        used_up = DataLoader(Images(6), num_workers=1, persistent_workers=True)
        list(used_up)
        half = iter(DataLoader(Stream(50), num_workers=1))
        next(half)
        fresh = iter(DataLoader(Images(6), num_workers=1))
        kept = list(DataLoader(Images(6), num_workers=1))
        print(len(kept))
        """,
        "6\n",
    )


def test_exit_while_a_traceback_holds_the_iterator(which_script: str) -> None:
    assert_quiet_end(
        which_script,
        """
        import sys
        from tests.support.datasets import Images
        def use():
            iterator = iter(DataLoader(Images(50), batch_size=2, num_workers=2))
            for batch in iterator:
                raise ValueError("held")
        try:
            use()
        except ValueError as error:
            held = error, sys.exc_info()
        print("going")
        """,
        "going\n",
    )


def test_exit_while_the_feed_to_a_worker_is_full(which_script: str) -> None:
    assert_quiet_end(
        which_script,
        """
        from tests.support.datasets import Numbers
        loader = DataLoader(Numbers(400000), batch_size=40960, num_workers=2)
        for batch in loader:
            break
        print(len(batch))
        """,
        "40960\n",
    )


@pytest.mark.slow
def test_exit_while_the_feed_is_full_and_the_iterator_held(which_script: str) -> None:
    assert_quiet_end(
        which_script,
        """
        from tests.support.datasets import Numbers
        iterator = iter(DataLoader(Numbers(400000), batch_size=40960, num_workers=2))
        next(iterator)
        """,
    )


@pytest.mark.slow  # tests/lifecycle has it too
def test_an_exception_in_the_loop_ends_the_script_with_its_own_traceback_only(which: str) -> None:
    ended = run_script(
        which,
        """
        from tests.support.datasets import Images
        for batch in DataLoader(Images(50), batch_size=2, num_workers=2, persistent_workers=True):
            raise ValueError("mine")
        """,
    )
    assert ended.code == 1
    assert ended.err.startswith("Traceback (most recent call last):\n")
    assert ended.err.endswith("ValueError: mine\n")
    assert ended.err.count("Traceback") == 1
    assert not ended.left


@pytest.mark.slow
def test_an_error_in_a_worker_ends_the_script_with_that_error(which: str) -> None:
    ended = run_script(
        which,
        """
        from tests.support.datasets import Raising
        for batch in DataLoader(Raising(50), batch_size=2, num_workers=2):
            pass
        """,
    )
    assert ended.code == 1
    assert "ValueError: Caught ValueError in DataLoader worker process 0." in ended.err
    assert ended.err.count("value 1 is wrong") == 1
    assert not ended.left


@pytest.mark.slow
def test_a_script_can_exit_after_a_timeout(which: str) -> None:
    ended = run_script(
        which,
        """
        from tests.support.datasets import Sleeper
        iterator = iter(DataLoader(Sleeper(4, at=0), num_workers=1, timeout=1))
        try:
            next(iterator)
        except RuntimeError as error:
            print(str(error)[:36])
        """,
    )
    assert ended.code == 0
    assert ended.out == "DataLoader timed out after 1 seconds\n"
    assert not ended.left


@pytest.mark.slow
def test_sys_exit_in_the_loop_ends_with_its_code(which: str) -> None:
    ended = run_script(
        which,
        """
        import sys
        from tests.support.datasets import Images
        for batch in DataLoader(Images(50), num_workers=2):
            sys.exit(7)
        """,
    )
    assert (ended.code, ended.out, ended.err) == (7, "", "")
    assert not ended.left


@pytest.mark.slow
def test_a_script_run_in_a_thread_ends_too(which_script: str) -> None:
    assert_quiet_end(
        which_script,
        """
        import threading
        from tests.support.datasets import Images
        kept = []
        def use():
            iterator = iter(DataLoader(Images(50), batch_size=2, num_workers=2))
            next(iterator)
            kept.append(iterator)
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        next(kept[0])
        print("done")
        """,
        "done\n",
    )


@pytest.mark.slow
def test_atexit_handlers_of_the_user_may_still_use_a_loader() -> None:
    """A checkpoint that is written at exit may read data. (With torch it depends on when the
    handler was set.)"""
    ended = run_script(
        "holdfast",
        """
        import atexit
        from tests.support.datasets import Numbers
        loader = DataLoader(Numbers(4), batch_size=None, num_workers=1, persistent_workers=True)
        atexit.register(lambda: print(list(loader)))
        print(list(loader))
        """,
    )
    assert ended.out == "[0, 1, 2, 3]\n[0, 1, 2, 3]\n"
    assert (ended.code, ended.err) == (0, "")
    assert not ended.left


def test_out_of_file_descriptors_it_works_or_says_what_to_do(which_script: str) -> None:
    ended = run_script(
        which_script,
        """
        import resource
        from tests.support.datasets import Images
        loader = DataLoader(Images(300), batch_size=2, num_workers=2)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        try:
            kept = list(loader)
        except RuntimeError as error:
            print("ulimit -n" in str(error) and "set_sharing_strategy" in str(error))
        else:
            print(len(kept))
        """,
    )
    assert ended.code == 0
    assert ended.out in (("True\n", "150\n") if which_script == "stock" else ("150\n",))
    assert not ended.left


def test_exit_hooks_do_not_pile_up_with_loaders(loader_class: Loader) -> None:
    def use() -> None:
        list(loader_class(Numbers(4), num_workers=1, persistent_workers=True))

    use()
    before = atexit._ncallbacks()
    for _ in range(5):
        use()
    assert atexit._ncallbacks() <= before


ENDS = {
    "normally": ("pass", 0, ""),
    "by an error of its own": ("raise ValueError('mine')", 1, "ValueError: mine\n"),
    "by an error in the dataset": ("pass", 1, "value 13 is wrong"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", sorted(ENDS))
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_however_a_script_ends_it_ends_with_all_its_children(
    which: str, kind: str, num_workers: int, held: bool, how: str
) -> None:
    """The matrix of contract.md, section 7."""
    action, code, text = ENDS[how]
    ended = run_script(
        which,
        f"""
        from torch.utils.data import IterableDataset
        from tests.support.datasets import Numbers
        class Map(Numbers):
            def __getitem__(self, index):
                if index == 13 and {how!r} == "by an error in the dataset":
                    raise ValueError("value 13 is wrong")
                return index
        class Iterable(IterableDataset):
            def __iter__(self):
                return map(Map(20).__getitem__, range(20))
        dataset = Map(20) if {kind!r} == "map" else Iterable()
        iterator = iter(DataLoader(dataset, num_workers={num_workers}))
        kept = [iterator] if {held} else None
        def use(iterator):
            for number, batch in enumerate(iterator):
                if number == 5:
                    {action}
        if kept:
            use(iterator)
        else:
            use(globals().pop("iterator"))
        print("through")
        """,
    )
    assert ended.code == code
    assert not ended.left
    if code == 0:
        assert (ended.out, ended.err) == ("through\n", "")
    else:
        assert ended.out == ""
        assert text in ended.err
        assert "Exception ignored" not in ended.err


def test_python_does_not_warn_of_our_own_threads_when_another_loader_starts_its_workers() -> None:
    """Python 3.12 and later warn if a process forks that has other threads. A warning is an error here."""
    ended = run_script(
        "holdfast",
        """
        import threading, warnings
        from tests.support.datasets import Numbers
        warnings.simplefilter("error")
        first, second = (iter(DataLoader(Numbers(4), num_workers=1)) for _ in range(2))
        print(next(first).item(), next(second).item(), len(threading.enumerate()))
        """,
    )
    assert (ended.code, ended.err, ended.out) == (0, "", "0 0 3\n")
