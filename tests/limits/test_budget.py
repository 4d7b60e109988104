"""The arithmetic of memory: budget, ladder, pressure; and what is read from the system."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.autopsy.logbook import Logbook
from holdfast.autopsy.readers import Roots
from holdfast.engine.memory_control import MemoryController, _Warned
from holdfast.limits import gauge
from holdfast.limits.budget import Budget, Share, in_bytes
from holdfast.limits.pressure import SLOWLY, Level, Pressure
from holdfast.limits.shares import IN_FLIGHT, shares
from holdfast.limits.worker_limit import ALONE, Allowance, Ladder, Rung, allowance
from holdfast.run_report import logged_run
from holdfast.worker.housekeeping import LARGEST_STEP, STEP, Copies, Garbage, Housekeeper

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("2GiB", 2 * GIB), ("2 gib", 2 * GIB), ("500MB", 500 * 10**6), ("1.5k", 1500),
        ("7", 7), ("7b", 7), ("", None), ("GiB", None), ("two", None), ("-1", None), ("1e9", None),
        ("1.2.3", None), ("5 PB", None),
    ],
)  # fmt: skip
def test_amounts_in_words(words: str, meant: int | None) -> None:
    assert in_bytes(words) == meant


def test_loaders_share_one_budget() -> None:
    shared = Budget(100)
    train, val = Share(shared), Share(shared)
    train.in_flight = 60
    assert (train.room(), val.room()) == (100, 40)
    val.in_flight = 500  # one batch always passes
    assert (train.room(), val.room(), shared.in_flight) == (-400, 40, 560)
    val.close()
    assert train.room() == 100


def test_pressure_and_deaths_by_memory_leave_less_room() -> None:
    share, other = Share(shared := Budget(100)), Share(shared)
    other.in_flight, share.cap = 10, 70
    assert share.room() == 60
    share.alone = True
    assert share.room() == 0, "one at a time"
    without = Share(Budget(None))
    without.cap, without.alone = 70, True
    assert without.room() is None


def test_two_pools_never_take_the_last_room_both() -> None:
    """Each takes what there is, as the driver does: no other takes any between looking and counting."""
    shared = Budget(100)
    pools = [Share(shared) for _ in range(4)]
    most, go_on = [0], time.monotonic() + 0.5

    def take(share: Share) -> None:
        while time.monotonic() < go_on:
            with shared.taking:
                room = share.room()
                assert room is not None
                time.sleep(0)
                share.in_flight = max(0, room)
                most[0] = max(most[0], shared.in_flight)
            share.in_flight = 0

    threads = [threading.Thread(target=take, args=(one,)) for one in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [100]


def test_the_automatic_budget_follows_what_is_free_and_counts_what_it_has_itself() -> None:
    auto = Budget(None, auto=True)
    share = Share(auto)
    auto.adapt(10 * GIB, ranks=1)
    assert auto.limit == pytest.approx(10 * GIB * IN_FLIGHT)
    share.in_flight = GIB
    auto.adapt(9 * GIB, ranks=1)
    assert auto.limit == pytest.approx(10 * GIB * IN_FLIGHT)
    auto.adapt(8 * GIB, ranks=4)
    assert auto.limit == pytest.approx(3 * GIB * IN_FLIGHT)
    auto.adapt(8 * GIB, ranks=4, unborn=16)
    assert auto.limit == shares(3 * GIB, 16).in_flight < 3 * GIB * IN_FLIGHT
    share.close()
    auto.adapt(0, ranks=1000)
    assert auto.limit == 1
    own = Budget(7)
    own.adapt(10 * GIB, ranks=1)
    assert own.limit == 7


def test_after_a_death_by_memory_it_comes_back_smaller_and_recovers() -> None:
    own = Budget(800)
    own.shrink()
    own.shrink()
    assert own.limit == 200
    own.recover()
    assert own.limit == 400
    for _ in range(100):
        own.shrink()
    assert own.limit == 800 >> 6


# -- one worker -----------------------------------------------------------------------------


def test_each_rung_is_climbed_once_and_again_after_it_was_down() -> None:
    ladder = Ladder(1000)
    assert ladder.climb(690) is Rung.NOTHING
    assert ladder.climb(700) is Rung.TIDY
    assert ladder.climb(750) is Rung.NOTHING
    assert ladder.climb(860) is Rung.TIDY
    assert ladder.climb(870) is Rung.NOTHING
    assert ladder.climb(590) is Rung.NOTHING
    assert ladder.climb(700) is Rung.TIDY
    assert ladder.climb(1000) is Rung.GO


@given(limit=st.integers(1, 10**12), start=st.integers(0, 10**12))
def test_a_fresh_worker_is_never_over_its_limit(limit: int, start: int) -> None:
    ladder = Ladder(limit, start)
    assert ladder.climb(start) is not Rung.GO
    assert ladder.raised == (start >= limit)


def test_what_a_worker_is_allowed() -> None:
    def share(given: int | str | None, *, confined: bool = False, ranks: int = 1) -> object:
        found = allowance(given, free=8 * GIB, confined=confined, workers=4, ranks=ranks)
        return found.private, found.beyond

    assert share(None) == (None, None)
    ours = shares(8 * GIB, 4).worker
    assert share("auto") == (ours, None)
    assert share("auto", confined=True) == (ours, int(8 * GIB * ALONE) - ours)
    assert share("auto", ranks=2) == (shares(4 * GIB, 4).worker, None)
    assert share(GIB) == (GIB, GIB // 4)
    unknown = allowance("auto", free=None, confined=False, workers=1, ranks=1)
    assert (unknown.private, unknown.beyond) == (None, None)


def test_a_number_counts_as_it_was_given_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    # To undo it would thaw all of torch too: each later collection in this process would be dear.
    monkeypatch.setattr(gc, "freeze", lambda: None)
    keeper = Housekeeper(Allowance(4 * MIB))
    try:
        keeper.begin()
        assert (keeper.limit, keeper.raised) == (4 * MIB, False)
    finally:
        keeper.close()


def test_collections_that_do_not_help_become_rare_and_those_that_do_stay() -> None:
    garbage = Garbage(0)
    size, collections = 0, 0
    while size < 4 * GIB:  # a cache that fills: nothing of it is garbage
        size += MIB
        if garbage.due(size):
            collections += 1
            assert not garbage.collected(size, size)
    assert collections < 12
    assert garbage.step == LARGEST_STEP
    assert garbage.collected(size + LARGEST_STEP, size)
    assert garbage.step == STEP
    assert not garbage.due(size + STEP - 1)
    assert garbage.due(size + STEP)


def test_copied_pages_are_looked_for_when_faults_could_have_filled_the_room() -> None:
    copies = Copies(1000)
    assert not copies.due(1000 + Copies.FIRST - 1, room=0)
    assert not copies.due(1000 + 20 * MIB, room=30 * MIB)
    assert copies.due(1000 + 30 * MIB, room=30 * MIB)
    copies.looked(1000 + 30 * MIB, copied=20 * MIB)
    assert copies.due(1000 + 40 * MIB, room=10 * MIB), "it copies: the next look is at the limit"


def test_faults_that_are_no_copies_lead_to_ever_fewer_looks() -> None:
    copies, looks = Copies(0), 0
    for faulted in range(0, 1024 * GIB, 64 * MIB):  # large samples, one after the other
        if copies.due(faulted, room=100 * MIB):
            copies.looked(faulted, copied=0)
            looks += 1
    assert looks < 30


# -- pressure -------------------------------------------------------------------------------


def test_pressure_rises_at_once_and_falls_slowly() -> None:
    pressure = Pressure()
    assert pressure.observe(0.5, 0.0) is Level.CALM
    assert pressure.cap(1600) is None
    assert pressure.observe(0.95, 0.1) is Level.RECYCLE
    assert pressure.cap(1600) == 100
    assert pressure.observe(0.2, 0.2) is Level.RECYCLE
    assert pressure.observe(0.2, 0.1 + SLOWLY) is Level.LITTLE
    assert pressure.observe(0.2, 0.2 + SLOWLY) is Level.LITTLE
    assert pressure.observe(0.2, 0.1 + 2 * SLOWLY) is Level.LESS
    assert pressure.cap(1600) == 400
    assert pressure.observe(0.78, 0.1 + 3 * SLOWLY) is Level.LESS  # not far enough below
    assert pressure.observe(0.2, 100.0) is Level.CALM


def test_where_one_kill_takes_all_it_stays_further_away() -> None:
    assert Pressure(oom_group=True).observe(0.84, 0.0) is Level.RECYCLE
    assert Pressure().observe(0.84, 0.0) is Level.LESS


@given(st.floats(0, 1))
def test_the_less_is_left_the_more_often_we_look(fill: float) -> None:
    pressure = Pressure()
    assert 0.1 <= pressure.interval(fill) <= 5.0
    assert pressure.interval(fill) >= pressure.interval(min(1.0, fill + 0.1))


# -- what is read ---------------------------------------------------------------------------


def system(tmp_path: Path, *, available: int = 8 * GIB) -> Roots:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    (proc / "meminfo").write_text(
        f"MemTotal: {16 * GIB >> 10} kB\nMemAvailable: {available >> 10} kB\n"
        "SwapTotal: 0 kB\nSwapFree: 0 kB\n"
    )
    (groups / "job" / "step").mkdir(parents=True)
    return Roots(proc=proc, cgroup=groups)


def confine(folder: Path, limit: int, used: int, files: int = 0) -> None:
    (folder / "memory.max").write_text(str(limit))
    (folder / "memory.current").write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {files}\nactive_file 0\n")


def test_the_group_with_the_least_room_counts_not_that_with_the_lowest_limit(
    tmp_path: Path,
) -> None:
    roots = system(tmp_path)
    confine(roots.cgroup / "job" / "step", 2 * GIB, GIB)
    confine(roots.cgroup / "job", 4 * GIB, 4 * GIB - 100 * MIB)
    found = gauge.read(roots)
    assert (found.limit, found.free, found.confined) == (4 * GIB, 100 * MIB, True)


def test_files_that_were_read_do_not_count_as_used(tmp_path: Path) -> None:
    roots = system(tmp_path)
    confine(roots.cgroup / "job" / "step", 2 * GIB, 2 * GIB, files=GIB)
    assert gauge.read(roots).fill == 0.5


def test_a_large_machine_is_not_full_while_gigabytes_are_free() -> None:
    assert gauge.MemoryReading(1024 * GIB, 40 * GIB).fill == 0
    assert gauge.MemoryReading(16 * GIB, 4 * GIB).fill == 0.75
    assert gauge.MemoryReading().fill == 0


@pytest.mark.parametrize(
    ("environment", "count"),
    [({}, 1), ({"LOCAL_WORLD_SIZE": "8"}, 8), ({"LOCAL_WORLD_SIZE": "x"}, 1),
     ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2), ({"LOCAL_SIZE": "4"}, 4),
     ({"SLURM_STEP_TASKS_PER_NODE": "4(x12),13"}, 13), ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, 2),
     ({"MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "3"}, 3),
     ({"MASTER_ADDR": "node7", "RANK": "0", "WORLD_SIZE": "3"}, 1)],
)  # fmt: skip
def test_ranks(environment: dict[str, str], count: int) -> None:
    assert gauge.ranks(environment) == count


def test_a_group_that_is_killed_as_a_whole_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.memory_control._warned", _Warned())
    roots = system(tmp_path)
    confine(roots.cgroup / "job" / "step", 2 * GIB, GIB)
    (roots.cgroup / "job" / "step" / "memory.oom.group").write_text("1")
    for _ in range(2):
        controller = MemoryController(Share(Budget(None, auto=True)), "auto", 2, roots)
        assert controller.pressure.thresholds[0] < 0.75
    assert [record.message.count("memory.oom.group") for record in caplog.records] == [1]


def test_the_share_is_narrowed_under_pressure_and_widened_after_it(tmp_path: Path) -> None:
    roots = system(tmp_path)
    place = roots.cgroup / "job" / "step"
    confine(place, GIB, GIB // 2)
    share = Share(Budget(None, auto=True))
    controller = MemoryController(share, "auto", 2, roots)
    calm = share.budget.limit
    confine(place, GIB, GIB - 64 * MIB)
    assert check(controller, 10.0, {}) is None
    assert share.cap == 4 * MIB
    assert not share.alone
    controller.died_of_memory(11.0)
    assert share.alone
    assert share.budget.limit == (calm or 0) // 2
    confine(place, GIB, GIB // 2)
    for second in range(12, 80):
        check(controller, float(second), {})
    assert (share.cap, share.alone) == (None, False)


def test_the_logbook_tells_of_pressure_its_end_and_of_coming_back_smaller(tmp_path: Path) -> None:
    roots = system(tmp_path / "system")
    place = roots.cgroup / "job" / "step"
    confine(place, GIB, GIB // 2)
    book = Logbook(tmp_path / "book")
    mind = MemoryController(Share(Budget(None, auto=True)), "auto", 2, roots, logbook=book)
    of_size(roots, 70, 90 * MIB)
    confine(place, GIB, GIB - 64 * MIB)
    assert check(mind, 10.0, {0: 70}) == 0
    mind.retired(0)
    mind.died_of_memory(11.0)
    confine(place, GIB, GIB // 2)
    for second in range(12, 80):
        check(mind, float(second), {})
    mind.retired(1)
    book.flush()
    told = [(one["event"], one["text"]) for one in logged_run.read(tmp_path / "book").events]
    assert [event for event, _ in told] == ["pressure", "recycled", "smaller", "calm", "recycled"]
    texts = [text for _, text in told]
    assert texts[0].startswith("memory is 94 % full: no more than a sixteenth of what is free")
    assert texts[1] == (
        "worker 0 had 90 MiB of memory of its own while memory was 94 % full; replaced"
    )
    assert "one batch at a time for 30 s" in texts[2]


def of_size(roots: Roots, pid: int, nbytes: int) -> None:
    folder = roots.proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "smaps_rollup").write_text(
        f"0-1 ---p 0 0:0 0 [rollup]\nPrivate_Dirty: {nbytes >> 10} kB\n"
    )


def check(mind: MemoryController, now: float, pids: dict[int, int]) -> int | None:
    """As the pool does, with workers that have these pids."""
    return mind.check_memory(now, pids, lambda worker: gauge.private(pids[worker], mind.roots))


def test_near_the_end_the_fattest_goes_then_the_next_and_the_same_again_ever_later(
    tmp_path: Path,
) -> None:
    roots = system(tmp_path)
    confine(roots.cgroup / "job" / "step", GIB, GIB - 10 * MIB)
    mind = MemoryController(Share(Budget(None, auto=True)), "auto", 2, roots)
    pids = {0: 70, 1: 71}
    of_size(roots, 70, 90 * MIB)
    of_size(roots, 71, 60 * MIB)
    went = [(at, who) for at in range(200) if (who := check(mind, at / 10, pids)) is not None]
    assert went[:2] == [(0, 0), (2, 1)], "what the first one frees has a moment to show"
    for worker in (0, 1):
        times = [at for at, who in went if who == worker]
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert [round(gap, -1) for gap in gaps[:3]] == [10, 20, 40], "they need what they have"


def test_a_small_worker_is_replaced_only_if_not_even_as_much_is_left(tmp_path: Path) -> None:
    roots = system(tmp_path)
    of_size(roots, 70, 20 * MIB)
    for left, goes in ((28, None), (19, 0)):
        confine(roots.cgroup / "job" / "step", 400 * MIB, (400 - left) * MIB)
        mind = MemoryController(Share(Budget(None, auto=True)), "auto", 1, roots)
        assert check(mind, 1.0, {0: 70}) == goes
    of_size(roots, 70, 2 * MIB)
    assert check(mind, 2.0, {0: 70}) is None, "a fresh one would have as much"


def test_where_memory_goes_fast_workers_are_replaced_before_next_to_nothing_is_left(
    tmp_path: Path,
) -> None:
    """As when forked workers copy inherited pages: 30 MiB in a tenth of a second."""
    roots = system(tmp_path)
    place, pids = roots.cgroup / "job" / "step", {0: 70, 1: 71, 2: 72}
    sizes = {0: 20 * MIB, 1: 40 * MIB, 2: 10 * MIB}
    for worker, pid in pids.items():
        of_size(roots, pid, sizes[worker])

    def look(seconds: float, left: int) -> int | None:
        confine(place, GIB, GIB - left * MIB)
        return check(mind, seconds, pids)

    confine(place, GIB, GIB // 2)
    mind = MemoryController(Share(Budget(None, auto=True)), "auto", 3, roots)
    for tenth in range(6):
        assert look(20 + tenth / 10, 200 - tenth) is None, "slowly"
    assert [look(20.6, 165), look(20.7, 135), look(20.8, 105)] == [None] * 3, "for 0.6 s yet"
    assert look(20.88, 86) == 1, "for less than half a second, at 92 % of the limit"
    assert look(20.94, 80) is None, "with what that one has it is enough"
    assert look(21.0, 45) == 0, "no pause between the two"
    assert look(21.05, 30) is None, "the third has nothing to give"


def test_memory_that_comes_and_goes_with_each_batch_is_no_reason_to_replace_anybody(
    tmp_path: Path,
) -> None:
    roots = system(tmp_path)
    of_size(roots, 70, 60 * MIB)
    confine(roots.cgroup / "job" / "step", GIB, GIB // 2)
    mind = MemoryController(Share(Budget(None, auto=True)), "auto", 1, roots)
    for tenth in range(100):
        left = (190, 150, 110)[tenth % 3]
        confine(roots.cgroup / "job" / "step", GIB, GIB - left * MIB)
        assert check(mind, tenth / 10, {0: 70}) is None


def minding_one(tmp_path: Path, nbytes: int) -> tuple[Path, MemoryController]:
    """A group that is half full, and the controller of one worker of this size in it, pid 70."""
    roots = system(tmp_path)
    place = roots.cgroup / "job" / "step"
    of_size(roots, 70, nbytes)
    confine(place, GIB, GIB // 2)
    return place, MemoryController(Share(Budget(None, auto=True)), "auto", 1, roots)


def test_a_worker_whose_replacement_has_helped_may_be_replaced_again_at_once(
    tmp_path: Path,
) -> None:
    place, mind = minding_one(tmp_path, 90 * MIB)
    went = []
    for tenth in range(60):  # it grows by 90 MiB in half a second, which are gone with it
        grown = (tenth % 5 + 1) * 20 * MIB
        if tenth % 5 == 0:
            mind.started(0)
        confine(place, GIB, GIB - 110 * MIB + grown)
        if check(mind, tenth / 10, {0: 70}) is not None:
            went.append(tenth)
    assert len(went) >= 10


@pytest.mark.parametrize("swing", [41, 400])
def test_a_trainer_whose_memory_comes_and_goes_has_workers_replaced_ever_less_often(
    tmp_path: Path, swing: int
) -> None:
    """Memory fills up and becomes free every half second, whether or not workers are replaced."""
    place, mind = minding_one(tmp_path, 90 * MIB)
    went: list[int] = []
    for tenth in range(400):
        confine(place, GIB, GIB - (51 if tenth % 5 < 3 else 51 + swing) * MIB)
        if went and tenth == went[-1] + 3:
            mind.started(0)
        if check(mind, tenth / 10, {0: 70}) is not None:
            went.append(tenth)
    gaps = [after - before for before, after in itertools.pairwise(went)]
    assert [round(gap, -1) for gap in gaps[:4]] == [10, 20, 40, 80]


@pytest.mark.parametrize("hurry", [False, True])
@pytest.mark.parametrize(("takes", "most"), [(0.0, 5), (0.02, 1)])
def test_workers_that_are_too_small_to_be_worth_it_are_not_measured_at_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hurry: bool, takes: float, most: int
) -> None:
    """A measurement takes milliseconds for each worker, and the trainer waits for it."""
    place, mind = minding_one(tmp_path, 4 * MIB)
    measured = 0

    def private(pid: int | str, roots: Roots) -> int | None:
        nonlocal measured
        measured += 1
        time.sleep(takes)
        return measure(pid, roots)

    measure = gauge.private
    monkeypatch.setattr(gauge, "private", private)
    for look in range(50):  # in a second
        left = 300 - 6 * look if hurry else 20  # 300 MiB in a second
        confine(place, GIB, GIB - left * MIB)
        assert check(mind, 10 + look / 50, {0: 70}) is None
    assert 1 <= measured <= most


def test_what_a_worker_had_that_is_gone_already_does_not_count_as_coming(tmp_path: Path) -> None:
    roots = system(tmp_path)
    place, pids = roots.cgroup / "job" / "step", {0: 70, 1: 71}
    of_size(roots, 70, 60 * MIB)
    of_size(roots, 71, 50 * MIB)

    def look(seconds: float, left: int) -> int | None:
        confine(place, GIB, GIB - left * MIB)
        return check(mind, seconds, pids)

    for gone in (False, True):
        confine(place, GIB, GIB // 2)
        mind = MemoryController(Share(Budget(None, auto=True)), "auto", 2, roots)
        for tenth in range(6):
            assert look(20 + tenth / 10, 200 - tenth) is None
        assert [look(20.6, 165), look(20.7, 135), look(20.8, 105)] == [None] * 3
        assert look(20.88, 86) == 0, "for less than half a second"
        if gone:
            mind.started(0)
        assert look(20.94, 80) == (1 if gone else None)


def test_why_a_worker_was_to_go_is_not_said_of_its_successor(tmp_path: Path) -> None:
    roots = system(tmp_path / "system")
    confine(roots.cgroup / "job" / "step", GIB, GIB - 64 * MIB)
    of_size(roots, 70, 90 * MIB)
    book = Logbook(tmp_path / "book")
    mind = MemoryController(Share(Budget(None, auto=True)), "auto", 1, roots, logbook=book)
    assert check(mind, 10.0, {0: 70}) == 0
    mind.started(0)  # it died of something else before it could go
    mind.retired(0)
    book.flush()
    texts = [one["text"] for one in logged_run.read(tmp_path / "book").events]
    assert "and a sample needed more" in texts[-1]


def test_workers_are_told_to_give_back_under_pressure_at_once_and_then_now_and_then(
    tmp_path: Path,
) -> None:
    roots = system(tmp_path)
    place = roots.cgroup / "job" / "step"
    confine(place, GIB, GIB // 2)
    mind = MemoryController(Share(Budget(None, auto=True)), "auto", 1, roots)

    def told(seconds: range, part: float) -> list[int]:
        confine(place, GIB, int(GIB * part))
        times = []
        for second in seconds:
            check(mind, float(second), {})
            if mind.tight(float(second)):
                times.append(second)
        return times

    assert told(range(100), 0.5) == []
    assert told(range(100, 112), 0.82) == [100, 105, 110]
    assert told(range(112, 118), 0.90) == [112, 113, 114, 115, 116, 117]
    assert told(range(118, 200), 0.5)[-1] < 130, "until the pressure has been gone for a while"
    assert len(told(range(200, 205), 0.82)) == 1


def test_the_faster_memory_goes_the_sooner_is_the_next_look(tmp_path: Path) -> None:
    roots = system(tmp_path, available=64 * GIB)
    place = roots.cgroup / "job" / "step"
    confine(place, 30 * GIB, GIB)
    mind = MemoryController(Share(Budget(None, auto=True)), "auto", 1, roots)
    check(mind, 10.0, {})
    calm = mind.interval()
    confine(place, 30 * GIB, 16 * GIB)  # 15 GiB in 10 s: the rest would last for 9 s
    check(mind, 20.0, {})
    assert 0.5 < mind.interval() < calm == 5.0


def test_in_a_small_room_it_is_looked_at_often_before_anything_has_grown(tmp_path: Path) -> None:
    """A quarter of a gigabyte can be gone in a second."""
    roots = system(tmp_path)
    confine(roots.cgroup / "job" / "step", 460 * MIB, 160 * MIB)
    mind = MemoryController(Share(Budget(None, auto=True)), "auto", 1, roots)
    assert mind.interval() < 0.2
    check(mind, 10.0, {})
    assert mind.interval() < 0.2
