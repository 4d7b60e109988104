"""The pinning thread alone: what it pins, in which order, and how it ends. There is no accelerator and no worker here;
`tests/accelerators` has whole loaders."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.engine.driver import Batch
from holdfast.engine.pinning import PinnedBatch, PinningThread
from holdfast.errors import UnusualExit

SECONDS = 30.0  # after which a wait has failed


class Arrived:
    """A batch as a worker would send it."""

    def __init__(self, value: Any, nbytes: int = 1) -> None:
        self.value = value
        self.nbytes = nbytes

    def unpack(self) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Pinner:
    """Pins by negating. Each batch waits for `allow`, if the test has closed that gate."""

    where = "in pin memory thread for device 1"
    in_place = False

    def __init__(self) -> None:
        self.pinned: list[Any] = []
        self.begun = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.gated = False
        self.unfit: Exception | None = None
        self.on_idle: Callable[[], None] = lambda: None

    def begin(self, thread: PinningThread) -> None:
        if self.unfit is not None:
            raise self.unfit

    def receive(self, batch: Batch) -> Batch:
        return batch

    def pin(self, batch: Any) -> Any:
        self.begun.release()
        if self.gated:
            assert self.gate.acquire(timeout=SECONDS)
        self.pinned.append(batch)
        if callable(batch):
            return batch()
        return -batch

    def idle(self) -> float | None:
        self.on_idle()
        return None

    def end(self) -> None:
        self.pinned.append("end")

    def has_begun(self) -> None:
        assert self.begun.acquire(timeout=SECONDS)


Make = Callable[..., PinningThread]


@pytest.fixture
def pinner() -> Pinner:
    return Pinner()


@pytest.fixture
def make(pinner: Pinner) -> Iterator[Make]:
    made: list[PinningThread] = []

    def start(in_order: bool = True, **options: Any) -> PinningThread:
        thread = PinningThread(pinner, in_order=in_order, **options)
        made.append(thread)
        thread.start()
        return thread

    yield start
    for thread in made:
        thread.stop()
        pinner.gate.release(100)
        assert thread.join(time.monotonic() + SECONDS)


def result(batch: PinnedBatch) -> Any:
    assert batch.wait(SECONDS)
    return batch.unpack()


def test_batches_are_pinned_before_they_are_asked_for(make: Make, pinner: Pinner) -> None:
    batches = [make().accept(Arrived(number), number) for number in (1, 2, 3)]
    for _ in batches:
        pinner.has_begun()
    assert [result(batch) for batch in batches] == [-1, -2, -3]


def test_what_is_delivered_first_is_pinned_first_whatever_arrives_first(
    make: Make, pinner: Pinner
) -> None:
    pinner.gated = True
    thread = make()
    batches = [thread.accept(Arrived(5), 5)]
    pinner.has_begun()
    batches += [thread.accept(Arrived(number), number) for number in (4, 2, 3, 1)]
    pinner.gate.release(5)
    assert sorted(result(batch) for batch in batches) == [-5, -4, -3, -2, -1]
    assert pinner.pinned == [5, 1, 2, 3, 4]


def test_without_order_batches_are_pinned_as_they_arrive(make: Make, pinner: Pinner) -> None:
    pinner.gated = True
    thread = make(in_order=False)
    batches = [thread.accept(Arrived(number), number) for number in (4, 2, 3, 1)]
    pinner.gate.release(4)
    assert [result(batch) for batch in batches] == [-4, -2, -3, -1]
    assert pinner.pinned == [4, 2, 3, 1]


def test_a_batch_that_was_dropped_is_not_pinned(make: Make, pinner: Pinner) -> None:
    pinner.gated = True
    thread = make()
    first = thread.accept(Arrived(1), 1)
    pinner.has_begun()
    thread.accept(Arrived(2), 2)  # an epoch was broken off
    third = thread.accept(Arrived(3), 0)
    pinner.gate.release(2)
    assert (result(first), result(third)) == (-1, -3)
    assert pinner.pinned == [1, 3]


def test_the_memory_of_the_worker_is_released_before_the_copy_is_given_out(
    make: Make, pinner: Pinner
) -> None:
    left: list[bool] = []
    arrived = Arrived(1)
    alive = weakref.ref(arrived)
    thread = make(copied=lambda nbytes: left.append(alive() is not None))
    batch = thread.accept(arrived, 1)
    del arrived
    assert result(batch) == -1
    assert alive() is None
    thread.stop()
    assert thread.join(time.monotonic() + SECONDS)
    assert left == [False]


def test_an_error_of_pinning_is_raised_in_torchs_words_and_the_next_batch_comes(make: Make) -> None:
    class Strange(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(one, two)
            self.two = two

    def fail() -> None:
        raise Strange(1, 2)

    def lack() -> None:
        raise KeyError("label")

    thread = make()
    strange, lacking, good = (
        thread.accept(Arrived(value), number) for number, value in enumerate((fail, lack, 3))
    )
    with pytest.raises(
        Strange, match=r"^Caught Strange in pin memory thread for device 1\.\nOriginal Traceback"
    ) as caught:
        result(strange)
    assert caught.value.two == 2
    with pytest.raises(KeyError) as missing:
        result(lacking)
    assert str(missing.value).startswith(
        "Caught KeyError in pin memory thread for device 1.\nOriginal "
    )
    assert "raise KeyError" in str(missing.value)
    assert result(good) == -3


def test_an_error_of_unpacking_is_raised_as_it_is(make: Make) -> None:
    error = OSError(5, "no such archive")
    with pytest.raises(OSError, match="no such archive") as caught:
        result(make().accept(Arrived(error), 0))
    assert caught.value is error


def test_an_exit_inside_of_a_pin_memory_method_does_not_end_the_thread(make: Make) -> None:
    def leave() -> None:
        raise SystemExit(3)

    thread = make()
    leaving, good = thread.accept(Arrived(leave), 0), thread.accept(Arrived(1), 1)
    with pytest.raises(UnusualExit, match="Caught SystemExit in pin memory thread"):
        result(leaving)
    assert result(good) == -1


def test_a_device_that_cannot_be_chosen_is_an_error_of_each_batch(
    make: Make, pinner: Pinner
) -> None:
    pinner.unfit = RuntimeError("no such device")
    thread = make()
    for number in range(2):
        batch = thread.accept(Arrived(number), number)
        with pytest.raises(
            RuntimeError,
            match=r"Caught RuntimeError in pin memory thread for device 1\.[^$]*no such device",
        ):
            result(batch)


def test_without_room_for_a_copy_only_the_batch_that_is_waited_for_is_pinned(
    make: Make, pinner: Pinner
) -> None:
    asked = threading.Semaphore(0)
    room = False

    def may_copy(nbytes: int) -> bool:
        assert nbytes == 7
        asked.release()
        return room

    thread = make(may_copy=may_copy)
    first, second, third = (thread.accept(Arrived(number, 7), number) for number in (1, 2, 3))
    assert asked.acquire(timeout=SECONDS)
    assert pinner.pinned == []
    assert result(first) == -1
    pinner.has_begun()
    assert pinner.pinned == [1]
    room = True
    thread.look_again()
    pinner.has_begun()
    assert (result(second), result(third)) == (-2, -3)


def test_a_wait_ends_at_its_timeout_and_can_be_repeated(make: Make, pinner: Pinner) -> None:
    pinner.gated = True
    batch = make().accept(Arrived(1), 1)
    assert not batch.wait(0.01)
    assert not batch.ready
    pinner.gate.release()
    assert result(batch) == -1


def test_a_signal_handler_may_raise_while_the_consumer_waits(make: Make, pinner: Pinner) -> None:
    class Alarm(Exception):
        pass

    def strike(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, strike)
    try:
        pinner.gated = True
        batch = make().accept(Arrived(1), 1)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            batch.wait(SECONDS)
        pinner.gate.release()
        assert result(batch) == -1
    finally:
        signal.signal(signal.SIGALRM, before)


def test_stopping_ends_a_wait_although_pinning_never_returns(make: Make, pinner: Pinner) -> None:
    pinner.gated = True
    thread = make()
    batch = thread.accept(Arrived(1), 1)
    pinner.has_begun()
    stopping = threading.Timer(0.05, thread.stop)
    stopping.start()
    assert not batch.wait()
    assert not thread.serves
    assert not thread.join(time.monotonic())  # it is stuck, and left
    stopping.join()


@pytest.mark.parametrize("message", [PinningThread.stop, PinningThread.wake])
def test_a_message_that_comes_while_the_thread_looks_for_work_is_not_lost(
    pinner: Pinner, message: Callable[[PinningThread], None]
) -> None:
    thread = PinningThread(pinner, in_order=True)
    looks = iter([message, PinningThread.stop])
    pinner.on_idle = lambda: next(looks)(thread)
    thread.start()
    assert thread.join(time.monotonic() + SECONDS)
    assert len(list(looks)) == (message is PinningThread.stop)


def test_stopping_leaves_what_has_not_begun(make: Make, pinner: Pinner) -> None:
    pinner.gated = True
    thread = make()
    begun, waiting = thread.accept(Arrived(1), 1), thread.accept(Arrived(2), 2)
    pinner.has_begun()
    thread.stop()
    pinner.gate.release(2)
    assert thread.join(time.monotonic() + SECONDS)
    assert begun.ready
    assert not waiting.wait()
    assert pinner.pinned == [1, "end"]


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have(
    make: Make, pinner: Pinner
) -> None:
    pinner.gated = True
    thread = make()
    batch = thread.accept(Arrived(1), 1)
    pinner.has_begun()
    child = os.fork()
    if child == 0:
        thread.stop()
        os._exit(
            10
            + batch.wait()
            + 2 * thread.serves
            + 4 * (not thread.join(time.monotonic() + SECONDS))
        )
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    pinner.gate.release()
    assert result(batch) == -1
