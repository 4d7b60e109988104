"""``holdfast run``: an unmodified program, as with ``python``, and its loaders survive."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.cli import main
from holdfast.run_report import logged_run
from holdfast.takeover.summary import Figures, duration, tell
from holdfast.verbs import run
from tests.support.processes import eventually

pytestmark = pytest.mark.timeout(120, method="thread")

HOLDFAST = [sys.executable, "-m", "holdfast"]

DATA = """
import os
import signal
import sys
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    kills = 13
    def __len__(self):
        return 24
    def __getitem__(self, index):
        if index == self.kills:
            try:
                os.close(os.open("killed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return index
            os.kill(os.getpid(), signal.SIGKILL)
        return index

def total(**options):
    return sum(int(batch.sum()) for batch in DataLoader(Numbers(), batch_size=2, num_workers=2, **options))
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: list[str]


def environment() -> dict[str, str]:
    source = Path(run.__file__).parents[2]
    found = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**found, "PYTHONPATH": str(source)}


def run_in(folder: Path, *command: str, text: str = "", **more: str) -> Ended:
    """The command, in a folder; its standard input is `text`."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment() | more,
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr.splitlines())


def written(folder: Path, script: str, name: str = "train.py") -> None:
    (folder / name).write_text(DATA + textwrap.dedent(script))


def books(folder: Path) -> list[Path]:
    return sorted((folder / "holdfast-runs").glob("*"))


# -- as with python --------------------------------------------------------------------------------


SCRIPT = """
print(sys.argv, __name__, __file__, sys.path[0], sys.stdin.read(), sys.modules["__main__"] is not None)
print("holdfast.runtime" in sys.modules)
print(total())
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.faults
def test_a_script_is_as_with_python_and_survives_a_death(tmp_path: Path) -> None:
    written(tmp_path, SCRIPT)
    arguments = ("train.py", "--name", "a b", "-m", "--help")
    (tmp_path / "killed").touch()
    plain = run_in(tmp_path, sys.executable, *arguments, text="read")
    (tmp_path / "killed").unlink()
    ours = run_in(tmp_path, *HOLDFAST, "run", *arguments, text="read")
    assert plain.code == 7
    assert plain.out.endswith("False\n276\n")
    assert (ours.code, ours.out) == (plain.code, plain.out)
    (book,) = books(tmp_path)
    assert ours.err[0].startswith("[Numbers] worker 0 (pid ")
    assert ours.err[-4] == "holdfast: 1 worker was lost (1 was killed)"
    assert ours.err[-3].startswith(
        "holdfast: with torch's own workers this program would have ended"
    )
    assert ours.err[-2] == f"holdfast: the whole story: holdfast incidents {book}"
    assert ours.err[-1] == f"holdfast: as a page with curves: holdfast report {book} --open"
    assert all(line.startswith("    ") for line in ours.err[1:-4])
    story = logged_run.read(book)
    assert [one["kind"] for one in story.incidents] == ["killed"]
    assert story.runs[0]["command"] == list(arguments)


IMPORTS = """
from holdfast import DataLoader as Ours  # before any loader is used
import holdfast

loader = DataLoader(Numbers(), batch_size=2, num_workers=2)
print(sum(int(batch.sum()) for batch in loader), holdfast.of(loader).engine)
print(sum(int(batch.sum()) for batch in Ours(Numbers(), batch_size=2, num_workers=2)))
"""


@pytest.mark.slow
@pytest.mark.faults
def test_a_program_that_imports_holdfast_itself_is_taken_over_all_the_same(tmp_path: Path) -> None:
    written(tmp_path, IMPORTS)
    ended = run_in(tmp_path, *HOLDFAST, "run", "train.py")
    assert (ended.code, ended.out) == (0, "276 holdfast\n276\n"), ended.err
    assert not any("cannot be used" in line for line in ended.err)
    assert len(logged_run.read(books(tmp_path)[0]).incidents) == 1


@pytest.mark.slow
def test_nothing_is_said_and_written_where_nothing_happens(tmp_path: Path) -> None:
    written(
        tmp_path,
        "print(type(iter(DataLoader(Numbers(), num_workers=1))).__module__.partition('.')[0])",
    )
    ended = run_in(tmp_path, *HOLDFAST, "run", "--no-logbook", "train.py")
    assert (ended.code, ended.out, ended.err) == (0, "holdfast\n", [])
    assert books(tmp_path) == []


@pytest.mark.slow
def test_a_program_that_loads_nothing_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        "import sys\nprint([name for name in sys.modules if name.startswith(('holdfast', 'torch'))])\n"
    )
    ended = run_in(tmp_path, *HOLDFAST, "run", "plain.py")
    assert (ended.code, ended.out, ended.err) == (0, "[]\n", [])
    assert books(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-m", "folder", "standard input"])
def test_modules_folders_and_standard_input_are_run(how: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    script = "import sys; print(__name__, sys.argv[1:], type(iter(__import__('torch').utils.data.DataLoader([1]))).__module__.partition('.')[0])\n"
    for name in ("__init__.py", "__main__.py"):
        (package / name).write_text("" if name == "__init__.py" else script)
    target = {"-m": ["-m", "package"], "folder": ["package"], "standard input": ["-"]}[how]
    text = script if how == "standard input" else ""
    ended = run_in(tmp_path, *HOLDFAST, "run", *target, "-m", "x", text=text)
    assert ended.err == []
    assert ended.out == "__main__ ['-m', 'x'] holdfast\n"


@pytest.mark.slow
def test_an_error_ends_with_pythons_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    plain = run_in(tmp_path, sys.executable, "wrong.py")
    assert run_in(tmp_path, *HOLDFAST, "run", "wrong.py") == plain
    missing = run_in(tmp_path, *HOLDFAST, "run", "missing.py")
    assert missing == run_in(tmp_path, sys.executable, "missing.py")
    assert missing.code == 2


@pytest.mark.slow
def test_flags_of_the_interpreter_are_kept(tmp_path: Path) -> None:
    (tmp_path / "flags.py").write_text(
        "import sys; print(sys.flags, sys.warnoptions, sys._xoptions)\n"
    )
    flags = ("-O", "-u", "-W", "error::UserWarning", "-X", "utf8")
    plain = run_in(tmp_path, sys.executable, *flags, "flags.py")
    ours = run_in(tmp_path, sys.executable, *flags, "-m", "holdfast", "run", "flags.py")
    assert ours == plain
    isolated = run_in(tmp_path, sys.executable, "-E", "-m", "holdfast", "run", "flags.py")
    assert isolated.code == (2 if "holdfast" in str(isolated.err) else 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_program_as_with_python(number: signal.Signals, tmp_path: Path) -> None:
    written(
        tmp_path,
        """
        import time
        iterator = iter(DataLoader(Numbers(), num_workers=2))
        next(iterator)
        open("ready", "w").close()
        time.sleep(60)
        """,
    )
    with subprocess.Popen(
        [*HOLDFAST, "run", "train.py"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE
    ) as process:
        assert eventually((tmp_path / "ready").exists, 60)
        time.sleep(0.2)  # so that it sleeps
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == -number
    if number == signal.SIGINT:
        assert said.endswith(b"KeyboardInterrupt\n")
    else:
        assert said == b""


CHILDREN = """
import multiprocessing
import subprocess

def child(answers):
    answers.put((total(), type(iter(DataLoader([1]))).__module__.partition('.')[0]))

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        answers = context.SimpleQueue()
        process = context.Process(target=child, args=(answers,))
        process.start()
        print(method, *answers.get())
        process.join()
        os.unlink("killed")
    code = "import train; print(train.total())"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
    print(total(multiprocessing_context="spawn"))
"""


@pytest.mark.slow
@pytest.mark.faults
def test_children_and_subprocesses_have_the_engine_too(tmp_path: Path) -> None:
    written(tmp_path, CHILDREN)
    ended = run_in(tmp_path, *HOLDFAST, "run", "train.py")
    assert ended.code == 0, ended.err
    engine = "276 holdfast\n"
    assert ended.out == f"fork {engine}spawn {engine}forkserver {engine}276\n276\n"
    (book,) = books(tmp_path)
    assert [one["kind"] for one in logged_run.read(book).incidents] == ["killed"] * 4


@pytest.mark.slow
@pytest.mark.faults
def test_samples_lost_are_told_and_options_reach_the_loaders(tmp_path: Path) -> None:
    written(
        tmp_path,
        """
        class Bad(Numbers):
            def __getitem__(self, index):
                return 1 / (index != 5) and index

        print(sum(int(batch) for batch in DataLoader(Bad(), num_workers=1)))
        """,
    )
    ended = run_in(
        tmp_path, *HOLDFAST, "run", "--on-bad-sample=skip", "--logbook", "book", "train.py",
        HOLDFAST_QUARANTINE="bad.jsonl",
    )  # fmt: skip
    assert (ended.code, ended.out) == (0, "271\n")
    assert ended.err[-3] == "holdfast: 1 sample was bad (1 left out)"
    assert ended.err[-2] == f"holdfast: the whole story: holdfast incidents {tmp_path / 'book'}"
    assert (tmp_path / "bad.jsonl").exists()


@pytest.mark.slow
def test_another_sitecustomize_is_imported_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("import builtins; builtins.theirs = 5\n")
    (tmp_path / "show.py").write_text(
        "import sys, sitecustomize\nprint(theirs, sitecustomize.__file__)\n"
        "print([one for one in sys.path if 'startup' in one])\n"
    )
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path / "theirs")])
    ended = run_in(tmp_path, *HOLDFAST, "run", "show.py", PYTHONPATH=path)
    assert ended.err == []
    assert ended.out == f"5 {tmp_path / 'theirs' / 'sitecustomize.py'}\n[]\n"


STAND_IN = """#!/bin/sh
# Two tasks on one machine, with the variables that Slurm's own srun sets.
export SLURM_JOB_ID=77 SLURM_STEP_ID=3 SLURM_NTASKS=2 SLURM_STEP_TASKS_PER_NODE=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" || exit
wait $first
"""


def srun(folder: Path) -> str:
    """Slurm's own, for two tasks, if there is a cluster; else a script that stands in for it."""
    real = shutil.which("srun")
    command = STAND_IN
    if (
        real is not None
        and subprocess.run(["sinfo"], capture_output=True, timeout=30).returncode == 0
    ):
        command = f'#!/bin/sh\nexec {real} --ntasks=2 --overcommit "$@"\n'
    path = folder / "srun"
    path.write_text(command)
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(
    "launcher",
    [
        [*HOLDFAST, "run", "torchrun", "--standalone", "--nproc-per-node=2"],
        [*HOLDFAST, "run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "holdfast", "run"],
        ["torchrun", "--standalone", "--nproc-per-node=2", "--no-python", *HOLDFAST, "run"],
        [*HOLDFAST, "run", "srun", sys.executable],
        ["srun", *HOLDFAST, "run"],
    ],
    ids=[
        *("around torchrun", "around its module", "below torchrun", "below it, as a command"),
        *("around srun", "below srun"),
    ],
)
def test_ranks_survive_and_write_one_logbook(launcher: list[str], tmp_path: Path) -> None:
    written(
        tmp_path,
        """
        import torch.distributed
        from torch.utils.data.distributed import DistributedSampler

        rank = int(os.environ.get("SLURM_PROCID", -1))
        place = dict(rank=rank, world_size=2, init_method=f"file://{os.getcwd()}/met") if rank >= 0 else {}
        torch.distributed.init_process_group("gloo", **place)
        rank = torch.distributed.get_rank()
        os.makedirs(str(rank), exist_ok=True)
        os.chdir(str(rank))
        Numbers.kills = 12 + rank
        sampler = DistributedSampler(Numbers(), shuffle=False)
        print(len(list(DataLoader(Numbers(), batch_size=2, sampler=sampler, num_workers=2))))
        torch.distributed.destroy_process_group()
        """,
    )
    if launcher[0] == "torchrun":
        launcher = [str(Path(sys.executable).with_name("torchrun")), *launcher[1:]]
    tools = tmp_path / "tools"
    tools.mkdir()
    starter = srun(tools)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    if launcher[0] == "srun":
        launcher = [starter, *launcher[1:]]
    ended = run_in(tmp_path, *launcher, "train.py", PATH=path)
    assert ended.code == 0, ended.err
    assert ended.out.split() == ["6", "6"]
    (book,) = books(tmp_path)
    assert sorted(one["rank"] for one in logged_run.read(book).incidents) == [0, 1]
    for rank in (0, 1):
        assert f"holdfast: [rank {rank}] 1 worker was lost (1 was killed)" in ended.err


def test_the_rank_that_deepspeeds_launcher_puts_before_the_verb_reaches_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, arguments, environment: became.append(arguments))
    arguments = ["--local_rank=1", "run", "--no-logbook", "train.py", "--deepspeed"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert became[0][-3:] == ["train.py", "--local_rank=1", "--deepspeed"]


# -- the command itself ----------------------------------------------------------------------------


def called(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["run", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing argument"),
        (["--on-bad-sample=sikp", "x.py"], "HOLDFAST_ON_BAD_SAMPLE='sikp' is not one of the words"),
        (["--stall-timeout", "0", "x.py"], "HOLDFAST_STALL_TIMEOUT='0' is out of range"),
        (["--no-logbook", "--logbook=x", "x.py"], "--logbook and --no-logbook contradict"),
        (["--what", "x.py"], "No such option"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_run(arguments: list[str], words: str) -> None:
    result = called(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_help_lists_every_option() -> None:
    from holdfast import option_sources

    text = called("--help").output
    for name in option_sources.DEFAULTS:
        assert f"--{name.replace('_', '-')} " in text
        assert f"HOLDFAST_{name.upper()}]" in text


@pytest.mark.parametrize(
    ("target", "arguments", "is_module", "expected"),
    [
        ("train.py", ("-x",), False, ["PYTHON", "train.py", "-x"]),
        ("package.train", ("-x",), True, ["PYTHON", "-m", "package.train", "-x"]),
        ("./missing", (), False, ["PYTHON", "./missing"]),
        ("sh", ("-c", "x"), False, ["sh", "-c", "x"]),
    ],
)
def test_what_is_run(
    target: str,
    arguments: tuple[str, ...],
    is_module: bool,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "_flags", lambda: ["-O"])
    found = run.command(target, arguments, is_module=is_module)
    if expected[0] == "PYTHON":
        assert found == [sys.executable, "-O", *expected[1:]]
    else:
        assert (Path(found[0]).name, *found[1:]) == tuple(expected)


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "RANK": "1"}, "slurm-12.0"),
        ({"SLURM_JOB_ID": "12"}, "slurm-12"),
        ({"TORCHELASTIC_RUN_ID": "a/b", "RANK": "0", "MASTER_PORT": "1"}, "torchrun-a-b"),
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "MASTER_PORT": "29500"}, "port-29500"),
    ],
)
def test_all_ranks_of_a_job_come_to_one_logbook(launcher: dict[str, str], name: str) -> None:
    assert run.default_logbook(launcher) == name


def test_a_run_of_one_process_is_called_after_its_time() -> None:
    assert run.default_logbook({}, 0.0).startswith(("1970-01-01-", "1969-12-31-"))


def test_the_environment_that_a_program_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {"PYTHONPATH": f"{run.STARTUP}{os.pathsep}/x", "HOLDFAST_LOGBOOK": "book", "A": "b"}
    found = run.environment(before, {"STALL_TIMEOUT": "7"}, keep_logbook=True)
    assert found == {
        "PYTHONPATH": f"{run.STARTUP}{os.pathsep}/x",
        "HOLDFAST_LOGBOOK": str(tmp_path / "book"),
        "HOLDFAST_STALL_TIMEOUT": "7",
        "A": "b",
    }
    assert "HOLDFAST_LOGBOOK" not in run.environment(before, {}, keep_logbook=False)
    assert [one.name for one in run.STARTUP.iterdir() if one.suffix == ".py"] == [
        "sitecustomize.py"
    ]


def test_without_a_place_for_a_logbook_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "holdfast-runs").touch()
    monkeypatch.chdir(tmp_path)
    assert "HOLDFAST_LOGBOOK" not in run.environment({}, {}, keep_logbook=True)
    assert "no logbook, because" in capsys.readouterr().err


# -- the summary -----------------------------------------------------------------------------------


def test_nothing_is_told_of_nothing() -> None:
    assert tell(Figures()) == []
    assert tell(Figures(logbooks=("book",))) == []


def test_what_is_told() -> None:
    found = Figures(
        kinds={"killed": 2, "stalled": 1},
        first=7505.0,
        bad_samples={"skipped": 3, "replaced": 1},
        rank=1,
        logbooks=("runs/today",),
    )
    assert tell(found) == [
        "[rank 1] 3 workers were lost (2 were killed, 1 hung)",
        "[rank 1] 4 samples were bad (3 left out, 1 replaced)",
        "[rank 1] with torch's own workers this program would have ended, or hung, after 2 h 5 min, "
        "at the first of these deaths",
        "[rank 1] the whole story: holdfast incidents runs/today",
        "[rank 1] as a page with curves: holdfast report runs/today --open",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(-1, "0 s"), (59.4, "59 s"), (61, "1 min 1 s"), (3599, "59 min 59 s"), (7200, "2 h 0 min")]
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
