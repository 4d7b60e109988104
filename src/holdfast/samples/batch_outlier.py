"""The outlier of a batch: which sample is unlike the others, and how it differs.

A sample's form is described by types, dtypes and sizes, as far as collation looks at them. Pure
functions, called only after a collation has failed, and by a scan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

_DEPTH = 6
_WIDTH = 64

Form = tuple[Any, ...]


def form(sample: Any, depth: int = _DEPTH) -> Form:
    """What collation sees of a sample: hashable, equal for samples that look alike."""
    if isinstance(sample, torch.Tensor):
        dtype = str(sample.dtype).removeprefix("torch.")
        return ("tensor", dtype, tuple(sample.shape))
    if isinstance(sample, (np.ndarray, np.generic)):
        return ("array", str(sample.dtype), tuple(sample.shape))
    kind = type(sample).__name__
    if depth and isinstance(sample, Mapping):
        items = sorted(((str(key), value) for key, value in sample.items()), key=lambda i: i[0])
        parts = tuple((key, form(value, depth - 1)) for key, value in items[:_WIDTH])
        return (kind, len(sample), parts)
    if depth and isinstance(sample, Sequence) and not isinstance(sample, (str, bytes, bytearray)):
        try:
            places = tuple(
                (number, form(sample[number], depth - 1))
                for number in range(min(len(sample), _WIDTH))
            )
        except Exception:  # a sequence of the user's that cannot be read
            return (kind,)
        return (kind, len(sample), places)
    return (kind,)


def majority(forms: Sequence[Form]) -> Form | None:
    """The most frequent form; None if two are equally frequent."""
    ranked = Counter(forms).most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        return None
    return ranked[0][0]


def difference(odd: Form, usual: Form, path: str = "") -> str:
    """In words: what this sample has, and what the others had."""
    inside = len(odd) == len(usual) == 3 and odd[0] == usual[0] and odd[0] not in _LEAVES
    if inside and odd[1] == usual[1]:
        for (key, mine), (other_key, theirs) in zip(odd[2], usual[2], strict=True):
            if key != other_key:
                return f"it{_at(path)} has the key {key!r} where the others had {other_key!r}"
            if mine != theirs:
                return difference(mine, theirs, f"{path}[{key!r}]")
    return f"it{_at(path)} is {_words(odd)}, the others had {_words(usual)}"


_LEAVES = ("tensor", "array")


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _words(one: Form) -> str:
    if one[0] in _LEAVES:
        return f"a {one[1]} {one[0]} of shape {one[2]}"
    if len(one) == 3 and one[2] and isinstance(one[2][0][0], str):
        keys = ", ".join(key for key, _ in one[2][:8])
        return f"a {one[0]} with {one[1]} keys ({keys})"
    if len(one) == 3:
        return f"a {one[0]} of length {one[1]}"
    article = "an" if one[0][:1].lower() in "aeiou" else "a"
    return "None" if one[0] == "NoneType" else f"{article} {one[0]}"
