"""The policy: which errors are temporary, what is decided, how many are too many."""

from __future__ import annotations

import errno
import gzip
import http.client
import socket
import urllib.error
from email.message import Message
from typing import Any

import pytest
from PIL import UnidentifiedImageError

from holdfast import BadSample
from holdfast.samples import policy as p


def chained(cause: Exception) -> Exception:
    try:
        raise RuntimeError("could not load") from cause
    except RuntimeError as error:
        return error


def http_error(code: int) -> Exception:
    return urllib.error.HTTPError("http://x", code, "text", Message(), None)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.EAGAIN, "again"),
        OSError(errno.ETIMEDOUT, "late"),
        OSError(errno.EMFILE, "Too many open files"),
        TimeoutError(),
        ConnectionResetError(),
        BrokenPipeError(),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        http.client.IncompleteRead(b""),
        http.client.RemoteDisconnected(),
        urllib.error.URLError(ConnectionRefusedError(errno.ECONNREFUSED, "refused")),
        http_error(503),
        chained(TimeoutError()),
    ],
    ids=repr,
)
def test_may_pass(error: Exception) -> None:
    assert p.may_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file"),
        PermissionError(errno.EACCES, "Permission denied"),
        IsADirectoryError(errno.EISDIR, "Is a directory"),
        NotADirectoryError(errno.ENOTDIR, "Not a directory"),
        OSError(errno.ELOOP, "Too many levels"),
        OSError(errno.ENAMETOOLONG, "File name too long"),
        OSError("image file is truncated (4 bytes not processed)"),
        UnidentifiedImageError("cannot identify image file"),
        gzip.BadGzipFile("Not a gzipped file"),
        http_error(404),
        urllib.error.URLError("unknown url type"),
        ValueError("x"),
        KeyError("x"),
        EOFError(),
        chained(ValueError("x")),
    ],
    ids=repr,
)
def test_stays(error: Exception) -> None:
    assert not p.may_pass(error)


def test_what_may_pass_is_tried_three_times_with_longer_and_longer_waits() -> None:
    policy = p.Policy("skip")
    waits = [policy.wait_before_retry(TimeoutError(), tries) for tries in (1, 2, 3)]
    assert waits == [0.1, 0.4, None]
    assert policy.wait_before_retry(MemoryError(), 1) == 0.1
    assert policy.wait_before_retry(ValueError(), 1) is None
    assert p.Policy("skip", stall_timeout=0.2).wait_before_retry(TimeoutError(), 2) == 0.05


def test_a_function_decides() -> None:
    answers: dict[Any, Any] = {1: "skip", 2: "replace", 3: "raise", 4: "a text", 5: 0}
    policy = p.Policy(lambda bad: answers[bad.index])
    decided = [policy.decide(BadSample(index, "raised")) for index in answers]
    assert decided == ["skip", "replace", "raise", p.Given("a text"), p.Given(0)]


def test_a_function_that_returns_nothing_is_told_what_to_return() -> None:
    with pytest.raises(TypeError, match='returned None for sample 7; it has to return "skip"'):
        p.Policy(lambda bad: None).decide(BadSample(7, "raised"))


@pytest.mark.parametrize(
    ("limit", "figures", "stops"),
    [
        (p.Limit(), {"bad": 10**6, "bad_now": 10**6, "seen": 10**6}, False),
        (p.Limit(count=3), {"bad": 3, "bad_now": 3, "seen": 3}, False),
        (p.Limit(count=3), {"bad": 4, "bad_now": 0, "seen": 4}, True),
        (p.Limit(count=0), {"bad": 1, "bad_now": 1, "seen": 1}, True),
        (p.Limit(fraction=0.1), {"bad": 99, "bad_now": 99, "seen": 99}, False),
        (p.Limit(fraction=0.1), {"bad": 11, "bad_now": 11, "seen": 100}, True),
        (p.Limit(fraction=0.1), {"bad": 50, "bad_now": 10, "seen": 100}, False),
        (p.Limit(fraction=0.01), {"bad": 9, "bad_now": 9, "seen": 299}, False),
        (p.Limit(fraction=0.01), {"bad": 9, "bad_now": 9, "seen": 300}, True),
        (p.Limit(fraction=0.5), {"bad": 9, "bad_now": 9, "seen": 10, "at_end": True}, True),
        (p.Limit(fraction=0.5), {"bad": 0, "bad_now": 0, "seen": 0, "at_end": True}, False),
    ],
)
def test_how_many_are_too_many(limit: p.Limit, figures: dict[str, Any], stops: bool) -> None:
    assert (limit.exceeded(**figures) is not None) == stops


def test_too_many_are_told_by_cause_with_the_first_few() -> None:
    bad = [BadSample(i, "raised", "OSError", f"file {i}") for i in range(7)]
    bad.append(BadSample(9, "killed", "SIGSEGV", "crashed"))
    text = p.too_many("8 bad samples are more than max_bad_samples=7", bad)
    assert text.startswith("8 bad samples are more than max_bad_samples=7.\n")
    assert "By cause: 7 OSError, 1 ended the worker (SIGSEGV)." in text
    assert "sample 4 raised OSError: file 4" in text
    assert "sample 5" not in text
    assert "and 3 more" in text
