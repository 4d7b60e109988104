"""Releases of torch and Python that the quick tests were run with: docs/versions.md."""

from __future__ import annotations

from typing import Final

TRIED: Final = {"torch": ((2, 6), (2, 15)), "Python": ((3, 10), (3, 13))}
"""The oldest and the newest."""
