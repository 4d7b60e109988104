"""Installs a wheel into an environment of its own and tries it there, outside of this tree.

    python .ci/try_wheel.py dist/holdfast-*.whl

What the tests cannot see: a file that is not packaged, a requirement that is not declared, a
command that is not installed. The last line says what was tried; any failure ends it with a status.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALL = 1800  # seconds: torch is large
TRY = 300  # seconds

SMOKE = '''
import os, signal, sys
from pathlib import Path

import holdfast
from holdfast.autopsy.catalogue import CATALOGUE

TREE = Path(sys.argv[1])


class Numbers:
    """Sample 7 kills its worker once."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 7 and not os.path.exists("killed"):
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


if __name__ == "__main__":
    package = Path(holdfast.__file__).resolve().parent
    assert package.is_relative_to(sys.prefix) and TREE not in package.parents, package
    for name in ("py.typed", "takeover/startup/sitecustomize.py", "run_report/assets"):
        assert (package / name).exists(), name
    assert len(CATALOGUE) > 70, len(CATALOGUE)
    for method in ("fork", "spawn"):
        Path("killed").unlink(missing_ok=True)
        loader = holdfast.DataLoader(
            Numbers(), batch_size=4, num_workers=2, multiprocessing_context=method, logbook="book"
        )
        assert [x for batch in loader for x in batch.tolist()] == list(range(40)), method
        assert [one.kind for one in loader.incidents] == ["killed"], loader.incidents
    missing = [name for name in holdfast.__all__ if not hasattr(holdfast, name)]
    assert not missing, missing
'''


def main(wheel: str) -> None:
    with tempfile.TemporaryDirectory(prefix="holdfast-dist-") as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env/bin/python"
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = ["-c", str(ROOT / "constraints.txt")]
        run([python, *install, *constraints, str(Path(wheel).resolve())], folder, INSTALL)
        script = folder / "smoke.py"
        script.write_text(SMOKE, encoding="utf-8")
        run([python, script, ROOT], folder, TRY)
        command = folder / "env/bin/holdfast"
        for arguments in (["--version"], ["doctor", "--help"], ["explain", "oom-killed"]):
            run([command, *arguments], folder, TRY)
        run([command, "report", "book", "--output", "book.html"], folder, TRY)
        assert (folder / "book.html").stat().st_size > 10_000
    print(f"{Path(wheel).name}: imported, two killed workers replaced, commands and data are there")


def run(command: list[object], folder: Path, seconds: float) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=folder, timeout=seconds, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )


if __name__ == "__main__":
    main(sys.argv[1])
