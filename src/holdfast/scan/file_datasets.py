"""Folders of files as datasets, to scan data that has no dataset class yet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from holdfast.packed.containers import PackedStrings

IMAGES: Final = frozenset(
    {
        ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".ico", ".jfif", ".jp2", ".jpe", ".jpeg",
        ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp",
    }
)  # fmt: skip


class Files:
    """One sample for each file, loaded by a function that is given its path."""

    def __init__(self, paths: Iterable[str], load: Callable[[str], Any]) -> None:
        self._paths = PackedStrings(paths)
        self._load = load

    def __len__(self) -> int:
        return len(self._paths)

    def sample_name(self, index: int) -> str:
        return self._paths[index]

    def __getitem__(self, index: int) -> Any:
        return self._load(self._paths[index])


def load_image(path: str) -> Any:
    """Every pixel, in the image's own mode: a valid header does not prove that the rest is."""
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image)


def find(folder: Path, endings: frozenset[str] | None = None) -> Iterator[str]:
    """The files below a folder, in order; all of them, or those with certain endings.

    Links are followed, each folder once. A folder that cannot be read is listed as if it were a
    file: loading it fails, so it is reported and not silently skipped.
    """
    unreadable: list[str] = []
    seen: set[tuple[int, int]] = set()
    for here, folders, names in os.walk(
        folder, followlinks=True, onerror=lambda error: unreadable.append(str(error.filename))
    ):
        about = os.stat(here)
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders.sort()
        for name in sorted(names):
            if endings is None or os.path.splitext(name)[1].lower() in endings:
                yield os.path.join(here, name)
    yield from unreadable
