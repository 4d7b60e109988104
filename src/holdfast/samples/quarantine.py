"""The quarantine: a list of bad samples that outlives the run, as JSON lines.

Several ranks, loaders and runs may share one file without knowing of each other. There is no lock
that a killed process could leave behind. A record is one line, appended by one ``write`` to a file
opened with ``O_APPEND`` and then synced. Existing lines are never rewritten. A process that is
killed in the middle of a write can at worst leave a torn line; the next writer begins a new one.
Lines that cannot be read are reported with their number and left where they are.

An index identifies a sample only together with its dataset. So each line says which dataset it is
about, by class and size (see `label`), and lines of other datasets are ignored. Two folders of
equal size read by one class would look the same. If the sample's name is a path, the line therefore
also lists the settings of the dataset that occur in the path (see `shown_in`): a list made with
``root="train"`` names ``train/7.jpg``, and does not apply to a dataset with another root.
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

from holdfast import jsonl
from holdfast.samples.bad_sample import BadSample
from holdfast.samples.sample_keys import key_of

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class QuarantineContents:
    """What was added to the file since it was last read."""

    records: list[BadSample]
    damaged: list[str]  # in words, with line numbers


class Quarantine:
    """One file, read incrementally and only ever appended to."""

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

    def read(self) -> QuarantineContents:
        """All lines added since the last call, by any process."""
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._read_to:  # it was truncated
                    self._read_to = self._lines = 0
                file.seek(self._read_to)
                new = file.read()
        except FileNotFoundError:
            return QuarantineContents([], [])
        # A last line without its end may still be being written; it is read with the next one.
        whole = new[: new.rfind(b"\n") + 1]
        rest = new[len(whole) :]
        if rest and not whole and self._read_to == 0:
            whole = new  # a file written by hand, or torn in its first line
        self._read_to += len(whole)
        found = QuarantineContents([], [])
        for line in whole.split(b"\n")[: None if whole == new and rest else -1]:
            self._lines += 1
            if line.strip():
                self._take_in(line, found)
        return found

    def _take_in(self, line: bytes, found: QuarantineContents) -> None:
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
        """Add records and sync them to the disk. Raises OSError if that fails."""
        about = {"holdfast": VERSION, "dataset": self.dataset}
        records = b""
        for one in bad:
            where = shown_in(one.name, self.settings)
            fields = {**about, **({"where": where} if where else {}), **one.to_json()}
            records += json.dumps(fields, ensure_ascii=True).encode() + b"\n"
        jsonl.append(self.path, records, sync=True)


def label(dataset: Any) -> str:
    """A text that identifies the dataset, as far as its class and size can.

    Without the size if the dataset names its samples: they are compared by name, so it may grow.
    """
    kind = f"{_module_of(type(dataset))}.{type(dataset).__qualname__}"
    indices, inner = getattr(dataset, "indices", None), getattr(dataset, "dataset", None)
    if inner is not None and indices is not None:  # torch's Subset: the same class for every split
        keys = [key_of(index) for index in indices]  # equal for int, NumPy and torch integers
        chosen = hashlib.sha256(repr(keys).encode()).hexdigest()[:8]
        return f"{kind}({label(inner)}, {chosen})"
    if callable(getattr(dataset, "sample_name", None)):
        return kind
    try:
        return f"{kind}[{len(dataset)}]"
    except Exception:  # it has no length
        return kind


def settings_of(dataset: Any) -> frozenset[str]:
    """The strings and paths among a dataset's attributes, such as its root and its split."""
    inner = getattr(dataset, "dataset", None)
    if inner is not None and hasattr(dataset, "indices"):
        return settings_of(inner)
    values = getattr(dataset, "__dict__", {}).values()
    texts = (os.fspath(one) for one in values if isinstance(one, (str, os.PathLike)))
    return frozenset(one.rstrip(os.sep) for one in texts if isinstance(one, str)) - {""}


def shown_in(name: str | None, settings: Collection[str]) -> list[str]:
    """Which settings occur in a path, as whole folders."""
    if name is None:
        return []
    path = f"{os.sep}{name}{os.sep}"
    return sorted(one for one in settings if f"{os.sep}{one}{os.sep}" in path)


def _module_of(kind: type) -> str:
    """Its module, by the name under which other programs import it.

    A class in a script belongs to ``__main__``; for `holdfast scan`, which imports the script, its
    module is ``train``.
    """
    if kind.__module__ != "__main__":
        return kind.__module__
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m package.train
        return str(spec.name)
    return Path(path).stem if path else "__main__"
