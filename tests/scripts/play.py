"""One script of the table, run to its end: what it said, how it ended, and who is left.

Most are forked from a process that has imported torch (`tests.support.incubator`), and go from their first line
through the whole end of the interpreter; those that are about how an interpreter is begun get one of their own.

A process that outlives a script is found by its session, or by a mark in the environment it was started with: the first
shows children of a fork, the second those that have a session of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.scripts.table import Script
from tests.support import warm
from tests.support.processes import eventually, signal_if

ROOT = Path(__file__).parents[2]
MARK = "HOLDFAST_SCRIPT_UNDER_TEST"
NOTEBOOK = """\
import pathlib, sys
import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
book = new_notebook(cells=[new_code_cell(pathlib.Path("script.py").read_text())])
NotebookClient(book, timeout=100, allow_errors=True).execute()
for output in book.cells[0].outputs:
    text = output.get("text") or output.get("data", {}).get("text/plain") or str(output)
    (sys.stderr if output.get("name") == "stderr" else sys.stdout).write(text)
"""


@dataclass(frozen=True)
class Played:
    """How a script ended; texts are normalised, so that two runs of it can be compared."""

    code: int
    out: tuple[str, ...]
    err: tuple[str, ...]
    raw_err: str
    left: tuple[str, ...]
    seconds: float


def play(script: Script, loader: str, size: str, folder: Path, seconds: float = 90.0) -> Played:
    """Runs it in `folder`, where nothing else may be. One that does not end within `seconds` is killed, and that is an
    error with its output in the text."""
    source = script.source(loader, size)
    mark = uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), MARK: mark}
    (folder / "script.py").write_text(source)
    out_file, err_file = folder / "out", folder / "err"
    began = time.monotonic()
    with out_file.open("wb") as out, err_file.open("wb") as err:
        if script.how in ("file", "-c", "-m"):
            command = {"file": ["script.py"], "-c": ["-c", source], "-m": ["-m", "script"]}
            run: warm.Command | _Fresh = warm.with_torch().start(
                command[script.how], out=out.fileno(), err=err.fileno(), env=environment, cwd=folder
            )
        else:
            run = _Fresh(_command(script.how, source, folder), out, err, environment, folder)
    ended = run.ended(seconds)
    took = time.monotonic() - began
    if ended:
        eventually(lambda: not _left(run.pid, mark), 3.0)
    left = _left(run.pid, mark)
    for pid in [*left, *(() if ended else (run.pid,))]:
        with contextlib.suppress(ProcessLookupError):
            signal_if(pid, lambda pid: pid == run.pid or pid in _left(run.pid, mark))
    code = run.code()
    said, errors = out_file.read_text(), err_file.read_text()
    if not ended:
        raise AssertionError(f"{script} did not end within {seconds} s\n{said}\n{errors}")
    return Played(
        code,
        normalised(said, folder),
        normalised(errors, folder),
        errors,
        tuple(f"{pid} {name}" for pid, name in left.items()),
        took,
    )


def _command(how: str, source: str, folder: Path) -> Sequence[str]:
    python = sys.executable
    if how == "fresh":
        return [python, "script.py"]
    if how == "stdin":
        return _shell(f"{python} < script.py")
    if how == "-i":
        (folder / "typed").write_text(_typed(source))
        return _shell(f"{python} -i < typed")
    if how == "-i script":
        (folder / "typed").write_text("print(batch.shape)\n")
        return _shell(f"{python} -i script.py < typed")
    if how == "notebook":
        (folder / "notebook.py").write_text(NOTEBOOK)
        return [python, "notebook.py"]
    closed = {"stdout": ">&-", "stderr": "2>&-", "all": "<&- >&- 2>&-"}
    if how.startswith("closed "):
        return _shell(f"{python} script.py {closed[how.removeprefix('closed ')]}")
    return [python, *shlex.split(how), "script.py"]


def _shell(line: str) -> list[str]:
    return ["/bin/sh", "-c", f"exec {line}"]


def _typed(source: str) -> str:
    """As it would be typed in: a blank line ends a block, and there is none in it."""
    typed: list[str] = []
    for line in filter(None, source.splitlines()):
        if typed and typed[-1].startswith(" ") and not line.startswith(" "):
            typed.append("")
        typed.append(line)
    return "\n".join(typed) + "\n\n"


class _Fresh:
    """An interpreter of its own, in a session of its own; looked at like `warm.Command`."""

    def __init__(
        self, command: Sequence[str], out: object, err: object, env: dict[str, str], folder: Path
    ) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=folder,  # type: ignore[arg-type]
            start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid

    def ended(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def code(self) -> int:
        return self._process.wait(30)


def _left(leader: int, mark: str) -> dict[int, str]:
    """Living processes of the session that `leader` leads, or that were started with this mark, without itself."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == leader:
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
            fields = stat.rsplit(")", 1)[1].split()
            marked = wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if fields[0] not in "ZX" and (marked or int(fields[3]) == leader):
            found[int(entry)] = stat.split("(", 1)[1].rsplit(")", 1)[0]
    return found


_FRAME = re.compile(r'^\s*File "(?P<path>[^"]*)", line \d+')
_WARNING = re.compile(r"^(?P<path>\S*\.py):\d+: (?P<words>\w*Warning: .*)")


def normalised(text: str, folder: Path) -> tuple[str, ...]:
    """Its lines, without what differs from run to run (addresses, pids) and from loader to loader: the lines of a
    traceback that are inside a library."""
    text = text.replace(str(folder), "HERE")
    text = re.sub(r"0x[0-9a-f]+", "ADDRESS", text)
    text = re.sub(r"\bpid\(?s?\)?[ =:]*\d+", "PID", text)
    lines = []
    inside = False  # a library's frame: the lines below it, indented further, are its source
    for line in text.splitlines():
        frame, warning = _FRAME.match(line), _WARNING.match(line)
        if frame:
            inside = not frame["path"].startswith(("HERE", "<"))
        elif warning:
            inside = True
            line = f"WHERE: {warning['words']}"
        elif not line.startswith("    "):
            inside = False
        if (not inside or warning) and line.strip():
            lines.append(line.rstrip())
    return tuple(lines)
