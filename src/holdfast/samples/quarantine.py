"""The quarantine: a list of bad samples that outlives the run, as JSON lines.

Several ranks, loaders and runs may share one file without knowing of each other. There is no lock
that a killed process could leave behind: a record is one line, appended by one ``write`` to a file
opened with ``O_APPEND`` and then synced, and nobody ever rewrites what is there. A process killed
in the middle of a write can at worst leave a torn line; whoever writes next begins a new one. What
cannot be read is reported with its line number and left where it is.

An index means a sample only together with its dataset. So each line says which dataset it is
about, by class and size (see `label`), and others' lines are passed over. Two folders of equal size
read by one class would look the same. If the sample's name is a path, the line therefore also says
which of the dataset's settings show in it (see `shown_in`): a list made with ``root="train"`` names
``train/7.jpg``, and is not for a dataset whose root is another.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast import lines
from holdfast.samples.record import BadSample, key_of

__all__ = ["Found", "Quarantine", "label"]

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Found:
    """What was new in the file."""

    records: list[BadSample]
    damaged: list[str]  # in words, with line numbers


class Quarantine:
    """One file, read bit by bit and only ever added to."""

    def __init__(self, path: str, dataset: str, settings: Collection[str] = ()) -> None:
        self.path = path
        self.dataset = dataset
        self.settings = settings
        self._read_to = 0
        self._lines = 0

    @classmethod
    def of(cls, path: str, dataset: Any) -> Quarantine:
        """The file as `dataset` reads and writes it."""
        return cls(path, label(dataset), settings_of(dataset))

    def read(self) -> Found:
        """Whatever has been added since the last time, by whomever."""
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._read_to:  # somebody has cut it short
                    self._read_to = self._lines = 0
                file.seek(self._read_to)
                new = file.read()
        except FileNotFoundError:
            return Found([], [])
        # A last line without its end may still be on its way; it is read when the next one is.
        whole = new[: new.rfind(b"\n") + 1]
        rest = new[len(whole) :]
        if rest and not whole and self._read_to == 0:
            whole = new  # a file written by hand, or torn in its first line
        self._read_to += len(whole)
        found = Found([], [])
        for line in whole.split(b"\n")[: None if whole == new and rest else -1]:
            self._lines += 1
            if line.strip():
                self._take_in(line, found)
        return found

    def _take_in(self, line: bytes, found: Found) -> None:
        try:
            fields = json.loads(line)
            record = BadSample.from_json(fields)
        except (ValueError, RecursionError) as error:
            found.damaged.append(f"line {self._lines} of {self.path} is damaged: {error}")
            return
        where = shown_in(record.name, self.settings)
        if fields.get("dataset") in (None, self.dataset) and fields.get("where", where) == where:
            found.records.append(record)

    def append(self, *bad: BadSample) -> None:
        """Add records and see that they are on the disk. Raises OSError if they cannot be."""
        about = {"holdfast": VERSION, "dataset": self.dataset}
        records = b""
        for one in bad:
            where = shown_in(one.name, self.settings)
            fields = {**about, **({"where": where} if where else {}), **one.to_json()}
            records += json.dumps(fields, ensure_ascii=True).encode() + b"\n"
        lines.append(self.path, records, sync=True)


def label(dataset: Any) -> str:
    """Which dataset an index belongs to, as far as can be told from outside.

    A dataset that names its samples is checked by those names, sample by sample, and may grow.
    """
    kind = f"{_module_of(type(dataset))}.{type(dataset).__qualname__}"
    indices, inner = getattr(dataset, "indices", None), getattr(dataset, "dataset", None)
    if inner is not None and indices is not None:  # torch's Subset: the same class for every split
        keys = [key_of(index) for index in indices]  # 3 is 3, whoever's integer it is
        chosen = hashlib.sha256(repr(keys).encode()).hexdigest()[:8]
        return f"{kind}({label(inner)}, {chosen})"
    if callable(getattr(dataset, "sample_name", None)):
        return kind
    try:
        return f"{kind}[{len(dataset)}]"
    except Exception:  # it has no length
        return kind


def settings_of(dataset: Any) -> frozenset[str]:
    """The text and paths among a dataset's attributes: its root, its split."""
    inner = getattr(dataset, "dataset", None)
    if inner is not None and hasattr(dataset, "indices"):
        return settings_of(inner)
    values = getattr(dataset, "__dict__", {}).values()
    texts = (os.fspath(one) for one in values if isinstance(one, (str, os.PathLike)))
    return frozenset(one.rstrip(os.sep) for one in texts if isinstance(one, str)) - {""}


def shown_in(name: str | None, settings: Collection[str]) -> list[str]:
    """Which settings are part of a path, as whole folders."""
    if name is None:
        return []
    path = f"{os.sep}{name}{os.sep}"
    return sorted(one for one in settings if f"{os.sep}{one}{os.sep}" in path)


def _module_of(kind: type) -> str:
    """Its module, by the name under which others import it.

    A script calls itself ``__main__``; to `holdfast scan`, which imports it, it is ``train``.
    """
    if kind.__module__ != "__main__":
        return kind.__module__
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m package.train
        return str(spec.name)
    return Path(path).stem if path else "__main__"
