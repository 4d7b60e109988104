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

import torch

import holdfast
from tests.frameworks.resumed import trainings
from tests.frameworks.resumed.parts import SEEDED_BY_SAMPLE, TRAININGS, Part


def run(name: str, part: Part) -> int:
    """Fork a process that runs it; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(100)
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        os.environ["HOLDFAST_SEEDING"] = "sample" if name in SEEDED_BY_SAMPLE else "worker"
        if part.way == "install":
            holdfast.install()
        getattr(trainings, name)(part)
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
            print(f"process {pid} ended with {status}", file=sys.stderr)


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:] or TRAININGS
    for name in names:
        ranks, ways = TRAININGS[name]
        os.environ["WORLD_SIZE"] = str(ranks)
        for way in ("whole", *ways):
            place = folder / f"{name}-{way}"
            place.mkdir()
            for which in ("whole",) if way == "whole" else ("first", "second"):
                # The whole one has torch's loader, or, where samples are seeded, ours undisturbed.
                used = way
                if way == "whole":
                    used = "import" if name in SEEDED_BY_SAMPLE else "torch"
                parts = [Part(which, used, place, rank) for rank in range(ranks)]
                ended([run(name, part) for part in parts], killed=which == "first")


if __name__ == "__main__":
    main()
