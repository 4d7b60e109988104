"""Nothing that the machine has decided is forgotten, whatever comes in between."""

from __future__ import annotations

import functools
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

import holdfast
from holdfast.engine import events as ev
from holdfast.engine import signals
from holdfast.errors import LoaderClosed
from holdfast.samples import policy
from holdfast.samples.quarantine import Quarantine

pytestmark = pytest.mark.timeout(90, method="thread")


class Alarm(Exception):
    """What a signal handler of the user's raises."""


@pytest.mark.parametrize("kind", [ev.Unpacked, ev.Drawn, ev.Asked])
def test_who_is_interrupted_half_way_is_told_so_and_does_not_wait_for_ever(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.DataLoader(range(40), num_workers=2, timeout=30) as loader:
        iterator = iter(loader)
        seen = [int(next(iterator))]
        machine = iterator._pool.machine
        decide = machine.handle

        def struck(event: ev.Event) -> Any:
            actions = decide(event)
            if not isinstance(event, kind) or not here():
                return actions
            monkeypatch.undo()
            raise Alarm

        monkeypatch.setattr(machine, "handle", struck)
        with pytest.raises(Alarm):
            next(iterator)
        with pytest.raises(LoaderClosed, match="Alarm"):
            seen.extend(map(int, iterator))
        assert seen in ([0], [0, 1])  # the batch it already had, and none after it
        assert [int(batch) for batch in loader] == list(range(40))


class Struck:
    """The pool's lock; a signal comes when the main thread has just let go of it."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.left = 2

    def __enter__(self) -> Any:
        return self.lock.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.lock.__exit__(*raised)
        self.left -= threading.current_thread() is threading.main_thread()
        if not self.left:
            self.left = -1
            signal.raise_signal(signal.SIGALRM)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)


def test_a_batch_is_kept_whose_next_is_interrupted_when_it_lets_go_of_the_lock() -> None:
    before = signal.signal(signal.SIGALRM, strike)
    seen: list[int] = []
    try:
        iterator = iter(holdfast.DataLoader(range(10), num_workers=2))
        iterator._pool.lock = Struck(iterator._pool.lock)
        with pytest.raises(Alarm):
            seen.extend(map(int, iterator))
        assert seen == [0]
        seen.extend(map(int, iterator))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == list(range(10))


def strike(number: int, frame: Any) -> None:
    raise Alarm


@pytest.fixture
def alarms() -> Iterator[None]:
    """Two handlers that raise: of a signal that we let wait, and of one that we do not expect."""
    before = {one: signal.signal(one, strike) for one in (signal.SIGALRM, signal.SIGPROF)}
    yield
    signals.restore_handlers()  # should a test have found that they are not
    for number, handler in before.items():
        signal.signal(number, handler)


def here() -> bool:
    """Not in the background thread, which delays no next()."""
    return threading.current_thread() is threading.main_thread()


def struck_before(function: Callable[..., Any], number: int, *when: int) -> Callable[..., Any]:
    """As if a signal came just before the call."""
    calls = itertools.count(1)

    def wrapped(**options: Any) -> Any:
        if here() and next(calls) in when:
            signal.raise_signal(number)
        return function(**options)

    return wrapped


def struck_after(function: Callable[..., Any], number: int, *when: int) -> Callable[..., Any]:
    calls = itertools.count(1)

    def wrapped(**options: Any) -> Any:
        result = function(**options)
        if here() and next(calls) in when:
            signal.raise_signal(number)
        return result

    return wrapped


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize(
    ("attribute", "how"), [("defer_handlers", struck_after), ("restore_handlers", struck_before)]
)
def test_handlers_are_never_left_put_aside(
    alarms: None,
    attribute: str,
    how: Callable[..., Any],
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever raises between our putting them aside and our knowing that we did."""
    for when in range(1, 4):
        with holdfast.DataLoader(range(8), num_workers=1, on_bad_sample=policy) as loader:
            iterator = iter(loader)
            monkeypatch.setattr(
                signals, attribute, how(getattr(signals, attribute), signal.SIGPROF, when)
            )
            with pytest.raises(Alarm):
                list(iterator)
            assert signal.getsignal(signal.SIGALRM) is strike, when
            monkeypatch.undo()


def test_handlers_are_not_left_put_aside_when_bad_samples_have_been_counted(
    alarms: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of a signal that is not deferred raises where they are to be restored."""
    with holdfast.DataLoader(range(8), num_workers=1, on_bad_sample="skip") as loader:
        iterator = iter(loader)
        count = type(iterator)._count

        def counted(*arguments: Any) -> None:
            count(*arguments)
            struck = struck_before(signals.restore_handlers, signal.SIGPROF, 1)
            monkeypatch.setattr(signals, "restore_handlers", struck)

        monkeypatch.setattr(iterator, "_count", functools.partial(counted, iterator))
        with pytest.raises(Alarm):
            next(iterator)
        assert signal.getsignal(signal.SIGALRM) is strike
        monkeypatch.undo()
        assert list(map(int, iterator)) == list(range(8))


def test_handlers_left_put_aside_come_back_with_the_next_batch(
    alarms: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Struck again where we saw to it that they do."""
    with holdfast.DataLoader(range(8), num_workers=1) as loader:
        iterator = iter(loader)
        struck = struck_before(signals.restore_handlers, signal.SIGPROF, 1, 2)
        monkeypatch.setattr(signals, "restore_handlers", struck)
        with pytest.raises(Alarm):
            next(iterator)
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGALRM) is not strike
        assert list(map(int, iterator)) == list(range(8))
        assert signal.getsignal(signal.SIGALRM) is strike


class Mine:
    """A sampler of the user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_a_handler_that_raises_before_a_sampler_is_called_costs_nothing(
    alarms: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for when in range(1, 7):
        with holdfast.DataLoader(range(8), num_workers=1, sampler=Mine()) as loader:
            iterator = iter(loader)
            struck = struck_after(signals.defer_handlers, signal.SIGALRM, when)
            monkeypatch.setattr(signals, "defer_handlers", struck)
            seen: list[int] = []
            with pytest.raises(Alarm):
                seen.extend(map(int, iterator))
            seen += map(int, iterator)
            monkeypatch.undo()
            assert seen == list(range(8)), when


class OneBad(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise ValueError("torn")
        return index


@pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")
@pytest.mark.parametrize("limit", [0, 0.1], ids=["at once", "at the end"])
def test_a_handler_that_raises_in_place_of_the_limit_does_not_lift_it(
    alarms: None, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_many = policy.too_many

    def struck(*arguments: Any) -> str:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGALRM)
        return too_many(*arguments)

    options: Any = {"on_bad_sample": "skip", "max_bad_samples": limit}
    with holdfast.DataLoader(OneBad(), num_workers=1, **options) as loader:
        iterator = iter(loader)
        monkeypatch.setattr(policy, "too_many", struck)
        with pytest.raises(Alarm):
            list(iterator)
        with pytest.raises(holdfast.TooManyBadSamples):
            list(iterator)
        assert [bad.index for bad in loader.bad_samples] == [2]


@pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")
def test_handlers_do_not_wait_for_a_disk(
    alarms: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was to be written is, when it can be."""
    given_up = []

    def hang(*_: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        time.sleep(5)
        given_up.append("it was not interrupted")

    listed = tmp_path / "bad.jsonl"
    options: Any = {"on_bad_sample": "skip", "quarantine": str(listed), "logbook": tmp_path / "log"}
    with holdfast.DataLoader(OneBad(), num_workers=1, **options) as loader:
        iterator = iter(loader)
        seen: list[int] = []
        monkeypatch.setattr(Quarantine, "append", hang)
        with pytest.raises(Alarm):
            seen.extend(map(int, iterator))
        monkeypatch.undo()
        assert not given_up
        seen.extend(map(int, iterator))
        assert seen == [0, 1, 3, 4, 5, 6, 7]
    assert len(listed.read_text().splitlines()) == 1
    assert len((tmp_path / "log" / "bad_samples.jsonl").read_text().splitlines()) == 1
