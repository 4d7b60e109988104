"""Lists and dicts for millions of small values that stay one copy however many workers read them.

A forked worker that merely reads a list of a million strings writes a million reference counts, and
each write makes a private copy of a page (`cow-growth`). The containers here keep the values as raw
columns (`columns.py`) in memory that all workers share (`sealed.py`), forked or spawned.

They are read-only. Each access makes a new object, equal to what was put in and of the same type;
changing it does not change the container.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from multiprocessing.context import get_spawning_popen
from pathlib import PosixPath, PurePosixPath
from typing import Any, NoReturn, SupportsIndex, TypeVar, overload

import numpy as np

from holdfast.packed.column_reader import reader
from holdfast.packed.column_writer import Plan, encode, pickled_items
from holdfast.packed.sealed import Sealed, Writer

T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K")
V_co = TypeVar("V_co", covariant=True)

_BLOCK = 1024  # items made at once when iterating
_SHOWN = 3
_MOST = 1 << 32  # buckets are counted in 32 bits


class _ReadOnly:
    """The common base of lists and dicts: one memory, which cannot be changed."""

    __slots__ = ()
    _sealed: Sealed

    @property
    def nbytes(self) -> int:
        """Bytes of the shared memory, all columns and indices included."""
        return len(self._sealed.view)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        name = type(self).__name__
        plain = "dict" if isinstance(self, Mapping) else "list"
        raise TypeError(
            f"a {name} is read-only, because all workers share its memory. To change it, make a "
            f"{plain} of it, change that, and pack it again: {name}({plain}(packed))"
        )

    __setitem__ = __delitem__ = clear = pop = _refuse

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # nothing in it can change


class PackedList(_ReadOnly, Sequence[T_co]):
    """A read-only list in shared memory.

    >>> from holdfast import PackedList
    >>> samples = PackedList([("a.jpg", 0), ("b.jpg", 1), ("c.jpg", 0)])
    >>> samples[-1], len(samples), ("b.jpg", 1) in samples
    (('c.jpg', 0), 3, True)
    >>> samples[:2] == [("a.jpg", 0), ("b.jpg", 1)]
    True

    Strings, bytes, paths, numbers, arrays, tensors, and tuples, lists and dicts of them are stored
    compactly; other objects are pickled one by one. Slices are views of the same memory.
    """

    __slots__ = ("_get", "_many", "_plan", "_range", "_sealed", "_whole")

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, items: Iterable[T_co] = ()) -> None:
        listed = _as_list(items, type(self).__name__)
        self._check(listed)
        writer = Writer()
        try:
            plan = encode(listed, writer)
        except BaseException:
            writer.discard()
            raise
        self._open(writer.close(), plan, range(len(listed)))

    def _check(self, items: list[Any]) -> None:
        """For subclasses that do not accept every value."""

    def _open(self, sealed: Sealed, plan: Plan, positions: range, whole: bool = True) -> None:
        self._sealed = sealed
        self._whole = whole  # not a slice, nor the keys or values of a dict
        self._plan = plan
        self._range = positions
        self._get, self._many = reader(plan, sealed.view)

    @property
    def pickled(self) -> int:
        """How many values found no compact form and are pickled one by one."""
        return pickled_items(self._plan)

    # -- as a list ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> PackedList[T_co]: ...
    def __getitem__(self, index: int | slice) -> Any:
        try:
            at = self._range[index]
        except IndexError:
            raise IndexError(
                f"{type(self).__name__} index {index} is out of range: there are {len(self)} items"
            ) from None
        except TypeError:
            raise TypeError(
                f"{type(self).__name__} indices must be integers or slices, "
                f"not {type(index).__name__}"
            ) from None
        if at.__class__ is range:
            return _opened(type(self), self._sealed, self._plan, at, False)
        return self._get(at)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T_co]:
        positions = self._range
        if positions.step != 1:
            yield from map(self._get, positions)
            return
        for first in range(positions.start, positions.stop, _BLOCK):
            yield from self._many(first, min(first + _BLOCK, positions.stop))

    def __reversed__(self) -> Iterator[T_co]:
        return map(self._get, reversed(self._range))

    def __contains__(self, value: object) -> bool:
        return any(one is value or one == value for one in self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, PackedList)):
            return NotImplemented
        return len(self) == len(other) and all(
            one is another or one == another for one, another in zip(self, other, strict=True)
        )

    def __add__(self, other: Any) -> PackedList[Any]:
        if not isinstance(other, (list, PackedList)):
            return NotImplemented
        return PackedList([*self, *other])

    def __radd__(self, other: Any) -> PackedList[Any]:
        if not isinstance(other, list):
            return NotImplemented
        return PackedList([*other, *self])

    def __mul__(self, times: Any) -> PackedList[Any]:
        if not isinstance(times, SupportsIndex):
            return NotImplemented
        return PackedList(list(self) * times.__index__())

    __rmul__ = __mul__

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The first position of `value`."""
        first, end, _ = slice(start, stop).indices(len(self))
        for at, one in enumerate(self[first:end], first):
            if one is value or one == value:
                return at
        raise ValueError(f"{_short(value)} is not in this {type(self).__name__}")

    def copy(self) -> PackedList[T_co]:
        """Itself: nothing in it can change."""
        return self

    def tolist(self) -> list[T_co]:
        """An ordinary list of all items."""
        return list(self)

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, islice(self, _SHOWN)))
        more = len(self) - _SHOWN
        rest = f", … {more:,} more" if more > 0 else ""
        return f"{type(self).__name__}([{shown}{rest}])"

    append = extend = insert = remove = sort = reverse = _ReadOnly._refuse
    __iadd__ = __imul__ = _ReadOnly._refuse

    # -- on its way to another process --------------------------------------------------------

    def __reduce__(self) -> Any:
        # A slice is copied alone, except where passing the whole memory costs nothing.
        alone = self if self._whole or get_spawning_popen() is not None else type(self)(self)
        return _opened, (type(self), alone._sealed, alone._plan, alone._range, alone._whole)


class PackedStrings(PackedList[str]):
    """A :class:`PackedList` of strings and nothing else.

    >>> from holdfast import PackedStrings
    >>> PackedStrings(["left", "right"]).index("right")
    1
    """

    __slots__ = ()

    def _check(self, items: list[Any]) -> None:
        for at, item in enumerate(items):
            if type(item) is not str:
                raise TypeError(
                    f"PackedStrings takes strings only, but item {at} is {_short(item)} "
                    f"({type(item).__name__}); PackedList takes everything"
                )


class PackedDict(_ReadOnly, Mapping[K, V_co]):
    """A read-only dict in shared memory, in the order of the original.

    >>> from holdfast import PackedDict
    >>> captions = PackedDict({"a.jpg": "a cat", "b.jpg": "a dog"})
    >>> captions["b.jpg"], "c.jpg" in captions, list(captions)
    ('a dog', False, ['a.jpg', 'b.jpg'])

    Keys are strings, paths, bytes, numbers, None, and tuples of them; values are as in PackedList.
    """

    # Keys with equal hash stand side by side in `order`, from `starts[bucket]` on. Python's own
    # hash of a string differs from process to process, hence `_hash`.
    __slots__ = ("_keys", "_order", "_sealed", "_starts", "_table", "_values")

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, items: Mapping[K, V_co] | Iterable[tuple[K, V_co]] = ()) -> None:
        plain = dict(items)
        keys, values = list(plain), list(plain.values())
        buckets = max(1, len(keys))
        if buckets >= _MOST:
            raise ValueError(f"PackedDict takes up to {_MOST - 1:,} keys, not {buckets:,}")
        hashes = array("Q", [_hash_for_good(key) % buckets for key in keys])
        where = np.frombuffer(hashes, np.uint64).astype(np.int64)
        order = np.argsort(where, kind="stable").astype(np.uint32)
        starts = np.zeros(buckets + 1, np.uint32)
        np.cumsum(np.bincount(where, minlength=buckets), out=starts[1:])
        writer = Writer()
        try:
            plans = (encode(keys, writer), encode(values, writer))
            table = (writer.write(starts.view(np.uint8)), writer.write(order.view(np.uint8)))
        except BaseException:
            writer.discard()
            raise
        self._open(writer.close(), plans, (buckets, len(keys), *table))

    def _open(self, sealed: Sealed, plans: tuple[Plan, Plan], table: tuple[int, ...]) -> None:
        buckets, count, starts, order = table
        self._sealed = sealed
        self._table = table
        self._keys: PackedList[K] = _opened(PackedList, sealed, plans[0], range(count), False)
        self._values: PackedList[V_co] = _opened(PackedList, sealed, plans[1], range(count), False)
        self._starts = sealed.view[starts : starts + 4 * (buckets + 1)].cast("I")
        self._order = sealed.view[order : order + 4 * count].cast("I")

    @property
    def pickled(self) -> int:
        """How many values found no compact form and are pickled one by one."""
        return self._values.pickled

    def _find(self, key: object) -> int | None:
        hashed = _hash(key)
        if hashed is None:
            hash(key)  # raises if the key cannot be hashed, as with a dict
            return None
        bucket = hashed % self._table[0]
        for place in range(self._starts[bucket], self._starts[bucket + 1]):
            at = self._order[place]
            if self._keys._get(at) == key:
                return at
        return None

    def __getitem__(self, key: K) -> V_co:
        at = self._find(key)
        if at is None:
            raise KeyError(key)
        return self._values._get(at)  # type: ignore[no-any-return]

    def __contains__(self, key: object) -> bool:
        return self._find(key) is not None

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[K]:
        return iter(self._keys)

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._keys)

    def values(self) -> PackedList[V_co]:  # type: ignore[override]
        """All values, as a list that shares this memory."""
        return self._values

    def items(self) -> ItemsView[K, V_co]:
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping) or len(self) != len(other):
            return NotImplemented if not isinstance(other, Mapping) else False
        return all(key in other and other[key] == value for key, value in self.items())

    def __or__(self, other: Any) -> PackedDict[Any, Any]:
        return PackedDict({**self, **other}) if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> PackedDict[Any, Any]:
        return PackedDict({**other, **self}) if isinstance(other, Mapping) else NotImplemented

    def copy(self) -> PackedDict[K, V_co]:
        """Itself: nothing in it can change."""
        return self

    def __repr__(self) -> str:
        shown = ", ".join(f"{key!r}: {value!r}" for key, value in islice(self.items(), _SHOWN))
        more = len(self) - _SHOWN
        rest = f", … {more:,} more" if more > 0 else ""
        return f"PackedDict({{{shown}{rest}}})"

    update = setdefault = popitem = __ior__ = _ReadOnly._refuse

    def __reduce__(self) -> Any:
        plans = (self._keys._plan, self._values._plan)
        return _opened, (type(self), self._sealed, plans, self._table)


class _Items(ItemsView[K, V_co]):
    """Pairs read in order, without a lookup of each key."""

    __slots__ = ()
    _mapping: PackedDict[K, V_co]

    def __iter__(self) -> Iterator[tuple[K, V_co]]:
        return zip(self._mapping._keys, self._mapping._values, strict=True)


def _opened(kind: Any, *parts: Any) -> Any:
    """A container of this class, on memory that was written before."""
    made = kind.__new__(kind)
    made._open(*parts)
    return made


def _as_list(items: Iterable[Any], name: str) -> list[Any]:
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise TypeError(
            f"{name}(items) takes a list or another iterable of values, not {_short(items)}"
        )
    return items if type(items) is list else list(items)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _hash(key: object) -> int | None:
    """Equal for equal keys, in every process; None for a value that cannot be a key."""
    kind = type(key)
    if kind is str:
        return zlib.crc32(key.encode("utf-8", "surrogatepass"))  # type: ignore[attr-defined]
    if kind is bytes:
        return zlib.crc32(key)  # type: ignore[arg-type]
    if isinstance(key, (bool, int, float, complex, np.number, np.bool_)):
        return hash(key) * 0x9E3779B97F4A7C15 >> 13 & 0xFFFFFFFFFFFF
    if key is None:
        return 1
    if isinstance(key, str):  # subclasses, numpy's too, are equal to what they hold
        return zlib.crc32(str.__str__(key).encode("utf-8", "surrogatepass"))
    if kind is PosixPath or kind is PurePosixPath:
        return zlib.crc32(str(key).encode("utf-8", "surrogatepass"))
    if kind is tuple:
        combined = 7
        for part in key:  # type: ignore[attr-defined]
            hashed = _hash(part)
            if hashed is None:
                return None
            combined = (combined * 1000003 ^ hashed) & 0xFFFFFFFFFFFF
        return combined
    return None


def _hash_for_good(key: object) -> int:
    hashed = _hash(key)
    if hashed is None:
        raise TypeError(
            "keys of a PackedDict are strings, paths, bytes, numbers, None and tuples of them; "
            f"{_short(key)} is a {type(key).__name__}"
        )
    return hashed
