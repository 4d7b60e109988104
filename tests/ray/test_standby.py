"""Actors that wait for a processor in the stead of a worker that has none: without a cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
from holdfast.engine import events as ev
from holdfast.engine.seats import Seat, SeatState
from holdfast.ray import ray_driver, ray_method
from ray.exceptions import ActorUnschedulableError

FIRST = ray_method.LIMITS.first_pause


class Actor:
    """It answers when it is told to. So it is a stand-by that waits, until then."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.killed = False
        self.looked: Future[Any] = Future()
        self._actor_id = b"a1"
        self.look = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: self.looked))
        self.begin = self.take_up = SimpleNamespace(
            remote=lambda *_: SimpleNamespace(future=Future)
        )


class Supervisor:
    """It keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.machine = SimpleNamespace(seats=[Seat(0, state=SeatState.RUNNING)])
        self.upkeep = None

    def tell(self, event: Any) -> None:
        self.told.append(event)

    def after(self, call: Callable[[], None]) -> None:
        call()


class Scene:
    """A driver with one worker, which shares a processor, and what becomes of its stand-by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        head = SimpleNamespace(
            lost=False,
            left=False,
            close=lambda: None,
            lacks_processors=lambda _: False,
            ask_for=lambda _: "",
        )
        monkeypatch.setattr(ray_driver, "HeadWatch", lambda _: head)
        monkeypatch.setattr(ray_driver.ray, "kill", lambda one: setattr(one, "killed", True))
        given = {"iterable": False, "persistent": False, **options}
        given |= {"workers": 1, "seeds": None, "restored": (), "recovery": "replay"}
        given["origin"] = SimpleNamespace(prefix="")
        self.driver: Any = ray_driver.RayDriver(
            None,
            {},
            ray_method.LIMITS,
            SimpleNamespace(**given),  # type: ignore[arg-type]
        )
        self.now = 100.0
        self.driver.clock = lambda: self.now
        self.supervisor = Supervisor()
        self.driver.connect(self.supervisor)
        self.made: list[Actor] = []

        def made(**chosen: Any) -> Actor:
            self.made.append(Actor(chosen))
            return self.made[-1]

        self.driver._new_actor = made
        self.seat = self.driver._seats[0]
        self.worker = self.seat.worker = Actor({"num_cpus": 0})
        self.seat.squeezed = self.seat.born = True
        self.driver._stand_by(self.seat)

    def fail(self) -> None:
        self.made[-1].looked.set_exception(ActorUnschedulableError("the node is gone"))
        self.driver.tick(self.now)

    def close(self) -> None:
        self.driver.close()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Scene] = []

    def make(**options: Any) -> Scene:
        made.append(Scene(monkeypatch, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_standby_that_fails_is_made_again_after_pauses_that_double_and_not_for_ever(
    scene: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "holdfast")
    one = scene()
    pauses = []
    for number in range(1, ray_driver.STANDBY_TRIES):
        one.fail()
        pauses.append(one.seat.standby_due - one.now)
        for _ in range(5):
            one.driver.tick(one.now)  # however often it is looked at
        assert len(one.made) == number
        one.now = one.seat.standby_due
        one.driver.tick(one.now)
        assert len(one.made) == number + 1
    assert pauses[:3] == [FIRST, 2 * FIRST, 4 * FIRST]
    (record,) = caplog.records
    assert "the actor that waited for a processor for worker 0 has failed. " in record.message
    assert "the node is gone" in record.message
    one.fail()
    one.now += 1000
    one.driver.tick(one.now)
    assert len(one.made) == ray_driver.STANDBY_TRIES
    assert "6 times in a row" in caplog.records[-1].message
    assert len(caplog.records) == 2
    assert one.seat.worker is one.worker
    assert not one.worker.killed
    assert not one.supervisor.told


def test_a_worker_that_is_replaced_in_such_a_pause_shares_a_processor_as_before(scene: Any) -> None:
    one = scene()
    one.fail()
    one.seat.worker = None
    one.driver._begin = lambda _: SimpleNamespace(answered=0)
    one.driver.start(ev.Start(0, 1, 0, 0, 0, False))
    assert one.made[-1].options == {"num_cpus": 0}
    assert one.seat.squeezed
    one.now = one.seat.standby_due
    one.driver.tick(one.now)
    assert one.seat.standby is one.made[-1]
    assert one.made[-1].options == {}


def test_failures_count_anew_when_a_standby_has_taken_over(scene: Any) -> None:
    one = scene()
    one.fail()
    one.now = one.seat.standby_due
    one.driver.tick(one.now)
    one.made[-1].looked.set_result(None)
    one.driver.tick(one.now)
    (event,) = one.supervisor.told
    assert event.exit.renewed
    assert one.worker.killed
    one.driver._begin = lambda _: SimpleNamespace(answered=0)
    one.driver.start(ev.Start(0, 1, 0, 0, 0, False))
    assert one.seat.worker is one.made[1]
    assert (one.seat.squeezed, one.seat.standby_failures) == (False, 0)


@pytest.mark.parametrize(("state", "dismissed"), [("EMPTY", True), ("PAUSED", False)])
def test_the_standby_of_a_worker_that_is_not_replaced_gives_its_processor_back(
    scene: Any, state: str, dismissed: bool
) -> None:
    one = scene()
    one.seat.worker = None
    one.supervisor.machine.seats[0].state = SeatState[state]
    one.driver.tick(one.now)
    assert one.made[0].killed is dismissed
    assert (one.seat.standby is None) is dismissed


@pytest.mark.parametrize(
    ("persistent", "words"),
    [
        (False, "workers of later epochs will use that room"),
        (True, "with persistent_workers=True it stays in later epochs too"),
    ],
)
def test_a_worker_that_has_begun_a_stream_stays_and_the_log_says_for_how_long(
    scene: Any, caplog: pytest.LogCaptureFixture, persistent: bool, words: str
) -> None:
    caplog.set_level(logging.WARNING, "holdfast")
    one = scene(iterable=True, persistent=persistent)
    one.seat.count = 3
    one.made[-1].looked.set_result(None)
    one.driver.tick(one.now)
    assert one.made[-1].killed
    assert one.seat.worker is one.worker
    assert words in caplog.text
