"""Where the consumer of a pool is: the pool's part of `loader.state_dict()`."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

from holdfast.engine.checkpoint import Bookmark, Checkpoint
from holdfast.engine.driver import Driver
from holdfast.engine.supervisor import Supervisor
from holdfast.worker.batch_fingerprint import fingerprint

SETTLE_WITHIN = 60.0  # seconds for workers to finish what they had to do in an earlier epoch


class Checkpointing:
    """Takes checkpoints of a run. Under the pool's lock, but for `ask`."""

    def __init__(
        self, supervisor: Supervisor, driver: Driver, base_seed: int, bookmark: Bookmark | None
    ) -> None:
        """`bookmark` is told where the run has ended."""
        self._supervisor = supervisor
        self._driver = driver
        self._base_seed = base_seed
        self._bookmark = bookmark
        self._wanted: deque[Future[Checkpoint]] = deque()
        self._settle_by = 0.0  # when they are given at the latest

    def ask(self) -> Future[Checkpoint]:
        """Any thread may ask. `answer` gives it."""
        wanted: Future[Checkpoint] = Future()
        self._settle_by = self._driver.clock() + SETTLE_WITHIN
        self._wanted.append(wanted)
        return wanted

    @property
    def waits_for_workers(self) -> bool:
        """Whether workers are still in an earlier epoch than the consumer, and have time left to
        finish it: before that it is not known with which random state they begin this one."""
        if self._driver.clock() > self._settle_by or self._supervisor.machine.failure is not None:
            return False
        return self.is_unsettled()

    def is_unsettled(self) -> bool:
        machine = self._supervisor.machine
        return any(seat.epoch != machine.epoch and seat.items for seat in machine.seats)

    def answer_if_settled(self) -> None:
        if self._wanted and not self.waits_for_workers:
            self.answer()

    def answer(self) -> None:
        """Give all that were asked for."""
        while self._wanted:
            wanted = self._wanted.popleft()
            try:
                final = None if self._bookmark is None else self._bookmark.last
                wanted.set_result(final if final is not None else self._take())
            except Exception as error:
                wanted.set_exception(error)

    def keep_last(self) -> None:
        """The run ends here."""
        if self._bookmark is not None and self._bookmark.last is None:
            self._bookmark.last = self._take()

    def first_missing(self) -> int:
        """The first draw from the sampler whose batch the consumer has not had."""
        return self._place()[0]

    def _place(self) -> tuple[int, tuple[int, ...]]:
        """The same, and the draws after it whose batch the consumer has had."""
        machine, epoch = self._supervisor.machine, self._supervisor.epoch
        draws = epoch.draws
        if draws is None or (machine.in_order and not draws.has_gaps(epoch.done)):
            return epoch.done, ()
        return draws.place(machine.next_number, machine.missing(epoch.not_had))

    def _take(self) -> Checkpoint:
        machine, epoch = self._supervisor.machine, self._supervisor.epoch
        not_had, draws = epoch.not_had, epoch.draws
        seats = [machine.delivered_position(seat, not_had) for seat in machine.seats]
        first_missing, had_later = self._place()
        has_had = machine.in_order and draws is not None and epoch.last_index is not None
        has_had = has_had and draws is not None and draws.follows(epoch.done)
        return Checkpoint(
            finished=epoch.ended,
            yielded=epoch.yielded,
            done=epoch.done,
            turn=epoch.turn % machine.workers,
            base_seed=self._base_seed,
            shared_seed=epoch.seeds.shared,
            epoch=epoch.number,
            sample_seed=epoch.seeds.samples,
            begun=None if draws is None else draws.start,
            drawn=machine.next_number,
            waiting=0 if draws is None else len(draws.waiting),
            first_missing=first_missing,
            had_later=had_later,
            index=fingerprint(epoch.last_index) if has_had else None,
            sampler_state=None if draws is None else draws.state_before(first_missing),
            sampler_ended=draws is not None and draws.ended == first_missing,
            workers=tuple(
                self._driver.checkpoint(worker, *place) for worker, place in enumerate(seats)
            ),
            account=None if epoch.account is None else epoch.account.to_json(),
            unsettled=self.is_unsettled(),
        )
