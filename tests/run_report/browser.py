"""A real Chromium: the system's own, driven by Playwright."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str | None:
    """Where it is; `CHROMIUM` in the environment names another one."""
    named = os.environ.get("CHROMIUM")
    if named:
        return named
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return next((path for path in found if path), None)


def missing() -> str | None:
    """Why there can be no browser here; None if there can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install -e '.[report]'"
    return None if chromium() else "no Chromium was found (apt-get install chromium)"


@contextlib.contextmanager
def started() -> Iterator[Any]:
    """A browser with a profile of its own."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="holdfast-home-") as home, sync_playwright() as tool:
        browser = tool.chromium.launch(
            executable_path=chromium(), args=FLAGS, env={**os.environ, "HOME": home}
        )
        try:
            yield browser
        finally:
            browser.close()
