"""Stalls, with a clock that a test can turn."""

from __future__ import annotations

import pytest

from holdfast.autopsy.blackbox import Note
from holdfast.engine.driver import Processor, Progress
from holdfast.engine.stall import BOOT_ALLOWANCE, LACKING_SECONDS, LACKING_TIMEOUTS, StallDetector

FETCHING = Note(task=0, position=3, step="fetch", since=0.0)
EVERY = 0.5  # seconds between two looks


class Watch:
    """One worker, looked at as the pool does."""

    def __init__(self, timeout: float | None = 5.0) -> None:
        self.now = 100.0
        self.timeout = timeout or 5.0
        self.active = self.now
        self.note = FETCHING
        self.parts = 0
        self.processor: Processor | None = None
        self.stalls = StallDetector(1, timeout, self.now)

    def silent_after(self, seconds: float) -> bool:
        """Look every now and then for so long; whether the silence was ever too long."""
        end = self.now + seconds
        too_long = False
        while self.now < end:
            self.now = min(end, self.now + EVERY)
            self.stalls.awake(self.now, EVERY)
            if self.stalls.due(self.now, EVERY):
                seen = Progress(self.note, self.parts, self.active, self.processor)
                too_long |= self.stalls.has_stalled(0, seen, self.timeout, self.now)
        return too_long


def test_a_worker_that_notes_nothing_new_is_silent_when_its_time_is_over() -> None:
    watch = Watch()
    assert not watch.silent_after(5.0)
    assert watch.silent_after(1.0)


def test_every_new_note_begins_a_new_silence() -> None:
    watch = Watch()
    for position in range(4):
        watch.note = FETCHING._replace(position=position)
        assert not watch.silent_after(4.0)
    assert watch.silent_after(2.0)


def test_a_worker_that_was_heard_or_asked_has_all_its_time_again() -> None:
    watch = Watch()
    assert not watch.silent_after(4.5)
    watch.active = watch.now
    assert not watch.silent_after(5.0)
    assert watch.silent_after(1.0)


def test_every_part_of_a_large_message_begins_a_new_silence() -> None:
    watch = Watch()
    for parts in range(1, 5):
        watch.parts = parts
        assert not watch.silent_after(4.0)
    assert watch.silent_after(2.0)


def test_the_time_in_which_we_were_stopped_ourselves_does_not_count() -> None:
    watch = Watch()
    assert not watch.silent_after(4.0)
    watch.now += 3600.0  # Ctrl-Z, and fg an hour later
    assert not watch.silent_after(5.0)
    assert watch.silent_after(1.0)


def test_a_look_that_is_a_little_late_counts() -> None:
    watch = Watch()
    assert not watch.silent_after(4.0)
    watch.now += 1.0
    assert watch.silent_after(1.0)


def test_the_time_in_which_a_worker_got_no_processor_does_not_count() -> None:
    watch = Watch()
    watch.processor = Processor(1.0, 0.0, ready=True)
    assert not watch.silent_after(12.0)  # it is ready, and does not run
    watch.processor = Processor(1.1, 11.9, ready=False)
    assert not watch.silent_after(4.5)
    assert watch.silent_after(1.0)


def test_a_worker_that_gets_a_part_of_the_time_has_its_timeout_of_that() -> None:
    """It computes without end, and shares a processor with three others."""
    watch = Watch()
    seconds = 0
    while seconds < 60:
        seconds += 1
        watch.processor = Processor(seconds / 4, seconds * 3 / 4, ready=True)
        if watch.silent_after(1.0):
            break
    assert 19 <= seconds <= 24


def test_a_worker_that_sleeps_stalls_however_long_it_had_waited_before() -> None:
    watch = Watch()
    watch.processor = Processor(1.0, 1000.0, ready=False)
    assert not watch.silent_after(5.0)
    assert watch.silent_after(1.0)


def test_waits_before_the_last_sign_of_life_do_not_count_for_this_silence() -> None:
    watch = Watch()
    watch.processor = Processor(1.0, 0.0, ready=False)
    assert not watch.silent_after(4.0)
    watch.processor = Processor(1.1, 4.0, ready=False)
    watch.note = FETCHING._replace(position=4)
    assert not watch.silent_after(5.0)
    assert watch.silent_after(1.0)


def test_another_process_begins_with_figures_of_its_own() -> None:
    watch = Watch()
    watch.processor = Processor(9.0, 50.0, ready=False)
    assert not watch.silent_after(4.0)
    watch.processor = Processor(0.1, 0.0, ready=False)
    assert not watch.silent_after(1.0)
    assert watch.silent_after(1.0)


def test_a_wait_for_the_process_that_starts_the_worker_counts_with_its_own() -> None:
    watch = Watch()
    watch.processor = Processor(9.0, 0.0, ready=True)
    assert not watch.silent_after(8.0)
    watch.processor = Processor(0.1, 0.0, ready=False)
    assert not watch.silent_after(5.0)
    assert watch.silent_after(1.5)


def test_a_worker_that_never_gets_a_processor_stalls_in_the_end() -> None:
    watch = Watch()
    watch.processor = Processor(1.0, 0.0, ready=True)
    assert not watch.silent_after((1 + LACKING_TIMEOUTS) * 5.0 - 1)
    assert watch.silent_after(2.0)


def test_with_a_long_timeout_that_end_is_not_ten_times_as_far() -> None:
    watch = Watch(300.0)
    watch.processor = Processor(1.0, 0.0, ready=True)
    assert not watch.silent_after(300.0 + LACKING_SECONDS - 1)
    assert watch.silent_after(2.0)


def test_importing_has_longer_than_a_sample() -> None:
    watch = Watch()
    watch.note = FETCHING._replace(step="boot")
    assert not watch.silent_after(BOOT_ALLOWANCE)
    assert watch.silent_after(1.0)


def test_without_a_timeout_no_worker_stalls() -> None:
    watch = Watch(timeout=None)
    assert not watch.silent_after(10_000.0)


@pytest.mark.parametrize(
    ("timeout", "interval"), [(None, 5.0), (300.0, 5.0), (10.0, 1.0), (0.1, 0.05)]
)
def test_looks_are_as_often_as_the_timeout_needs(timeout: float | None, interval: float) -> None:
    assert StallDetector(0, timeout, 0.0).interval(5.0) == interval
