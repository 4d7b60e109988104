"""The docs as a site: hooks of MkDocs (mkdocs.yml).

The pages are written for readers of the repository: links are relative, to pages, sources and tests
alike. Here they are made to work on the site too. README.md is its start; CONTRIBUTING.md,
CHANGELOG.md and SECURITY.md are pages; sources that pages link to are shown as pages; the API
reference is made of docstrings. Pages that the navigation does not name are added at its end.
The built site asks for nothing from elsewhere, and each of its links leads to a file: both are
checked.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import holdfast
from holdfast import metrics

ROOT = Path(__file__).resolve().parents[1]
AT_THE_TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?P<before>\]\(\s*<?)(?P<path>[^)\s>#]+)(?P<rest>[^)]*\))")
FENCE = re.compile(r"^ *(```+|~~~+)")
ROLE = re.compile(r":(?:class|func|meth|mod|attr):(?=<code)")
DOCTEST = re.compile(r"^(>>> .*\n(?:.+\n)*)", re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".md": "markdown"}


def on_config(config: Any) -> Any:
    named = set(_named(config.nav))
    docs = Path(config.docs_dir)
    pages = sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))
    folders = {posixpath.dirname(page) for page in named if page.endswith("/README.md")}
    more = [page for page in pages if page not in named and posixpath.dirname(page) not in folders]
    if more:
        config.nav.append({"More": more})
    return config


def _named(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    values = nav.values() if isinstance(nav, dict) else nav
    return [page for value in values for page in _named(value)]


def on_files(files: Any, config: Any) -> Any:
    sources: set[str] = set()
    repository = {f"docs/{file.src_uri}": file for file in files.documentation_pages()}
    for path, uri in AT_THE_TOP.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=text))
        sources |= _sources(path, text)
    for path in repository:
        sources |= _sources(path, (ROOT / path).read_text(encoding="utf-8"))
    for path in sorted(sources):
        files.append(File.generated(config, _uri(path), content=_source_page(path)))
    named = sorted(holdfast.__all__, key=lambda name: name != "DataLoader")  # what most look for
    public = [*named, *(f"metrics.{name}" for name in metrics.__all__)]
    names = "\n\n".join(f"::: holdfast.{name}" for name in public)
    intro = (
        "What `holdfast` and `holdfast.metrics` export, from docstrings. Anything else is private."
    )
    files.append(File.generated(config, "api.md", content=f"# API reference\n\n{intro}\n\n{names}"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    top = {site: path for path, site in AT_THE_TOP.items()}
    path = top.get(uri, f"docs/{uri}")
    if uri.startswith("source/") or uri == "api.md":
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        target = _target(path, match["path"])
        if target is None:
            return match[0]
        there = posixpath.relpath(_uri(target), posixpath.dirname(uri) or ".")
        return f"{match['before']}{there}{match['rest']}"

    return "\n".join(
        line if fenced else LINK.sub(rewritten, line) for line, fenced in _lines(markdown)
    )


def on_page_content(html: str, page: Any, **_: Any) -> str:
    return ROLE.sub("", html) if page.file.src_uri == "api.md" else html


def on_post_build(config: Any) -> None:
    _references.cache_clear()
    site = Path(config.site_dir).resolve()
    wrong = [
        f"{page.relative_to(site)}: {words}"
        for page in site.rglob("*.html")
        if page.name != "404.html"  # its links are those of a server's root
        for words in _wrong(page)
    ]
    if wrong:
        raise PluginError("\n".join(["the site has links that lead nowhere:", *wrong]))


class FencedDoctests(griffe.Extension):
    """Examples in docstrings are blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\1```\n", obj.docstring.value + "\n")


# -- links ---------------------------------------------------------------------------------


def _lines(text: str) -> list[tuple[str, bool]]:
    """Each line, and whether it is in a block of code."""
    found, fence = [], None
    for line in text.split("\n"):
        match = FENCE.match(line)
        found.append((line, fence is not None or match is not None))
        if match and fence is None:
            fence = match[1]
        elif match and match[1] == fence:
            fence = None
    return found


def _target(page: str, link: str) -> str | None:
    """The path in the repository that a link of a page leads to; None for another site."""
    if urlsplit(link).scheme or link.startswith("/"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(link)))


def _uri(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in AT_THE_TOP:
        return AT_THE_TOP[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def _sources(page: str, text: str) -> set[str]:
    """Files outside of docs/ that a page links to."""
    links = [
        match["path"]
        for line, fenced in _lines(text)
        if not fenced
        for match in LINK.finditer(line)
    ]
    targets = {_target(page, link) for link in links} - {None}
    return {one for one in targets if one and _uri(one).startswith("source/")}


def _source_page(path: str) -> str:
    found = ROOT / path
    if found.is_dir():
        inside = "\n".join(
            f"- `{name}`" for name in sorted(os.listdir(found)) if name[0] not in "._"
        )
        return f"# {path}\n\n{inside}\n"
    text = found.read_text(encoding="utf-8")
    return f"# {path}\n\n``````{LANGUAGES.get(found.suffix, 'text')}\n{text}\n``````\n"


class _References(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str | None] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id"))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if given.get("src"):
            self.loaded.append(str(given["src"]))
        if tag == "link" and given.get("href") and given.get("rel") not in ("canonical",):
            self.loaded.append(str(given["href"]))


@functools.cache
def _references(page: Path) -> _References:
    found = _References()
    found.feed(page.read_text(encoding="utf-8"))
    return found


def _wrong(page: Path) -> list[str]:
    found = _references(page)
    wrong = [f"loads {one}" for one in found.loaded if urlsplit(one).netloc]
    for one in found.links + found.loaded:
        parts = urlsplit(one)
        if parts.scheme or parts.netloc:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        target = target / "index.html" if target.is_dir() else target
        fragment = unquote(parts.fragment) if target.suffix == ".html" else ""
        if not target.exists() or (fragment and fragment not in _references(target).ids):
            wrong.append(one)
    return wrong
