"""What a worker thread, or an actor, notes in memory: what it is doing, its last random states.

They are read by the driver while the thread goes on. So each change is one store of a new object,
and whatever the moment, what is read fits together. A thread that was abandoned may write later:
its successor has notes of its own, which begin with what the driver has copied.
"""

from __future__ import annotations

from time import monotonic

import numpy as np
from numpy.typing import NDArray

from holdfast.autopsy.blackbox import BOOT, STATE, STEPS, Note
from holdfast.autopsy.tally import SampleWatch, step_seconds

_NOTHING = -1
FEWEST = 3  # states: before the last item answered, before the next, and the one being written

State = tuple[int, int, bytes]
"""The first and the last number for which a random state is valid, and the state."""


class ThreadNotes:
    """Implements `worker.interface.Notes`."""

    room = STATE

    def __init__(
        self,
        states: tuple[State, ...] = (),
        counted: bytearray | None = None,
        worker: int = 0,
        kept: int = FEWEST,
    ) -> None:
        """`counted`: where to count seconds and samples (see `autopsy.tally`), if that is wanted;
        all workers of this id count there. `kept`: how many random states are kept."""
        self._kept = kept
        self.watch = None if counted is None else SampleWatch(counted, 0, worker)
        self._seconds = None if counted is None else step_seconds(counted, 0)
        self.cell = [_NOTHING]
        self._note = (_NOTHING, BOOT, monotonic())
        self._states = states
        self._slot: NDArray[np.uint8] | None = None

    # -- by the thread --------------------------------------------------------------------

    @property
    def position(self) -> int | None:
        position = self.cell[0]
        return None if position == _NOTHING else position

    def note(self, task: int, position: int, step: int) -> None:
        self.cell[0] = position
        now = monotonic()
        if self._seconds is not None:
            _, last, since = self._note
            self._seconds[last] += now - since
        self._note = (task, step, now)

    def take_up(self, number: int) -> bool:
        self._states = self.until(number)
        return bool(self._states) and self._states[-1][1] == number

    def free_slot(self) -> NDArray[np.uint8]:
        if self._slot is None:
            self._slot = np.empty(self.room, np.uint8)
        return self._slot

    def commit(self, number: int, size: int) -> None:
        state = (number, number, self.free_slot()[:size].tobytes())
        self._states = (*self._states[1 - self._kept :], state)

    def still(self, number: int) -> None:
        first, _, raw = self._states[-1]
        self._states = (*self._states[:-1], (first, number, raw))

    # -- by the driver --------------------------------------------------------------------

    def read(self) -> Note:
        task, step, since = self._note
        return Note(None if task == _NOTHING else task, self.position, STEPS[step], since)

    def random_state(self, number: int) -> bytes | None:
        """The random state after `number` answers, if the worker got that far."""
        for first, last, raw in self._states:
            if first <= number <= last:
                return raw
        return None

    def until(self, number: int) -> tuple[State, ...]:
        """The states up to this number, for a successor."""
        return tuple(
            (first, min(last, number), raw) for first, last, raw in self._states if first <= number
        )
