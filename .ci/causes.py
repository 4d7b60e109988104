"""The catalogue as pages of the docs, so that the two can never differ.

``make causes`` writes them; with ``--check`` this only says whether they are up to date.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import click

from holdfast.autopsy.catalogue import CATALOGUE, GROUPS
from holdfast.autopsy.cause import Cause, Given
from holdfast.autopsy.machine_facts import PLACEHOLDERS

_NOTE = (
    "<!-- Made from the catalogue by `make causes`; edit src/holdfast/autopsy/causes instead. -->\n"
)


_FIGURES = re.compile(r" \((now|here) [^)]*\)")  # figures of one machine


def pages() -> dict[str, str]:
    """Every page, by file name."""
    made = {f"{cause.slug}.md": _page(cause) for cause in CATALOGUE.values()}
    made["README.md"] = _index()
    return made


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for path in folder.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, content in wanted.items():
        (folder / name).write_text(content, encoding="utf-8")


def differences(folder: Path) -> list[str]:
    """Which pages are missing, changed or left over."""
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return sorted(
        name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)
    )


_GIVEN: dict[Given, str] = {
    "": "",
    "torch's loader": "With torch's loader",
    "holdfast": "With holdfast",
    "a sample": "",
    "a start": "While it starts",
    "holdfast with logbook=": "With holdfast and a logbook",
    "holdfast without logbook=": "With holdfast and no logbook",
}


def _page(cause: Cause) -> str:
    parts = [_NOTE, f"# `{cause.slug}`: a worker {cause.title}\n", f"{cause.meaning}\n"]
    parts += ["## How it is recognised\n", f"{cause.evidence}\n"]
    if cause.signs:
        parts.append("Messages that point to it (how far each alone is trusted):\n")
        parts += [f"- `{_readable(sign.pattern)}` ({sign.confidence})" for sign in cause.signs]
        parts.append("")
    parts.append("## What to do\n")
    parts.append("Cheapest first; `holdfast explain " + cause.slug + "` fills in your machine.\n")
    for number, template in enumerate(cause.remedies, 1):
        remedy = replace(template, text=_FIGURES.sub("", template.text)).filled(PLACEHOLDERS)
        labels = [one for one in (remedy.place.capitalize(), _GIVEN[remedy.given]) if one]
        place = f"**{', '.join(labels)}:** " if labels else ""
        parts.append(f"{number}. {place}{remedy.text}.")
        if remedy.command:
            parts.append("")
            parts += [
                "   ```text",
                *(f"   {line}" for line in remedy.command.splitlines()),
                "   ```",
            ]
        parts.append("")
    parts += ["## What holdfast does about it\n", f"{cause.already}\n"]
    if cause.see:
        parts.append("## Easily mistaken for\n")
        parts += [
            f"- [`{slug}`]({slug}.md): a worker {CATALOGUE[slug].title}" for slug in cause.see
        ]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _index() -> str:
    parts = [_NOTE, "# Why did it die?\n"]
    parts.append(
        "Every way we know in which data loading fails. `holdfast explain train.log` finds it in a "
        "log, `holdfast explain NAME` shows these pages with your machine's figures.\n"
    )
    for name, group in GROUPS.items():
        parts.append(f"## {name}\n")
        parts += ["| name | a worker … |", "| --- | --- |"]
        parts += [f"| [`{one.slug}`]({one.slug}.md) | {one.title} |" for one in group]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _readable(pattern: str) -> str:
    """A pattern for people to read: without escapes, gaps as an ellipsis."""
    shown = re.sub(r"\[\\s\\S\]\{[^}]*\}\??|\[\^[^\]]*\]\{[^}]*\}|\.\{[^}]*\}|\.\*", " … ", pattern)
    shown = shown.replace("(?P<said>", "(")
    shown = re.sub(r"\(\?[a-zA-Z]+\)|\(\?!.*?\)|\\b|\$$|^\^", "", shown)
    shown = re.sub(r"\\S[+*]|\[\^[^\]]*\][+*]", "…", shown)
    shown = re.sub(r"\\d[+*]?|\[\\d[^\]]*\][+*]?|\[0-9a-f\]\+", "N", shown)
    shown = re.sub(r"\\w[+*]", "…", shown).replace(r"\s+", " ").replace(r"\s*", " ")
    shown = re.sub(r"\\(.)", r"\1", shown)
    return re.sub(r" +", " ", shown).strip().replace("`", "'")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--check", is_flag=True, help="Change nothing; fail if something would change.")
def main(folder: Path, check: bool) -> None:
    """Write the catalogue's pages into FOLDER."""
    if not check:
        write(folder)
        return
    different = differences(folder)
    if different:
        raise click.ClickException(
            f"{len(different)} pages differ from the catalogue (make causes writes them): "
            + ", ".join(different[:5])
        )


if __name__ == "__main__":
    main()
