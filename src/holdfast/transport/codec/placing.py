"""Where the spans of a batch go: into blocks of the arena, or into the frame."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from holdfast.transport.arena import Arena, Block, Bytes
from holdfast.transport.codec.frame import ALIGN, PADDING, SHARED, SMALL, STORAGE, Entry
from holdfast.transport.codec.tensors import ADDRESS, CODE, KEY, NBYTES, OWNER, Span

COMMON = 256 << 10
"""Small spans that do not fit into the frame share blocks of this size."""

_Place = tuple[int, int] | None


def place_spans(spans: list[Span], room: Room) -> tuple[list[Entry], list[Entry]]:
    """The table's entries, and where the storages lie that several of them share."""
    if len({span[KEY] for span in spans if span[CODE] != STORAGE}) == len(spans):
        places = room.place_all([(span[ADDRESS], span[NBYTES]) for span in spans])
        return [
            (code, place, size, layout)
            for (_, _, _, code, size, layout, _), place in zip(spans, places, strict=True)
        ], []
    segments = _Segments(spans)
    places = room.place_all(segments.pieces)
    entries = []
    for span, piece in zip(spans, segments.of_span, strict=True):
        _, address, _, code, size, layout, _ = span
        place = places[piece]
        if place is not None and piece in segments.shared:
            place = (segments.shared[piece], address - segments.pieces[piece][0])
            if code >= 0:
                code |= SHARED
        entries.append((code, place, size, layout))
    return entries, [(places[piece], segments.pieces[piece][1]) for piece in segments.shared]


class _Segments:
    """Spans of one torch storage, joined where that does not copy too many unused bytes."""

    def __init__(self, spans: list[Span]) -> None:
        self.pieces: list[tuple[int, int]] = []  # address and size
        self.of_span = [0] * len(spans)
        self.shared: dict[int, int] = {}  # piece: its number among the shared ones
        by_key: dict[int, list[int]] = {}
        for number, span in enumerate(spans):
            by_key.setdefault(span[KEY], []).append(number)
        for members in by_key.values():
            first = spans[members[0]]
            if len(members) > 1:
                self._join(spans, sorted(members, key=lambda number: spans[number][ADDRESS]))
            else:
                self._add(first[ADDRESS], first[NBYTES], members)
            if len(members) > 1 or first[CODE] == STORAGE:
                for number in members:
                    self.shared.setdefault(self.of_span[number], len(self.shared))

    def _join(self, spans: list[Span], members: list[int]) -> None:
        owner: Any = spans[members[0]][OWNER]
        storage = owner if isinstance(owner, torch.UntypedStorage) else owner.untyped_storage()
        base = storage.data_ptr()
        runs: list[tuple[int, int, list[int]]] = []
        for number in members:
            start = spans[number][ADDRESS]
            end = start + spans[number][NBYTES]
            start -= (start - base) % ALIGN  # so that every dtype's offset is a whole number
            if runs and start <= runs[-1][1]:
                first_byte, last_byte, together = runs[-1]
                together.append(number)
                runs[-1] = (first_byte, max(last_byte, end), together)
            else:
                runs.append((start, end, [number]))
        covered = sum(end - start for start, end, _ in runs)
        start, end = runs[0][0], runs[-1][1]
        if end - start <= 2 * covered:
            runs = [(start, end, members)]
        for start, end, together in runs:
            self._add(start, end - start, together)

    def _add(self, address: int, nbytes: int, members: list[int]) -> None:
        for number in members:
            self.of_span[number] = len(self.pieces)
        self.pieces.append((address, nbytes))


class Room:
    """Finds a place for each piece of memory: (number of a memory, offset in it).

    Memories are numbered from 0 for blocks; -1 is the small part of the frame, and -2, -3, ... are
    its large parts, so that the reader can index one list.
    """

    def __init__(self, arena: Arena | None) -> None:
        self.arena = arena
        self.blocks: dict[int, int] = {}  # offset: number
        self.block_sizes: list[int] = []
        self.small: list[bytes] = []
        self.small_bytes = 0
        self.large: list[Bytes] = []
        self._taken: list[Block] = []  # alive until they are published
        self._claims: list[tuple[int, int]] = []

    def place_all(self, pieces: Iterable[tuple[int, int]]) -> list[_Place]:
        places: list[_Place] = []
        small: list[tuple[int, int, int]] = []
        total = 0
        for address, nbytes in pieces:
            if nbytes >= SMALL:
                places.append(self._place_large(address, nbytes))
            else:
                if nbytes:
                    small.append((len(places), address, nbytes))
                    total += nbytes + -nbytes % ALIGN
                places.append(None)
        if total > SMALL and self.arena is not None:
            small = self._place_together(small, places)
        for number, address, nbytes in small:
            places[number] = self._place_small(address, nbytes)
        return places

    def place_bytes(self, data: bytes) -> int | None:
        """The number of a block that holds a copy of `data`."""
        block = self._take(len(data))
        if block is None:
            return None
        block.array[:] = np.frombuffer(data, np.uint8)
        return self.blocks[block.offset]

    def publish(self) -> None:
        if self.arena is not None:
            for offset in self.blocks:
                self.arena.publish(offset)

    def _place_large(self, address: int, nbytes: int) -> _Place:
        if self.arena is not None:
            found = self.arena.find(address, nbytes)
            if found is not None and self._claim(address, nbytes, found[0]):
                return self._number(found[0], self.arena.nbytes_of(found[0])), found[1]
            block = self._take(nbytes)
            if block is not None:
                ctypes.memmove(self.arena.base + block.offset, address, nbytes)
                return self.blocks[block.offset], 0
        self.large.append(_raw(address, nbytes))
        return -1 - len(self.large), 0

    def _place_small(self, address: int, nbytes: int) -> _Place:
        at = self.small_bytes
        self.small.append(ctypes.string_at(address, nbytes))
        if nbytes % ALIGN:
            self.small.append(PADDING[nbytes % ALIGN :])
            nbytes += ALIGN - nbytes % ALIGN
        self.small_bytes = at + nbytes
        return -1, at

    def _place_together(
        self, pieces: list[tuple[int, int, int]], places: list[_Place]
    ) -> list[tuple[int, int, int]]:
        """Put small pieces into common blocks; returns the pieces that found no room."""
        first = 0
        while first < len(pieces):
            last, total = first, 0
            while last < len(pieces) and total < COMMON:
                total += pieces[last][2] + -pieces[last][2] % ALIGN
                last += 1
            block = self._take(total)
            if block is None or self.arena is None:
                break
            at = 0
            for number, address, nbytes in pieces[first:last]:
                ctypes.memmove(self.arena.base + block.offset + at, address, nbytes)
                places[number] = (self.blocks[block.offset], at)
                at += nbytes + -nbytes % ALIGN
            first = last
        return pieces[first:]

    def _take(self, nbytes: int) -> Block | None:
        block = self.arena.take(nbytes) if self.arena is not None else None
        if block is not None:
            self._taken.append(block)
            self._number(block.offset, nbytes)
        return block

    def _number(self, offset: int, nbytes: int) -> int:
        number = self.blocks.setdefault(offset, len(self.blocks))
        if number == len(self.block_sizes):
            self.block_sizes.append(nbytes)
        return number

    def _claim(self, address: int, nbytes: int, block: int) -> bool:
        """Whether these bytes of a block may be sent without a copy.

        Not if another span of this batch already covers them, because two storages must not become
        one. And not if they are a small part of the block, because a user who keeps them would keep
        the whole block.
        """
        if self.arena is None or 4 * nbytes < self.arena.nbytes_of(block):
            return False
        end = address + nbytes
        if any(address < other_end and other < end for other, other_end in self._claims):
            return False
        self._claims.append((address, end))
        return True


class _Address:
    """Raw memory, described in NumPy's array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _raw(address: int, nbytes: int) -> Bytes:
    return np.asarray(_Address(address, nbytes))
