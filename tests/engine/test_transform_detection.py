"""Whether a worker was in its dataset's transform is read from its stack, afterwards."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import holdfast
from holdfast.engine.transform_detection import in_transform


def crash(folder: str, index: int) -> int:
    """Once, at sample 3."""
    if index == 3 and not os.path.exists(f"{folder}/struck"):
        Path(folder, "struck").touch()
        ctypes.string_at(0)
    return index


class Compose:
    """As torchvision has it."""

    def __init__(self, *steps: Callable[[int], int]) -> None:
        self.steps = steps

    def __call__(self, index: int) -> int:
        for step in self.steps:
            index = step(index)
        return index


class Module(torch.nn.Module):
    def __init__(self, step: Callable[[int], int]) -> None:
        super().__init__()
        self.step = step

    def forward(self, index: int) -> int:
        return self.step(index)


class Folder(Dataset[Any]):
    def __init__(
        self,
        transform: Callable[[int], int] | None = None,
        read: Callable[[int], int] = lambda index: index,
    ) -> None:
        self.transform = transform
        self.read = read

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        index = self.read(index)
        return index if self.transform is None else self.transform(index)


def slowly(folder: str, index: int) -> int:
    if index == 3 and not os.path.exists(f"{folder}/struck"):
        Path(folder, "struck").touch()
        time.sleep(3600)
    return index


def shapes(folder: str) -> dict[str, tuple[Any, str]]:
    """Datasets, and the step that must be named."""
    step = functools.partial(crash, folder)
    return {
        "a function": (Folder(step), "transform"),
        "an object": (Folder(Compose(step)), "transform"),
        "a module": (Folder(Module(step)), "transform"),
        "a method": (Folder(Compose(step).__call__), "transform"),
        "of a subset": (Subset(Folder(Compose(step)), range(8)), "transform"),
        "of one of several": (ConcatDataset([Folder(Compose(step)), Folder()]), "transform"),
        "a stall": (Folder(Compose(functools.partial(slowly, folder))), "transform"),
        "reading": (Folder(Compose(), read=step), "fetch"),
        "no transform": (Folder(read=step), "fetch"),
        "not to be called": (Folder(transform="resize", read=step), "fetch"),  # type: ignore[arg-type]
    }


def test_deaths_in_a_transform_say_so(tmp_path: Path) -> None:
    wrong = {}
    for name in shapes(""):
        folder = tmp_path / name
        folder.mkdir()
        dataset, step = shapes(str(folder))[name]
        if name == "not to be called":
            dataset.__class__ = type("Odd", (Folder,), {"__getitem__": lambda s, i: s.read(i)})
        before = dict(vars(dataset))
        with holdfast.DataLoader(dataset, num_workers=1, stall_timeout=0.5) as loader:
            assert len(list(loader)) == len(dataset)
            (incident,) = loader.incidents
        assert dict(vars(dataset)) == before, "nothing of the user's is touched"
        doing = "transforming" if step == "transform" else "loading"
        if incident.step != step or f" while {doing} sample 3 " not in str(incident):
            wrong[name] = str(incident)
    assert not wrong


def test_a_stack_of_other_code_is_none_of_a_transform() -> None:
    dataset = Folder(Compose())
    line = Compose.__call__.__code__.co_firstlineno + 2
    frame = f'  File "{__file__}", line {line} in __call__\n'
    assert in_transform(dataset, frame)
    assert not in_transform(dataset, "")
    assert not in_transform(dataset, frame.replace(f"line {line}", "line 1"))
    assert not in_transform(dataset, frame.replace("__call__", "other"))
    assert not in_transform(dataset, frame.replace(f"line {line}", "line ???"))
    assert not in_transform(object(), frame)


@pytest.mark.parametrize("depth", [3, 30])
def test_a_dataset_that_holds_itself_is_not_followed_for_ever(depth: int) -> None:
    class Endless:
        def __init__(self) -> None:
            self.dataset = self
            self.datasets = [self] * depth

    assert not in_transform(Endless(), '  File "x.py", line 3 in f\n')
