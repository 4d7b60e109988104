"""Trainers forked from the test, with a standard error and a process group of their own."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import eventually


@dataclass
class Trainer:
    pid: int
    folder: Path

    def ended(self, seconds: float = 60.0) -> int:
        status: list[int] = []

        def gone() -> bool:
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                status.append(code)
            return bool(pid)

        assert eventually(gone, seconds), "the trainer did not end"
        return os.waitstatus_to_exitcode(status[0])

    def told(self) -> list[dict[str, Any]]:
        """Its incidents."""
        return json.loads((self.folder / "incidents.json").read_text())  # type: ignore[no-any-return]


def train(folder: Path, error: int | None, body: Callable[[], Any]) -> Trainer:
    """Fork a trainer whose standard error is `error` (None: closed); `body` returns its loader."""
    pid = os.fork()
    if pid:
        return Trainer(pid, folder)
    status = 1
    try:
        os.chdir(folder)
        with Path("trouble").open("w") as trouble:
            try:
                sys.stderr = sys.__stderr__
                logging.getLogger().handlers.clear()  # pytest's; what is left writes to stderr
                if error is None:
                    os.close(2)
                    sys.stderr = sys.__stderr__ = None  # type: ignore[assignment,misc]
                else:
                    os.dup2(error, 2)
                incidents = [one.to_json() for one in body().incidents]
                Path("incidents.json").write_text(json.dumps(incidents, default=repr))
                status = 0
            except BaseException:
                traceback.print_exc(file=trouble)
    finally:
        os._exit(status)
