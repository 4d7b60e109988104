"""The confusion matrices of this run, for its summary."""

from __future__ import annotations

MATRICES: list[str] = []
