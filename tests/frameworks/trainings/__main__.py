"""Trainings as a program: ``python -m tests.frameworks.trainings run FOLDER h5py_file lmdb_store``.

It is given the ways to train, the folder, and the names of the trainings. One interpreter runs them all, because importing
the packages takes longer than training. What came of them is in ``FOLDER/RANK.jsonl``, a line for each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.frameworks.trainings import ways
from tests.frameworks.trainings.parts import RANKS


def main() -> None:
    chosen, folder, names = sys.argv[1].split(","), Path(sys.argv[2]), sys.argv[3:]
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")  # one for all
    with (folder / f"{os.environ.get('RANK', '0')}.jsonl").open("a") as results:
        for name in names:
            module = ways.prepare(name, folder)
            for way in chosen:
                found = {"name": name, "way": way, **outcome(module, way, folder)}
                results.write(json.dumps(found) + "\n")
                results.flush()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def outcome(module: Any, way: str, folder: Path) -> dict[str, Any]:
    try:
        return dataclasses.asdict(ways.ALL[way](module, folder))
    except Exception:
        if RANKS > 1:
            raise  # the other ranks would wait
        return {"failed": traceback.format_exc()}


if __name__ == "__main__":
    main()
