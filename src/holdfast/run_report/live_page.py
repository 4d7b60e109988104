"""The page of a run that is going on, served to this machine only.

The server listens on the loopback address and answers only requests whose address has the token and
whose `Host` is its own: a page of another site that guesses the port can read nothing. It reads the
logbook again when that has changed, and writes nothing.
"""

from __future__ import annotations

import http.server
import secrets
import time
from pathlib import Path
from typing import Any, Final

from holdfast.run_report import logged_run, page
from holdfast.run_report.story import tell

EVERY: Final = 3.0  # seconds between two questions of the page
_TIMEOUT: Final = 10.0  # seconds that a client may be silent


class LivePage(http.server.ThreadingHTTPServer):
    """Serves the report of one logbook."""

    daemon_threads = True

    def __init__(self, folder: Path, title: str, port: int = 0, every: float = EVERY) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder, self.title, self.every = folder, title, every
        self.token = secrets.token_urlsafe(16)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def story(self) -> tuple[str, dict[str, Any]]:
        """What the page shows now, and a mark that is equal if it shows the same."""
        now = time.time()
        run = logged_run.read(self.folder)
        found = tell(run, self.title, now)
        return f'"{self.mark()}-{found["state"]}"', found

    def mark(self) -> str:
        """Changes when the logbook does."""
        parts = []
        for path in sorted(self.folder.rglob("*.json*")):
            try:
                known = path.stat()
            except FileNotFoundError:  # it was renamed a moment ago
                continue
            parts.append(f"{known.st_size:x}.{known.st_mtime_ns:x}")
        return "-".join(parts)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LivePage
    timeout = _TIMEOUT
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:
        hosts = {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}
        token, _, name = self.path.removeprefix("/").partition("/")
        known = secrets.compare_digest(token.encode(), self.server.token.encode())
        if self.headers.get("Host") not in hosts or not known or name not in ("", "data.json"):
            self._answer(404, "text/plain", "Not found: the address has to be the whole one.\n")
            return
        try:
            mark, story = self.server.story()
        except OSError as error:
            self._answer(503, "text/plain", f"{error}\n")
            return
        if not name:
            text = page.render(story, live=self.server.every)
            self._answer(200, "text/html", text)
        elif self.headers.get("If-None-Match") == mark:
            self._answer(304, "application/json", "")
        else:
            self._answer(200, "application/json", page.as_json(story), mark)

    def _answer(self, status: int, kind: str, text: str, mark: str | None = None) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", page.policy(live=True))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        if mark is not None:
            self.send_header("ETag", mark)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal shows the address, and only that."""
