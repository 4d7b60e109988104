"""Whatever the arguments and the dataset, holdfast shows what stock torch shows.

Each test draws plans, runs each with both loaders and compares all that `tests.support.observe` can
see. A failure prints a `Plan`; `differences(observe(STOCK, plan), observe(holdfast_loader(),
plan))` reproduces it.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.differential import record
from tests.differential.plans import ANY_ARGUMENTS, iterable_plans, map_plans, out_of_order_plans
from tests.support.datasets import DATASETS
from tests.support.fingerprint import fingerprint
from tests.support.loaders import STOCK, THOROUGH, holdfast_loader
from tests.support.observe import Plan, Seen, differences, observe
from tests.support.parts import BATCH_SAMPLERS, SAMPLERS
from tests.support.processes import children, no_process_left_behind

pytestmark = pytest.mark.timeout(3600 if THOROUGH else 300)

SOME_WORKERS = st.integers(1, 3)


def examples(count: int) -> settings:
    """The default run tries the same examples each time, so that a red run is the fault of a
    change. HOLDFAST_THOROUGH=1 draws new ones, and many more of them."""
    return settings(
        max_examples=15 * count if THOROUGH else count,
        derandomize=not THOROUGH,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


def assert_same(plan: Plan, *, ordered: bool = True) -> None:
    with no_process_left_behind():
        other = observe(holdfast_loader(), plan)
    if not THOROUGH and record.digest(other, ordered=ordered) == record.known(
        plan, ordered=ordered
    ):
        return
    stock = observe(STOCK, plan)
    record.note(plan, stock, ordered=ordered)
    found = differences(stock, other, ordered=ordered)
    assert not found, f"{plan}\n" + "\n".join(found)


@pytest.mark.slow
@pytest.mark.skipif(not THOROUGH, reason="the record is looked at by `make test-all`")
def test_the_record_says_what_torch_shows() -> None:
    assert {
        repr(plan): told
        for plan, ordered, told in record.plans()
        if record.digest(observe(STOCK, plan), ordered=ordered) != told
    } == {}


@given(map_plans(st.just(0)))
@examples(80)
def test_map_style_without_workers_shows_what_torch_shows(plan: Plan) -> None:
    assert_same(plan)


@given(iterable_plans(st.just(0)))
@examples(54)
def test_iterable_without_workers_shows_what_torch_shows(plan: Plan) -> None:
    assert_same(plan)


@given(map_plans(SOME_WORKERS))
@examples(40)
@example(Plan(dataset="Revealing", shuffle=True, epochs=3, persistent_workers=True))
@example(Plan(dataset="Raising", size=13, batch_size=2, num_workers=3))
@example(Plan(dataset="Revealing", sampler="eager permutation", batch_size=None, epochs=2))
@example(Plan(dataset="Revealing", batch_sampler="eager batches", batch_size=1, epochs=2))
@example(Plan(dataset="Revealing", sampler="lazy draws", epochs=2, prefetch_factor=3))
@example(Plan(dataset="LargeImages", size=9, batch_size=4, keep=True, epochs=2))
def test_map_style_with_workers_shows_what_torch_shows(plan: Plan) -> None:
    assert_same(plan)


@given(map_plans(SOME_WORKERS, breaks=True))
@examples(27)
@example(
    Plan(
        dataset="Revealing",
        sampler="lazy draws",
        size=13,
        take=1,
        epochs=3,
        persistent_workers=True,
    )
)
@example(
    Plan(dataset="Revealing", shuffle=True, size=13, take=0, epochs=3, persistent_workers=True)
)
def test_map_style_left_in_the_middle_of_an_epoch_shows_what_torch_shows(plan: Plan) -> None:
    assert_same(plan)


@given(iterable_plans(SOME_WORKERS))
@examples(30)
@example(Plan(dataset="shuffled_pipe", size=12, shuffle=True, persistent_workers=True, epochs=3))
@example(
    Plan(
        dataset="stream, uneven",
        size=9,
        batch_size=2,
        num_workers=3,
        persistent_workers=True,
        epochs=2,
    )
)
@example(Plan(dataset="stream that claims too little", size=8, batch_size=None, ask_len=True))
def test_iterable_with_workers_shows_what_torch_shows(plan: Plan) -> None:
    assert_same(plan)


@given(iterable_plans(SOME_WORKERS, breaks=True))
@examples(14)
def test_iterable_left_in_the_middle_of_an_epoch_shows_what_torch_shows(plan: Plan) -> None:
    assert_same(plan)


@given(out_of_order_plans())
@examples(17)
def test_out_of_order_delivers_the_same_set_of_batches_as_torch(plan: Plan) -> None:
    assert_same(plan, ordered=False)


@given(
    ANY_ARGUMENTS,
    st.sampled_from(["Numbers", "quiet stream, whole", "plain_pipe"]),
    st.sampled_from([0, 5]),
)
@examples(167)
def test_any_arguments_are_accepted_or_refused_as_torch_does(
    arguments: dict[str, Any], dataset: str, size: int
) -> None:
    def outcome(loader_class: Any) -> Any:
        made = dict(arguments)
        if made.get("sampler"):
            made["sampler"] = SAMPLERS[made["sampler"]](size, None)
        if made.get("batch_sampler"):
            made["batch_sampler"] = BATCH_SAMPLERS[made["batch_sampler"]](size, None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loader = loader_class(DATASETS[dataset](size), **made)
            except Exception as error:
                result: Any = type(error), str(error)
            else:
                names = (
                    "batch_size",
                    "drop_last",
                    "num_workers",
                    "prefetch_factor",
                    "timeout",
                    "persistent_workers",
                )
                result = {
                    name: getattr(loader, name)
                    for name in (*names, "pin_memory", "in_order", "_auto_collation")
                }
                result |= {
                    name: type(getattr(loader, name))
                    for name in ("sampler", "batch_sampler", "collate_fn")
                }
                result["context"] = str(type(loader.multiprocessing_context))
        return result, [(each.category, str(each.message)) for each in caught]

    assert outcome(holdfast_loader()) == outcome(STOCK)
    assert not children()


# Spawn and forkserver cost some seconds for each pool of torch's, so they get a few plans, not a
# space of them; and our workers start under forkserver as under spawn.
SLOW_STARTS = [
    Plan(dataset="Revealing", size=9, batch_size=2, shuffle=True, worker_init_fn="draw once"),
    Plan(
        dataset="Raising",
        size=9,
        batch_size=2,
        collate_fn="identity",
        persistent_workers=True,
        epochs=2,
    ),
    Plan(dataset="stream, sharded", size=9, batch_size=2, worker_init_fn="mark"),
    Plan(dataset="shuffled_pipe", size=9, batch_size=2, persistent_workers=True, epochs=2),
    Plan(dataset="Objects", size=5, batch_size=2, collate_fn="identity", generator=True),
]


@pytest.mark.parametrize(
    ("plan", "context"),
    [
        pytest.param(
            plan, context, marks=[] if (place, context) == (0, "spawn") else pytest.mark.slow
        )
        for place, plan in enumerate(SLOW_STARTS)
        for context in ("spawn", "forkserver")
    ],
    ids=lambda value: getattr(value, "dataset", value),
)
def test_spawn_and_forkserver_show_what_torch_shows(plan: Plan, context: str) -> None:
    assert_same(dataclasses.replace(plan, context=context))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_failing_worker_init_fn_raises_first_what_torch_raises(num_workers: int) -> None:
    """Only up to the first error: torch's worker then lacks its fetcher, and raises
    UnboundLocalError for ever."""
    assert_same(
        Plan(
            dataset="Numbers",
            num_workers=num_workers,
            worker_init_fn="fail in 1",
            go_on_after_errors=False,
        )
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failing_iter_of_the_dataset_raises_first_what_torch_raises(num_workers: int) -> None:
    assert_same(Plan(dataset="raises in iter", num_workers=num_workers, go_on_after_errors=False))


# --- The instrument itself ------------------------------------------------------------------------


PLAN = Plan(dataset="Revealing", shuffle=True, size=9, epochs=2)


@functools.cache
def seen_of_plan() -> Seen:
    return observe(STOCK, PLAN)


def test_the_comparison_finds_no_difference_between_stock_and_itself() -> None:
    one, two = observe(STOCK, PLAN), observe(STOCK, PLAN)
    assert differences(one, two) == []
    assert record.digest(one) == record.digest(two)


def warns_of_pinning() -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(STOCK([1], pin_memory=True))
    return bool(caught)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"num_workers": 1},
        {"worker_init_fn": "draw once"},
        {"worker_init_fn": "mark"},
        {"collate_fn": "identity"},
        {"persistent_workers": True},
        {"drop_last": True},
        {"epochs": 1},
        {"pin_memory": True},
        {"dataset": "Raising"},
        {"sampler": "range", "shuffle": None},
    ],
    ids=str,
)
def test_the_comparison_sees_a_changed(change: dict[str, Any]) -> None:
    if "pin_memory" in change and not warns_of_pinning():
        pytest.skip("this torch says nothing about pin_memory without an accelerator")
    changed = observe(STOCK, dataclasses.replace(PLAN, **change))
    assert differences(seen_of_plan(), changed)
    assert record.digest(seen_of_plan()) != record.digest(changed)


def test_the_comparison_sees_a_stride_a_bit_and_a_type() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    turned = tensor.t().contiguous().t()
    assert torch.equal(tensor, turned)
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(tensor) != fingerprint(turned)
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint([1, 2]) != fingerprint((1, 2))
    assert fingerprint({"a": 1}) != fingerprint({"a": True})
    assert fingerprint(tensor) != fingerprint(tensor.double())
    assert fingerprint(tensor) != fingerprint(torch.nn.Parameter(tensor))


class NeverAnswers:
    def __init__(self, **arguments: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        yield 1
        time.sleep(3600)


def test_the_comparison_sees_a_hang() -> None:
    events = observe(NeverAnswers, PLAN, patience=0.5).epochs[0].events
    assert [event[0] for event in events] == ["batch", "consumer drew", "hung"]
