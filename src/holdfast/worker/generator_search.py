"""Finds the random generators that belong to a dataset, and gives each a name.

A generator is known by the *path* that leads to it (``dataset.transform.transforms[2].rng``), which
is the same in the worker that died and in its replacement. The same generator on several paths
counts once. Both processes search first when they have run ``worker_init_fn``, and a generator
keeps the path by which it was found then: a shorter one that comes later (``dataset.current.rng``,
where ``current`` is another transform for each sample) may lead elsewhere in the replacement.

The *links* of a path are its steps that a dataset may change: as long as each leads where it did,
no new search is needed.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any, Final

from holdfast.introspection.attributes import is_a
from holdfast.introspection.dataset_parts import KEYS, WIDTH, Part, wide
from holdfast.worker.generator_states import GENERATORS, State, state_of

MOST: Final = 1000
"""Generators that are kept. Each costs about a microsecond after every batch."""
_DEPTH: Final = 12
_STEPS_INSIDE: Final = 4  # an iterator over iterators over a list
_OBJECTS: Final = 10_000  # that are visited

# Objects whose contents have no order, or none that a replacement would see too: generators in them
# are not kept, and that is said. (A Python generator makes its own anew when it is replayed.)
_OPAQUE: Final[frozenset[Any]] = frozenset(
    {set, frozenset, MappingProxyType, type(functools.lru_cache(id)), map, filter, zip, enumerate}
    | {itertools.cycle, itertools.repeat, itertools.chain, itertools.islice, itertools.starmap}
    | {type(iter(())), type(iter([])), type(iter({}.values()))}
)


class Kept:
    """A generator whose state is kept."""

    __slots__ = ("alone", "part", "path", "state")

    def __init__(self, part: Part, state: State) -> None:
        self.part = part
        self.path = part.path
        self.state = state
        self.alone = True  # no other path leads to it


class Link:
    """A step of a path: the object in this place should be the one that was there."""

    __slots__ = ("holder", "key", "leads_to", "value")

    def __init__(self, part: Part, leads_to: Kept | None) -> None:
        quick = type(part.holder) in (dict, list) and type(part.key) in KEYS
        self.holder = part.holder if quick else _Location(part)
        self.key = part.key
        self.value = part.value
        self.leads_to = leads_to


class _Location:
    """Makes `holder[key]` read a part whose holder is no simple container."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def __getitem__(self, key: Any) -> Any:
        return self._part.now()


def generator_state(value: Any) -> State | None:
    """The state of a value that is a generator; None for everything else."""
    return state_of(value) if is_a(value, GENERATORS) else None


class Search:
    """One search: which generators there are, and which are left out."""

    def __init__(self, roots: list[tuple[str, Any]], before: list[Kept]) -> None:
        """`before` are those that the search before this one has found."""
        self.left_out: list[str] = []
        names = _Names(before, dict(roots))
        known = names.in_place
        for one in known.values():
            one.alone = True
        new: dict[int, Kept] = {}
        hidden: list[tuple[Part, State]] = []
        for part in wide(roots, depth=_DEPTH, most=_OBJECTS, closed=GENERATORS):
            if type(part.value) in _OPAQUE:
                hidden += _inside_of(part)
            state = generator_state(part.value)
            if state is None:
                continue
            found = known.get(id(state.subject)) or new.get(id(state.subject))
            if found is not None:
                found.alone &= part.path == found.part.path
            elif len(known) + len(new) == MOST or not _readable(state):
                self.left_out.append(part.path)
            else:
                new[id(state.subject)] = Kept(part, state)
                self.left_out += _beyond(part)
        self.left_out += [
            f"{part.path}.<inside>"
            for part, state in hidden
            if id(state.subject) not in known and id(state.subject) not in new
        ]
        names.give_to(list(new.values()))
        self.kept = [*known.values(), *new.values()]

    def links(self) -> list[Link]:
        """All steps of the paths that can come to lead somewhere else."""
        links: dict[Part, Link] = {}
        for kept in self.kept:
            step: Part | None = kept.part
            while step is not None and step not in links:
                if step.exchangeable:
                    links[step] = Link(step, kept if step is kept.part else None)
                step = step.owner
        return list(links.values())


class _Names:
    """Which path a generator is known by, if there were some before."""

    def __init__(self, before: list[Kept], roots: dict[str, Any]) -> None:
        self._free: dict[str, Kept] = {one.path: one for one in before}
        self.in_place: dict[int, Kept] = {}
        on_the_way = [one for one in before if _leads_to(one.part.owner, roots)]
        for kept in on_the_way:
            if _now(kept.part, roots) is kept.part.value:
                self._keeps(kept)
        for kept in on_the_way:
            value = _now(kept.part, roots)
            state = generator_state(value)
            if kept.path not in self._free or state is None or not _readable(state):
                continue
            if id(state.subject) not in self.in_place:  # another one, in the same place
                kept.part.value, kept.state = value, state
                self._keeps(kept)

    def _keeps(self, kept: Kept) -> None:
        if self.in_place.setdefault(id(kept.state.subject), kept) is kept:
            del self._free[kept.path]

    def give_to(self, found: list[Kept]) -> None:
        """Name the others: by the path of the place, if one was known by it; else by the path they
        had before; else by a new one."""
        moved = {id(one.state.subject): path for path, one in self._free.items()}
        taken = {one.path for one in self.in_place.values()}
        taken |= {one.path for one in found if one.path in self._free}
        for one in found:
            if one.path in self._free:
                continue
            path = moved.get(id(one.state.subject), one.path)
            if path in taken:
                path = one.path
            number = 2
            while path in taken:
                path, number = f"{one.path}#{number}", number + 1
            one.path = path
            taken.add(path)


def _readable(state: State) -> bool:
    """Whether a generator, perhaps of a class of the user's, lets its state be read."""
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
    """Generators in an opaque object, found by the garbage collector's references."""
    root = part
    while root.owner is not None:
        root = root.owner
    if root.label == "iterator":
        return  # of a stream, which makes them anew when it is replayed
    level = [part.value]
    for _ in range(_STEPS_INSIDE):
        inner = gc.get_referents(*level)[:WIDTH]
        for one in inner:
            state = generator_state(one)
            if state is not None:
                yield part, state
        level = [one for one in inner if type(one) in _OPAQUE or type(one) in (dict, list, tuple)]
        if not level:
            return


def _beyond(part: Part) -> Iterable[str]:
    """Where there may be more, in a container of which only the beginning is visited."""
    owner = part.owner
    if owner is None or part.label != f"[{WIDTH - 1}]" or not is_a(owner.value, (list, tuple)):
        return []
    return [f"{owner.path}[{WIDTH}]"] if len(owner.value) > WIDTH else []
