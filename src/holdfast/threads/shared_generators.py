"""Sees that a worker thread draws from random generators that other threads use too.

What each sample gets then depends on timing. It cannot be seen which thread has moved a global
generator; but if its state has changed between the beginning and the end of a batch, and the
consumer did nothing but wait in between, it was not the consumer. Only such batches are looked at,
and ever fewer of them: reading the states takes some microseconds.
"""

from __future__ import annotations

from typing import Any

from holdfast.engine.bells import Bell
from holdfast.worker.generator_search import Search
from holdfast.worker.generator_states import State, global_states

_GLOBAL = ("torch", "random", "numpy.random")
_ATTRIBUTES = ("torch_generator", "random_generator", "numpy_generator")


class SharedGenerators:
    """Those that one worker thread is watched for."""

    def __init__(self, bell: Bell, dataset: Any | None) -> None:
        """`bell` is what the consumer waits for, `dataset` the one that all threads share."""
        self._bell = bell
        self._dataset = dataset
        self._named: list[tuple[str, State]] | None = None
        self._before: list[bytes] | None = None
        self._waits = 0
        self._left_out, self._pause = 0, 1  # batches that could be looked at, and are not

    def before_batch(self) -> None:
        """A batch is about to be made."""
        self._before = None
        if not self._bell.consumer_waits:
            return
        if self._left_out:
            self._left_out -= 1
            return
        if self._named is None:
            self._named = self._find()
        self._waits = self._bell.waits
        self._before = [state.read() for _, state in self._named]

    def moved(self) -> tuple[str, str] | None:
        """After a batch: what about, and the words, if a generator was moved meanwhile."""
        before, named = self._before, self._named
        if before is None or named is None:
            return None
        if not self._consumer_only_waited():
            return None
        after = [state.read() for _, state in named]
        if not self._consumer_only_waited():
            return None
        for (name, _), old, new in zip(named, before, after, strict=True):
            if old != new:
                return f"shared-generator-{name}", _words(name)
        self._pause *= 2
        self._left_out = self._pause
        return None

    def _consumer_only_waited(self) -> bool:
        """Whether the consumer has done nothing else since `before_batch`. If it did, it may have
        moved a generator, and it may be reading one just now. Before Python 3.12 two threads that
        read torch's generator at the same time can wait for each other for ever."""
        return self._bell.consumer_waits and self._bell.waits == self._waits

    def _find(self) -> list[tuple[str, State]]:
        found = list(zip(_GLOBAL, global_states(), strict=True))
        if self._dataset is not None:
            try:
                kept = Search([("dataset", self._dataset)], []).kept
            except Exception:  # odd objects: then only the global ones are watched
                kept = []
            found += [(one.path, one.state) for one in kept]
        return found


def _words(name: str) -> str:
    meanwhile = (
        f"the random generator {name}, which all threads share, was drawn from while this worker "
        "thread made a batch and the main thread did nothing but wait for it. Which sample gets "
        "which numbers depends on timing: the batches are not those of another run, of worker "
        "processes, or of a batch that has to be made again. "
    )
    if name not in _GLOBAL:
        return meanwhile + (
            "Set `thread_safe = False` on the dataset: then each worker has a copy of it, as a "
            "process has."
        )
    attribute = _ATTRIBUTES[_GLOBAL.index(name)]
    return meanwhile + (
        f"Draw from the worker's own: torch.utils.data.get_worker_info().rng.{attribute}"
    )
