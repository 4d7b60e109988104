"""``from holdfast import DataLoader``: torch's arguments, torch's batches, workers that may die."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from types import TracebackType
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data import Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast import options
from holdfast.autopsy.incident import Incident
from holdfast.autopsy.logbook import TAKEN_UP, Logbook
from holdfast.autopsy.readers import process
from holdfast.engine.continuation import Recovery
from holdfast.engine.settings import Settings
from holdfast.engine.stats import Stats
from holdfast.memory.budget import Budget, for_all
from holdfast.memory.growth import Said
from holdfast.options import DEFAULT_STALL_TIMEOUT, MaxRestarts, Memory
from holdfast.origin import Origin, name_of
from holdfast.origin import rank as find_rank
from holdfast.samples.ledger import Ledger
from holdfast.samples.policy import OnBadSample
from holdfast.samples.record import BadSample

if sys.platform == "linux":
    from holdfast import kernel
    from holdfast.engine.iterator import ProcessIterator, SingleProcessIterator
    from holdfast.engine.pool import Pool
    from holdfast.engine.registry import close_all
    from holdfast.engine.watch import Watch
    from holdfast.memory.containers import advice
    from holdfast.memory.window import Kept

__all__ = ["DataLoader"]

log = logging.getLogger("holdfast")

_NOTED = (
    "batch_size",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
    "multiprocessing_context",
    "timeout",
    "drop_last",
    "in_order",
    "max_restarts",
    "stall_timeout",
    "on_bad_sample",
    "max_bad_samples",
    "quarantine",
    "memory_budget",
    "worker_memory_limit",
    "name",
    "iterable_recovery",
)
"""What a logbook says of a loader."""

REMEMBERED = 1000  # incidents

T_co = TypeVar("T_co", covariant=True)


class _Runtime:
    """What a loader is doing, apart from what it is.

    Frameworks copy a loader's attributes and record every assignment to it; so nothing that changes
    while iterating is an attribute of the loader itself.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.iterator: Any = None  # kept between epochs by persistent workers
        # From the first pool on, and held here: a finaliser of the user's may close a loader while
        # the interpreter takes its modules apart.
        self._close_all: Callable[[list[Watch]], None] | None = None
        self._pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()
        self._kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
        self.incidents: deque[Incident] = deque(maxlen=REMEMBERED)
        # Several iterators may tell of theirs at once; a log handler may ask in the middle of it.
        self.telling = threading.RLock()
        self.stats = Stats()
        self.ledger = Ledger()
        self.logbook: Logbook | None = None
        self.advised = False
        self.said = Said()  # of growth, over all epochs
        self.explained: set[Hashable] = set()  # kinds of death
        self.budget = Budget(None)  # of this loader's own, if it was given a number

    def advise(self, dataset: Any, workers: int, origin: Origin) -> None:
        """Say once, in the log, if workers are going to copy a large dataset."""
        if self.advised:
            return
        self.advised = True
        memory = process.meminfo()
        try:
            words = advice(dataset, workers, memory.available if memory is not None else 0)
        except Exception as error:  # of a container that is not what it says: no reason to stop
            log.debug("how large the dataset's containers are cannot be told: %r", error)
            return
        if words is not None:
            log.warning("%s%s", origin.prefix, words)

    def add(self, pool: Pool) -> None:
        self._close_all = close_all
        self._pools[id(pool)] = pool
        self._kept[id(pool.holdings.kept)] = pool.holdings.kept

    def pools(self) -> list[Pool]:
        """Those that are still there; any thread may ask while another begins an epoch."""
        found = [ref() for ref in self._pools.valuerefs()]
        return [pool for pool in found if pool is not None]

    def close(self, getpid: Callable[[], int] = os.getpid) -> None:
        """End all workers there are."""
        if self._close_all is not None and self.owner == getpid():
            # Also those whose iterator is gone already.
            self._close_all([pool.watch for pool in self.pools()])
        self.iterator = None

    def held_bytes(self) -> int:
        """Bytes of batches that the consumer keeps, also of pools that are gone."""
        found = [ref() for ref in self._kept.valuerefs()]
        return sum(kept.nbytes for kept in found if kept is not None)

    def budget_for(self, given: int | str | None) -> Budget:
        """The budget that a new iterator shares in."""
        if given == "auto":
            return for_all()
        assert not isinstance(given, str)
        if self.budget.total != given:
            self.budget = Budget(given)
        return self.budget

    def open_logbook(
        self, folder: str | None, loader: DataLoader[Any], rank: int, name: str
    ) -> Logbook | None:
        """The logbook of this loader; begun when it is first used. Which rank it is may be known
        only later, when `torch.distributed` is set up."""
        book = self.logbook
        if folder is None:
            self.logbook = None
        elif book is None or (book.given, book.rank, book.loader) != (folder, rank, name):
            try:
                self.logbook = Logbook(folder, rank=rank, loader=name)
            except OSError as error:
                words = f"logbook={folder!r} cannot be made: {error.strerror}"
                raise OSError(error.errno, words) from error
            settings = {option: getattr(loader, option) for option in _NOTED}
            self.logbook.begin({"dataset": type(loader.dataset).__qualname__, **settings})
        return self.logbook


def _note(
    incidents: deque[Incident],
    telling: threading.RLock,
    stats: Stats,
    logbook: Logbook | None,
    incident: Incident,
) -> None:
    with telling:
        incidents.append(incident)
        stats.incidents += 1
    if logbook is not None:
        logbook.incident(incident.to_json())


@functools.cache  # once in a process
def _warn_of_torchs_workers(lacking: kernel.Feature) -> None:
    warnings.warn(
        f"holdfast's workers cannot run here (Linux {os.uname().release}); they need "
        f"{lacking.name}: {lacking.lost}. Workers are torch's own: they are not replaced "
        "when they die or hang, and on_bad_sample, stall_timeout, memory_budget and "
        "worker_memory_limit have no effect. `holdfast doctor` lists what this system has",
        stacklevel=5,
    )


@functools.cache
def _warn_without_proc() -> None:
    if not os.path.exists("/proc/self/statm"):
        log.warning(
            "worker_memory_limit has no effect: without /proc nobody knows how large a worker is"
        )


def _amend(
    incidents: deque[Incident],
    telling: threading.RLock,
    logbook: Logbook | None,
    old: Incident,
    new: Incident,
    text: str,
) -> None:
    """More is known of an incident."""
    with telling:  # one more would move all of them up by a place, once there are as many as kept
        for number in range(len(incidents) - 1, -1, -1):
            if incidents[number] is old:
                incidents[number] = new
                break
    if logbook is not None:
        logbook.event(
            TAKEN_UP,
            text,
            worker=new.worker_id,
            incident=new.time,
            exact=new.exact,
            action=new.action,
        )


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A :class:`torch.utils.data.DataLoader` that survives its workers.

    It takes torch's arguments, in torch's order, and gives torch's batches, bit for bit, for equal
    seeds. A worker that is killed, crashes, exits or hangs is replaced, and the batch it was making
    is made again from the same random state.

    >>> from holdfast import DataLoader
    >>> loader = DataLoader([1, 2, 3, 4, 5], batch_size=2, num_workers=1)
    >>> [batch.tolist() for batch in loader]
    [[1, 2], [3, 4], [5]]

    Args:
        max_restarts: how many workers may be replaced, and within what time: ``"auto"`` (five per
            worker within a minute), a number within a minute, a pair ``(number, seconds)``, or
            ``None`` for no limit. Beyond it ``next()`` raises an error that lists the deaths.
        stall_timeout: seconds without progress on one sample after which a worker is made to write
            its stack, killed and replaced; ``None`` for never. torch's own ``timeout`` keeps its
            meaning.
        on_bad_sample: what becomes of a sample that raises, is None, does not fit its batch, or
            ends or stalls its worker: ``"raise"`` (as torch), ``"skip"`` (its batch is smaller),
            ``"replace"`` (by another good one, chosen by the seed), or a function that is given a
            :class:`BadSample` and returns one of these words or a sample to use instead.
        max_bad_samples: a count, or a fraction such as ``0.01``; beyond it ``next()`` raises
            :class:`TooManyBadSamples` with a summary. ``None`` for no limit.
        quarantine: a file to list bad samples in. Those listed are not tried again, in this run,
            in later ones and in other ranks that use the same file.
        memory_budget: bytes of batches that may be in flight: being made, waiting, or delivered and
            not unpacked. A number, ``"2GiB"``, ``"auto"`` (a part of what is free on this machine
            or in this container, for all loaders of the process together), or ``None``. It comes
            before ``prefetch_factor``; one batch that is larger passes alone.
        worker_memory_limit: private bytes of one worker, beyond which it is replaced between two
            batches by a fresh process that continues from the same random state. A number,
            ``"1GiB"``, ``"auto"`` (a part of what is free), or ``None``. A worker of an iterable
            dataset is replaced only after it was tried that its stream can be continued exactly.
        iterable_recovery: how the stream of an iterable dataset goes on after the death of its
            worker: ``"auto"`` (from the state its dataset gave, if that is shown to lead there,
            else drawn again from the start of the epoch), ``"state"`` (from its state only),
            ``"replay"`` (drawn again only), or ``"raise"`` (the run ends with an error). Whether it
            went on as it was is `Incident.exact`.
        logbook: a folder that fills while the loader is used: what went wrong with workers and
            why, how memory developed, and which run it was. It stays readable whatever kills the
            run; ``holdfast incidents FOLDER`` tells its story.
        name: what messages, incidents and the logbook call this loader, such as ``"train"``;
            ``None`` to call it after its dataset's class.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        max_restarts: MaxRestarts = "auto",
        stall_timeout: float | None = DEFAULT_STALL_TIMEOUT,
        on_bad_sample: OnBadSample = "raise",
        max_bad_samples: int | float | None = None,
        quarantine: str | os.PathLike[str] | None = None,
        logbook: str | os.PathLike[str] | None = None,
        memory_budget: Memory = "auto",
        worker_memory_limit: Memory = "auto",
        name: str | None = None,
        iterable_recovery: Recovery = "auto",
    ) -> None:
        self._runtime = _Runtime()
        self._prefetch_given = prefetch_factor is not None
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.max_restarts = max_restarts
        self.stall_timeout = stall_timeout
        self.on_bad_sample = on_bad_sample
        self.max_bad_samples = max_bad_samples
        self.quarantine = quarantine
        self.logbook = logbook
        self.memory_budget = memory_budget
        self.worker_memory_limit = worker_memory_limit
        self.name = name
        self.iterable_recovery = iterable_recovery
        self._options()
        options.check_places(quarantine=quarantine)

    def _options(self) -> Settings:
        """The options as they are now: they stay assignable, like ``num_workers``. Persistent
        workers keep those they began with."""
        return options.parse(
            max_restarts=self.max_restarts,
            stall_timeout=self.stall_timeout,
            logbook=self.logbook,
            num_workers=self.num_workers,
            on_bad_sample=self.on_bad_sample,
            max_bad_samples=self.max_bad_samples,
            quarantine=self.quarantine,
            memory_budget=self.memory_budget,
            worker_memory_limit=self.worker_memory_limit,
            name=self.name,
            iterable_recovery=self.iterable_recovery,
        )

    # -- what went on ---------------------------------------------------------------------

    @property
    def incidents(self) -> list[Incident]:
        """What went wrong with workers of this loader so far, oldest first: the last thousand.
        ``stats()["incidents"]`` counts all of them."""
        runtime = self._runtime
        if runtime.owner == os.getpid():  # in a child nobody might be there to finish it
            for pool in runtime.pools():
                pool.obituaries.settle()
        return list(runtime.incidents)

    @property
    def bad_samples(self) -> list[BadSample]:
        """Samples that were bad so far, each once, in the order in which they were met."""
        return list(self._runtime.ledger.bad_samples)

    def stats(self) -> dict[str, int | float | None]:
        """Batches, bytes, waits, restarts, incidents so far, over all epochs; memory as it is now.

        ``in_flight_bytes`` are ordered and not handed over yet, ``held_bytes`` those of batches you
        keep, also of epochs that are over, ``budget_bytes`` what may be in flight at present (None
        without limit).

        >>> loader = DataLoader([1, 2, 3], num_workers=0)
        >>> len(list(loader)), loader.stats()["batches"]
        (3, 3)
        """
        runtime = self._runtime
        figures: dict[str, int | float | None]
        figures = {name: getattr(runtime.stats, name) for name in Stats.__slots__}
        pools = runtime.pools()
        figures["held_bytes"] = runtime.held_bytes()
        figures["in_flight_bytes"] = sum(pool.machine.in_flight for pool in pools)
        figures["budget_bytes"] = runtime.budget_for(self._options().memory_budget).limit
        return figures

    # -- iterating ------------------------------------------------------------------------

    def __iter__(self) -> _BaseDataLoaderIter:
        if not (self.persistent_workers and self.num_workers > 0):
            return self._get_iterator()
        iterator = self._runtime.iterator
        if iterator is not None and getattr(iterator, "usable", True):
            iterator._reset(self)
        else:
            iterator = self._runtime.iterator = self._get_iterator()
        return iterator  # type: ignore[no-any-return]

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if sys.platform != "linux":
            warnings.warn(
                f"holdfast does not run on {sys.platform} yet: workers are torch's own and are not "
                "replaced when they die, and on_bad_sample has no effect",
                stacklevel=3,
            )
            return super()._get_iterator()
        self._settle()
        runtime = self._runtime
        chosen = self._options()
        name, rank = chosen.name or name_of(self.dataset), find_rank()
        origin = Origin(name, rank.told)
        logbook = runtime.open_logbook(chosen.logbook, self, rank.number, name)
        runtime.ledger.logbook, runtime.ledger.origin = logbook, origin
        if self.num_workers == 0:
            return SingleProcessIterator(self, chosen, runtime.stats, runtime.ledger)
        lacking = kernel.missing()
        if lacking is not None:
            _warn_of_torchs_workers(lacking)
            return super()._get_iterator()
        self.check_worker_number_rationality()
        if isinstance(chosen.worker_memory_limit, int):
            _warn_without_proc()
        runtime.advise(self.dataset, self.num_workers, origin)
        # Nothing that knows the iterator: a pool outlives it only as long as nothing does.
        told = runtime.incidents, runtime.telling
        note = functools.partial(_note, *told, runtime.stats, logbook)
        amend = functools.partial(_amend, *told, logbook)
        budget = runtime.budget_for(chosen.memory_budget)
        iterator = ProcessIterator(
            self,
            chosen,
            runtime.stats,
            note,
            amend,
            runtime.ledger,
            logbook,
            budget,
            runtime.said,
            origin,
            runtime.explained,
        )
        runtime.add(iterator._pool)
        return iterator

    def _settle(self) -> None:
        """In a process forked from the one that made this loader: start afresh."""
        runtime = self._runtime
        if runtime.owner != os.getpid():
            runtime.__init__()  # type: ignore[misc]

    @property
    def _iterator(self) -> Any:
        return self._runtime.iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._runtime.iterator = iterator

    @_iterator.deleter
    def _iterator(self) -> None:
        self._runtime.iterator = None

    # -- the end --------------------------------------------------------------------------

    def close(self) -> None:
        """End all workers of this loader now. It can be iterated again; batches stay valid."""
        self._runtime.close()

    def __enter__(self) -> DataLoader[T_co]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_runtime"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _runtime=_Runtime())
