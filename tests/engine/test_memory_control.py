"""What is decided about memory is told to workers that can hear it."""

from __future__ import annotations

import pytest

from holdfast.limits import gauge
from holdfast.limits.budget import Budget
from tests.support.fake_driver import Consumer, FakeDriver

MIB = 1 << 20


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all memory is in use."""
    reading = gauge.MemoryReading(1 << 30, 10 * MIB)
    monkeypatch.setattr(gauge, "read", lambda roots: reading)


def test_a_worker_that_is_still_starting_is_not_chosen_to_go(full: None) -> None:
    driver = FakeDriver(sizes={0: 60 * MIB, 1: 90 * MIB}, each=0.01)
    budget = Budget(None, auto=True)
    with Consumer(driver, budget=budget, worker_memory_limit="auto") as consumer:
        driver.living[1].next = 2.0  # it takes so long to start
        consumer.begin(4)
        consumer.next()
        assert next(told[1:] for told in driver.urged if told[1] == "retire") == ("retire", 0)
        assert not driver.living[1].ready, "it would not hear it"
        assert len(consumer.rest()) == 3


def test_an_idle_worker_returns_memory_that_it_does_not_use() -> None:
    driver = FakeDriver()
    with Consumer(driver) as consumer:
        consumer.begin(4)
        consumer.next()
        while driver.now < 20.0:
            wait = consumer.pool.service()
            assert wait is not None
            driver.poll(wait)
        assert {told[1:] for told in driver.urged} >= {("shrink", 0), ("shrink", 1)}
        assert all(at > 5.0 for at, what, _ in driver.urged if what == "shrink")
