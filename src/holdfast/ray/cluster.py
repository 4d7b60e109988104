"""What the cluster says: why an actor died, what is free, and whether its head still answers; and
how this program joins it, and whether it still belongs to it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
from ray import exceptions

log = logging.getLogger("holdfast")

LOOK_EVERY = 1.0  # seconds
LOST_AFTER = 4  # looks in a row without an answer
ANSWERS_WITHIN = 2.0  # seconds


@dataclass(frozen=True)
class Death:
    """Why an actor cannot be used any more."""

    cause: str  # a name in the catalogue
    reason: str  # Ray's own words
    facts: dict[str, Any]  # fields of `engine.events.Exit`


# For the machine it is as if the process that starts the workers had been killed: no sample is
# suspected. That holds for an actor's process too, because Ray does not say whether it crashed or
# was killed from outside.
_OUTSIDE: dict[str, Any] = {"kind": "killed", "nursery_killed": True}
_FOR_MEMORY: dict[str, Any] = {"kind": "killed", "signal": "SIGKILL", "memory": True}


def describe_death(error: BaseException) -> Death:
    """What Ray's error says."""
    reason = " ".join(str(error).split())
    low = reason.lower()
    if isinstance(error, exceptions.OutOfMemoryError) or "running low on memory" in low:
        return Death("ray-out-of-memory", reason, _FOR_MEMORY)
    if isinstance(error, (exceptions.ObjectLostError, exceptions.OwnerDiedError)):
        return Death("ray-object-lost", reason, _OUTSIDE)
    if isinstance(error, (exceptions.NodeDiedError, exceptions.ActorUnavailableError)):
        return Death("ray-node-lost", reason, _OUTSIDE)
    if "node has died" in low or "node died" in low:
        return Death("ray-node-lost", reason, _OUTSIDE)
    return Death("ray-actor-died", reason, _OUTSIDE)


_AFTER_HEAD: Final = (
    "What to do: save a checkpoint and end this program soon, because Ray ends it about a minute "
    "after its head is lost. Start the cluster again (ray status shows its state), and continue "
    "from the checkpoint"
)
LEFT: Final = (
    "this program has left the Ray cluster while the loader was in use (ray.shutdown()), and the "
    "workers are gone with that.\nWhat to do: call loader.close() before ray.shutdown(). A new "
    "iter(loader) connects to Ray again and begins a new epoch; to go on in this one, load the "
    "loader's state_dict() first"
)


def connect() -> None:
    """Join the cluster that RAY_ADDRESS or ``ray start`` on this machine has named, or start one
    here. A cluster that has ended without ``ray stop`` is still named; Ray would wait for it for
    minutes."""
    named, where = os.environ.get("RAY_ADDRESS", ""), "the environment variable RAY_ADDRESS"
    if not named:
        path = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
        with contextlib.suppress(OSError):
            named, where = path.read_text().strip(), str(path)
    host, _, port = named.rpartition(":")
    if host and port.isdecimal() and "/" not in host and not _answers(host, int(port)):
        raise ConnectionError(
            f"{where} names a Ray cluster at {named}, and nothing answers there. Start it again "
            "(ray start --head), or name another one; to have one started on this machine, "
            + ("unset the variable" if where.endswith("RAY_ADDRESS") else "call ray stop")
        )
    ray.init(log_to_driver=False)
    log.info("Ray was not initialised: this program is now in the cluster at %s", address())


def address() -> str:
    """Of the head of the cluster that this program is in."""
    return str(ray.get_runtime_context().gcs_address)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host.strip("[]"), port), ANSWERS_WITHIN).close()
    except OSError:
        return False
    return True


class HeadWatch:
    """A thread that looks whether the head of the cluster answers, and what is free.

    Both are asked here and not where they are needed, because a cluster whose head is lost makes a
    caller wait for a minute. Then Ray ends the program.
    """

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self.lost = False
        self.free: Mapping[str, float] | None = None
        """What no task or actor uses, as of the last look; None if that has not been asked."""
        self._all: Mapping[str, float] = {}
        self._context = ray.get_runtime_context()
        self._address = address()
        self._connection = self._identity()
        self._on_lost = on_lost
        self._asked = False
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="holdfast-ray-head", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    @property
    def left(self) -> bool:
        """Whether this program has left the cluster, by ``ray.shutdown()`` or because it ends. To
        be asked before Ray is called: without a connection many calls start another cluster."""
        if not ray.is_initialized():
            return True
        return self._identity() != self._connection

    def _identity(self) -> tuple[str, str]:
        """Of the connection: a cluster counts its jobs, and each has nodes of its own."""
        return self._context.get_node_id(), self._context.get_job_id()

    def words(self) -> str:
        return (
            f"the head of the Ray cluster ({self._address}) has not answered for "
            f"{LOST_AFTER * LOOK_EVERY:.0f} s, so no worker can be reached or started."
            f"\n{_AFTER_HEAD}"
        )

    def lacks_processors(self, options: Mapping[str, Any]) -> bool:
        """Whether, as of the last look, an actor with these options finds no free processor."""
        self._asked = True
        return self.free is not None and self.free.get("CPU", 0.0) < options.get("num_cpus", 1)

    def may_have_processors(self, options: Mapping[str, Any], actors: int, others: float) -> bool:
        """Whether, as of the last look, so many processors are in use that all these actors may
        have theirs, besides `others`: one that has not started is slow then."""
        if self.free is None:
            return True
        used = self._all.get("CPU", 0.0) - self.free.get("CPU", 0.0)
        return bool(used - others >= actors * options.get("num_cpus", 1))

    def ask_for(self, options: Mapping[str, Any]) -> str:
        """What an actor with these options needs and what is free, in words."""
        self._asked = True
        wanted = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0)}
        wanted |= options.get("resources") or {}
        if options.get("memory"):
            wanted["memory"] = options["memory"]
        wanted = {name: count for name, count in wanted.items() if count}
        if not wanted:
            return "no processor is asked for, so a node is slow to start a process"
        said = "each asks for " + ", ".join(f"{name} {n:g}" for name, n in wanted.items())
        if self.free is not None:
            free = ", ".join(f"{name} {self.free.get(name, 0.0):g}" for name in wanted)
            said += f"; free in the whole cluster: {free}"
        return said

    def _watch(self) -> None:
        missed = 0
        host, _, port = self._address.rpartition(":")
        while not self._closed.wait(LOOK_EVERY):
            if not _answers(host, int(port)):
                missed += 1
            else:
                missed = 0
                if self._asked and not self.left:
                    self._all = ray.cluster_resources()
                    self.free = ray.available_resources()
            if missed >= LOST_AFTER:
                self.lost = True
                self._on_lost()
                return
