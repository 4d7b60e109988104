"""``holdfast report``: a page about a run, made from its logbook."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import webbrowser
from pathlib import Path

import click

from holdfast.run_report import page
from holdfast.run_report.live_page import LivePage
from holdfast.run_report.story import tell
from holdfast.verbs import terminal


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write (default: report.html in FOLDER); - for standard output.",
)
@click.option("--open", "opens", is_flag=True, help="Show it in the browser.")
@click.option("--watch", is_flag=True, help="Serve a live page, to this machine only.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="For --watch.")
@click.option("--title", help="What to call the run (default: the name of FOLDER).")
def report(
    folder: Path, output: Path | None, opens: bool, watch: bool, port: int, title: str | None
) -> None:
    """Make one HTML file about a run, from the FOLDER given as logbook=.

    It contains everything it needs, and can be opened, mailed or archived as it is. A run that is
    still going on can be looked at too; with --watch the page follows it until Ctrl-C.

    Exit status: 0 if the page was made, 2 if FOLDER is not a logbook.
    """
    if watch and output is not None:
        raise click.UsageError("--watch serves the page and writes no file; leave out --output")
    run = terminal.read_logbook(folder)
    title = title or folder.resolve().name
    if watch:
        _serve(folder, title, port, opens)
        return
    text = page.render(tell(run, title, time.time()))
    if output is not None and str(output) == "-":
        sys.stdout.write(text)
        return
    path = folder / "report.html" if output is None else output
    _write(path, text)
    click.echo(f"{path}  ({len(text.encode()) / 1e6:.1f} MB)")
    if opens and not webbrowser.open(path.resolve().as_uri()):
        click.echo("No browser was found; open the file yourself.", err=True)


def _write(path: Path, text: str) -> None:
    """A reader that opens it now sees the old page or the new one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None


def _serve(folder: Path, title: str, port: int, opens: bool) -> None:
    try:
        server = LivePage(folder, title, port)
    except OSError as error:
        raise click.UsageError(f"--port {port} cannot be used: {error.strerror}") from None
    with server, contextlib.suppress(KeyboardInterrupt):
        click.echo(f"{server.address}\nFor this machine only; Ctrl-C ends it.")
        if opens:
            webbrowser.open(server.address)
        server.serve_forever(poll_interval=0.2)
