"""Every package that people train with: workers are killed, one sample is corrupt, and the weights are those of an
undisturbed run on torch, bit for bit. Nothing is left behind: `trainings/ways.py` looks for processes and descriptors
after each of them."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.run_report import logged_run
from tests.frameworks.trainings import ways

pytestmark = [pytest.mark.frameworks, pytest.mark.faults, pytest.mark.timeout(540)]

WITHOUT_BAD_SAMPLE = {
    "pyg_nodes",  # what it loads are parts of one graph
    "web_dataset",  # its own handler leaves it out
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What came of each training, by its name and the way, and the logbook of ``holdfast run``.

    In two programs, of which one is below ``holdfast run``, because importing the packages takes longest.
    """
    groups = ("undisturbed,import,install", "run")
    folders = [tmp_path_factory.mktemp("trainings") for _ in groups]
    programs = [
        ways.launched(group, folder, ways.TRAININGS)
        for group, folder in zip(groups, folders, strict=True)
    ]
    (several,), (run,) = (
        ways.ended(program, folder) for program, folder in zip(programs, folders, strict=True)
    )
    return several | run, folders[1] / "logbook"


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name in ways.TRAININGS
        for way in ways.WAYS
        if (name, way) != ("pyg_nodes", "import")  # its loaders are made by PyG itself
    ],
)
def test_weights_are_those_of_an_undisturbed_run_on_torch(
    name: str, way: str, trained: Any
) -> None:
    expected, found = (trained[0][name, one] for one in ("undisturbed", way))
    assert "failed" not in found, found["failed"]
    assert found["weights"] == expected["weights"]
    assert found["deaths"] >= 2
    assert (found["bad_samples"] == 0) is (name in WITHOUT_BAD_SAMPLE)
    assert expected["deaths"] == expected["bad_samples"] == 0


def test_what_happened_below_holdfast_run_is_in_its_logbook(trained: Any) -> None:
    deaths = sum(trained[0][name, "run"]["deaths"] for name in ways.TRAININGS)
    assert len(logged_run.read(trained[1]).incidents) == deaths
