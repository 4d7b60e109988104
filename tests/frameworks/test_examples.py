"""Every file in examples/frameworks runs to its end while its workers are killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frameworks.trainings import ways

pytestmark = [pytest.mark.frameworks, pytest.mark.faults, pytest.mark.timeout(540)]

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "frameworks").glob("*.py"))
WITH_RANKS = "torch_ddp"
DIED = re.compile(r"^(?:rank \d, )?workers that died: (\d+)$", re.M)


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """What each example printed."""
    alone = [str(path) for path in EXAMPLES if path.stem != WITH_RANKS]
    together = [str(path) for path in EXAMPLES if path.stem == WITH_RANKS]
    programs = [
        ways.started(["-m", "tests.frameworks.run_examples", *alone], HOLDFAST_FAULTS=ways.KILLS),
        ways.started(["-m", *ways.torchrun(2), *together], HOLDFAST_FAULTS=ways.KILLS),
    ]
    said, ranks = [ways.wait_for(program) for program in programs]
    parts = re.split(r"^== (\w+)$", said, flags=re.M)
    return {**dict(zip(parts[1::2], parts[2::2], strict=True)), WITH_RANKS: ranks}


@pytest.mark.parametrize("name", [path.stem for path in EXAMPLES])
def test_an_example_survives_its_workers(name: str, outputs: dict[str, str]) -> None:
    deaths = DIED.findall(outputs[name])
    assert len(deaths) == (2 if name == WITH_RANKS else 1), outputs[name]
    assert all(int(count) >= 2 for count in deaths), outputs[name]
