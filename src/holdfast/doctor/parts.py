"""What hangs on a dataset: everything within a few steps of attributes and small containers."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

__all__ = ["parts"]

_DEPTH = 5
_WIDTH = 256  # of a container's entries


def parts(thing: Any, path: str = "dataset") -> Iterator[tuple[str, Any]]:
    """Paths and values, the thing itself first, each object once, plain values each time."""
    seen: set[int] = set()

    def walk(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
        if value is None or isinstance(value, (str, bytes, int, float, type, ModuleType)):
            yield name, value  # many attributes may have the same one
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        yield name, value
        if depth == 0:
            return
        if isinstance(value, dict):
            for number, (key, part) in enumerate(value.items()):
                if number >= _WIDTH:
                    break
                yield from walk(part, f"{name}[{key!r}]", depth - 1)
        elif isinstance(value, (list, tuple)):
            for number, part in enumerate(value[:_WIDTH]):
                yield from walk(part, f"{name}[{number}]", depth - 1)
        for key, part in list(getattr(value, "__dict__", {}).items()):
            yield from walk(part, f"{name}.{key}", depth - 1)

    yield from walk(thing, path, _DEPTH)
