"""Python scripts in a process of their own, for all that only the end of an interpreter can
show."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support import warm
from tests.support.processes import eventually, in_session, signal_if

HEADERS = {
    "stock": "from torch.utils.data import DataLoader\n",
    "holdfast": "from holdfast import DataLoader\n",
    "installed": "import holdfast; holdfast.install()\nfrom torch.utils.data import DataLoader\n",
}


@dataclass(frozen=True)
class Ended:
    """How a script ended. `left` are processes of its session that outlived it."""

    code: int
    out: str
    err: str
    seconds: float
    left: frozenset[int]


def run_script(
    which: str,
    body: str,
    *,
    seconds: float = 60.0,
    as_file: bool = False,
    options: tuple[str, ...] = (),
) -> Ended:
    """Runs `body` after an import of the loader named by `which`; by `python -c`, or as a file when
    it has to be one. `options` are the interpreter's.

    A script that does not end within `seconds` is killed, and that is an error with its output in
    the text.
    """
    source = HEADERS[which] + textwrap.dedent(body)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryDirectory() as folder:
        command = ["-c", source]
        if as_file:
            file = Path(folder) / "script.py"
            file.write_text(source)
            command = [str(file)]
        began = time.monotonic()
        # Output goes to files: a worker left behind would keep a pipe open, and hide that the
        # script itself has ended.
        with (Path(folder) / "out").open("w+") as out, (Path(folder) / "err").open("w+") as err:
            process = warm.with_torch(*options).start(
                command, out=out.fileno(), err=err.fileno(), env=environment
            )
            in_time = process.ended(seconds)
            took = time.monotonic() - began
            eventually(lambda: not session_of(process.pid), 3.0)
            left = frozenset(session_of(process.pid))
            for pid in left | ({process.pid} if not in_time else set()):
                with contextlib.suppress(ProcessLookupError):
                    signal_if(pid, in_session(process.pid))
            code = process.code()
            out.seek(0)
            err.seek(0)
            ended = Ended(code, out.read(), err.read(), took, left)
    if not in_time:
        raise AssertionError(f"the script did not end within {seconds} s\n{ended.out}\n{ended.err}")
    return ended


def session_of(leader: int) -> set[int]:
    """Living processes of the session that `leader` leads, without itself."""
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == leader:
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] not in "ZX":
            found.add(int(entry))
    return found
