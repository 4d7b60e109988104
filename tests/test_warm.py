"""A command forked from an incubator finds what it would find as a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.support import warm

SHOWS = """
import os, sys
print(__name__, sys.argv, os.getcwd(), os.environ["GIVEN"], sys.stdin.read() == "")
print(sys.path)
print([name for name in globals() if not name.startswith("__")])
print(globals().get("__file__"), sys.stdout.line_buffering, sorted(os.listdir("/proc/self/fd")))
print("torch" in globals(), any(name.partition(".")[0] == "holdfast" for name in sys.modules))
"""
ENDINGS = {
    "its end": "",
    "an exit code": "sys.exit(3)",
    "a message": "sys.exit('no such file')",
    "an error": "raise ValueError('boom')",
    "an error in a function": "def load():\n    {}['key']\nload()",
    "a name it has not imported": "pickle",
    "a signal": "sys.stdout.flush(); os.kill(os.getpid(), 9)",
    "a word at exit": "import atexit; atexit.register(print, 'bye')",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module to import, that is not the one the incubator was started in."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "module.py").write_text(SHOWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIVEN", "yes")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    return tmp_path


def fresh(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("command", [("-c", SHOWS), ("-m", "module"), ("module.py",)], ids=str)
def test_it_finds_what_a_fresh_interpreter_finds(place: Path, command: tuple[str, ...]) -> None:
    expected = fresh(*command, "one", "-m")
    found = warm.run([*command, "one", "-m"], timeout=60)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == expected.stdout


@pytest.mark.parametrize("as_file", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("ending", ENDINGS)
def test_it_ends_as_a_fresh_interpreter_ends(place: Path, ending: str, as_file: bool) -> None:
    source = f"import os, sys\nprint('here')\n{ENDINGS[ending]}\n"
    Path("script.py").write_text(source)
    command = ["script.py"] if as_file else ["-c", source]
    expected, found = fresh(*command), warm.run(command, timeout=60)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    if as_file:
        assert found.stderr == expected.stderr
    else:  # Python 3.13 shows the lines of a `-c`, too
        assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_one_that_does_not_end_is_killed_and_its_output_told(place: Path) -> None:
    script = "import time; print('begun', flush=True); time.sleep(3600)"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        warm.run(["-c", script], timeout=0.5)
    assert caught.value.output in ("begun\n", "")  # it may not have come that far


def test_flags_are_those_of_the_interpreter(place: Path) -> None:
    with (place / "out").open("w+") as out:
        incubator = warm.Incubator(flags=["-X", "dev", "-W", "error"])
        ended = incubator.start(
            ["-c", "import sys; print(sys.flags.dev_mode, sys.warnoptions[-1])"],
            out=out.fileno(),
            err=out.fileno(),
            env={**os.environ},
        )
        assert ended.code() == 0
        incubator.close()
    assert (place / "out").read_text() == "True error\n"


def test_nothing_is_open_after_the_end_of_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or every run would end with a warning of a process that is still running."""
    ended: list[bool] = []
    monkeypatch.setattr(warm, "close_all", lambda: ended.append(True))
    session: Any = SimpleNamespace(config=SimpleNamespace())
    conftest.pytest_sessionfinish(session)
    assert ended == [True]
    script = "from tests.support import warm; warm.Incubator(); warm.Incubator(); {}"
    left = fresh("-X", "dev", "-c", script.format("pass"))
    assert "is still running" in left.stderr
    assert "unclosed <socket" in left.stderr
    closed = fresh("-X", "dev", "-c", script.format("warm.close_all()"))
    assert (closed.returncode, closed.stderr) == (0, "")
