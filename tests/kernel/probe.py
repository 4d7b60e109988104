"""Each feature by itself, in processes where something is refused. Without torch.

The argument is a list of refusals as JSON. For each a child is forked. It sets up the refusal, then
imports `holdfast.kernel` and tries everything in it. Nothing else of holdfast is imported, because
the kernel package is below the rest.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile  # noqa: F401 - for all children
import time
import traceback
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("refusing")))
import refusal

package = types.ModuleType("holdfast")
package.__path__ = [str(Path(__file__).parents[2] / "src" / "holdfast")]
sys.modules["holdfast"] = package


def tried(wanted: dict[str, Any]) -> dict[str, Any]:
    refusal.refuse(**wanted)
    kernel = importlib.import_module("holdfast.kernel")

    _files(kernel)
    _children(kernel)
    _bell(kernel)
    line = kernel.signal_at_end(kernel.pipe()[0], signal.SIGKILL)
    limits = kernel.limit(resource.RLIMIT_NOFILE)
    kernel.yield_processor()()
    lacking = kernel.missing()
    return {
        "survey": {one.name: [one.way, one.lost] for one in kernel.survey()},
        "missing": None if lacking is None else lacking.name,
        "line": line is not None,
        "limits": limits,
        "cores": kernel.cores(),
    }


def _files(kernel: Any) -> None:
    """Both sides of a mapping see the same, memory is reserved, and bytes in use stay as they are."""
    page, pages = mmap.PAGESIZE, 8
    fd = kernel.memory_file("holdfast-test", sealable=True, room=pages * page)
    assert os.fstat(fd).st_nlink == 0
    os.ftruncate(fd, pages * page)
    one, other = kernel.mapped(fd, pages * page), kernel.mapped(fd)
    kept = page + 100
    one[kept : kept + page] = b"k" * page
    kernel.reserve(fd, 0, pages * page, lambda: [(kept, page)])
    assert other[kept : kept + page] == b"k" * page
    assert os.fstat(fd).st_blocks * 512 >= pages * page
    one.close()
    other.close()
    kernel.seal(fd)
    os.close(fd)


def _children(kernel: Any) -> None:
    """One that is killed, one that exits, one that other code has reaped."""
    for how in ("signalled", "exits", "reaped"):
        ours, theirs = kernel.socket_pair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            if how == "signalled":
                time.sleep(60)
            os._exit(7)
        theirs.close()
        child = kernel.Child(pid, ours.fileno())
        if how == "signalled":
            assert not child.ended()
            child.send_signal(signal.SIGKILL)
        if how == "reaped":
            os.waitpid(pid, 0)
            child.send_signal(signal.SIGKILL)  # reaches no process
        assert child.ended(20)
        child.reap()
        assert child.status == {"signalled": 9, "exits": 7 << 8, "reaped": None}[how]
        child.close()
        ours.close()
    for how in ("lives", "exits", "reaped"):
        pid = os.fork()
        if pid == 0:
            if how == "lives":
                time.sleep(60)
            os._exit(7)
        if how == "reaped":
            os.waitpid(pid, 0)
        kernel.end_child(pid)
        try:
            os.kill(pid, 0)
            raise AssertionError(f"{pid} is there")
        except ProcessLookupError:
            pass


def _bell(kernel: Any) -> None:
    bell = kernel.Doorbell()
    bell.ring()
    assert os.read(bell.fileno(), 10) == b"!"
    bell.close()
    bell.ring()


def main() -> None:
    found = []
    for wanted in json.loads(sys.argv[1]):
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            try:
                result = tried(wanted)
            except BaseException:
                result = {"error": traceback.format_exc()}
            theirs.sendall(json.dumps(result).encode())
            os._exit(0)
        theirs.close()
        with ours, ours.makefile() as file:
            found.append(json.loads(file.read()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
