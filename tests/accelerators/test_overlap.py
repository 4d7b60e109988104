"""Pinning overlaps with the training step, within the budget, and gives the workers their memory back. What is compared
is the order of events; how long things take is for `python -m benchmarks.pinned`."""

from __future__ import annotations

import pytest

from tests.accelerators.playing import play, said
from tests.lifecycle.trainer import Stage


def test_batches_are_pinned_while_the_consumer_is_not_in_next(stage: Stage) -> None:
    ended = play(
        stage,
        """
        slate.take(20)
        loader = DataLoader(Images(30), batch_size=3, num_workers=2, pin_memory=True)
        iterator = iter(loader)
        next(iterator)
        # The training step. All that was ordered when the first batch was taken is pinned in it.
        say("ahead", eventually(lambda: slate.count("allocations") == 1 + 2 * 2))
        made = slate.count("allocations")
        rest = [int(next(iterator)[0, 100]) for _ in range(4)]
        say("rest", rest)
        say("waits", loader.stats()["waits"] <= 2)
        """,
    )
    assert said(ended)["ahead"] == ["True"]
    assert said(ended)["rest"] == ["[3, 6, 9, 12]"]


@pytest.mark.slow
def test_a_batch_that_arrives_during_the_step_is_pinned_during_it(stage: Stage) -> None:
    """It is the background thread that hears of it then."""
    ended = play(
        stage,
        """
        gate, opener = os.pipe()

        class Late(Images):
            def __getitem__(self, index):
                if index >= 2:
                    os.read(gate, 1)
                return super().__getitem__(index)

        iterator = iter(DataLoader(Late(8), num_workers=2, pin_memory=True))
        next(iterator), next(iterator)
        before = slate.count("allocations")
        os.write(opener, b"..")
        say("later", eventually(lambda: slate.count("allocations") == before + 2), before)
        os.write(opener, b"." * 8)
        say("rest", len(list(iterator)))
        """,
    )
    assert said(ended)["later"] == ["True 2"]
    assert said(ended)["rest"] == ["6"]


def test_the_memory_of_workers_is_free_as_soon_as_it_is_copied(stage: Stage) -> None:
    ended = play(
        stage,
        """
        kept = {}
        for pin in (False, True):
            loader = DataLoader(Images(24, 1 << 20), batch_size=2, num_workers=1, pin_memory=pin)
            batches = []
            for batch in loader:
                batches.append(batch)
                kept[pin] = loader.stats()["held_bytes"]
            say("equal", [int(batch[0, 100]) for batch in batches] == list(range(0, 24, 2)))
        say("kept", kept[False] >= 20 << 20, kept[True] <= 4 << 20)
        """,
    )
    assert said(ended)["equal"] == ["True"] * 2
    assert said(ended)["kept"] == ["True True"]


def test_copies_made_ahead_stay_within_the_budget(stage: Stage) -> None:
    """Batches of 2 MiB. Pinned memory that the consumer does not have yet is in flight."""
    ended = play(
        stage,
        """
        MIB = 1 << 20
        for budget in (3 * MIB, 9 * MIB):
            loader = DataLoader(Images(40, MIB), batch_size=2, num_workers=2, pin_memory=True,
                                prefetch_factor=4, memory_budget=budget)
            most = 0
            for batch in loader:
                del batch
                time.sleep(0.01)
                most = max(most, slate.count("bytes"))
            say("most", most // MIB, slate.count("bytes"))
        """,
    )
    small, large = (int(line.split()[0]) for line in said(ended)["most"])
    assert small <= 2, (
        "a batch that is too large for a copy beside it is pinned when it is asked for"
    )
    assert 0 < large <= 8
