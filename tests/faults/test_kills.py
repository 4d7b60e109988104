"""Workers killed from outside, again and again: no sample is convicted of it, and nothing is lost.

The rule itself is tried in `tests/engine/test_storms.py`, at any rate; here real processes are
killed. `HOLDFAST_STORM_KILLS` sets how many in the long one.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import holdfast
from holdfast.autopsy.incident import Incident
from holdfast.engine.background import CLOSED
from holdfast.runtime import REMEMBERED
from tests.support.processes import alive, eventually, kill, open_files

pytestmark = [pytest.mark.faults]

KILLS = int(os.environ.get("HOLDFAST_STORM_KILLS") or 3000)
MANY = 10**6  # restarts: as good as no limit, and a limit


class Noisy(Dataset[Any]):
    """Every sample shows the random state it was made from, and takes its time."""

    def __init__(self, size: int = 120, seconds: float = 0.004) -> None:
        self.size = size
        self.seconds = seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.tensor([index, int(torch.randint(1 << 30, ()))])


class SlowToLoad(Noisy):
    """A start takes longer than there is between two kills."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(0.5)
        self.__dict__.update(state)


class Stream(IterableDataset[Any]):
    """Without a state: a replacement has to go through all of it again."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size = size
        self.seconds = seconds

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        for number in range(info.id, self.size, info.num_workers):
            time.sleep(self.seconds)
            yield torch.tensor([number, int(torch.randint(1 << 30, ()))])


def batches(loader: Any) -> list[Any]:
    torch.manual_seed(11)
    return [batch.tolist() for batch in loader]


class Killer:
    """Kills workers of a loader's present pool from a thread, one at a time."""

    def __init__(self, pace: float, kills: int, *, nursery: float = 0.0) -> None:
        self.pace = pace
        self.left = kills
        self.nursery = nursery  # how often that is the victim
        self.killed = 0
        self.pool: Any = None
        self._dice = random.Random(5)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer")

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def over(self, iterator: Any) -> list[Any]:
        """All batches of this iterator."""
        self.pool = iterator._pool
        found = [batch.tolist() for batch in iterator]
        self.pool = None
        return found

    def _run(self) -> None:
        while not self._done.wait(self.pace) and self.left:
            pool = self.pool
            if pool is None or pool.background.stage is CLOSED:
                continue
            victim = self._dice.choice(pool.driver.resources.slots).pid
            if self._dice.random() < self.nursery:
                victim = pool.driver.resources.nursery.pid
            try:
                if victim is None or not alive(victim):
                    continue
                kill(victim)
            except ProcessLookupError:
                continue
            self.killed += 1
            self.left -= 1


# -- storms --------------------------------------------------------------------------------


def storm(
    kills: int, pace: float, data: Dataset[Any], policy: Any = "raise", **options: Any
) -> list[tuple[int, int, int]]:
    """Epochs under a storm until it is over; each must be torch's. After each: kills, MiB and
    descriptors of this process."""
    given = {"batch_size": 4, "shuffle": True, "num_workers": 2} | options
    expected = batches(torch.utils.data.DataLoader(data, **given))
    loader = holdfast.DataLoader(data, max_restarts=None, on_bad_sample=policy, **given)
    figures = []
    with loader, Killer(pace, kills) as killer:
        while killer.left:
            torch.manual_seed(11)
            assert killer.over(iter(loader)) == expected, f"after {killer.killed} kills"
            figures.append((killer.killed, resident(), open_files()))
        incidents = loader.incidents
    assert {one.cause for one in incidents} <= {"killed-from-outside"}
    assert not [one for one in incidents if "given up" in one.action]
    assert len(incidents) == min(REMEMBERED, loader.stats()["incidents"])
    return figures


def resident() -> int:
    """MiB of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20


@pytest.mark.slow
@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_storm_convicts_no_sample_and_changes_nothing(policy: str) -> None:
    """One worker, and every sample takes as long as there is between two strikes: all have often
    been there when workers were killed."""
    storm(14, 0.07, Noisy(6, 0.06), policy, num_workers=1, batch_size=2)


@pytest.mark.slow
@pytest.mark.timeout(KILLS * 0.3 + 120, method="thread")
def test_a_storm_of_thousands_of_kills_leaves_the_trainer_as_it_was() -> None:
    figures = storm(KILLS, 0.04, Noisy())
    # From when as many incidents are kept as ever will be.
    full = next(one for one in figures if one[0] >= min(REMEMBERED + 500, KILLS // 2))
    print(
        f"{len(figures)} epochs; kills, MiB, descriptors: {figures[0]} .. {full} .. {figures[-1]}"
    )
    assert figures[-1][2] <= full[2]
    assert figures[-1][1] <= full[1] + 8


def test_a_loader_keeps_the_last_thousand_incidents_and_counts_all() -> None:
    loader = holdfast.DataLoader([1, 2], num_workers=1)
    runtime = loader._runtime
    for number in range(REMEMBERED + 500):
        runtime.note(
            None,
            Incident("killed", number, 1, "SIGKILL", -9, None, None, None, "idle", "", "", 0.0),
        )
    assert [one.worker_id for one in loader.incidents] == list(range(500, REMEMBERED + 500))
    assert loader.stats()["incidents"] == REMEMBERED + 500


# -- samples that really kill --------------------------------------------------------------


def by_os_kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after_a_while() -> None:
    time.sleep(0.3)
    by_os_kill()


def by_the_c_library() -> None:
    ctypes.CDLL(None).kill(os.getpid(), signal.SIGKILL)


class Deadly(Dataset[Any]):
    """Sample 7 kills the worker that loads it."""

    def __init__(self, how: Callable[[], None]) -> None:
        self.how = how

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 7:
            self.how()
            time.sleep(60)
        return index


class DeadlyMany(Deadly):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


WAYS = [
    pytest.param(by_os_kill, id="os.kill"),
    pytest.param(lambda: os._exit(3), id="exit"),
    pytest.param(lambda: ctypes.string_at(0), id="segfault"),
    pytest.param(after_a_while, id="later", marks=pytest.mark.slow),
]


@pytest.mark.timeout(90, method="thread")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    ("kind", "size", "lost"),
    [(Deadly, 3, [6, 7, 8]), (Deadly, None, [7]), (DeadlyMany, 3, [6, 7, 8])],
)
def test_a_sample_that_really_kills_is_named_after_five_deaths_at_most(
    kind: type[Deadly], size: int | None, lost: list[int], how: Callable[[], None]
) -> None:
    got: list[int] = []
    errors = []
    with holdfast.DataLoader(kind(how), size, num_workers=1, max_restarts=10) as loader:
        iterator = iter(loader)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except holdfast.PoisonSample as error:
                errors.append(error)
            else:
                got += batch.tolist() if size else [batch]
        assert 2 <= len(loader.incidents) <= 5
    assert sorted({*range(12)} - {*got}) == lost
    (error,) = errors
    assert error.sample == (None if kind is DeadlyMany else 7)
    assert "loaded alone by a fresh one" in str(error)


@pytest.mark.timeout(90, method="thread")
@pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")
@pytest.mark.parametrize("how", WAYS)
def test_with_a_policy_one_that_really_kills_is_left_out_after_five_deaths_at_most(
    how: Callable[[], None],
) -> None:
    given = {"num_workers": 1, "on_bad_sample": "skip", "max_restarts": 10}
    with holdfast.DataLoader(Deadly(how), 3, **given) as loader:
        got = [index for batch in loader for index in batch.tolist()]
        assert len(loader.incidents) <= 5
    assert got == [index for index in range(12) if index != 7]


@pytest.mark.slow
@pytest.mark.timeout(180, method="thread")
def test_one_that_kills_without_a_trace_is_named_for_the_instant_in_which_it_does() -> None:
    """After five deaths, if they are noticed at once; on a machine with too much to do it takes
    more of them to be sure."""
    data = Deadly(by_the_c_library)
    with holdfast.DataLoader(data, 3, num_workers=1, max_restarts=20) as loader:
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(holdfast.PoisonSample, match="times when it was loaded alone") as caught:
            next(iterator)
        print(f"{len(loader.incidents)} deaths")
        assert caught.value.sample == 7
        assert [batch.tolist() for batch in iterator] == [[9, 10, 11]]
    told = str(caught.value)
    assert re.search(
        r"The sample is to blame: loaded alone \d times, each time after a pause of at least "
        r"[\d.]+ s, .* was killed within \d+ ms",
        told,
    )
    for hunt in ("another process", "sender", "killed-from-outside", "auditctl"):
        assert hunt not in told


@pytest.mark.timeout(90, method="thread")
def test_an_element_of_a_stream_that_kills_without_a_trace_is_named_when_it_is_enough() -> None:
    """It cannot be loaded alone, so nothing convicts it; but all deaths were at the same place."""

    class DeadlyStream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            yield from range(7)
            by_the_c_library()

    loader = holdfast.DataLoader(DeadlyStream(), 3, num_workers=1, max_restarts=3)
    with loader, pytest.raises(holdfast.RestartLimitExceeded) as caught:
        list(loader)
    told = str(caught.value)
    assert "All of them were at the same element (worker 0, batch 2, position 1)" in told
    assert "Find the element: iterate the dataset in one process" in told
    assert "max_restarts=None would start workers for ever" in told
    assert "allow more" not in told


@pytest.mark.timeout(90, method="thread")
def test_an_element_of_a_stream_that_kills_its_worker_by_os_kill_is_named() -> None:
    class DeadlyStream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            yield from range(7)
            by_os_kill()

    with holdfast.DataLoader(DeadlyStream(), num_workers=1) as loader:
        iterator = iter(loader)
        assert [next(iterator).item() for _ in range(7)] == list(range(7))
        with pytest.raises(holdfast.PoisonSample, match="3 workers in a row"):
            next(iterator)
        assert loader.incidents[-1].because[0].startswith("it sent SIGKILL to itself")


# -- kills while workers start or catch up -------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300, method="thread")
def test_kills_while_a_replica_is_replayed_end_no_run() -> None:
    """A replay takes longer than there is between two kills; the nursery is killed too."""
    given = {"batch_size": 3, "num_workers": 2}
    data = Stream(240, 0.004)  # half a second for each worker, from the start to the end
    expected = batches(torch.utils.data.DataLoader(data, **given))
    loader = holdfast.DataLoader(data, max_restarts=MANY, **given)
    with loader, Killer(0.08, 40, nursery=0.2) as killer:
        while killer.left:
            torch.manual_seed(11)
            assert killer.over(iter(loader)) == expected
        texts = [str(one) for one in loader.incidents]
    print(f"{killer.killed} kills, {len(texts)} incidents")
    assert not [text for text in texts if "None" in text]


@pytest.mark.slow
@pytest.mark.timeout(300, method="thread")
def test_kills_while_persistent_forkserver_workers_start_end_no_run() -> None:
    given = {
        "batch_size": 4,
        "num_workers": 1,  # in which all starts are killed, one after the other
        "persistent_workers": True,
        "multiprocessing_context": "forkserver",
    }
    data = SlowToLoad(80, 0.01)
    torch.manual_seed(11)
    stock = torch.utils.data.DataLoader(data, **given)
    expected = [[batch.tolist() for batch in stock] for _ in range(3)]
    del stock
    torch.manual_seed(11)
    loader = holdfast.DataLoader(data, max_restarts=MANY, **given)
    seen = []
    with loader, Killer(0.3, 15) as killer:
        for _ in range(3):
            seen.append(killer.over(iter(loader)))
    print(f"{killer.killed} kills, {len(loader.incidents)} incidents")
    assert seen == expected


@pytest.mark.timeout(60, method="thread")
def test_who_is_killed_while_it_catches_up_is_said_to_be_and_not_to_be_starting(
    tmp_path: Path,
) -> None:
    """As often as it likes: it is restarted at once, and no batch is called None."""

    gate = tmp_path / "gate"

    class Marked(Stream):
        """Those after the first stay in the middle of what they draw again until the gate opens."""

        def __iter__(self) -> Iterator[Any]:
            first = not any(tmp_path.glob("begun-*"))
            (tmp_path / f"begun-{os.getpid()}").touch()
            for number, sample in enumerate(super().__iter__()):
                if number == 6 and not first:
                    assert eventually(gate.exists)
                yield sample

    loader = holdfast.DataLoader(Marked(40, 0.0), num_workers=1, max_restarts=MANY)
    with loader:
        iterator = iter(loader)
        got = [next(iterator)[0, 0].item() for _ in range(12)]
        victim, deaths = iterator._workers[0].pid, 5
        for death in range(deaths):
            kill(victim)
            assert eventually(lambda death=death: len(loader.incidents) > death)
            victim = iterator._workers[0].pid
            assert eventually((tmp_path / f"begun-{victim}").exists)
        gate.touch()
        got += [batch[0, 0].item() for batch in iterator]
    assert got == list(range(40))
    assert len(loader.incidents) == deaths
    for incident in loader.incidents[1:]:
        assert incident.step == "replay"
        assert "while catching up with its predecessor; replaced" in str(incident)
