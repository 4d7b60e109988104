"""The file and the server, without a browser."""

from __future__ import annotations

import html.parser
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.cli import main
from holdfast.run_report import page
from holdfast.run_report.live_page import LivePage
from holdfast.run_report.logged_run import read
from holdfast.run_report.story import tell
from tests.support import logbooks

SOURCE = str(Path(__file__).parents[2] / "src")


class Elements(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_nothing_of_a_logbook_becomes_markup(tmp_path: Path) -> None:
    logbooks.write(tmp_path, hours=0.01)
    plain = Elements(page.render(tell(read(tmp_path), "a run", 0.0)))
    title = f"{logbooks.MARKUP}{logbooks.SCRIPT}\u2028"
    wicked = Elements(page.render(tell(read(tmp_path), title, 0.0)))
    assert [tag for tag, _ in wicked.found] == [tag for tag, _ in plain.found]
    assert [tag for tag, _ in plain.found].count("script") == 3
    assert not [tag for tag, _ in plain.found if tag == "img"]
    data = next(text for text in wicked.texts if text.startswith('{"title":'))
    assert json.loads(data)["title"] == title
    assert "\u2028" not in data


def test_the_page_refers_to_nothing_outside(tmp_path: Path) -> None:
    logbooks.write(tmp_path, hours=0.01)
    text = page.render(tell(read(tmp_path), "a run", 0.0))
    for tag, attributes in Elements(text).found:
        assert attributes.get("src") is None, tag
        assert (attributes.get("href") or "#").startswith(("#", "data:,")), tag
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    (policy,) = [
        attributes["content"]
        for tag, attributes in Elements(text).found
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_verb_writes_one_file(tmp_path: Path) -> None:
    logbooks.write(tmp_path / "today", hours=0.01)
    done = CliRunner().invoke(main, ["report", str(tmp_path / "today")])
    assert done.exit_code == 0, done.output
    written = tmp_path / "today" / "report.html"
    assert str(written) in done.output
    assert "<title>today – holdfast report</title>" in written.read_text()
    assert read(tmp_path / "today").damaged == 0, "a report in the folder is no part of the logbook"
    again = CliRunner().invoke(main, ["report", str(tmp_path / "today"), "-o", "-"])
    assert again.stdout.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "is not a folder"),
        (["."], "contains no logbook"),
        ([".", "--watch", "-o", "x"], "--watch serves the page and writes no file"),
        ([".", "--port", "70000"], "--port"),
    ],
)
def test_wrong_usage_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["report", *arguments])
    assert done.exit_code == 2
    assert words in done.output


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    logbooks.write(tmp_path, hours=0.01)
    done = CliRunner().invoke(
        main, ["report", str(tmp_path), "-o", str(tmp_path / "no" / "x.html")]
    )
    assert done.exit_code == 1
    assert "cannot be written: No such file or directory" in done.output


# -- live ----------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LivePage]:
    logbooks.write(tmp_path, hours=0.01, began=time.time() - 36, ended=False)
    with LivePage(tmp_path, "a run") as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join(10)


def ask(
    server: LivePage, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_the_live_page_shows_what_is_written_meanwhile(server: LivePage) -> None:
    answer, content = ask(server, f"/{server.token}/")
    assert answer.status == 200
    assert b"<title>a run" in content
    assert "connect-src 'self'" in str(answer.headers["Content-Security-Policy"])
    answer, content = ask(server, f"/{server.token}/data.json")
    mark, batches = answer.headers["ETag"], json.loads(content)["headline"]["batches"]
    assert mark is not None
    assert json.loads(content)["state"] == "running"
    same, nothing = ask(server, f"/{server.token}/data.json", **{"If-None-Match": mark})
    assert (same.status, nothing) == (304, b"")
    logbooks.write(server.folder, hours=0.01, began=time.time() - 36, seed=1)
    _, content = ask(server, f"/{server.token}/data.json", **{"If-None-Match": mark})
    assert json.loads(content)["headline"]["batches"] > batches


def test_only_those_who_know_the_token_see_anything(server: LivePage) -> None:
    for path in (
        "/",
        "/data.json",
        f"/{server.token}",
        f"/{server.token[:-1]}/",
        "/../",
        "/%C3%A4/",
    ):
        answer, content = ask(server, path)
        if path == f"/{server.token}":
            continue  # without the slash it is the same page
        assert answer.status == 404, path
        assert b"a run" not in content
    answer, _ = ask(server, f"/{server.token}/", Host="evil.example")
    assert answer.status == 404, "another name for this machine: a page of another site asks"
    answer, _ = ask(server, f"/{server.token}/../../etc/passwd")
    assert answer.status == 404
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_written(server: LivePage, method: str) -> None:
    answer, _ = ask(server, f"/{server.token}/", method)
    assert answer.status == 501


def test_a_logbook_that_is_gone_is_said(server: LivePage) -> None:
    server.folder = server.folder / "gone"
    answer, content = ask(server, f"/{server.token}/data.json")
    assert answer.status == 503
    assert b"is not a folder" in content


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    logbooks.write(tmp_path, hours=0.01)
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "report", "--watch", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    address = process.stdout.readline()
    assert address.startswith("http://127.0.0.1:")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
