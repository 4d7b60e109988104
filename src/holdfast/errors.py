"""Everything holdfast raises of its own, at a glance.

    HoldfastError
    ├── WorkerError (RuntimeError)        a worker could not do its work
    │   ├── WorkerLost                    it died, and replacing it is over
    │   │   ├── RestartLimitExceeded      more deaths than `max_restarts` allows
    │   │   ├── StreamLost                its stream cannot be continued by another process
    │   │   └── PoisonSample              one sample ended several workers in a row
    │   ├── WorkerStartError              it could not even start
    │   ├── ReplicaLost                   an iterable dataset raised and cannot go on
    │   ├── NoSubstitute                  no good sample found to stand in for a bad one
    │   └── UnusualExit                   SystemExit, KeyboardInterrupt … raised by a sample
    ├── TooManyBadSamples (RuntimeError)  more bad samples than `max_bad_samples` allows
    └── LoaderClosed (RuntimeError)       next() on an iterator that was closed or interrupted

Its one warning is `BadSampleWarning` (UserWarning).

Exceptions raised by the user's own dataset, collate function or ``worker_init_fn`` arrive as their
own type, as with torch; see :mod:`holdfast.engine.exceptions`.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BadSampleWarning",
    "HoldfastError",
    "LoaderClosed",
    "NoSubstitute",
    "PoisonSample",
    "ReplicaLost",
    "RestartLimitExceeded",
    "StreamLost",
    "TooManyBadSamples",
    "UnusualExit",
    "WorkerError",
    "WorkerLost",
    "WorkerStartError",
]


class HoldfastError(Exception):
    """Base of all errors of holdfast's own."""


class WorkerError(HoldfastError, RuntimeError):
    """A worker could not do its work. A ``RuntimeError``, as torch's own report of it is."""


class WorkerLost(WorkerError):
    """A worker died and was not replaced."""


class RestartLimitExceeded(WorkerLost):
    """More workers died within the period than ``max_restarts`` allows."""


class StreamLost(WorkerLost):
    """A worker of an iterable dataset died, and its stream cannot be continued with the number of
    batches it had; or ``iterable_recovery`` says that it is not to be."""


class PoisonSample(WorkerLost):
    """One sample ended the worker that loaded it, and another that loaded it alone; an element of a
    stream, which cannot be loaded alone, several in a row."""

    sample: Any = None
    """Its index, as the sampler gave it; None if that is not known."""


class WorkerStartError(WorkerError):
    """A worker could not start: its main module, its arguments or its set-up failed."""


class ReplicaLost(WorkerError):
    """An iterable dataset raised, and there is no way to get the elements after that."""


class NoSubstitute(WorkerError):
    """``on_bad_sample="replace"`` found no good sample among those the sampler had given."""


class UnusualExit(WorkerError):
    """The dataset raised ``SystemExit``, ``KeyboardInterrupt`` or another non-``Exception``."""


class LoaderClosed(HoldfastError, RuntimeError):
    """The iterator was closed or interrupted; make a new one with ``iter(loader)``."""


class TooManyBadSamples(HoldfastError, RuntimeError):
    """More samples were bad than ``max_bad_samples`` allows, or all of them."""


class BadSampleWarning(UserWarning):
    """Samples were bad and were dealt with as ``on_bad_sample`` says."""
