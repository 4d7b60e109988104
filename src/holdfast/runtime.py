"""What a loader is doing, apart from what it is: for any `torch.utils.data.DataLoader`.

Frameworks copy a loader's attributes, pickle it, and record every assignment to it. So nothing that
changes while iterating is an attribute of the loader. It is in a `Runtime`, which is found by the
loader's identity and ends with the loader. A copy of a loader has a runtime of its own.

The exception is the iterator that persistent workers keep between epochs. Frameworks end those
workers through ``loader._iterator``, which is torch's place for it; and a table that held it would
keep the loader alive for ever if the dataset refers to the loader. `reduced` leaves it out of
copies and pickles. An iterator that came into another loader's attributes in some other way is not
used there (`Runtime.owns`).

What finalisers call here has what it needs in its arguments: no name of a module means anything
when the interpreter takes its modules apart.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast import at_fork
from holdfast.autopsy.incident import Incident
from holdfast.autopsy.logbook import TAKEN_UP, Logbook
from holdfast.autopsy.readers import procfs
from holdfast.engine.background import BackgroundThread, close_all
from holdfast.engine.driver import Kept
from holdfast.engine.epoch import EpochCounter
from holdfast.engine.iterator import WorkerIterator
from holdfast.engine.loader_records import LoaderRecords, Stats
from holdfast.engine.pool import Pool
from holdfast.limits.budget import Budget, for_all
from holdfast.limits.growth import GrowthWarnings
from holdfast.loader_identity import LoaderIdentity
from holdfast.packed.large_containers import advice
from holdfast.samples.bad_sample import BadSample
from holdfast.samples.ledger import Ledger
from holdfast.told_changes import DueChange, ToldChanges

if TYPE_CHECKING:
    from holdfast.engine.checkpoint import Bookmark
    from holdfast.resumption import BeforeIter, Loaded

log = logging.getLogger("holdfast")

REMEMBERED = 1000  # incidents
CHANGE_SECONDS = 10.0  # for which a thread waits while another one changes the dataset


class Totals:
    """What went wrong in this process, with all its loaders, also those that are gone."""

    def __init__(self) -> None:
        # A log handler or a finaliser may come back here in the middle of it.
        self.lock = threading.RLock()
        self.incidents: deque[Incident] = deque(maxlen=REMEMBERED)
        self.kinds: Counter[str] = Counter()
        self.first: float | None = None  # when the first of all happened, in seconds since 1970
        self.bad_samples: Counter[str] = Counter()  # by what was done about them
        self.logbooks: set[str] = set()

    def note(self, incident: Incident) -> None:
        with self.lock:
            self.incidents.append(incident)
            if incident.cause != "ended-on-request":  # the program meant it
                self.kinds[incident.kind] += 1
                if self.first is None:
                    self.first = incident.time

    def amend(self, old: Incident, new: Incident) -> None:
        with self.lock:
            _replace(self.incidents, old, new)

    def note_bad_sample(self, bad: BadSample) -> None:
        with self.lock:
            self.bad_samples[bad.action] += 1


totals = Totals()


class Runtime:
    """What one loader is doing."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.engine: str | None = None  # "holdfast" or "torch", from the first iterator on
        self.why_torchs = ""  # why the engine is torch's
        # From the first pool on, and held here: a finaliser of the user's may close a loader while
        # the interpreter takes its modules apart.
        self._close_all: Callable[[list[BackgroundThread]], None] | None = None
        self._pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()
        self._kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
        self.incidents: deque[Incident] = deque(maxlen=REMEMBERED)
        # Several iterators may tell of theirs at once; a log handler may ask in the middle of it.
        self.telling = threading.RLock()
        # Held while the dataset is changed and no workers run. Not while they are told: a sampler
        # may tell them something in the middle of a `next()`, for which a state may have to wait.
        self._changing = threading.RLock()
        self.stats = Stats()
        self.epochs = EpochCounter()
        self.told = ToldChanges()
        self.ledger = Ledger(totals.note_bad_sample)
        self.logbook: Logbook | None = None
        self.advised = False
        self.growth_warnings = GrowthWarnings()  # of growth, over all epochs
        self.explained: set[Hashable] = set()  # kinds of death
        self.budget = Budget(None)  # of this loader's own, if it was given a number
        self.bookmark: Bookmark | None = None  # of the iterator that was made last
        self.loaded: Loaded | None = None  # a state that the next iterator begins with
        self.stage: list[BeforeIter | None] = [None]
        """A new object when an ``iter()`` begins, and when it ends; in between it has what was
        before. None if that is not known."""
        self.due: deque[DueChange] = deque()
        """What a resumed epoch has still to be told; see `Checkpoint.due`."""
        self.texts: dict[str, tuple[bytes, str]] = {}  # random states as they were told last

    def begin_epoch(self) -> None:
        """Another epoch begins: all that was told before holds in it. It may have the number of
        one before it."""
        with self.telling:
            self.told = self.told.at(None, 0)

    def settle(self) -> None:
        """In a process forked from the one that used this loader: start afresh."""
        if self.owner != os.getpid():
            self.__init__()  # type: ignore[misc]

    @contextlib.contextmanager
    def changing(self) -> Iterator[bool]:
        """While the dataset is changed and no workers run, or its state is taken. Waits until no
        other thread does so, but not for ever: code of the dataset's or of the user's runs in the
        block, and may wait for this thread. Whether the others are done."""
        alone = self._changing.acquire(timeout=CHANGE_SECONDS)
        try:
            yield alone
        finally:
            if alone:
                self._changing.release()

    # -- what went wrong ------------------------------------------------------------------

    def note(self, logbook: Logbook | None, incident: Incident) -> None:
        """An incident, from any thread."""
        with self.telling:
            self.incidents.append(incident)
            self.stats.incidents += 1
        totals.note(incident)
        if logbook is not None:
            logbook.incident(incident.to_json())

    def amend(self, logbook: Logbook | None, old: Incident, new: Incident, text: str) -> None:
        """More is known of an incident."""
        with self.telling:
            _replace(self.incidents, old, new)
        totals.amend(old, new)
        if logbook is not None:
            logbook.event(
                TAKEN_UP,
                text,
                worker=new.worker_id,
                incident=new.time,
                exact=new.exact,
                action=new.action,
            )

    def finish_incidents(self) -> None:
        """Wait for the examination of deaths that have happened."""
        if self.owner == os.getpid():  # in a child there is no thread to finish it
            for pool in self.pools():
                pool.deaths.examine_pending()

    def advise(self, dataset: Any, workers: int, origin: LoaderIdentity) -> None:
        """Say once, in the log, if workers are going to copy a large dataset."""
        if self.advised:
            return
        self.advised = True
        memory = procfs.meminfo()
        try:
            words = advice(dataset, workers, memory.available if memory is not None else 0)
        except Exception as error:  # of a container that is not what it says: no reason to stop
            log.debug("how large the dataset's containers are cannot be told: %r", error)
            return
        if words is not None:
            log.warning("%s%s", origin.prefix, words)

    # -- pools and iterators --------------------------------------------------------------

    def add(self, pool: Pool) -> None:
        self._close_all = close_all
        self._pools[id(pool)] = pool
        self._kept[id(pool.driver.kept)] = pool.driver.kept

    def owns(self, iterator: WorkerIterator) -> bool:
        """Whether it was made for this loader."""
        return any(pool is iterator._pool for pool in self.pools())

    def pools(self) -> list[Pool]:
        """Those that are still there; any thread may ask while another begins an epoch."""
        found = [ref() for ref in self._pools.valuerefs()]
        return [pool for pool in found if pool is not None]

    def close(self, getpid: Callable[[], int] = os.getpid) -> None:
        """End all workers there are."""
        if self._close_all is not None and self.owner == getpid():
            # Also those whose iterator is gone already.
            self._close_all([pool.background for pool in self.pools()])

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

    def records(self, origin: LoaderIdentity) -> LoaderRecords:
        """What a new iterator is given of this."""
        return LoaderRecords(
            origin,
            self.logbook,
            self.stats,
            self.ledger,
            self.epochs,
            self.growth_warnings,
            self.explained,
            functools.partial(self.note, self.logbook),
            functools.partial(self.amend, self.logbook),
        )

    def open_logbook(
        self, folder: str | None, rank: int, name: str, noted: Callable[[], Mapping[str, Any]]
    ) -> Logbook | None:
        """The logbook of this loader; begun when it is first used, with what `noted` says of the
        loader. Which rank it is may be known only later, when `torch.distributed` is set up."""
        book = self.logbook
        if folder is None:
            self.logbook = None
        elif book is None or (book.given, book.rank, book.loader) != (folder, rank, name):
            try:
                self.logbook = Logbook(folder, rank=rank, loader=name)
            except OSError as error:
                words = f"logbook={folder!r} cannot be made: {error.strerror}"
                raise OSError(error.errno, words) from error
            totals.logbooks.add(folder)
            self.logbook.begin(noted())
        return self.logbook


def _replace(incidents: deque[Incident], old: Incident, new: Incident) -> None:
    """Under its lock: one more would move all of them up by a place, once there are as many as
    kept."""
    for number in range(len(incidents) - 1, -1, -1):
        if incidents[number] is old:
            incidents[number] = new
            break


# -- from a loader to its runtime ----------------------------------------------------------

_Entry = tuple["weakref.ref[Any]", Runtime]
_table: dict[int, _Entry] = {}
"""By identity: a subclass may define equality as it likes."""


def of(loader: Any, table: dict[int, _Entry] = _table) -> Runtime:
    """The runtime of a loader; made at its first use."""
    found = table.get(id(loader))
    return found[1] if found is not None and found[0]() is loader else _enter(loader)


def _enter(loader: Any) -> Runtime:
    key = id(loader)

    def gone(ref: weakref.ref[Any], key: int = key, table: dict[int, _Entry] = _table) -> None:
        found = table.get(key)
        if found is not None and found[0] is ref:
            del table[key]

    # One step: another thread may be at the same.
    return _table.setdefault(key, (weakref.ref(loader, gone), Runtime()))[1]


def loaders() -> list[Any]:
    """All loaders that are still there and were asked about, or iterated."""
    found = [ref() for ref, _ in list(_table.values())]
    return [loader for loader in found if loader is not None]


def living() -> list[Runtime]:
    """Those of all loaders that are still there."""
    return [runtime for _, runtime in list(_table.values())]


def close(
    loader: Any,
    table: dict[int, _Entry] = _table,
    put: Callable[[Any, str, Any], None] = object.__setattr__,
) -> None:
    """End all workers of a loader now."""
    found = table.get(id(loader))
    if found is not None and found[0]() is loader:
        found[1].close()
    put(loader, "_iterator", None)


def reduced(value: Any) -> Any:
    """What ``__reduce_ex__`` of a loader gave, without an iterator of ours: a copy of a loader has
    none of its own yet."""
    if not isinstance(value, tuple) or len(value) < 3:
        return value
    state = value[2]
    attributes = state[0] if isinstance(state, tuple) and len(state) == 2 else state
    if not isinstance(attributes, dict):
        return value
    if not isinstance(attributes.get("_iterator"), WorkerIterator):
        return value
    attributes = {**attributes, "_iterator": None}
    state = (attributes, state[1]) if isinstance(state, tuple) else attributes
    return (*value[:2], state, *value[3:])


def _in_child(totals: Totals = totals) -> None:
    """What went wrong in the parent is the parent's."""
    totals.lock = type(totals.lock)()  # another thread may have held it
    totals.incidents.clear()
    totals.kinds.clear()
    totals.bad_samples.clear()
    totals.logbooks.clear()
    totals.first = None


at_fork.in_child(_in_child)
