"""Issue 2, section 1: a loader works wherever code runs: nested, in threads, in daemonic and forked
processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.datasets import Calls, Images, Numbers, Pids, Revealing, Stream
from tests.support.errors import outcomes
from tests.support.fingerprint import fingerprint
from tests.support.loaders import STOCK, Loader, loader_named
from tests.support.observe import seed_everything
from tests.support.parts import identity
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(60)


def stream(loader_class: Loader, dataset: Any = None, **arguments: Any) -> list[Any]:
    """The fingerprints of one epoch with a generator of its own."""
    if arguments.get("num_workers") == 0:  # then the samples are drawn right here
        seed_everything(6)
    generator = torch.Generator().manual_seed(11)
    given = {
        "batch_size": 2,
        "num_workers": 2,
        "shuffle": True,
        "generator": generator,
        **arguments,
    }
    return [fingerprint(batch) for batch in loader_class(dataset or Revealing(9), **given)]


# --- Several at once ------------------------------------------------------------------------------


def test_loaders_in_nested_loops_do_not_disturb_each_other(loader_class: Loader) -> None:
    outer = loader_class(Numbers(4), batch_size=None, num_workers=2)
    inner = loader_class(Numbers(3), batch_size=None, num_workers=1)
    assert [(a, list(inner)) for a in outer] == [(a, [0, 1, 2]) for a in range(4)]


def test_one_loader_in_a_loop_over_itself(loader_class: Loader) -> None:
    loader = loader_class(Numbers(3), batch_size=None, num_workers=1)
    assert [(a, b) for a in loader for b in loader] == [(a, b) for a in range(3) for b in range(3)]


def test_train_and_validation_loaders_stay_alive_side_by_side(loader_class: Loader) -> None:
    train = loader_class(
        Numbers(8), batch_size=2, collate_fn=identity, num_workers=2, persistent_workers=True
    )
    valid = loader_class(
        Numbers(4), batch_size=2, collate_fn=identity, num_workers=1, persistent_workers=True
    )
    for _ in range(3):
        assert list(train) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert list(valid) == [[0, 1], [2, 3]]


def test_iterators_taken_in_turns_keep_their_places(loader_class: Loader) -> None:
    loader = loader_class(Numbers(10), batch_size=None, num_workers=1)
    iterators = [iter(loader) for _ in range(3)]
    assert [[next(each) for each in iterators] for _ in range(4)] == [[n] * 3 for n in range(4)]
    del iterators[1]
    assert [next(each) for each in iterators] == [4, 4]


def use_a_loader_inside(which: str, num_workers: int, index: int) -> Any:
    """A sample that is itself the result of a loader, as in meta-learning."""
    inner = loader_named(which)(Numbers(index + 1), batch_size=None, num_workers=num_workers)
    return list(inner)


class LoaderInside(Numbers):
    def __init__(self, size: int, which: str, num_workers: int) -> None:
        super().__init__(size)
        self.which = which
        self.num_workers = num_workers

    def __getitem__(self, index: int) -> Any:
        return use_a_loader_inside(self.which, self.num_workers, index)


def test_a_worker_may_use_a_loader_without_workers(loader_class: Loader, which: str) -> None:
    loader = loader_class(LoaderInside(4, which, 0), batch_size=None, num_workers=2)
    assert list(loader) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_a_worker_that_uses_a_loader_with_workers_gets_an_answer(
    loader_class: Loader, which: str
) -> None:
    """torch: AssertionError, daemonic processes have no children. Batches or that error, but no
    hang."""
    found = outcomes(iter(loader_class(LoaderInside(3, which, 1), batch_size=None, num_workers=1)))
    if isinstance(found[0], Exception):
        assert [type(error) for error in found] == [AssertionError] * 3
        assert "daemonic processes are not allowed to have children" in str(found[0])
    else:
        assert which != "stock"
        assert found == [[0], [0, 1], [0, 1, 2]]


def test_a_main_process_loader_inside_another_knows_no_worker(
    loader_class: Loader, which: str
) -> None:
    assert list(loader_class(LoaderInside(2, which, 1), batch_size=None)) == [[0], [0, 1]]


# --- Threads --------------------------------------------------------------------------------------


def in_threads(work: Callable[[], Any], count: int = 1) -> list[Any]:
    """What `work` returned or raised in each of so many threads; they are left behind if they
    hang."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(work())
        except BaseException as error:
            answers.put(error)

    for _ in range(count):
        threading.Thread(target=run, daemon=True).start()
    return [answers.get(timeout=40) for _ in range(count)]


def test_a_loader_made_and_used_in_a_thread_gives_the_same_batches(loader_class: Loader) -> None:
    assert in_threads(lambda: stream(loader_class)) == [stream(STOCK)]


def test_an_iterator_may_be_made_in_one_thread_and_used_in_another(loader_class: Loader) -> None:
    """The thread that started the workers is over: they must not go with it."""
    loader = loader_class(Pids(12), batch_size=None, num_workers=2, persistent_workers=True)
    (iterator,) = in_threads(lambda: iter(loader))
    samples = [tuple(next(iterator)) for _ in range(6)]
    (rest,) = in_threads(lambda: [tuple(sample) for sample in iterator])
    samples += rest
    assert [index for index, _, _ in samples] == list(range(12))
    assert len({pid for _, pid, _ in samples}) == 2
    assert len({pid for _, pid, _ in loader} & {pid for _, pid, _ in samples}) == 2


def test_several_threads_may_use_a_loader_of_their_own_each(holdfast_class: Loader) -> None:
    """torch mostly manages this, and sometimes hangs: it forks while another thread holds some
    lock."""
    expected = stream(STOCK)
    assert in_threads(lambda: stream(holdfast_class), 3) == [expected] * 3


def test_several_threads_may_iterate_one_loader_each_for_itself(holdfast_class: Loader) -> None:
    loader = holdfast_class(Numbers(20), batch_size=None, num_workers=1)
    assert in_threads(lambda: list(loader), 3) == [list(range(20))] * 3


def test_a_loader_works_while_other_threads_are_busy(holdfast_class: Loader) -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            torch.ones(1000).sum()
            {str(n): n for n in range(100)}

    threads = [threading.Thread(target=spin) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        found = [stream(holdfast_class) for _ in range(3)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert found == [stream(STOCK)] * 3


def test_batches_may_be_let_go_in_another_thread(loader_class: Loader) -> None:
    loader = loader_class(Images(200), batch_size=2, num_workers=2)
    with ThreadPoolExecutor(2) as pool:
        sums = [pool.submit(lambda batch: batch[0][:, 0, 0, 0].tolist(), batch) for batch in loader]
        got = [value for each in sums for value in each.result(timeout=50)]
    assert got == [float(n) for n in range(200)]


# --- Processes ------------------------------------------------------------------------------------


def use_in_process(which: str, num_workers: int, answers: Any) -> None:
    try:
        answers.put(stream(loader_named(which), num_workers=num_workers))
    except BaseException:
        answers.put(traceback.format_exc())


@pytest.mark.parametrize("daemon", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_loader_in_a_multiprocessing_child_gives_the_same_batches(
    which: str, daemon: bool, num_workers: int, context: str
) -> None:
    if which == "stock" and daemon and num_workers:
        pytest.skip("torch refuses: daemonic processes are not allowed to have children")
    chosen = multiprocessing.get_context(context)
    answers = chosen.SimpleQueue()
    process = chosen.Process(
        target=use_in_process, args=(which, num_workers, answers), daemon=daemon
    )
    process.start()
    try:
        assert eventually(lambda: not answers.empty() or not process.is_alive(), 50)
        assert answers.get() == stream(STOCK, num_workers=num_workers)
        process.join(20)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        answers.close()


def in_a_forked_child(work: Callable[[], Any]) -> int:
    """Runs `work` in a child of os.fork(); its exit code: 0 when all went well, 9 when it had to be
    killed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status: list[int] = []

    def over() -> bool:
        done, how = os.waitpid(pid, os.WNOHANG)
        if done:
            status.append(os.waitstatus_to_exitcode(how))
        return bool(done)

    if not eventually(over, 40):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 9
    return status[0]


def test_a_loader_made_before_a_fork_can_be_used_in_the_child(loader_class: Loader) -> None:
    loader = loader_class(Numbers(6), batch_size=None, num_workers=2)
    assert list(loader) == list(range(6))

    def work() -> None:
        assert list(loader) == list(range(6))

    assert in_a_forked_child(work) == 0
    assert list(loader) == list(range(6))


def test_a_loader_made_in_a_forked_child_gives_the_same_batches(loader_class: Loader) -> None:
    expected = stream(STOCK)

    def work() -> None:
        assert stream(loader_class) == expected

    assert in_a_forked_child(work) == 0


def test_a_child_that_inherits_a_live_iterator_and_ends_leaves_the_parents_workers_alone(
    loader_class: Loader,
) -> None:
    loader = loader_class(Pids(20), batch_size=None, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    pids = {next(iterator)[1] for _ in range(4)}

    def work() -> None:
        pass

    assert in_a_forked_child(work) == 0
    samples = [tuple(sample) for sample in iterator]
    assert [index for index, _, _ in samples] == list(range(4, 20))
    assert {pid for _, pid, _ in samples} == pids


def test_a_child_may_drop_the_inherited_iterator(holdfast_class: Any) -> None:
    """torch: "can only test a child process" on stderr, and it tells the parent's workers to
    stop."""
    loader = holdfast_class(Pids(20), batch_size=None, num_workers=2, persistent_workers=True)
    held = [iter(loader)]
    pids = {next(held[0])[1] for _ in range(4)}

    def work() -> None:
        held.clear()
        loader._iterator = None
        gc.collect()

    assert in_a_forked_child(work) == 0
    samples = [tuple(sample) for sample in held[0]]
    assert [index for index, _, _ in samples] == list(range(4, 20))
    assert {pid for _, pid, _ in samples} == pids


def test_a_child_may_iterate_a_loader_whose_persistent_workers_belong_to_the_parent(
    holdfast_class: Any,
) -> None:
    loader = holdfast_class(Pids(6), batch_size=None, num_workers=2, persistent_workers=True)
    pids = {pid for _, pid, _ in loader}

    def work() -> None:
        samples = [tuple(sample) for sample in loader]
        assert [index for index, _, _ in samples] == list(range(6))
        assert {pid for _, pid, _ in samples}.isdisjoint(pids)

    assert in_a_forked_child(work) == 0
    assert {pid for _, pid, _ in loader} == pids


def test_a_child_may_read_batches_that_the_parent_holds(loader_class: Loader) -> None:
    batches = list(loader_class(Images(6), batch_size=2, num_workers=2))

    def work() -> None:
        assert [batch[1].tolist() for batch in batches] == [[0, 1], [2, 0], [1, 2]]
        batches.clear()

    assert in_a_forked_child(work) == 0
    assert [batch[0][0, 0, 0, 0].item() for batch in batches] == [0.0, 2.0, 4.0]


def test_a_child_forked_in_mid_epoch_does_not_keep_the_parents_workers_alive(
    loader_class: Loader,
) -> None:
    """It holds copies of all descriptors; the workers must end nevertheless when the parent lets
    go."""
    iterator = iter(loader_class(Pids(20), batch_size=None, num_workers=2))
    next(iterator)
    workers = list(iterator._workers)
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        del iterator
        for worker in workers:
            worker.join(30)
            assert not worker.is_alive()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_iterating_in_a_child_does_not_change_the_parents_random_state(
    loader_class: Loader,
) -> None:
    before = torch.get_rng_state()
    assert in_a_forked_child(lambda: list(loader_class(Stream(4), num_workers=1))) == 0
    assert torch.equal(torch.get_rng_state(), before)


def double(index: int) -> int:
    return 2 * index


def test_a_process_pool_of_the_user_works_beside_a_loader(loader_class: Loader) -> None:
    iterator = iter(loader_class(Calls(20, double), batch_size=None, num_workers=2))
    assert next(iterator) == 0
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(double, range(5)) == [0, 2, 4, 6, 8]
    assert list(iterator) == [2 * n for n in range(1, 20)]
