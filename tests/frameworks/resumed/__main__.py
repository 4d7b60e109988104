"""All trainings in all ways: ``python -m tests.frameworks.resumed FOLDER [NAME ...]``.

Each part of a training is a process of its own, forked from this one, which has imported the packages: that takes longer
than to train. What came of each is in ``FOLDER/NAME-WAY/``.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

import holdfast
from tests.frameworks.resumed.parts import Part
from tests.frameworks.resumed.trainings import SEEDED_BY_SAMPLE, TRAININGS


def run(function: Any, part: Part) -> int:
    """Fork a process that runs it; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(100)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        seeding: Any = "sample" if function in SEEDED_BY_SAMPLE else "worker"
        os.environ["HOLDFAST_SEEDING"] = seeding
        if part.way == "install":
            holdfast.install()
        function(part)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pids: list[int], killed: bool) -> None:
    for pid in pids:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != (-signal.SIGKILL if killed else 0):
            print(f"process {pid} ended with {status}", file=sys.stderr)  # noqa: T201


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or TRAININGS
    for name in names:
        function, ranks, ways = TRAININGS[name]
        os.environ["WORLD_SIZE"] = str(ranks)
        for way in ("whole", *ways):
            place = folder / f"{name}-{way}"
            place.mkdir()
            for which in ("whole",) if way == "whole" else ("first", "second"):
                # The whole one has torch's loader, or, where samples are seeded, ours undisturbed.
                used = way
                if way == "whole":
                    used = "import" if function in SEEDED_BY_SAMPLE else "torch"
                parts = [Part(which, used, place, rank) for rank in range(ranks)]
                ended([run(function, part) for part in parts], killed=which == "first")


if __name__ == "__main__":
    main()
