"""Ctrl-C and SIGTERM reach the whole process group: trainer, nursery and workers alike."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, SubsetRandomSampler

from holdfast import DataLoader
from holdfast.errors import LoaderClosed
from tests.lifecycle.trainer import Stage

METHODS = ["spawn", "forkserver"]
pytestmark = pytest.mark.timeout(90, method="thread")


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def assert_one_traceback(err: str) -> None:
    assert err.count("Traceback (most recent call last)") == 1, err
    assert err.rstrip().endswith("KeyboardInterrupt"), err


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("where", ["next", "body"])
def test_ctrl_c_gives_one_traceback_and_the_workers_are_gone(
    stage: Stage, where: str, persistent: bool
) -> None:
    """In the loop's body the workers are idle or at work; in next() the trainer waits for one that never answers."""
    at = 4 if where == "next" else 1000
    trainer = stage.start(
        f"""
        loader = DataLoader(Troubled("sleep", at={at}), num_workers=2, persistent_workers={persistent})
        for number, batch in enumerate(loader):
            if number == 3:
                say("ready")
                if {where!r} == "body":
                    time.sleep(3600)
        """
    )
    trainer.expect("ready")
    if where == "next":
        trainer.expect("trouble", times=2)
        trainer.expect_poll()
    trainer.signal_group(signal.SIGINT)
    ended = trainer.wait()
    assert ended.code == -signal.SIGINT  # as Python ends after an interrupt that was not caught
    assert not ended.left
    assert_one_traceback(ended.err)


def test_ctrl_c_typed_on_a_terminal_gives_one_traceback_and_the_workers_are_gone(
    stage: Stage,
) -> None:
    trainer = stage.start(
        """
        for batch in DataLoader(Troubled("sleep", at=4), num_workers=2):
            say("batch")
        """,
        terminal=True,
    )
    trainer.expect("trouble", times=2)
    trainer.expect("batch", times=4)
    trainer.type_in(b"\x03")
    ended = trainer.wait()
    assert ended.code == -signal.SIGINT
    assert not ended.left
    assert_one_traceback(ended.err)


def test_a_terminal_that_is_closed_leaves_nobody_behind(stage: Stage) -> None:
    """SIGHUP ends the trainer; its workers ignore it and must go all the same."""
    trainer = stage.start(
        """
        for batch in DataLoader(Troubled("sleep", at=4), num_workers=2):
            say("batch")
        """,
        terminal=True,
    )
    trainer.expect("trouble", times=2)
    trainer.hang_up()
    ended = trainer.wait()
    assert ended.code == -signal.SIGHUP
    assert not ended.left


@pytest.mark.slow  # a nursery that is still starting, below, is the harder case
@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_under_other_start_methods_gives_one_traceback(stage: Stage, method: str) -> None:
    trainer = stage.start(
        f"""
        for batch in DataLoader(Troubled("sleep", at=2), num_workers=1, multiprocessing_context={method!r}):
            say("batch")
        """
    )
    trainer.expect("trouble", seconds=60)
    trainer.expect("batch", times=2)
    trainer.signal_group(signal.SIGINT)
    ended = trainer.wait()
    assert ended.code == -signal.SIGINT
    assert not ended.left
    assert_one_traceback(ended.err)


def test_ctrl_c_while_a_spawned_nursery_starts_gives_one_traceback(stage: Stage) -> None:
    trainer = stage.start(
        """
        loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
        iterator = iter(loader)
        say("started")
        next(iterator)
        time.sleep(3600)
        """
    )
    trainer.expect("started", seconds=60)
    trainer.signal_group(signal.SIGINT)
    ended = trainer.wait()
    assert ended.code == -signal.SIGINT
    assert not ended.left
    assert_one_traceback(ended.err)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("where", ["next", "body"])
def test_a_loader_is_usable_again_after_ctrl_c(stage: Stage, where: str, persistent: bool) -> None:
    """As in a notebook: the loader stays, its iterator may stay in the traceback, the next cell iterates again."""
    trainer = stage.start(
        f"""
        class Twice(Numbers):
            def __getitem__(self, index):
                if {where!r} == "next" and index >= 4 and not os.path.exists("calm"):
                    get_into("sleep")
                return index

        os.chdir({str(stage.folder)!r})
        loader = DataLoader(Twice(10), num_workers=2, persistent_workers={persistent})
        try:
            for number, batch in enumerate(loader):
                if number == 3:
                    say("ready")
                    if {where!r} == "body":
                        time.sleep(3600)
        except KeyboardInterrupt as error:
            kept = error
            open("calm", "w").close()
        for _ in range(2):
            say("again", *(batch.item() for batch in loader))
        mark()
        """
    )
    trainer.expect("ready")
    if where == "next":
        trainer.expect("trouble", times=2)
        trainer.expect_poll()
    trainer.signal_group(signal.SIGINT)
    ended = trainer.wait()
    assert ended.err == ""
    assert ended.values("again") == ["0 1 2 3 4 5 6 7 8 9"] * 2
    assert ended.code == 0
    assert not ended.left


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [15, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_interrupt_at_any_moment_leaves_a_usable_loader_and_nobody_behind(
    stage: Stage, persistent: bool, interrupts: int
) -> None:
    seed = int.from_bytes(os.urandom(2), "little")
    print("seed", seed)
    delays = random.Random(seed)
    trainer = stage.start(
        f"""
        def interrupt(number, frame):
            if armed:
                raise KeyboardInterrupt

        def open_files():
            return len(os.listdir("/proc/self/fd"))

        armed = False
        signal.signal(signal.SIGINT, interrupt)
        # The watch, which looks after what an interrupt in a finalizer left, looks often then.
        loader = DataLoader(Numbers(40), num_workers=2, persistent_workers={persistent}, stall_timeout=2)
        expected = list(range(40))
        assert [batch.item() for batch in loader] == expected
        loader.close()
        before = open_files()
        for _ in range({interrupts}):
            try:
                armed = True
                say("armed")
                while True:
                    for batch in loader:
                        pass
            except KeyboardInterrupt:
                armed = False
                say("caught")
        say("stream", [batch.item() for batch in loader] == expected)
        loader.close()
        gc.collect()

        def children():
            return len(open(f"/proc/self/task/{{os.getpid()}}/children").read().split())

        deadline = time.monotonic() + 10
        while (children() or open_files() > before) and time.monotonic() < deadline:
            time.sleep(0.05)
        say("children", children())
        say("descriptors", open_files() - before)
        """
    )
    for times in range(1, interrupts + 1):
        trainer.expect("armed", times=times, seconds=15)
        time.sleep(delays.uniform(0.0, 0.04))  # any moment is right
        while len(trainer.said("caught")) < times:
            trainer.signal_group(signal.SIGINT)
            trainer.listen(
                0.5
            )  # one that strikes in a callback of fork() is lost: see the next test
    ended = trainer.wait()
    assert ended.code == 0, ended
    assert ended.values("stream") == ["True"]
    assert ended.values("children") == ["0"]  # zombies are children too
    assert ended.values("descriptors") == ["0"]
    assert not ended.left


def test_an_interrupt_in_the_middle_of_a_fork_is_not_lost(stage: Stage) -> None:
    """Python drops what a signal handler raises in a callback of fork(). Masking the signal in the thread that forks
    does not help where there are others, as the watch of another loader: the kernel gives it to one of them."""
    ended = stage.run(
        """
        other = iter(DataLoader(Numbers(), num_workers=1))
        next(other)

        def strike():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # whichever thread gets it, Python has run the handler by then

        os.register_at_fork(before=strike)
        try:
            for batch in DataLoader(Numbers(10), num_workers=1):
                pass
            say("not interrupted")
        except KeyboardInterrupt:
            say("interrupted")
        """
    )
    assert ended.err == ""
    assert "interrupted" in ended.lines


def test_sigterm_to_the_whole_group_leaves_the_workers_working_until_the_trainer_says_stop(
    stage: Stage,
) -> None:
    """A scheduler's preemption: the trainer wants to reach the end of its epoch and write a checkpoint."""
    trainer = stage.start(
        """
        told = []
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        loader = DataLoader(Numbers(10**6), num_workers=2)
        after = 0
        for batch in loader:
            if not told:
                say("batch")
                time.sleep(0.01)
            else:
                after += 1
                if after == 500:
                    break
        say("after", after, "incidents", len(loader.incidents))
        mark()
        """
    )
    trainer.expect("batch", times=3)
    trainer.signal_group(signal.SIGTERM)
    ended = trainer.wait()
    assert ended.values("after") == ["500 incidents 0"]
    assert ended.code == 0
    assert ended.err == ""
    assert not ended.left


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_sigterm_to_the_whole_group_is_ignored_by_workers_of_other_start_methods(
    stage: Stage, method: str
) -> None:
    trainer = stage.start(
        f"""
        told = []
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        loader = DataLoader(Numbers(10**6), num_workers=1, multiprocessing_context={method!r})
        iterator = iter(loader)
        say("started")  # also a nursery that has not yet come to its first line must not die of it
        while not told:
            time.sleep(0.01)
        for _ in range(100):
            next(iterator)
        say("incidents", len(loader.incidents))
        """
    )
    trainer.expect("started", seconds=60)
    trainer.signal_group(signal.SIGTERM)
    ended = trainer.wait(60)
    assert ended.values("incidents") == ["0"]
    assert ended.code == 0
    assert ended.err == ""
    assert not ended.left


def test_the_trainers_own_handlers_never_run_in_a_worker_or_nursery(stage: Stage) -> None:
    """A handler that writes a checkpoint must run once, however many processes were forked from the trainer."""
    trainer = stage.start(
        """
        def checkpoint(number, frame):
            say("checkpoint", os.getpid())
            told.append(number)

        told = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, checkpoint)
        loader = DataLoader(Numbers(10**6), num_workers=2)
        for batch in loader:
            if not told:
                say("batch")
            if len(told) == 3:
                break
        """
    )
    trainer.expect("batch", times=3)
    for times, number in enumerate((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), start=1):
        trainer.signal_group(number)
        trainer.expect("checkpoint", times=times)
    ended = trainer.wait()
    assert ended.values("checkpoint") == [str(trainer.pid)] * 3
    assert ended.err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGSEGV])
def test_a_trainer_that_dies_of_a_signal_leaves_nobody_behind(stage: Stage, number: int) -> None:
    trainer = stage.start(
        """
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        iterator = iter(DataLoader(Troubled("sleep"), num_workers=2))
        time.sleep(3600)
        """
    )
    trainer.expect("trouble", times=2)
    trainer.signal(number)
    ended = trainer.wait()
    assert ended.code == -number
    assert not ended.left
    assert ended.err == ""


class Tick(Exception):
    """What the handler of an alarm raises."""


# Who is called when something is collected, and pytest when something goes wrong there.
COLLECTED = ("weakref", "_weakrefset", "_pytest.unraisableexception")


def ring(number: int, frame: FrameType | None) -> None:
    """Raise, but only inside next(): once it returns, what it returned is out of our hands. Nor where
    the garbage collector calls something: what is raised there Python drops."""
    while frame is not None and frame.f_globals["__name__"] not in COLLECTED:
        if frame.f_globals["__name__"] in (
            "holdfast.engine.pool",
            "holdfast.transport.codec.decoding",
        ):
            raise Tick
        frame = frame.f_back


class Ringing:
    """A handler need not be a function."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        ring(number, frame)


HANDLERS = {"function": ring, "partial": functools.partial(ring), "object": Ringing()}


class Hesitant:
    """A sampler that an alarm strikes more often than not."""

    def __iter__(self) -> Iterator[int]:
        for index in range(240):
            time.sleep(0.0002)
            yield index


def struck_epoch(dice: random.Random, **options: Any) -> tuple[list[int], bool]:
    """What an epoch gave while a handler raised again and again, and whether it came to its end."""
    seen: list[int] = []
    batches = iter(DataLoader(Numbers(240), batch_size=4, num_workers=2, **options))
    signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.001, 0.02), dice.uniform(0.001, 0.02))
    try:
        while True:
            try:
                seen += next(batches).tolist()
            except Tick:
                continue
            except StopIteration:
                return seen, True
            except LoaderClosed:
                return seen, False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handler", "options"),
    [
        ("function", {}),
        pytest.param("function", {"on_bad_sample": "skip"}, marks=pytest.mark.slow),
        pytest.param("function", {"sampler": Hesitant()}, marks=pytest.mark.slow),
        ("function", {"sampler": Hesitant(), "on_bad_sample": "replace"}),
        pytest.param("partial", {}, marks=pytest.mark.slow),
        ("object", {}),
    ],
)
def test_a_handler_that_raises_inside_next_never_loses_a_batch_without_a_word(
    handler: str, options: dict[str, Any]
) -> None:
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    before = signal.signal(signal.SIGALRM, HANDLERS[handler])
    try:
        for _ in range(10):
            seen, whole = struck_epoch(dice, **options)
            assert seen == list(range(len(seen))), seed
            assert not whole or len(seen) == 240, seed
            # Nothing but a sampler of the user's own is left half done by it.
            assert whole or "sampler" in options, seed
    finally:
        signal.signal(signal.SIGALRM, before)


class Stuck:
    """A sampler that waits for something that never comes."""

    given_up = False  # it was not interrupted

    def __iter__(self) -> Iterator[int]:
        yield from range(10)
        time.sleep(10)
        Stuck.given_up = True


class StuckChoice(Sequence[int]):
    """Indices to choose from, as they are found."""

    def __init__(self) -> None:
        self.indices = iter(Stuck())

    def __len__(self) -> int:
        return 40

    def __getitem__(self, position: Any) -> Any:
        return next(self.indices)


WAITING: dict[str, Callable[[], dict[str, Any]]] = {
    "a class": lambda: {"sampler": Stuck()},
    "a generator": lambda: {"sampler": iter(Stuck())},
    "map": lambda: {"sampler": map(int, Stuck())},
    "chain": lambda: {"batch_sampler": itertools.chain([one] for one in Stuck())},
    "batches": lambda: {"batch_sampler": BatchSampler(Stuck(), 1, False)},  # type: ignore[arg-type]
    "batches of batches": lambda: {
        "batch_sampler": BatchSampler(BatchSampler(Stuck(), 1, False), 1, False),  # type: ignore[arg-type]
        "collate_fn": lambda rows: torch.tensor(rows[0]),
    },
    "a choice": lambda: {"sampler": SubsetRandomSampler(StuckChoice())},
}


@pytest.mark.parametrize("how", WAITING)
def test_an_alarm_ends_the_waiting_of_a_sampler_of_the_users_own(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers wait for us to finish, and not for what we call."""
    monkeypatch.setattr(Stuck, "given_up", False)
    batches = iter(DataLoader(Numbers(40), num_workers=1, prefetch_factor=2, **WAITING[how]()))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        seen = [next(batches).item()]
        signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
        with pytest.raises(Tick):
            seen.extend(batch.item() for batch in batches)
        assert not Stuck.given_up
        assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen == list(range(len(seen)))
    with pytest.raises(LoaderClosed):
        list(batches)


def test_handlers_of_the_user_run_while_next_waits() -> None:
    """A timeout by alarm is one: it strikes at once, and the batch is still to be had."""

    class Late(Numbers):
        def __getitem__(self, index: int) -> int:
            time.sleep(1.0)
            return index

    batches = iter(DataLoader(Late(2), num_workers=1))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Tick):
            next(batches)
        assert [batch.item() for batch in batches] == [0, 1]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_sampler_that_fails_does_not_end_the_epoch_early() -> None:
    """With torch the next call finds the dead generator at its end, and the epoch is over."""

    def order() -> Iterator[int]:
        yield from range(10)
        raise Tick

    class Failing:
        def __iter__(self) -> Iterator[int]:
            return order()

    batches = iter(DataLoader(Numbers(40), sampler=Failing(), num_workers=1))
    seen: list[int] = []

    def to_the_end() -> None:
        while True:
            seen.append(next(batches).item())

    with pytest.raises(Tick):
        to_the_end()
    with pytest.raises(LoaderClosed, match=r"the sampler ended with Tick\(\)"):
        to_the_end()
    assert seen == list(range(10))
    with pytest.raises(StopIteration):
        next(batches)
    batches._shutdown_workers()
