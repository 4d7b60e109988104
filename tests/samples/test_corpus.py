"""Really damaged files, and decoders that do the worst: the run ends well and names all and only
the bad ones, with the right reason."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from holdfast import DataLoader
from tests.samples import corpus

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own words about damaged files
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    folder = tmp_path_factory.mktemp("corpus")
    yield corpus.make(folder)
    for path in folder.iterdir():
        if not path.is_symlink():
            path.chmod(0o700)


@pytest.fixture(scope="module")
def truths(paths: list[Path]) -> list[tuple[str, Any]]:
    return corpus.truths(paths)


def test_the_corpus_is_what_it_should_be(paths: list[Path], truths: list[tuple[str, Any]]) -> None:
    """Many kinds of damage, many kinds of errors, and enough that is good."""
    by_name = {path.name: truth for path, truth in zip(paths, truths, strict=True)}
    assert all(truth[0] == "good" for name, truth in by_name.items() if name.startswith("good"))
    certain = ("empty", "zeros", "folder", "dangling", "circle", "vanishing", "bomb", "cut-1.")
    assert all(truth[0] != "good" for name, truth in by_name.items() if name.startswith(certain))
    assert len({error for _, error in truths if isinstance(error, str)}) >= 12
    assert len(paths) > 250


@pytest.mark.parametrize(
    ("policy", "workers"),
    [("skip", 2), ("replace", 2), ("skip", 0), pytest.param("replace", 0, marks=pytest.mark.slow)],
)
def test_damaged_files(
    policy: str, workers: int, paths: list[Path], truths: list[tuple[str, Any]]
) -> None:
    if workers == 0 and any(kind == "killed" for kind, _ in truths):
        pytest.skip("a decoder on this machine dies of one of the files; only workers survive that")
    with DataLoader(
        corpus.Files(paths), batch_size=8, num_workers=workers, on_bad_sample=policy
    ) as loader:
        batches = [batch.tolist() for batch in loader]
    good = {(index, found) for index, (kind, found) in enumerate(truths) if kind == "good"}
    bad = {index: truth for index, truth in enumerate(truths) if truth[0] != "good"}
    assert {tuple(row) for batch in batches for row in batch} == good
    assert {one.index: (one.kind, one.error) for one in loader.bad_samples} == bad
    assert all(one.name == str(paths[one.index]) for one in loader.bad_samples)
    if policy == "replace":
        assert [len(batch) for batch in batches[:-1]] == [8] * (len(paths) // 8)
    else:
        assert sum(len(batch) for batch in batches) == len(good)


# -- decoders that do the worst -----------------------------------------------------------


def segfault() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(0)


def leave_politely() -> None:
    sys.exit("I cannot go on")


def allocate_without_end() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    try:
        hoard = []
        while True:
            hoard.append(bytearray(8 << 20))
    finally:
        hoard = []
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def killed_for_its_memory() -> None:
    """As the kernel does it: SIGKILL, from outside."""
    os.kill(os.getpid(), signal.SIGKILL)


def recurse_without_end() -> None:
    recurse_without_end()


def recurse_in_c_without_end() -> None:
    """Beyond the stack that C has."""
    nested: Any = ()
    for _ in range(300_000):
        nested = (nested,)
    hash(nested)


def wait_for_ever() -> None:
    time.sleep(10_000)


def count_for_ever() -> None:
    while True:
        pass


def read_what_was_cut_off() -> None:
    """A mapped file that is truncated while it is read: SIGBUS."""
    import mmap
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 20)
        mapped = mmap.mmap(file.fileno(), 1 << 20)
        file.truncate(0)
        mapped[1 << 19]


DECODERS: list[tuple[Any, str, str]] = [
    (segfault, "killed", "SIGSEGV"),
    (os.abort, "killed", "SIGABRT"),
    (leave, "killed", "exit code 0"),
    (leave_politely, "raised", "SystemExit"),
    (allocate_without_end, "raised", "MemoryError"),
    (killed_for_its_memory, "killed", "SIGKILL"),
    (recurse_without_end, "raised", "RecursionError"),
    (recurse_in_c_without_end, "killed", "SIGSEGV"),
    (wait_for_ever, "stalled", "stalled"),
    (count_for_ever, "stalled", "stalled"),
    (read_what_was_cut_off, "killed", "SIGBUS"),
]


class Decoders(Dataset[Any]):
    """Every third sample is loaded by one of them."""

    def __len__(self) -> int:
        return 3 * len(DECODERS)

    def __getitem__(self, index: int) -> Any:
        if index % 3 == 1:
            DECODERS[index // 3][0]()
        return torch.tensor([index, index * index])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", pytest.param("replace", marks=pytest.mark.slow)])
def test_decoders_that_do_the_worst(policy: str) -> None:
    with DataLoader(
        Decoders(), batch_size=4, num_workers=2, on_bad_sample=policy, stall_timeout=1
    ) as loader:
        batches = [batch.tolist() for batch in loader]
    good = {index for index in range(len(Decoders())) if index % 3 != 1}
    assert {tuple(row) for batch in batches for row in batch} == {(i, i * i) for i in good}
    assert {one.index: (one.kind, one.error) for one in loader.bad_samples} == {
        3 * place + 1: (kind, error) for place, (_, kind, error) in enumerate(DECODERS)
    }
    if policy == "replace":
        assert [len(batch) for batch in batches] == [4] * 8 + [1]
