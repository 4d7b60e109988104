"""Who has been silent for too long: pure, with the time and the notes handed in.

A worker shows that it lives by messages and by the notes in its black box, which it renews with
every sample. A part of a large message that has arrived counts too. If none of these changes while
it owes an answer, the time since is its silence. Silence is
measured by our own looks: where we did not look ourselves (Ctrl-Z, a suspended machine), nobody
else can have made progress, and that time does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.autopsy.blackbox import Note

__all__ = ["BOOT_ALLOWANCE", "Pulse", "Silence"]

BOOT_ALLOWANCE = 120.0  # seconds to import torch and the main module, no matter how short a sample
LATE = 1.0  # seconds after which a look is so late that we must have been stopped ourselves


@dataclass(slots=True)
class Pulse:
    """The signs of life of one worker. Whoever hears or asks it sets the first two."""

    busy_since: float = 0.0  # it was asked or heard then
    spoke: bool = False  # since the last look
    note: Note | None = None  # of its black box at the last look, and since when it is so
    note_since: float = 0.0  # also: since when no part of a message has arrived
    parts: int = 0  # of unfinished messages, received by the last look


class Silence:
    """Watches the pulses of a pool."""

    def __init__(self, pulses: Sequence[Pulse], timeout: float | None, now: float) -> None:
        self.timeout = timeout
        self._pulses = pulses
        self._awake_since = self._last_look = self._next_look = now

    def interval(self, longest: float) -> float:
        """The longest time between two looks, if others allow `longest`."""
        return longest if self.timeout is None else min(longest, max(0.05, self.timeout / 10))

    def awake(self, now: float, interval: float) -> None:
        """We are looking now; to be told at every look, at the latest after `interval`."""
        if now - self._last_look > interval + LATE:
            self._awake_since = now
        self._last_look = now

    def due(self, now: float, interval: float) -> bool:
        """Whether it is time to look at the workers again."""
        if self.timeout is None or now < self._next_look:
            return False
        self._next_look = now + interval
        return True

    def too_long(
        self,
        worker: int,
        note_of: Callable[[int], Note],
        patience: float,
        now: float,
        parts: int = 0,
    ) -> bool:
        """Whether a worker that owes us something has been silent for more than `patience`.

        `parts` is how many parts of large messages have arrived since its channel was made.
        """
        pulse = self._pulses[worker]
        if pulse.spoke:
            pulse.spoke = False
            return False
        note = note_of(worker)
        if note != pulse.note:
            pulse.note, pulse.note_since = note, now
        if parts != pulse.parts:
            pulse.parts, pulse.note_since = parts, now
        if note.step == "boot":
            patience = max(patience, BOOT_ALLOWANCE)
        return now - max(pulse.busy_since, pulse.note_since, self._awake_since) > patience
