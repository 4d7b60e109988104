"""The loader around it: limits, the quarantine, warnings, options."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from holdfast import BadSample, BadSampleWarning, DataLoader, TooManyBadSamples, WorkerError
from holdfast.options import parse
from holdfast.samples.policy import Limit
from tests.samples.datasets import Caught, Corrupt, Flaky, Patient
from tests.samples.streams import indices, named, ours, rows, stock
from tests.support.scripts import run_script

pytestmark = pytest.mark.faults

quiet = pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")


# -- how many are too many ----------------------------------------------------------------


@quiet
@pytest.mark.parametrize("workers", [0, 2])
def test_beyond_a_count_it_stops_with_a_summary(workers: int) -> None:
    bad = dict.fromkeys(range(3, 40, 4), "raises")
    loader = DataLoader(
        Corrupt(bad), batch_size=4, num_workers=workers, on_bad_sample="skip", max_bad_samples=4
    )
    seen: Any = []
    with pytest.raises(TooManyBadSamples) as caught:
        seen.extend(map(rows, loader))
    assert indices(seen) == [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]
    text = str(caught.value)
    assert text.startswith("[Corrupt] 5 bad samples are more than max_bad_samples=4.")
    assert "By cause: 5 ValueError." in text
    assert "sample 3 (sample-3.bin) raised ValueError: sample 3 is corrupt" in text
    assert len(loader.bad_samples) == 5


@quiet
def test_a_count_is_over_all_epochs_and_counts_each_once() -> None:
    loader = DataLoader(
        Corrupt({3: "raises", 5: "None"}), num_workers=1, batch_size=4, on_bad_sample="skip",
        max_bad_samples=2,
    )  # fmt: skip
    for _ in range(3):
        assert sum(len(batch) for batch in loader) == 38
    assert len(loader.bad_samples) == 2


@quiet
@pytest.mark.parametrize("how", ["raises", pytest.param("segfault", marks=pytest.mark.slow)])
def test_a_dead_mount_is_not_skipped_through(how: str) -> None:
    bad = dict.fromkeys(range(100, 10_000), how)
    loader = DataLoader(
        Corrupt(bad, 10_000), batch_size=10, num_workers=1, on_bad_sample="skip",
        max_bad_samples=0.1,
    )  # fmt: skip
    with pytest.raises(TooManyBadSamples, match=r"more than max_bad_samples=0\.1"):
        list(loader)
    assert len(loader.bad_samples) < 50
    loader.close()


@quiet
def test_a_fraction_is_judged_at_the_end_of_a_short_epoch_and_not_before() -> None:
    loader = DataLoader(
        Corrupt({0: "raises"}, 8), batch_size=4, on_bad_sample="skip", max_bad_samples=0.1
    )
    iterator = iter(loader)
    assert [len(next(iterator)) for _ in range(2)] == [3, 4]
    with pytest.raises(TooManyBadSamples, match=r"1 bad samples among 8 are 12\.5%"):
        next(iterator)


@quiet
@pytest.mark.parametrize("workers", [0, 1])
def test_when_all_are_bad_the_epoch_does_not_just_end(workers: int) -> None:
    bad = dict.fromkeys(range(8), "raises")
    loader = DataLoader(Corrupt(bad, 8), batch_size=4, num_workers=workers, on_bad_sample="skip")
    with pytest.raises(TooManyBadSamples, match="all 8 samples of this epoch were bad"):
        list(loader)
    loader.close()


@quiet
def test_a_thousand_bad_ones_in_a_row_are_no_accident() -> None:
    bad = dict.fromkeys(range(50, 100_000), "raises")
    loader = DataLoader(Corrupt(bad, 100_000), batch_size=50, num_workers=1, on_bad_sample="skip")
    with pytest.raises(TooManyBadSamples, match="1000 samples in a row were bad"):
        list(loader)
    loader.close()


# -- the quarantine -----------------------------------------------------------------------


@quiet
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_what_is_in_the_quarantine_is_not_tried_again_by_anybody(
    policy: str, tmp_path: Path
) -> None:
    bad = {3: "raises", 6: "None", 9: "segfault"}
    path = tmp_path / "bad.jsonl"
    options: dict[str, Any] = {
        "batch_size": 4,
        "num_workers": 1,
        "on_bad_sample": policy,
        "quarantine": path,
    }
    first, _ = ours(Corrupt(bad, 12), **options)
    assert {json.loads(line)["index"] for line in path.read_text().splitlines()} == set(bad)
    before = path.read_bytes()
    dataset = Corrupt(bad, 12, log=tmp_path / "log")
    again, loader = ours(dataset, epochs=2, **options)
    assert again[:1] == first
    assert [dataset.attempts(index) for index in bad] == [0, 0, 0]
    assert named(loader) == {3: ("raised", "ValueError"), 6: ("none", ""), 9: ("killed", "SIGSEGV")}
    assert loader.incidents == []
    assert path.read_bytes() == before  # each is written once


@quiet
def test_a_function_that_says_raise_gets_an_error_for_a_known_one_too(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    ours(Corrupt({3: "raises"}, 8), on_bad_sample="skip", quarantine=path)
    loader = DataLoader(
        Corrupt({3: "raises"}, 8), batch_size=4, num_workers=1, quarantine=path,
        on_bad_sample=lambda bad: "raise",
    )  # fmt: skip
    with pytest.raises(WorkerError, match=r"sample 3 .* It was known, and was not loaded again"):
        next(iter(loader))
    loader.close()


@quiet
def test_a_loader_learns_from_others_with_the_next_epoch(tmp_path: Path) -> None:
    bad = {3: "raises", 9: "raises"}
    options: dict[str, Any] = {"on_bad_sample": "skip", "quarantine": tmp_path / "bad.jsonl"}
    dataset = Corrupt(bad, 12, log=tmp_path / "log")
    one = DataLoader(dataset, sampler=[0, 1, 9], **options)
    other = DataLoader(dataset, sampler=[3, 9, 4], **options)
    for _ in range(3):
        assert len(list(one)) == 2
        assert len(list(other)) == 1
    assert dataset.attempts(9) == 1


@quiet
def test_an_index_of_another_dataset_or_with_another_name_is_tried(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    ours(Corrupt({3: "raises"}, 8), on_bad_sample="skip", quarantine=path)

    class Other(Corrupt):
        pass

    class Renamed(Corrupt):
        def sample_name(self, index: int) -> str:
            return f"new-{index}"

    Renamed.__module__, Renamed.__qualname__ = Corrupt.__module__, Corrupt.__qualname__
    for dataset in (Other({}, 8), Renamed({}, 8)):
        (stream,), _ = ours(dataset, on_bad_sample="skip", quarantine=path)
        assert indices(stream) == list(range(8))
    (stream,), _ = ours(Corrupt({}, 8), on_bad_sample="skip", quarantine=path)
    assert indices(stream) == [0, 1, 2, 4, 5, 6, 7]


class Pictures(Dataset[int]):
    """Has no names for its samples; its errors have."""

    def __init__(self, root: str, bad: int | None = None) -> None:
        self.root, self.bad = root, bad

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise OSError(f"cannot identify image file '{self.root}/{index}.jpg'")
        return index


@quiet
def test_a_list_for_training_does_not_ban_samples_of_validation(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 8, "on_bad_sample": "skip"}
    options["quarantine"] = tmp_path / "bad.jsonl"
    for root, bad, size in (("train", 2, 7), ("val", None, 8), ("train", None, 7), ("val", 2, 7)):
        (batch,) = DataLoader(Pictures(root, bad), **options)
        assert len(batch) == size, root
    names = [json.loads(line)["name"] for line in options["quarantine"].read_text().splitlines()]
    assert names == ["train/2.jpg", "val/2.jpg"]


@quiet
@pytest.mark.parametrize(
    ("dataset", "line", "bans"),
    [
        (Corrupt({}, 8), {"index": 3, "kind": "none", "name": "sample-3.bin"}, True),
        (Corrupt({}, 8), {"index": 3, "kind": "none", "name": "sample-4.bin"}, False),
        (Corrupt({}, 8), {"index": 3, "kind": "none"}, True),
        (Pictures("a"), {"index": 3, "kind": "none", "name": "sample-4.bin"}, True),
        (Pictures("a"), {"index": 3, "kind": "none"}, True),
        (Pictures("a"), {"index": 3, "kind": "none", "dataset": "another"}, False),
    ],
)
def test_a_line_that_names_no_dataset_is_for_all_whose_names_do_not_say_otherwise(
    dataset: Any, line: dict[str, Any], bans: bool, tmp_path: Path
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(line) + "\n")
    (batch,) = DataLoader(dataset, batch_size=8, on_bad_sample="skip", quarantine=path)
    assert len(batch) == (7 if bans else 8)


@quiet
def test_one_listed_as_passing_is_listed_again_when_it_stays(tmp_path: Path) -> None:
    options: dict[str, Any] = {"on_bad_sample": "skip", "quarantine": tmp_path / "bad.jsonl"}
    loader = DataLoader(Flaky({2}, 3, tmp_path, TimeoutError("busy")), **options)
    assert len(list(loader)) == 39
    loader.dataset.error = ValueError("it is broken after all")  # type: ignore[attr-defined]
    loader.dataset.times = 9  # type: ignore[attr-defined]
    for _ in range(2):
        assert len(list(loader)) == 39
    lines = options["quarantine"].read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == ["transient", "bad"]


def test_a_quarantine_that_is_no_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null", "/dev/zero"):
        with pytest.raises(ValueError, match="is a pipe, socket or device") as caught:
            DataLoader([1], on_bad_sample="skip", quarantine=path)
        assert f"quarantine={path!r}" in str(caught.value)
        assert "bad.jsonl" in str(caught.value)


@quiet
def test_what_may_pass_is_listed_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    options: dict[str, Any] = {"on_bad_sample": "skip", "quarantine": path}
    flaky = Flaky({2}, 3, tmp_path, TimeoutError("the server is busy"))
    (stream,), _ = ours(flaky, **options)
    assert 2 not in indices(stream)
    assert json.loads(path.read_text())["verdict"] == "transient"
    (stream,), _ = ours(flaky, **options)
    assert 2 in indices(stream)


@quiet
def test_a_damaged_quarantine_is_told_and_used_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"index": 3, "kind": "raised"}\nnot json\n{"index": 5, "kind": "none"}\n')
    loader = DataLoader(Corrupt({}, 8), on_bad_sample="skip", quarantine=str(path))
    with pytest.warns(BadSampleWarning, match=r"line 2 of .*bad\.jsonl is damaged"):
        assert len(list(loader)) == 6
    assert "not json" in path.read_text()


@quiet
def test_a_quarantine_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    loader = DataLoader(
        Corrupt({1: "raises"}, 8), on_bad_sample="skip", quarantine=folder / "bad.jsonl"
    )
    iterator = iter(loader)
    next(iterator)
    folder.rmdir()
    with pytest.warns(BadSampleWarning, match="cannot be written"):
        assert len(list(iterator)) == 6
    assert len(loader.bad_samples) == 1


@quiet
def test_elements_of_a_stream_are_listed_though_they_cannot_be_found_again(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    stream = Patient({3: "raises"}, 8)
    streams, loader = ours(stream, epochs=2, on_bad_sample="skip", quarantine=path)
    assert [indices(one) for one in streams] == [[0, 1, 2, 4, 5, 6, 7]] * 2
    (line,) = path.read_text().splitlines()  # once, not once an epoch
    assert json.loads(line)["index"] is None
    assert len(loader.bad_samples) == 1


# -- what is said -------------------------------------------------------------------------


def said(loader: Any, epochs: int = 1) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for _ in loader:
                pass
    # The test process has threads, and says so at every fork.
    caught = [one for one in caught if "use of fork()" not in str(one.message)]
    assert all(issubclass(one.category, BadSampleWarning) for one in caught)
    assert {Path(one.filename).name for one in caught} <= {"test_loader.py"}
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_line_for_the_first_of_each_kind_and_one_at_the_end(workers: int) -> None:
    bad = dict.fromkeys(range(0, 200, 2), "raises") | dict.fromkeys(range(1, 60, 2), "None")
    loader = DataLoader(Corrupt(bad, 400), batch_size=4, num_workers=workers, on_bad_sample="skip")
    first, second, summary = said(loader)
    loader.close()
    assert first.startswith(
        "holdfast: [Corrupt] sample 0 (sample-0.bin) raised ValueError: sample 0 is corr"
    )
    assert second.startswith("holdfast: [Corrupt] sample 1 (sample-1.bin) was None; skipped.")
    assert summary == (
        "holdfast: [Corrupt] 130 bad samples among 400 in epoch 0: 100 ValueError, 30 None; "
        "130 skipped. See loader.bad_samples."
    )


def test_later_epochs_are_summed_up_only() -> None:
    loader = DataLoader(Corrupt({3: "raises"}, 8), on_bad_sample="skip")
    lines = said(loader, epochs=3)
    assert len(lines) == 4
    summary = "holdfast: [Corrupt] 1 bad sample among 8 in "
    assert [line[: len(summary)] for line in lines[1:]] == [summary] * 3


def test_nothing_is_said_when_all_is_well() -> None:
    assert said(DataLoader(Corrupt({}, 8), on_bad_sample="skip")) == []


DISTRIBUTED = """
import os, sys, tempfile, warnings
import torch.distributed as dist
from tests.samples.datasets import Corrupt

folder = tempfile.mkdtemp()
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
for policy in ("skip", "replace"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(Corrupt({3: "raises"}, 8), batch_size=4, on_bad_sample=policy)
        for _ in range(2):
            list(loader)
    uneven = [one for one in caught if "ranks of this distributed run" in str(one.message)]
    assert len(uneven) == (policy == "skip"), (policy, [str(one.message) for one in caught])
dist.destroy_process_group()
if child:
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_in_distributed_training_skipping_says_once_what_it_can_do() -> None:
    ended = run_script("holdfast", DISTRIBUTED)
    assert ended.code == 0, ended.err


# -- options ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "right"),
    [
        ("on_bad_sample", "ignore", '"skip"'),
        ("on_bad_sample", None, '"skip"'),
        ("on_bad_sample", 3, '"skip"'),
        ("max_bad_samples", -1, "0.01"),
        ("max_bad_samples", 1.5, "0.01"),
        ("max_bad_samples", 0.0, "0.01"),
        ("max_bad_samples", True, "0.01"),
        ("max_bad_samples", "5", "0.01"),
        ("max_bad_samples", float("nan"), "0.01"),
        ("quarantine", 5, "bad.jsonl"),
        ("quarantine", b"bad.jsonl", "bad.jsonl"),
        ("quarantine", "/no/such/folder/bad.jsonl", "bad.jsonl"),
        ("quarantine", "/tmp", "bad.jsonl"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_would_be_right(
    option: str, value: Any, right: str
) -> None:
    options: dict[str, Any] = {"on_bad_sample": "skip", option: value}
    with pytest.raises((TypeError, ValueError)) as caught:
        DataLoader([1], **options)
    assert f"{option}={value!r}" in str(caught.value)
    assert right in str(caught.value)


@pytest.mark.parametrize("option", [{"max_bad_samples": 3}, {"quarantine": "bad.jsonl"}])
def test_what_has_no_meaning_is_not_taken_silently(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match='has no meaning with on_bad_sample="raise"'):
        DataLoader([1], **option)


@pytest.mark.parametrize(
    ("given", "meant"),
    [(None, Limit()), (0, Limit(count=0)), (7, Limit(count=7)), (0.25, Limit(fraction=0.25))],
)
def test_max_bad_samples(given: Any, meant: Limit) -> None:
    options = parse(
        max_restarts=1, stall_timeout=1, num_workers=1, on_bad_sample="skip", max_bad_samples=given
    )
    assert options.limit == meant


def test_options_are_kept_as_they_were_given(tmp_path: Path) -> None:
    def judge(bad: Any) -> str:
        return "skip"

    given = {"on_bad_sample": judge, "max_bad_samples": 0.5, "quarantine": tmp_path / "b.jsonl"}
    loader = DataLoader([1], **given)  # type: ignore[arg-type]
    assert {name: getattr(loader, name) for name in given} == given


@quiet
def test_options_may_be_changed_between_epochs() -> None:
    loader = DataLoader(Corrupt({3: "raises"}, 8), batch_size=4, num_workers=1)
    with pytest.raises(ValueError, match="sample 3 is corrupt"):
        list(loader)
    loader.on_bad_sample = "skip"
    assert [len(batch) for batch in loader] == [3, 4]
    loader.close()


def test_a_function_that_does_not_pickle_is_named() -> None:
    loader = DataLoader(
        Corrupt({}, 4), num_workers=1, multiprocessing_context="spawn",
        on_bad_sample=lambda bad: "skip",
    )  # fmt: skip
    with (
        pytest.warns(UserWarning, match="pickle"),
        pytest.raises(Exception, match=r"on_bad_sample.*cannot be pickled"),
    ):
        iter(loader)


@quiet
def test_counters_count_batches_that_came() -> None:
    bad = dict.fromkeys(range(4, 8), "raises")
    streams, loader = ours(Corrupt(bad, 12), batch_size=4, num_workers=1, on_bad_sample="skip")
    assert loader.stats()["batches"] == len(streams[0]) == 2
    assert streams == stock(Caught(bad, 12), batch_size=4, num_workers=1)


class Broken(Dataset[int]):
    """The first `bad` of them raise."""

    def __init__(self, size: int, bad: int, error: type[Exception] = ValueError) -> None:
        self.size, self.bad, self.error = size, bad, error

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index < self.bad:
            raise self.error("broken")
        return index


@pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")
def test_without_workers_a_substitute_is_looked_for_as_far_as_with_them() -> None:
    loader = DataLoader(Broken(400, 128), batch_size=8, on_bad_sample="replace")
    stream = torch.cat(list(loader)).tolist()
    assert len(stream) == 400
    assert min(stream) >= 128


def always_raise(bad: BadSample) -> str:
    return "raise"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stop_iteration_never_ends_an_epoch(num_workers: int) -> None:
    loader = DataLoader(
        Broken(10, 3, StopIteration), num_workers=num_workers, on_bad_sample=always_raise
    )
    with pytest.raises(WorkerError, match="StopIteration"):
        list(loader)


@pytest.mark.filterwarnings("error::holdfast.BadSampleWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_warning_that_is_an_error_loses_no_bad_sample(num_workers: int) -> None:
    loader = DataLoader(Broken(8, 4), batch_size=4, num_workers=num_workers, on_bad_sample="skip")
    with pytest.raises(BadSampleWarning):
        list(loader)
    assert [bad.index for bad in loader.bad_samples] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore::holdfast.BadSampleWarning")
def test_a_quarantine_whose_folder_is_gone_does_not_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    folder.mkdir()
    loader = DataLoader(Broken(4, 1), on_bad_sample="skip", quarantine=folder / "bad.jsonl")
    assert len(list(loader)) == 3
    shutil.rmtree(folder)
    assert len(list(loader)) == 3
