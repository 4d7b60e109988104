"""Python values as plain data, which ``json.dumps`` takes and from which they can be made again.

Numbers, texts, None, lists, and dicts whose keys are texts stay as they are. Everything else
becomes a dict with the key ``"__holdfast__"``, which says what it is:

| value             | form                                                                     |
| ----------------- | ------------------------------------------------------------------------ |
| bytes             | ``{"__holdfast__": "bytes", "data": …}``                                 |
| tensor, array     | ``{"__holdfast__": "tensor", "dtype": …, "shape": […], "data": …}``      |
| tuple, set        | ``{"__holdfast__": "tuple", "items": […]}``                              |
| other dicts       | ``{"__holdfast__": "dict", "items": [[key, value], …]}``                 |
| everything else   | ``{"__holdfast__": "pickle", "data": …}``                                |

``data`` is base64 of the bytes, compressed with zlib. The last form is the only one that is read
with ``pickle``, which can run code. It occurs only if the state of a dataset or a sampler contains
such an object.
"""

from __future__ import annotations

import base64
import binascii
import pickle
import zlib
from typing import Any, Final

import numpy as np
import torch

_TAG: Final = "__holdfast__"
_SCALARS: Final = (bool, int, float, str, type(None))
_SEQUENCES: Final = {"tuple": tuple, "set": set, "frozenset": frozenset}


def to_text(raw: bytes) -> str:
    """Bytes as text: compressed, then base64."""
    return base64.b64encode(zlib.compress(raw, 1)).decode("ascii")


def from_text(text: Any) -> bytes:
    """What `to_text` was given; ValueError if the text is damaged."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r:.60} where a text was expected")
    try:
        return zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"it is damaged ({error})") from error


def to_plain(value: Any) -> Any:
    """The value as plain data. The types are compared exactly: what is made again is the same."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list:
        return [to_plain(one) for one in value]
    if kind is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: to_plain(one) for key, one in value.items()}
        items = [[to_plain(key), to_plain(one)] for key, one in value.items()]
        return {_TAG: "dict", "items": items}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "data": to_text(bytes(value))}
    if kind in (tuple, set, frozenset):
        return {_TAG: kind.__name__, "items": [to_plain(one) for one in value]}
    if kind is torch.Tensor and _is_simple(value):
        array = value.contiguous().view(-1).view(torch.uint8) if value.numel() else value
        return {
            _TAG: "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "data": to_text(array.numpy().tobytes() if value.numel() else b""),
        }
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcmM":
        tag = "array" if kind is np.ndarray else "number" if isinstance(value, np.generic) else ""
        if tag:
            data = to_text(np.ascontiguousarray(value).tobytes())
            shape = list(value.shape)
            return {_TAG: tag, "dtype": value.dtype.str, "shape": shape, "data": data}
    return {_TAG: "pickle", "data": to_text(pickle.dumps(value))}


def _is_simple(value: torch.Tensor) -> bool:
    return (
        value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
    )


def from_plain(value: Any) -> Any:
    """What `to_plain` was given; ValueError if it is damaged."""
    if isinstance(value, list):
        return [from_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: from_plain(one) for key, one in value.items()}
    try:
        if tag == "dict":
            return {from_plain(key): from_plain(one) for key, one in value["items"]}
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](from_plain(one) for one in value["items"])
        raw = from_text(value["data"])
        if tag in ("bytes", "bytearray"):
            return raw if tag == "bytes" else bytearray(raw)
        if tag == "tensor":
            flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0)
            return (
                flat.view(getattr(torch, value["dtype"])).view(value["shape"])
                if raw
                else (torch.empty(value["shape"], dtype=getattr(torch, value["dtype"])))
            )
        if tag in ("array", "number"):
            array = np.frombuffer(raw, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
            return array if tag == "array" else array[()]
        if tag == "pickle":
            return pickle.loads(raw)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"a value of kind {tag!r} is damaged ({error!r})") from error
    raise ValueError(f"a value of the unknown kind {tag!r}")


def holds_pickle(value: Any) -> bool:
    """Whether reading this plain data takes ``pickle``."""
    if isinstance(value, list):
        return any(map(holds_pickle, value))
    if not isinstance(value, dict):
        return False
    return value.get(_TAG) == "pickle" or any(map(holds_pickle, value.values()))
