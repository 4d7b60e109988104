"""With `pin_memory=True` batches, their order and the places where they are pinned are torch's, whatever happens to the
workers."""

from __future__ import annotations

import pytest

from tests.accelerators.playing import play, said
from tests.lifecycle.trainer import Stage

BOTH = """
def both(dataset, meanwhile=lambda number, iterator: None, epochs=1, **options):
    streams = []
    for kind, disturb in ((Stock, lambda number, iterator: None), (DataLoader, meanwhile)):
        torch.manual_seed(3)
        more = {"max_restarts": None} if kind is DataLoader else {}
        loader = kind(dataset, pin_memory=True, **options, **more)
        streams.append([stream_of(loader, disturb) for _ in range(epochs)])
    say("equal", streams[0] == streams[1])
    return loader

def kill_some(number, iterator):
    if number % 3 == 1:
        kill(iterator, number % 2)
"""


@pytest.mark.parametrize(
    "options",
    [
        "batch_size=3, shuffle=True, num_workers=2",
        "batch_size=None, num_workers=1",
        "batch_size=4, num_workers=0",
        pytest.param(
            "batch_size=5, drop_last=True, num_workers=2, multiprocessing_context='spawn'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_batches_are_pinned_as_torch_pins_them(stage: Stage, options: str) -> None:
    ended = play(
        stage,
        f"""
        {BOTH.replace(chr(10), chr(10) + " " * 8)}
        both(Images(), {options})
        say("pinned", slate.count("allocations"))
        say("left", eventually(lambda: not pinning_threads() and slate.count("bytes") == 0))
        """,
    )
    assert said(ended)["equal"] == ["True"]
    assert int(said(ended)["pinned"][0]) > 0
    assert said(ended)["left"] == ["True"]


def test_everything_that_torch_can_pin_is_pinned_on_the_device_of_the_consumers_thread(
    stage: Stage,
) -> None:
    ended = play(
        stage,
        f"""
        {BOTH.replace(chr(10), chr(10) + " " * 8)}
        torch.accelerator.set_device_index(1)
        both(Images(nbytes=1 << 14), batch_size=4, num_workers=2, collate_fn=of_all_kinds)
        batch = next(iter(DataLoader(Images(nbytes=1 << 14), batch_size=4, num_workers=1,
                                     collate_fn=of_all_kinds, pin_memory=True)))
        say("custom", batch["custom"].by, batch["custom"].value.is_pinned())
        say("last", slate.count("last_device"))
        """,
    )
    assert said(ended)["equal"] == ["True"]
    assert said(ended)["custom"] == ["device 1 True"]
    assert said(ended)["last"] == ["1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "Images(36), shuffle=True",
        "Images(36), persistent_workers=True, epochs=3",
        "Stream(36)",
        "Images(36), prefetch_factor=4, timeout=60",
    ],
)
@pytest.mark.faults
def test_streams_are_torchs_although_workers_are_killed(stage: Stage, options: str) -> None:
    dataset, _, rest = options.partition(", ")
    ended = play(
        stage,
        f"""
        {BOTH.replace(chr(10), chr(10) + " " * 8)}
        slate.take(2)
        loader = both({dataset}, kill_some, batch_size=3, num_workers=2, {rest})
        say("deaths", len(loader.incidents))
        """,
    )
    assert said(ended)["equal"] == ["True"]
    assert int(said(ended)["deaths"][0]) > 0


@pytest.mark.faults
def test_without_order_every_batch_comes_once_although_workers_are_killed(stage: Stage) -> None:
    ended = play(
        stage,
        f"""
        {BOTH.replace(chr(10), chr(10) + " " * 8)}
        seen = []
        loader = DataLoader(Images(30), batch_size=3, num_workers=2, in_order=False, pin_memory=True,
                            max_restarts=None)
        for number, batch in enumerate(iterator := iter(loader)):
            seen.append(int(batch[0, 100]))
            say("pinned", batch.is_pinned())
            kill_some(number, iterator)
        say("seen", sorted(seen) == list(range(0, 30, 3)))
        """,
    )
    assert said(ended)["seen"] == ["True"]
    assert set(said(ended)["pinned"]) == {"True"}


def test_bad_samples_are_left_out_as_without_pinning(stage: Stage) -> None:
    ended = play(
        stage,
        """
        class Broken(Images):
            def __getitem__(self, index):
                if index in (4, 9, 10, 11):
                    raise ValueError(index)
                return super().__getitem__(index)

        streams = []
        for pin in (False, True):
            torch.manual_seed(3)
            loader = DataLoader(Broken(24), batch_size=3, num_workers=2, pin_memory=pin,
                                on_bad_sample="skip")
            streams.append([batch.tolist() for batch in loader])
            say("bad", sorted(sample.index for sample in loader.bad_samples))
        say("equal", streams[0] == streams[1], len(streams[0]))
        """,
    )
    assert said(ended)["equal"] == ["True 7"]
    assert said(ended)["bad"] == ["[4, 9, 10, 11]"] * 2


def test_an_epoch_that_is_broken_off_leaves_nothing_in_the_next_one(stage: Stage) -> None:
    ended = play(
        stage,
        f"""
        {BOTH.replace(chr(10), chr(10) + " " * 8)}
        slate.take(3)
        streams = []
        for kind in (Stock, DataLoader):
            torch.manual_seed(3)
            loader = kind(Images(30), batch_size=3, num_workers=2, pin_memory=True,
                          persistent_workers=True)
            seen = []
            for stop in (1, 4, 0, 99):
                for number, batch in enumerate(loader):
                    seen.append((batch[:, 100].tolist(), batch.is_pinned()))
                    if number == stop:
                        break
            streams.append(seen)
        say("equal", streams[0] == streams[1], len(streams[0]))
        """,
    )
    assert said(ended)["equal"] == ["True 18"]


def test_a_length_that_is_too_short_is_warned_of_as_by_torch(stage: Stage) -> None:
    ended = play(
        stage,
        """
        import warnings

        class Longer(Stream):
            def __len__(self):
                return 5

        for kind in (Stock, DataLoader):
            loader = kind(Longer(12), batch_size=None, num_workers=2, pin_memory=True)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                say("len", len(loader), sum(1 for _ in loader))
            say("warned", sum("samples have been fetched" in str(one.message) for one in caught))
        """,
    )
    assert said(ended)["len"] == ["5 12"] * 2
    assert said(ended)["warned"] == ["7"] * 2
