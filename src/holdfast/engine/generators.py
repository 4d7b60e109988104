"""Random generators that belong to the dataset: found, kept with the worker's random state, and
brought back in its replacement.

A dataset, a transform or a collate function may have generators of its own. They are part of what
the next batch depends on, as the three global ones are, and a replacement that started with fresh
copies would make another batch. So a worker looks for them when it starts and keeps their states
wherever the global ones are kept (`randomness`).

A generator is known by the *path* that leads to it (``dataset.transform.transforms[2].rng``), which
is the same in the worker that died and in its replacement; the same generator on several paths
counts once. Both look first when they have run ``worker_init_fn``, and a generator keeps the path
by which it was found then: a shorter one that comes later (``dataset.current.rng``, where
``current`` is another transform for each sample) may lead elsewhere in the replacement. Every link
of those paths is compared before states are read: a dataset may put another generator in the place
of one at any time, for each epoch or even each sample, and to bring back the one before it would be
worse than nothing.

Many datasets make a generator when they first need it. So the worker looks again (`randomness` says
when). And a replacement may find that there is nothing yet at a path for which it has a state. To
put a generator there would be wrong (what else is made on that occasion, an open file perhaps,
would be missing); so such states *wait* until the replacement has made a batch by which a generator
comes into being there. Then it makes that batch once more, from the right states; and other
generators that the first try has made are taken away again (`places`).

Where a generator comes into being in a replacement, and it is not known whether there was one in
the worker before, that is said.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import pickle
import struct
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import Any, Final

from holdfast.engine.births import are_seen
from holdfast.engine.places import Places
from holdfast.engine.states import GENERATORS, State, state_of
from holdfast.memory.attributes import is_a
from holdfast.memory.parts import KEYS, WIDTH, Part, wide

__all__ = ["MOST", "PATIENCE", "Generators", "Own", "bring_back_own"]

Roots = Callable[[], Iterable[tuple[str, Any]]]
Own = Sequence[tuple[State, bytes]]
"""States in this process, to be brought back in it."""
Doubted = Callable[[str], bool]
"""Whether there may have been a generator of this kind that was not seen."""

MOST: Final = 1000
"""Generators that are kept. Each costs about a microsecond after every batch."""
PATIENCE: Final = 8
"""Batches for which a state waits. Each takes as much longer as looking does."""
_DEPTH: Final = 12
_STEPS_INSIDE: Final = 4  # an iterator over iterators over a list
_OBJECTS: Final = 10_000  # that are looked at
_HEAD: Final = struct.Struct("<II")  # sizes of the roster and of the states


# Objects with contents that have no order, or none that a replacement would see too: generators in
# them are not kept, and that is said. (A Python generator makes its own anew when it is replayed.)
_OPAQUE: Final[frozenset[Any]] = frozenset(
    {set, frozenset, MappingProxyType, functools._lru_cache_wrapper, map, filter, zip, enumerate}
    | {itertools.cycle, itertools.repeat, itertools.chain, itertools.islice, itertools.starmap}
    | {type(iter(())), type(iter([])), type(iter({}.values()))}
)


class _Kept:
    """A generator whose state is kept."""

    __slots__ = ("alone", "part", "path", "state")

    def __init__(self, part: Part, state: State) -> None:
        self.part = part
        self.path = part.path
        self.state = state
        self.alone = True  # no other path leads to it


class _Names:
    """Which path a generator is known by, once there were some before."""

    def __init__(self, before: list[_Kept], roots: dict[str, Any]) -> None:
        self._free: dict[str, _Kept] = {one.path: one for one in before}
        self.in_place: dict[int, _Kept] = {}
        on_the_way = [one for one in before if _leads_to(one.part.owner, roots)]
        for kept in on_the_way:
            if _now(kept.part, roots) is kept.part.value:
                self._keeps(kept)
        for kept in on_the_way:
            value = _now(kept.part, roots)
            state = state_of(value) if is_a(value, GENERATORS) else None
            if kept.path not in self._free or state is None or not _readable(state):
                continue
            if id(state.subject) not in self.in_place:  # another one, in the same place
                kept.part.value, kept.state = value, state
                self._keeps(kept)

    def _keeps(self, kept: _Kept) -> None:
        if self.in_place.setdefault(id(kept.state.subject), kept) is kept:
            del self._free[kept.path]

    def give_to(self, found: list[_Kept]) -> None:
        """Names for the others: of the place, if one was known by it; or else the one they had;
        or else a new one."""
        moved = {id(one.state.subject): path for path, one in self._free.items()}
        taken = {one.path for one in self.in_place.values()}
        unnamed = []
        for one in found:
            if one.path in self._free:
                taken.add(one.path)
            else:
                unnamed.append(one)
        for one in unnamed:
            path = moved.get(id(one.state.subject), one.path)
            if path in taken:
                path = one.path
            number = 2
            while path in taken:
                path, number = f"{one.path}#{number}", number + 1
            one.path = path
            taken.add(path)


class _Link:
    """A step of a path: what is in this place should be what was there."""

    __slots__ = ("holder", "key", "leads_to", "value")

    def __init__(self, part: Part, leads_to: _Kept | None) -> None:
        quick = type(part.holder) in (dict, list) and type(part.key) in KEYS
        self.holder = part.holder if quick else _Place(part)
        self.key = part.key
        self.value = part.value
        self.leads_to = leads_to


class _Place:
    """Read like a container, for what is none."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def __getitem__(self, key: Any) -> Any:
        return self._part.now()


def bring_back_own(own: Own) -> None:
    for state, raw in own:
        if state.read() != raw:
            state.write(raw)


class Generators:
    """Those of one worker, or of one loader without workers."""

    def __init__(self, roots: Roots, room: int = 1 << 20) -> None:
        """`room` is how many bytes there are for all states."""
        self.remarks: list[tuple[str, str]] = []  # for the user: what about, and the words
        self._roots = roots
        self._room = room
        self._kept: list[_Kept] = []
        self._links: list[_Link] = []
        self._begun: list[Any] = []
        self._waiting: dict[str, tuple[str, bytes]] = {}  # path: kind and state
        self._before: dict[int, State] = {}  # those there were before something was tried
        self._patience = PATIENCE
        self._told: set[str] = (
            set()
        )  # paths that are waited for: it was said that they may not come
        self._expected: frozenset[str] = frozenset()  # paths, and ...
        self._doubted: Doubted | None = None  # ... kinds that may have been at others before
        self._roster: list[tuple[str, str, int]] = []  # path, kind and room of each
        self._roster_bytes = b""
        self._now: list[bytes] = []
        self._last: list[bytes] | None = None  # the states that were written last ...
        self._stale = False  # ... perhaps of others
        self._still_waiting: list[bytes] = []  # states that wait, as far as there is room
        self._written: dict[int, tuple[bytes, list[bytes]]] = {}  # into which memory

    def __bool__(self) -> bool:
        """Whether there is anything to keep, or was."""
        return bool(self._kept or self._waiting) or self._last is not None

    @property
    def paths(self) -> list[str]:
        return [kept.path for kept in self._kept]

    @property
    def waiting(self) -> list[str]:
        """Paths at which there is no generator yet for the state that was there."""
        return list(self._waiting)

    # -- finding them ---------------------------------------------------------------------

    def look(self, parts: Iterable[Part] | None = None) -> None:
        """Find them all, among these parts if they have been walked through already. Objects can be
        odd in ways nobody thinks of: what fails here is said, and is no reason to lose a worker, or
        a batch."""
        try:
            left_out = self._find(parts)
        except Exception:
            left_out = []
            self._kept, self._links = [], []
            self._remark_unknown(traceback.format_exc())
        self._stale = self._last is not None  # other ones, perhaps
        self._lay_out(left_out)
        if self._doubted is not None:
            self._doubt_what_is_new(self._doubted)

    def _beginnings(self) -> Iterator[Any]:
        """Where all paths begin; and as many again of nothing, for one that is there no more."""
        return itertools.chain((root for _, root in self._roots()), itertools.repeat(None))

    def _find(self, parts: Iterable[Part] | None) -> list[str]:
        left_out: list[str] = []
        roots = list(self._roots())
        self._begun = [*(root for _, root in roots), None]
        old = _Names(self._kept, dict(roots))
        kept = old.in_place
        for one in kept.values():
            one.alone = True
        new: dict[int, _Kept] = {}
        hidden: list[tuple[Part, State]] = []
        for part in self._walk(roots) if parts is None else parts:
            if type(part.value) in _OPAQUE:
                hidden += _inside_of(part)
            if not is_a(part.value, GENERATORS):
                continue
            state = state_of(part.value)
            if state is None:
                continue
            known = kept.get(id(state.subject)) or new.get(id(state.subject))
            if known is not None:
                known.alone &= part.path == known.part.path
            elif len(kept) + len(new) == MOST or not _readable(state):
                left_out.append(part.path)
            else:
                new[id(state.subject)] = _Kept(part, state)
                left_out += _beyond(part)
        left_out += [
            f"{part.path}.<inside>"
            for part, state in hidden
            if id(state.subject) not in kept and id(state.subject) not in new
        ]
        old.give_to(list(new.values()))
        links: dict[Part, _Link] = {}
        self._kept = [*kept.values(), *new.values()]
        for one in self._kept:
            _add_links(links, one.part, one)
        self._links = list(links.values())
        return left_out

    def _walk(self, roots: Iterable[tuple[str, Any]]) -> Iterator[Part]:
        return wide(roots, depth=_DEPTH, most=_OBJECTS, closed=GENERATORS)

    def _lay_out(self, left_out: Sequence[str] = ()) -> None:
        """Decide where the states are written, and for which there is room."""
        roster: list[tuple[str, str, int]] = []
        kept: list[_Kept] = []
        missed = list(left_out)
        room = self._room - _HEAD.size
        self._now = []
        for one in self._kept:
            raw = one.state.read()
            size = _room_for(one.state, raw)
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

    def _remark_unknown(self, error: str) -> None:
        self.remarks.append(
            (
                "generators-unknown",
                "whether the dataset has random generators of its own is not known: looking for "
                "them failed. After a worker's death its batches are still delivered exactly once, "
                "but what such generators draw may differ from a run without the death. This is a "
                f"mistake of holdfast's; please report it.\n{error}",
            )
        )

    def _remark_left_out(self, paths: list[str]) -> None:
        first = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self.remarks.append(
            (
                "generators-left-out",
                f"the state of {first}, random generators of the dataset, is not kept: there is "
                f"room for {MOST} generators and {self._room >> 10} KiB, and some cannot be read "
                "or are inside a set, an iterator or a function's cache. "
                "After a worker's death its batches are still delivered exactly once, but what "
                "those generators draw differs from a run without the death. Derive them from the "
                "index of the sample, use fewer of them, or keep them in attributes, lists or "
                "dicts.",
            )
        )

    # -- keeping their states -------------------------------------------------------------

    def changed(self) -> bool:
        """Whether any state is another than when they were saved last."""
        self._now = self._read()
        return self._stale or self._now != self._last

    def _read(self) -> list[bytes]:
        if not all(map(operator.is_, self._beginnings(), self._begun)):
            self.look()
            return self._now
        for link in self._links:
            try:
                if link.holder[link.key] is link.value:
                    continue
            except Exception:  # there is nothing any more, or nothing can be known
                pass
            if not self._exchange(link):
                self.look()
                return self._now
        try:
            return [kept.state.read() for kept in self._kept]
        except Exception:  # one of a class we do not know: it is left out then
            self.look()
            return self._now

    def _exchange(self, link: _Link) -> bool:
        """Take the generator that is at the end of a path now for the one that was."""
        kept = link.leads_to
        if kept is None or not kept.alone:
            return False
        try:
            value = link.holder[link.key]
        except Exception:
            return False
        state = state_of(value) if is_a(value, GENERATORS) else None
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

    def saved(self, looked: bool = False) -> bytes:
        """Their states now, as `restore` takes them; `looked` if all are known, and nothing was
        drawn since that was found out."""
        if not looked:
            self.look()
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

    # -- bringing them back ---------------------------------------------------------------

    def restore(self, saved: bytes) -> None:
        """Bring back what `save` wrote, in this or another process. States of generators that are
        not there (yet) wait."""
        self._waiting.clear()
        self._before = {}
        if saved:
            roster, _ = _HEAD.unpack_from(saved)
            at = _HEAD.size + roster
            for path, kind, size in _roster_of(saved):
                self._waiting[path] = kind, saved[at : at + size]
                at += size
        self.arrived()

    def arrived(self, looked: bool = False) -> None:
        """Give states that wait to generators that are there now; `looked` if all are known."""
        if not looked:
            self.look()
        for kept in self._kept:
            kind, raw = self._waiting.get(kept.path, ("", b""))
            if kind == kept.state.kind:
                del self._waiting[kept.path]
                kept.state.write(raw)
        self._lay_out()

    def may_arrive(self, born: bool) -> bool:
        """Whether it is worth looking: generators were seen to be `born`, or would not be seen, or
        were found already."""
        if born or any(not are_seen(kind) for kind, _ in self._waiting.values()):
            return True
        return any(one.path in self._waiting for one in self._kept)

    def some_are_there(self) -> bool:
        """Look whether there are generators now for states that wait."""
        self.look()
        return any(self._waiting.get(one.path, ("",))[0] == one.state.kind for one in self._kept)

    def places(self) -> Places:
        """What is where now, for `take_back`. This looks too, in the same walk."""
        parts = list(self._walk(self._roots()))
        self.look(parts)
        self._before = {id(one.state.subject): one.state for one in self._kept}
        return Places(parts)

    def take_back(self, places: Places) -> None:
        """Take away what has come into being since, but for what is waited for."""
        self.look()
        stays = None
        new = (one for one in self._kept if id(one.state.subject) not in self._before)
        for one in [one for one in new if one.path not in self._waiting]:
            if not places.take_away(one.part):
                stays = one.path
        self._before = {}
        self.look()
        if stays is not None:
            self.remarks.append(
                (
                    "generators-again",
                    f"the replacement of a worker has made the random generator at {stays} in a "
                    "sample that did not count, and will make it no more. The batches are "
                    "delivered exactly once, but what that generator draws may differ from a run "
                    "without the death. To be sure, make it where the dataset is made.",
                )
            )

    def missing(self) -> None:
        """A batch was made, and still there is nothing for some states: say so; and do not wait for
        ever, since every batch takes longer meanwhile."""
        self._tell_missing(
            f"If one is made there in the next {PATIENCE:,} batches of the worker, it goes on "
            "where that one was. Otherwise"
        )
        self._patience -= 1
        if not self._patience:
            self.give_up()

    def give_up(self) -> None:
        """Nothing will come into being for the states that wait: say so, and go on without."""
        self._tell_missing("So")
        self._waiting.clear()
        self._lay_out()

    def _tell_missing(self, otherwise: str) -> None:
        paths = [path for path in self._waiting if path not in self._told]
        self._told.update(paths)
        if paths:
            first = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
            self.remarks.append(
                (
                    "generators-missing",
                    f"the worker that was replaced had a random generator at {first}; its "
                    f"replacement has none there yet. {otherwise} the batches are delivered "
                    "exactly once, but what is drawn from that generator may differ from a run "
                    "without the death. To be sure, make it where the dataset is made.",
                )
            )

    # -- what is not known ----------------------------------------------------------------

    @property
    def in_doubt(self) -> bool:
        return self._doubted is not None

    def doubt(self, doubted: Doubted) -> None:
        """What was brought back is from a worker that had not looked at last: it may have had
        more, of the kinds that are `doubted`, than is known."""
        self._expected = frozenset((*self.paths, *self._waiting))
        self._doubted = doubted

    def check(self, saved: bytes) -> None:
        """Say if there are others here than those whose states were brought back."""
        known = {path for path, _, _ in _roster_of(saved)}
        more = next((one.path for one in self._kept if one.path not in known), None)
        if more is not None:
            self.remarks.append(
                (
                    "generators-changed",
                    f"the worker that was replaced had taken away the random generator at {more}, "
                    "or had put one there that is also elsewhere; its replacement begins with the "
                    "one of the dataset's first copy. The batches are delivered exactly once, but "
                    "what that generator draws may differ from a run without the death.",
                )
            )

    def _doubt_what_is_new(self, doubted: Doubted) -> None:
        new = (one for one in self._kept if one.path not in self._expected)
        late = next((one.path for one in new if doubted(one.state.kind)), None)
        if late is None:
            return
        self._doubted = None
        self.remarks.append(
            (
                "generators-late",
                f"a random generator was made at {late} after a worker had been replaced. Whether "
                "the worker before had made one there too, shortly before its death, is not known. "
                "The batches are delivered exactly once, but what that generator draws may "
                "differ from a run without the death. To be sure, make it where the dataset is "
                "made.",
            )
        )


def _roster_of(saved: bytes) -> list[tuple[str, str, int]]:
    if not saved:
        return []
    roster, _ = _HEAD.unpack_from(saved)
    found: list[tuple[str, str, int]] = pickle.loads(saved[_HEAD.size : _HEAD.size + roster])
    return found


def _readable(state: State) -> bool:
    """Whether a generator, of a class we do not know perhaps, gives its state away."""
    try:
        state.read()
    except Exception:
        return False
    return True


def _leads_to(part: Part | None, roots: dict[str, Any]) -> bool:
    """Whether all steps up to this one lead where they did."""
    while part is not None:
        if _now(part, roots) is not part.value:
            return False
        part = part.owner
    return True


def _now(part: Part, roots: dict[str, Any]) -> Any:
    if part.owner is None and not part.exchangeable and part.label in roots:
        return roots[part.label]
    try:
        return part.now()
    except Exception:
        return None  # there is nothing any more


def _inside_of(part: Part) -> Iterator[tuple[Part, State]]:
    """Generators in an object that is not looked through; the collector is asked for them."""
    root = part
    while root.owner is not None:
        root = root.owner
    if root.label == "iterator":
        return  # of a stream, which makes them anew when it is replayed
    level = [part.value]
    for _ in range(_STEPS_INSIDE):
        inner = gc.get_referents(*level)[:WIDTH]
        for one in inner:
            state = state_of(one) if is_a(one, GENERATORS) else None
            if state is not None:
                yield part, state
        level = [one for one in inner if type(one) in _OPAQUE or type(one) in (dict, list, tuple)]
        if not level:
            return


def _beyond(part: Part) -> list[str]:
    """Where there are more, in a container of which only the beginning is looked at."""
    owner = part.owner
    if owner is None or part.label != f"[{WIDTH - 1}]" or not is_a(owner.value, (list, tuple)):
        return []
    return [f"{owner.path}[{WIDTH}]"] if len(owner.value) > WIDTH else []


def _in_roster(path: str) -> int:
    return len(path.encode("utf-8", "surrogatepass")) + 64


def _room_for(state: State, raw: bytes) -> int:
    return len(raw) if not state.varies else (len(raw) // 64 + 2) * 64


def _add_links(links: dict[Part, _Link], part: Part, kept: _Kept) -> None:
    """All steps of a path that can come to lead somewhere else."""
    step: Part | None = part
    while step is not None and step not in links:
        if step.exchangeable:
            links[step] = _Link(step, kept if step is part else None)
        step = step.owner
