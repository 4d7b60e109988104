"""Batches that are pinned where they are, with the driver of an accelerator that is none. CUDA's has not been tried."""

from __future__ import annotations

import textwrap

import pytest

from tests.accelerators.playing import play as play_it
from tests.accelerators.playing import said
from tests.lifecycle.trainer import Ended, Stage

IN_PLACE = """
from holdfast.transport.pinned_in_place import sweep  # the next loader of this kind would call it

def in_place():
    slate.pin_in_place()
    torch.zeros(1).pin_memory()  # else torch takes nothing for pinned

"""


def play(stage: Stage, body: str) -> Ended:
    return play_it(stage, IN_PLACE + textwrap.dedent(body))


@pytest.mark.parametrize(
    "options",
    ["shuffle=True", "persistent_workers=True", "in_order=False, num_workers=1"],
)
@pytest.mark.faults
def test_no_copy_is_made_and_streams_are_torchs_although_workers_are_killed(
    stage: Stage, options: str
) -> None:
    ended = play(
        stage,
        f"""
        in_place()
        streams = []
        for kind in (Stock, DataLoader):
            ours = kind is DataLoader
            torch.manual_seed(3)
            more = dict(pin_in_place="auto", max_restarts=None) if ours else {{}}
            loader = kind(Images(24, 1 << 19), batch_size=2, pin_memory=True,
                          **{{"num_workers": 2, **dict({options})}}, **more)
            before = slate.count("allocations")
            seen = [
                stream_of(loader, lambda number, iterator: ours and number % 4 == 1 and kill(iterator, 0))
                for _ in range(2)
            ]
            streams.append(seen)
        say("equal", streams[0] == streams[1])
        say("copies", slate.count("allocations") - before)
        say("deaths", len(loader.incidents))
        loader.close()
        del loader
        say("registered", eventually(lambda: sweep() or slate.count("registered") == 0))
        """,
    )
    assert said(ended)["equal"] == ["True"]
    assert said(ended)["copies"] == ["0"]
    assert int(said(ended)["deaths"][0]) > 0
    assert said(ended)["registered"] == ["True"]


def test_a_worker_does_not_write_where_a_copy_may_still_be_reading(stage: Stage) -> None:
    """The device does nothing for a while. What it would have to read is still there when it goes on."""
    ended = play(
        stage,
        """
        import ctypes

        in_place()
        slate.Fence.stopped = True
        iterator = iter(DataLoader(Images(60, 1 << 20), num_workers=1, pin_memory=True,
                                   pin_in_place="auto"))
        readers = []
        for number in range(20):
            batch = next(iterator)
            readers.append((ctypes.c_ubyte * (1 << 20)).from_address(batch.data_ptr()))
            del batch
        say("unchanged", [reader[100] for reader in readers] == list(range(20)))
        say("copies", slate.count("allocations") - 1)
        places = len({ctypes.addressof(reader) for reader in readers})
        slate.Fence.stopped = False
        later = set()
        for number in range(20, 60):
            batch = next(iterator)
            later.add(batch.data_ptr())
            say("right", int(batch[0, 100]) == number)
            del batch
        say("places", places, len(later) < 40)
        """,
    )
    assert said(ended)["unchanged"] == ["True"]
    assert said(ended)["copies"] == ["0"]
    assert set(said(ended)["right"]) == {"True"}
    assert said(ended)["places"] == ["20 True"]


def test_a_batch_that_is_kept_stays_pinned_and_registered_after_the_end_of_its_loader(
    stage: Stage,
) -> None:
    ended = play(
        stage,
        """
        in_place()
        def loader():
            return DataLoader(Images(12, 1 << 20), num_workers=2, pin_memory=True, pin_in_place="auto")

        batches = list(loader())
        say("pinned", all(batch.is_pinned() for batch in batches), slate.count("registered") >= 12 << 20)
        kept = batches[5]
        del batches
        say("kept", eventually(lambda: sweep() or slate.count("registered") == 1 << 20), int(kept[0, 100]))
        say("still", kept.is_pinned())
        del kept
        say("gone", eventually(lambda: sweep() or slate.count("registered") == 0))
        """,
    )
    assert said(ended)["pinned"] == ["True True"]
    assert said(ended)["kept"] == ["True 5"]
    assert said(ended)["still"] == ["True"]
    assert said(ended)["gone"] == ["True"]


def test_batches_of_any_size_are_right_wherever_they_lie(stage: Stage) -> None:
    ended = play(
        stage,
        """
        class Sizes(Images):
            def __getitem__(self, index):
                size = (1 << 18) + index * 7919 % 5 * (1 << 20) + index % 3 * 4096
                return torch.full((size,), index, dtype=torch.uint8), torch.full((5000,), index)

        def collate(samples):
            return {"large": samples[0][0], "small": samples[0][1], "array": samples[0][0].numpy()}

        in_place()
        loader = DataLoader(Sizes(60), num_workers=2, pin_memory=True, pin_in_place="auto",
                            collate_fn=collate)
        right, recent = True, []
        for number, batch in enumerate(loader):
            recent = [*recent[-3:], (number, batch)]
            for index, one in recent:
                right &= one["large"].is_pinned() and one["small"].is_pinned()
                right &= bool((one["large"] == index).all() and (one["array"] == index).all())
        say("right", right, number)
        """,
    )
    assert said(ended)["right"] == ["True 59"]


def test_if_registering_fails_batches_are_copied_and_one_line_says_so(stage: Stage) -> None:
    ended = play(
        stage,
        """
        in_place()
        slate.HostMemory.register = lambda *_: "error 2"
        loader = DataLoader(Images(12, 1 << 20), num_workers=2, pin_memory=True, pin_in_place="1GiB",
                            name="train")
        for _ in range(2):
            say("right", [int(batch[0, 100]) for batch in loader if batch.is_pinned()] == list(range(12)))
        """,
    )
    assert said(ended)["right"] == ["True"] * 2
    assert ended.err.splitlines() == [
        "[train] batches are copied to pinned memory, not pinned in place: error 2"
    ]


def test_no_more_is_registered_than_the_limit_allows(stage: Stage) -> None:
    ended = play(
        stage,
        """
        in_place()
        loader = DataLoader(Images(24, 1 << 20), num_workers=2, pin_memory=True, pin_in_place="3MiB")
        most, seen = 0, []
        for batch in loader:
            seen.append(batch)
            most = max(most, slate.count("registered"))
        say("most", most >> 20, all(batch.is_pinned() for batch in seen), slate.count("allocations") - 1)
        say("right", [int(batch[0, 100]) for batch in seen] == list(range(24)))
        """,
    )
    assert said(ended)["most"] == ["3 True 21"]
    assert said(ended)["right"] == ["True"]


def test_without_cuda_batches_are_copied_and_one_line_says_so(stage: Stage) -> None:
    ended = play(
        stage,
        """
        loader = DataLoader(Images(4), num_workers=1, pin_memory=True, pin_in_place="auto", name="train")
        for _ in range(2):
            say("pinned", [batch.is_pinned() for batch in loader])
        """,
    )
    assert said(ended)["pinned"] == [str([True] * 4)] * 2
    assert ended.err.splitlines() == [
        "[train] batches are copied to pinned memory, not pinned in place: it needs CUDA or ROCm, and the accelerator "
        "is slate"
    ]
