"""Pins batches where they are, so that no copy is made. Experimental: see docs/accelerators.md.

What is registered, and when a block may be reused, is decided in `transport.pinned_in_place`. Here
it is done for the batches of one loader, in its pinning thread. A tensor that lies in registered
memory is pinned already, so torch's own function leaves it as it is and copies all others.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Final, Literal

import torch

from holdfast.autopsy.readers import procfs
from holdfast.engine.driver import Batch
from holdfast.engine.pinning import CopyToPinned, Pinner, PinningThread
from holdfast.transport.cuda_host_memory import CudaHostMemory
from holdfast.transport.pinned_in_place import HostMemory, PinnedBlocks, Quota, sweep
from holdfast.transport.window import Window

log = logging.getLogger("holdfast")

RELEASED: Final = 1 << 30  # bytes: enough for the worker to be told at once
SHARE = 4  # a quarter of the memory may be registered, if the user has given no number


def pinner(device: str | None, index: int, limit: int | Literal["auto"], whose: str) -> Pinner:
    """What pins for a new iterator. `limit`: the option ``pin_in_place``."""
    why = unavailable(device)
    if why is not None:
        _warn(whose, why)
        return CopyToPinned(device, index)
    memory = procfs.meminfo()
    if limit == "auto":
        limit = 0 if memory is None else memory.total // SHARE
    return PinInPlace(device, index, quota(limit), whose)


def unavailable(device: str | None) -> str | None:
    """Why batches cannot be pinned in place; None if they can."""
    if device not in (None, "cuda"):
        return f"it needs CUDA or ROCm, and the accelerator is {device}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


class PinInPlace(CopyToPinned):
    """One for each iterator. Whatever fails here, batches are copied instead."""

    in_place = True

    def __init__(
        self,
        device: str | None,
        index: int,
        quota: Quota,
        whose: str,
    ) -> None:
        """`whose` stands before what is logged."""
        super().__init__(device, index)
        self._quota = quota
        self._whose = whose
        self._memory: HostMemory | None = None
        self._thread: PinningThread | None = None
        self._arenas: list[PinnedBlocks] = []
        self._failed = False

    def begin(self, thread: PinningThread) -> None:
        super().begin(thread)
        self._thread = thread
        try:
            self._memory = CudaHostMemory(self._index)
        except Exception as error:
            self._give_up(repr(error))

    def receive(self, batch: Batch) -> Batch:
        blocks: Callable[[], Any] | None = getattr(batch, "blocks", None)
        if blocks is None:
            return batch
        apart: list[int] = []
        for window, offset, block in blocks():
            pinned = self._pinned_blocks(window)
            if pinned is not None:
                if pinned.claim(offset, block) == "across":
                    apart.append(offset)
                if pinned.failure is not None:
                    self._give_up(pinned.failure)
        for offset in apart:
            batch.detach(offset)  # type: ignore[attr-defined]
        return batch

    def idle(self) -> float | None:
        waits: list[float] = []
        try:
            for pinned in self._arenas:
                wait = pinned.attend()
                if wait is not None:
                    waits.append(wait)
            sweep()
        except Exception as error:  # what was released stays with us: that is safe
            self._give_up(repr(error))
        if self._thread is not None and any(one.has_free for one in self._arenas):
            self._thread.released(RELEASED)
        return min(waits, default=None)

    def end(self) -> None:
        try:
            for pinned in self._arenas:
                pinned.close()
        except Exception as error:
            self._give_up(repr(error))

    def _pinned_blocks(self, window: Window) -> PinnedBlocks | None:
        """Those of this arena. If registering has failed, only if there are some already."""
        if window.pinned is None and not self._failed and self._memory is not None:
            assert self._thread is not None
            pinned = window.pin_in_place(self._memory, self._quota, self._thread.wake)
            if pinned is not None:
                self._arenas.append(pinned)
        return window.pinned

    def _give_up(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            _warn(self._whose, why)


@functools.lru_cache(maxsize=1000)  # once for each loader, however many epochs it has
def _warn(whose: str, why: str) -> None:
    log.warning("%sbatches are copied to pinned memory, not pinned in place: %s", whose, why)


_quota: Quota | None = None


def quota(limit: int) -> Quota:
    """That of this process, with this limit from now on."""
    global _quota
    if _quota is None:
        _quota = Quota(limit)
    _quota.limit = limit
    return _quota
