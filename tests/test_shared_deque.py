"""Copies of a deque to which another thread appends."""

from __future__ import annotations

import threading
from collections import deque

from holdfast.shared_deque import copy_of


def test_a_copy_is_of_one_moment_while_another_thread_appends() -> None:
    items: deque[int] = deque(range(100), maxlen=100)
    done = threading.Event()

    def append() -> None:
        number = 100
        while not done.is_set():
            items.append(number)
            number += 1
            if number % 64 == 0:  # else a copy might never be of one moment
                done.wait(0.0001)

    thread = threading.Thread(target=append)
    thread.start()
    try:
        for _ in range(500):
            found = copy_of(items)
            assert found == list(range(found[0], found[0] + 100))
    finally:
        done.set()
        thread.join(60)
