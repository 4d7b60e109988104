"""Draws indices from the sampler when the machine wants tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.engine import events as ev
from holdfast.engine import signals
from holdfast.engine.driver import Driver, hand_over_backlog
from holdfast.engine.supervisor import Supervisor
from holdfast.samples.substitute import copy_index, keys_of


@dataclass
class Announcement:
    """A change of the dataset that workers are told of."""

    change: bytes
    noted: Callable[[int], None] | None
    """Called under the pool's lock, with the draw before which it is made: what is asked for under
    the same lock has both or neither."""


class Drawing:
    """Used under the pool's lock, but for `announced`, which any thread may append to."""

    def __init__(
        self,
        supervisor: Supervisor,
        driver: Driver,
        work: signals.Undivided,
        *,
        auto_collation: bool,
        users_sampler: bool,
    ) -> None:
        """With `users_sampler` drawing runs code of the user: it may take any time, and signal
        handlers run in it."""
        self._supervisor = supervisor
        self._driver = driver
        self._work = work
        self._auto_collation = auto_collation
        self._users_sampler = users_sampler
        self.announced: deque[Announcement] = deque()
        """What workers are told before the tasks that are drawn next; not told to the machine
        yet."""

    def draw_due(self, draw: Callable[[], Any]) -> None:
        """Draw what is due. A worker gets all that is drawn now in one message, unless drawing may
        take long."""
        if self._supervisor.epoch.due > 1 and not self._users_sampler:
            with self._supervisor.gathering():
                self._draw_each(draw)
        else:
            self._draw_each(draw)

    def _draw_each(self, draw: Callable[[], Any]) -> None:
        supervisor, epoch, work = self._supervisor, self._supervisor.epoch, self._work
        while epoch.due > 0:
            try:
                if self._users_sampler:
                    hand_over_backlog(self._driver)
                    index = work.call_user(draw)
                else:
                    index = draw()
            except StopIteration:
                epoch.due -= 1
                self.tell_announced()
                supervisor.tell(ev.DRAINED)
            except BaseException as error:
                epoch.sampler_error = repr(error)
                if not signals.raised_by_handler(error):  # else the index may be lost
                    work.half_done = False
                raise
            else:
                epoch.due -= 1
                epoch.sampler_error = None
                index = copy_index(index)
                keys = keys_of(index, self._auto_collation)
                if self.announced:
                    self.tell_announced()
                if epoch.account is not None:
                    supervisor.hint_at(epoch.drawn, epoch.account.hints_for(epoch.drawn, keys))
                    epoch.drawn += 1
                supervisor.tell(ev.Drawn(index, keys))

    def next_draw(self) -> int:
        """How many were drawn from the sampler in this epoch."""
        draws, number = self._supervisor.epoch.draws, self._supervisor.machine.next_number
        return number if draws is None else draws.ordinal(number)

    def tell_announced(self) -> None:
        while self.announced:
            announcement = self.announced.popleft()
            self.note_draw(announcement)
            self._supervisor.tell(ev.Announced(announcement.change))

    def note_draw(self, announcement: Announcement) -> None:
        """The announcement is made before the next draw: tell that to its author, once."""
        noted, announcement.noted = announcement.noted, None
        if noted is not None:
            noted(self.next_draw())
