"""The pinning thread ends with its iterator, and never keeps anything waiting."""

from __future__ import annotations

import signal

import pytest

from tests.accelerators.playing import begin, finish, play, said
from tests.lifecycle.trainer import Stage

STUCK = """
        entered, go_on = threading.Event(), threading.Event()

        class Stuck(Custom):
            def pin_memory(self):
                entered.set()
                go_on.wait()
                return self

        def collate(samples):
            return Stuck(samples[0][100].clone())

"""


@pytest.mark.slow
def test_the_thread_ends_with_the_epoch_with_close_and_with_the_last_reference(
    stage: Stage,
) -> None:
    ended = play(
        stage,
        """
        gc.disable()

        def count():
            return len(pinning_threads())

        loader = DataLoader(Images(8), num_workers=2, pin_memory=True)
        list(loader)
        say("epoch", eventually(lambda: count() == 0))
        iterator = iter(loader)
        next(iterator)
        say("open", count())
        loader.close()
        say("closed", eventually(lambda: count() == 0))
        iterator = iter(loader)
        next(iterator)
        del iterator
        say("dropped", eventually(lambda: count() == 0))
        loader = DataLoader(Images(8), num_workers=2, pin_memory=True, persistent_workers=True)
        for _ in range(3):
            list(loader)
            say("persistent", count())
        del loader
        say("gone", eventually(lambda: count() == 0))
        say("bytes", eventually(lambda: slate.count("bytes") == 0))
        """,
    )
    assert said(ended)["open"] == ["1"]
    assert said(ended)["persistent"] == ["1"] * 3
    for word in ("epoch", "closed", "dropped", "gone", "bytes"):
        assert said(ended)[word] == ["True"], word


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_the_interpreter_exits_in_the_middle_of_an_epoch(
    stage: Stage, persistent: bool, held: bool
) -> None:
    ended = play(
        stage,
        f"""
        slate.take(5)
        loader = DataLoader(Images(1000), batch_size=2, num_workers=2, pin_memory=True,
                            persistent_workers={persistent})
        for batch in (iterator := iter(loader)):
            break
        if not {held}:
            del iterator, loader
        mark()
        """,
    )
    assert ended.err == ""
    assert ended.seconds < 10


def test_the_interpreter_exits_although_a_pin_memory_method_never_returns(stage: Stage) -> None:
    ended = play(
        stage,
        STUCK
        + """
        iterator = iter(DataLoader(Images(8), num_workers=2, pin_memory=True, collate_fn=collate))
        entered.wait(SECONDS)
        """,
    )
    assert ended.err == ""


def test_closing_ends_a_next_that_waits_for_a_pin_memory_method(stage: Stage) -> None:
    ended = play(
        stage,
        STUCK
        + """
        loader = DataLoader(Images(8), num_workers=2, pin_memory=True, collate_fn=collate)
        iterator = iter(loader)

        def close():
            entered.wait(SECONDS)
            loader.close()

        closing = threading.Thread(target=close)
        closing.start()
        try:
            next(iterator)
        except LoaderClosed as error:
            say("closed", "iter(loader)" in str(error))
        closing.join(SECONDS)
        say("workers", closing.is_alive())
        go_on.set()
        say("thread", eventually(lambda: not pinning_threads()))
        """,
    )
    assert said(ended)["closed"] == ["True"]
    assert said(ended)["workers"] == ["False"]
    assert said(ended)["thread"] == ["True"]


def test_a_pin_memory_method_may_close_the_loader(stage: Stage) -> None:
    ended = play(
        stage,
        """
        class Closing(Custom):
            def pin_memory(self):
                if int(self.value) == 2:
                    loader.close()
                return self

        def collate(samples):
            return Closing(samples[0][100].clone())

        loader = DataLoader(Images(8), num_workers=1, pin_memory=True, collate_fn=collate)
        seen = []
        try:
            for batch in loader:
                seen.append(int(batch.value))
        except LoaderClosed:
            say("closed", seen in ([0], [0, 1], [0, 1, 2]))
        """,
    )
    assert said(ended)["closed"] == ["True"]


def test_ctrl_c_ends_a_next_that_waits_for_pinning_and_the_loader_can_be_used_again(
    stage: Stage,
) -> None:
    trainer = begin(
        stage,
        STUCK
        + """
        loader = DataLoader(Images(8), num_workers=2, pin_memory=True, collate_fn=collate)
        iterator = iter(loader)
        threading.Thread(target=lambda: (entered.wait(SECONDS), say("waits")), daemon=True).start()
        try:
            next(iterator)
        except KeyboardInterrupt:
            say("interrupted")
        go_on.set()
        say("again", [int(batch.value) for batch in loader])
        """,
    )
    trainer.expect("waits")
    trainer.signal(signal.SIGINT)
    trainer.expect("interrupted")
    ended = finish(trainer)
    assert said(ended)["again"] == [str(list(range(8)))]


def test_signal_handlers_that_raise_cost_no_batch(stage: Stage) -> None:
    """An alarm in every `next()`. Outside of it the handler does not raise: what `next()` has returned is the
    script's to lose."""
    ended = play(
        stage,
        """
        class Alarm(Exception):
            pass

        def strike(number, frame):
            if frame.f_code is not here:
                raise Alarm

        here = sys._getframe().f_code
        slate.take(2)
        loader = DataLoader(Images(60), batch_size=2, num_workers=2, pin_memory=True)
        iterator = iter(loader)
        signal.signal(signal.SIGALRM, strike)
        seen, alarms = [], 0
        while True:
            signal.setitimer(signal.ITIMER_REAL, 0.0007)
            try:
                batch = next(iterator)
            except Alarm:
                alarms += 1
                continue
            except StopIteration:
                break
            seen.append(int(batch[0, 100]))
        signal.setitimer(signal.ITIMER_REAL, 0)
        say("seen", seen == list(range(0, 60, 2)), alarms > 0, seen)
        """,
    )
    assert said(ended)["seen"] == [f"True True {list(range(0, 60, 2))}"]


def test_a_forked_child_has_no_thread_and_can_have_a_loader_of_its_own(stage: Stage) -> None:
    ended = play(
        stage,
        """
        slate.take(3)
        loader = DataLoader(Images(24), batch_size=2, num_workers=2, pin_memory=True)
        iterator = iter(loader)
        first = int(next(iterator)[0, 100])
        for _ in range(3):
            child = os.fork()
            if child == 0:
                try:
                    next(iterator)
                except LoaderClosed:
                    own = [int(batch[0, 100]) for batch in loader]
                    os._exit(10 + (own == list(range(0, 24, 2))))
                os._exit(1)
            say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        say("rest", [first] + [int(batch[0, 100]) for batch in iterator] == list(range(0, 24, 2)))
        """,
    )
    assert said(ended)["child"] == ["11"] * 3
    assert said(ended)["rest"] == ["True"]


def test_two_threads_may_share_an_iterator(stage: Stage) -> None:
    ended = play(
        stage,
        """
        slate.take(1)
        iterator = iter(DataLoader(Images(60), batch_size=2, num_workers=2, pin_memory=True))
        seen = []

        def consume():
            for batch in iterator:
                seen.append(int(batch[0, 100]))

        threads = [threading.Thread(target=consume) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        say("seen", sorted(seen) == list(range(0, 60, 2)))
        """,
    )
    assert said(ended)["seen"] == ["True"]
