"""torch's contract, with worker threads: the same tests as for processes (`tests/contract`), but
those that are about processes."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.contract import test_3_delivery, test_8_collate
from tests.support.fixtures import holdfast_class, loader_class

__all__ = ["holdfast_class", "loader_class", "threads", "which"]

_ABOUT_PROCESSES = {
    "test_where_torch_refuses_in_a_worker_only_so_does_holdfast",
    "test_the_private_variable_of_torchs_worker_module_is_set_in_workers",
}


def _taken_from(module: ModuleType) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if name.startswith("test_") and name not in _ABOUT_PROCESSES
    }


globals().update(_taken_from(test_3_delivery))
globals().update(_taken_from(test_8_collate))


@pytest.fixture
def which() -> str:
    return "holdfast"


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_WORKER_METHOD", "thread")
