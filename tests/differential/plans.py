"""Strategies that draw plans: arguments of a loader, a dataset, and how it is used.

Left out, because stock torch hangs there, loses something, or depends on luck (contract.md section
10, failures.md 21 and 22): exceptions with several constructor arguments, unpicklable exceptions
and results, StopIteration from `__getitem__`, dying workers. tests/contract says what holdfast must
do with these.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.support.datasets import ITERABLE, MAP, QUIET_ITERABLE, QUIET_MAP
from tests.support.observe import Plan
from tests.support.parts import BATCH_SAMPLERS, COLLATES, SAMPLERS, WORKER_INITS

SIZES = st.integers(0, 13)
BATCH_SIZES = st.sampled_from([1, 2, 3, 5, None])
HAVING_A_MARK = {"Revealing", "RevealingInBulk", "Raising"} | {
    name for name in ITERABLE if name.startswith("stream")
}


@st.composite
def batching(draw: st.DrawFn, size: int) -> dict[str, Any]:
    """How a map-style dataset is sampled and batched."""
    if size and draw(st.integers(0, 3)) == 0:
        return {"batch_size": 1, "batch_sampler": draw(st.sampled_from(sorted(BATCH_SAMPLERS)))}
    batch_size = draw(BATCH_SIZES)
    chosen: dict[str, Any] = {"batch_size": batch_size}
    if batch_size is not None:
        chosen["drop_last"] = draw(st.booleans())
    order = draw(st.sampled_from(["sequential", "shuffle", "sampler"]))
    if order == "shuffle":
        chosen["shuffle"] = True
    elif order == "sampler" and size:
        chosen["sampler"] = draw(st.sampled_from(sorted(SAMPLERS)))
    return chosen


@st.composite
def working(
    draw: st.DrawFn, dataset: str, num_workers: int, persistent: bool | None = None
) -> dict[str, Any]:
    """Workers and what is done in them."""
    chosen: dict[str, Any] = {
        "num_workers": num_workers,
        "generator": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }
    chosen["pin_memory"] = draw(st.integers(0, 4)) == 0
    if num_workers == 0:
        return chosen
    chosen["prefetch_factor"] = draw(st.sampled_from([None, 1, 2, 3, 5]))
    chosen["persistent_workers"] = draw(st.booleans()) if persistent is None else persistent
    chosen["timeout"] = draw(st.sampled_from([0, 0, 30, 25.5]))
    chosen["context"] = draw(st.sampled_from([None, "fork"]))
    inits = set(WORKER_INITS) - {"fail in 1"}  # see the test of its own
    if dataset not in HAVING_A_MARK:
        inits.remove("mark")
    chosen["worker_init_fn"] = draw(st.sampled_from(sorted(inits)))
    return chosen


@st.composite
def using(draw: st.DrawFn, *, breaks: bool) -> dict[str, Any]:
    """How the loader is consumed."""
    return {
        "epochs": draw(st.integers(1, 3)),
        "ask_len": draw(st.booleans()),
        "keep": draw(st.booleans()),
        "take": draw(st.integers(0, 4)) if breaks else None,
    }


@st.composite
def map_plans(draw: st.DrawFn, workers: st.SearchStrategy[int], *, breaks: bool = False) -> Plan:
    dataset = draw(st.sampled_from(sorted(MAP)))
    size = draw(SIZES)
    return Plan(
        dataset=dataset,
        size=size,
        collate_fn=draw(st.sampled_from(sorted(COLLATES))),
        **draw(batching(size)),
        **draw(working(dataset, draw(workers))),
        **draw(using(breaks=breaks)),
    )


@st.composite
def iterable_plans(
    draw: st.DrawFn, workers: st.SearchStrategy[int], *, breaks: bool = False
) -> Plan:
    """With `breaks` no persistent workers: how much a torch worker has drawn by the time of a break
    depends on when the end of another worker's stream was noticed, and a persistent worker carries
    that into the next epoch."""
    dataset = draw(st.sampled_from(sorted(ITERABLE)))
    batch_size = draw(BATCH_SIZES)
    pipe = dataset.endswith("_pipe")
    return Plan(
        dataset=dataset,
        size=draw(SIZES),
        batch_size=batch_size,
        drop_last=False if batch_size is None else draw(st.booleans()),
        shuffle=draw(st.sampled_from([None, True, False]))
        if pipe
        else draw(st.sampled_from([None, False])),
        collate_fn=draw(st.sampled_from(sorted(COLLATES))),
        **draw(working(dataset, draw(workers), persistent=False if breaks else None)),
        **draw(using(breaks=breaks)),
    )


@st.composite
def out_of_order_plans(draw: st.DrawFn) -> Plan:
    """in_order=False: who makes a batch and when it comes is luck, so samples must depend on the
    index alone."""
    iterable = draw(st.integers(0, 2)) == 0
    dataset = draw(st.sampled_from(sorted(QUIET_ITERABLE if iterable else QUIET_MAP)))
    size = draw(SIZES)
    arguments: dict[str, Any] = (
        {"batch_size": draw(BATCH_SIZES)} if iterable else draw(batching(size))
    )
    quiet_collates = sorted(set(COLLATES) - {"draws", "counts its calls"})
    return Plan(
        dataset=dataset,
        size=size,
        in_order=False,
        collate_fn=draw(st.sampled_from(quiet_collates)),
        **arguments,
        **draw(working(dataset, draw(st.integers(1, 3)))),
        epochs=draw(st.integers(1, 2)),
        ask_len=draw(st.booleans()),
        keep=draw(st.booleans()),
    )


# Arguments right and wrong, to be refused or accepted alike.
ANY_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "batch_size": st.sampled_from([None, 0, -1, 1, 2, 2.5, True, "2"]),
        "shuffle": st.sampled_from([None, True, False, 3, 0]),
        "sampler": st.sampled_from([None, "range", "list"]),
        "batch_sampler": st.sampled_from([None, "unequal lists", "tuples"]),
        "num_workers": st.sampled_from([0, 1, 2, -1, 3]),
        "drop_last": st.sampled_from([True, False, 1, 0, "yes"]),
        "timeout": st.sampled_from([0, 5, -1, 0.5]),
        "multiprocessing_context": st.sampled_from([None, "fork", "spoon", 3]),
        "prefetch_factor": st.sampled_from([None, 0, 1, 2, -1]),
        "persistent_workers": st.sampled_from([True, False, 1]),
        "pin_memory": st.sampled_from([True, False]),
        "pin_memory_device": st.sampled_from(["", "cuda"]),
        "in_order": st.sampled_from([True, False]),
    },
)
