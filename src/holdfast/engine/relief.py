"""What is done for memory, between the warden's decisions and the workers.

Workers are told to go, or to give back what lies free in their arenas, and tasks that had to wait
for memory are handed out. Like all that the driver does it runs under the pool's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from holdfast.autopsy.logbook import Logbook
from holdfast.autopsy.machine import in_words
from holdfast.engine.holdings import Holdings
from holdfast.engine.machine import Machine
from holdfast.engine.protocol import order
from holdfast.engine.warden import Warden

__all__ = ["Relief"]

TIDY_AFTER = (
    5.0  # seconds without anything to do after which a worker gives back what it does not use
)


class Relief:
    """For the workers of one pool."""

    def __init__(
        self, machine: Machine, holdings: Holdings, warden: Warden, logbook: Logbook | None
    ) -> None:
        self._machine = machine
        self._seats = machine.seats
        self._holdings = holdings
        self._places = holdings.places
        self._warden = warden
        self._logbook = logbook
        self._next_tidying = 0.0
        self._held_back = False  # batches had to wait for memory, and that was noted

    def look(self, now: float, pids: Mapping[int, int]) -> None:
        """Have the warden look, and tell the workers what follows from it."""
        self._note_held_back()
        ready = {worker: pid for worker, pid in pids.items() if self._seats[worker].ready}
        fattest = self._warden.look(now, ready if self._machine.recycles else {})
        if fattest is not None:
            self.wish(fattest, "ask" if self._machine.iterable else "retire")
        if self._warden.tight(now):
            self._shrink(range(self._machine.workers))
        elif now >= self._next_tidying:
            # Whoever has had nothing to do for a while needs no memory for batches, until it has.
            self._next_tidying = now + TIDY_AFTER / 2
            self._shrink(
                worker
                for worker, place in enumerate(self._places)
                if now - place.pulse.busy_since >= TIDY_AFTER and not self._seats[worker].busy
            )

    def wish(
        self, worker: int, kind: Literal["retire", "shrink", "ask", "stay"], content: object = None
    ) -> bool:
        """An order that does not wait behind tasks ordered before; whether it was sent."""
        channel, window = self._places[worker].channel, self._places[worker].window
        if channel is None or not self._seats[worker].ready:
            return False
        self._holdings.post(channel, order(kind, 0, content, window.take_released()))
        self._holdings.boxes.ring(worker)
        return True

    def _shrink(self, workers: Iterable[int]) -> None:
        """Have them give back what lies free in their arenas, if there may be anything new."""
        for worker in workers:
            place = self._places[worker]
            if not place.tidied or place.window.released:
                place.tidied = self.wish(worker, "shrink")

    def _note_held_back(self) -> None:
        share = self._warden.share
        limit, largest = share.budget.limit, self._machine.largest
        if self._held_back or limit is None or largest is None or not self._machine.held_back:
            return
        if share.alone or share.cap is not None:
            return  # that is for another reason, which is told
        self._held_back = True
        if self._logbook is not None:
            self._logbook.event(
                "held-back",
                f"batches have up to {in_words(largest)}: fewer are made ahead than "
                f"prefetch_factor asks for, so that no more than {in_words(limit)} are in flight",
                largest=largest,
                limit=limit,
            )
