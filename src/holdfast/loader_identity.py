"""Where a message comes from: which loader of the program, and which rank of a distributed run.

"worker 1" says nothing if a program has a loader for training and one for validation, in eight
processes that write to one log. A loader has the name that the user gives (``name=``), or that of
its dataset; the rank is shown if there are several.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.introspection.attributes import own_one

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_MAX_DEPTH = 3  # how deep datasets within datasets are named
_DATASETS = {"Dataset", "IterableDataset"}  # by name: torch's, and those of other libraries
_SHOWN_INNER = 2  # how many of several inner datasets are named
# torch puts these around a datapipe when a loader is made of it.
_WRAPPERS = {"_IterDataPipeSerializationWrapper", "_MapDataPipeSerializationWrapper"}


class Rank(NamedTuple):
    """The number of a process in a distributed run, and of how many; None if not known."""

    number: int
    of: int | None

    @property
    def told(self) -> int | None:
        """Its number, if there are several ranks."""
        return self.number if self.number or (self.of or 1) > 1 else None


@dataclass(frozen=True, slots=True)
class LoaderIdentity:
    """A loader, in one rank."""

    loader: str = ""
    rank: int | None = None  # None in a run of one process

    @property
    def prefix(self) -> str:
        """The prefix of a message: ``"[train, rank 1] "``."""
        words = [self.loader] if self.loader else []
        if self.rank is not None:
            words.append(f"rank {self.rank}")
        return f"[{', '.join(words)}] " if words else ""


def rank(environment: Mapping[str, str] | None = None) -> Rank:
    """The rank of this process now; ``Rank(0, 1)`` for a run of one process.

    Once `torch.distributed` is set up, it is asked first: Lightning's own launcher and
    ``torch.multiprocessing.spawn`` put no rank into the environment, and under Slurm or Kubernetes
    all processes that they start on a machine inherit the same one.
    """
    if environment is None:
        environment = os.environ
        joined = _joined()
        if joined is not None and joined.told is not None:
            return joined
    for number, size in _LAUNCHERS:
        if environment.get(number, "").isdigit():
            of = environment.get(size, "")
            return Rank(int(environment[number]), int(of) if of.isdigit() else None)
    return Rank(0, 1)


def _joined() -> Rank | None:
    """The rank in `torch.distributed`, which is not imported here: a program that uses it has."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Rank(distributed.get_rank(), distributed.get_world_size())


def name_of(dataset: Any) -> str:
    """The default name of a loader, from its dataset: ``"Subset of ImageFolder"``."""
    return _name_of(dataset, _MAX_DEPTH)


def _name_of(dataset: Any, depth: int) -> str:
    name = type(dataset).__name__
    if name in _WRAPPERS:
        return _name_of(own_one(dataset, "_datapipe"), depth)
    inner = list(_inner(dataset)) if depth else []
    names = list(dict.fromkeys(_name_of(one, depth - 1) for one in inner))
    if not names:
        return name
    more = ", …" if len(names) > _SHOWN_INNER else ""
    return f"{name} of {', '.join(names[:_SHOWN_INNER])}{more}"


def _inner(dataset: Any) -> Iterator[Any]:
    """The datasets that a dataset is made of, in the attributes of Subset and ConcatDataset."""
    for attribute in ("dataset", "datasets"):
        try:
            found = own_one(dataset, attribute)
        except KeyError:
            continue
        for one in found if type(found) in (list, tuple) else (found,):
            if any(base.__name__ in _DATASETS for base in type(one).__mro__):
                yield one
