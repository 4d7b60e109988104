"""Takes the pictures of docs/report.md: ``python -m tests.run_report.pictures docs/images``.

The run is real (examples/report_run.py), and so is the browser. Only the names of the machine and of
the folders are others.
"""

from __future__ import annotations

import io
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.run_report import browser

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 1180


def save(content: bytes, path: Path) -> None:
    """A picture with few colours takes a fraction of the space."""
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    few = picture.quantize(200, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    print(f"{path}  ({path.stat().st_size // 1000} kB)")


def section(page: Any, name: str) -> bytes:
    return bytes(page.locator(f"#{name}").screenshot())


def main(folder: Path) -> None:
    reason = browser.missing()
    if reason is not None:
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as place:
        book = Path(place) / "runs" / "demo"
        shutil.copy(ROOT / "examples" / "report_run.py", Path(place) / "train.py")
        subprocess.run(
            [sys.executable, "train.py", "runs/demo"],
            check=True, timeout=600, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=place,
        )  # fmt: skip
        for path in book.glob("*.json*"):
            plain = (
                path.read_text().replace(place, "/home/me").replace(socket.gethostname(), "node-7")
            )
            path.write_text(plain)
        command = [sys.executable, "-m", "holdfast", "report", str(book), "--title", "demo"]
        subprocess.run(command, check=True, timeout=60, cwd=ROOT)
        with browser.started() as chromium:
            for scheme in ("light", "dark"):
                page = chromium.new_page(
                    viewport={"width": WIDTH, "height": 1000}, color_scheme=scheme
                )
                page.goto((book / "report.html").as_uri())
                page.wait_for_selector("#foot p")
                if scheme == "light":
                    save(page.screenshot(), folder / "report.png")
                    page.locator("#incident-0 > summary").click()
                    save(section(page, "incidents"), folder / "report-incidents.png")
                else:
                    save(section(page, "memory"), folder / "report-memory.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
