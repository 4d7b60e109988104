"""The iterator of a loader with workers.

It is torch's, up to where batches come from: torch's own base class draws the seeds, starts the
sampler and warns, so that exactly the random numbers are drawn that torch draws.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pickle
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset

from holdfast.engine import events as ev
from holdfast.engine import signals
from holdfast.engine.checkpoint import Bookmark, Checkpoint
from holdfast.engine.driver import Batch
from holdfast.engine.epoch import NO_BATCH, Failed, Reported, StartRefused
from holdfast.engine.flow import BeforeSizesAreKnown
from holdfast.engine.handle import WorkerHandle
from holdfast.engine.loader_records import LoaderRecords
from holdfast.engine.machine import Machine
from holdfast.engine.messages import cannot_start, gave_up, poisoned
from holdfast.engine.pinning import PinnedBatch, Pinner
from holdfast.engine.pool import Pool, TimedOut
from holdfast.engine.sampler_draws import (
    SamplerDraws,
    SamplerStart,
    begin_sampler_again,
    draw_seed,
    first_missing_of,
)
from holdfast.engine.samplers import leaves_no_trace, runs_no_user_code
from holdfast.engine.serial import open_account
from holdfast.engine.worker_methods import new_pinner, worker_method
from holdfast.errors import TooManyBadSamples
from holdfast.limits.budget import Budget, Share
from holdfast.options import Settings
from holdfast.private_names import (
    BaseDataLoaderIter,
    IterDataPipe,
    MapDataPipe,
    MultiProcessingDataLoaderIter,
    profiler_enabled,
    shard,
)
from holdfast.samples.account import Account
from holdfast.samples.bad_sample import BadSample, name_of
from holdfast.samples.substitute import copy_index, keys_of
from holdfast.told_changes import DueChange, SetAttributes
from holdfast.worker.exceptions import rebuild
from holdfast.worker.generator_states import default_generators_kept
from holdfast.worker.interface import Blueprint
from holdfast.worker.sample_seeding import EpochSeeds
from holdfast.worker.tolerant import DROPPED

log = logging.getLogger("holdfast")

_NOTHING: Final = object()


class WorkerIterator(MultiProcessingDataLoaderIter):
    """Batches from workers that may die.

    It is torch's by name only: frameworks ask whether an iterator is one of these before they end
    its workers. Nothing of torch's own engine is used, and its `__init__` is not called.
    """

    def __init__(
        self,
        loader: Any,
        options: Settings,
        records: LoaderRecords,
        budget: Budget,
        on_pool: Callable[[Pool], None],
        bookmark: Bookmark,
        resumed: Checkpoint | None,
    ) -> None:
        """`resumed`: where another run has left this epoch, or ended the one before it."""
        if resumed is not None and resumed.finished and loader.persistent_workers:
            # Its workers were seeded, and their iterator made, before the epochs that are over.
            with default_generators_kept():
                BaseDataLoaderIter.__init__(self, loader)
            if resumed.now is not None:
                resumed.now.restore(loader, default=False, between_epochs=True)
        else:
            BaseDataLoaderIter.__init__(self, loader)
        self._records = records
        if resumed is not None and (self._persistent_workers or not resumed.finished):
            self._base_seed = resumed.base_seed
        self._seeds = seeds = self._begin_epoch(loader, options, resumed)
        self._owner = os.getpid()
        self._batch_size = loader.batch_size
        self._options = options
        self._account: Account | None = None
        self._ahead: deque[Any] = deque()  # drawn from the sampler before their time
        self._due: deque[DueChange] = deque()
        self._recorded: Any = None  # the last delivery whose bad samples were recorded
        self._in_hand: Any = _NOTHING  # a batch that could not be returned: a signal handler raised
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            init_fn = functools.partial(shard, init_fn, self._world_size, self._rank)
        iterable = isinstance(self._dataset, IterableDataset)
        pinner = self._new_pinner(options)
        # Held by this alone: what the user has put into it may refer to the loader, and so to this.
        self._blueprint = blueprint = Blueprint(
            dataset=self._dataset,
            iterable=iterable,
            auto_collation=self._auto_collation,
            collate_fn=self._collate_fn,
            drop_last=self._drop_last,
            worker_init_fn=init_fn,
            base_seed=int(self._base_seed),
            num_workers=self._num_workers,
            batch_index=[None] * loader.batch_size if self._auto_collation and iterable else None,
            policy=options.policy,
            pinned_in_place=pinner is not None and pinner.in_place,
        )
        method = worker_method(options, blueprint, loader.multiprocessing_context)
        self._called = method.called
        share = Share(budget, method.room)
        at_first: BeforeSizesAreKnown = "any" if share.room() is None else "one"
        # Only where nothing shows how much is made ahead.
        deep = (
            not (_prefetch_given(loader) or iterable or self._persistent_workers)
            and loader.in_order
            and options.policy is None
            and not records.epochs.told_midway  # else timing decides which batches see a change
            and leaves_no_trace(self._index_sampler)
        )
        machine = Machine(
            workers=self._num_workers,
            prefetch=loader.prefetch_factor,
            in_order=loader.in_order,
            iterable=iterable,
            persistent=self._persistent_workers,
            restarts=options.restarts,
            leaves_out=options.policy is not None,
            recovery=options.iterable_recovery,
            may_deepen=deep,
            before_sizes_are_known="one-each" if budget.auto else at_first,
            largest=records.stats.largest_batch_bytes or None,
            limits=method.limits,
        )
        try:
            with signals.deferred():  # until the pool is registered and will be closed
                self._pool = Pool(
                    method,
                    machine,
                    share,
                    records,
                    dataset=self._dataset,
                    auto_collation=self._auto_collation,
                    seeds=seeds,
                    stall_timeout=options.stall_timeout,
                    worker_memory_limit=options.worker_memory_limit,
                    users_sampler=not runs_no_user_code(self._index_sampler),
                    may_hurry=deep,
                    base_seed=int(self._base_seed),
                    resumed=_before_first_task(resumed, iterable, self._persistent_workers),
                    bookmark=bookmark,
                )
                bookmark.due = weakref.WeakMethod(self.make_what_is_due)
                bookmark.now = weakref.WeakMethod(self._pool.checkpoint)
                self._pool.user = weakref.ref(self)
                on_pool(self._pool)  # before the first draw, in which a sampler may tell workers
                self._finalizer = weakref.finalize(self, self._pool.background.dismiss)
                self._finalizer.atexit = False  # all pools are closed together then
                self._pool.background.start()
                if pinner is not None:
                    self._pool.pin(pinner)
            self._reset(loader, first_iter=True, resumed=resumed)
        except BaseException:
            # Its traceback may keep this iterator alive for long.
            if hasattr(self, "_pool"):
                self._pool.close()
            share.close()
            raise

    def _new_pinner(self, options: Settings) -> Pinner | None:
        """What pins batches, for the device of this thread as with torch; None if none are."""
        if not self._pin_memory:
            return None
        index = torch.accelerator.current_device_index()
        in_place = options.pin_in_place if options.worker_method == "multiprocessing" else None
        return new_pinner(self._pin_memory_device, index, in_place, self._records.origin.prefix)

    @property
    def _workers(self) -> list[WorkerHandle]:  # type: ignore[override]
        return [WorkerHandle(self._pool, worker) for worker in range(self._num_workers)]

    @property
    def usable(self) -> bool:
        """Whether another epoch can begin on these workers."""
        return self._owner == os.getpid() and self._pool.usable

    def __del__(self) -> None:
        """Nothing, where torch's ends its workers: a finalizer has them ended."""

    def _reset(
        self, loader: Any, first_iter: bool = False, resumed: Checkpoint | None = None
    ) -> None:
        iterable = isinstance(self._dataset, IterableDataset)
        if resumed is not None and not iterable:
            begin_sampler_again(loader, resumed, self._options.policy)
        draws = None
        if not iterable:
            oldest = first_missing_of(weakref.ref(self._pool.checkpointing))
            again = resumed is not None and not resumed.finished and resumed.begun.before_seed
            draws = SamplerDraws(SamplerStart.of(loader, before_seed=again), oldest=oldest)
        BaseDataLoaderIter._reset(self, loader, first_iter)
        if draws is not None and draws.start.before_seed:
            draw_seed(loader)
        if not first_iter:
            self._seeds = self._begin_epoch(loader, self._options, None)
        self._records.stats.epochs += 1
        self._recorded = None
        self._raised = False  # in this epoch, in place of a batch
        self._in_hand = _NOTHING
        continues = resumed is not None and not resumed.finished
        self._account = account = open_account(self, self._options, self._records.ledger, resumed)
        if draws is not None:
            draws.watch(self)
            draws.waiting = self._ahead
        self._ahead.clear()
        while self._due:  # the epoch was left before
            self._make_due()
        if continues:
            assert resumed is not None
            self._due = resumed.due
            self._num_yielded = resumed.yielded
            if draws is not None:
                draws.go_to(self, resumed, account, self._look_ahead)
        elif account is not None:
            self._look_ahead(account)
        if resumed is not None and (continues or self._persistent_workers):
            self._tell_again(resumed)
        plain = account is None and not self._ahead and not self._due
        draw = self._next_index if plain else self._draw
        if continues and resumed is not None and draws is not None and draws.draws_from_default():
            draw = functools.partial(self._draw_beyond, resumed)
        later = resumed is not None and resumed.finished and self._persistent_workers and iterable
        if first_iter and not later:
            self._pool.fill(draw, account, draws, resumed if continues else None)
        else:
            self._pool.resume(self._seeds, draw, account, draws)
        epoch = self._pool.supervisor.epoch
        epoch.number, epoch.seeds = self._epoch_number, self._seeds

    def _begin_epoch(
        self, loader: Any, options: Settings, resumed: Checkpoint | None
    ) -> EpochSeeds:
        epochs = self._records.epochs
        seeds = epochs.begin(loader, options, self._shared_seed)
        self._epoch_number = epochs.current
        if resumed is None or resumed.finished:
            return seeds
        return EpochSeeds(resumed.shared_seed, resumed.sample_seed)

    def _look_ahead(self, account: Account) -> None:
        """Draw at once what the workers are about to be given: these are the first substitutes."""
        if not account.replaces or isinstance(self._dataset, IterableDataset):
            return
        while len(self._ahead) < self._pool.machine.limit:
            try:
                self._ahead.append(copy_index(self._next_index()))  # type: ignore[no-untyped-call]
            except StopIteration:
                break
        account.look_ahead(keys_of(index, self._auto_collation) for index in self._ahead)

    def _tell_again(self, resumed: Checkpoint) -> None:
        """Workers load states of the dataset: tell them what was told since these were taken."""
        for change in resumed.told_later:
            try:
                pickled = pickle.dumps(change, 5)
            except Exception as error:  # a state of the dataset has no such value
                if not isinstance(change, SetAttributes):
                    log.warning(
                        "%sresumed: what was told after load_state_dict() cannot be sent to "
                        "workers (%s), and the state of the dataset that they load may undo it. "
                        "Give loader.broadcast() a function of a module, or values of attributes",
                        self._records.origin.prefix,
                        error,
                    )
            else:
                self._pool.announce(pickled)

    def make_what_is_due(self) -> None:
        """Tell what the run before was told, if it holds for the next draw."""
        with self._pool.lock:
            while self._due and self._due[0].draw <= self._pool.drawing.next_draw():
                self._make_due()

    def _make_due(self) -> None:
        due = self._due.popleft()
        due.make(self._dataset)
        if not due.overtaken:
            self._pool.announce(pickle.dumps(due.change, 5))

    def _draw(self) -> Any:
        self.make_what_is_due()
        return self._ahead.popleft() if self._ahead else self._next_index()  # type: ignore[no-untyped-call]

    def _draw_beyond(self, resumed: Checkpoint) -> Any:
        """The same while this is made: draws that the run before has not made are the program's."""
        if self._ahead or resumed.program is None or resumed.drawn < 0:
            return self._draw()
        with resumed.program.given_back():
            return self._draw()

    def __next__(self) -> Any:
        if profiler_enabled():
            data = super().__next__()
        else:
            data = self._next_data()
            self._num_yielded += 1
            length: Any = self._IterableDataset_len_called  # of an iterable dataset, if asked
            if length is not None and self._num_yielded > length:
                self._in_hand = _NOTHING  # if this raises, the batch is lost as with torch
                self._warn_of_length()
        epoch = self._pool.supervisor.epoch
        # No call from here on: the batch is the consumer's, also if a signal handler raises.
        epoch.yielded += 1
        task = epoch.unfinished
        if task is not None:  # as in `Epoch.finish`
            epoch.unfinished = None
            epoch.done += 1
            epoch.turn = task.worker + 1
            epoch.last_index = task.index
        self._in_hand = _NOTHING
        return data

    def _warn_of_length(self) -> None:
        warnings.warn(
            f"Length of IterableDataset {self._dataset} was reported to be "
            f"{self._IterableDataset_len_called}(when accessing len(dataloader)), but "
            f"{self._num_yielded} samples have been fetched. "
            "For multiprocessing data-loading, this could be caused by not properly configuring "
            "the IterableDataset replica at each worker. Please see "
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset "
            "for examples.",
            stacklevel=3,
        )

    def _next_data(self) -> Any:
        """The next batch. In the main thread it stays in `_in_hand` until `__next__` is at its end:
        Python runs signal handlers when a call returns, too."""
        if self._in_hand is not _NOTHING and signals.handlers_run_here():
            return self._in_hand
        pool = self._pool
        pool.check_owner()
        data = _NOTHING
        try:
            while True:
                with pool.lock:  # two threads may share an iterator
                    taken = pool.supervisor.epoch.taken
                    if taken is None:
                        draw = self._draw if self._ahead or self._due else self._next_index
                        taken = pool.next(draw, self._timeout)
                    if self._account is not None:
                        self._record_bad_samples(self._account, taken)
                    if not isinstance(taken, ev.Delivery):
                        pool.supervisor.epoch.taken = None
                        break
                    answer = _answer(taken)
                    unpinned = type(answer) is PinnedBatch and not answer.ready
                    if answer is not DROPPED and not unpinned:
                        if type(answer) in NO_BATCH:
                            break
                        batch = self._unwrap(answer)
                        pool.unpacked()
                        # A signal handler may have raised before, and may raise when the lock is
                        # released. In between the batch has to be in exactly one place.
                        if signals.handlers_run_here():
                            self._in_hand = batch
                        # No call in between, not even a property: there it may raise again.
                        data, pool.supervisor.epoch.taken = batch, None
                        break
                    if not unpinned:
                        pool.supervisor.epoch.taken = None
                        pool.supervisor.epoch.finish()
                if unpinned:
                    pool.await_pinned(answer, self._timeout)
            if data is not _NOTHING:
                return data
            if isinstance(taken, ev.Delivery):
                self._raised = True
                error = self._error(taken)  # without the lock: it asks the user's own code
                pool.done_with(taken)
                raise error
        except TimedOut as awaited:
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout} seconds\n"
                f"holdfast: {pool.origin.prefix}no batch came within timeout={self._timeout}"
                f"{awaited}"
            ) from None
        except (KeyboardInterrupt, SystemExit):
            self._in_hand = _NOTHING
            self._shutdown_workers()
            raise
        except TooManyBadSamples:
            self._shutdown_workers()
            if self._account is not None:  # last: a signal handler may have raised before
                self._account.close()
            pool.supervisor.epoch.taken = None
            raise
        if taken is ev.END:
            taken = self._too_short() or taken
        if isinstance(taken, ev.GaveUp):
            machine = pool.machine
            error = gave_up(taken, machine.restarts.policy, machine.limits, pool.deaths)
            self._shutdown_workers()
            raise error
        if isinstance(taken, StartRefused):
            self._shutdown_workers()
            raise cannot_start(taken, pool.origin)
        if not self._persistent_workers:
            self._shutdown_workers()
        raise StopIteration

    def _too_short(self) -> ev.GaveUp | None:
        """The end of an epoch that lacks batches it would have had without a death.

        That is known only where the user has asked for len(loader), and an epoch without a death
        was as long as it says: many datasets have a length that counts what they leave out. Where
        it is not known, it is said. With a policy for bad samples, or after a batch that raised,
        there may be fewer.
        """
        samples: Any = self._IterableDataset_len_called
        if samples is None or self._raised or self._options.policy is not None:
            return None
        size = self._batch_size or 1
        least = -(-samples // size)
        if self._drop_last:  # each worker has a rest of its own
            least = samples // size - (self._num_workers - 1)
        said, worker = self._records.growth_warnings, self._pool.machine.continued
        if worker is None:
            said.length_holds = self._num_yielded >= least
            return None
        if self._num_yielded >= least:
            return None
        came = (
            f"{self._num_yielded} batches came in this epoch where len(loader) promises "
            f"{'at least ' if self._drop_last else ''}{least}"
        )
        if said.length_holds:
            return ev.GaveUp("stream", worker, (), f"another process went on with it, and {came}")
        if said.first("shorter-than-promised"):
            log.warning(
                "%s%s. The stream of worker %d was continued by another process in it. Whether it "
                "would have been longer is not known: no epoch without a death has shown that the "
                "length of the dataset holds.",
                self._pool.origin.prefix, came, worker,
            )  # fmt: skip
        return None

    def _record_bad_samples(self, account: Account, taken: Any) -> None:
        """Record the bad samples of a batch, or end the account of the epoch; once.

        Signal handlers are deferred while samples are counted, not while a file is written.
        """
        if taken is not self._recorded:
            with signals.deferred(even_ctrl_c=False):
                self._recorded = taken
                self._count(account, taken)
        account.judge()
        if taken is ev.END:
            account.end()

    def _count(self, account: Account, taken: Any) -> None:
        if isinstance(taken, ev.Delivery):
            result = taken.result
            bad: Sequence[BadSample] = ()
            samples = len(taken.task.keys)
            if isinstance(result, Reported):
                bad = result.bad
                samples = samples if result.samples is None else result.samples
            account.record_batch(samples, bad, taken.task.keys)
        elif taken is ev.END:
            epoch = self._pool.supervisor.epoch
            unclaimed, epoch.unclaimed = epoch.unclaimed, []
            account.record_batch(len(unclaimed), unclaimed)

    def _unwrap(self, batch: Batch) -> Any:
        """What the user gets."""
        try:
            return batch.unpack()
        except BaseException as error:
            # If a signal handler raised, the batch is still to be had. One that cannot be unpacked
            # must not be in the way for ever.
            if not signals.raised_by_handler(error):
                self._pool.supervisor.epoch.taken = None
                self._pool.supervisor.epoch.finish()
                self._raised = True
            raise

    def _error(self, delivery: ev.Delivery) -> BaseException:
        """What to raise in place of a batch."""
        task, result = delivery.task, _answer(delivery)
        if isinstance(result, Failed):
            return rebuild(
                result.failure,
                index=task.index,
                keys=task.keys if self._auto_collation else None,
                batch=task.number,
                worker_id=task.worker,
                called=self._called(task.worker),
                name_of=functools.partial(name_of, self._dataset),
                whose=self._pool.origin.prefix,
            )
        past_it = self._account is not None
        hint = self._pool.supervisor.hint(task)
        return poisoned(result, self._pool.deaths, hint, past_it=past_it)

    def _shutdown_workers(self) -> None:
        self._pool.close()


def _before_first_task(
    resumed: Checkpoint | None, iterable: bool, persistent: bool
) -> Checkpoint | None:
    """Where the workers begin. After the end of an epoch that is another one: persistent workers
    keep their random states, and their streams, for that; of others nothing is left."""
    if resumed is None or not resumed.finished:
        return resumed
    if not persistent:
        return None
    if iterable:
        return resumed  # and then `Pool.resume`
    workers = tuple(
        dataclasses.replace(one, seat=dataclasses.replace(one.seat, batches_done=0))
        for one in resumed.workers
    )
    return dataclasses.replace(resumed, done=0, turn=0, workers=workers)


def _prefetch_given(loader: Any) -> bool:
    """Whether the user has said how much to make ahead. torch's own loader does not know whether 2
    was given or is its default."""
    return bool(getattr(loader, "_prefetch_given", loader.prefetch_factor != 2))


def _answer(delivery: ev.Delivery) -> Any:
    """What a worker answered, without the bad samples that it reported."""
    result = delivery.result
    return result.result if isinstance(result, Reported) else result
