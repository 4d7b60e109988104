"""Every package that people train with: workers are killed, one sample is corrupt, and the weights are those of an
undisturbed run on torch, bit for bit. Nothing is left behind: processes and names of shared memory are looked for in
`tests/conftest.py`, descriptors in `trainings/ways.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.frameworks.trainings import ways

pytestmark = [pytest.mark.frameworks, pytest.mark.faults, pytest.mark.timeout(300)]

WITHOUT_BAD_SAMPLE = {
    "pyg_nodes",  # what it loads are parts of one graph
    "web_dataset",  # its own handler leaves it out
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A training, where its data is, and what comes of it undisturbed; once for both ways."""

    @functools.cache
    def prepare(name: str) -> Any:
        folder = tmp_path_factory.mktemp(name)
        module = ways.prepare(name, folder)
        return module, folder, ways.undisturbed(module, folder)

    return prepare


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=pytest.mark.xdist_group(name))
        for name in ways.TRAININGS
        for way in ways.WAYS
        if (name, way) != ("pyg_nodes", "import")  # its loaders are made by PyG itself
    ],
)
def test_weights_are_those_of_an_undisturbed_run_on_torch(
    name: str, way: str, prepared: Callable[[str], Any]
) -> None:
    module, folder, expected = prepared(name)
    found = ways.WAYS[way](module, folder)
    assert found.weights == expected.weights
    assert found.deaths >= 2
    assert (found.bad_samples == 0) is (name in WITHOUT_BAD_SAMPLE)
    assert expected.deaths == expected.bad_samples == 0
