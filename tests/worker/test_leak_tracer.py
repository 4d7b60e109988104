"""Which line leaks: on real datasets in a real process."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast.worker.leak_tracer import Round, Tracer, _suspects, findings, growing
from tests.support import warm

DATA = """
import ctypes, os, signal
import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

kept = []
os.environ.setdefault("COMMAND", str(os.getpid()))

class Clean(Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, index):
        if index == self.raises:
            raise ValueError("sample 7 is broken")
        return bytes(10_000)
    def __init__(self, raises=None):
        self.raises = raises

class Leaks(Clean):
    def __getitem__(self, index):
        kept.append(bytes(10_000))  # this line leaks
        return index

class Stream(IterableDataset):
    def __iter__(self):
        for n in range(30):
            kept.append([n] * 2000)  # this one too
            yield n

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t

class Crashes(Clean):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGSEGV)

class Workers(Clean):
    def __getitem__(self, index):
        info = get_worker_info()
        assert (info.id, info.num_workers, os.environ["COMMAND"] != str(os.getpid())) == (0, 1, True)
        return index

class Empty(Stream):
    def __iter__(self):
        return iter(())

class LeaksArrays(Clean):
    def __getitem__(self, index):
        kept.append(np.zeros(1000))  # and this
        return index

class LeaksNatively(Clean):
    def __getitem__(self, index):
        libc.memset(libc.malloc(20_000), 1, 20_000)
        return index

clean = Clean()
"""


def leaks(folder: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "leaky_data.py").write_text(DATA)
    command = ["-m", "holdfast.cli", "leaks", f"leaky_data:{name}", "--samples", "60", *more]
    return warm.run(command, timeout=60, cwd=folder)


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))


def line_of(words: str) -> int:
    return next(n for n, line in enumerate(DATA.splitlines(), 1) if words in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [("Leaks", "this line"), pytest.param("Stream", "this one", marks=pytest.mark.slow)],
)
def test_the_line_that_leaks_is_named(tmp_path: Path, name: str, words: str) -> None:
    done = leaks(tmp_path, name, "--json")
    assert done.returncode == 1, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["lines"][0]["name"].endswith(f"leaky_data.py:{line_of(words)}")
    assert told["lines"][0]["per_round"] / told["samples"] == pytest.approx(13_000, rel=0.3)
    assert told["native"] == 0
    assert told["containers"][0]["name"].startswith("leaky_data.kept (list of ")
    assert "tuple" not in [one["name"] for one in told["types"]], "those are the snapshot's"


@pytest.mark.slow
def test_types_are_named_also_of_objects_that_the_collector_does_not_know(tmp_path: Path) -> None:
    done = leaks(tmp_path, "LeaksArrays")
    assert done.returncode == 1, done.stderr
    assert f"leaky_data.py:{line_of('and this')}" in done.stdout
    assert "1.00 per sample  numpy.ndarray" in done.stdout


@pytest.mark.slow
def test_growth_that_python_does_not_know_of_is_called_native(tmp_path: Path) -> None:
    done = leaks(tmp_path, "LeaksNatively")
    assert done.returncode == 1, done.stderr
    assert "native" in done.stdout
    assert "leaky_data.py" not in done.stdout


@pytest.mark.parametrize(
    ("name", "more", "status", "said"),
    [
        pytest.param("clean", (), 0, "Nothing grows", marks=pytest.mark.slow),
        pytest.param(
            "Clean", ("--arg", "raises=7"), 3, "sample 7 is broken", marks=pytest.mark.slow
        ),
        ("absent", (), 2, "has no 'absent'"),
        ("Crashes", (), 3, "the worker crashed with a segmentation fault (SIGSEGV)"),
        pytest.param("Empty", (), 3, "gave no sample in epoch 1", marks=pytest.mark.slow),
        pytest.param("Workers", ("--samples", "2"), 0, "Nothing grows", marks=pytest.mark.slow),
        pytest.param(
            "Workers",
            ("--start-method", "spawn", "--samples", "2"),
            0,
            "Nothing grows",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_else_it_says(
    tmp_path: Path, name: str, more: tuple[str, ...], status: int, said: str
) -> None:
    done = leaks(tmp_path, name, *more)
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr


def test_what_fades_or_falls_is_no_leak() -> None:
    rounds = [{"leak": 10 * n, "cache": 100 - 100 // (n + 1), "saw": n % 2} for n in range(6)]
    assert growing(rounds) == [("leak", 50)]


def test_findings_without_growth_are_none() -> None:
    flat = [Round({("a.py", 1): 10**6}, {"dict": 5}, 10**8, 10**6, {"kept": 3}) for _ in range(4)]
    assert not findings(flat, 10).any


# -- objects that must not be touched ------------------------------------------------------

PITFALLS = '''
import sys, types

def touch(*_):
    raise RuntimeError("touched: this would load, connect or fail")

class Lazy:
    """Made when it is first used: asking what it is, is using it."""
    __class__ = property(touch)
    __getattr__ = touch

class Proxy:
    __dict__ = property(touch)

class Key:
    """Of a dict, and so hashed when it is put there; but never again."""
    def __init__(self):
        self.fresh = True
    def __hash__(self):
        if self.fresh:
            self.fresh = False
            return id(self)
        touch()
    __eq__ = touch

class LazyModule(types.ModuleType):
    __getattr__ = touch

class Meta(type):
    __eq__ = __hash__ = touch

class Registered(metaclass=Meta):
    pass

class Odd(dict):
    __len__ = __iter__ = __reversed__ = __getitem__ = items = values = keys = touch

sys.modules["a_lazy_object"] = Lazy()
sys.modules["a_lazy_module"] = LazyModule("a_lazy_module")
sys.modules["a_missing_one"] = None
lazy, proxy, registered = Lazy(), Proxy(), [Registered() for _ in range(100)]
by_key, odd = {}, Odd()
'''


@pytest.mark.usefixtures("few_modules")
def test_nothing_of_the_users_runs_because_of_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pitfalls.py").write_text(PITFALLS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("pitfalls", "a_lazy_object", "a_lazy_module", "a_missing_one"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    data = importlib.import_module("pitfalls")
    try:
        tracer = Tracer(1, rounds=3, dataset=data.lazy)
        found = None
        for _ in range(5):
            assert found is None
            for _ in range(100):
                data.by_key[data.Key()] = bytearray(1000)
            found = tracer.step()
    finally:
        for name in ("pitfalls", "a_lazy_object", "a_lazy_module", "a_missing_one"):
            del sys.modules[name]
    assert found is not None
    assert "pitfalls.by_key (dict of bytearray)" in [one.name for one in found.containers]


def test_packages_with_native_code_are_found_wherever_they_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, file in {
        "debians": "/usr/lib/python3/dist-packages/debians/_c.so",
        "locals": "/home/me/.local/lib/python3.12/site-packages/locals/_c.so",
        "built_here": "/home/me/project/built_here.cpython-312-x86_64-linux-gnu.so",
        "_of_python": sysconfig.get_paths()["stdlib"] + "/lib-dynload/_of_python.so",
    }.items():
        module = ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
    found = set(_suspects())
    assert {"debians", "locals", "built_here"} <= found
    assert "_of_python" not in found
