"""Every way we know in which data loading fails, by name.

The entries are text, in `causes/*.ini`: a file for each group, a section for each cause. In a list
of signs the word before the colon says how far a message can be trusted (`_SIGNS`). In a list of
remedies "-" begins one, perhaps with what it requires in brackets; "$" is before the lines of its
command; "@" names one of `shared_remedies.ini`.
"""

from __future__ import annotations

import configparser
import difflib
import re
from importlib import resources
from typing import Any, get_args

from holdfast.autopsy.cause import Cause, Place, Remedy, Sign

UNKNOWN = "unknown"

_SIGNS: dict[str, dict[str, Any]] = {
    "proof": {"confidence": "high"},  # only this cause prints this
    "sign": {"confidence": "medium"},  # usually this cause, but not always
    "hint": {"confidence": "low"},  # one of several possible causes
    "report": {"confidence": "high", "reports": True},  # this cause, for the process it names
    "weak report": {"confidence": "medium", "reports": True},
}


def _sections(name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=("#",))
    file = resources.files("holdfast.autopsy") / "causes" / f"{name}.ini"
    parser.read_string(file.read_text(encoding="utf-8"), name)
    return parser


def _group(name: str) -> tuple[Cause, ...]:
    parser = _sections(name)
    return tuple(_cause(slug, parser[slug]) for slug in parser.sections())


def _cause(slug: str, fields: configparser.SectionProxy) -> Cause:
    texts = {name: " ".join(text.split("\n")) for name, text in fields.items()}
    return Cause(
        slug=slug,
        title=texts["title"],
        meaning=texts["meaning"],
        evidence=texts["evidence"],
        already=texts["already"],
        signs=tuple(map(_sign, fields.get("signs", "").split("\n")[1:])),
        explains=_names(texts.get("explains", "")),
        see=_names(texts.get("see", "")),
        remedies=_remedies(fields["remedies"]),
    )


def _sign(line: str) -> Sign:
    kind, _, pattern = line.partition(": ")
    return Sign(pattern, **_SIGNS[kind])


def _names(listed: str) -> tuple[str, ...]:
    return tuple(filter(None, listed.split(", ")))


def _remedies(lines: str) -> tuple[Remedy, ...]:
    return tuple(map(_remedy, f"\n{lines.strip()}".split("\n- ")[1:]))


def _remedy(lines: str) -> Remedy:
    if lines.startswith("@"):
        return SHARED_REMEDIES[lines[1:]]
    text, *command = lines.split("\n$ ")
    required = re.match(r"\[(.*?)\] ", text)
    what: Any = required[1] if required else ""
    return Remedy(
        text=" ".join(text[required.end() if required else 0 :].split("\n")),
        command="\n".join(command),
        place=what if what in get_args(Place) else "",
        given="" if what in get_args(Place) else what,
    )


SHARED_REMEDIES: dict[str, Remedy] = {
    name: _remedies(section["remedies"])[0]
    for name, section in _sections("shared_remedies").items()
    if section
}
GROUPS: dict[str, tuple[Cause, ...]] = {
    "Memory": _group("memory"),
    "Deaths": _group("crashes"),
    "Transport": _group("transfer"),
    "Start-up": _group("starting"),
    "Stalls": _group("stalls"),
    "Samples": _group("data"),
    "Around it": _group("frameworks"),
    "Ray": _group("ray"),
}
CATALOGUE: dict[str, Cause] = {cause.slug: cause for group in GROUPS.values() for cause in group}


def title_of(slug: Any) -> str:
    """What a cause is called, after the words "a worker"."""
    return CATALOGUE[slug].title if slug in CATALOGUE else "ended for an unknown reason"


class UnknownCause(LookupError):
    """There is no cause of that name."""


def lookup(slug: str) -> Cause:
    try:
        return CATALOGUE[slug]
    except KeyError:
        close = difflib.get_close_matches(slug, CATALOGUE, 3, 0.5)
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UnknownCause(
            f"there is no cause named {slug!r}{meant} (holdfast explain --list shows all)"
        ) from None
