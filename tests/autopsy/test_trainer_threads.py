"""The trainer's other threads at a fork."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.autopsy.trainer_threads import MAX_FRAMES, other_threads


def dig(depth: int, arrived: threading.Event, done: threading.Event) -> None:
    if depth:
        dig(depth - 1, arrived, done)
        return
    arrived.set()
    done.wait(60)


@contextmanager
def beside(name: str, depth: int = 0) -> Iterator[None]:
    arrived, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=dig, args=(depth, arrived, done), name=name, daemon=True)
    thread.start()
    assert arrived.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join(60)


def test_where_each_of_them_is() -> None:
    with beside("cache"), beside("index", depth=40), beside("holdfast-watch"):
        found = {one.name: one.frames for one in other_threads()}
    assert "holdfast-watch" not in found
    assert threading.current_thread().name not in found
    assert any(line.startswith(f'File "{__file__}", line ') for line in found["cache"])
    assert any(line.endswith(" in dig") for line in found["cache"])
    assert len(found["index"]) == MAX_FRAMES


def test_those_that_come_and_go_meanwhile_do_no_harm() -> None:
    for _ in range(50):
        threads = [threading.Thread(target=sum, args=(range(100),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        other_threads()
        for thread in threads:
            thread.join(60)


def test_without_a_descriptor_only_their_names_are_known() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with beside("cache"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            found = {one.name: one.frames for one in other_threads()}
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found["cache"] == ()
