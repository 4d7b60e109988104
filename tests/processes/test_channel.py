"""Channels: whole messages or none."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.processes.channel import PACKET, Channel, pair

SIZES = [0, 1, PACKET - 1, PACKET, PACKET + 1, 5 * PACKET + 3]


@pytest.mark.parametrize("size", SIZES)
def test_a_message_of_any_size_arrives_whole(size: int) -> None:
    ours, theirs = pair()
    worker = Channel(theirs)
    message = os.urandom(size)
    thread = threading.Thread(target=worker.send, args=(message,))
    thread.start()
    received = None
    while received is None:
        received = ours.poll()
    thread.join()
    assert received == message
    ours.close()
    worker.close()


@given(st.lists(st.integers(0, 3 * PACKET), max_size=8))
def test_what_is_posted_arrives_in_order_however_full_the_socket_is(sizes: list[int]) -> None:
    ours, theirs = pair()
    worker = Channel(theirs)
    messages = [bytes([number]) * size for number, size in enumerate(sizes)]
    for message in messages:
        ours.post(message)  # never blocks
    for message in messages:
        ours.flush()
        theirs.settimeout(0.0)
        received = None
        while received is None:
            try:
                received = worker.receive()
            except BlockingIOError:
                ours.flush()
        assert received == message
    assert not ours.pending
    ours.close()
    worker.close()


def test_what_has_arrived_is_seen_without_being_read() -> None:
    ours, theirs = pair()
    worker = Channel(theirs)
    assert not ours.unread
    worker.send(b"a message")
    assert ours.unread
    assert ours.poll() == b"a message"
    assert not ours.unread
    worker.close()
    assert not ours.unread
    ours.close()
    assert not ours.unread


def test_a_message_that_was_cut_off_is_never_seen() -> None:
    ours, theirs = pair()
    theirs.sendmsg((b"\x01", b"first half"))
    theirs.close()
    assert ours.poll() is None
    assert not ours.open
    ours.close()


def test_what_a_dead_worker_sent_before_is_still_there() -> None:
    ours, theirs = pair()
    Channel(theirs).send(b"last words")
    theirs.close()
    assert ours.poll() == b"last words"
    assert ours.poll() is None
    ours.post(b"to a dead worker")  # no error: the death is reported elsewhere
    ours.close()


def test_letting_go_of_a_copy_does_not_end_the_channel() -> None:
    ours, theirs = pair()
    copy = Channel(socket.socket(fileno=os.dup(ours.fileno())))
    copy.disown()
    ours.post(b"still here")
    assert Channel(theirs).receive() == b"still here"
    ours.close()
    theirs.close()


def test_what_a_worker_sent_is_heard_though_it_died_with_something_unread() -> None:
    """The kernel then reports a reset first, and once: it must not pass for the end."""
    ours, theirs = pair()
    ours.post(b"a task that is not done")
    Channel(theirs).send(b"last words")
    theirs.close()
    assert ours.poll() == b"last words"
    assert ours.poll() is None
    assert not ours.open
    ours.close()


@pytest.mark.parametrize("size", SIZES)
def test_what_waits_is_taken_without_waiting(size: int) -> None:
    ours, theirs = pair()
    worker = Channel(theirs)
    assert worker.waiting() is None
    message = os.urandom(size)
    ours.post(message)
    while (received := worker.waiting()) is None:
        ours.flush()
    assert received == message
    ours.close()
    assert worker.waiting() is None
    assert worker.receive() is None
    worker.close()
