"""How full a file system is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Fill", "fill"]


@dataclass(frozen=True)
class Fill:
    """Bytes of a file system."""

    total: int
    free: int

    @property
    def nearly_full(self) -> bool:
        return self.free < max(self.total // 100, 1 << 20)


def fill(path: Path) -> Fill | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return Fill(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)
