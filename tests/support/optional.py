"""Packages that some tests need, and that cannot be installed with every Python."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def optional(name: str) -> Any:
    """The package; where it is not installed, an object whose use skips the test."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return _Missing(name)


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # looked at, not used: by copies and inspections
            raise AttributeError(attribute)
        pytest.skip(f"{self._name} is not installed")
