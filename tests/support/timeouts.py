"""What a test that takes too long was doing, also where several test processes run side by side.

`pytest-timeout` writes the stacks to the terminal and ends the process. One of several test processes has no terminal:
all that was seen then was "node down: Not properly terminated". Here they go to standard error, which all processes
share, with what the processes below this one are doing.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from pathlib import Path
from typing import Any

import pytest

_stderr = -1


def keep_stderr() -> None:
    """Before pytest redirects it."""
    global _stderr
    _stderr = os.dup(2)


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    if _stderr < 0 or settings.method != "thread":
        return None  # pytest-timeout has a terminal
    timer = threading.Timer(settings.timeout, _give_up, (item.nodeid, settings.timeout))
    timer.name = f"timeout of {item.nodeid}"
    timer.daemon = True  # a test may end the interpreter

    def cancel() -> None:
        timer.cancel()
        timer.join()

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    timer.start()
    return True


def _give_up(name: str, seconds: float) -> None:
    text = f"\n{name} did not end within {seconds} s\n{_tree(os.getpid())}\n"
    os.write(_stderr, text.encode())
    faulthandler.dump_traceback(_stderr, all_threads=True)
    os._exit(1)


def _tree(pid: int, depth: int = 0) -> str:
    """The processes below this one: name, state, and where in the kernel they sleep."""
    folder = Path(f"/proc/{pid}")
    try:
        name, state = (folder / "comm").read_text().strip(), (folder / "stat").read_text()
        line = "  " * depth + f"{pid} {name} {state.rpartition(')')[2].split()[0]}"
        lines = [f"{line} {(folder / 'wchan').read_text()}"]
        children = [(task / "children").read_text() for task in (folder / "task").iterdir()]
    except OSError:
        return "  " * depth + f"{pid} has just ended"
    lines += [_tree(int(child), depth + 1) for child in " ".join(children).split()]
    return "\n".join(lines)
