"""``from holdfast import DataLoader``: torch's arguments, torch's batches, workers that may die.

The class holds the arguments and options. What a loader is doing is in `runtime`, and how iterating
begins in `iteration`: both work for loaders of other classes too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data import Dataset, Sampler

from holdfast import broadcast, iteration, option_sources, options, resumption, runtime
from holdfast.autopsy.incident import Incident
from holdfast.broadcast import Change
from holdfast.engine.continuation import Recovery
from holdfast.loader_report import Report
from holdfast.options import MaxRestarts, Memory, Seeding, WorkerMethodName
from holdfast.private_names import BaseDataLoaderIter
from holdfast.samples.bad_sample import BadSample
from holdfast.samples.policy import OnBadSample
from holdfast.takeover import replaced_loaders

T_co = TypeVar("T_co", covariant=True)


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
            its stack, killed and replaced; ``None`` for never. Seconds in which it got no processor
            do not count, up to nine timeouts or two minutes. torch's own ``timeout`` keeps its
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
        pin_in_place: experimental. With ``pin_memory=True`` and CUDA, pin the memory in which a
            batch arrives instead of copying it: ``"auto"`` (up to a quarter of the memory), or how
            many bytes may be pinned in this process, as a number or a text such as ``"8GiB"``;
            ``None`` to copy as torch does. docs/accelerators.md says what it does not cover.
        seeding: how ``random``, ``numpy.random`` and ``torch`` are seeded in samples: ``"worker"``
            (as torch: once for each worker), ``"sample"`` (for each sample, from a seed, the epoch
            and its key, so that its random numbers do not depend on ``num_workers``, order,
            retries, ranks or resumption), or ``("sample", 1234)`` with the seed to use. Without it
            that is the initial seed of ``generator``, or ``torch.initial_seed()``.
        worker_method: what workers are: ``"multiprocessing"`` (processes); ``"thread"``, for
            datasets that release Python's lock while they load, and where worker processes do not
            run: threads share the dataset, and a crash in one ends the program; or ``"ray"``,
            actors of a Ray cluster, for more processors than this machine has.
            docs/worker-methods.md compares them.
        ray_options: with ``worker_method="ray"``: what actors are started with, such as
            ``{"num_cpus": 1, "scheduling_strategy": "SPREAD"}``.
        logbook: a folder that fills while the loader is used: what went wrong with workers and
            why, how memory developed, and which run it was. It stays readable whatever kills the
            run; ``holdfast incidents FOLDER`` tells its story.
        snapshot_every_n_steps: accepted because torchdata's StatefulDataLoader has it, and without
            effect: `state_dict` is always exact, and what is kept for it costs nothing.
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
        max_restarts: MaxRestarts = option_sources.AUTO,
        stall_timeout: float | None = option_sources.STALL_TIMEOUT,
        on_bad_sample: OnBadSample = option_sources.RAISE,
        max_bad_samples: int | float | None = None,
        quarantine: str | os.PathLike[str] | None = None,
        logbook: str | os.PathLike[str] | None = None,
        memory_budget: Memory = option_sources.AUTO,
        worker_memory_limit: Memory = option_sources.AUTO,
        name: str | None = None,
        iterable_recovery: Recovery = option_sources.AUTO,
        pin_in_place: Memory = None,
        seeding: Seeding = option_sources.WORKER,
        worker_method: WorkerMethodName = option_sources.MULTIPROCESSING,
        ray_options: Mapping[str, Any] | None = None,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        self._prefetch_given = prefetch_factor is not None
        self.worker_method = worker_method  # torch's constructor calls our method below
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
        self.pin_in_place = pin_in_place
        self.seeding = seeding
        self.ray_options = ray_options
        self.snapshot_every_n_steps = snapshot_every_n_steps
        iteration.check_options(self)
        options.check_places(quarantine=quarantine)
        replaced_loaders.keep_class()

    def _own_options(self) -> dict[str, Any]:
        """The options as they are now: they stay assignable, like ``num_workers``. Persistent
        workers keep those they began with."""
        return {name: getattr(self, name) for name in option_sources.DEFAULTS}

    # -- what went on ---------------------------------------------------------------------

    @property
    def incidents(self) -> list[Incident]:
        """What went wrong with workers of this loader so far, oldest first: the last thousand.
        ``stats()["incidents"]`` counts all of them."""
        return Report(self).incidents

    @property
    def bad_samples(self) -> list[BadSample]:
        """Samples that were bad so far, each once, in the order in which they were met."""
        return Report(self).bad_samples

    def stats(self) -> dict[str, int | float | None]:
        """Batches, bytes, waits, restarts, incidents so far, over all epochs; memory as it is now.

        ``in_flight_bytes`` are ordered and not handed over yet, ``held_bytes`` those of batches you
        keep, also of epochs that are over, ``budget_bytes`` what may be in flight at present (None
        without limit).

        >>> loader = DataLoader([1, 2, 3], num_workers=0)
        >>> len(list(loader)), loader.stats()["batches"]
        (3, 3)
        """
        return Report(self).stats()

    # -- telling workers something ---------------------------------------------------------

    def broadcast(self, change: Change) -> None:
        """Change the dataset, in this process at once and in every worker between two batches:
        ``{"image_size": 224}`` sets attributes, ``{"transform.strength": 0.5}`` attributes of
        these, and a function is called with the dataset.

        It holds for all batches whose indices are drawn after the call. With workers some batches
        are drawn ahead: ``prefetch_factor * num_workers``, after a delivered batch. Replacements
        and workers of later epochs have it too; every worker hears it once. An error in this
        process is raised here, and nothing is sent; an error in a worker takes the place of its
        next batch. With running workers the function has to be one that pickles.

        >>> class Words:
        ...     length = 3
        ...     def __len__(self): return 4
        ...     def __getitem__(self, key): return "abcdefgh"[: self.length]
        >>> loader = DataLoader(Words(), num_workers=1, persistent_workers=True)
        >>> [batch[0] for batch in loader]
        ['abc', 'abc', 'abc', 'abc']
        >>> loader.broadcast({"length": 5})
        >>> [batch[0] for batch in loader]
        ['abcde', 'abcde', 'abcde', 'abcde']
        >>> loader.close()
        """
        broadcast.broadcast(self, change)

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch(epoch)`` of the sampler, the batch sampler and the dataset, of those
        that have it; of the dataset in every worker too, as `broadcast` does. With
        ``seeding="sample"`` the next epoch has this number, and later ones those after it."""
        broadcast.set_epoch(self, epoch)

    # -- resuming -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is, for another process to go on from there.

        It counts the batches that you have had, not those that were made ahead, and may be called
        at any time: before, during and after an epoch, from any thread. It is plain data:
        ``json.dumps`` takes it. docs/resume.md says what is in it.

        >>> loader = DataLoader([1, 2, 3, 4, 5], batch_size=2, num_workers=1)
        >>> for batch in loader:
        ...     state = loader.state_dict()
        ...     break
        >>> state["batches"]
        1
        """
        return resumption.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Have the next ``iter()`` go on from a state: the rest of that epoch comes, batch for
        batch and bit for bit as it would have come without the break.

        >>> loader = DataLoader([1, 2, 3, 4, 5], batch_size=2, num_workers=1)
        >>> for batch in loader:
        ...     state = loader.state_dict()
        ...     break
        >>> again = DataLoader([1, 2, 3, 4, 5], batch_size=2, num_workers=1)
        >>> again.load_state_dict(state)
        >>> [batch.tolist() for batch in again]
        [[3, 4], [5]]

        A state that does not fit this loader is a :class:`StateError`, which says what differs and
        leaves the loader as it was. With ``strict=False`` that is a warning, and the loader goes
        on as near to the state as possible.
        """
        resumption.load_state_dict(self, state_dict, strict=strict)

    # -- iterating ------------------------------------------------------------------------

    def check_worker_number_rationality(self) -> None:
        """Torch's warning about more workers than this machine has processors. Those of a cluster
        may have more."""
        if self.worker_method != "ray":
            super().check_worker_number_rationality()

    def __iter__(self) -> BaseDataLoaderIter:
        return iteration.iterate(self)

    def _get_iterator(self) -> BaseDataLoaderIter:
        return iteration.new_iterator(self, super()._get_iterator, ours=True)

    # -- loaders that frameworks make in place of this one ---------------------------------

    _is_accelerate_prepared = replaced_loaders.AskedByAccelerate()

    def _made_anew(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """A loader with this one's options, and with other arguments of torch's."""
        made: DataLoader[Any] = DataLoader(*args, **{**kwargs, **self._own_options()})
        made._prefetch_given = self._prefetch_given
        return made

    # -- copies, and the end --------------------------------------------------------------

    # No function here looks for a name of its module: a finaliser may call it while the interpreter
    # takes its modules apart.
    _runtime = property(runtime.of)
    _close = staticmethod(runtime.close)

    def close(self) -> None:
        """End all workers of this loader now. It can be iterated again; batches stay valid."""
        self._close(self)

    def __enter__(self) -> DataLoader[T_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return runtime.reduced(super().__reduce_ex__(protocol))
