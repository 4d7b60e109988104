"""A training that was killed in the middle of an epoch, and continued by another process, ends with the weights of one that
was not: with every framework's own way to save and to resume. A worker is killed in both parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.resumed.parts import TRAININGS
from tests.frameworks.trainings import ways

for package in ("lightning", "accelerate", "transformers"):
    pytest.importorskip(package)
pytestmark = [pytest.mark.frameworks, pytest.mark.faults, pytest.mark.timeout(540)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What came of all trainings, and what was said."""
    folder = tmp_path_factory.mktemp("resumed")
    return folder, ways.wait_for(ways.started(["-m", "tests.frameworks.resumed", str(folder)]))


def results(folder: Path, part: str) -> list[tuple[str, int]]:
    """Of each rank: its weights, and how many workers died."""
    found = [path.read_text().split() for path in sorted(folder.glob(f"{part}-?"))]
    return [(words[0], int(words[2])) for words in found]


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, (_, many) in TRAININGS.items() for way in many]
)
def test_weights_are_those_of_a_run_without_a_break(
    name: str, way: str, trained: tuple[Path, str]
) -> None:
    folder, said = trained
    ranks = TRAININGS[name][0]
    whole = results(folder / f"{name}-whole", "whole")
    assert len(whole) == ranks, said
    assert results(folder / f"{name}-{way}", "first") == [("killed", 1)] * ranks, said
    second = results(folder / f"{name}-{way}", "second")
    assert [weights for weights, _ in second] == [weights for weights, _ in whole], said
    assert [deaths for _, deaths in second] == [1] * ranks
