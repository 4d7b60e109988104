"""Commands in the docs are those that there are: verbs of `holdfast` with their options, modules and targets of make."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest

from holdfast.cli import VERBS, main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
IN_TEXT = re.compile(r"`(holdfast [a-z][^`]*|make [a-z][\w-]*|python -m benchmarks[^`]*)`")
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(page: Path) -> list[str]:
    """Those on lines of their own in blocks of code, and those between backticks."""
    found, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif inside:
            found += re.findall(
                r"(?:^\s*|\| |: )((?:holdfast (?!:)|make |python -m benchmarks).*)", line
            )
        else:
            found += IN_TEXT.findall(line)
    return found


def wrong(command: str) -> str | None:
    """What is wrong with it."""
    words = shlex.split(re.split(r"\s#|  +[a-z`]|…|\||>", command)[0].replace("'", ""))
    if words[0] == "make":
        named = [word for word in words[1:] if re.fullmatch(r"[a-z][\w-]*", word)]
        return None if named[:1] and named[0] in TARGETS else f"no target {named[:1]}"
    if words[0] == "python":
        return None if importlib.util.find_spec(words[2]) else f"no module {words[2]}"
    if len(words) == 1 or words[1].startswith("-") or not words[1].islower():
        return None
    if words[1] not in VERBS:
        return f"no verb {words[1]}"
    verb = main.get_command(click.Context(main), words[1])
    assert verb is not None
    options = {name for one in verb.params for name in (*one.opts, *one.secondary_opts)} | {
        "--help"
    }
    for word in words[2:]:
        if words[1] == "run" and not word.startswith("-"):
            return None  # what follows is the program's
        name = word.partition("=")[0]
        if name.startswith("--") and name != "--" and name not in options:
            return f"{words[1]} has no option {name}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_exists(page: Path) -> None:
    found = {command: wrong(command) for command in commands(page)}
    assert {command: words for command, words in found.items() if words} == {}


def test_the_check_finds_what_is_wrong() -> None:
    assert wrong("holdfast explian train.log") == "no verb explian"
    assert wrong("holdfast explain --teee train.log") == "explain has no option --teee"
    assert wrong("holdfast run train.py --epochs 3") is None
    assert wrong("make demos") == "no target ['demos']"
    assert wrong("python -m benchmarks.nothing") == "no module benchmarks.nothing"
    assert commands(ROOT / "README.md")
