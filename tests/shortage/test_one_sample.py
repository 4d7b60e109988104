"""One sample that needs more memory than there is, in a real control group, under the policy for
bad samples: it costs that sample, however it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.shortage.runs import run
from tests.support.groups import memory_group

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("memory_groups"),
]

LIMIT = 700 << 20
TRAINER = """
import json, sys
import torch
from holdfast import DataLoader

class Devours:
    def __len__(self):
        return 24
    def __getitem__(self, index):
        if index == 13:
            held = []
            while True:
                held.append(b"x" * (8 << 20))  # until it is refused
        return torch.rand(4) + index

if __name__ == "__main__":
    torch.manual_seed(1)
    loader = DataLoader(
        Devours(), batch_size=4, num_workers=2, on_bad_sample="skip",
        worker_memory_limit=json.loads(sys.argv[1]), logbook=sys.argv[2],
    )
    got = [int(one) for batch in loader for one in batch[:, 0]]
    print(json.dumps({
        "got": got,
        "bad": [one.to_json() for one in loader.bad_samples],
        "incidents": [one.to_json() for one in loader.incidents],
    }))
"""
ALL_BUT_ONE = [number for number in range(24) if number != 13]


def train(limit: Any, folder: Path) -> tuple[dict[str, Any], int]:
    """What the trainer says, and how many the kernel has killed."""
    script = folder / "train.py"
    script.write_text(TRAINER)
    with memory_group(LIMIT) as group:
        done = run([str(script), json.dumps(limit), str(folder / "book")], group)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["got"] == ALL_BUT_ONE
    (bad,) = told["bad"]
    assert bad["index"] == 13
    return told, done.kills


@pytest.mark.slow
def test_one_that_the_kernel_kills_for_is_found_out_and_left_out(tmp_path: Path) -> None:
    """Nothing bounds the worker here, so the kernel does; it takes the worker and not the trainer."""
    told, kills = train(None, tmp_path)
    assert kills == len(told["incidents"]) > 0
    assert {one["cause"] for one in told["incidents"]} == {"oom-killed"}
    assert {one["sample"] for one in told["incidents"]} == {13}
    assert told["bad"][0]["kind"] == "killed"


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["auto", pytest.param("150MiB", marks=pytest.mark.slow)])
def test_one_that_a_limit_stops_is_an_error_and_no_death(limit: str, tmp_path: Path) -> None:
    told, kills = train(limit, tmp_path)
    assert kills == 0
    assert told["incidents"] == []
    assert told["bad"][0]["error"] == "MemoryError"
