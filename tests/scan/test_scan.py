"""`holdfast scan`, really run: on damaged files, on decoders that crash, interrupted, continued."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from holdfast import DataLoader
from holdfast.cli import main
from holdfast.scan import file_datasets
from tests.samples import corpus
from tests.samples.test_corpus import DECODERS, Decoders
from tests.scan import scanned
from tests.support import warm
from tests.support.processes import eventually, kill

pytestmark = [pytest.mark.faults]
ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: Any) -> list[str]:
    return ["-m", "holdfast.cli", "scan", *map(str, arguments), "--num-workers", "2"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def run(*arguments: Any) -> tuple[int, str, str]:
    done = warm.run(command(*arguments), env=environment(), timeout=100)
    return done.returncode, done.stdout, done.stderr


def here(*arguments: Any) -> Any:
    """The same in this process, which saves importing torch."""
    words = ["scan", *map(str, arguments), "--num-workers", "2"]
    return CliRunner().invoke(main, words)


def report(*arguments: Any) -> tuple[int, dict[str, Any]]:
    result = here(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- damaged files ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("corpus")
    corpus.make(folder)
    yield folder
    for path in folder.iterdir():
        if not path.is_symlink():
            path.chmod(0o700)


@pytest.mark.filterwarnings("ignore")  # the libraries' own words about damaged files
def test_of_a_folder_of_damaged_files_all_and_only_the_bad_ones_are_listed(
    folder: Path, tmp_path: Path
) -> None:
    paths = [Path(path) for path in file_datasets.find(folder)]
    truths = corpus.truths(paths)
    for path in paths:
        if path.name.startswith("vanishing"):
            path.write_bytes(b"")  # to vanish once more
    out = tmp_path / "bad.jsonl"
    code, text, err = run("--files", folder, "--loader", "tests.scan.scanned:read", "--out", out)
    assert code == 1, err
    found = {one["name"]: (one["kind"], one["error"]) for one in records(out)}
    bad = {str(p): truth for p, truth in zip(paths, truths, strict=True) if truth[0] != "good"}
    assert found == bad
    assert f"{len(bad)} are bad" in text
    assert f"{len(paths)} of {len(paths)} samples scanned" in text
    assert "PIL.UnidentifiedImageError" in text
    assert f"All of them, with tracebacks: {out}" in text
    assert "repair or remove these files" in text


@pytest.mark.filterwarnings("ignore")
def test_images_need_no_dataset_class(tmp_path: Path) -> None:
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    for number in range(20):
        Image.new("L" if number == 3 else "RGB", (20 + number, 30)).save(
            tmp_path / "deep" / "deeper" / f"{number:02}.JPG", "JPEG"
        )
    whole = (tmp_path / "deep" / "deeper" / "05.JPG").read_bytes()
    (tmp_path / "cut.jpeg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    out = tmp_path / "bad.jsonl"
    code, told = report("--images", tmp_path, "--out", out)
    assert code == 1
    assert (told["scanned"], told["bad"]) == (22, 2)
    assert {(one["name"], one["error"]) for one in records(out)} == {
        (str(tmp_path / "cut.jpeg"), "OSError"),
        (str(tmp_path / "gone.png"), "FileNotFoundError"),
    }
    (odd,) = told["odd"]  # sizes vary by nature; a grey one among coloured ones is odd
    assert odd["count"] == 1
    assert "of shape (*, *)" in odd["how"]


def test_a_folder_that_cannot_be_read_is_reported_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a").write_text("")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)  # root may read everything
    assert list(file_datasets.find(tmp_path)) == [str(tmp_path / "a"), str(tmp_path / "closed")]


# -- samples that do the worst ------------------------------------------------------------


@pytest.mark.slow  # the same as in test_corpus.py, by way of the command
def test_decoders_that_do_the_worst_are_survived(tmp_path: Path) -> None:
    out = tmp_path / "bad.jsonl"
    code, text, err = run("tests.samples.test_corpus:Decoders", "--stall-timeout", 1, "--out", out)
    assert code == 1, err
    assert {one["index"]: (one["kind"], one["error"]) for one in records(out)} == {
        3 * place + 1: (kind, error) for place, (_, kind, error) in enumerate(DECODERS)
    }
    assert f"{len(Decoders())} of {len(Decoders())} samples scanned" in text
    assert "ended the worker (SIGSEGV)" in text
    assert err == ""  # nothing of all this is scribbled over the terminal


def test_data_that_is_all_bad_is_scanned_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.scan.scanner.BAD_IN_A_ROUND", 500)
    code, told = report("tests.scan.scanned:all_bad", "--arg", "count=1700")
    assert (code, told["scanned"], told["bad"]) == (1, 1700, 1700)
    (cause,) = told["causes"]
    assert (cause["count"], len(cause["first"])) == (1700, 5)


@pytest.mark.slow
def test_samples_that_end_workers_only_together_are_not_blamed() -> None:
    code, told = report("tests.scan.scanned:Together")
    assert told["bad"] == 0
    assert told["scanned"] == 60
    assert code == 0


# -- interrupted --------------------------------------------------------------------------


def saved(out: Path) -> int:
    path = Path(f"{out}.progress")
    if not path.exists():
        return 0
    return sum(stop - start for start, stop in json.loads(path.read_text())["done"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_an_interrupted_scan_goes_on_where_it_was(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "bad.jsonl"
    what = ("tests.scan.scanned:Gated", "--arg", f"folder={tmp_path}", "--out", out)
    with (tmp_path / "out").open("w") as stdout, (tmp_path / "err").open("w") as stderr:
        process = warm.with_torch().start(
            command(*what), out=stdout.fileno(), err=stderr.fileno(), env=environment()
        )
    assert eventually(lambda: saved(out) > 50, 60), (tmp_path / "err").read_text()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does it
    else:
        kill(process.pid, number=number)
    assert process.ended(30)
    if number == signal.SIGKILL:
        assert process.code() == -signal.SIGKILL
    else:
        assert process.code() == 128 + number
        assert "--resume" in (tmp_path / "err").read_text()
    done = saved(out)
    assert 50 < done < 700
    (tmp_path / "loaded").unlink()
    (tmp_path / "open").touch()

    code, told = report(*what, "--resume")
    assert code == 1
    bad = [index for index in range(700) if index % 50 == 7]
    assert sorted(one["index"] for one in records(out)) == bad  # each once
    assert (told["scanned"], told["good"], told["bad"]) == (700, 700 - len(bad), len(bad))
    loaded = {int(line) for line in (tmp_path / "loaded").read_text().split()}
    assert len(loaded) == 700 - done

    (tmp_path / "loaded").unlink()
    assert report(*what, "--resume") == (1, told)  # all is done: the same again, and nothing loaded
    assert not (tmp_path / "loaded").exists()


def test_another_scan_s_progress_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "bad.jsonl"
    assert here("tests.scan.scanned:counted", "--out", out).exit_code == 0
    other = here("tests.scan.scanned:counted", "--arg", "count=11", "--out", out, "--resume")
    assert other.exit_code == 2
    assert "another scan" in other.stderr
    Path(f"{out}.progress").write_text("{")
    damaged = here("tests.scan.scanned:counted", "--out", out, "--resume")
    assert damaged.exit_code == 2
    assert "is damaged" in damaged.stderr


# -- parts --------------------------------------------------------------------------------


def test_a_random_part(tmp_path: Path) -> None:
    (tmp_path / "open").touch()
    what = ("tests.scan.scanned:Gated", "--arg", f"folder={tmp_path}", "--sample", 100)
    chosen = []
    for seed in (1, 1, 2):
        code, told = report(*what, "--seed", seed)
        assert (told["scanned"], code) == (100, int(told["bad"] > 0))
        chosen.append(sorted((tmp_path / "loaded").read_text().split()))
        (tmp_path / "loaded").unlink()
    assert len(set(chosen[0])) == 100
    assert chosen[0] == chosen[1] != chosen[2]


def test_retry_tries_those_listed_and_tells_which_are_good_now(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(12):
        (data / f"{number:02}.json").write_text("{" if number in (2, 5, 9) else '{"values": [1]}')
    (data / ".[bold]5.json").write_text("{")
    what = ("--files", data, "--loader", "tests.scan.scanned:read")
    out = tmp_path / "bad.jsonl"
    result = here(*what, "--out", out)
    assert result.exit_code == 1
    assert ".[bold]5.json" in result.stdout  # a name, and no markup
    (data / ".[bold]5.json").write_text('{"values": [1]}')
    (data / "02.json").write_text('{"values": [1]}')  # mended
    (data / "09.json").unlink()  # thrown away
    (data / "00.json").unlink()  # so all others have moved
    again = tmp_path / "again.jsonl"
    code, told = report(*what, "--retry", out, "--out", again)
    assert code == 1
    assert (told["scanned"], told["bad"]) == (3, 1)
    assert told["good_now"] == [0, 2]  # .[bold]5.json and 02.json, where they are now
    assert [Path(one["name"]).name for one in told["gone"]] == ["09.json"]
    assert [Path(one["name"]).name for one in records(again)] == ["05.json"]
    (data / "05.json").write_text('{"values": [1]}')
    last = here(*what, "--retry", again)
    assert last.exit_code == 0
    assert "1 of the 1 listed are good now" in last.stdout


def test_the_list_is_a_quarantine_for_training(tmp_path: Path) -> None:
    (tmp_path / "open").touch()
    out = tmp_path / "bad.jsonl"
    what = ("tests.scan.scanned:Gated", "--arg", f"folder={tmp_path}", "--arg", "size=60")
    result = here(*what, "--out", out)
    assert result.exit_code == 1
    assert f'quarantine="{out}"' in result.stdout
    (tmp_path / "loaded").unlink()
    dataset = scanned.Gated(str(tmp_path), 60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(dataset, batch_size=10, on_bad_sample="skip", quarantine=out)
        assert sum(len(batch) for batch in loader) == 58
    loaded = (tmp_path / "loaded").read_text().split()
    assert "7" not in loaded
    assert len(loaded) == 58


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_script_s_own_dataset_is_known_when_the_script_is_run(
    method: str, tmp_path: Path
) -> None:
    """As ``__main__`` it has another module name than when it is scanned."""
    script = tmp_path / f"train_by_{method}.py"
    script.write_text(
        "import sys\n"
        "class Photos:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index):\n"
        "        if index == 2: raise ValueError(index)\n"
        "        return index\n"
        "if __name__ == '__main__':\n"
        "    from holdfast.samples.quarantine import Quarantine, label\n"
        "    found = Quarantine(sys.argv[1], label(Photos())).read()\n"
        "    print([bad.index for bad in found.records])\n"
    )
    out = tmp_path / "bad.jsonl"
    result = here(f"{script}:Photos", "--out", out, "--start-method", method)
    assert result.exit_code == 1, result.output
    assert "1 is bad" in result.stdout
    trained = warm.run(
        [str(script), str(out)], env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, timeout=60
    )
    assert trained.stdout == "[2]\n", trained.stderr


# -- figures ------------------------------------------------------------------------------


def test_twice_finds_what_no_seed_sets_and_what_draws_nothing() -> None:
    code, told = report("tests.scan.scanned:Peculiar", "--twice")
    assert code == 0
    assert told["differ"] == {"count": 10, "first": [2, 6, 10, 14, 18]}
    assert told["draw_nothing"] == {"count": 20, "first": [1, 2, 5, 6, 9]}
    assert told["cannot_compare"]["count"] == 0
    assert told["seconds"]["top"][0]["index"] == 20
    assert told["bytes"]["top"][0] == {"index": 13, "value": 3 * 64 * 8 + 8}
    assert {one["first"][0]: one["how"] for one in told["odd"]} == {
        5: "it at ['x'] is a float32 tensor of shape (1, 8, 8), "
        "the others had a float32 tensor of shape (3, 8, 8)",
        13: "it at ['x'] is a float64 tensor of shape (3, 8, 8), "
        "the others had a float32 tensor of shape (3, 8, 8)",
    }
    words = here("tests.scan.scanned:Peculiar", "--twice").stdout
    assert "10 differ when loaded again from the same random state" in words
    assert "20 of the good draw no random numbers" in words


def test_sizes_that_vary_by_nature_do_not_hide_the_odd_one() -> None:
    result = here("tests.scan.scanned:Sized")
    assert "Shapes vary: more than" in result.stdout
    assert "of shape (*, *, 1)" in result.stdout
    _, told = report("tests.scan.scanned:Sized")
    (odd,) = told["odd"]
    assert odd["first"] == [321]
    assert odd["how"].endswith("the others had a uint8 array of shape (*, *, 3)")
    assert [one["index"] for one in told["bytes"]["top"]] == list(range(999, 989, -1))
    assert told["bytes"]["p50"] == pytest.approx(510 * 60, rel=0.02)
    assert told["bytes"]["p95"] == pytest.approx(960 * 60, rel=0.02)


# -- wrong use ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name one thing to scan"),
        (("a:b", "--images", "."), "name one thing to scan"),
        (("nothing",), "give module:name"),
        (("no.such.module:x",), "there is no module 'no'"),
        (("tests.scan.scanned:absent",), "has no 'absent'; it has"),
        (("no/such/file.py:x",), "there is no file no/such/file.py"),
        (("tests.scan.scanned:number",), "is of type int"),
        (("tests.scan.scanned:Stream",), "IterableDataset"),
        (("tests.scan.scanned:empty",), "its length is 0"),
        (("tests.scan.scanned:ready", "--arg", "a=1"), "is a dataset already"),
        (("tests.scan.scanned:counted", "--arg", "a"), "not key=value"),
        (("tests.scan.scanned:counted", "--arg", "zzz=1"), "unexpected keyword argument 'zzz'"),
        (("tests.scan.scanned:ready", "--resume"), "--resume needs --out"),
        (
            ("tests.scan.scanned:ready", "--retry", "x", "--sample", "3"),
            "cannot be combined with",
        ),
        (("tests.scan.scanned:ready", "--retry", "no-such"), "there is no such file"),
        (("tests.scan.scanned:ready", "--out", "no/such/bad.jsonl"), "there is no folder"),
        (("--files", "."), "need each other"),
        (("--images", "no-such"), "there is no folder no-such"),
    ],
)
def test_wrong_use_says_what_would_be_right(arguments: tuple[str, ...], words: str) -> None:
    result = here(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_a_list_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "bad.jsonl"
    out.write_text("precious\n")
    for more in ((), ("--resume",)):
        result = here("tests.scan.scanned:ready", "--out", out, *more)
        assert result.exit_code == 2
        assert "exists" in result.stderr
    assert out.read_text() == "precious\n"
