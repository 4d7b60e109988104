"""Which worker has made no progress for too long: pure, with time and progress as arguments.

A worker shows progress by messages and by the note in its black box (memory that survives the
worker), which it updates with every sample. A part of a large message that has arrived counts too.
If none of these changes while the worker owes an answer, it has been inactive since then.

Only time in which this process was running counts. If a check is much later than planned, this
process was stopped itself (Ctrl-Z, a suspended machine), and the workers may have been too.

On a machine that has too much to do, a healthy worker may be ready to run for seconds without
getting a processor. That time does not count either, as far as the kernel says how much it was, but
there is an end to it: to a user it makes no difference why a batch never comes, and other ranks of
a distributed run do not wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.autopsy.blackbox import Note
from holdfast.engine.driver import Processor, Progress

BOOT_ALLOWANCE = 120.0  # seconds to import torch and the main module, whatever the timeout
# How long a worker may lack a processor, in timeouts and in seconds: the shorter of the two.
LACKING_TIMEOUTS = 9
LACKING_SECONDS = 120.0
LATE_SECONDS = 1.0  # a check that is later than this means that this process was stopped


@dataclass(slots=True)
class _LastCheck:
    """What one worker had shown at its last check."""

    at: float
    note: Note | None = None
    parts: int = 0
    unchanged_since: float = 0.0  # neither the note nor `parts` has changed since
    processor: Processor | None = None
    waited: float = 0.0  # for a processor, until the worker fell silent
    ran_at: float = 0.0  # at this check it had run, or was not ready to
    lack: float = 0.0  # seconds without a processor in this silence, of the present process
    earlier: float = 0.0  # and of those before it

    def lacked(self, processor: Processor | None, now: float, *, silent: bool) -> float:
        """Seconds in which the worker was ready to run without a processor, since it is silent."""
        if not silent:
            self.lack = self.earlier = 0.0
        if processor is not None:
            before, self.processor = self.processor, processor
            if not silent or before is None or processor.ran < before.ran:  # another process
                self.earlier += self.lack
                self.waited, self.ran_at = processor.waited, now
            elif processor.ran > before.ran or not processor.ready:
                self.ran_at = now
            # The kernel adds a wait when it is over. Until then the worker is ready and does not
            # run.
            self.lack = processor.waited - self.waited + now - self.ran_at
        return self.earlier + self.lack


class StallDetector:
    """Finds the workers of a pool that have stalled."""

    def __init__(self, workers: int, timeout: float | None, now: float) -> None:
        self.timeout = timeout
        self._checks = [_LastCheck(now) for _ in range(workers)]
        self._running_since = self._last_check = self._next_check = now

    def interval(self, longest: float) -> float:
        """Seconds until the next check: `longest`, or less if the timeout is short."""
        return longest if self.timeout is None else min(longest, max(0.05, self.timeout / 10))

    def awake(self, now: float, interval: float) -> None:
        """This process is running now. To be called at least every `interval` seconds."""
        if now - self._last_check > interval + LATE_SECONDS:
            self._running_since = now
        self._last_check = now

    def due(self, now: float, interval: float) -> bool:
        """Whether it is time to check the workers again."""
        if self.timeout is None or now < self._next_check:
            return False
        self._next_check = now + interval
        return True

    def has_stalled(self, worker: int, progress: Progress, timeout: float, now: float) -> bool:
        """Whether a worker that owes an answer has made no progress for `timeout` seconds."""
        last = self._checks[worker]
        active = progress.active > last.at
        changed = progress.note != last.note or progress.parts != last.parts
        lacked = last.lacked(progress.processor, now, silent=not (active or changed))
        last.at = now
        if changed:
            last.note, last.parts, last.unchanged_since = progress.note, progress.parts, now
        if active:
            return False
        if progress.note.step == "boot":
            timeout = max(timeout, BOOT_ALLOWANCE)
        inactive = now - max(progress.active, last.unchanged_since, self._running_since)
        return inactive - min(lacked, LACKING_TIMEOUTS * timeout, LACKING_SECONDS) > timeout
