"""One thing that went wrong with a worker, and what was done about it."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from holdfast.autopsy.catalogue import CATALOGUE, UNKNOWN
from holdfast.autopsy.cause import Confidence, Remedy
from holdfast.autopsy.evidence import signal_name
from holdfast.loader_identity import LoaderIdentity

_SHOWN_REMEDIES = 3  # remedies
_FIGURES = re.compile(r"\d[\d.,]*( ?[KMGT]i?B)?")


@dataclass(frozen=True, slots=True)
class Incident:
    """A death, stall or failed start of a worker.

    ``print(incident)`` prints one line, :meth:`report` adds the reasons and what to do. The fields
    are for programs, :meth:`to_json` is for files.
    """

    kind: str
    """``killed``, ``crashed``, ``exited``, ``stalled``, ``unkillable``, ``start-failed``; or
    ``recycled`` (replaced for its size) or ``renewed`` (replaced with all others because of a lock
    that was held at the fork, or moved to another node of a Ray cluster), if its stream could then
    not be continued exactly."""
    worker_id: int
    pid: int | None
    signal: str | None
    """The name of the signal that ended it, such as ``"SIGSEGV"``."""
    exitcode: int | None
    """As :mod:`multiprocessing` gives it: negative for a signal."""
    batch: int | None
    """The number of the batch in flight, counted from 0 in its epoch: the one it was making, or, if
    `step` is ``idle``, had still to begin. None if it had sent all it was asked for."""
    sample: Any
    """The index of the sample in flight, as the sampler gave it."""
    position: int | None
    """The place of that sample in its batch."""
    step: str
    """What it was doing: boot, start-up, fetch, transform (the part of fetch that its stack shows),
    collate, send, replay, idle, stop, broadcast."""
    stack: str
    """Its Python stack, if it left one."""
    action: str
    """What was done: ``replaced; its batch is made again`` (or ``replaced`` alone, if it was making
    none; or ``started again after a pause``, ``replaced by one forked anew``), ``replaced; the
    sample is tried alone``, ``replaced; the sample is given up``, ``the sample is given up``, ``not
    replaced, because it had nothing left to do``, ``gave up``. For an iterable dataset ``replaced;
    its stream is being taken up`` while the new worker catches up, and then the result of that
    (see `exact`)."""
    time: float
    """When it was noticed, in seconds since the epoch."""

    cause: str = UNKNOWN
    """A name of the catalogue (``holdfast explain --list``), or ``"unknown"``."""
    confidence: Confidence = "low"
    """How certain that is: ``low``, ``medium`` or ``high``."""
    because: tuple[str, ...] = ()
    """Why we think so, in words."""
    evidence: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What could be read: exit status, counters, memory, limits, stack."""
    remedies: tuple[Remedy, ...] = ()
    """What to do, cheapest first, with the figures of this machine."""
    sample_name: str | None = None
    """What the dataset calls the sample, if it has ``sample_name(index)``."""
    loader: str = ""
    """The loader: its ``name``, or the class of its dataset."""
    rank: int | None = None
    """The rank in a distributed run; None in a run of one process."""
    exact: bool | None = None
    """For an iterable dataset: True if what had been delivered was made again (all of it or, from a
    state, the last batch) and the fingerprints are equal, False if they are not; `action` says
    which. What the stream gives after that cannot be checked. None if nothing was compared (yet),
    or something could not be, and for map-style data, where a batch is made again from its own
    indices."""

    def __str__(self) -> str:
        return f"{LoaderIdentity(self.loader, self.rank).prefix}{self.sentence()}"

    def sentence(self) -> str:
        """The line, without the name of the loader."""
        return f"{self.who()} {self.what()}{self.where()}{self._left()}; {self.action}"

    def who(self) -> str:
        """The worker, and its process if there was one."""
        return f"worker {self.worker_id}" + ("" if self.pid is None else f" (pid {self.pid})")

    def report(self, remedies: int = _SHOWN_REMEDIES) -> str:
        """The line above, then why we think so and what to do."""
        lines = [str(self)]
        lines += [f"    because: {reason}" for reason in self.because]
        for remedy in self.advice(remedies):
            lines.append(f"    to do: {remedy.text}")
            lines += [f"        {line}" for line in remedy.command.splitlines()]
        if self.cause != UNKNOWN:
            lines.append(f"    more: holdfast explain {self.cause}")
        return "\n".join(lines)

    def kind_of_death(self) -> Hashable:
        """Equal for incidents with the same cause and the same remedies, whatever the figures:
        explaining one of them explains all."""
        return self.cause, tuple(_FIGURES.sub("", one.text) for one in self.advice(_SHOWN_REMEDIES))

    def advice(self, most: int = _SHOWN_REMEDIES) -> tuple[Remedy, ...]:
        """The first remedies, if its cause is more than a guess."""
        return self.remedies[:most] if self.confidence != "low" else ()

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types, for a logbook."""
        record = {one.name: getattr(self, one.name) for one in fields(self)}
        if not isinstance(self.sample, (int, float, str)):
            record["sample"] = None if self.sample is None else repr(self.sample)[:1000]
        record["because"] = list(self.because)
        record["evidence"] = dict(self.evidence)
        record["remedies"] = [{"text": one.text, "command": one.command} for one in self.remedies]
        record["text"] = self.sentence()
        return record

    def what(self) -> str:
        """The death itself, in words."""
        if self.kind == "unkillable":
            known = self.confidence != "low" and self.cause in CATALOGUE
            why = f" (it {CATALOGUE[self.cause].title})" if known else ""
            return f"made no progress{why}"
        if self.kind in ("recycled", "renewed"):
            return "was replaced while it lived"
        if self.evidence.get("ray_cause"):
            return CATALOGUE[self.cause].title
        words = describe_end(self.signal, self.exitcode)
        nursery = self.evidence.get("nursery_end")
        if nursery and self.signal is None and self.exitcode is None:
            words = f"{words} with the process that starts the workers, which {nursery},"
        if self.kind == "stalled":
            words = "made no progress and was killed"
        elif self.kind == "start-failed":
            words = "could not be started"
        if self.confidence == "low" or self.cause in _NAMED_BY_SIGNAL:
            return words
        if self.confidence == "medium":
            title = CATALOGUE[self.cause].title
            said = "was killed "  # as the words before it: "was killed by SIGKILL (probably by …)"
            known = words.startswith("was ") and title.startswith(said)
            guess = f"probably {title[len(said) :] if known else 'it ' + title}"
            return f"{words[:-1]}; {guess})" if words.endswith(")") else f"{words} ({guess})"
        title = CATALOGUE[self.cause].title
        if self.kind == "stalled":
            return f"made no progress (it {title}) and was killed"
        if self.signal is not None and self.cause == "exited-by-itself":
            return f"sent {self.signal} to itself"
        if self.signal is not None:
            return f"{title} ({self.signal})"
        return title if self.kind == "start-failed" else words

    def _left(self) -> str:
        """That the worker is still there, if it is, and why."""
        if self.kind != "unkillable":
            return ""
        if self.evidence.get("start_method") == "thread":
            return ", and cannot be ended, being a thread"
        return ", and cannot even be killed"

    def where(self) -> str:
        """What it was doing at that moment, in words."""
        doing = "transforming" if self.step == "transform" else "loading"
        if self.step in ("fetch", "transform") and self.position is not None:
            name = f"sample {self.sample!r}" if self.sample is not None else "a sample"
            where = f"position {self.position} of batch {self.batch}"
            if self.sample_name is not None:
                where = f"{self.sample_name}; {where}"
            return f" while {doing} {name} ({where})"
        if self.step == "idle" and self.batch is not None:
            return f" before it began batch {self.batch}"
        words = {
            "boot": " while it was starting",
            "start-up": " while it was starting",
            "fetch": f" while loading batch {self.batch}",
            "transform": f" while transforming a sample of batch {self.batch}",
            "collate": f" while collating batch {self.batch}",
            "send": f" while sending batch {self.batch}",
            "replay": " while catching up with its predecessor",
            "idle": " while it had nothing to do",
            "stop": " while it was stopping",
            "broadcast": " while it was told something by loader.broadcast()",
        }
        return words.get(self.step, "")


_SIGNALS = {
    "SIGKILL": "was killed by SIGKILL",
    "SIGTERM": "was terminated by SIGTERM",
    "SIGSEGV": "crashed with a segmentation fault (SIGSEGV)",
    "SIGBUS": "crashed with a bus error (SIGBUS)",
    "SIGABRT": "aborted (SIGABRT)",
    "SIGFPE": "crashed with an arithmetic error (SIGFPE)",
    "SIGILL": "crashed on an illegal instruction (SIGILL)",
    "SIGXCPU": "used up its CPU time limit (SIGXCPU)",
}
_NAMED_BY_SIGNAL = {
    UNKNOWN,
    "native-segv",
    "illegal-instruction",
    "abort",
    "stray-signal",
    "killed-unexplained",
}
_OUTSIDE_SIGNALS = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"}


def describe_end(signal: str | None, exitcode: int | None) -> str:
    """How a process ended, in words that follow its name."""
    if signal is not None:
        return _SIGNALS.get(signal, f"died of {signal}")
    if exitcode is None:
        return "disappeared"
    return f"exited by itself with code {exitcode}"


def describe_status(status: int | None) -> tuple[str, str | None, int | None]:
    """Kind, signal name and exit code of a wait status."""
    if status is None:
        return "killed", None, None
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal_name(number)
        return ("killed" if name in _OUTSIDE_SIGNALS else "crashed"), name, -number
    return "exited", None, os.WEXITSTATUS(status)
