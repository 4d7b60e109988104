"""A state that one process has written as JSON is gone on from in another, which knows nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import DataLoader
from tests.resume.plans import QUICK
from tests.resume.test_same_rest import begin, generators, had, put_back, seed, whole

PLACES = {
    "shuffled, by the loader's generator": (1, 4),
    "shuffled, by torch's": (0, 5),
    "without workers": (0, 2),
    "persistent workers": (2, 4),
    "generators of the dataset's own": (0, 4),
    "a sampler that draws from everything": (0, 3),
    "a sampler with a state": (1, 0),
    "a stream": (0, 5),
    "a stream with a state": (0, 5),
    "a stream that counts epochs": (1, 4),
    "a map-style dataset with a state": (0, 3),
    "distributed": (1, 2),
}


def main(folder: Path) -> None:
    """The other process: what is left of each epoch, and what comes after it."""
    warnings.simplefilter("ignore")
    found = {}
    for name, (broken, _) in PLACES.items():
        plan = QUICK[name]
        loader = plan.make(DataLoader)
        loader.load_state_dict(json.loads((folder / f"{name}.json").read_text()))
        put_back(restored(json.loads((folder / f"{name}.program").read_text())))
        found[name] = [repr(had(begin(loader, epoch))) for epoch in range(broken, plan.epochs)]
        loader.close()
    (folder / "found").write_text(json.dumps(found))


def restored(program: Any) -> Any:
    """The states of the default generators, from JSON."""
    of_torch, of_random, of_numpy = program
    return (
        torch.tensor(of_torch, dtype=torch.uint8),
        (of_random[0], tuple(of_random[1]), of_random[2]),
        (of_numpy[0], np.array(of_numpy[1], dtype=np.uint32), *of_numpy[2:]),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_another_process_goes_on_from_json(tmp_path: Path) -> None:
    expected = {}
    for name, (broken, batches) in PLACES.items():
        plan = QUICK[name]
        epochs, _ = whole(plan)
        seed()
        loader = plan.make(DataLoader)
        for epoch in range(broken):
            had(begin(loader, epoch))
        iterator = begin(loader, broken)
        had(iterator, batches)
        (tmp_path / f"{name}.json").write_text(json.dumps(loader.state_dict()))
        of_torch, of_random, of_numpy = generators()
        program = [of_torch.tolist(), of_random, [of_numpy[0], of_numpy[1].tolist(), *of_numpy[2:]]]
        (tmp_path / f"{name}.program").write_text(json.dumps(program))
        del iterator
        loader.close()
        expected[name] = [repr(epochs[broken][batches:]), *map(repr, epochs[broken + 1 :])]
    subprocess.run(
        [sys.executable, "-m", "tests.resume.test_other_process", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        timeout=100,
        check=True,
    )
    found = json.loads((tmp_path / "found").read_text())
    for name in PLACES:
        assert found[name] == expected[name], name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
