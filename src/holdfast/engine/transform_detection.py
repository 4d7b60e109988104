"""Whether a worker was in its dataset's transform when it left a stack.

To know at any moment whether a sample is being read or transformed, every call of the transform
would have to be wrapped: in an attribute of the user's dataset, which must not be changed, or in
every call. But a stack names the lines that were running, and a dataset of the usual form (with a
callable attribute ``transform``, ``transforms`` or ``target_transform``) gives access to the code
of its transform. So the two are compared afterwards, for a death or a stall that left a stack. It
costs nothing until then. For a worker that was killed without leaving a stack it is not known.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from holdfast.autopsy.stack import file_of, frames
from holdfast.introspection.attributes import is_a, own

_NAMES = ("transform", "transforms", "target_transform")
_INNER = ("dataset", "datasets")  # the attributes of Subset and ConcatDataset
_MAX_DATASETS = 1000


def in_transform(dataset: Any, stack: str) -> bool:
    """Whether the thread that failed was in a transform of this dataset."""
    lines = [_place(frame) for frame in frames(stack)]
    if not lines:
        return False
    codes = list(_codes(dataset))
    return any(_is_in(code, *line) for line in lines for code in codes)


def _place(frame: str) -> tuple[str, int, str]:
    """The file, line and function of ``File "x.py", line 3 in f``."""
    number, _, function = frame.rpartition('", line ')[2].partition(" in ")
    return file_of(frame), int(number) if number.isdigit() else 0, function


def _is_in(code: CodeType, file: str, line: int, function: str) -> bool:
    if (code.co_filename, code.co_name) != (file, function):
        return False
    numbers = [number for _, _, number in code.co_lines() if number is not None]
    return min(numbers, default=0) <= line <= max(numbers, default=0)


def _codes(dataset: Any) -> Iterator[CodeType]:
    """The code of all transforms of a dataset and of its inner datasets."""
    waiting, seen = deque([dataset]), {id(dataset)}
    while waiting:
        attributes = own(waiting.popleft())
        for name in _NAMES:
            code = _code(attributes.get(name))
            if code is not None:
                yield code
        for name in _INNER:
            inside: Any = attributes.get(name)
            for one in list(inside) if is_a(inside, (list, tuple)) else [inside]:
                if id(one) not in seen and len(seen) < _MAX_DATASETS:
                    seen.add(id(one))
                    waiting.append(one)


def _code(transform: Any) -> CodeType | None:
    """The code that runs when it is called; None if that is not Python code."""
    while is_a(transform, partial):
        transform = transform.func
    if is_a(transform, MethodType):
        transform = transform.__func__
    if is_a(transform, FunctionType):
        return transform.__code__  # type: ignore[no-any-return]
    name = "forward" if is_a(transform, nn.Module) else "__call__"
    method = inspect.getattr_static(type(transform), name, None)
    return method.__code__ if isinstance(method, FunctionType) else None
