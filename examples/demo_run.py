"""A training run of the demo as seen from outside: its reports go in, what to show comes out.

No process and no terminal here; `demo.py` has the first, `demo_screen.py` the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# What the demo and the training agree on.
EPOCHS = 3
BATCHES = 40  # in an epoch
BATCH_SIZE = 24
TOTAL = EPOCHS * BATCHES
WORKERS = 3
STALL_TIMEOUT = 2.0  # seconds
MEMORY_LIMIT = "64MiB"  # of a worker's own memory

Event = dict[str, Any]


@dataclass
class Strike:
    """What befell one worker, and what came of it."""

    kind: str  # "SIGKILL", "segfault", "hang"; or holdfast's word for what the demo did not do
    worker: int
    pid: int
    time: float
    incident: Event | None = None  # what holdfast had to say about it
    delay: float | None = None  # seconds until the trainer had the batch that was lost

    @property
    def action(self) -> str:
        """What holdfast did about it."""
        if self.incident is None:
            return "nothing"
        if self.incident["end"] == "stalled":
            return "killed, then replaced"
        return str(self.incident["action"]).partition(";")[0]

    @property
    def activity(self) -> str:
        """What the worker was doing at that moment."""
        if self.incident is None:
            return "-"
        step, batch = self.incident["step"], self.incident["batch"]
        if step == "fetch" and self.incident["sample"] is not None:
            return f"loading sample {self.incident['sample']}"
        words = {"fetch": "loading", "collate": "collating", "send": "sending"}
        return f"{words[step]} batch {batch}" if step in words else step


@dataclass
class Worker:
    pid: int
    up: bool = True
    private: int = 0  # bytes of memory of its own, when they were last read


@dataclass
class Run:
    """One training."""

    name: str
    loader: str
    plan: str = ""  # what will be done to it
    total: int = TOTAL  # batches that it is to have
    began: bool = False
    exit_status: int | None = None
    errors: str = ""  # all it wrote to standard error
    batches: int = 0
    losses: list[str] = field(default_factory=list)  # after each batch, as float.hex() gives it
    final_loss: str | None = None
    accuracy: float | None = None
    workers: dict[int, Worker] = field(default_factory=dict)
    strikes: list[Strike] = field(default_factory=list)
    leaks: bool = False
    largest: int = 0  # most memory of its own that a worker had
    recycled: int = 0  # workers that holdfast has replaced for their size
    growth: str = ""  # what holdfast said about that
    bad: Event | None = None  # the sample that could not be used
    samples: int = 0  # of batches after the comparison
    arrivals: list[float] = field(default_factory=list)  # of its batches
    news: list[tuple[float, str]] = field(default_factory=list)  # for those who read lines

    @property
    def through(self) -> bool:
        """Whether its loss can be compared; its process may still be there."""
        return self.final_loss is not None

    @property
    def ended(self) -> bool:
        return self.exit_status is not None

    @property
    def finished(self) -> bool:
        return self.exit_status == 0 and self.batches == self.total

    @property
    def died(self) -> bool:
        return self.ended and not self.finished

    @property
    def error(self) -> str:
        """The last word of a run that died: the message of the exception it died of."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        named = [line for line in lines if "Error: " in line]
        return (named or lines or [f"exit status {self.exit_status}"])[-1]

    def same_losses(self, other: Run) -> int:
        """How many of its losses are those of the other run, to the last bit."""
        return sum(mine == theirs for mine, theirs in zip(self.losses, other.losses, strict=False))

    @property
    def seconds_per_batch(self) -> float:
        """How long a worker took for a batch, all the time between batches counted."""
        apart = self.arrivals[-1] - self.arrivals[0] if self.batches > 1 else 0.0
        return WORKERS * apart / max(1, self.batches - 1)

    # -- what happens ---------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Take in one report of the training or of one of its workers."""
        handlers = {
            "begin": self._begun,
            "worker": self._worker_started,
            "batch": self._batch_arrived,
            "loss": self._step_done,
            "fault": self._fault,
            "incident": self._incident,
            "end": self._through,
            "bad": self._bad_sample,
            "bye": self._done,
        }
        handlers[event["event"]](event)

    def struck(self, kind: str, worker: int, now: float) -> None:
        """Something has been done to a worker."""
        place = self.workers[worker]
        place.up = False
        self.strikes.append(Strike(kind, worker, place.pid, now))
        deeds = {
            "SIGKILL": "is sent a SIGKILL",
            "segfault": "reads from address 0",
            "hang": "begins to wait for ever",
        }
        self._tell(now, f"worker {worker} (pid {place.pid}) {deeds[kind]}")

    def leak(self, now: float) -> None:
        """From now on its dataset keeps a part of every sample."""
        self.leaks = True
        self._tell(now, "the dataset begins to leak")

    def measured(self, worker: int, private: int) -> None:
        """So much memory of its own a worker has."""
        self.workers[worker].private = private
        self.largest = max(self.largest, private)

    def end(self, exit_status: int, errors: str, now: float) -> None:
        self.exit_status, self.errors = exit_status, errors
        if self.died:
            for worker in self.workers.values():
                worker.up = False
            self._tell(now, f"died at batch {self.batches} of {self.total}: {self.error}")

    # -- reports --------------------------------------------------------------------------

    def _begun(self, event: Event) -> None:
        self.began = True
        self._tell(event["time"], f"training begins, with {WORKERS} workers")

    def _worker_started(self, event: Event) -> None:
        self.workers[event["worker"]] = Worker(event["pid"])

    def _batch_arrived(self, event: Event) -> None:
        self.batches += 1
        self.arrivals.append(event["arrived"])
        self.samples += event["size"] if self.through else 0
        if event["recycled"] > self.recycled:
            self.recycled = event["recycled"]
            text = f"{self.recycled} of its workers replaced for their size so far"
            self._tell(event["time"], text)
        for strike in self.strikes:
            if strike.incident is None or strike.delay is not None:
                continue
            if strike.incident["batch"] in (event["batch"], None):
                strike.delay = event["arrived"] - strike.time
                text = f"worker {strike.worker}'s batch was there after {seconds(strike.delay)}"
                self._tell(event["time"], text)

    def _step_done(self, event: Event) -> None:
        self.losses.append(event["loss"])
        if len(self.losses) % BATCHES == 0:
            loss = float.fromhex(event["loss"])
            self._tell(event["time"], f"batch {self.batches} of {self.total}, loss {loss:.4f}")

    def _fault(self, event: Event) -> None:
        self.struck(event["fault"], event["worker"], event["time"])

    def _incident(self, event: Event) -> None:
        for strike in self.strikes:
            if strike.pid == event["pid"] and strike.incident is None:
                break
        else:  # not the demo's doing, but it has happened
            strike = Strike(event["end"], event["worker"], event["pid"], event["noticed"])
            self.strikes.append(strike)
        strike.incident = event
        self._tell(event["time"], event["words"])

    def _through(self, event: Event) -> None:
        self.final_loss, self.accuracy = event["loss"], event["accuracy"]
        loss = float.fromhex(event["loss"])
        text = f"on unseen pictures: loss {loss:.4f}, {self.accuracy:.0%} right"
        self._tell(event["time"], text)

    def _bad_sample(self, event: Event) -> None:
        self.bad = event
        self._tell(event["time"], f"{event['name']} {event['action']}: {event['words']}")

    def _done(self, event: Event) -> None:
        self._tell(event["time"], f"finished: {self.batches} of {self.total} batches")

    def _tell(self, now: float, text: str) -> None:
        self.news.append((now, text))


def seconds(duration: float) -> str:
    """A duration in three figures or so."""
    return f"{duration * 1000:.0f} ms" if duration < 0.9995 else f"{duration:.2f} s"


def mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
