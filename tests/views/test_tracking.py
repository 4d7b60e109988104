"""``holdfast.track(loader)``: the batches are the loader's, and one line is about them."""

from __future__ import annotations

import io
import re
import sys
import weakref
from typing import Any

import pytest
import torch.utils.data
from rich.console import Console

import holdfast
from holdfast.views import tracking
from tests.support.datasets import Numbers, Stream


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal 120 columns wide."""
    written = io.StringIO()
    made = Console(file=written, force_terminal=True, width=120, markup=False, highlight=False)
    monkeypatch.setattr(tracking, "console", lambda stderr: made)
    return written


def last_line(written: io.StringIO) -> str:
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", written.getvalue())
    return re.split(r"[\r\n]+", plain.strip())[-1]


@pytest.mark.parametrize("make", [holdfast.DataLoader, torch.utils.data.DataLoader])
def test_the_line_tells_batches_waiting_memory_and_incidents(
    make: Any, screen: io.StringIO
) -> None:
    loader = make(Numbers(6), batch_size=2)
    tracked = holdfast.track(loader, name="[red]<b>")
    assert len(tracked) == 3
    assert [batch.tolist() for batch in tracked] == [batch.tolist() for batch in loader]
    line = last_line(screen)
    assert "[red]<b> · 3/3 · " in line
    assert re.search(r"batches/s · waited \d+% · [\d.]+ MiB · no incidents · ", line), line


def test_a_stream_without_length_is_tracked(screen: io.StringIO) -> None:
    loader = holdfast.DataLoader(Stream(5), batch_size=None)
    assert len(list(holdfast.track(loader))) == 5
    assert " 5 · " in last_line(screen)


def test_without_a_terminal_a_short_epoch_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert len(list(holdfast.track(holdfast.DataLoader(Numbers(3))))) == 3
    assert capfd.readouterr() == ("", "")


def test_without_a_terminal_a_long_epoch_says_a_line_now_and_then(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "LINE_INTERVAL", 0.0)
    list(holdfast.track(holdfast.DataLoader(Numbers(3), name="train")))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("train, 2/3, ")


def test_only_one_rank_shows_it(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(list(holdfast.track(holdfast.DataLoader(Numbers(3))))) == 3
    assert screen.getvalue() == ""


def test_a_batch_that_the_user_lets_go_is_gone(screen: io.StringIO) -> None:
    for batch in holdfast.track(holdfast.DataLoader(Numbers(2))):
        ref = weakref.ref(batch)
        del batch
        assert ref() is None


def test_the_terminal_is_given_back_when_the_loop_is_left(screen: io.StringIO) -> None:
    before = sys.stdout, sys.stderr

    def loop() -> None:
        for _ in holdfast.track(holdfast.DataLoader(Numbers(9))):
            assert (sys.stdout, sys.stderr) != before  # what is printed appears above the line
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert (sys.stdout, sys.stderr) == before


def test_what_is_no_loader_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.utils\.data\.DataLoader"):
        holdfast.track([1, 2, 3])


def test_tqdm_shows_the_length_of_a_loader() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    written = io.StringIO()
    bar = tqdm(holdfast.DataLoader(Numbers(6), batch_size=2), file=written)
    assert (len(bar), len(list(bar))) == (3, 3)
    assert "3/3" in written.getvalue()
