"""Putting what was measured into a page of the docs, between two marks."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["put"]


def put(page: Path, mark: str, told: str) -> None:
    """Replace what stands between ``<!-- mark: begin -->`` and ``<!-- mark: end -->``."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    marks = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    text = page.read_text(encoding="utf-8")
    changed, count = marks.subn(lambda _: f"{begin}\n{told}\n{end}", text)
    if count != 1:
        raise ValueError(f"{page} must have {begin} and {end} once; it has them {count} times")
    page.write_text(changed, encoding="utf-8")
