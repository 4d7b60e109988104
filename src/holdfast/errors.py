"""The errors that holdfast itself raises.

    HoldfastError
    ├── WorkerError (RuntimeError)        a worker could not do its work
    │   ├── WorkerLost                    it died, and is not replaced any more
    │   │   ├── RestartLimitExceeded      more deaths than `max_restarts` allows
    │   │   ├── StreamLost                its stream cannot be continued by another process
    │   │   └── PoisonSample              one sample ended several workers in a row
    │   ├── WorkerStartError              it could not start
    │   ├── ReplicaLost                   an iterable dataset raised and cannot go on
    │   ├── NoSubstitute                  no good sample was found to replace a bad one
    │   └── UnusualExit                   SystemExit, KeyboardInterrupt … raised by a sample
    ├── TooManyBadSamples (RuntimeError)  more bad samples than `max_bad_samples` allows
    ├── StateError (ValueError)           a state that this loader cannot be resumed from
    └── LoaderClosed (RuntimeError)       next() on an iterator that was closed or interrupted

The only warning is `BadSampleWarning` (UserWarning).

Exceptions raised by the user's own dataset, collate function or ``worker_init_fn`` arrive as their
own type, as with torch; see :mod:`holdfast.worker.exceptions`.
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
    "StateError",
    "StreamLost",
    "TooManyBadSamples",
    "UnusualExit",
    "WorkerError",
    "WorkerLost",
    "WorkerStartError",
]


class HoldfastError(Exception):
    """Base class of all errors that holdfast itself raises."""


class WorkerError(HoldfastError, RuntimeError):
    """A worker could not do its work. A ``RuntimeError``, as torch raises in that case."""


class WorkerLost(WorkerError):
    """A worker died and was not replaced."""


class RestartLimitExceeded(WorkerLost):
    """More workers died within the period than ``max_restarts`` allows."""


class StateError(HoldfastError, ValueError):
    """``load_state_dict`` was given a state from which this loader cannot be resumed. The message
    says what does not fit and what to do. The loader is as it was."""


class StreamLost(WorkerLost):
    """A worker of an iterable dataset died, and its stream cannot be continued with the same number
    of batches, or ``iterable_recovery="raise"`` forbids that."""


class PoisonSample(WorkerLost):
    """One sample ended the worker that loaded it, and another worker that loaded it alone. An
    element of a stream cannot be loaded alone: it ended several workers in a row."""

    sample: Any = None
    """Its index, as the sampler gave it; None if that is not known."""


class WorkerStartError(WorkerError):
    """A worker could not start: its main module, its arguments or its set-up failed."""


class ReplicaLost(WorkerError):
    """An iterable dataset raised, and the elements after that cannot be reached."""


class NoSubstitute(WorkerError):
    """``on_bad_sample="replace"`` found no good sample among the indices of the sampler."""


class UnusualExit(WorkerError):
    """The dataset raised ``SystemExit``, ``KeyboardInterrupt`` or another non-``Exception``."""


class LoaderClosed(HoldfastError, RuntimeError):
    """The iterator was closed or interrupted; make a new one with ``iter(loader)``."""


class TooManyBadSamples(HoldfastError, RuntimeError):
    """More samples were bad than ``max_bad_samples`` allows, or all of them."""


class BadSampleWarning(UserWarning):
    """Samples were bad and were handled as ``on_bad_sample`` says."""
