"""A process that takes up a stream shows that it has, or says that it has not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data.datapipes.iter import IterableWrapper

from holdfast import DataLoader, StreamLost
from holdfast.engine.continuation import ATTEMPTS
from holdfast.run_report import logged_run
from holdfast.worker.faults import POINTS
from tests.streams.datasets import (
    SIZE,
    ByTime,
    ByTimeWithState,
    CountsEpochs,
    CountsStates,
    DoesNotLoad,
    FlakyAgain,
    Honest,
    Kept,
    OmitsItsBuffer,
    Once,
    Opaque,
    Plain,
    RecordsByTime,
    StateDoesNotPickle,
    StateRaises,
)
from tests.support.golden import asked_once
from tests.support.processes import eventually, kill

pytestmark = pytest.mark.faults


def streams(loader: Any, epochs: int = 1) -> list[Any]:
    torch.manual_seed(3)
    found = []
    for _ in range(epochs):
        found.append([batch.tolist() for batch in loader])
    if isinstance(loader, DataLoader):
        loader.close()
    return found


def stock(dataset: Any, epochs: int = 1, **options: Any) -> list[Any]:
    return asked_once(
        "streams",
        (dataset, epochs, options),
        lambda: streams(torch.utils.data.DataLoader(dataset, **options), epochs),
    )


def pipe() -> Any:
    return IterableWrapper(list(range(SIZE))).shuffle().sharding_filter()


TWO = {"batch_size": 3, "num_workers": 2}


@pytest.mark.parametrize(
    ("make", "options", "shown"),
    [
        (
            Plain,
            TWO,
            "3 batches delivered in this epoch were drawn again, and their fingerprints are equal",
        ),
        (
            Honest,
            TWO,
            "the last of 3 batches delivered in this epoch was made again from the state",
        ),
        (
            OmitsItsBuffer,
            TWO,
            "3 batches delivered in this epoch were drawn again, and their fingerprints are equal",
        ),
        (
            pipe,
            TWO,
            "3 batches delivered in this epoch were drawn again, and their fingerprints are equal",
        ),
        (Honest, {"batch_size": None, "num_workers": 2}, "the last of 3 batches delivered"),
        (Plain, {"batch_size": None, "num_workers": 2}, "3 batches delivered in this epoch were"),
        (
            OmitsItsBuffer,
            {**TWO, "drop_last": True, "batch_size": 5},
            "3 batches delivered in this epoch were drawn again, and their fingerprints are equal",
        ),
    ],
)
def test_a_stream_goes_on_where_it_was_and_that_is_shown(
    make: Any,
    options: Any,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    expected = stock(make(), **options)
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(make(), **options, logbook=tmp_path)
    assert streams(loader) == expected
    (incident,) = loader.incidents
    assert incident.exact is True
    assert incident.action.startswith(f"replaced; {shown}")
    assert loader.stats()["restarts"] == 1, "one that went astray is no death"
    at_first, then = (one for one in caplog.messages if "stream" in one)
    assert at_first.splitlines()[0].endswith("replaced; its stream is being taken up")
    assert shown in then
    story = logged_run.read(tmp_path)
    (record,) = story.incidents
    assert record["exact"] is True
    assert record["text"] == incident.sentence()
    assert story.events == [], "the two lines that were written are one story"


def test_a_state_that_does_not_load_is_told_once_and_the_stream_drawn_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = stock(DoesNotLoad(), **TWO)
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6;before-fetch:SIGKILL@task=7")
    loader = DataLoader(DoesNotLoad(), **TWO)
    assert streams(loader) == expected
    assert {incident.exact for incident in loader.incidents} == {True}
    (told,) = (one for one in caplog.messages if "raised OSError" in one)
    assert "the state that the dataset gave raised OSError: the state is on another" in told


@pytest.mark.parametrize(
    ("make", "why"),
    [(StateDoesNotPickle, "cannot pickle"), (StateRaises, "OSError: no room for the state")],
)
def test_a_state_that_cannot_be_kept_is_told_once_and_not_said_to_be_none(
    make: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = stock(make(), **TWO)
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    assert streams(DataLoader(make(), **TWO)) == expected
    (told,) = (one for one in caplog.messages if "cannot be kept" in one)
    assert why in told
    with pytest.raises(StreamLost, match=why) as caught:
        streams(DataLoader(make(), **TWO, iterable_recovery="state"))
    assert "neither the dataset nor" not in str(caught.value)


def test_an_exception_while_it_is_drawn_again_is_told_and_another_process_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = stock(Plain(), **TWO)
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(FlakyAgain(tmp_path, times=2), **TWO)
    assert streams(loader) == expected
    (incident,) = loader.incidents
    assert incident.exact is True
    assert loader.stats()["restarts"] == 1
    (told,) = (one for one in caplog.messages if "ConnectionError" in one)
    assert "raised ConnectionError: reset by the object store where it had not before" in told


def test_an_exception_in_every_process_that_draws_it_again_ends_the_run_and_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(FlakyAgain(tmp_path, times=100), **TWO)
    with pytest.raises(StreamLost, match="ConnectionError: reset by the object store") as caught:
        streams(loader)
    loader.close()
    assert "not deterministic" not in str(caught.value)
    assert "wds.detshuffle" not in str(caught.value)
    assert len(list(tmp_path.glob("0-*"))) == 1 + ATTEMPTS


@pytest.mark.parametrize(
    ("recovery", "asked"), [("auto", True), ("state", True), ("replay", False), ("raise", False)]
)
def test_a_dataset_is_asked_for_its_state_only_where_that_may_be_used(
    recovery: Any, asked: bool, tmp_path: Path
) -> None:
    loader = DataLoader(
        CountsStates(tmp_path), **TWO, persistent_workers=True, iterable_recovery=recovery
    )
    streams(loader, 2)
    assert any(tmp_path.glob("asked-*")) is asked


def test_of_map_style_data_no_more_is_said_than_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=3")
    loader = DataLoader(list(range(12)), batch_size=2, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 12, 2)]
    (incident,) = loader.incidents
    assert incident.action == "replaced; its batch is made again"
    assert incident.exact is None


@pytest.mark.parametrize("make", [ByTime, ByTimeWithState])
def test_a_stream_that_does_not_repeat_itself_keeps_its_number_of_batches_and_is_told(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(make(), **TWO)
    (stream,) = streams(loader)
    assert len(stream) == SIZE // 3
    (incident,) = loader.incidents
    assert incident.exact is False
    told = caplog.messages[-1]
    for words in (incident.action, told):
        assert "samples may be missing or come twice: this stream is not deterministic" in words
        assert "nothing lost" not in words
    assert "wds.detshuffle" in told
    assert "shuffle(seed=42" in told
    assert "get_worker_info().seed" in told
    assert "wds.detshuffle" in "".join(one.command for one in incident.remedies)
    assert "nothing lost" not in caplog.text


def test_objects_that_differ_in_an_attribute_only_are_not_said_to_be_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(RecordsByTime(), **TWO, collate_fn=list)
    assert len(list(loader)) == SIZE // 3
    (incident,) = loader.incidents
    assert incident.exact is False
    assert "drawn again, at least " in incident.action


def test_what_could_not_be_looked_at_is_not_said_to_be_equal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(Opaque(), **TWO, collate_fn=list)
    assert sorted(next(one) for batch in loader for one in batch) == list(range(SIZE))
    (incident,) = loader.incidents
    assert incident.exact is None
    assert "could not be compared: of 3 batches, 3 had objects" in incident.action
    assert "could not be compared" in caplog.messages[-1]


@pytest.mark.parametrize("left", [0, 12])
def test_a_stream_that_is_shorter_when_it_is_drawn_again_is_an_error_and_no_shorter_epoch(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(Once(tmp_path / "seen", left), **TWO)
    iterator = iter(loader)
    seen = []
    with pytest.raises(StreamLost) as caught:
        seen.extend(batch.tolist() for batch in iterator)
    assert len(seen) == 6, "what was finished before it is delivered"
    again = left // 6
    assert (
        f"3 batches of this epoch had been delivered, and drawn again it ended after {again}"
        in (str(caught.value))
    )
    assert "wds.detshuffle" in str(caught.value)
    assert "nothing lost" not in str(caught.value)
    loader.close()


def test_a_replacement_that_is_killed_while_it_takes_up_is_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = stock(OmitsItsBuffer(), **TWO)
    faults = "before-fetch:SIGKILL@task=6;before-fetch:SIGKILL@task=-1,generation=1;"
    faults += "after-fetch:SIGSEGV@task=-1,generation=3;after-ready:SIGKILL@generation=5"
    monkeypatch.setenv("HOLDFAST_FAULTS", faults)
    loader = DataLoader(OmitsItsBuffer(), **TWO, max_restarts=None)
    assert streams(loader) == expected
    assert {one.exact for one in loader.incidents} == {True}


IN_TURN = (  # those that strike before a worker is ready stand apart: after several in a row it waits
    "after-send",
    "before-setup",
    "before-fetch",
    "before-send",
    "after-setup",
    "after-fetch",
    "before-encode",
    "before-ready",
    "before-collate",
    "after-ready",
    "after-collate",
    "before-resume",
    "after-resume",
)


def test_no_point_is_forgotten() -> None:
    assert set(POINTS) - set(IN_TURN) == {"mid-send", "before-stop"}, "which tests/faults has"


@pytest.mark.parametrize("make", [OmitsItsBuffer, pytest.param(Honest, marks=pytest.mark.slow)])
def test_kills_at_every_point_of_a_workers_life_one_after_the_other(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**TWO, "persistent_workers": True}
    expected = stock(make(), 2, **options)
    faults = [
        f"{point}:SIGKILL@worker=0,generation={generation}"
        for generation, point in enumerate(IN_TURN)
    ]
    monkeypatch.setenv("HOLDFAST_FAULTS", ";".join(faults))
    loader = DataLoader(make(), **options, max_restarts=None)
    assert streams(loader, 2) == expected
    assert len(loader.incidents) >= 10
    assert all(one.exact is not False for one in loader.incidents)


def test_a_pipe_whose_epoch_was_left_is_drawn_again_with_the_seed_of_that_epoch() -> None:
    options: dict[str, Any] = {**TWO, "persistent_workers": True, "prefetch_factor": 4}

    def epochs(loader: Any, hurt: bool) -> list[Any]:
        torch.manual_seed(3)
        found = []
        for stop in (3, None):
            found.append([])
            for number, batch in enumerate(iterator := iter(loader)):
                found[-1].append(batch.tolist())
                if number == stop:
                    if hurt:
                        kill(iterator._workers[0].pid, number=signal.SIGSTOP)  # nothing more of it
                    break
            if hurt and stop is not None:
                victim = iterator._workers[0].pid
                second = iter(loader)  # its seed is another
                kill(victim)
                found.append([batch.tolist() for batch in second])
                break
        return found

    reference = torch.utils.data.DataLoader(pipe(), **options)
    expected = epochs(reference, hurt=False)
    reference._iterator._shutdown_workers()
    loader = DataLoader(pipe(), **options)
    assert epochs(loader, hurt=True) == expected
    assert [one.exact for one in loader.incidents] == [True]
    loader.close()


@pytest.mark.parametrize("make", [Honest, Kept, CountsEpochs, OmitsItsBuffer, Plain])
@pytest.mark.parametrize(
    "fault",
    [
        "before-fetch:SIGKILL@task=6",
        pytest.param("after-send:SIGKILL@task=14", marks=pytest.mark.slow),  # near the end
    ],
)
def test_persistent_workers_go_on_in_later_epochs_too(
    make: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**TWO, "persistent_workers": True}
    expected = stock(make(), 3, **options)
    monkeypatch.setenv("HOLDFAST_FAULTS", fault)
    loader = DataLoader(make(), **options)
    assert streams(loader, 3) == expected
    assert all(one.exact is not False for one in loader.incidents)
    assert len(loader.incidents) >= 1


@pytest.mark.parametrize("make", [Honest, Kept, OmitsItsBuffer, Plain])
def test_between_epochs_nothing_is_claimed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**TWO, "persistent_workers": True}
    expected = stock(make(), 2, **options)
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-resume:SIGKILL@worker=0")
    loader = DataLoader(make(), **options)
    assert streams(loader, 2) == expected
    (incident,) = loader.incidents
    assert incident.exact is None
    assert "this worker had delivered nothing of this epoch" in incident.action


@pytest.mark.parametrize("make", [Honest, CountsEpochs, Kept])
def test_a_death_in_a_later_epoch_of_persistent_workers(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**TWO, "persistent_workers": True}
    expected = stock(make(), 3, **options)
    loader = DataLoader(make(), **options)
    torch.manual_seed(3)
    found = [[batch.tolist() for batch in loader]]
    second = []
    for number, batch in enumerate(iterator := iter(loader)):
        second.append(batch.tolist())
        if number == 3:
            iterator._workers[0].kill()
            # It is not at its end yet, and must not get there before it is killed.
            assert eventually(lambda: bool(loader.incidents))
    found += [second, [batch.tolist() for batch in loader]]
    loader.close()
    assert found == expected
    assert [one.exact for one in loader.incidents] == [True]


# -- as the user wants it ------------------------------------------------------------------


def test_replay_never_loads_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stock(Honest(), **TWO)
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(Honest(), **TWO, iterable_recovery="replay")
    assert streams(loader) == expected
    (incident,) = loader.incidents
    assert "were drawn again, and their fingerprints are equal" in incident.action


def test_state_never_draws_again_and_says_when_nothing_has_shown_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = stock(Honest(), **TWO)
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(Honest(), **TWO, iterable_recovery="state")
    assert streams(loader) == expected
    assert [one.exact for one in loader.incidents] == [True]
    loader = DataLoader(OmitsItsBuffer(), **TWO, iterable_recovery="state")
    assert streams(loader) != stock(OmitsItsBuffer(), **TWO)
    (incident,) = loader.incidents
    assert incident.exact is False
    assert "which was tried first, did not give that batch again" in incident.action
    assert 'iterable_recovery="auto"' in incident.remedies[0].command
    said = caplog.messages[-1]
    assert "whether its stream can go on is not known" in said
    assert said.index('iterable_recovery="auto"') < said.index("wds.detshuffle")
    for dataset, why in ((Plain(), "neither the dataset nor its"), (DoesNotLoad(), "OSError")):
        with pytest.raises(StreamLost, match=why):
            streams(DataLoader(dataset, **TWO, iterable_recovery="state"))


def test_raise_ends_the_run_with_the_first_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(Honest(), **TWO, iterable_recovery="raise")
    with pytest.raises(StreamLost, match='iterable_recovery="raise"') as caught:
        streams(loader)
    told = str(caught.value)
    assert "was killed" in told
    assert "exited unexpectedly" in told, "as torch says it"
    assert "other ranks" not in told, "nothing was shorter"
    assert told.count("What to do:") == 1
    assert "to do: " not in told.replace("What to do:", "")
    loader.close()
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=3")
    assert len(list(DataLoader(range(12), num_workers=2, iterable_recovery="raise"))) == 12


@pytest.mark.parametrize("value", ["states", None, True, 3])
def test_another_word_is_told_at_once_what_would_be_right(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r'iterable_recovery=.*"auto".*"replay"'):
        DataLoader(Plain(), num_workers=1, iterable_recovery=value)


def test_the_option_is_an_attribute_that_can_be_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Plain(), **TWO)
    assert loader.iterable_recovery == "auto"
    loader.iterable_recovery = "raise"
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=1")
    with pytest.raises(StreamLost):
        list(loader)
    loader.close()


def test_a_stream_that_cannot_be_taken_up_is_not_said_to_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error comes in place of the first batch that is not there when the worker dies: it is given batch 6 when the
    consumer has three, and the other worker may not have made those between."""
    (expected,) = stock(Plain(), **TWO)
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(Plain(), **TWO, iterable_recovery="state")
    torch.manual_seed(3)
    seen = []
    with pytest.raises(StreamLost, match="continues a stream from its state only") as caught:
        seen.extend(batch.tolist() for batch in loader)
    assert seen == expected[: len(seen)]
    assert 3 <= len(seen) <= 6
    advice = str(caught.value).split("What to do:\n")[1]
    assert 'iterable_recovery="auto"' in advice
    assert 'iterable_recovery="state"' not in advice
    (incident,) = loader.incidents
    assert incident.action == "gave up"
    assert loader.stats()["restarts"] == 0
    assert "taken up" not in caplog.text
    loader.close()


class OnceWithLength(Once):
    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize("proven", [True, False])
def test_a_stream_that_ends_early_behind_what_was_drawn_again_is_an_error_if_its_length_is_known(
    proven: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All that had been delivered comes again, and then the first of two halves is all there is. If
    no epoch without a death was as long as the dataset says, that is only a warning."""
    loader = DataLoader(OnceWithLength(tmp_path / "seen", SIZE // 2), **TWO)
    assert len(loader) == SIZE // 3
    if proven:
        assert len(list(loader)) == SIZE // 3
        for mark in tmp_path.iterdir():
            mark.unlink()
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    seen, told = [], ""
    try:
        seen.extend(batch.tolist() for batch in loader)
    except StreamLost as lost:
        told = str(lost)
    lacking = SIZE // 12
    assert len(seen) == SIZE // 3 - lacking
    words = f"{len(seen)} batches came in this epoch where len(loader) promises {SIZE // 3}"
    assert (words in told) is proven
    assert (words in caplog.text) is not proven
    loader.close()


def test_a_stream_that_ends_early_and_nobody_knows_is_told_as_what_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=6")
    loader = DataLoader(Once(tmp_path / "seen", SIZE // 2), **TWO)
    streams(loader)
    (incident,) = loader.incidents
    shown = "3 batches delivered in this epoch were drawn again, and their fingerprints are equal"
    assert incident.action == f"replaced; {shown}"
    assert caplog.messages[-1].endswith(f"its stream goes on; {shown}")


class PromisesMore(Plain):
    def __len__(self) -> int:
        return 2 * self.size


@pytest.mark.parametrize("persistent", [False, True])
def test_a_length_that_promised_too_much_without_a_death_proves_nothing(persistent: bool) -> None:
    loader = DataLoader(PromisesMore(), **TWO, persistent_workers=persistent)
    assert len(loader) == 2 * SIZE // 3
    assert len(list(loader)) == SIZE // 3
    iterator = iter(loader)
    next(iterator)
    kill(iterator._workers[0].pid)
    assert 1 + len(list(iterator)) == SIZE // 3
    assert len(loader.incidents) == 1
    loader.close()


def test_with_drop_last_each_worker_may_lack_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_FAULTS", "before-fetch:SIGKILL@task=2")

    class Known(Plain):
        def __len__(self) -> int:
            return self.size

    loader = DataLoader(Known(22), batch_size=2, num_workers=2, drop_last=True)
    assert len(loader) == 11
    (stream,) = streams(loader)
    assert len(stream) == 10
    assert len(loader.incidents) == 1
