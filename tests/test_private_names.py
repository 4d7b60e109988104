"""Private names of torch and Python: all in one module, and each can go."""

from __future__ import annotations

import ast
import random
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.data._utils.worker

import holdfast
from holdfast import private_names
from holdfast.private_names import PARTS
from tests.support.scripts import run_script

PACKAGE = Path(holdfast.__file__).parent
WITHOUT_TORCH = {
    "takeover/bootstrap.py": {"_BaseDataLoaderIter"},  # there it is said what it does without
    "verbs/run.py": {"_args_from_interpreter_flags"},
}
"""Modules that must not import torch have to find the names themselves."""
DOCUMENTED = {"_exit", "_getframe", "_is_gil_enabled"}


def test_nothing_is_wrong_with_the_torch_and_python_that_are_installed() -> None:
    assert [part for part in PARTS if part.wrong] == []
    assert all(part.used_for and part.without for part in PARTS)


# -- nowhere else ----------------------------------------------------------------------------------


def imported(tree: ast.Module) -> dict[str, str]:
    """Names that stand for modules of others, and for what was imported from them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                found[one.asname or one.name.partition(".")[0]] = one.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for one in node.names:
                found[one.asname or one.name] = f"{node.module}.{one.name}"
    return {name: place for name, place in found.items() if not place.startswith("holdfast")}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def private_names_in(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    modules = imported(tree)
    for place in modules.values():
        if any(map(is_private, place.split("."))):
            yield place
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        root: Any = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in modules:
            yield ast.unparse(node)


def test_no_other_module_names_what_is_private_to_torch_or_python() -> None:
    found = {
        f"{where}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if (where := file.relative_to(PACKAGE).as_posix()) != "private_names.py"
        for name in private_names_in(file)
        if name.rpartition(".")[2] not in WITHOUT_TORCH.get(where, ())
    }
    assert found == {"engine/signals.py: _signal"}  # a tenth of the time; see there


# -- where one is gone -----------------------------------------------------------------------------


def test_numpy_computes_torchs_seeds_for_itself() -> None:
    draw = random.Random(0)
    torchs: Any = torch.utils.data._utils.worker._generate_state
    for _ in range(200):
        base, worker = draw.getrandbits(63), draw.randrange(1000)
        assert list(private_names._numpy_seeds(base, worker)) == list(torchs(base, worker))


REMOVE = """
    import importlib, logging, sys
    {more}
    for place in {places!r}:
        module, _, path = place.partition(":")
        *parts, last = path.split(".")
        found = importlib.import_module(module)
        for part in parts:
            found = getattr(found, part)
        delattr(found, last)
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
"""
STREAM = """
    import random, warnings
    import numpy, torch
    from torch.utils.data import Dataset
    from holdfast import DataLoader

    class Drawn(Dataset):
        def __len__(self): return 6
        def __getitem__(self, index):
            info = torch.utils.data.get_worker_info()
            drawn = random.random() + numpy.random.rand() + torch.rand(()).item()
            return {{"x": torch.full((100,), index + drawn), "seed": info.seed, "n": numpy.ones(3)}}

    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(Drawn(), batch_size=2, num_workers=2, shuffle=True)
        iterator = iter(loader)
        for batch in iterator:
            print("batch", batch["x"].sum().item(), batch["seed"].tolist(), batch["n"].sum().item())
    print("engine", type(iterator).__module__)
    for one in caught:
        if "multi-threaded" not in str(one.message):
            print("warned", one.message)
    print("known", sys.modules["holdfast.private_names"].PARTS is not None)
"""


def ran_without(places: list[str], more: str = "") -> list[str]:
    """What a script says that removes these names before it imports holdfast."""
    removal = textwrap.dedent(REMOVE).format(places=places, more=more)
    ended = run_script("stock", removal + textwrap.dedent(STREAM).format())
    assert (ended.code, ended.err) == (0, "")
    return ended.out.splitlines()


def place(name: str) -> str:
    """Where a name can be removed: "module:path"."""
    module = name.rpartition(".")[0]
    while module not in sys.modules or not hasattr(sys.modules[module], "__spec__"):
        module = module.rpartition(".")[0]
    return f"{module}:{name.removeprefix(module)[1:]}"


def test_without_any_name_that_is_not_needed_the_batches_are_the_same() -> None:
    kept = ran_without([])
    assert "engine holdfast.engine.iterator" in kept
    assert not any("differ" in line for line in kept)
    removable = [
        part.name
        for part in PARTS
        if not part.needed
        and not part.name.startswith(("torch.Tensor", "torch.TypedStorage", "torch.UntypedStorage"))
        # What torch or Python could not do without.
        and "_MultiProcessingDataLoaderIter" not in part.name
        and "_utils.collate" not in part.name
        and "DisableTorchFunction" not in part.name
        and not part.name.startswith(
            ("multiprocessing.", "threading.", "subprocess.", "atexit.", "os.")
        )
    ]
    assert len(removable) >= 5
    told = ran_without([place(name) for name in removable])
    (line,) = (line for line in told if "holdfast was tried with" in line)
    assert all(name in line for name in removable)
    batches = [line for line in told if line.startswith("batch")]
    assert batches == [line for line in kept if line.startswith("batch")]
    assert "engine holdfast.engine.iterator" in told
    assert not any(line.startswith("warned") for line in told)


def test_without_a_name_that_is_needed_workers_are_torchs_and_that_is_said() -> None:
    """An attribute of torch's iterators that torch itself uses for DataPipes only."""
    told = ran_without(
        [],
        "from torch.utils.data.dataloader import _BaseDataLoaderIter as base; made = base.__init__; "
        "base.__init__ = lambda self, loader: (made(self, loader), delattr(self, '_rank'))[0]",
    )
    assert "engine torch.utils.data.dataloader" in told
    assert any(
        line.startswith("warned") and "(AttributeError: without _rank)" in line for line in told
    )
