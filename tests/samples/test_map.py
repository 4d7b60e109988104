"""Map-style data: the good samples are stock torch's, bit for bit, and the bad ones are named."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, Subset, default_collate

from holdfast import BadSample, DataLoader, NoSubstitute, PoisonSample
from holdfast.options import RESTARTS_PER_WORKER
from tests.samples.datasets import AtOnce, Caught, Corrupt, Flaky, drawn, misbehave
from tests.samples.streams import indices, named, ours, rows, seeded, stock
from tests.support.processes import kill

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")]

KINDS = {
    "raises": ("raised", "ValueError"),
    "raises late": ("raised", "KeyError"),
    "None": ("none", ""),
    "exits politely": ("raised", "SystemExit"),
    "odd shape": ("collate", "RuntimeError"),
    "odd type": ("collate", "AttributeError"),
    "segfault": ("killed", "SIGSEGV"),
    "abort": ("killed", "SIGABRT"),
    "exit": ("killed", "exit code 7"),
    "kill": ("killed", "SIGKILL"),
    "stall": ("stalled", "stalled"),
}

# First and last of the epoch, two in a batch, a whole batch (20 to 23).
PLACES = [0, 5, 6, 20, 21, 22, 23, 39]


def expected(bad: dict[int, str]) -> dict[int, tuple[str, str]]:
    return {index: KINDS[how] for index, how in bad.items()}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("how", ["raises", "raises late", "None"])
def test_skipping_gives_what_a_dataset_that_catches_gives_with_stock_torch(
    how: str, workers: int
) -> None:
    bad = dict.fromkeys(PLACES, how)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": workers == 2, "num_workers": workers}
    (stream,), loader = ours(Corrupt(bad), on_bad_sample="skip", **options)
    assert [stream] == stock(Caught(bad), **options)
    assert named(loader) == expected(bad)
    assert {one.action for one in loader.bad_samples} == {"skipped"}


@pytest.mark.parametrize(
    "how",
    [
        "segfault",
        "kill",
        pytest.param("abort", marks=pytest.mark.slow),
        pytest.param("exit", marks=pytest.mark.slow),
    ],
)
def test_samples_that_end_their_worker_cost_themselves_only(how: str) -> None:
    bad = {0: how, 9: how, 10: how, 39: how}
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2}
    (stream,), loader = ours(Corrupt(bad), on_bad_sample="skip", **options)
    assert [stream] == stock(Caught(bad), **options)
    assert named(loader) == expected(bad)
    assert loader.bad_samples[0].name == "sample-0.bin"


def test_samples_that_stall_cost_themselves_only() -> None:
    bad = {6: "stall"}
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2}
    (stream,), loader = ours(Corrupt(bad), on_bad_sample="skip", stall_timeout=0.5, **options)
    assert [stream] == stock(Caught(bad), **options)
    assert named(loader) == expected(bad)
    assert (
        "sleep" in loader.bad_samples[0].traceback or "misbehave" in loader.bad_samples[0].traceback
    )


@pytest.mark.slow
def test_a_dozen_samples_that_kill_do_not_use_up_the_restarts() -> None:
    bad = dict.fromkeys(range(0, 24, 2), "segfault")
    (stream,), loader = ours(Corrupt(bad, 24), on_bad_sample="skip", batch_size=8, num_workers=1)
    assert indices(stream) == list(range(1, 24, 2))
    assert named(loader) == expected(bad)
    assert len(loader.incidents) == 24 > RESTARTS_PER_WORKER


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "how",
    [
        *("raises late", "None", "odd shape", "odd type"),
        pytest.param("segfault", marks=pytest.mark.slow),
    ],
)
def test_replacing_keeps_sizes_and_numbers_and_the_bytes_of_the_good(
    how: str, workers: int
) -> None:
    if workers == 0 and how == "segfault":
        pytest.skip("nothing survives that without workers")
    odd = how.startswith("odd")
    bad = dict.fromkeys([1, 7, 39], how) if odd else dict.fromkeys(PLACES, how)
    shuffle = workers == 0 and not odd
    options: dict[str, Any] = {"batch_size": 4, "shuffle": shuffle, "num_workers": workers}
    (stream,), loader = ours(Corrupt(bad), on_bad_sample="replace", **options)
    assert [len(batch) for batch in stream] == [4] * 10
    assert not set(indices(stream)) & set(bad)
    if how == "odd type" and not workers:  # torch has other words for it there
        assert {index: kind for index, (kind, _) in named(loader).items()} == dict.fromkeys(
            bad, "collate"
        )
    else:
        assert named(loader) == expected(bad)
    assert {one.action for one in loader.bad_samples} == {"replaced"}
    # Without the stand-ins it is what stock torch gives.
    good = {row for batch in stock(Caught(bad), **options)[0] for row in batch}
    assert good <= {row for batch in stream for row in batch}
    assert ours(Corrupt(bad), on_bad_sample="replace", **options)[0] == [stream]


def test_stand_ins_come_from_the_sampler_alone() -> None:
    """Samples that the sampler leaves out must not leak in; indices need not be numbers."""

    class Words(Corrupt):
        def __getitem__(self, index: Any) -> Any:
            assert index.startswith("train-"), "a held-out sample was loaded"
            return super().__getitem__(int(index.removeprefix("train-")))

    bad = {3: "raises", 4: "raises", 11: "raises", 12: "segfault"}
    sampler = [f"train-{number}" for number in range(20)]
    (stream,), loader = ours(
        Words(bad), sampler=sampler, batch_size=2, num_workers=2, on_bad_sample="replace"
    )
    assert [len(batch) for batch in stream] == [2] * 10
    assert set(indices(stream)) == set(range(20)) - set(bad)
    assert {one.index for one in loader.bad_samples} == {f"train-{number}" for number in bad}


@pytest.mark.parametrize("workers", [0, 1])
def test_all_of_the_first_batch_may_be_bad(workers: int) -> None:
    bad = dict.fromkeys(range(4), "raises")
    (stream,), _ = ours(Corrupt(bad), batch_size=4, num_workers=workers, on_bad_sample="replace")
    assert [len(batch) for batch in stream] == [4] * 10
    assert indices(stream)[4:] == list(range(4, 40))


@pytest.mark.parametrize("workers", [0, 1])
def test_with_nobody_to_stand_in_it_says_so(workers: int) -> None:
    bad = dict.fromkeys(range(40), "raises")
    loader = DataLoader(Corrupt(bad), batch_size=4, num_workers=workers, on_bad_sample="replace")
    with pytest.raises(NoSubstitute, match="no good sample was found to replace sample 0"):
        next(iter(loader))
    loader.close()


def test_the_same_after_a_death_in_the_middle_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad samples are found again when the batch is made again, and reported once."""
    bad = {1: "raises late", 2: "None", 9: "raises late", 17: "odd shape"}
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2}
    for policy in ("skip", "replace"):
        calm, loader = ours(Corrupt(bad), on_bad_sample=policy, **options)
        faults = "before-send:SIGKILL@task=0;after-collate:SIGSEGV@task=2,generation=1"
        monkeypatch.setenv("HOLDFAST_FAULTS", faults)
        stormy, another = ours(Corrupt(bad), on_bad_sample=policy, **options)
        monkeypatch.delenv("HOLDFAST_FAULTS")
        assert len(another.incidents) == 2
        assert stormy == calm
        assert named(another) == named(loader) == expected(bad)


@pytest.mark.parametrize("persistent", [False, True])
def test_in_later_epochs_nothing_known_to_be_bad_is_tried_again(
    persistent: bool, tmp_path: Path
) -> None:
    bad = {3: "raises", 17: "None", 18: "segfault"}
    dataset = Corrupt(bad, log=tmp_path / "log")
    options: dict[str, Any] = {
        "batch_size": 4,
        "shuffle": True,
        "num_workers": 2,
        "persistent_workers": persistent,
    }
    streams, loader = ours(dataset, on_bad_sample="skip", epochs=3, **options)
    assert streams == stock(Caught(bad), epochs=3, **options)
    assert [dataset.attempts(index) for index in bad] == [1, 1, 2]
    assert len(loader.bad_samples) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "policy"),
    [
        ("spawn", "replace"),
        pytest.param("spawn", "skip", marks=pytest.mark.slow),
        pytest.param("forkserver", "skip", marks=pytest.mark.slow),
        pytest.param("forkserver", "replace", marks=pytest.mark.slow),
    ],
)
def test_other_start_methods(method: str, policy: str) -> None:
    bad = {3: "raises late", 6: "segfault", 8: "None"}
    common: dict[str, Any] = {"batch_size": 4, "num_workers": 1, "on_bad_sample": policy}
    forked, _ = ours(Corrupt(bad, 12), **common)
    streams, loader = ours(Corrupt(bad, 12), multiprocessing_context=method, **common)
    assert streams == forked
    assert named(loader) == expected(bad)


# -- what may pass ------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_what_passes_leaves_no_trace(workers: int, tmp_path: Path) -> None:
    """It is tried again from the same random state."""
    flaky = Flaky({2, 9}, 2, tmp_path, OSError(errno.EIO, "Input/output error"))
    (stream,), loader = ours(flaky, batch_size=4, num_workers=workers, on_bad_sample="skip")
    assert [stream] == stock(Corrupt({}), batch_size=4, num_workers=workers)
    assert loader.bad_samples == []
    assert (tmp_path / "2").read_text() == "xxx"


def test_what_does_not_pass_is_given_up_after_three_times(tmp_path: Path) -> None:
    flaky = Flaky({2}, 5, tmp_path, ConnectionResetError("by peer"))
    streams, loader = ours(flaky, batch_size=4, num_workers=1, on_bad_sample="skip", epochs=2)
    assert [2 in indices(stream) for stream in streams] == [False, True]  # it is not banned
    (bad,) = loader.bad_samples
    assert (bad.attempts, bad.verdict) == (3, "transient")


def test_what_stays_is_tried_once(tmp_path: Path) -> None:
    flaky = Flaky({2}, 9, tmp_path, PermissionError(errno.EACCES, "Permission denied", "/data/x"))
    _, loader = ours(flaky, batch_size=4, num_workers=1, on_bad_sample="skip")
    assert (tmp_path / "2").read_text() == "x"
    (bad,) = loader.bad_samples
    assert (bad.attempts, bad.verdict, bad.name) == (1, "bad", "sample-2.bin")


# -- a function ---------------------------------------------------------------------------


def judge(bad: BadSample) -> Any:
    """By index: each kind of answer."""
    if bad.index == 1:
        return "skip"
    if bad.index == 6:
        return "replace"
    if bad.index == 9:
        return drawn(900)
    if bad.index == 13:
        return torch.full((4,), 1300, dtype=torch.float64)
    return "raise"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_decides_for_each(workers: int) -> None:
    bad = {1: "raises", 6: "None", 9: "odd shape"} | ({13: "segfault"} if workers else {})
    (stream,), loader = ours(
        Corrupt(bad, 20), batch_size=4, num_workers=workers, on_bad_sample=judge
    )
    found = indices(stream)
    assert found[:3] == [0, 2, 3]
    assert found[5] in set(range(20)) - set(bad)
    assert 900 in found
    assert (1300 in found) == bool(workers)
    assert {one.index: one.action for one in loader.bad_samples} == {
        1: "skipped",
        6: "replaced",
        9: "given",
    } | ({13: "given"} if workers else {})


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raises", ValueError),
        ("segfault", PoisonSample),
        ("odd shape", RuntimeError),
        ("None", AttributeError),  # what torch says of None among tensors
    ],
)
def test_a_function_that_says_raise_gets_the_error_as_ever(how: str, error: Any) -> None:
    loader = DataLoader(
        Corrupt({2: how}, 8), batch_size=4, num_workers=1, on_bad_sample=lambda bad: "raise"
    )
    iterator = iter(loader)
    with pytest.raises(error) as caught:
        next(iterator)
    if how == "raises":
        assert "raised by sample 2 (sample-2.bin; position 2 of 4 in batch 0, worker 0)" in str(
            caught.value
        )
    assert indices([rows(next(iterator))]) == [4, 5, 6, 7]
    assert [one.action for one in loader.bad_samples] == ["raised"]
    loader.close()


def test_a_function_that_fails_is_an_error_at_that_batch() -> None:
    def broken(bad: BadSample) -> Any:
        raise ZeroDivisionError("in the policy")

    loader = DataLoader(
        Corrupt({2: "raises"}, 8), num_workers=1, batch_size=4, on_bad_sample=broken
    )
    with pytest.raises(ZeroDivisionError, match="in the policy"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [4, 1, None])
def test_a_function_that_gets_the_word_wrong_is_told_the_words(
    size: int | None, workers: int
) -> None:
    loader = DataLoader(
        Corrupt({2: "raises"}, 8), batch_size=size, num_workers=workers,
        on_bad_sample=lambda bad: "retry",
    )  # fmt: skip
    with pytest.raises(ValueError, match="returned 'retry' for sample 2") as caught:
        list(loader)
    assert '"skip", "replace", "raise" or a sample' in str(caught.value)
    loader.close()


class Lines(Corrupt):
    def __getitem__(self, index: int) -> Any:
        return f"line {super().__getitem__(index)[0]:.0f}"


def test_text_may_stand_in_for_text() -> None:
    loader = DataLoader(
        Lines({2: "raises"}, 4), batch_size=4, num_workers=1, on_bad_sample=lambda bad: "retry"
    )
    assert list(loader) == [["line 0", "line 1", "retry", "line 3"]]
    loader.close()


# -- collation ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_the_odd_one_out_is_named_with_what_the_others_had(workers: int) -> None:
    (stream,), loader = ours(
        Corrupt({5: "odd shape", 7: "odd type"}, 12),
        batch_size=6,
        num_workers=workers,
        on_bad_sample="skip",
    )
    assert indices(stream) == [0, 1, 2, 3, 4, 6, 8, 9, 10, 11]
    messages = [one.message for one in loader.bad_samples]
    assert messages == [
        "it is a float64 tensor of shape (3,), the others had a float64 tensor of shape (4,)",
        "it is a str, the others had a float64 tensor of shape (4,)",
    ]


class Shades(Corrupt):
    """Some are grey. Two of them make a good one beside them the odd one."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 if self.bad.get(index) == "grey" else 3,), float(index))


def test_the_odd_one_of_a_batch_is_tried_again_in_others(tmp_path: Path) -> None:
    grey = {1: "grey", 2: "grey"}
    options: dict[str, Any] = {
        "num_workers": 1,
        "on_bad_sample": "skip",
        "quarantine": tmp_path / "bad.jsonl",
    }
    batches = [[0, 1, 2], [3, 4, 5]]
    loader = DataLoader(Shades(grey, 6), batch_sampler=batches, **options)
    for _ in range(2):
        assert [batch[:, 0].tolist() for batch in loader] == [[1, 2], [3, 4, 5]]
    (bad,) = loader.bad_samples
    assert (bad.index, bad.kind, bad.verdict) == (0, "collate", "odd")
    batches[:] = [[0, 3, 4], [1, 2]]
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 3, 4], [1, 2]]
    loader.close()
    with DataLoader(Shades(grey, 6), batch_sampler=[[0, 1, 2], [0, 5]], **options) as another:
        assert [batch[:, 0].tolist() for batch in another] == [[1, 2], [0, 5]]
    (line,) = (tmp_path / "bad.jsonl").read_text().splitlines()  # once, not once a run
    assert json.loads(line)["verdict"] == "odd"


def test_one_that_does_not_even_collate_alone_is_bad(tmp_path: Path) -> None:
    dataset = Corrupt({}, 8, log=tmp_path / "log")
    _, loader = ours(
        dataset, epochs=2, batch_size=4, num_workers=1, collate_fn=picky, on_bad_sample="skip"
    )
    assert {one.verdict for one in loader.bad_samples} == {"bad"}
    assert dataset.attempts(2) == 1


def picky(data: list[Any]) -> Any:
    """A collation of the user's that dislikes a value, not a shape."""
    for one in data:
        if int(one[0]) in (2, 3):
            raise ValueError("I do not like it")
    return default_collate(data)


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_a_collation_of_the_users_is_asked_who_it_is(policy: str) -> None:
    (stream,), loader = ours(
        Corrupt({}, 8), batch_size=4, num_workers=1, collate_fn=picky, on_bad_sample=policy
    )
    assert [len(batch) for batch in stream] == ([2, 4] if policy == "skip" else [4, 4])
    assert named(loader) == {2: ("collate", "ValueError"), 3: ("collate", "ValueError")}


def test_harmless_differences_are_no_guilt() -> None:
    """An int among floats collates; only the sample that does not fit is reported."""

    class Mixed(Corrupt):
        def __getitem__(self, index: int) -> Any:
            value: Any = 1 if index == 1 else 0.5
            return (value, torch.zeros(3 if index == 2 else 2), index)

    loader = DataLoader(Mixed({}, 8), batch_size=8, num_workers=1, on_bad_sample="skip")
    (batch,) = list(loader)
    assert batch[2].tolist() == [0, 1, 3, 4, 5, 6, 7]
    assert set(named(loader)) == {2}
    loader.close()


def test_when_nobody_can_be_singled_out_nobody_is() -> None:
    class Ragged(Corrupt):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(index + 1)

    loader = DataLoader(Ragged({}, 4), batch_size=4, num_workers=1, on_bad_sample="skip")
    with pytest.raises(RuntimeError, match="while collating batch 0"):
        list(loader)
    assert loader.bad_samples == []
    loader.close()


class Large(Corrupt):
    """Samples that are copied to their place as they are fetched."""

    def __getitem__(self, index: int) -> Any:
        how = self.bad.get(index)
        if how == "odd shape":
            return torch.zeros(3)
        sample = super().__getitem__(index)
        return None if sample is None else torch.cat([sample, torch.full((20_000,), float(index))])


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_large_samples_land_in_their_own_rows(policy: str) -> None:
    bad = {0: "raises", 5: "None", 6: "odd shape", 13: "segfault"}
    loader = DataLoader(Large(bad, 16), batch_size=4, num_workers=2, on_bad_sample=policy)
    seen = []
    for batch in loader:
        assert (batch[:, 4:] == batch[:, :1]).all()
        seen += batch[:, 0].int().tolist()
    assert set(seen) == set(range(16)) - set(bad)
    assert len(seen) == (12 if policy == "skip" else 16)
    loader.close()


# -- other ways to ask for samples --------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_without_batches(policy: str, workers: int) -> None:
    bad = {0: "raises", 5: "None", 19: "raises"} | ({7: "segfault"} if workers else {})
    (stream,), loader = ours(
        Corrupt(bad, 20), batch_size=None, num_workers=workers, on_bad_sample=policy
    )
    good = [index for index in range(20) if index not in bad]
    if policy == "skip":
        assert indices(stream) == good
    else:
        assert len(stream) == 20
        assert [i for at, i in enumerate(indices(stream)) if at not in bad] == good
        assert not set(indices(stream)) & set(bad)
    assert named(loader) == expected(bad)


def test_a_batch_sampler_of_the_users() -> None:
    batches = [(0, 1, 2), (3,), (4, 5, 6, 7), (3,)]
    bad = {1: "raises", 3: "None", 6: "segfault"}
    (stream,), loader = ours(
        Corrupt(bad, 8), batch_sampler=batches, num_workers=2, on_bad_sample="skip"
    )
    assert indices(stream) == [0, 2, 4, 5, 7]
    assert named(loader) == expected(bad)
    (stream,), loader = ours(
        Corrupt(bad, 8), batch_sampler=batches, num_workers=2, on_bad_sample="replace"
    )
    assert [len(batch) for batch in stream] == [3, 1, 4, 1]
    assert not set(indices(stream)) & set(bad)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_a_dataset_that_loads_many_at_once(policy: str, workers: int) -> None:
    bad = {1: "raises", 6: "None", 7: "raises"} | ({13: "segfault"} if workers else {})
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "on_bad_sample": policy}
    streams, loader = ours(AtOnce(bad, 16), epochs=2, **options)
    for stream in streams:
        assert set(indices(stream)) == set(range(16)) - set(bad)
        assert len(indices(stream)) == (16 if policy == "replace" else 16 - len(bad))
    assert named(loader) == expected(bad)


def test_a_subset_of_a_dataset() -> None:
    bad = {11: "raises", 13: "segfault", 19: "None"}
    part = Subset(Corrupt(bad, 20), list(range(10, 20)))
    (stream,), loader = ours(part, batch_size=4, num_workers=1, on_bad_sample="replace")
    assert set(indices(stream)) == {10, 12, 14, 15, 16, 17, 18}
    assert [one.name for one in loader.bad_samples] == [f"sample-{i}.bin" for i in (11, 13, 19)]


def test_a_sampler_may_give_a_bad_one_twice() -> None:
    bad = {2: "raises", 3: "segfault"}
    (stream,), loader = ours(
        Corrupt(bad, 8), sampler=[2, 3, 2, 0, 1, 2, 3, 4], batch_size=2, num_workers=1,
        on_bad_sample="skip",
    )  # fmt: skip
    assert indices(stream) == [0, 1, 4]
    assert named(loader) == expected(bad)


def test_batches_as_they_come() -> None:
    bad = {2: "raises", 3: "segfault", 9: "None"}
    (stream,), _ = ours(
        Corrupt(bad, 24), batch_size=4, num_workers=2, in_order=False, on_bad_sample="replace"
    )
    assert sorted(len(batch) for batch in stream) == [4] * 6
    assert set(indices(stream)) == set(range(24)) - set(bad)


class Columns(Corrupt):
    """Makes a whole batch itself; there are no samples to tell apart."""

    def __getitems__(self, indices: list[int]) -> Any:
        samples = torch.stack([self[index] for index in indices])
        return {"sample": samples, "twice": 2 * torch.tensor(indices)}


class Pairs(Columns):
    """The same as a tuple of two, which is also what a batch of two has."""

    def __getitems__(self, indices: list[int]) -> Any:
        return tuple(super().__getitems__(indices).values())


class OnlyMany(Columns):
    """There is no other way to its samples."""

    __getitem__ = Dataset.__getitem__

    def __getitems__(self, indices: list[int]) -> Any:
        samples = torch.stack([Corrupt.__getitem__(self, index) for index in indices])
        return {"sample": samples, "twice": 2 * torch.tensor(indices)}


def columns(batch: Any) -> Any:
    """A collation that takes what ``__getitems__`` makes, and nothing else."""
    if isinstance(batch, tuple):
        batch = dict(zip(("sample", "twice"), batch, strict=True))
    assert isinstance(batch, dict), f"collate_fn was given a {type(batch).__name__}"
    assert (2 * batch["sample"][:, 0] == batch["twice"]).all()
    return batch["sample"]


def test_a_batch_of_the_datasets_own_making_is_left_as_it_is() -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1, "collate_fn": columns}
    streams, _ = ours(Columns({}, 10), on_bad_sample="skip", **options)
    assert streams == stock(Columns({}, 10), **options)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("kind", [Columns, Pairs, OnlyMany])
def test_a_batch_of_the_datasets_own_making_is_made_again_without_the_bad(
    kind: type[Columns], policy: str, workers: int
) -> None:
    """The collate function never gets anything else, in any epoch."""
    bad = {1: "raises late", 6: "raises", 8: "raises", 9: "raises"}
    bad |= {13: "segfault"} if workers and kind is Columns else {}
    size = 2 if kind is Pairs else 4
    options: dict[str, Any] = {"batch_size": size, "num_workers": workers, "collate_fn": columns}
    streams, loader = ours(kind(bad, 16), epochs=3, on_bad_sample=policy, **options)
    for stream in streams:
        if policy == "skip":
            assert indices(stream) == [index for index in range(16) if index not in bad]
        else:
            assert [len(batch) for batch in stream] == [size] * (16 // size)
            own = [i for at, i in enumerate(indices(stream)) if at not in bad]
            assert own == [index for index in range(16) if index not in bad]
            assert not set(indices(stream)) & set(bad)
    assert named(loader) == expected(bad)


def test_a_bad_sample_draws_nothing_in_a_batch_of_the_datasets_own_making() -> None:
    """Whether found now or known before: the batch is as if the sampler had not given it."""
    kept = [[0, 2, 3], [4, 5, 6, 7]]
    options: dict[str, Any] = {"num_workers": 1, "collate_fn": columns}
    streams, _ = ours(
        Columns({1: "raises late"}, 8), epochs=2, batch_size=4, on_bad_sample="skip", **options
    )
    assert streams == stock(Columns({}, 8), epochs=2, batch_sampler=kept, **options)


class Jammed(Columns):
    """Two that can be loaded one by one, but not together."""

    def __getitems__(self, indices: list[int]) -> Any:
        if {5, 6} <= set(indices):
            raise ValueError("5 and 6 do not go together")
        return super().__getitems__(indices)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_fails_though_all_its_samples_are_good_is_an_error(workers: int) -> None:
    loader = DataLoader(
        Jammed({}, 12), batch_size=4, num_workers=workers, collate_fn=columns, on_bad_sample="skip"
    )
    iterator = iter(loader)
    assert len(next(iterator)) == 4
    with pytest.raises(ValueError, match="5 and 6 do not go together"):
        next(iterator)
    assert len(next(iterator)) == 4
    assert loader.bad_samples == []
    loader.close()


@pytest.mark.parametrize("known", [False, True])
def test_there_is_no_place_for_a_given_sample_in_a_batch_of_the_datasets_own_making(
    known: bool,
) -> None:
    loader = DataLoader(
        Columns({1 if known else 0: "raises"}, 4), batch_size=2, collate_fn=columns, num_workers=1,
        on_bad_sample=lambda bad: torch.zeros(4), sampler=[2, 3, 0, 1] if known else None,
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"on_bad_sample returned a Tensor for sample .*__getitems"):
        list(loader)
    loader.close()


# -- indices that are objects -------------------------------------------------------------


class Ticket:
    """Python's own ``repr`` and equality."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True)
class Place:
    number: int


@dataclass
class Unhashable:
    number: int


class Numbered(Corrupt):
    def sample_name(self, index: Any) -> str:
        raise LookupError("they have no names")

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index.number)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("kind", [Ticket, Place, Unhashable])
def test_an_object_as_index_bans_itself_alone(
    kind: type[Any], policy: str, workers: int, tmp_path: Path
) -> None:
    bad = {2: "raises"} | ({5: "segfault"} if workers else {})
    dataset = Numbered(bad, 8, log=tmp_path / "log")
    options: dict[str, Any] = {
        "batch_size": 2,
        "num_workers": workers,
        "on_bad_sample": policy,
        "quarantine": tmp_path / "bad.jsonl",
    }
    sampler = [kind(number) for number in range(8)]
    streams, loader = ours(dataset, epochs=3, sampler=sampler, **options)
    for stream in streams:
        assert set(indices(stream)) == set(range(8)) - set(bad)
    attempts = {index: dataset.attempts(index) for index in bad}
    assert attempts == {2: 1} | ({5: 2} if workers else {})  # of its crash it is tried alone too
    assert {one.index.number for one in loader.bad_samples} == set(bad)
    # In another run they are known only if their description says who they are.
    again = Numbered({}, 8, log=tmp_path / "again")
    ours(again, sampler=[kind(number) for number in range(8)], **options)
    assert (again.attempts(2) == 0) == (kind is not Ticket)


# -- innocence ----------------------------------------------------------------------------


class Neighbours(Corrupt):
    """Sample 6 ends its worker only after sample 5 was loaded by the same process."""

    ran = -1

    def __getitem__(self, index: int) -> Any:
        if index == 6 and Neighbours.ran == 5:
            os._exit(9)
        Neighbours.ran = index
        return super().__getitem__(index)


def test_one_that_does_no_harm_alone_is_not_left_out() -> None:
    loader = DataLoader(Neighbours({}, 8), batch_size=4, num_workers=1, on_bad_sample="skip")
    iterator = iter(loader)
    assert indices([rows(next(iterator))]) == [0, 1, 2, 3]
    with pytest.raises(PoisonSample, match="samples did not end their worker, so none is left out"):
        next(iterator)
    assert loader.bad_samples == []
    loader.close()


class Pressed(Corrupt):
    """Sample 6 is killed from outside, as for lack of memory, as often as `folder` lacks marks."""

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__({}, size)
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index == 6 and len(list(self.folder.iterdir())) < 3:
            (self.folder / str(os.getpid())).touch()
            signal.raise_signal(signal.SIGKILL)
        return sample


@pytest.mark.slow
def test_a_death_by_memory_blames_nobody_unless_it_happens_alone_again(tmp_path: Path) -> None:
    """Killed twice in its batch, once alone, and then never: the sample is not bad."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1}
    (stream,), loader = ours(Pressed(12, tmp_path), on_bad_sample="skip", **options)
    assert [stream] == stock(Corrupt({}, 12), **options)
    assert loader.bad_samples == []
    assert [one.signal for one in loader.incidents] == ["SIGKILL"] * 3


class Slow(Corrupt):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", pytest.param("replace", marks=pytest.mark.slow)])
def test_blows_from_outside_change_nothing_and_blame_nobody(policy: str) -> None:
    bad = {5: "raises late", 17: "segfault", 40: "None", 71: "exit", 72: "odd shape"}
    options: dict[str, Any] = {
        "batch_size": 8,
        "num_workers": 2,
        "on_bad_sample": policy,
        "max_restarts": None,
    }
    calm, _ = ours(Slow(bad, 240), **options)
    seeded()
    loader = DataLoader(Slow(bad, 240), **options)
    iterator = iter(loader)
    dice = random.Random(3)
    stormy = []
    for number, batch in enumerate(iterator):
        stormy.append(rows(batch))
        if number % 3 == 0:
            with contextlib.suppress(ProcessLookupError):
                kill(iterator._workers[dice.randrange(2)].pid)
    loader.close()
    assert [stormy] == calm
    assert named(loader) == expected(bad)
    assert sum(one.signal == "SIGKILL" for one in loader.incidents) >= 4


def test_nothing_changes_without_bad_samples() -> None:
    """A policy that nothing needs changes nothing."""
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 2}
    for policy in ("raise", "skip", "replace"):
        streams, loader = ours(Corrupt({}), on_bad_sample=policy, epochs=2, **options)
        assert streams == stock(Corrupt({}), epochs=2, collate_fn=None, **options)
        assert loader.bad_samples == []


# -- one sample or a batch of them: the loader knows, the type does not tell -----------------------


class Rows(Dataset[Any]):
    """Takes any key; a key that holds `bad` does what it does."""

    def __init__(self, bad: int, how: str) -> None:
        self.bad, self.how = bad, how

    def __len__(self) -> int:
        return 12

    def __getitem__(self, key: Any) -> Any:
        if self.bad in (key if isinstance(key, list) else [key]):
            misbehave(self.how, self.bad)
        return key


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_list_is_one_sample_where_batches_are_not_made(num_workers: int) -> None:
    """As torch's own documentation has it: a sampler of batches, and batch_size=None."""
    sampler = BatchSampler(range(12), 4, drop_last=False)
    loader = DataLoader(
        Rows(5, "raises"),
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        on_bad_sample="replace",
    )
    stream = list(loader)
    assert stream[0] == [0, 1, 2, 3]
    assert stream[1] in ([0, 1, 2, 3], [8, 9, 10, 11])
    assert stream[2] == [8, 9, 10, 11]
    assert [bad.index for bad in loader.bad_samples] == [[4, 5, 6, 7]]


def test_a_list_that_kills_is_left_out_and_no_other_that_begins_like_it() -> None:
    keys = [[8, 1], [8, 9], [2, 3], [8, 1]]
    loader = DataLoader(
        Rows(9, "segfault"), batch_size=None, sampler=keys, num_workers=1, on_bad_sample="skip"
    )
    assert list(loader) == [[8, 1], [2, 3], [8, 1]]
    assert [bad.index for bad in loader.bad_samples] == [[8, 9]]


class Arrays:
    """A batch sampler whose batches are arrays, or tensors."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __iter__(self) -> Any:
        for start in range(0, 12, 4):
            yield self.make(list(range(start, start + 4)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [np.array, torch.tensor, tuple, list])
@pytest.mark.parametrize("how", ["raises", "segfault"])
def test_a_batch_may_be_an_array(make: Any, how: str) -> None:
    loader = DataLoader(
        Rows(6, how),
        batch_sampler=Arrays(make),
        num_workers=1,
        on_bad_sample="skip",
        max_bad_samples=0.2,
        collate_fn=list,
    )
    for _ in range(2):
        stream = [int(key) for batch in loader for key in batch]
        assert stream == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert [int(bad.index) for bad in loader.bad_samples] == [6]


class Reusing:
    """Gives one and the same list again and again."""

    def __iter__(self) -> Any:
        batch = [0, 0]
        for start in range(0, 40, 2):
            batch[:] = (start, start + 1)
            yield batch


@pytest.mark.parametrize("policy", ["raise", "replace"])
def test_a_sampler_may_use_its_list_again(policy: Any) -> None:
    loader = DataLoader(Plain(), batch_sampler=Reusing(), num_workers=2, on_bad_sample=policy)
    batches = iter(loader)
    seen = next(batches).tolist()
    for worker in batches._workers:
        kill(worker.pid)
    for batch in batches:
        seen += batch.tolist()
    assert seen == list(range(40))


class Plain(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index
