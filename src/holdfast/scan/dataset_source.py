"""From ``module:name`` or ``path/file.py:name`` to a dataset."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from holdfast.options import budget_in_bytes


class SourceError(ValueError):
    """The named object does not exist, or is not a dataset."""


def arguments(given: Sequence[str]) -> dict[str, Any]:
    """``key=value`` pairs; a value is a Python literal if it can be, else the text itself."""
    found: dict[str, Any] = {}
    for one in given:
        key, equals, text = one.partition("=")
        if not equals or not key.isidentifier():
            raise SourceError(f"--arg {one!r} is not key=value, such as --arg root=/data/train")
        if key in found:
            raise SourceError(f"--arg {key}= is given twice")
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
    return found


def named(spec: str) -> Any:
    """The object that a spec names. Errors of the module itself pass through."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not all(part.isidentifier() for part in name.split(".")):
        raise SourceError(
            f"{spec!r} names nothing: give module:name, such as mypackage.data:train_set, or "
            "path/to/file.py:name"
        )
    module = _from_file(where) if where.endswith(".py") or os.sep in where else _module(where)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = [one for one in vars(module) if not one.startswith("_")]
            has = f"; it has {', '.join(public[:12])}" if public else ""
            raise SourceError(f"{where} has no {name!r}{has}") from None
    return found


def _module(name: str) -> ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports one that does not
        raise SourceError(
            f"there is no module {error.name!r} in {os.getcwd()} or among the installed packages; "
            "name a file by its path, such as path/to/file.py:name"
        ) from None


def _from_file(where: str) -> ModuleType:
    """Import a file under its own short name, so that workers that are spawned find it too."""
    path = Path(where).resolve()
    if not path.is_file():
        raise SourceError(f"there is no file {where}")
    name = path.stem
    present = sys.modules.get(name)
    if present is not None and getattr(present, "__file__", None) != str(path):
        raise SourceError(
            f"{where} would be imported as {name!r}, which is the name of a module in use "
            f"({getattr(present, '__file__', None) or 'built in'}); rename the file or name it as "
            "part of its package"
        )
    sys.path.insert(0, str(path.parent))  # as `python file.py` does
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SourceError(f"{where} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def dataset(spec: str, given: Mapping[str, Any]) -> Any:
    """The map-style dataset that a spec names, in one of the ways of `any_dataset`."""
    found = any_dataset(spec, given).dataset
    if isinstance(found, IterableDataset):
        raise SourceError(
            f"{spec} is an IterableDataset ({type(found).__name__}), whose elements have no index "
            'to name them by. Run it through DataLoader(..., on_bad_sample="skip", '
            'quarantine="bad.jsonl") instead, which lists the bad elements'
        )
    return found


@dataclass(frozen=True)
class FoundDataset:
    """A dataset, and how it is loaded if it was named by its loader."""

    dataset: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    loader: Any = None


_SETTINGS = ("batch_size", "num_workers", "prefetch_factor", "collate_fn")


def any_dataset(spec: str, given: Mapping[str, Any]) -> FoundDataset:
    """The dataset, map-style or iterable, that a spec names: directly, by its loader, or by a
    class or function that makes either."""
    found = named(spec)
    is_made = isinstance(found, DataLoader) or _is_dataset(found)
    if is_made and given:
        raise SourceError(
            f"{spec} is a dataset already, so --arg {next(iter(given))}= cannot be passed to "
            "anything; name its class or a function that makes it"
        )
    if not is_made and callable(found):
        found = _made(spec, found, given)
    settings, loader = {}, None
    if isinstance(found, DataLoader):
        loader = found
        known = {name: getattr(found, name, None) for name in _SETTINGS}
        settings = {name: value for name, value in known.items() if value}
        if hasattr(found, "memory_budget"):  # ours
            settings["memory_budget"] = budget_in_bytes(found.memory_budget)
        found = found.dataset
    if not _is_dataset(found):
        raise SourceError(
            f"{spec} is of type {type(found).__name__}: expected a dataset (with __getitem__, or "
            "an IterableDataset), its loader, or a class or function that makes one"
        )
    if not isinstance(found, IterableDataset):
        if not hasattr(found, "__len__"):
            raise SourceError(f"{spec} has no __len__, which a map-style dataset needs")
        if not len(found):
            raise SourceError(f"{spec} is empty: its length is 0")
    return FoundDataset(found, settings, loader)


def _made(spec: str, make: Any, given: Mapping[str, Any]) -> Any:
    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        raise SourceError(
            f"{spec}{inspect.signature(make)} cannot be called with these arguments: {error}. "
            "Give arguments as --arg name=value"
        ) from None
    except ValueError:
        pass  # written in C, without a signature to check
    return make(**given)


def _is_dataset(found: Any) -> bool:
    if isinstance(found, type):
        return False
    return hasattr(found, "__getitem__") or isinstance(found, IterableDataset)
