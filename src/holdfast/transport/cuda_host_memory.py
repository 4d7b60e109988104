"""CUDA, and ROCm under the same names: memory that is pinned where it is, and fences.

Never run on a GPU by its authors. `python -m benchmarks.pinned` checks it on one.

Which streams may have used a block that the user has dropped? torch does not say. What can be known
is which streams there are: torch takes all of a device from fixed pools, one for each priority, and
gives the same ones out again. So a fence looks at all of them, and at each device's default stream,
on each device that this process uses. A stream that has nothing to do needs no event, so that it is
one question for most of the streams.

Not covered: streams that torch does not know (made by other libraries, `ExternalStream`), and a
CUDA graph that reads a batch when it is replayed after the batch was dropped. While a graph is
captured on one of these streams nothing may be asked, so no fence passes until the capture ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.private_names import has_cuda_context

from .pinned_in_place import Fence

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices
PRIORITIES = (0, -1, -2, -3)  # torch has a pool for each that the device knows
MOST_STREAMS = 1024  # in one pool; there are 32


class CudaHostMemory:
    """Used in one thread, the pinning thread: an error that CUDA reports for a registration is not
    seen by later calls in other threads."""

    def __init__(
        self,
        device: int,
        cuda: Any = torch.cuda,
        has_context: Callable[[int], bool] = has_cuda_context,
    ) -> None:
        """`device`: that of the consumer's thread. `cuda` and `has_context`: for tests."""
        self._device = device
        self._cuda = cuda
        self._has_context = has_context
        self._cudart = cuda.cudart()
        self._streams: dict[int, list[Any]] = {}

    def register(self, address: int, nbytes: int) -> str | None:
        code = int(self._cudart.cudaHostRegister(address, nbytes, PORTABLE))
        return None if code == 0 else f"cudaHostRegister failed with error {code}"

    def unregister(self, address: int) -> None:
        self._cudart.cudaHostUnregister(address)  # at exit CUDA may be gone already

    def fence(self) -> Fence:
        return _Fence(self)

    def events(self) -> list[Any] | None:
        """One event for each stream that has something to do; None if that cannot be asked now."""
        if self.capturing():
            return None
        return [stream.record_event() for stream in self._all() if not stream.query()]

    def capturing(self) -> bool:
        """Whether a graph is being captured: a question would spoil it."""
        for stream in self._all():
            with self._cuda.stream(stream):
                if self._cuda.is_current_stream_capturing():
                    return True
        return False

    def _all(self) -> list[Any]:
        return [stream for device in self._devices() for stream in self._streams_of(device)]

    def _devices(self) -> Iterator[int]:
        """Those with a context: to ask another one would make one there, which takes memory."""
        for device in range(self._cuda.device_count()):
            if device == self._device or self._has_context(device):
                yield device

    def _streams_of(self, device: int) -> list[Any]:
        known = self._streams.get(device)
        if known is None:
            known = self._streams[device] = list(_all_streams(self._cuda, device))
        return known


def _all_streams(cuda: Any, device: int) -> Iterator[Any]:
    """The pools are given out in turn: all were seen when one comes again."""
    seen: set[int] = set()
    default = cuda.default_stream(device)
    seen.add(default.cuda_stream)
    yield default
    for priority in PRIORITIES:
        for _ in range(MOST_STREAMS):
            stream = cuda.Stream(device, priority=priority)
            if stream.cuda_stream in seen:
                break
            seen.add(stream.cuda_stream)
            yield stream


class _Fence:
    def __init__(self, memory: CudaHostMemory) -> None:
        self._memory = memory
        self._events = memory.events()

    def passed(self) -> bool:
        if self._events is None:
            self._events = self._memory.events()  # later than asked for, which is as good
        elif self._memory.capturing():
            return False
        if self._events is None:
            return False
        self._events = [event for event in self._events if not event.query()]
        return not self._events
