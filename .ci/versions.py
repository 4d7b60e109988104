"""The quick tests with the oldest, the pinned and the newest pair of Python and torch.

    python3 .ci/versions.py                   all three, as `make test-versions`
    python3 .ci/versions.py oldest 3.12:2.9   some of them, or any other pair
    python3 .ci/versions.py 3.13t:2.12        with a free-threaded build of Python, without its lock

Each pair has an environment of its own in `.versions` (or in the folder that VERSIONS_DIR names),
which is made on the first call. torch comes from the package index, with its CUDA libraries: about
5 GB and some minutes. The results are written into the table of `docs/versions.md`, with the date.
Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = Path(os.environ.get("VERSIONS_DIR", ROOT / ".versions"))
TABLE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- results: written by make test-versions -->", "<!-- end of results -->"
RUNNING = "HOLDFAST_VERSIONS_ARE_TRIED"  # while that is so
NEWEST, PINNED = "newest", "pinned"
TORCHS_OWN = "# torch's own requirements"  # a paragraph of constraints.txt


@dataclass(frozen=True)
class Pair:
    python: str  # "3.10"; "3.13t" is a free-threaded build
    torch: str  # "2.6", PINNED or NEWEST

    @property
    def free_threaded(self) -> bool:
        return self.python.endswith("t")

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / f"py{self.python}-torch-{self.torch}"


PAIRS = {
    "oldest": Pair("3.10", "2.6"),
    "pinned": Pair("3.11", PINNED),
    "newest": Pair("3.13", NEWEST),
}


@dataclass(frozen=True)
class Result:
    python: str
    torch: str
    numpy: str
    passed: int
    failed: int
    skipped: int
    date: str

    def row(self) -> str:
        cells = (
            self.python,
            self.torch,
            self.numpy,
            self.passed,
            self.failed,
            self.skipped,
            self.date,
        )
        return "| " + " | ".join(map(str, cells)) + " |"


def interpreter(version: str) -> str | None:
    """A Python of this version ("t": free-threaded): on the path, or one of pyenv's."""
    candidates = [shutil.which(f"python{version}"), shutil.which("python3"), sys.executable]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += map(str, sorted(pyenv.glob(f"{version.removesuffix('t')}.*/bin/python")))
    program = (
        "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], end='')\n"
        "print('t' if sysconfig.get_config_var('Py_GIL_DISABLED') else '')"
    )
    for candidate in filter(None, candidates):
        told = subprocess.run(
            [candidate, "-c", program], capture_output=True, text=True, check=False
        )
        if told.returncode == 0 and told.stdout.strip() == version:
            return candidate
    return None


def _called(pair: Pair) -> str:
    if not pair.free_threaded:
        return f"Python {pair.python}"
    plain = pair.python.removesuffix("t")
    return f"free-threaded Python {plain} (python{pair.python}, built with --disable-gil)"


def constraints(pair: Pair) -> str:
    """Our own; with another torch, without those for torch and for what torch requires. None for a
    free-threaded Python: of many packages only some releases can be installed with it."""
    if pair.free_threaded:
        return ""
    text = (ROOT / "constraints.txt").read_text()
    if pair.torch == PINNED:
        return text
    paragraphs = [part for part in text.split("\n\n") if not part.startswith(TORCHS_OWN)]
    lines = "\n\n".join(paragraphs).splitlines()
    return "\n".join(line for line in lines if not line.startswith("torch==")) + "\n"


def make(pair: Pair, python: str) -> Path:
    """The interpreter of the pair's environment, with everything installed."""
    inside = pair.folder / "bin" / "python"
    if not inside.exists():
        pair.folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([python, "-m", "venv", str(pair.folder)], check=True)
    limits = pair.folder / "constraints.txt"
    limits.write_text(constraints(pair))
    wanted = {PINNED: ["torch"], NEWEST: ["--upgrade", "torch"]}.get(
        pair.torch, [f"torch=={pair.torch}.*"]
    )
    pip = [
        str(inside),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        str(limits),
    ]
    if not pair.free_threaded:
        subprocess.run([*pip, *wanted, "-e", f"{ROOT}[test]"], check=True, cwd=ROOT)
        return inside
    subprocess.run([*pip, *wanted, "-e", str(ROOT)], check=True, cwd=ROOT)
    for one in _test_requirements():
        ended = subprocess.run([*pip, "--only-binary=:all:", one], check=False, cwd=ROOT)
        if ended.returncode:
            print(f"{one} cannot be installed with {_called(pair)}: tests that need it are skipped")
    return inside


def _test_requirements() -> list[str]:
    """Those of the extra `test`. Not by tomllib, which came with Python 3.11."""
    extra = (ROOT / "pyproject.toml").read_text().split("\ntest = [")[1].split("]")[0]
    return re.findall(r'"([^"]+)"', extra)


def test(pair: Pair, python: Path, arguments: list[str]) -> Result:
    report = pair.folder / "report.xml"
    report.unlink(missing_ok=True)
    side_by_side = os.environ.get("SIDE_BY_SIDE", "3")
    command = [str(python), "-m", "pytest", "-q", "-n", side_by_side, "--dist", "worksteal"]
    command += [
        "-m",
        "not slow and not frameworks and not report and not ray",
        f"--junitxml={report}",
        *arguments,
    ]
    # The table has no such row yet, if this is the first run.
    environment = {**os.environ, RUNNING: "1"}
    if pair.free_threaded:
        # A module that does not say that it can do without the lock would bring it back.
        environment["PYTHON_GIL"] = "0"
    ended = subprocess.run(command, cwd=ROOT, check=False, env=environment)
    if ended.returncode not in (0, 1):  # interrupted, or not begun: a part is no result
        raise SystemExit(f"pytest ended with status {ended.returncode}: nothing is written")
    counts = ElementTree.parse(report).getroot().find("testsuite")
    assert counts is not None
    all_of_them, failures, errors, skipped = (
        int(counts.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    versions = _versions(python)
    today = datetime.date.today().isoformat()
    passed = all_of_them - failed - skipped
    return Result(*versions, passed=passed, failed=failed, skipped=skipped, date=today)


def _versions(python: Path) -> tuple[str, str, str]:
    program = (
        "import json, platform, sysconfig; from importlib.metadata import version\n"
        "found = platform.python_version()\n"
        "found += 't' if sysconfig.get_config_var('Py_GIL_DISABLED') else ''\n"
        "print(json.dumps([found, version('torch'), version('numpy')]))"
    )
    told = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
    found, torch, numpy = json.loads(told.stdout)
    return found, torch.partition("+")[0], numpy


def write(results: list[Result]) -> None:
    """Replace the rows of the same releases, and keep the others."""
    before, rest = TABLE.read_text().split(BEGIN)
    table, after = rest.split(END)
    rows = {
        _key(line): line
        for line in table.splitlines()
        if line.startswith("| ") and line[2].isdigit()
    }
    rows |= {_key(result.row()): result.row() for result in results}
    names = ("Python", "torch", "NumPy", "passed", "failed", "skipped", "run on")
    head = f"| {' | '.join(names)} |\n|{' --- |' * len(names)}"
    ordered = [rows[key] for key in sorted(rows, key=_in_order)]
    TABLE.write_text("\n".join([f"{before}{BEGIN}", "", head, *ordered, "", f"{END}{after}"]))


def _key(row: str) -> tuple[str, str]:
    python, torch = (cell.strip() for cell in row.split("|")[1:3])
    return python, torch


def _in_order(key: tuple[str, str]) -> list[tuple[list[int], bool]]:
    return [
        ([int(number) for number in release.removesuffix("t").split(".")], release.endswith("t"))
        for release in key
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "pairs", nargs="*", default=list(PAIRS), help="oldest, pinned, newest, 3.12:2.9, 3.13t:2.12"
    )
    parser.add_argument(
        "--pytest", default="", help="more arguments for pytest; nothing is written then"
    )
    asked = parser.parse_args()
    results = []
    for name in asked.pairs or PAIRS:
        pair = PAIRS.get(name) or Pair(*name.split(":"))
        python = interpreter(pair.python)
        if python is None:
            print(f"{name}: there is no {_called(pair)} here, neither on the path nor pyenv's")
            return 1
        print(f"{name}: Python {pair.python}, torch {pair.torch}, in {pair.folder}", flush=True)
        results.append(test(pair, make(pair, python), asked.pytest.split()))
    print(*(result.row() for result in results), sep="\n")
    if not asked.pytest:
        write(results)
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
