"""Random generators that belong to the dataset: their states are kept with the worker's random
state, and restored in its replacement.

A dataset, a transform or a collate function may have generators of its own. The next batch depends
on them as it does on the three global ones, and a replacement that started with fresh copies would
make another batch. So a worker searches for them (`generator_search`) and keeps their states
wherever the global ones are kept (`randomness`).

Every link of the paths is compared before states are read: a dataset may put another generator in
the place of one at any time, for each epoch or even each sample, and to restore the one before it
would be worse than nothing.

Many datasets make a generator when they first need it, so a replacement may have no generator yet
for a state. To put one there would be wrong: what else is made on that occasion, an open file
perhaps, would be missing. Such states *wait* for the replacement's first batch. If that batch makes
the generators, it is made once more, from the right states (`items`).

What cannot be restored is said, once: see `remarks`.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import struct
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from holdfast.worker.generator_search import MOST, Kept, Link, Search, generator_state
from holdfast.worker.generator_states import State, plain_loads
from holdfast.worker.worker_rng import WorkerRng

Roots = Callable[[], Iterable[tuple[str, Any]]]
Own = Sequence[tuple[State, bytes]]
"""States in this process, to be restored in it."""

_HEAD: Final = struct.Struct("<II")  # sizes of the roster and of the states
_MAY_DIFFER: Final = (
    "The batches are delivered exactly once, but what that generator draws may differ from a run "
    "without the death."
)
_TO_BE_SURE: Final = "To be sure, make it where the dataset is made."


class Generators:
    """Those of one worker, or of one loader without workers."""

    def __init__(self, roots: Roots, room: int = 1 << 20) -> None:
        """`room` is how many bytes there are for all states."""
        self.remarks: list[tuple[str, str]] = []
        """For the user: what about, and the words."""
        self._roots = roots
        self._room = room
        self._kept: list[Kept] = []
        self._links: list[Link] = []
        self._begun: list[Any] = []
        self._waiting: dict[str, tuple[str, bytes]] = {}  # path: kind and state
        self._expected: frozenset[str] | None = None  # if set, others may have been missed before
        self._roster: list[tuple[str, str, int]] = []  # path, kind and room of each
        self._roster_bytes = b""
        self._now: list[bytes] = []
        self._last: list[bytes] | None = None  # the states that were written last ...
        self._stale = False  # ... perhaps of other generators
        self._still_waiting: list[bytes] = []  # states that wait, as far as there is room
        self._written: dict[int, tuple[bytes, list[bytes]]] = {}  # into which memory

    def __bool__(self) -> bool:
        """Whether there is anything to keep, or was."""
        return bool(self._kept or self._waiting) or self._last is not None

    @property
    def paths(self) -> list[str]:
        return [kept.path for kept in self._kept]

    @staticmethod
    def paths_in(saved: bytes) -> list[str]:
        """The paths of the generators whose states these are."""
        return [path for path, _, _ in _roster_of(saved)]

    @property
    def waiting(self) -> list[str]:
        """Paths at which there is no generator yet for the state that was there."""
        return list(self._waiting)

    # -- finding them ---------------------------------------------------------------------

    def find_all(self) -> None:
        """Find them all. Objects can be odd in unforeseen ways: a failure here is said, and is no
        reason to lose a worker or a batch."""
        try:
            left_out = self._find()
        except Exception:
            left_out = []
            self._kept, self._links = [], []
            self._remark_unknown(traceback.format_exc())
        self._stale = self._last is not None  # other ones, perhaps
        self._lay_out(left_out)
        if self._expected is not None:
            self._remark_late(self._expected)

    def _find(self) -> list[str]:
        roots = list(self._roots())
        self._begun = [*(root for _, root in roots), None]
        search = Search(roots, self._kept)
        self._kept, self._links = search.kept, search.links()
        return search.left_out

    def _lay_out(self, left_out: Sequence[str] = ()) -> None:
        """Decide where the states are written, and for which there is room."""
        roster: list[tuple[str, str, int]] = []
        kept: list[Kept] = []
        missed = list(left_out)
        room = self._room - _HEAD.size
        self._now = []
        for one in self._kept:
            raw = one.state.read()
            size = len(raw) if not one.state.varies else (len(raw) // 64 + 2) * 64
            room -= size + _in_roster(one.path)
            if room < 0:
                missed.append(one.path)
                continue
            kept.append(one)
            roster.append((one.path, one.state.kind, size))
            self._now.append(raw)
        self._still_waiting = []
        for path, (kind, raw) in self._waiting.items():
            room -= len(raw) + _in_roster(path)
            if room >= 0:
                roster.append((path, kind, len(raw)))
                self._still_waiting.append(raw)
        self._kept, self._roster = kept, roster
        self._roster_bytes = pickle.dumps(roster, 5)
        if missed:
            self._remark_left_out(missed)

    # -- keeping their states -------------------------------------------------------------

    def changed(self) -> bool:
        """Whether any state is another than when they were saved last."""
        self._now = self._read()
        return self._stale or self._now != self._last

    def _read(self) -> list[bytes]:
        if not all(map(operator.is_, self._beginnings(), self._begun)):
            self.find_all()
            return self._now
        for link in self._links:
            try:
                if link.holder[link.key] is link.value:
                    continue
            except Exception:  # there is nothing any more, or nothing can be known
                pass
            if not self._exchange(link):
                self.find_all()
                return self._now
        try:
            return [kept.state.read() for kept in self._kept]
        except Exception:  # one of a class of the user's: the search leaves it out
            self.find_all()
            return self._now

    def _beginnings(self) -> Iterator[Any]:
        """Where all paths begin, and then None: there may be fewer roots than before."""
        return itertools.chain((root for _, root in self._roots()), itertools.repeat(None))

    def _exchange(self, link: Link) -> bool:
        """Let the generator that is at the end of a path now replace the one that was there."""
        kept = link.leads_to
        if kept is None or not kept.alone:
            return False
        try:
            value = link.holder[link.key]
        except Exception:
            return False
        state = generator_state(value)
        if state is None or state.kind != kept.state.kind or state.varies:
            return False
        kept.state, kept.part.value, link.value = state, value, value
        return True

    def save(self, memory: memoryview) -> int:
        """Write the states that `changed` has read; how many bytes they take. It is the same memory
        again and again, so what is there already is not written."""
        if any(len(raw) > one[2] for raw, one in zip(self._now, self._roster, strict=False)):
            self._lay_out()
        states = [*self._now, *self._still_waiting]
        roster, before = self._written.get(id(memory), (b"", []))
        at = _HEAD.size + len(self._roster_bytes)
        if roster != self._roster_bytes:
            before = []
            memory[_HEAD.size : at] = self._roster_bytes
            total = sum(size for _, _, size in self._roster)
            _HEAD.pack_into(memory, 0, len(self._roster_bytes), total)
        before = before or [b""] * len(states)
        for raw, old, (_, _, size) in zip(states, before, self._roster, strict=True):
            if raw != old:
                memory[at : at + size] = raw.ljust(size, b"\0")
            at += size
        self._written[id(memory)] = self._roster_bytes, states
        self._last, self._stale = self._now, False
        return at

    def saved(self) -> bytes:
        """Search for them; their states now, as `restore` takes them."""
        self.find_all()
        if not self:
            return b""
        states = [*self._now, *self._still_waiting]
        sizes = [size for _, _, size in self._roster]
        body = b"".join(raw.ljust(size, b"\0") for raw, size in zip(states, sizes, strict=True))
        return _HEAD.pack(len(self._roster_bytes), len(body)) + self._roster_bytes + body

    def snapshot(self) -> Own:
        """Their states now, for this process."""
        if not self._kept:
            return ()
        raws = self._read()
        return [(kept.state, raw) for kept, raw in zip(self._kept, raws, strict=True)]

    # -- restoring them -------------------------------------------------------------------

    def restore(self, saved: bytes, *, search: bool = True) -> None:
        """Restore what `save` wrote, in this or another process. States whose generators are not
        there (yet) wait. `search`: whether there may be others than were found last."""
        self._waiting.clear()
        if saved:
            at = _HEAD.size + _HEAD.unpack_from(saved)[0]
            for path, kind, size in _roster_of(saved):
                self._waiting[path] = kind, saved[at : at + size]
                at += size
        if search:
            self.find_all()
        for kept in self._kept:
            if self._is_waited_for(kept):
                kept.state.write(self._waiting.pop(kept.path)[1])
        self._lay_out()

    def _is_waited_for(self, kept: Kept) -> bool:
        return self._waiting.get(kept.path, ("",))[0] == kept.state.kind

    def made_some(self) -> bool:
        """Search; whether there are generators now for states that wait."""
        self.find_all()
        return any(map(self._is_waited_for, self._kept))

    def give_up(self) -> None:
        """Nothing more is expected for states that wait: say so, and drop them."""
        if self._waiting:
            self._remark(
                "generators-missing",
                f"the worker that was replaced had a random generator at {_first(self.waiting)}; "
                f"its replacement has none there. {_MAY_DIFFER} {_TO_BE_SURE}",
            )
            self._waiting.clear()
            self._lay_out()

    # -- what is not known ----------------------------------------------------------------

    @property
    def in_doubt(self) -> bool:
        return self._expected is not None

    def doubt(self) -> None:
        """The states that were restored are older than the worker that saved them: it may have
        made more generators before it died."""
        self._expected = frozenset((*self.paths, *self._waiting))

    def check(self, saved: bytes) -> None:
        """Say if there are other generators here than those whose states were restored."""
        known = set(self.paths_in(saved))
        more = [one for one in self.paths if one not in known and not WorkerRng.owns(one)]
        if more:
            self._remark(
                "generators-changed",
                f"the replacement of a worker has a random generator at {_first(more)} that cannot "
                "be restored: the worker before had removed it, or has put there one that is also "
                "elsewhere, or had not made it yet, and a sample that was loaded for a test has "
                f"made it here. {_MAY_DIFFER} {_TO_BE_SURE}",
            )

    def _remark_late(self, expected: frozenset[str]) -> None:
        new = (path for path in self.paths if path not in expected)
        late = next((path for path in new if not WorkerRng.owns(path)), None)
        if late is None:
            return
        self._expected = None
        self._remark(
            "generators-late",
            f"a random generator was made at {late} after a worker had been replaced. Whether the "
            "worker before had made one there too, shortly before its death, is not known. "
            f"{_MAY_DIFFER} {_TO_BE_SURE}",
        )

    def _remark_unknown(self, error: str) -> None:
        self._remark(
            "generators-unknown",
            "whether the dataset has random generators of its own is not known: the search for "
            "them failed. After a worker's death its batches are still delivered exactly once, "
            "but what such generators draw may differ from a run without the death. This is a "
            f"mistake of holdfast's; please report it.\n{error}",
        )

    def _remark_left_out(self, paths: list[str]) -> None:
        self._remark(
            "generators-left-out",
            f"the state of {_first(paths)}, random generators of the dataset, is not kept: there "
            f"is room for {MOST} generators and {self._room >> 10} KiB, and some cannot be read "
            "or are inside a set, an iterator or a function's cache. "
            "After a worker's death its batches are still delivered exactly once, but what "
            "those generators draw differs from a run without the death. Derive them from the "
            "index of the sample, use fewer of them, or keep them in attributes, lists or "
            "dicts.",
        )

    def _remark(self, about: str, words: str) -> None:
        self.remarks.append((about, words))


def _first(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _roster_of(saved: bytes) -> list[tuple[str, str, int]]:
    if not saved:
        return []
    size, _ = _HEAD.unpack_from(saved)
    found: list[tuple[str, str, int]] = plain_loads(saved[_HEAD.size : _HEAD.size + size])
    return found


def _in_roster(path: str) -> int:
    return len(path.encode("utf-8", "surrogatepass")) + 64
