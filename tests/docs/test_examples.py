"""The docs do not lie: every link resolves, every Python example runs.

An example that cannot run here (it needs a GPU, a cluster, a file of the reader's) has the line
`<!-- not run -->` right above its fence, with a word why if that is not obvious.
"""

from __future__ import annotations

import os
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)

FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<language>[\w+-]*)")
NOT_RUN = re.compile(r"<!--\s*not run\b.*-->")
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?(?P<target>[^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6}\s+(?P<text>.+?)\s*#*$")


@dataclass(frozen=True)
class Example:
    page: Path
    line: int
    code: str
    skipped: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def prose_and_examples(page: Path) -> tuple[list[str], list[Example]]:
    """The lines outside of fences, and the Python blocks inside them."""
    prose: list[str] = []
    examples: list[Example] = []
    block: list[str] | None = None
    fence, indent, language, start = "", 0, "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        match = FENCE.match(line)
        if block is None and match:
            block, fence, start = [], match["fence"], number
            indent, language = len(match["indent"]), match["language"]
        elif block is not None and match and match["fence"] == fence and not match["language"]:
            if language == "python":
                above = next((text for text in reversed(prose) if text.strip()), "")
                code = "\n".join(text[indent:] for text in block)
                examples.append(Example(page, start, code, bool(NOT_RUN.search(above))))
            prose.append("")
            block = None
        elif block is not None:
            block.append(line)
        else:
            prose.append(line)
    assert block is None, f"{page}:{start}: this fence is never closed"
    return prose, examples


def anchors(page: Path) -> set[str]:
    """The fragments under which a page's headings can be reached."""
    found: set[str] = set()
    for line in prose_and_examples(page)[0]:
        match = HEADING.match(line)
        if match:
            text = re.sub(r"[`*]|!?\[([^\]]*)\]\([^)]*\)", r"\1", match["text"]).lower()
            found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


EXAMPLES = [example for page in PAGES for example in prose_and_examples(page)[1]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_resolves(page: Path) -> None:
    broken = []
    for line in prose_and_examples(page)[0]:
        for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            path, _, fragment = match["target"].partition("#")
            if re.match(r"[a-z][a-z0-9+.-]*:", path):  # another site: not ours to check
                continue
            target = (page.parent / unquote(path)) if path else page
            missing_file = not target.exists()
            if missing_file or (
                fragment and target.suffix == ".md" and fragment not in anchors(target)
            ):
                broken.append(match["target"])
    assert not broken


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_every_python_example_runs(example: Example, tmp_path: Path) -> None:
    if example.skipped:
        pytest.skip("marked `not run`")
    script = tmp_path / "example.py"
    script.write_text(example.code + "\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = warm.run([str(script)], cwd=tmp_path, env=environment, timeout=100)
    assert result.returncode == 0, "\n".join(
        [f"{example} failed:", textwrap.indent(result.stdout + result.stderr, "    ")]
    )
