"""Memory control groups made for one run: with a limit or without, removed afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.autopsy.readers import cgroup
from tests.support.processes import eventually

_numbers = itertools.count()


class NoGroup(Exception):
    """No memory control group can be made here, for the reason given."""


@dataclass(frozen=True)
class MemoryGroup:
    path: Path
    version: int

    @property
    def procs(self) -> Path:
        return self.path / "cgroup.procs"

    def join(self) -> None:
        """For the process that calls it, and all it starts from now on."""
        self.procs.write_text(str(os.getpid()))

    def joining(self) -> str:
        """For `tests.support.warm.Incubator.start`. What it has in common with the incubator does not count."""
        return f"import os; open({str(self.procs)!r}, 'w').write(str(os.getpid()))"

    def pids(self) -> set[int]:
        return {int(pid) for pid in self.procs.read_text().split()}

    def limit(self, nbytes: int) -> None:
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.path / name).write_text(str(nbytes))

    def used(self) -> int:
        """Bytes, without files that the kernel would drop."""
        v1 = self.version == 1
        used = int((self.path / ("memory.usage_in_bytes" if v1 else "memory.current")).read_text())
        fields = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        prefix = "total_" if v1 else ""
        return used - sum(int(fields[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))

    def kills(self) -> int:
        """How many processes the kernel has killed here for lack of memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        fields = dict(line.split() for line in (self.path / name).read_text().splitlines())
        return int(fields["oom_kill"])


@contextlib.contextmanager
def memory_group(limit: int | None = None) -> Iterator[MemoryGroup]:
    """A group below our own; `NoGroup` where that cannot be."""
    chain = cgroup.groups("self", "memory")
    if not chain:
        raise NoGroup("no memory control group is mounted")
    name = f"holdfast-test-{os.getpid()}-{next(_numbers)}"
    group = MemoryGroup(chain[0].path / name, chain[0].version)
    try:
        group.path.mkdir()
        if limit is not None:
            group.limit(limit)
        group.used()
    except (OSError, KeyError) as error:
        if group.path.is_dir():
            group.path.rmdir()
        raise NoGroup(f"no memory control group can be made here: {error!r}") from None
    try:
        yield group
    finally:
        assert eventually(lambda: not group.pids())
        assert eventually(lambda: _removed(group.path))


def _removed(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.rmdir()
    return not path.exists()
