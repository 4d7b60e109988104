"""Which parts of an arena are in use: a first-fit allocator, without I/O."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

GRAIN = 64
"""Offsets and sizes are multiples of this: a cache line, which also aligns vector loads."""
PAGE = 4096
LARGE = 64 << 10
"""Blocks from this size on begin and end on a page, so that their pages can be given back."""


def rounded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _rounded(nbytes: int) -> int:
    if nbytes >= LARGE:
        return rounded_up(nbytes, PAGE)
    return rounded_up(nbytes, GRAIN) or GRAIN


class Extents:
    """Which parts of ``[0, capacity)`` are in use: first fit, neighbours merged, no I/O.

    Free extents are kept in sorted lists by size class (powers of two), so that a search looks
    at one entry for each class that surely fits and scans only the class that may or may not.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % GRAIN
        self.in_use = 0
        self._used: dict[int, int] = {}
        self._free: dict[int, int] = {}
        self._free_by_end: dict[int, int] = {}
        self._classes: list[list[int]] = [[] for _ in range(64)]
        self._nonempty = 0
        if self.capacity:
            self._add_free(0, self.capacity)

    def __len__(self) -> int:
        return len(self._used)

    def used(self) -> list[tuple[int, int]]:
        return sorted(self._used.items())

    def free_extents(self) -> list[tuple[int, int]]:
        return sorted(self._free.items())

    def allocate(self, nbytes: int) -> int | None:
        size = _rounded(nbytes)
        unit = PAGE if size >= LARGE else GRAIN
        start = self._first_fit(size, unit)
        if start is None:
            return None
        offset = rounded_up(start, unit)
        self._carve(start, offset, size)
        return offset

    def reserve(self, offset: int, nbytes: int) -> None:
        """Mark as used a block that was allocated earlier, by another process."""
        size = _rounded(nbytes)
        for starts in self._classes:
            at = bisect_right(starts, offset) - 1
            if at >= 0 and offset + size <= starts[at] + self._free[starts[at]]:
                self._carve(starts[at], offset, size)
                return
        raise ValueError(f"[{offset}, {offset + size}) is not free")

    def free(self, offset: int) -> None:
        size = self._used.pop(offset)
        self.in_use -= size
        end = offset + size
        before = self._free_by_end.get(offset)
        if before is not None:
            self._drop_free(before)
            offset = before
        if end in self._free:
            end += self._drop_free(end)
        self._add_free(offset, end - offset)

    def _first_fit(self, size: int, unit: int) -> int | None:
        surely = size + unit - GRAIN
        smallest_class = size.bit_length() - 1
        classes = self._nonempty >> smallest_class << smallest_class
        best: int | None = None
        while classes:
            bit = classes & -classes
            classes ^= bit
            starts = self._classes[bit.bit_length() - 1]
            if bit >= surely:
                if best is None or starts[0] < best:
                    best = starts[0]
                continue
            for start in starts:
                if best is not None and start >= best:
                    break
                if rounded_up(start, unit) + size <= start + self._free[start]:
                    best = start
                    break
        return best

    def _carve(self, start: int, offset: int, size: int) -> None:
        end = start + self._drop_free(start)
        if offset > start:
            self._add_free(start, offset - start)
        if offset + size < end:
            self._add_free(offset + size, end - offset - size)
        self._used[offset] = size
        self.in_use += size

    def _add_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self._free_by_end[start + size] = start
        number = size.bit_length() - 1
        insort(self._classes[number], start)
        self._nonempty |= 1 << number

    def _drop_free(self, start: int) -> int:
        size = self._free.pop(start)
        del self._free_by_end[start + size]
        number = size.bit_length() - 1
        starts = self._classes[number]
        del starts[bisect_left(starts, start)]
        if not starts:
            self._nonempty ^= 1 << number
        return size
