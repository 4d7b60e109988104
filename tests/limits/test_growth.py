"""Each kind of growth is recognised by its curve, and none is reported where there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from holdfast.engine.memory_control import MemoryController
from holdfast.limits.budget import Budget, Share
from holdfast.limits.growth import GrowthWarnings, Kind, Point, classify, describe_growth

MIB = 1 << 20


def curve(
    private: Callable[[int], float] = lambda n: 0,
    anonymous: Callable[[int], float] | None = None,
    blocks: Callable[[int], float] = lambda n: 1000,
    trimmed: Callable[[int], float] = lambda n: 0,
    arena: Callable[[int], float] = lambda n: 8 * MIB,
    count: int = 10,
) -> list[Point]:
    """A point every 10 s, 100 batches apart; sizes as functions of the batches."""
    anonymous = anonymous or private
    return [
        Point(10.0 * n, 100 * n, int(anonymous(100 * n)), int(private(100 * n)),
              int(trimmed(100 * n)), int(blocks(100 * n)), int(arena(100 * n)))
        for n in range(count)
    ]  # fmt: skip


CURVES: dict[Kind | None, list[Point]] = {
    None: curve(private=lambda n: 200 * MIB + n % 300 * 1000),
    "copy-on-write": curve(private=lambda n: n * MIB / 4, anonymous=lambda n: n * 100),
    "python-leak": curve(private=lambda n: n * MIB / 4, blocks=lambda n: 1000 + 12 * n),
    "native-leak": curve(private=lambda n: n * MIB / 4, blocks=lambda n: 1000 + n % 70),
    "cache": curve(private=lambda n: 300 * MIB * (1 - 0.99**n), blocks=lambda n: n),
    "allocator": curve(private=lambda n: n % 300 * MIB / 10, trimmed=lambda n: n * MIB / 4),
    "prefetch": curve(private=lambda n: 1e6, arena=lambda n: n * MIB),
}


@pytest.mark.parametrize("kind", CURVES)
def test_each_kind_has_its_curve(kind: Kind | None) -> None:
    found = classify(CURVES[kind])
    assert (None if found is None else found.kind) == kind


def test_the_slope_is_what_it_is() -> None:
    found = classify(CURVES["python-leak"])
    assert found is not None
    assert (found.total, found.per_batch, found.per_second) == (225 * MIB, MIB / 4, 2.5 * MIB)


@pytest.mark.parametrize("count", [0, 1])
def test_one_look_says_nothing(count: int) -> None:
    assert classify(CURVES["python-leak"][:count]) is None


def test_what_the_first_batches_take_is_no_slope() -> None:
    first, second, *_ = CURVES["python-leak"]
    few = dataclasses.replace(second, batches=2, private=700 * MIB, anonymous=700 * MIB)
    assert classify([first, few]) is None
    assert classify([first, dataclasses.replace(few, batches=3)]) is not None


def test_it_is_said_when_it_matters_with_slope_end_and_what_to_do() -> None:
    found = classify(CURVES["python-leak"])
    assert found is not None
    said = describe_growth(found, 2, workers=4, free=36_000 * MIB, bounded=False)
    assert said is not None
    assert said.startswith("worker 2 grows 256 KiB per batch, 225 MiB so far")
    assert "memory ends in 60 min" in said
    assert "holdfast leaks" in said
    assert describe_growth(found, 2, workers=1, free=1 << 50, bounded=False) is None
    assert "replaced before" in (describe_growth(found, 2, workers=4, free=MIB, bounded=True) or "")


def test_what_levels_off_is_not_worth_a_word_unless_the_end_is_near() -> None:
    found = classify(CURVES["cache"])
    assert found is not None
    assert describe_growth(found, 0, workers=1, free=100_000 * MIB, bounded=True) is None
    assert describe_growth(found, 0, workers=1, free=10 * MIB, bounded=True) is not None


def test_over_all_epochs_of_a_loader_it_is_said_once_unless_it_becomes_much_worse(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = GrowthWarnings()

    def epoch(speed: float, kind: Kind = "python-leak") -> int:
        caplog.clear()
        mind = MemoryController(Share(Budget(None)), None, 2, growth_warnings=said)
        mind.reading = dataclasses.replace(mind.reading, free=10_000 * MIB)
        for point in CURVES[kind]:
            mind.measured(0, dataclasses.replace(point, at=point.at / speed))
        return len(caplog.records)

    assert [epoch(1.0), epoch(1.0), epoch(3.0)] == [1, 0, 0]
    assert [epoch(4.5), epoch(4.5)] == [1, 0]
    assert epoch(1.0, "native-leak") == 0, "a leak is one, whatever is taken for its kind"
    assert epoch(1.0, "copy-on-write") == 1  # another kind is other news


@pytest.mark.parametrize(
    ("blocks", "kind"), [(-15, "native-leak"), (20, "native-leak"), (9000, "python-leak")]
)
def test_a_few_objects_more_after_a_few_batches_are_no_pile(blocks: int, kind: Kind) -> None:
    """A leak of one large array for each batch, and what the interpreter makes and frees beside."""
    first = Point(0.0, 1, 8 * MIB, 8 * MIB, 0, 750_000, 0)
    last = Point(1.0, 7, 56 * MIB, 56 * MIB, 0, 750_000 + blocks, 0)
    found = classify([first, last])
    assert found is not None
    assert found.kind == kind
