"""What the user reads when replacing workers is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.autopsy.cause import Remedy
from holdfast.autopsy.incident import Incident
from holdfast.engine import events as ev
from holdfast.engine import messages
from holdfast.engine.deaths import Deaths
from holdfast.engine.epoch import StartRefused
from holdfast.engine.loader_records import LoaderRecords
from holdfast.loader_identity import LoaderIdentity
from holdfast.worker.exceptions import describe
from tests.support.fake_driver import FakeDriver


def death(**given: Any) -> Incident:
    fields: dict[str, Any] = {
        "kind": "killed",
        "worker_id": 1,
        "pid": 812,
        "signal": "SIGKILL",
        "exitcode": -9,
        "batch": 3,
        "sample": 13,
        "position": 1,
        "step": "fetch",
        "stack": "",
        "action": "replaced",
        "time": 0.0,
        "cause": "killed-from-outside",
        "confidence": "medium",
        "because": ("a process sent it",),
        "remedies": (Remedy("Look for the sender", "journalctl -b"),),
    }
    return Incident(**{**fields, **given})


def published(exits: Sequence[ev.Exit], incidents: Sequence[Incident]) -> Deaths:
    deaths = Deaths(FakeDriver(), None, LoaderRecords())
    for exit, incident in zip(exits, incidents, strict=True):
        deaths._publish(exit, incident, None)
    return deaths


def ended(**given: Any) -> ev.Exit:
    return ev.Exit(1.0, "killed", "SIGKILL", -9, **given)


def poisoned(deaths: tuple[ev.Exit, ...], *incidents: Incident, **given: Any) -> str:
    keys = [None, None] if incidents[0].sample is None else [12, 13]
    task = ev.Task(3, keys, 0, 1, keys)
    failed = ev.Poisoned(task, 1, deaths, **given)
    return str(messages.poisoned(failed, published(deaths, incidents)))


def test_a_sample_that_was_convicted_is_blamed_and_no_sender_is_looked_for() -> None:
    exits = tuple(ended(seconds=seconds) for seconds in (9.0, 0.001, 0.004, 0.002))
    told = poisoned(exits, *[death()] * 4, alone=3, pauses=(1.9, 1.6, 2.8))
    assert (
        "The sample is to blame: loaded alone 3 times, each time after a pause of at least 1.6 s, "
        "its worker lived through the pause and was killed within 4 ms after"
    ) in told
    for hunt in ("another process", "sender", "killed-from-outside", "because:"):
        assert hunt not in told
    assert told.count("dataset[13]") == 2
    assert 'on_bad_sample="skip"' in told


def test_without_a_conviction_what_the_death_suggests_is_in_the_same_list() -> None:
    told = poisoned((ended(by_itself=True),), death())
    assert told.count("to do:") == told.count("What to do:") == 1
    assert told.index("dataset[13]") < told.index("  - Look for the sender\n      journalctl -b")
    assert "more: holdfast explain killed-from-outside" in told


def test_an_element_of_a_stream_has_no_index_and_is_not_left_out() -> None:
    exits = ended(by_itself=True), ended(by_itself=True)
    told = poisoned(exits, *[death(sample=None)] * 2)
    assert "an element of the stream (position 1 of batch 3, worker 1) ended 2 workers" in told
    assert "dataset[None]" not in told
    assert "on_bad_sample" not in told


def too_many(*incidents: Incident, task: ev.Task | None = None) -> str:
    exits = tuple(ended() for _ in incidents)
    failure = ev.GaveUp("restart-limit", 1, exits, task=task)
    policy = ev.RestartPolicy(len(incidents) - 1, 60.0)
    return str(messages.gave_up(failure, policy, ev.Limits(), published(exits, incidents)))


def test_deaths_at_the_same_place_are_said_to_be() -> None:
    told = too_many(*[death(sample=None)] * 6)
    assert "All of them were at the same element (worker 1, batch 3, position 1)" in told
    assert "max_restarts=None would start workers for ever" in told
    assert "the same sample, 13 (worker 1" in too_many(*[death()] * 6)


def test_deaths_at_several_places_are_not() -> None:
    for other in (death(position=0), death(worker_id=0), death(step="idle", position=None)):
        told = too_many(*[death()] * 5, other)
        assert "All of them" not in told
        assert "allow more, for example max_restarts=(24, 60)" in told


def test_deaths_at_the_same_batch_are_said_to_be_with_its_indices() -> None:
    at = death(sample=None, position=None, evidence={"ray_cause": "ray-actor-died"})
    unknown = death(sample=None, position=None, step="unknown")
    task = ev.Task(3, [12, 13], 0, 1, [12, 13])
    told = too_many(at, at, task=task)
    assert "All of them were at batch 3 (worker 1, indices 12, 13). Look at its samples" in told
    assert "Load the samples of batch 3 in a separate Python process" in told
    assert 'worker_method="multiprocessing", on_bad_sample="skip"' in told
    told = too_many(unknown, at, at, task=task)
    assert "2 of them were at batch 3 (worker 1, indices 12, 13), and no other batch" in told
    many = list(range(100))
    assert "17, 18, 19, … and 80 more)" in too_many(at, at, task=ev.Task(3, many, 0, 1, many))
    for other in ([unknown, at], [at, at, death(batch=2, position=None)], [at, unknown, unknown]):
        assert "batch 3 (worker" not in too_many(*other, task=task)


def test_one_that_sent_a_signal_to_itself_is_said_to_have_at_once() -> None:
    told = str(death(cause="exited-by-itself", confidence="high"))
    assert told.startswith("worker 1 (pid 812) sent SIGKILL to itself while loading sample 13")


def test_one_that_went_with_its_nursery_is_said_to_have() -> None:
    told = str(
        death(
            pid=None,
            signal=None,
            exitcode=None,
            step="boot",
            cause="killed-unexplained",
            confidence="low",
            evidence={"nursery_end": "was killed by SIGKILL"},
        )
    )
    assert told == (
        "worker 1 disappeared with the process that starts the workers, which was killed by "
        "SIGKILL, while it was starting; replaced"
    )


def test_a_pid_that_is_not_known_is_said_not_to_be() -> None:
    deaths = [death(pid=None), death(), death(pid=7)]
    assert too_many(*deaths).startswith("DataLoader worker (pid(s) 812, 7) exited unexpectedly: ")
    failure = describe(ImportError("no module"), position=None, step="bootstrap")
    told = str(messages.cannot_start(StartRefused(1, None, failure), LoaderIdentity()))
    assert told.startswith("DataLoader worker (pid(s) none known) exited unexpectedly: ")
    assert "worker 1 could not start" in told
