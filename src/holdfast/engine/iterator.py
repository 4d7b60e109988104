"""The iterators a loader hands out.

They are torch's, up to where batches come from: torch's own base class draws the seeds, starts the
sampler and warns, so that not one random number more or less is drawn than by torch.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import pickle
import resource
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data._utils import pin_memory as torch_pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _InfiniteConstantSampler,
    _sharding_worker_init_fn,
    _SingleProcessDataLoaderIter,
)

from holdfast import kernel
from holdfast.autopsy.blackbox import NoRecorder
from holdfast.autopsy.incident import Incident
from holdfast.autopsy.logbook import Logbook
from holdfast.engine import interrupts
from holdfast.engine import vocabulary as v
from holdfast.engine.answers import Failed, Refused, Reported
from holdfast.engine.careful import DROPPED
from holdfast.engine.careful_iterable import CarefulIterableFetcher
from holdfast.engine.careful_map import CarefulMapFetcher
from holdfast.engine.exceptions import rebuild
from holdfast.engine.handle import WorkerHandle
from holdfast.engine.machine import BeforeSizesAreKnown, Machine
from holdfast.engine.payload import Payload, spawn_payload
from holdfast.engine.pickling import explain_pickle_error
from holdfast.engine.pool import Pool, TimedOut
from holdfast.engine.protocol import Blueprint
from holdfast.engine.settings import Settings
from holdfast.engine.stats import Stats
from holdfast.engine.story import cannot_start, gave_up, poisoned
from holdfast.errors import TooManyBadSamples, WorkerError, WorkerStartError
from holdfast.memory.budget import Budget, Share
from holdfast.memory.codec import Parcel
from holdfast.memory.growth import Said
from holdfast.origin import Origin
from holdfast.samples.keys import keep, keys_of
from holdfast.samples.ledger import Account, Ledger
from holdfast.samples.record import BadSample, name_of

__all__ = ["ProcessIterator", "SingleProcessIterator"]

log = logging.getLogger("holdfast")

_NOTHING: Final = object()

LIMITS = v.Limits()  # of worker processes
LOOK_FURTHER = 64  # batches drawn early, without workers, when all before are bad
_SAMPLERS = frozenset({"torch.utils.data.sampler", "torch.utils.data.distributed"})
_PLAIN = frozenset(  # by name: NumPy need not be there
    {
        ("builtins", "list"),
        ("builtins", "tuple"),
        ("builtins", "range"),
        ("array", "array"),
        ("numpy", "ndarray"),
        ("torch", "Tensor"),
    }
)
DESCRIPTORS = 3  # in the main process, for each worker
_pin: Callable[[Any, Any], Any] = torch_pin_memory.pin_memory


class SingleProcessIterator(_SingleProcessDataLoaderIter):
    """``num_workers=0``: torch's own, except that StopIteration does not pass for the end.

    With a policy for bad samples the fetcher is ours. There is no net here for samples that kill.
    """

    def __init__(self, loader: Any, options: Settings, stats: Stats, ledger: Ledger) -> None:
        super().__init__(loader)
        self._stats = stats
        self._ahead: deque[Any] = deque()  # drawn from the sampler before their time
        self._number = 0
        self._account = _open_account(self, options, ledger)
        self._careful: CarefulMapFetcher | CarefulIterableFetcher | None = None
        if self._account is not None:
            self._careful = self._careful_fetcher(self._account)
        stats.epochs += 1

    def _careful_fetcher(self, account: Account) -> CarefulMapFetcher | CarefulIterableFetcher:
        common: dict[str, Any] = {
            "auto_collation": self._auto_collation,
            "collate_fn": self._collate_fn,
            "drop_last": self._drop_last,
            "recorder": NoRecorder(),
            "arena": None,
            "faults": None,
            "policy": account.policy,
            "worker_id": None,
            "catch": Exception,
        }
        if self._dataset_kind == _DatasetKind.Iterable:
            iterator = self._dataset_fetcher.dataset_iter  # torch's has begun already
            return CarefulIterableFetcher(self._dataset, iterator=iterator, **common)
        return CarefulMapFetcher(self._dataset, more=self._look_further, **common)

    def _look_further(self) -> Iterator[tuple[int, Any]]:
        """What the sampler gives next, when nothing it has given so far can stand in."""
        for number in range(LOOK_FURTHER):
            if number == len(self._ahead):
                try:
                    self._ahead.append(keep(self._next_index()))  # type: ignore[no-untyped-call]
                except StopIteration:
                    return
            index = self._ahead[number]
            keys = keys_of(index, self._auto_collation)
            yield from enumerate(keys, (number + 1) << 20)

    def _next_data(self) -> Any:
        if self._careful is not None:
            return self._next_careful_or_stop(self._careful)
        index: Any = self._next_index()  # type: ignore[no-untyped-call]
        try:
            data = self._dataset_fetcher.fetch(index)
        except StopIteration as stop:
            if self._dataset_kind == _DatasetKind.Iterable:
                raise
            raise _no_end(index) from stop
        if self._pin_memory:
            data = _pin(data, self._pin_memory_device)
        self._stats.batches += 1
        return data

    def _next_careful_or_stop(self, fetcher: CarefulMapFetcher | CarefulIterableFetcher) -> Any:
        try:
            return self._next_careful(fetcher)
        except TooManyBadSamples:
            if self._account is not None:
                self._account.close()
            raise

    def _next_careful(self, fetcher: CarefulMapFetcher | CarefulIterableFetcher) -> Any:
        account = self._account
        assert account is not None
        data: Any = DROPPED
        while data is DROPPED:
            try:
                index: Any = (
                    self._ahead.popleft() if self._ahead else self._next_index()  # type: ignore[no-untyped-call]
                )
            except StopIteration:
                account.end()
                raise
            keys = keys_of(index, self._auto_collation)
            number = self._number
            self._number += 1
            try:
                data = fetcher.fetch(number, index, account.brief(number, keys))
            except StopIteration as stop:
                account.settle(len(fetcher.reports), fetcher.reports)
                if self._dataset_kind != _DatasetKind.Iterable:
                    raise _no_end(index) from stop
                account.end()
                raise
            except Exception:
                account.settle(_samples(fetcher, keys), fetcher.reports)
                raise
            account.settle(_samples(fetcher, keys), fetcher.reports)
        if self._pin_memory:
            data = _pin(data, self._pin_memory_device)
        self._stats.batches += 1
        return data


def _samples(fetcher: CarefulMapFetcher | CarefulIterableFetcher, keys: Sequence[Any]) -> int:
    """How many samples a batch took: of a stream, the last one may have fewer than it asks for."""
    return fetcher.drawn if isinstance(fetcher, CarefulIterableFetcher) else len(keys)


class ProcessIterator(_BaseDataLoaderIter):
    """Batches from worker processes that may die."""

    def __init__(
        self,
        loader: Any,
        options: Settings,
        stats: Stats,
        on_incident: Callable[[Incident], None],
        on_amended: Callable[[Incident, Incident, str], None],
        ledger: Ledger,
        logbook: Logbook | None,
        budget: Budget,
        said: Said,
        origin: Origin,
        explained: set[Hashable],
    ) -> None:
        super().__init__(loader)
        if loader.prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        self._owner = os.getpid()
        self._stats = stats
        self._said = said
        self._batch_size = loader.batch_size
        self._options = options
        self._ledger = ledger
        self._account: Account | None = None
        self._ahead: deque[Any] = deque()  # drawn from the sampler before their time
        self._settled: Any = None  # what the books have seen of it
        self._in_hand: Any = _NOTHING  # a batch that could not be returned: a signal handler raised
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            init_fn = functools.partial(
                _sharding_worker_init_fn, init_fn, self._world_size, self._rank
            )
        iterable = self._dataset_kind == _DatasetKind.Iterable
        blueprint = Blueprint(
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
        )
        payload = _payload(blueprint, loader.multiprocessing_context)
        share = Share(budget)
        at_first: BeforeSizesAreKnown = "any" if budget.total is None else "one"
        # Only where nothing shows how much is made ahead.
        deep = (
            not (loader._prefetch_given or iterable or self._persistent_workers)
            and loader.in_order
            and options.policy is None
            and _leaves_no_trace(self._index_sampler)
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
            largest=stats.largest_batch_bytes or None,
            limits=LIMITS,
        )
        try:
            with interrupts.deferred():  # until there is somebody who ends the workers
                self._pool = _new_pool(
                    blueprint,
                    payload=payload,
                    machine=machine,
                    share=share,
                    shared_seed=self._shared_seed,
                    stall_timeout=options.stall_timeout,
                    on_incident=on_incident,
                    on_amended=on_amended,
                    stats=stats,
                    logbook=logbook,
                    worker_memory_limit=options.worker_memory_limit,
                    said=said,
                    origin=origin,
                    explained=explained,
                    open_draws=not _runs_nothing_of_the_users(self._index_sampler),
                    may_hurry=deep,
                )
                self._pool.user = weakref.ref(self)
                self._finalizer = weakref.finalize(self, self._pool.watch.dismiss)
                self._finalizer.atexit = False  # all pools are closed together then
            self._reset(loader, first_iter=True)
        except BaseException:
            # Its traceback holds this iterator, perhaps for long; nobody can use it.
            if hasattr(self, "_pool"):
                self._pool.close()
            share.close()
            raise

    @property
    def _workers(self) -> list[WorkerHandle]:
        return [WorkerHandle(self._pool, worker) for worker in range(self._num_workers)]

    @property
    def usable(self) -> bool:
        """Whether another epoch can begin on these workers."""
        return self._owner == os.getpid() and self._pool.usable

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._stats.epochs += 1
        self._settled = None
        self._raised = False  # in this epoch, in place of a batch
        self._in_hand = _NOTHING
        self._account = account = _open_account(self, self._options, self._ledger)
        draw = self._next_index
        if account is not None:
            self._look_ahead(account)
            draw = self._draw
        if first_iter:
            self._pool.fill(draw, account)
        else:
            self._pool.resume(self._shared_seed, draw, account)

    def _look_ahead(self, account: Account) -> None:
        """Draw at once what the workers are about to be given: the first who may stand in."""
        self._ahead.clear()
        if not account.replaces or self._dataset_kind == _DatasetKind.Iterable:
            return
        while len(self._ahead) < self._pool.machine.limit:
            try:
                self._ahead.append(keep(self._next_index()))  # type: ignore[no-untyped-call]
            except StopIteration:
                break
        account.look_ahead(keys_of(index, self._auto_collation) for index in self._ahead)

    def _draw(self) -> Any:
        return self._ahead.popleft() if self._ahead else self._next_index()  # type: ignore[no-untyped-call]

    def __next__(self) -> Any:
        if torch._C._autograd._profiler_enabled():
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        length: Any = self._IterableDataset_len_called
        if (
            length is not None
            and self._num_yielded > length
            and self._dataset_kind == _DatasetKind.Iterable
        ):
            self._warn_of_length()
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
        if self._in_hand is not _NOTHING and interrupts.may_strike():
            data, self._in_hand = self._in_hand, _NOTHING
            return data
        pool = self._pool
        pool.check_owner()
        data = _NOTHING
        try:
            with pool.lock:  # two threads may share an iterator
                while True:
                    taken = pool.supervisor.epoch.taken
                    if taken is None:
                        draw = self._draw if self._ahead else self._next_index
                        taken = pool.next(draw, self._timeout)
                    if self._account is not None:
                        self._keep_books(self._account, taken)
                    if not isinstance(taken, v.Delivery):
                        pool.supervisor.epoch.taken = None
                        break
                    answer = _answer(taken)
                    if answer is not DROPPED:
                        if not isinstance(answer, Parcel):
                            break
                        batch = self._unwrap(answer)
                        pool.unpacked()
                        # A signal handler may have raised before; and it may when the lock is let
                        # go of. In between the batch goes from one hand to the other.
                        if interrupts.may_strike():
                            self._in_hand = batch
                        # No call in between, not even a property: there it may raise again.
                        data, pool.supervisor.epoch.taken = batch, None
                        break
                    pool.supervisor.epoch.taken = None
            if data is not _NOTHING:
                self._in_hand = _NOTHING
                return data
            if isinstance(taken, v.Delivery):
                self._raised = True
                error = self._error(taken)  # without the lock: it asks the user's own code
                pool.done_with(taken)
                raise error
        except TimedOut:
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout} seconds\n"
                f"holdfast: {pool.origin.prefix}no batch came within timeout={self._timeout}"
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
        if taken is v.END:
            taken = self._too_short() or taken
        if isinstance(taken, v.GaveUp):
            machine = pool.machine
            error = gave_up(taken, machine.restarts.policy, machine.limits, pool.obituaries)
            self._shutdown_workers()
            raise error
        if isinstance(taken, Refused):
            self._shutdown_workers()
            raise cannot_start(taken, pool.origin)
        if not self._persistent_workers:
            self._shutdown_workers()
        raise StopIteration

    def _too_short(self) -> v.GaveUp | None:
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
        worker = self._pool.machine.continued
        if worker is None:
            self._said.length_holds = self._num_yielded >= least
            return None
        if self._num_yielded >= least:
            return None
        came = (
            f"{self._num_yielded} batches came in this epoch where len(loader) promises "
            f"{'at least ' if self._drop_last else ''}{least}"
        )
        if self._said.length_holds:
            return v.GaveUp("stream", worker, (), f"another process went on with it, and {came}")
        if self._said.first("shorter-than-promised"):
            log.warning(
                "%s%s. The stream of worker %d was continued by another process in it. Whether it "
                "would have been longer is not known: no epoch without a death has shown that the "
                "length of the dataset holds.",
                self._pool.origin.prefix, came, worker,
            )  # fmt: skip
        return None

    def _keep_books(self, account: Account, taken: Any) -> None:
        """Write down the bad samples of a batch, or close the books of the epoch; once.

        Signal handlers wait while they are counted, and not for a disk.
        """
        if taken is not self._settled:
            shielded = True  # until we know: see `Pool._shield`
            try:
                shielded = interrupts.put_aside()
                self._settled = taken
                self._count(account, taken)
            finally:
                if shielded:
                    interrupts.bring_back()
        account.judge()
        if taken is v.END:
            account.end()

    def _count(self, account: Account, taken: Any) -> None:
        if isinstance(taken, v.Delivery):
            result = taken.result
            bad: Sequence[BadSample] = ()
            samples = len(taken.task.keys)
            if isinstance(result, Reported):
                bad = result.bad
                samples = samples if result.samples is None else result.samples
            account.note(samples, bad, taken.task.keys)
        elif taken is v.END:
            epoch = self._pool.supervisor.epoch
            unclaimed, epoch.unclaimed = epoch.unclaimed, []
            account.note(len(unclaimed), unclaimed)

    def _unwrap(self, parcel: Parcel) -> Any:
        """The batch."""
        try:
            data = parcel.unpack()
            return _pin(data, self._pin_memory_device) if self._pin_memory else data
        except BaseException as error:
            # If a signal handler raised, the batch is still to be had. One that cannot be unpacked
            # must not be in the way for ever.
            if not interrupts.struck(error):
                self._pool.supervisor.epoch.taken = None
            raise

    def _error(self, delivery: v.Delivery) -> BaseException:
        """What to raise for a batch that is none."""
        task, result = delivery.task, _answer(delivery)
        if isinstance(result, Failed):
            return rebuild(
                result.failure,
                index=task.index,
                keys=task.keys if self._auto_collation else None,
                batch=task.number,
                worker_id=task.worker,
                name_of=functools.partial(name_of, self._dataset),
                whose=self._pool.origin.prefix,
            )
        past_it = self._account is not None
        hint = self._pool.supervisor.hint(task)
        return poisoned(result, self._pool.obituaries, hint, past_it=past_it)

    def _shutdown_workers(self) -> None:
        self._pool.close()


def _no_end(index: Any) -> WorkerError:
    return WorkerError(
        f"Caught StopIteration while loading samples {index!r}: raised by __getitem__ or "
        "the collate function of a map-style dataset, it would have ended the epoch early"
    )


def _runs_nothing_of_the_users(sampler: Any) -> bool:
    """Whether drawing an index takes a moment only. What is just an iterator may wait for anything:
    a generator's or a `map`'s type says nothing of whose code it runs."""
    kind = type(sampler)
    if (kind.__module__, kind.__qualname__) in _PLAIN:
        return True
    if kind is not _InfiniteConstantSampler and kind.__module__ not in _SAMPLERS:
        return False
    inner = (getattr(sampler, name) for name in ("sampler", "indices") if hasattr(sampler, name))
    return all(map(_runs_nothing_of_the_users, inner))


_TRACELESS = (RandomSampler, SequentialSampler, WeightedRandomSampler, DistributedSampler)


def _leaves_no_trace(sampler: Any) -> bool:
    """Whether it cannot be seen how much of a sampler was drawn when an epoch is broken off."""
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in _TRACELESS and getattr(sampler, "generator", None) is None


def _open_account(iterator: Any, options: Settings, ledger: Ledger) -> Account | None:
    """The books of an epoch; None if bad samples raise as with torch."""
    if options.policy is None:
        return None
    return ledger.open(
        options.policy,
        options.limit,
        options.quarantine,
        iterator._dataset,
        int(iterator._base_seed),
    )


def _answer(delivery: v.Delivery) -> Any:
    """What a worker answered, without what it reported beside it."""
    result = delivery.result
    return result.result if isinstance(result, Reported) else result


_REFUSALS = {errno.EAGAIN: "task-limit", errno.ENOMEM: "fork-enomem"}
"""What fork says when there is no room for a process, and the cause that explains it."""


def _new_pool(
    blueprint: Blueprint, *, payload: Payload | None, origin: Origin, **options: Any
) -> Pool:
    try:
        return Pool(blueprint, payload=payload, origin=origin, **options)
    except OSError as error:
        if error.errno in _REFUSALS:
            raise WorkerStartError(
                f"DataLoader worker (pid(s) none) exited unexpectedly: {origin.prefix}the system "
                f"refused the first process of {blueprint.num_workers} worker(s), with "
                f"{errno.errorcode[error.errno]} ({error.strerror}).\n"
                "What to do: end other processes and threads of this user, or raise the limit "
                "(ulimit -u for processes, pids.max and memory.max of the container), then call "
                f"iter(loader) again. More: holdfast explain {_REFUSALS[error.errno]}"
            ) from error
        if error.errno != errno.EMFILE:
            raise
        allowed = (kernel.limit(resource.RLIMIT_NOFILE) or ("unknown",))[0]
        raise RuntimeError(
            f"Too many open files: {origin.prefix}{blueprint.num_workers} workers need about "
            f"{DESCRIPTORS * blueprint.num_workers + 10} descriptors and the limit is "
            f"{allowed}. Please increase the limit using "
            "`ulimit -n` in the shell, or use fewer workers. (holdfast does not keep descriptors "
            "for batches, so `torch.multiprocessing.set_sharing_strategy` makes no difference.)"
        ) from error


def _payload(blueprint: Blueprint, context: Any) -> Payload | None:
    """Under spawn and forkserver, the blueprint as bytes; under fork there is no need."""
    context = torch.multiprocessing if context is None else context
    method = context.get_start_method()
    if method == "fork":
        return None
    try:
        return spawn_payload(blueprint, method)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        warnings.warn(
            "Got pickle error when attempting to start a worker Process. "
            f"The start method {method!r} requires that the dataset, collate_fn and "
            "worker_init_fn can be pickled.",
            stacklevel=4,
        )
        explain_pickle_error(error, blueprint)
        raise
