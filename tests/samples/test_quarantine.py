"""The quarantine survives whatever happens to the processes that write it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset

from holdfast import BadSample
from holdfast.samples.quarantine import Quarantine, label


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "bad.jsonl")


def bad(index: object, message: str = "") -> BadSample:
    return BadSample(index, "raised", "ValueError", message)


def test_what_one_writes_the_other_reads_once(path: str) -> None:
    one, other = Quarantine(path, "set"), Quarantine(path, "set")
    assert other.read().records == []
    one.append(bad(1, "ein\nZeilenumbruch \u2028 und ü"))
    assert other.read().records == [bad(1, "ein\nZeilenumbruch \u2028 und ü")]
    one.append(bad((2, "b")))
    assert other.read().records == [bad((2, "b"))]
    assert other.read().records == []
    assert len(Quarantine(path, "set").read().records) == 2


def test_an_index_of_another_dataset_is_another_sample(path: str) -> None:
    Quarantine(path, "train").append(bad(1))
    assert Quarantine(path, "val").read().records == []
    assert Quarantine(path, "train").read().records == [bad(1)]


class Folder:
    def __init__(self, root: str | Path, split: str = "") -> None:
        self.root = root
        self.split = split

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(
    ("writer", "name", "reader", "its"),
    [
        (Folder("train"), "train/2.jpg", Folder("train"), True),
        (Folder("train"), "train/2.jpg", Folder("val"), False),
        (Folder(Path("/data/train")), "/data/train/2.jpg", Folder("/data/train/"), True),
        (Folder("/data", "train"), "/data/train/2.jpg", Folder("/data", "val"), False),
        (Folder("/data", "train"), "/data/train/2.jpg", Folder("/data", "train"), True),
        (Folder("train", "rgb"), "train/2.jpg", Folder("train", "grey"), True),  # not in the name
        (Folder("train"), None, Folder("val"), True),  # nothing to go by
        (Folder("train"), "elsewhere/2.jpg", Folder("val"), True),
        (Subset(Folder("train"), [1]), "train/2.jpg", Subset(Folder("val"), [1]), False),  # type: ignore[arg-type]
    ],
)
def test_a_path_tells_datasets_of_one_class_and_size_apart(
    path: str, writer: Any, name: str | None, reader: Any, its: bool
) -> None:
    assert label(writer) == label(reader)
    Quarantine.of(path, writer).append(BadSample(2, "raised", name=name))
    assert len(Quarantine.of(path, reader).read().records) == its


def test_a_torn_line_costs_itself_and_nothing_else(path: str) -> None:
    quarantine = Quarantine(path, "set")
    quarantine.append(bad(1))
    whole = Path(path).read_bytes()
    for cut in range(1, len(whole)):
        Path(path).write_bytes(whole + whole[:cut])
        Quarantine(path, "set").append(bad(2))
        found = Quarantine(path, "set").read()
        assert bad(1) in found.records
        assert bad(2) in found.records
        complete = cut == len(whole) - 1  # only its end of line was missing
        assert len(found.records) == (3 if complete else 2)
        assert len(found.damaged) == (0 if complete else 1)


def test_damaged_lines_are_named_and_stay_where_they_are(path: str) -> None:
    lines = [
        b'{"index": 1, "kind": "raised"}',
        b"\xff\xfe\x00",
        b"",
        b'{"index": 2}',
        b"[" * 100_000,
        b'{"index": 3, "kind": "raised"}',
    ]
    content = b"\n".join(lines) + b"\n"
    Path(path).write_bytes(content)
    found = Quarantine(path, "set").read()
    assert [one.index for one in found.records] == [1, 3]
    assert [text.split(" of ")[0] for text in found.damaged] == ["line 2", "line 4", "line 5"]
    Quarantine(path, "set").append(bad(4))
    assert Path(path).read_bytes().startswith(content)


def test_a_line_on_its_way_is_read_when_it_is_whole(path: str) -> None:
    reader = Quarantine(path, "set")
    Quarantine(path, "set").append(bad(1))
    whole = Path(path).read_bytes()
    assert reader.read().records == [bad(1)]
    with open(path, "ab") as file:
        file.write(whole[:20])
        file.flush()
        found = reader.read()
        assert (found.records, found.damaged) == ([], [])
        file.write(whole[20:])
        file.flush()
    assert reader.read().records == [bad(1)]


def test_a_file_that_was_emptied_is_read_from_its_start(path: str) -> None:
    reader = Quarantine(path, "set")
    Quarantine(path, "set").append(bad(1, "a long message"))
    assert len(reader.read().records) == 1
    Path(path).write_bytes(b"")
    Quarantine(path, "set").append(bad(2))
    assert reader.read().records == [bad(2)]


def writer(path: str, name: str, count: int) -> tuple[int, int]:
    """A process that writes, and says after each record that it is written."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        quarantine = Quarantine(path, "set")
        for number in range(count):
            quarantine.append(bad([name, number], "x" * 3000))
            os.write(writing, f"{number}\n".encode())
        os._exit(0)
    os.close(writing)
    return child, reading


def test_several_may_write_at_once_and_one_may_be_killed(path: str) -> None:
    victim, heard = writer(path, "v", 1_000_000)
    others = [writer(path, name, 100) for name in "ab"]
    with os.fdopen(heard) as file:
        said = [int(file.readline()) for _ in range(20)]
        os.kill(victim, signal.SIGKILL)
        said += [int(line) for line in file]
    os.waitpid(victim, 0)
    for child, reading in others:
        with os.fdopen(reading) as file:
            assert len(file.readlines()) == 100
        assert os.waitpid(child, 0)[1] == 0
    found = Quarantine(path, "set").read()
    assert len(found.damaged) <= 1  # what the victim was writing when it died
    indices = [one.index for one in found.records]
    for name in "ab":
        assert [number for who, number in indices if who == name] == list(range(100))
    of_victim = [number for who, number in indices if who == "v"]
    assert set(said) <= set(of_victim)  # what it was told is written, is


class Named:
    def sample_name(self, index: int) -> str:
        return str(index)

    def __len__(self) -> int:
        return 5


def test_datasets_are_told_apart_by_class_size_and_choice() -> None:
    assert label([1, 2]) != label([1, 2, 3])
    assert label([1, 2]) != label((1, 2))
    halves = [Subset([0] * 4, [0, 1]), Subset([0] * 4, [2, 3])]  # type: ignore[arg-type]
    assert label(halves[0]) != label(halves[1])
    assert label(halves[0]) == label(Subset([9] * 4, [0, 1]))  # type: ignore[arg-type]
    assert label(Named()).endswith("Named")  # may grow: its names tell its samples apart


def test_a_record_is_a_plain_line_of_json(path: str) -> None:
    Quarantine(path, "set").append(bad(5, "why"))
    fields = json.loads(Path(path).read_text())
    assert fields["index"] == 5
    assert fields["message"] == "why"
    assert fields["dataset"] == "set"
    assert set(fields) >= {"name", "error", "digest", "attempts", "time", "verdict", "kind"}
