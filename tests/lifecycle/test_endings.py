"""Every way to stop using a loader: within two seconds, in silence, with the right exit code, no process left."""

from __future__ import annotations

import pytest

from tests.lifecycle.trainer import Stage

pytestmark = pytest.mark.timeout(90, method="thread")

WITHIN = 2.0

WAYS = {
    "break": """
        for number, batch in enumerate(loader):
            if number == 1:
                wait_for_trouble()
                began = time.monotonic()
                break
""",
    "exception in the loop body": """
        try:
            for number, batch in enumerate(loader):
                if number == 1:
                    wait_for_trouble()
                    began = time.monotonic()
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
""",
    "del of the iterator": """
        iterator = iter(loader)
        next(iterator), next(iterator)
        wait_for_trouble()
        began = time.monotonic()
        del iterator
""",
    "del of the persistent loader": """
        iterator = iter(loader)
        next(iterator), next(iterator)
        wait_for_trouble()
        began = time.monotonic()
        del iterator, loader
""",
    "close": """
        iterator = iter(loader)
        next(iterator), next(iterator)
        wait_for_trouble()
        began = time.monotonic()
        loader.close()
""",
    "close of the persistent loader": """
        iterator = iter(loader)
        next(iterator), next(iterator)
        wait_for_trouble()
        began = time.monotonic()
        loader.close()
""",
    "with": """
        with loader:
            iterator = iter(loader)
            next(iterator), next(iterator)
            wait_for_trouble()
            began = time.monotonic()
""",
    "exception in with": """
        try:
            with loader:
                iterator = iter(loader)
                next(iterator), next(iterator)
                wait_for_trouble()
                began = time.monotonic()
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
""",
    "close with the nursery stopped": """
        iterator = iter(loader)
        next(iterator), next(iterator)
        wait_for_trouble()
        os.kill(iterator._pool.driver.resources.nursery.pid, signal.SIGSTOP)
        began = time.monotonic()
        loader.close()
""",
}

HOW = {
    "end of the script": "",
    "sys.exit(3)": "sys.exit(3)",
    "uncaught exception": 'raise ValueError("boom")',
    "sys.exit in a function with the loader held by its frame": """
        def leave(held):
            sys.exit(3)
        leave(iterator)
""",
}
EXPECTED = {
    "end of the script": (0, ""),
    "sys.exit(3)": (3, ""),
    "uncaught exception": (1, "ValueError: boom"),
    "sys.exit in a function with the loader held by its frame": (3, ""),
}
# To the loader these are as good as asleep, which is tested anyway.
_ASLEEP = ("lock", "ignoring SIGTERM")


def _marks(trouble: str, plainest: bool) -> list[pytest.MarkDecorator]:
    """Each trouble once, in the plainest way; everything else takes its time."""
    quick = trouble in ("none", "idle") or (plainest and trouble not in _ASLEEP)
    return [] if quick else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("way", "trouble"),
    [
        pytest.param(way, trouble, marks=_marks(trouble, way == "close"))
        for way in WAYS
        for trouble in ("none", "sleep", "lock", "deaf", "stop")
        # One that ignores even the death of its parent is ended by the nursery or not at all.
        if (way, trouble) != ("close with the nursery stopped", "deaf")
    ],
)
def test_a_loader_that_is_left_ends_its_workers_within_two_seconds(
    stage: Stage, way: str, trouble: str
) -> None:
    """With trouble, both workers are in it when the loop is left. No garbage collection may be needed for it."""
    ended = stage.run(
        f"""
        import textwrap
        reader, writer = os.pipe()

        class Telling(Numbers):
            def __getitem__(self, index):
                if index >= 2 and {trouble != "none"}:
                    os.write(writer, b".")
                    TROUBLES[{trouble!r}]()
                return index

        def wait_for_trouble():
            if {trouble != "none"}:
                os.read(reader, 1)
                os.read(reader, 1)

        def children():
            return open(f"/proc/self/task/{{os.getpid()}}/children").read().split()

        gc.disable()
        loader = DataLoader(Telling(), num_workers=2, persistent_workers={"persistent" in way})
        {WAYS[way]}
        while children() and time.monotonic() - began < {WITHIN}:  # a zombie would be one too
            time.sleep(0.01)
        say("took", time.monotonic() - began)
        say("children", len(children()))
        """
    )
    assert ended.err == ""
    assert ended.values("children") == ["0"]
    assert float(ended.values("took")[0]) < WITHIN
    assert ended.code == 0
    assert not ended.left


@pytest.mark.parametrize(
    ("how", "trouble"),
    [
        pytest.param(how, trouble, marks=_marks(trouble, not HOW[how]))
        for how in HOW
        for trouble in ("idle", "sleep", "lock", "gil", "deaf", "stop", "ignoring SIGTERM")
    ],
)
def test_the_interpreter_exits_within_two_seconds_with_live_workers(
    stage: Stage, trouble: str, how: str
) -> None:
    ended = stage.run(
        f"""
        trouble, init = {trouble!r}, nothing_special
        if trouble == "ignoring SIGTERM":
            trouble, init = "sleep", ignore_termination
        reader, writer = os.pipe()

        class Telling(Numbers):
            def __getitem__(self, index):
                if trouble != "idle" and index >= 2:
                    os.write(writer, b".")
                    TROUBLES[trouble]()
                return index

        loader = DataLoader(Telling(), num_workers=2, persistent_workers=True, worker_init_fn=init)
        iterator = iter(loader)
        next(iterator), next(iterator)
        if trouble != "idle":
            os.read(reader, 1), os.read(reader, 1)
        mark()
        {HOW[how]}
        """
    )
    expected_code, expected_err = EXPECTED[how]
    assert ended.code == expected_code
    if expected_err:
        assert ended.err.count("Traceback") == 1, ended.err
        assert ended.err.rstrip().endswith(expected_err), ended.err
    else:
        assert ended.err == ""
    assert not ended.left
    assert ended.seconds < WITHIN, ended


def test_several_loaders_with_hanging_workers_share_one_deadline_at_exit(stage: Stage) -> None:
    ended = stage.run(
        """
        reader, writer = os.pipe()

        class Hanging(Numbers):
            def __getitem__(self, index):
                if index >= 2:
                    os.write(writer, b".")
                    time.sleep(3600)
                return index

        iterators = [iter(DataLoader(Hanging(), num_workers=2)) for _ in range(3)]
        for iterator in iterators:
            next(iterator), next(iterator)
        for _ in range(6):
            os.read(reader, 1)
        mark()
        """
    )
    assert ended.err == ""
    assert ended.code == 0
    assert not ended.left
    assert ended.seconds < WITHIN, ended


def test_exit_while_a_daemon_thread_waits_in_next_is_quick_and_silent(stage: Stage) -> None:
    """A prefetching thread, as many training loops have one."""
    ended = stage.run(
        """
        arrived = threading.Event()

        def prefetch():
            for batch in DataLoader(Troubled("sleep", at=4), num_workers=2):
                if batch.item() == 3:
                    arrived.set()

        threading.Thread(target=prefetch, daemon=True).start()
        arrived.wait(20)
        mark()
        """
    )
    assert ended.code == 0
    assert not ended.left
    assert ended.seconds < WITHIN, ended
    assert ended.err == ""


def test_os_exit_leaves_nobody_behind(stage: Stage) -> None:
    ended = stage.run(
        """
        iterator = iter(DataLoader(Troubled("sleep", at=2), num_workers=2, persistent_workers=True))
        next(iterator), next(iterator)
        mark()
        os._exit(7)
        """
    )
    assert ended.code == 7
    assert ended.err == ""
    assert not ended.left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "method"),
    [
        (["-X", "dev"], "fork"),
        pytest.param(["-X", "dev"], "spawn", marks=pytest.mark.slow),
        pytest.param(["-W", "error"], "fork", marks=pytest.mark.slow),
        pytest.param(["-W", "error"], "spawn", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_unclosed_in_development_mode(
    stage: Stage, flags: list[str], method: str
) -> None:
    """ResourceWarnings, unraisable errors in finalizers and the like would all be written to stderr."""
    ended = stage.run_fresh(
        f"""
        import logging
        import warnings
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)  # Python 3.12's
        for persistent in (False, True):
            loader = DataLoader(
                Numbers(20), num_workers=1, persistent_workers=persistent, multiprocessing_context={method!r}
            )
            assert [batch.item() for batch in loader] == list(range(20))
            for batch in loader:
                break
            del batch
            loader.close()
            gc.collect()
        loader = DataLoader(Numbers(20), num_workers=1, persistent_workers=True, multiprocessing_context={method!r})
        iterator = iter(loader)
        kill(iterator._workers[0].pid)
        logging.getLogger("holdfast").setLevel(logging.ERROR)
        assert [batch.item() for batch in iterator] == list(range(20))
        mark()
        """,
        flags=flags,
    )
    assert ended.err == ""
    assert ended.code == 0
    assert not ended.left


def test_what_the_trainer_has_printed_is_not_printed_again_by_its_workers(stage: Stage) -> None:
    """Standard output into a pipe is buffered, and a fork copies the buffer."""
    ended = stage.run(
        """
        for way in range(2):
            print("printed", way)
            loader = DataLoader(Numbers(8), num_workers=2)
            assert len(list(loader)) == 8
            loader.close()
        """
    )
    assert ended.values("printed") == ["0", "1"]


def test_a_worker_flushes_what_its_samples_print(stage: Stage) -> None:
    ended = stage.run(
        """
        class Talking(Numbers):
            def __getitem__(self, index):
                print("sample", index)
                return index

        assert len(list(DataLoader(Talking(4), num_workers=2))) == 4
        """
    )
    assert sorted(ended.values("sample")) == ["0", "1", "2", "3"]
