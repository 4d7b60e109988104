"""What this machine still knows about something that happened here earlier.

Counters say how often, not when; only the kernel's log names a pid. So this supports a verdict on a
text, and decides one only if the log contains a pid of the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.autopsy.machine import Machine
from holdfast.autopsy.readers import HERE, Roots, cgroup, kernel_log, process

__all__ = ["Scene"]


@dataclass(frozen=True)
class Scene:
    """The machine where it happened, some time later."""

    machine: Machine
    kernel: kernel_log.KernelLog | None = None
    group_kills: int | None = None
    machine_kills: int | None = None

    @classmethod
    def look(cls, roots: Roots = HERE) -> Scene:
        kills = cgroup.kills("self", roots)
        return cls(
            Machine.look(roots),
            kernel_log.read(roots, commands=roots is HERE),
            None if kills is None else max(kills.values()),
            process.machine_kills(roots),
        )
