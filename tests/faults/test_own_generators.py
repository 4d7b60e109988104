"""Generators of the dataset's own: after kills the stream is that of stock torch without any."""

from __future__ import annotations

import functools
import logging
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import holdfast
from holdfast.worker import randomness
from tests.support.generators import Drawing, Jitter, Resuming, Streaming, as_imported

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:holdfast"),
]

KILLS = ";".join(
    (
        "after-fetch:SIGKILL@worker=0,task=2",
        "before-send:SIGKILL@worker=1,task=3",
        "after-collate:SIGKILL@worker=0,task=4,generation=1",
        "after-send:SIGKILL@worker=1,task=5,generation=1",
        "before-fetch:SIGKILL@worker=0,task=6,generation=2",
        "after-resume:SIGKILL@worker=1,generation=2",
    )
)


@pytest.fixture(autouse=True)
def _fresh_globals() -> None:
    as_imported()


def stream(
    loader_class: Any,
    dataset: Any,
    epochs: int = 2,
    deaths: int | None = None,
    loose: bool = False,
    **given: Any,
) -> list[Any]:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    given.setdefault("batch_size", 3)
    loader = loader_class(dataset, num_workers=2, **given)
    got = [[batch.tolist() for batch in loader] for _ in range(epochs)]
    asked = [kill for kill in os.environ.get("HOLDFAST_FAULTS", "").split(";") if kill]
    if deaths is None:
        deaths = sum(epochs > 1 or "resume" not in kill for kill in asked)
    found = len(loader.incidents) if loader_class is holdfast.DataLoader else deaths
    assert found >= deaths if loose else found == deaths
    return got


def expected(*arguments: Any, **given: Any) -> list[Any]:
    return stream(torch.utils.data.DataLoader, *arguments, **given)


def survived(dataset: Any, monkeypatch: pytest.MonkeyPatch, kills: str, **given: Any) -> list[Any]:
    monkeypatch.setenv("HOLDFAST_FAULTS", kills)
    given.setdefault("max_restarts", None)
    return stream(holdfast.DataLoader, dataset, **given)


def test_a_dataset_full_of_generators_gives_the_same_stream_after_kills(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments: dict[str, Any] = {"collate_fn": Jitter(4), "persistent_workers": True}
    wanted = expected(Drawing(), **arguments)
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert survived(Drawing(), monkeypatch, KILLS, **arguments) == wanted
    assert "random generator" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_started_in_another_way_it_is_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected(Drawing(12), epochs=1)  # forked: torch fails to send a torch.Generator
    arguments: dict[str, Any] = {"multiprocessing_context": method, "epochs": 1}
    kills = ";".join(KILLS.split(";")[:2])
    assert survived(Drawing(12), monkeypatch, kills, **arguments) == wanted


@pytest.mark.parametrize(("kind", "deaths"), [(Streaming, 6), (Resuming, 4)])
def test_a_stream_with_generators_goes_on_where_it_was(
    kind: Any, deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed, they start from the pristine copy; taken up from a state, from their own. (With a
    state, a process that only tries whether it can be used takes a generation: some kills miss.)"""
    wanted = expected(kind(), persistent_workers=True)
    assert (
        survived(
            kind(),
            monkeypatch,
            KILLS,
            deaths=deaths,
            loose=kind is Resuming,
            persistent_workers=True,
        )
        == wanted
    )


class Flaky(Drawing):
    """Some samples fail the first time, after they have drawn."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.failed: set[int] = set()

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if self.failures and index in (5, 14) and index not in self.failed:
            self.failed.add(index)
            raise OSError(5, "Input/output error")
        return sample


def test_a_sample_that_is_tried_again_draws_the_same_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = expected(Flaky(0), epochs=1)
    got = survived(Flaky(1), monkeypatch, KILLS, epochs=1, on_bad_sample="skip")
    assert got == wanted


class Deadly(Drawing):
    """Sample 7 draws, and ends its worker."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if index == 7:
            os.kill(os.getpid(), signal.SIGSEGV)
        return sample


def test_a_sample_that_kills_and_is_tried_alone_leaves_no_trace_in_them() -> None:
    good = [[0, 1], [2, 3, 4], [5, 6, 8], [9, 10], [11], [12, 13]]
    wanted = expected(Drawing(), epochs=1, batch_size=1, batch_sampler=good)
    batches = [[0, 1], [2, 3, 4], [5, 6, 7, 8], [9, 10], [11], [12, 13]]
    got = stream(
        holdfast.DataLoader,
        Deadly(),
        epochs=1,
        batch_size=1,
        batch_sampler=batches,
        on_bad_sample="skip",
        deaths=2,
    )
    assert got == wanted


class Late(torch.utils.data.Dataset[Any]):
    """Makes a generator where the replacement of its worker never comes by."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        if index == 0:
            self.rng = np.random.default_rng(1)
        return float(self.rng.random()) if hasattr(self, "rng") else 0.0


def test_a_generator_that_does_not_come_back_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kills = "after-fetch:SIGKILL@worker=0,task=2;after-fetch:SIGKILL@worker=0,task=4,generation=1"
    with caplog.at_level(logging.WARNING, "holdfast"):
        (epoch,) = survived(Late(), monkeypatch, kills, epochs=1)
    assert len(epoch) == 8
    assert caplog.text.count("had a random generator at dataset.rng") == 1


class Sized(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 48


class BetweenLooks(Sized):
    """Makes a generator in the middle, where none is expected."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.rng: Any = None

    def __getitem__(self, index: int) -> float:
        if index < 30:  # ten batches; each worker looks after its first, second, fourth and eighth
            return 0.0
        if self.rng is None:
            self.rng = self.make()
        if isinstance(self.rng, torch.Generator):
            return float(torch.rand((), generator=self.rng))
        return float(self.rng.random())


class InHand(Sized):
    """Has another transform in hand for each sample."""

    def __init__(self) -> None:
        self.transforms = [Jitter(seed) for seed in range(3)]
        self.current = self.transforms[0]

    def __getitem__(self, index: int) -> float:
        self.current = self.transforms[index // 3 % 3]
        return float(self.current.rng.random()) + self.transforms[index * 7 % 3].rng.random()


class Exchanging(Sized):
    """Changes the places of its generators with every sample."""

    def __init__(self) -> None:
        self.one, self.other = np.random.default_rng(1), np.random.default_rng(2)

    def __getitem__(self, index: int) -> float:
        self.one, self.other = self.other, self.one
        return float(self.one.random())


AT_ANY_TIME = ";".join(
    (
        "after-fetch:SIGKILL@worker=0,task=4",
        "after-send:SIGKILL@worker=1,task=5",
        "before-fetch:SIGKILL@worker=0,task=12,generation=1",
        "before-send:SIGKILL@worker=1,task=13,generation=1",
        "before-send:SIGKILL@worker=0,task=14,generation=2",
    )
)


@pytest.mark.parametrize(
    "make",
    [
        InHand,
        Exchanging,
    ],
    ids=["in-hand", "exchanging"],
)
def test_wherever_generators_move_the_stream_is_the_same(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected(make(), epochs=1)
    assert survived(make(), monkeypatch, AT_ANY_TIME, epochs=1) == wanted


def test_what_cannot_be_known_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Quick batches are not searched after each. The worker that dies had made a generator since the
    last search, or not: its replacement cannot tell."""
    monkeypatch.setattr(randomness, "_SHARE", 10**12)
    dataset = BetweenLooks(torch.Generator)
    with caplog.at_level(logging.WARNING, "holdfast"):
        survived(dataset, monkeypatch, "after-send:SIGKILL@worker=0,task=12", epochs=1)
    assert caplog.text.count("a random generator was made at dataset.rng after") == 1


@pytest.mark.parametrize("kind", [torch.Generator, functools.partial(np.random.default_rng, 5)])
def test_with_time_to_search_whenever_they_are_made_the_stream_is_the_same(
    kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(randomness, "_SHARE", 0)
    wanted = expected(BetweenLooks(kind), epochs=1)
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert survived(BetweenLooks(kind), monkeypatch, AT_ANY_TIME, epochs=1) == wanted
    assert "random generator" not in caplog.text
