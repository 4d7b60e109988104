"""Which samples to scan: all, a random part, or those of a list."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.samples.bad_sample import BadSample, name_of
from holdfast.samples.quarantine import Quarantine, label
from holdfast.scan.dataset_source import SourceError


def part(size: int, sample: int | None, seed: int) -> Sequence[int]:
    """`sample` of `size` indices, in order; all if `sample` is None or not less than `size`."""
    if sample is None or sample >= size:
        return range(size)
    return sorted(random.Random(seed).sample(range(size), sample))


@dataclass(frozen=True, slots=True)
class Listed:
    """The samples of a list of bad samples, looked up in the dataset as it is now."""

    indices: list[int]
    gone: tuple[BadSample, ...]  # not in the dataset any more
    damaged: list[str]  # lines, in words

    @classmethod
    def read(cls, path: Path, dataset: Any) -> Listed:
        """Samples that have moved since are found by their names."""
        if not path.is_file():
            raise SourceError(f"{path}: there is no such file")
        found = Quarantine.of(str(path), dataset).read()
        indices = {bad.index for bad in found.records if _is_there(bad, dataset)}
        moved = [bad for bad in found.records if not _is_there(bad, dataset)]
        names = {name_of(dataset, index): index for index in range(len(dataset) if moved else 0)}
        gone = []
        for bad in moved:
            if bad.name is not None and bad.name in names:
                indices.add(names[bad.name])
            else:
                gone.append(bad)
        if not indices and not gone:
            raise SourceError(f"{path} lists no sample of this dataset ({label(dataset)})")
        return cls(sorted(indices), tuple(gone), found.damaged)


def _is_there(bad: BadSample, dataset: Any) -> bool:
    """Whether its index still means the same sample, as far as names show."""
    if type(bad.index) is not int or not 0 <= bad.index < len(dataset):
        return False
    name = name_of(dataset, bad.index)
    return name is None or bad.name is None or name == bad.name
