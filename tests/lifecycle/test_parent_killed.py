"""The trainer is killed with -9 and can do nothing any more: within a second no process of its session may be alive.

Everything a worker can be doing at that moment is in the table; each worker says that it is there before the kill.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.lifecycle.trainer import Stage, Trainer
from tests.support.processes import eventually, kill

pytestmark = pytest.mark.timeout(90, method="thread")

WITHIN = 1.0
WAITING = "time.sleep(3600)"


def assert_no_process_survives_a_kill(trainer: Trainer, at_least: int) -> None:
    """`at_least`: how many there must be before, or the test would prove nothing."""
    before = trainer.companions()
    assert len(before) >= at_least, before
    trainer.signal(signal.SIGKILL)
    seconds = trainer.seconds_until_alone()
    assert seconds < WITHIN, f"{seconds} s; before: {before}; still there: {trainer.companions()}"
    ended = trainer.wait()
    assert ended.code == -signal.SIGKILL
    assert ended.err == ""


@pytest.mark.parametrize("trouble", ["sleep", "spin", "gil", "lock", "write", "deaf", "stop"])
def test_no_worker_outlives_a_killed_trainer_whatever_it_is_doing(
    stage: Stage, trouble: str
) -> None:
    trainer = stage.start(
        f"""
        iterator = iter(DataLoader(Troubled({trouble!r}), num_workers=2))
        {WAITING}
        """
    )
    trainer.expect("trouble", times=2)
    assert_no_process_survives_a_kill(trainer, at_least=3)


def test_no_idle_worker_outlives_a_killed_trainer(stage: Stage) -> None:
    trainer = stage.start(
        f"""
        loader = DataLoader(Numbers(8), num_workers=2, persistent_workers=True)
        say("batches", len(list(loader)))
        {WAITING}
        """
    )
    assert trainer.expect("batches") == ["8"]
    assert_no_process_survives_a_kill(trainer, at_least=3)


def test_no_worker_that_waits_for_room_in_its_channel_outlives_a_killed_trainer(
    stage: Stage,
) -> None:
    trainer = stage.start(
        f"""
        ours, theirs = os.pipe()
        iterator = iter(DataLoader(Bulky(ours), num_workers=2, batch_size=None, prefetch_factor=200, memory_budget=None))
        iterator._pool.lock.acquire()  # or what they send is read, as quickly as they do
        os.write(theirs, bytes(2))
        {WAITING}
        """
    )
    workers = [int(pid) for pid in trainer.expect("begun", times=2)]
    assert eventually(lambda: all(map(is_blocked_sending, workers))), [
        Path(f"/proc/{pid}/{name}").read_text() for pid in workers for name in ("syscall", "stat")
    ]
    assert_no_process_survives_a_kill(trainer, at_least=3)


def is_blocked_sending(pid: int) -> bool:
    """Asleep in sendto or sendmsg."""
    numbers = {"x86_64": ("44", "46"), "aarch64": ("206", "211")}[os.uname().machine]
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state == "S" and Path(f"/proc/{pid}/syscall").read_text().split()[0] in numbers


def test_no_worker_that_ignores_every_signal_outlives_a_killed_trainer(stage: Stage) -> None:
    trainer = stage.start(
        f"""
        loader = DataLoader(Numbers(8), num_workers=2, worker_init_fn=become_deaf, persistent_workers=True)
        say("batches", len(list(loader)))
        {WAITING}
        """
    )
    trainer.expect("batches")
    assert_no_process_survives_a_kill(trainer, at_least=3)


def test_no_worker_outlives_a_killed_trainer_when_the_loader_was_made_in_a_thread_that_has_ended(
    stage: Stage,
) -> None:
    trainer = stage.start(
        f"""
        kept = []

        def make():
            iterator = iter(DataLoader(Troubled("sleep", at=4), num_workers=2))
            kept.extend([iterator, next(iterator), next(iterator)])

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        say("more", next(kept[0]).item(), next(kept[0]).item())
        {WAITING}
        """
    )
    # The thread that made them is gone, and they still work.
    assert trainer.expect("more") == ["2 3"]
    trainer.expect("trouble", times=2)
    assert_no_process_survives_a_kill(trainer, at_least=3)


def test_a_trainer_killed_together_with_its_nursery_leaves_no_worker(stage: Stage) -> None:
    trainer = stage.start(
        f"""
        iterator = iter(DataLoader(Troubled("sleep"), num_workers=2))
        say("nursery", iterator._pool.driver.resources.nursery.pid)
        {WAITING}
        """
    )
    trainer.expect("trouble", times=2)
    trainer.signal(signal.SIGSTOP)  # else it may say that the nursery is gone
    kill(int(trainer.expect("nursery")[0]))
    assert_no_process_survives_a_kill(trainer, at_least=0)


def test_no_worker_outlives_a_killed_trainer_when_the_nursery_is_stopped(stage: Stage) -> None:
    trainer = stage.start(
        f"""
        iterator = iter(DataLoader(Troubled("sleep"), num_workers=2))
        say("nursery", iterator._pool.driver.resources.nursery.pid)
        {WAITING}
        """
    )
    trainer.expect("trouble", times=2)
    kill(int(trainer.expect("nursery")[0]), number=signal.SIGSTOP)
    assert_no_process_survives_a_kill(trainer, at_least=3)


def test_nested_loaders_go_down_with_a_killed_trainer(stage: Stage) -> None:
    trainer = stage.start(
        f"""
        class Nested(Numbers):
            def __getitem__(self, index):
                return next(iter(DataLoader(Troubled("sleep"), num_workers=2)))

        iterator = iter(DataLoader(Nested(), num_workers=1))
        {WAITING}
        """
    )
    trainer.expect("trouble", times=2)
    assert_no_process_survives_a_kill(trainer, at_least=5)


def test_a_forked_child_of_the_trainer_does_not_keep_its_workers_alive(stage: Stage) -> None:
    """The child holds copies of all sockets, so that no process sees the end of one when the trainer goes."""
    trainer = stage.start(
        f"""
        loader = DataLoader(Numbers(8), num_workers=2, persistent_workers=True)
        list(loader)
        child = os.fork()
        if child == 0:
            os.setsid()
            say("forked", os.getpid())
            {WAITING}
        {WAITING}
        """
    )
    (child,) = trainer.expect("forked")
    handle = os.pidfd_open(int(child))
    try:
        assert_no_process_survives_a_kill(trainer, at_least=3)
    finally:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)],  # their nurseries are made alike
)
def test_no_worker_outlives_a_killed_trainer_under_other_start_methods(
    stage: Stage, method: str
) -> None:
    trainer = stage.start(
        f"""
        loaders = [
            DataLoader(Troubled("lock"), num_workers=1, multiprocessing_context={method!r}, worker_init_fn=init)
            for init in (nothing_special, become_deaf)
        ]
        iterators = [iter(loader) for loader in loaders]
        {WAITING}
        """
    )
    trainer.expect("trouble", times=2, seconds=60)
    assert_no_process_survives_a_kill(trainer, at_least=4)


def test_a_nursery_that_is_still_starting_does_not_outlive_a_killed_trainer(stage: Stage) -> None:
    """Under spawn it imports torch first, for seconds."""
    trainer = stage.start(
        f"""
        iterator = iter(DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn"))
        say("started")
        {WAITING}
        """
    )
    trainer.expect("started", seconds=60)
    assert_no_process_survives_a_kill(trainer, at_least=1)
