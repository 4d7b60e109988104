"""How often, and for how long, something is tried with workers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits", "RestartPolicy"]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """At most `intensity` replacements within `period` seconds; None for no limit."""

    intensity: int | None
    period: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for workers of one kind. The defaults are for processes.

    A start that failed or was killed is repeated after a pause. The first pause is `first_pause`.
    Each later one is twice as long as the one before, up to `longest_pause`.

    Before a sample is tested alone there may be a pause (`engine.restarts`). Its length is random,
    and twice `longest_test_pause` at most.
    """

    kill_after: float = 0.5  # seconds a worker has to dump its stack, or to exit, before SIGKILL
    abandon_after: float = 1.0  # seconds after SIGKILL until the run goes on without the worker
    failed_starts: int = 3  # deaths in a row before "ready" after which a seat is given up
    tries: int = 12  # the same for starts that fail for lack of a resource: 31 s in all
    first_pause: float = 0.1  # seconds
    longest_pause: float = 5.0
    longest_test_pause: float = 10.0
    killable: bool = True  # False: a worker that does not exit by itself is abandoned at once
    stuck: int | None = None  # abandoned workers that still run, beyond which the run ends
    grace: float = 1.0  # seconds a worker has to finish its item when the pool closes
    check_interval: float = 5.0  # seconds between two checks of the workers, at most
    depth: int = 16  # batches ahead for each worker, if they are small and quick,
    ahead_bytes: int = 1 << 20  # and the bytes of these
    exit_report_wait: float = 0.5  # seconds to wait for reports of exits that have happened

    def pause(self, tries: int) -> float:
        """Seconds to wait after this many failed starts in a row."""
        return min(self.first_pause * (1 << min(tries - 1, 32)), self.longest_pause)
