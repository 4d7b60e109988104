"""What a killed process leaves in its black box."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from holdfast.autopsy.blackbox import (
    COLLATE,
    FETCH,
    STDERR_TAIL,
    BlackBoxes,
    NotedSize,
    Recorder,
    keep_stderr_tail,
)
from holdfast.autopsy.incident import Incident, describe_status
from holdfast.autopsy.stack import innermost, tidy


@pytest.fixture(autouse=True)
def dump_descriptors_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker's descriptor for dumps ends with its process. If one stayed open here, processes
    that later tests fork would inherit it, and `holdfast top` would take them for our workers."""
    made: list[Recorder] = []
    begin = Recorder.__init__

    def noted(recorder: Recorder, *args: Any) -> None:
        begin(recorder, *args)
        made.append(recorder)

    monkeypatch.setattr(Recorder, "__init__", noted)
    yield
    for recorder in made:
        os.close(recorder.dump_fd)


def test_a_black_box_takes_what_is_used_of_it_and_all_of_it_where_a_folder_could_be_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def taken() -> float:
        boxes = BlackBoxes(64)
        try:
            return os.fstat(boxes.fd).st_blocks * 512 / 64
        finally:
            boxes.close()

    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    assert taken() <= 16 << 10, "notes and words"
    monkeypatch.setattr("holdfast.kernel.files.new_memory_file", refuse)
    assert taken() == 780 << 10, "or a state that is written later ends the worker with SIGBUS"


def test_the_last_note_survives_a_kill() -> None:
    boxes = BlackBoxes(3)
    child = os.fork()
    if child == 0:
        recorder = Recorder(boxes.fd, 3, 1)
        recorder.note(7, 2, FETCH)
        recorder.note(7, -1, COLLATE)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    note = boxes.note(1)
    assert (note.task, note.position, note.step) == (7, None, "collate")
    assert boxes.note(0).step == boxes.note(2).step == "boot"
    boxes.close()


def test_size_and_last_words_survive_a_kill_until_the_next_worker_begins() -> None:
    boxes = BlackBoxes(2)
    assert (boxes.size(1), boxes.stderr_tail(1)) == (None, None)
    child = os.fork()
    if child == 0:
        Recorder(boxes.fd, 2, 1).measured(5 << 20, 1 << 20, 8.5)
        keep_stderr_tail(boxes.fd, 1, b"free(): invalid pointer\n")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert boxes.size(1) == NotedSize(5 << 20, 1 << 20, 8.5)
    assert boxes.stderr_tail(1) == "free(): invalid pointer\n"
    assert (boxes.size(0), boxes.stderr_tail(0), boxes.note(0).step) == (None, None, "boot")
    boxes.clear(1)
    assert (boxes.size(1), boxes.stderr_tail(1)) == (None, None)
    boxes.close()


def test_of_many_words_the_last_whole_lines_are_kept() -> None:
    boxes = BlackBoxes(2)
    lines = "".join(f"line {number}\n" for number in range(5000))
    keep_stderr_tail(boxes.fd, 0, lines.encode()[-STDERR_TAIL:])
    words = boxes.stderr_tail(0)
    assert words is not None
    assert lines.endswith("\n" + words)
    keep_stderr_tail(boxes.fd, 0, b"x" * STDERR_TAIL)  # one line without an end
    assert boxes.stderr_tail(0) == "x" * STDERR_TAIL
    assert boxes.stderr_tail(1) is None
    boxes.close()


def save(recorder: Recorder, number: int, content: int) -> None:
    recorder.free_slot()[: 10_000 + number] = content
    recorder.commit(number, 10_000 + number)


def content(boxes: BlackBoxes, number: int) -> int | None:
    """What random state `number` of worker 1 consists of, all through."""
    found = boxes.random_state(1, number)
    if found is None:
        return None
    (byte,) = set(found)
    return byte


def test_of_three_random_states_the_one_that_fits_is_found_and_half_a_state_never() -> None:
    boxes = BlackBoxes(2)
    recorder = Recorder(boxes.fd, 2, 1)
    assert content(boxes, 0) is None
    for number in range(1, 6):
        save(recorder, number, number)
    assert content(boxes, 2) is None  # its place was taken by 5
    assert [content(boxes, number) for number in (3, 4, 5)] == [3, 4, 5]
    recorder.free_slot()[:100] = 6  # killed half-way through
    assert content(boxes, 6) is None
    assert [content(boxes, number) for number in (4, 5)] == [4, 5]
    assert boxes.random_state(0, 0) is None
    boxes.close()


def test_a_random_state_that_stays_the_same_holds_for_all_the_numbers() -> None:
    boxes = BlackBoxes(2)
    recorder = Recorder(boxes.fd, 2, 1)
    save(recorder, 1, 10)
    recorder.still(2)
    recorder.still(3)
    assert [content(boxes, number) for number in range(5)] == [None, 10, 10, 10, None]
    save(recorder, 4, 40)
    assert [content(boxes, number) for number in range(1, 6)] == [10, 10, 10, 40, None]
    recorder.still(5)
    save(recorder, 6, 60)
    recorder.free_slot()  # where 1 to 3 were
    assert [content(boxes, number) for number in range(1, 7)] == [None, None, None, 40, 40, 60]
    boxes.close()


@pytest.mark.parametrize("killed_at", ["before", "half-way", "after"])
def test_the_state_before_the_last_answer_outlives_any_number_of_successors(
    killed_at: str,
) -> None:
    boxes = BlackBoxes(2)
    recorder = Recorder(boxes.fd, 2, 1)
    for answered in range(1, 9):
        save(recorder, answered, answered)
        for _ in range(3):  # each is killed over the next answer, which is never sent
            if killed_at != "before":
                recorder.free_slot()[:100] = 99
            if killed_at == "after":
                recorder.commit(answered + 1, 100)
            wanted = [content(boxes, number) for number in (answered - 1, answered)]
            assert wanted == [answered - 1 or None, answered]
            recorder = Recorder(boxes.fd, 2, 1)
            assert recorder.take_up(answered)
            assert recorder.kept(answered) == boxes.random_state(1, answered)
            assert content(boxes, answered + 1) is None
    boxes.close()


def test_a_successor_goes_on_from_the_state_it_was_given_and_forgets_what_came_after() -> None:
    boxes = BlackBoxes(2)
    dead = Recorder(boxes.fd, 2, 1)
    save(dead, 1, 10)
    dead.still(2)
    save(dead, 3, 30)  # of an answer that was never sent
    recorder = Recorder(boxes.fd, 2, 1)
    assert recorder.take_up(2)
    assert [content(boxes, number) for number in (1, 2, 3)] == [10, 10, None]
    recorder.still(3)  # this time nothing was drawn
    assert content(boxes, 3) == 10
    save(recorder, 4, 40)
    assert [content(boxes, number) for number in (3, 4)] == [10, 40]
    boxes.close()


def test_the_state_before_an_item_that_was_given_up_is_kept_until_there_is_another() -> None:
    boxes = BlackBoxes(2)
    dead = Recorder(boxes.fd, 2, 1)
    for number in (1, 2):
        save(dead, number, 10 * number)
    recorder = Recorder(boxes.fd, 2, 1)
    assert not recorder.take_up(3)  # it begins with state 2, as if it were 3
    recorder.free_slot()[:100] = 20  # killed half-way through
    assert [content(boxes, number) for number in (2, 3)] == [20, None]
    recorder = Recorder(boxes.fd, 2, 1)
    assert not recorder.take_up(3)
    save(recorder, 3, 20)
    assert [content(boxes, number) for number in (2, 3)] == [20, 20]
    boxes.close()


def test_a_dump_is_taken_once_and_does_not_run_into_the_neighbours() -> None:
    boxes = BlackBoxes(2)
    recorders = [Recorder(boxes.fd, 2, worker) for worker in range(2)]
    os.write(recorders[0].dump_fd, b"zero " * 50_000)
    os.write(recorders[1].dump_fd, b"one")
    assert boxes.take_dump(0) == "zero " * 50_000
    assert boxes.take_dump(0) == ""
    assert boxes.take_dump(1) == "one"
    boxes.close()


def test_from_sample_to_sample_one_store_is_enough() -> None:
    boxes = BlackBoxes(1)
    recorder = Recorder(boxes.fd, 1, 0)
    recorder.note(7, -1, FETCH)
    before = boxes.note(0)
    recorder.cell[0] = 3
    assert boxes.note(0) == before._replace(position=3)
    assert recorder.position == 3
    recorder.cell.release()
    boxes.close()


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, ("exited", None, 0)),
        (3 << 8, ("exited", None, 3)),
        (9, ("killed", "SIGKILL", -9)),
        (11, ("crashed", "SIGSEGV", -11)),
        (11 | 0x80, ("crashed", "SIGSEGV", -11)),
        (40, ("crashed", "signal 40", -40)),
        (None, ("killed", None, None)),
    ],
)
def test_a_wait_status_in_words(status: int | None, expected: tuple[object, ...]) -> None:
    assert describe_status(status) == expected


def test_a_stack_is_cut_down_to_what_the_user_wrote() -> None:
    dump = (
        "Fatal Python error: Aborted\n\n"
        "Thread 0x01 (most recent call first):\n"
        '  File "/data/reader.py", line 3 in wait\n'
        '  File "/usr/lib/threading.py", line 9 in run\n\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "/data/set.py", line 5 in __getitem__\n'
        '  File "/site/holdfast/engine/fetch.py", line 1 in fetch\n'
        '  File "/home/train.py", line 1 in <module>\n\n'
        "Extension modules: numpy\n"
    )
    kept = tidy(dump, "/site/holdfast/")
    assert "reader.py" in kept
    assert "threading.py" in kept
    assert "set.py" in kept
    assert "holdfast" not in kept
    assert "train.py" not in kept
    assert "Extension" not in kept


def test_an_incident_reads_as_a_sentence() -> None:
    incident = Incident(
        kind="crashed",
        worker_id=3,
        pid=812,
        signal="SIGSEGV",
        exitcode=-11,
        batch=57,
        sample=np.int64(18233).item(),
        position=4,
        step="fetch",
        stack="",
        action="replaced; its batch is made again",
        time=0.0,
    )
    assert str(incident) == (
        "worker 3 (pid 812) crashed with a segmentation fault (SIGSEGV) while loading sample 18233 "
        "(position 4 of batch 57); replaced; its batch is made again"
    )


def test_a_stack_ends_where_the_thread_was_that_the_signal_struck() -> None:
    other = 'Thread 0x2 (most recent call first):\n  File "queue.py", line 1 in get\n'
    struck = 'Current thread 0x1 (most recent call first):\n  File "jpeg.py", line 9 in decode\n'
    assert innermost(f"{other}\n{struck}") == 'File "jpeg.py", line 9 in decode'
    assert innermost(f"{struck}\n{other}") == 'File "jpeg.py", line 9 in decode'
    assert innermost("Current thread 0x1 (most recent call first):\n\n" + other) == ""
    assert innermost("") == ""
