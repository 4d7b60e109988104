"""Which settings are tried and recommended on machines whose best setting is known: pure."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.tuning.advice import Advice, advise, plain
from holdfast.tuning.limit import limit_of
from holdfast.tuning.measurement import Setting, Slice, Trial, Trouble, estimate
from holdfast.tuning.search import Conditions, Request, Search
from tests.tuning.machine import MIB, Machine, searched


def advised(search: Search, **request: object) -> Advice:
    found = advise(search, Request(**request))  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("cores", [1, 2, 3, 6, 8, 12])
@pytest.mark.parametrize("load", [0, 5])
def test_a_dataset_that_computes_gets_as_many_processes_as_there_are_processors(
    cores: int, load: int
) -> None:
    """Also while other programs use them: more workers would only take them away from those."""
    search = searched(Machine(cores=cores, cpu=0.02, lock=True, load=load))
    found = advised(search)
    assert found.options == {"num_workers": cores, "prefetch_factor": 2}
    assert (found.limit.kind, found.limit.confidence) == ("cpu", "high")
    assert found.best.rate == pytest.approx(cores / 0.0201, rel=0.1)


def test_a_part_of_a_processor_is_less_than_one_worker_needs() -> None:
    found = advised(searched(Machine(cores=0.5, cpu=0.02, lock=True)))
    assert found.options["num_workers"] == 1


def test_a_dataset_that_sleeps_gets_many_workers_and_threads_are_as_good() -> None:
    search = searched(Machine(cores=2, cpu=0.0002, asleep=0.05), most=16)
    found = advised(search)
    assert found.options["num_workers"] == 16
    assert (found.limit.kind, found.limit.confidence) == ("waiting", "high")
    assert "more workers are still quicker" in found.limit.words
    method = found.choices[-1][2]
    assert 'worker_method="thread" would do' in method


def test_memory_bounds_the_number_of_workers() -> None:
    machine = Machine(cores=2, cpu=0.0002, asleep=0.05, worker_bytes=200 * MIB, lock=True)
    machine.broken = lambda one: Trouble("died", "crashed") if one.kind == "threads" else None
    search = searched(machine, most=16, room=1000 * MIB)
    found = advised(search)
    assert found.options["num_workers"] == 4
    assert found.limit.kind == "memory"
    assert found.options["worker_memory_limit"] == "300MiB"  # "auto" would replace workers


def test_a_trial_that_takes_too_much_memory_is_a_bound_too() -> None:
    machine = Machine(cores=2, cpu=0.0002, asleep=0.05, worker_bytes=200 * MIB, memory=1300 * MIB)
    machine.broken = lambda one: Trouble("died", "crashed") if one.kind == "threads" else None
    found = advised(searched(machine, most=16))
    assert found.options["num_workers"] == 6
    assert (found.limit.kind, found.limit.confidence) == ("memory", "high")


def test_threads_that_take_turns_are_not_recommended_and_it_is_said_why() -> None:
    found = advised(searched(Machine(cores=4, cpu=0.02, lock=True)))
    assert "worker_method" not in found.options
    assert "Python's lock is taken" in found.choices[-1][2]


def test_the_lock_is_the_limit_where_only_threads_work() -> None:
    machine = Machine(cores=4, cpu=0.02, lock=True)
    machine.broken = lambda one: Trouble("died", "crashed") if one.kind == "processes" else None
    found = advised(searched(machine))
    assert found.options["worker_method"] == "thread"
    assert found.limit.kind == "gil"


def test_as_few_workers_as_keep_up_with_the_training_step() -> None:
    machine = Machine(cores=8, cpu=0.02, lock=True)
    found = advised(searched(machine, step=0.008))  # 2.5 workers' worth, and some to spare
    assert found.options["num_workers"] == 3
    assert (found.limit.kind, found.limit.confidence) == ("consumer", "high")
    assert advised(searched(machine, step=0.5)).options == {"num_workers": 0}


def test_a_step_that_cannot_be_kept_up_with_changes_nothing() -> None:
    machine = Machine(cores=2, cpu=0.02, lock=True)
    found = advised(searched(machine, step=0.001))
    assert found.options["num_workers"] == 2
    assert found.limit.kind == "cpu"


def test_a_disk_is_told_from_other_waiting() -> None:
    machine = Machine(cores=4, cpu=0.0005, asleep=0.05, disk=0.8)
    found = advised(searched(machine, most=8))
    assert (found.limit.kind, found.limit.confidence) == ("disk", "high")


def test_a_disk_is_seen_on_a_busy_machine() -> None:
    """There workers wait for a processor most of the time, and for the disk in the rest."""
    search = Search(Conditions(cores=4))
    for workers in (1, 2, 4):
        part = Slice(1.0, 30 * workers, 0.05 * workers, 0.7 * workers)
        search.add(Trial(Setting(workers), (part,) * 6, disk=0.2, read_bytes=100.0 * MIB))
    assert limit_of(search, search.curve("processes")[4]).kind == "disk"


def test_of_very_short_batches_no_limit_is_claimed() -> None:
    found = advised(searched(Machine(cores=4, cpu=0.0002, asleep=0.001, main=0.0001), most=2))
    assert (found.limit.kind, found.limit.advice) == ("unknown", "Larger batches.")


def test_loading_that_costs_nothing_is_done_in_the_main_process() -> None:
    """If handing over a batch takes longer than making it."""
    search = Search(Conditions(cores=2))
    for setting, rate in ((Setting(1), 500), (Setting.main(), 3000), (Setting(2), 520),
                          (Setting.threads(2), 900)):  # fmt: skip
        part = Slice(0.2, rate // 5, cpu=0.2, main_cpu=0.19)
        search.add(Trial(setting, (part,) * 6))
    assert advised(search).options == {"num_workers": 0}


def test_a_larger_prefetch_factor_is_recommended_only_if_it_helps() -> None:
    plain = Machine(cores=4, cpu=0.001, asleep=0.05)
    assert advised(searched(plain, most=8)).options["prefetch_factor"] == 2
    found = advised(searched(Machine(cores=4, cpu=0.001, asleep=0.05, uneven=True), most=8))
    assert found.options["prefetch_factor"] == 8


def test_another_start_method_where_forked_workers_fail() -> None:
    machine = Machine(cores=2, cpu=0.02, lock=True)
    machine.broken = lambda one: (
        Trouble("raised", "no CUDA in a forked one") if one.start == "fork" else None
    )
    found = advised(searched(machine, starts=("fork", "forkserver", "spawn")))
    assert found.options["multiprocessing_context"] == "forkserver"
    assert any("CUDA" in note for note in found.notes)


def test_a_dataset_that_cannot_be_loaded_at_all_ends_the_search() -> None:
    machine = Machine()
    machine.broken = lambda _: Trouble("raised", "ValueError: no")
    search = searched(machine, starts=("fork", "spawn"))
    assert len(search.trials) == 1  # an error of a sample is the same in any worker
    assert advise(search, Request()) is None
    assert plain(search, None, Request())["tried"][0]["trouble"] == "ValueError: no"


def test_a_dataset_that_dies_in_every_way_was_tried_in_every_way() -> None:
    machine = Machine()
    machine.broken = lambda _: Trouble("died", "SIGSEGV")
    tried = [one.setting for one in searched(machine, starts=("fork", "spawn")).trials]
    assert tried == [Setting(1), Setting(1, start="spawn"), Setting.threads(1), Setting.main()]


def test_what_hangs_twice_is_not_tried_in_every_way() -> None:
    machine = Machine()
    machine.broken = lambda _: Trouble("hung", "made no progress")
    assert len(searched(machine, starts=("fork", "forkserver", "spawn")).trials) == 2


def test_the_loader_as_it_is_is_compared_with_what_is_recommended() -> None:
    now = Setting(1, "thread", "")
    found = advised(searched(Machine(cores=4, cpu=0.02, lock=True), now=now))
    (note,) = [one for one in found.notes if one.startswith("The loader as it is")]
    assert "-75 %" in note


def test_a_loader_that_cannot_be_tried_here_is_told_of() -> None:
    found = advised(searched(Machine(cores=2, cpu=0.02, lock=True)), untried="ray")
    assert any("worker_method='ray', which was not tried" in note for note in found.notes)


def test_figures_of_the_machine_are_those_of_one_rank() -> None:
    search = searched(Machine(cores=2, cpu=0.02, lock=True), room=100 * MIB)
    found = plain(search, None, Request(ranks=4))
    assert (found["cores_per_rank"], found["memory_bytes_per_rank"]) == (2, 100 * MIB)


def test_the_search_ends_early_if_nothing_is_to_be_gained() -> None:
    assert len(searched(Machine(cores=2, cpu=0.02, lock=True), seconds=600).trials) <= 12


def test_the_line_to_paste_has_what_was_asked_for() -> None:
    search = searched(Machine(cores=2, cpu=0.02, lock=True), room=8000 * MIB)
    found = advised(search, batch_size=64, budget_is_ours=True, given={"collate_fn": "pad"})
    assert found.code == (
        "DataLoader(dataset, batch_size=64, collate_fn=pad, num_workers=2, prefetch_factor=2, "
        'memory_budget="64MiB")'
    )


@settings(max_examples=50)
@given(
    cores=st.sampled_from([0.5, 1, 2, 4, 7, 16]),
    cpu=st.floats(1e-4, 0.1),
    asleep=st.floats(0, 0.5),
    lock=st.booleans(),
    load=st.sampled_from([0, 2, 20]),
    noise=st.floats(0, 0.5),
    step=st.sampled_from([0.0, 0.001, 0.05]),
    room=st.sampled_from([None, 10 * MIB, 100 * MIB]),
    seed=st.integers(0, 1000),
    fails=st.floats(0, 0.5),
)
def test_every_search_ends_in_time_with_advice_that_was_tried(
    cores: float, cpu: float, asleep: float, lock: bool, load: float, noise: float, step: float,
    room: int | None, seed: int, fails: float,
) -> None:  # fmt: skip
    dice = random.Random(seed)
    machine = Machine(cores, cpu, asleep, lock=lock, load=load, noise=noise, dice=dice)
    trouble = [Trouble(kind, kind) for kind in ("died", "memory", "hung")]
    machine.broken = lambda _: dice.choice(trouble) if dice.random() < fails else None
    search = searched(machine, step=step, room=room, most=20, starts=("fork", "spawn"))
    found = advise(search, Request())
    if found is None:
        assert all(search.failed(one.setting) for one in search.trials)
        return
    assert found.best.setting in {one.setting for one in search.trials if one.slices}
    assert found.best.setting.workers <= 20
    assert [name for name, _, _ in found.choices] == [
        "num_workers", "prefetch_factor", "memory_budget", "start method", "worker method"
    ]  # fmt: skip
    plain(search, found, Request())


def test_on_a_very_busy_machine_workers_that_wait_for_each_other_are_not_too_few() -> None:
    """Figures of two cores with twenty other programs, where one worker had a sixth of a core."""
    search = Search(Conditions(cores=2))
    for setting, batches, cpu, queued in (
        (Setting(1), 35.7, 0.32, 0.70),
        (Setting.main(), 36.8, 0.29, 0.0),
        (Setting(2), 24.4, 0.23, 1.69),
    ):
        part = Slice(1.0, batches, cpu, queued, 0.01, 0.1)  # type: ignore[arg-type]
        search.add(Trial(setting, (part,) * 6))
    assert search.enough("processes").setting == Setting(2)  # type: ignore[union-attr]
    assert search.next(30) == Setting.threads(2)


def test_time_without_a_processor_does_not_count() -> None:
    quiet = Trial(Setting(2), (Slice(1.0, 100, cpu=1.0),) * 3)
    busy = Trial(Setting(2), (Slice(1.0, 50, cpu=0.5, queued=1.0),) * 3)
    for one in (quiet, busy):
        found = estimate([one], 2)
        assert found is not None
        assert found.rate == pytest.approx(100)
