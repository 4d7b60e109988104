"""A row of the table, played: the loader it describes, stock torch's stream, and the verdict."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.utils.data

import holdfast
from holdfast import Incident
from holdfast.engine import stall
from holdfast.options import RESTARTS_PER_WORKER
from holdfast.worker.faults import VARIABLE
from tests.faults import table
from tests.faults.causes import GRANDCHILDREN, STALLS, end_child_left_behind
from tests.faults.checker import (
    Batch,
    Error,
    History,
    Interfere,
    check_conduct,
    check_stream,
    play,
    seeded,
)
from tests.faults.datasets import NO_TRIGGER, Collate, Init, Recipe, Trigger
from tests.faults.table import Case
from tests.faults.witness import Witness, biting, check_in_flight
from tests.support.golden import asked_once
from tests.support.processes import alive, eventually, kill


def arguments(
    case: Case, trigger: Trigger = NO_TRIGGER, witness: Witness | None = None
) -> dict[str, Any]:
    """What both loaders are made with."""
    kind = case.dataset
    recipe = Recipe(
        case.size,
        trigger,
        large=kind.large,
        objects=kind.objects,
        payload=case.payload,
        heavy=frozenset({case.number(0)}),
        ballast=case.payload,
        ballast_at=(case.task // case.workers + 1) * table.BATCH,
        witness=None if witness is None else str(witness.file),
    )
    return {
        "dataset": kind.dataset(recipe),
        "batch_size": table.BATCH,
        "sampler": None if kind.iterable else case.order,
        "num_workers": case.workers,
        "prefetch_factor": table.PREFETCH,
        "persistent_workers": case.persistent,
        "collate_fn": Collate(trigger, as_list=kind.objects) if kind.own_collate else None,
        "worker_init_fn": Init(trigger),
    }


def batch_bytes(case: Case) -> int:
    return table.BATCH * Recipe(case.size, large=case.dataset.large).nbytes


def budget(case: Case) -> int:
    """What rows are played with: so little that it is felt."""
    return biting(batch_bytes(case), case.workers)


def witness_of(case: Case, folder: Path) -> Witness:
    without: frozenset[int] = frozenset()
    if case.outcome in (table.RAISED, table.POISON):
        without = frozenset(case.number(position) for position in range(table.BATCH))
    sizes = [batch_bytes(case) // table.BATCH] * case.size
    return Witness(folder / "begun", sizes, without)


def check_budget(case: Case, history: History) -> None:
    """I6. A payload is a surprise to the loader, and what it says of itself not ours to foresee."""
    seen = history.seen
    assert seen is not None
    if case.outcome == table.NO_START and case.phase == "load":
        assert seen.begun == 0  # no worker has ever had a dataset
        return
    if case.payload:
        seen = replace(seen, said=0)
    check_in_flight(seen, budget=budget(case), batch=batch_bytes(case))


def epochs(case: Case) -> int:
    return 2 if case.persistent else 1


@functools.cache
def _golden(case: Case, trigger: Trigger) -> History:
    return asked_once("faults", (case, trigger), lambda: _asked(case, trigger))


def _asked(case: Case, trigger: Trigger) -> History:
    def make() -> Any:
        seeded()
        return torch.utils.data.DataLoader(
            **arguments(case, trigger), multiprocessing_context="fork"
        )

    history = play(make, epochs=epochs(case), stock=True)
    expected = 0 if trigger is NO_TRIGGER else epochs(case)
    assert len(history.errors) == expected, history.errors
    return history


def golden(case: Case) -> History:
    """The stream of stock torch, without the fault.

    An error that a row raises is a ValueError for torch, which cannot bear all kinds of them. The
    batch that is given up for a poisoned sample has drawn nothing, as if it had raised at once.
    """
    plain = Case("SIGKILL", "sample", kind=case.kind, persistent=case.persistent)
    plain = replace(plain, payload=case.payload, workers=case.workers)
    if case.phase in ("pickle", "unpickle"):  # all draws are done, and torch would hang
        return _golden(plain, NO_TRIGGER)
    if case.outcome == table.RAISED:
        return _golden(plain, Trigger("ValueError", case.phase, case.number(table.POSITION)))
    if case.outcome == table.POISON and not case.dataset.iterable:
        return _golden(plain, Trigger("ValueError", "before", case.number(0)))
    return _golden(plain, NO_TRIGGER)


def trigger(case: Case, folder: Path) -> Trigger:
    if case.at.by != table.OWN:
        return NO_TRIGGER
    at: int | None = case.number(table.POSITION)
    if case.phase == "init":
        at = case.worker
    if case.phase == "load":
        at = None
    once = not case.always and case.outcome not in (table.RAISED,)
    return Trigger(case.cause, case.phase, at, str(folder / "struck") if once else None)


@contextlib.contextmanager
def surroundings(case: Case, folder: Path) -> Iterator[None]:
    """The environment of a row, and the end of grandchildren it leaves."""
    grandchildren = folder / "grandchildren"
    grandchildren.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(GRANDCHILDREN, str(grandchildren))
        if case.breaks.verdict == STALLS and case.at.steps == ("boot",):
            # Importing torch takes its time where it must be done, and two minutes are allowed.
            patch.setattr(stall, "BOOT_ALLOWANCE", 1.0 if case.method == "fork" else 20.0)
        if case.fault:
            patch.setenv(VARIABLE, case.fault)
        try:
            yield
        finally:
            for file in grandchildren.iterdir():
                end_child_left_behind(int(file.name), file.read_text())


def perform(case: Case, folder: Path, **options: Any) -> History:
    """Play the row with holdfast."""
    if case.breaks.verdict == STALLS:
        options.setdefault("stall_timeout", case.stall_timeout)
    options.setdefault("memory_budget", budget(case))
    context = None if case.method == "fork" else case.method
    witness = witness_of(case, folder)

    def make() -> Any:
        seeded()
        return holdfast.DataLoader(
            **arguments(case, trigger(case, folder), witness),
            multiprocessing_context=context,
            **options,
        )

    interfere = _from_outside(case) if case.at.by == table.OUTSIDE else None
    with surroundings(case, folder):
        return play(
            make, epochs=epochs(case), thread=case.thread, interfere=interfere, witness=witness
        )


def _from_outside(case: Case) -> Interfere:
    def strike(iterator: Any, epoch: int, number: int) -> None:
        between = case.phase == "between epochs"
        if (epoch, number) != ((0, -1) if between else (0, 1)):
            return
        if between:
            assert eventually(lambda: step(iterator, case.worker) == "idle")
        else:
            wait_until_started(iterator)
        number = signal.Signals[case.breaks.action or ""]
        kill(iterator._workers[case.worker].pid, number=number)

    return strike


def step(iterator: Any, worker: int) -> str:
    """What a worker says in its black box that it is doing."""
    return str(iterator._pool.driver.resources.boxes.note(worker).step)


def wait_until_started(iterator: Any) -> None:
    """Until no worker is starting any more: three deaths there in a row are a verdict."""
    workers = range(len(iterator._workers))
    starting = ("boot", "start-up")
    assert eventually(lambda: all(step(iterator, one) not in starting for one in workers))


def wait_until_idle(iterator: Any) -> None:
    """Until all workers have done all they were asked for, and sleep."""

    def idle(number: int) -> bool:
        try:
            status = psutil.Process(iterator._workers[number].pid).status()
        except psutil.NoSuchProcess:
            return False
        return status == psutil.STATUS_SLEEPING and step(iterator, number) == "idle"

    assert eventually(lambda: all(idle(number) for number in range(len(iterator._workers))))


def wait_until_nothing_is_owed(iterator: Any) -> None:
    """Until all that was asked for has come: a worker that dies then was making no batch."""
    machine = iterator._pool.machine

    def nothing() -> bool:
        alive = all(worker.is_alive() for worker in iterator._workers)  # takes in what was sent
        return alive and not machine.held_back and not any(seat.busy for seat in machine.seats)

    assert eventually(nothing)


# -- the verdict --------------------------------------------------------------------------


def check(case: Case, history: History) -> None:
    """All that must hold for a row, by its outcome."""
    innocent = set(range(case.workers)) - {case.worker}
    if case.phase == "load" or case.outcome in (table.LIMIT, table.NO_START):
        innocent = set()  # the worker that loads first is hit; where all is over, all are ended
    if case.outcome in (table.UNHARMED, table.RAISED):
        innocent |= {case.worker}
    intensity = RESTARTS_PER_WORKER * case.workers
    check_conduct(history, innocent=innocent, intensity=intensity)
    check_budget(case, history)
    _OUTCOMES[case.outcome](case, history)


def _unharmed(case: Case, history: History) -> None:
    check_stream(history, golden(case))
    assert history.incidents == []


def _redone(case: Case, history: History) -> None:
    check_stream(history, golden(case))
    assert len(history.incidents) == 1, [str(one) for one in history.incidents]
    (incident,) = history.incidents
    _check_incident(case, history, incident)
    assert incident.action.startswith("replaced") or case.phase in ("after-send", "working")


def _check_incident(case: Case, history: History, incident: Incident) -> None:
    cause, phase = case.breaks, case.at
    if cause.step is not None:
        phase = replace(phase, steps=(cause.step,), names="batch")
    found = (incident.kind, incident.signal, incident.exitcode)
    assert found == (cause.cause, cause.signal, cause.exitcode), incident
    assert incident.step in phase.steps, incident
    if case.phase != "load":
        assert incident.worker_id == case.worker, incident
    if phase.starting or case.phase == "after-ready":
        assert incident.pid is not None
        assert not alive(incident.pid)
    else:
        assert incident.pid == history.first_pids[case.worker], incident
    iterable = case.dataset.iterable
    if phase.names:
        assert incident.batch == case.task, incident
    if phase.names == "sample":
        expected = None if iterable else case.number(table.POSITION)
        assert (incident.position, incident.sample) == (table.POSITION, expected), incident
    elif phase.names == "last sample":
        expected = None if iterable else case.number(table.BATCH - 1)
        assert (incident.position, incident.sample) == (table.BATCH - 1, expected), incident
    else:
        assert (incident.position, incident.sample) == (None, None) or case.phase == "working"
    if phase.by == table.OWN and cause.stack is not None and _leaves_a_stack(case):
        assert cause.stack in incident.stack if cause.stack else not incident.stack, incident.stack
    assert str(incident.pid) in str(incident)


def _leaves_a_stack(case: Case) -> bool:
    """Python gives the signal stack it needs after an overflow to one thread only, once.

    With faulthandler on in the trainer (pytest does that) that is the trainer's main thread.
    """
    return not (case.cause == "stack overflow" and case.thread == "other")


def _raised(case: Case, history: History) -> None:
    expected = golden(case)
    if case.phase in ("pickle", "unpickle"):  # torch's stream without the one batch
        place = case.task
        expected = replace(
            expected,
            epochs=[
                [Error(ValueError, "") if at == place else one for at, one in enumerate(epoch)]
                for epoch in expected.epochs
            ],
        )
    check_stream(history, expected, per_worker=case.dataset.iterable)
    assert history.incidents == []
    assert len(history.errors) == epochs(case), history.errors
    for error in history.errors:
        _check_error(case, error)


def _check_error(case: Case, error: Error) -> None:
    """I8: the type, the words, the number and the place of what was raised."""
    cause = case.breaks
    kind = cause.error
    if cause.name == "StopIteration" and case.dataset.iterable:
        kind = RuntimeError
    assert error.kind is kind, error
    assert cause.says in error.text or case.phase == "unpickle", error.text
    if cause.error is OSError:
        assert error.errno == 24
    if case.phase == "unpickle":
        return
    position = table.POSITION if case.phase == "sample" else None
    assert error.sample[1:4] == (position, case.task, case.worker), error.sample
    if case.phase == "sample" and not case.dataset.iterable:
        assert error.sample.index == case.number(table.POSITION), error.sample
        assert f"sample {case.number(table.POSITION)}" in error.text


def _poison(case: Case, history: History) -> None:
    expected = golden(case)
    number = case.number(table.POSITION)
    if case.dataset.iterable:  # its replica ends there; the others do not notice
        expected = replace(
            expected,
            epochs=[
                [
                    one
                    for place, one in enumerate(epoch)
                    if place % case.workers != case.worker or place < case.task
                ]
                for epoch in expected.epochs
            ],
        )
    check_stream(history, expected, per_worker=case.dataset.iterable)
    assert [error.kind for error in history.errors] == [holdfast.PoisonSample] * epochs(case)
    strikes = 3 if case.breaks.cause == "killed" else 2  # the sender of the first is not known
    assert len(history.incidents) == strikes * epochs(case), [str(one) for one in history.incidents]
    for incident in history.incidents:
        assert (incident.batch, incident.position) == (case.task, table.POSITION), incident
    pids = [incident.pid for incident in history.incidents]
    assert len(set(pids)) == len(pids)
    assert all("given up" in told.action for told in history.incidents[strikes - 1 :: strikes])
    for turn, error in enumerate(history.errors):
        told = history.incidents[turn * strikes : (turn + 1) * strikes]
        assert all(str(incident.pid) in error.text for incident in told), error.text
        if not case.dataset.iterable:
            assert f"sample {number} " in error.text
            assert error.sample == number


def _limit(case: Case, history: History) -> None:
    assert [error.kind for error in history.errors] == [holdfast.RestartLimitExceeded]
    intensity = RESTARTS_PER_WORKER * case.workers
    assert len(history.incidents) == intensity + 1
    assert history.incidents[-1].action == "gave up"
    text = history.errors[0].text
    assert f"max_restarts allows ({intensity})" in text
    assert all(_is_told(incident, text) for incident in history.incidents[-10:])
    _check_delivered_before(case, history)


def _no_start(case: Case, history: History) -> None:
    # Who is killed while it starts may be able to start: that is what the limit is for.
    killed = case.cause == "SIGKILL"
    expected = holdfast.RestartLimitExceeded if killed else holdfast.WorkerStartError
    assert [error.kind for error in history.errors] == [expected]
    last = [incident for incident in history.incidents if incident.action == "gave up"]
    # Another worker may come to the same end while this is being told.
    assert any(_is_told(incident, history.errors[0].text) for incident in last)
    _check_delivered_before(case, history)


def _is_told(incident: holdfast.Incident, text: str) -> bool:
    """In full, or as one like that before it."""
    return incident.sentence() in text or f"{incident.who()} likewise; {incident.action}" in text


def _check_delivered_before(case: Case, history: History) -> None:
    """What could be delivered before the end was torch's stream too."""
    delivered = [event for event in history.epochs[0] if isinstance(event, Batch)]
    assert delivered == golden(case).epochs[0][: len(delivered)]
    if case.outcome == table.LIMIT:
        assert len(delivered) == case.task  # all before the one that cannot be made


_OUTCOMES: dict[str, Callable[[Case, History], None]] = {
    table.UNHARMED: _unharmed,
    table.REDONE: _redone,
    table.RAISED: _raised,
    table.POISON: _poison,
    table.LIMIT: _limit,
    table.NO_START: _no_start,
}
