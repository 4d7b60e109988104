"""No finaliser of ours looks for a name in its module.

Objects that a script's globals hold die when the interpreter has set the names of most modules to None already; what
their finalisers call finds nothing there. So here is a script whose objects die as late as possible, after every
module of ours has been taken apart: held by a module that was there before. It notes which functions of ours are
called from there on, and these are looked through for names of their modules, also in branches that were not taken.
"""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

from tests.support.scripts import run_script

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
EXPECTED = {"_bury", "give_back", "close", "close_all", "_shutdown_workers", "dismiss"}
HOOKS = {"before", "in_parent", "in_child", "sweep", "_in_child", "_delivered", "delivered"}

SCRIPT = f"""
import gc, os, sys
import torch
import holdfast
from torch.utils.data import Dataset

import pytest

class Data(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.full((8000,), float(index))

class Last:
    # Whatever it needs is its own: the names of this script mean nothing either when it dies.
    collect, fork, leave, wait, write, profile = (
        gc.collect, os.fork, os._exit, os.waitpid, os.write, sys.setprofile
    )
    forks = {sys.version_info < (3, 12)}  # since then no process can at that stage

    def note(self, frame, event, arg):
        if event == "call" and "/src/holdfast/" in frame.f_code.co_filename:
            code = frame.f_code
            self.seen.add((code.co_filename, code.co_name, code.co_firstlineno))

    def __del__(self):
        names = [module.__dict__.get(name) for module, name in self.names]
        self.write(1, f"taken apart: {{names.count(None)}} of {{len(names)}}\\n".encode())
        self.seen = set()
        self.profile(self.note)
        self.kept = self.cycle = None
        self.collect()
        if self.forks:  # with a batch in hand
            child = self.fork()
            if child == 0:
                self.profile(None)
                self.tell()
                self.leave(0)
            self.wait(child, 0)
        self.iterator._shutdown_workers()
        self.loader.close()
        self.watch.dismiss()
        for name in list(self.__dict__):
            if name != "seen":
                self.__dict__[name] = None
        self.collect()
        self.profile(None)
        self.tell()

    def tell(self):
        for file, name, line in self.seen:
            self.write(1, f"called: {{file}}:{{line}}:{{name}}\\n".encode())

last = os.last = Last()
last.loader = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True)
last.kept = list(DataLoader(Data(), batch_size=2, num_workers=2))
last.cycle = [next(iter(DataLoader(Data(), batch_size=2, num_workers=2)))]
last.cycle.append(last.cycle)
last.iterator = iter(last.loader)
last.watch = last.iterator._pool.background
last.batch = next(last.iterator)
last.packed = holdfast.PackedList([f"some text {{number}}" for number in range(10_000)])
last.modules = [module for name, module in sys.modules.items() if name.startswith("holdfast")]
last.names = [
    (module, name) for module in last.modules for name in vars(module) if not name.startswith("__")
]
del last
"""


@pytest.mark.slow
def test_nothing_that_runs_after_its_module_looks_for_a_name_in_it() -> None:
    ended = run_script("holdfast", SCRIPT, as_file=True)
    # Hooks of Python's own (threading, logging) do complain when a process forks as late as that.
    assert not [words for words in ("holdfast", "Last") if words in ended.err], ended.err
    assert ended.code == 0
    told, *calls = ended.out.splitlines()
    _, _, found, _, total = told.split()
    assert found == total, "the modules of holdfast were not all taken apart: nothing was shown"
    called = {tuple(line.removeprefix("called: ").rsplit(":", 2)) for line in calls}
    names = {name for _, _, name in called}
    assert names >= EXPECTED | (HOOKS if sys.version_info < (3, 12) else set())
    assert not {
        f"{Path(file).name}:{line} {name} looks for {wanted!r}"
        for file, line, name in called
        for wanted in globals_of(Path(file), int(line), name)
    }


def globals_of(file: Path, line: int, name: str) -> set[str]:
    """The names of its module that a function reads, wherever in it."""
    module = compile(file.read_text(), str(file), "exec")
    (function,) = (
        code for code in inside(module) if (code.co_firstlineno, code.co_name) == (line, name)
    )
    return {
        instruction.argval
        for code in inside(function)
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL" and not hasattr(builtins, instruction.argval)
    }


def inside(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from inside(constant)
