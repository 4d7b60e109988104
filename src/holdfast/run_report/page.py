"""The page: a story in one HTML file that needs nothing else.

What a logbook contains is data for the page's script, never markup: it is JSON inside an element
that is not run, with every character that HTML could take for markup escaped. The page's policy
allows only the scripts and styles that are in the file, named by their hashes, and no request.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from holdfast import __version__


def render(story: Mapping[str, Any], *, live: float | None = None) -> str:
    """The page. With `live` it asks the server for news every so many seconds."""
    filled = {
        "policy": html.escape(policy(live is not None)),
        "title": html.escape(f"{story['title']} – holdfast report"),
        "style": _style(),
        "data": _inert(as_json(story, live=live)),
        "library": _asset("uPlot.iife.min.js"),
        "script": _asset("page.js"),
    }
    before, *rest = _asset("page.html").split("{{")
    parts = [before]
    for one in rest:  # in one pass: what is filled in may contain anything
        name, _, after = one.partition("}}")
        parts += [filled[name], after]
    return "".join(parts)


def as_json(story: Mapping[str, Any], *, live: float | None = None) -> str:
    """What the page's script reads."""
    whole = {**story, "version": __version__, "live": live}
    return json.dumps(whole, separators=(",", ":"), allow_nan=False)


def policy(live: bool = False) -> str:
    """The content security policy of the page."""
    scripts = " ".join(map(_hash, (_asset("uPlot.iife.min.js"), _asset("page.js"))))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {_hash(_style())}; img-src data:; "
        f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; "
        "form-action 'none'"
    )


def _inert(text: str) -> str:
    """The same JSON, without characters that HTML or JavaScript could take for something else."""
    for one in "<>&\u2028\u2029":
        text = text.replace(one, f"\\u{ord(one):04x}")
    return text


def _style() -> str:
    return _asset("uPlot.min.css") + _asset("page.css")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@functools.cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")
