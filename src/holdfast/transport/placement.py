"""Copies large samples to their place in a batch as soon as each is fetched.

That is while the sample is still in the cache, and its memory is reused for the next sample.
Stacking then finds that the work is done. A value that does not look like the first sample's is
left as it is and stacked in the ordinary way, so that results and errors are those of
``default_collate``.

There is one exception: a dataset that fills one buffer again and again and returns it for each
sample. Here each row is what the dataset returned for that sample; with ``default_collate`` all
rows would be the last sample. `Placement` can report this to a callback. Equal addresses of two
samples prove nothing, because freed memory is reused, unless the first sample is still alive when
the second arrives. So with a callback the first sample of the batch is kept alive.
"""

from __future__ import annotations

import math
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from holdfast.introspection.dtypes import AS_NUMPY

PLACED = 64 << 10
"""Tensors and arrays from this size on are copied to their place one by one."""
DEPTH = 4
WIDTH = 64
"""How deep in a sample they are searched for, and in containers of up to how many items."""

Bytes = npt.NDArray[np.uint8]
_Tensors = list[torch.Tensor]
Tell = Callable[[], object]
_ARRAY_DTYPES = frozenset(AS_NUMPY.values())


class Piece(Protocol):
    """Memory for one tensor. It is in use as long as `array` or anything built on it."""

    array: Bytes


class Memory(Protocol):
    """Where batches are made: an arena, or memory of the trainer that is used again."""

    def take(self, nbytes: int) -> Piece | None:
        """So many bytes; None if there are none for this size."""


def tensor_on(memory: Bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor at the beginning of the memory: not a view, and its storage has just its size."""
    numpy_dtype = AS_NUMPY.get(dtype)
    if numpy_dtype is not None:
        return torch.from_numpy(np.ndarray(shape, numpy_dtype, memory))
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).resize_(shape)


def _is_plain(leaf: Any) -> bool:
    """Whether ``default_collate`` treats the leaf and a contiguous copy of it alike."""
    if isinstance(leaf, torch.Tensor):
        return (
            leaf.is_cpu
            and leaf.layout is torch.strided
            and not (leaf.requires_grad or leaf.is_nested or leaf.is_quantized)
        )
    # torch refuses negative strides, and strides that are not a whole number of elements.
    width = leaf.itemsize
    return leaf.dtype in _ARRAY_DTYPES and all(
        step >= 0 and step % width == 0 for step in leaf.strides
    )


def _address(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.data_ptr()
    return int(leaf.__array_interface__["data"][0])


def _same_bytes(leaf: Any, other: Any) -> bool:
    """Compare leaves of one class, shape and dtype. By bytes: a NaN is not equal to itself."""
    if isinstance(leaf, torch.Tensor):
        return torch.equal(leaf.contiguous().view(torch.uint8), other.view(torch.uint8))
    return bool(np.array_equal(np.ascontiguousarray(leaf).view(np.uint8), other.view(np.uint8)))


class _Column:
    """One leaf of all samples of a batch: the rows 0, 1, 2, ... of one block."""

    def __init__(self, memory: Bytes, leaf: Any, size: int, refilled: Tell | None) -> None:
        self.refilled = refilled  # called once if a buffer was refilled, then None
        self.first = leaf if refilled is not None else None
        self.kind = type(leaf)
        self.shape = leaf.shape
        self.dtype = leaf.dtype
        self.nbytes: int = leaf.nbytes
        self.address: int = memory.__array_interface__["data"][0]
        self.memory: Bytes | None = memory
        # All rows are made at once. A small object that is made after each sample and lives until
        # the batch is collated would be allocated where that sample was. The next sample would not
        # fit there any more, and the heap would grow to the size of a batch.
        self.rows: list[Any]
        shape = (size, *self.shape)
        if self.kind is np.ndarray:
            self.rows = list(np.ndarray(shape, self.dtype, memory))
        else:
            self.rows = list(tensor_on(memory, shape, self.dtype).unbind())

    def put(self, row: int, leaf: Any) -> Any:
        """The leaf's copy in its row; the leaf itself if it is not like the first."""
        memory = self.memory
        if (
            memory is None
            or type(leaf) is not self.kind
            or leaf.dtype != self.dtype
            or leaf.shape != self.shape
            or not _is_plain(leaf)
        ):
            return leaf
        copy = self.rows[row]
        if self.kind is np.ndarray:
            np.copyto(copy, leaf)
        else:
            copy.copy_(leaf)
        if self.refilled is not None and row:
            self._compare(leaf, self.refilled)
        return copy

    def _compare(self, leaf: Any, refilled: Tell) -> None:
        """Report a leaf that is in the first leaf's memory, but with other contents."""
        if _address(leaf) == _address(self.first) and not _same_bytes(leaf, self.rows[0]):
            self.refilled = self.first = None
            refilled()

    def whole(self, batch: _Tensors) -> torch.Tensor | None:
        """The rows as one tensor, if the batch is these rows in this order. Only once."""
        memory, rows = self.memory, self.rows
        if memory is None:
            return None
        if self.kind is np.ndarray:
            mine = all(self._is_row(row, tensor) for row, tensor in enumerate(batch))
        else:
            mine = len(batch) <= len(rows) and all(map(operator.is_, batch, rows))
        if not mine:
            return None
        self.memory, self.rows, self.first = None, [], None
        return tensor_on(memory, (len(batch), *self.shape), batch[0].dtype)

    def _is_row(self, row: int, tensor: torch.Tensor) -> bool:
        # torch has made a tensor of the array meanwhile, so identity cannot be compared.
        return (
            type(tensor) is torch.Tensor
            and tensor.data_ptr() == self.address + row * self.nbytes
            and tensor.nbytes == self.nbytes
            and tensor.shape == self.shape
            and tensor.is_contiguous()
        )


class Placement:
    """One batch on its way: hand it each sample as it is fetched, collate what it returns.

    Only for batches that ``default_collate`` will collate; user code must not see the rows.
    """

    __slots__ = ("__weakref__", "_memory", "_plan", "_refilled", "_row", "_size", "columns")

    def __init__(self, memory: Memory, size: int, refilled: Tell | None = None) -> None:
        """`refilled` is called if two samples are one buffer with different contents. To find that
        out, the first sample is kept alive as long as the batch."""
        self._refilled = refilled
        self.columns: dict[int, _Column] = {}
        self._memory = memory
        self._size = size
        self._row = 0
        self._plan: Any = None

    @property
    def useless(self) -> bool:
        """Whether the first sample had nothing to place."""
        return self._plan is None

    def place(self, sample: Any) -> Any:
        """The sample, with its large leaves replaced by their copies in the batch."""
        row = self._row
        self._row = row + 1
        if row == 0:
            self._plan = self._plan_for(sample, DEPTH)
            if self._plan is not None:
                _remember(self)
        if self._plan is None or row >= self._size:
            return sample
        return _put(self._plan, row, sample)

    def _plan_for(self, thing: Any, depth: int) -> Any:
        """What to do with each sample: a column for a leaf, (type, length, parts) for a container
        that has such leaves inside, None for anything else."""
        kind = type(thing)
        if kind is torch.Tensor or kind is np.ndarray:
            return self._column(thing)
        if depth == 0:
            return None
        items: Any
        if kind is dict:
            items = thing.items()
        elif kind is tuple or kind is list or _is_namedtuple(kind):
            items = enumerate(thing)
        else:
            return None
        if len(thing) > WIDTH:
            return None
        parts = [(key, self._plan_for(value, depth - 1)) for key, value in items]
        parts = [(key, plan) for key, plan in parts if plan is not None]
        return (kind, len(thing), parts) if parts else None

    def _column(self, leaf: Any) -> _Column | None:
        # In this order: a sparse tensor has no nbytes.
        if not _is_plain(leaf) or leaf.nbytes < PLACED:
            return None
        block = self._memory.take(self._size * leaf.nbytes)
        if block is None:
            return None
        column = _Column(block.array, leaf, self._size, self._refilled)
        self.columns[column.address] = column
        return column


def _is_namedtuple(kind: type) -> bool:
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def _put(plan: Any, row: int, thing: Any) -> Any:
    if isinstance(plan, _Column):
        return plan.put(row, thing)
    kind, length, parts = plan
    if type(thing) is not kind or len(thing) != length:
        return thing
    if kind is dict:
        changed: Any = thing.copy()
        for key, part in parts:
            if key in changed:
                changed[key] = _put(part, row, changed[key])
        return changed
    changed = list(thing)
    for key, part in parts:
        changed[key] = _put(part, row, changed[key])
    if kind is list:
        return changed
    return tuple(changed) if kind is tuple else kind._make(changed)


class _Current(threading.local):
    """The placement whose rows may be collated next, in each thread. A weak reference, so that it
    is not kept alive."""

    placement: Callable[[], Placement | None] = staticmethod(lambda: None)


_current = _Current()


def _remember(placement: Placement) -> None:
    _current.placement = weakref.ref(placement)


def placed(batch: _Tensors, first: torch.Tensor) -> torch.Tensor | None:
    """The batch, if each of its tensors is in its place already."""
    placement = _current.placement()
    if placement is None:
        return None
    column = placement.columns.get(first.data_ptr())
    return None if column is None else column.whole(batch)
