"""What an epoch draws from its sampler, and how another run gets to the same place in it.

A sampler is asked for indices ahead of the batches that the consumer has. So its present state says
little. There are two ways back to a place in the middle of an epoch:

- A sampler, or its iterator, may have ``state_dict`` and ``load_state_dict``. Then it is asked for
  its state after every draw, and the one after the last batch that the consumer has had is loaded.
- All others are started again from the random generators as they were at the start of the epoch,
  and asked for as many indices as before. No sample is loaded for that.

The generators are the default ones of ``torch``, ``random`` and ``numpy.random``, the loader's, and
those that are attributes of the samplers. The default ones belong to the program. They are put back
afterwards: in the run that was broken off the same draws were made long before, when its epoch
began.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from holdfast.engine.checkpoint import Checkpoint
from holdfast.samples.account import Account
from holdfast.samples.policy import Policy
from holdfast.samples.substitute import copy_index, keys_of
from holdfast.worker.batch_fingerprint import fingerprint
from holdfast.worker.fetch import has_state
from holdfast.worker.generator_states import (
    State,
    default_generators_kept,
    global_states,
    state_of,
)

log = logging.getLogger("holdfast")

_INNER: Final = ("sampler", "batch_sampler", "base_sampler")
_DEEPEST: Final = 4
_SELDOM: Final = 64  # draws after which old states are dropped
_DRAW_NOTHING: Final = (SequentialSampler, DistributedSampler, BatchSampler, list, tuple, range)
_DRAW_FROM_TORCH: Final = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def samplers_of(loader: Any) -> dict[str, Any]:
    """The sampler that gives a loader its indices, and those inside it, with the names of the
    attributes that lead there."""
    found: dict[str, Any] = {}
    part, path = (
        loader._index_sampler,
        "sampler" if loader.batch_sampler is None else "batch_sampler",
    )
    while part is not None and len(found) < _DEEPEST:
        found[path] = part
        inner = next((name for name in _INNER if getattr(part, name, None) is not None), None)
        if inner is None or any(getattr(part, inner) is one for one in found.values()):
            break
        part, path = getattr(part, inner), f"{path}.{inner}"
    return found


def epoch_of(loader: Any) -> tuple[Any, int] | None:
    """The sampler that has been told the epoch with ``set_epoch``, and which epoch that is."""
    for part in samplers_of(loader).values():
        epoch = getattr(part, "epoch", None)
        if type(epoch) is int and callable(getattr(part, "set_epoch", None)):
            return part, epoch
    return None


def _own_generators(loader: Any) -> Iterator[tuple[str, State]]:
    """The generators that are the loader's and its samplers', each once."""
    met: set[int] = set()
    places: list[tuple[str, Any]] = [("generator", loader.generator)]
    for path, part in samplers_of(loader).items():
        attributes = getattr(part, "__dict__", {})
        places += [(f"{path}.{name}", value) for name, value in attributes.items()]
    for path, value in places:
        state = None if value is None else state_of(value)
        if state is not None and id(state.subject) not in met:
            met.add(id(state.subject))
            yield path, state


def own_states(loader: Any) -> dict[str, tuple[str, bytes]]:
    """The states of the generators that are the loader's and its samplers'."""
    return {path: (state.kind, state.read()) for path, state in _own_generators(loader)}


def _default_generators(loader: Any) -> list[State | None]:
    """Those default generators from which its samplers may draw: of torch, random and NumPy."""
    known = global_states()
    draw: list[State | None] = [None, None, None]
    for part in samplers_of(loader).values():
        if type(part) not in (*_DRAW_NOTHING, *_DRAW_FROM_TORCH):
            return [*known]
        if type(part) in _DRAW_FROM_TORCH and getattr(part, "generator", None) is None:
            draw[0] = known[0]
    return draw


@dataclass(frozen=True)
class SamplerStart:
    """The generators and the samplers of a loader at a moment, as a rule the start of an epoch."""

    own: Mapping[str, tuple[str, bytes]]  # path: kind and state
    default: tuple[bytes | None, ...] = (None, None, None)
    epoch: int | None = None  # what set_epoch was called with
    before_seed: bool = False
    """Whether the seed of the workers was drawn after this. Without workers torch starts the
    sampler once, before it draws that seed; with workers it starts it again after that."""
    state: Any = None  # what the sampler's own state_dict() gave, before ``iter(sampler)``
    left: bool = False
    """Whether the sampler was in the middle of an epoch then, which was left early."""

    @classmethod
    def of(cls, loader: Any, *, before_seed: bool = False) -> SamplerStart:
        told = epoch_of(loader)
        stateful = _with_state(loader._index_sampler)
        return cls(
            own_states(loader),
            tuple(None if state is None else state.read() for state in _default_generators(loader)),
            None if told is None else told[1],
            before_seed,
            None if stateful is None else copy.deepcopy(stateful.state_dict()),
            stateful is not None and id(stateful) in _unfinished,
        )

    def restore(self, loader: Any, *, default: bool, between_epochs: bool) -> None:
        """Bring the generators of another loader, or of the same later, to this state; and the
        sampler, if an epoch begins."""
        if between_epochs:
            _end_epoch_before(_with_state(loader._index_sampler), self.state, self.left)
        for path, state in _own_generators(loader):
            kind, raw = self.own.get(path, ("", b""))
            if kind == state.kind:
                state.write(raw)
        if default:
            for one, kept in zip(global_states(), self.default, strict=True):
                if kept is not None:
                    one.write(kept)


def _with_state(index_sampler: Any) -> Any:
    """The sampler that has a state of its own; None if none has."""
    parts = (index_sampler, getattr(index_sampler, "sampler", None))
    return next((part for part in parts if has_state(part)), None)


class SamplerDiffers(Exception):
    """A sampler that was started again gives other indices than before: from this draw on, or
    before it."""

    def __init__(self, draw: int, of: int) -> None:
        super().__init__(draw, of)
        self.draw, self.of = draw, of


@dataclass
class SamplerDraws:
    """One epoch."""

    start: SamplerStart
    stateful: bool = False  # the sampler, or its iterator, has a state
    states: dict[int, Any] = field(default_factory=dict)  # by the number of the draw before it
    count: int = 0  # draws of a stateful sampler
    oldest: Callable[[], int] = int
    """Returns the first draw whose batch the consumer has not had."""
    first: tuple[int, ...] = ()
    """Which draws the first tasks of a resumed epoch are, where they do not follow one another."""
    begun_at: int = 0  # the number of the first of these tasks
    ended: int | None = None  # draws after which a stateful sampler has no more, if that is known
    waiting: Sized = ()  # indices that were drawn, and are no task yet

    def ordinal(self, task: int) -> int:
        """Which draw the task of this number is."""
        place = task - self.begun_at
        return self.first[place] if 0 <= place < len(self.first) else task

    def has_gaps(self, task: int) -> bool:
        """Whether draws are missing before one whose batch the consumer has had, when it waits for
        this task."""
        return task < self.begun_at + len(self.first)

    def follows(self, task: int) -> bool:
        """Whether this task comes after the draw that is just before its own."""
        return task > 0 and self.ordinal(task - 1) == task - 1 and not self.has_gaps(task)

    def place(self, next_task: int, missing: Iterable[int]) -> tuple[int, tuple[int, ...]]:
        """The first draw whose batch the consumer has not had, and those after it whose batch it
        has had. `next_task` is the first that was not begun, and `missing` those before it that the
        consumer has not had."""
        not_begun = self.first[max(0, next_task - self.begun_at) :]
        lost = {*map(self.ordinal, missing), *not_begun}
        end = max(next_task, self.begun_at + len(self.first))
        first = min(lost, default=end)
        return first, tuple(one for one in range(first, end) if one not in lost)

    def go_to(
        self,
        iterator: Any,
        resumed: Checkpoint,
        account: Account | None,
        look_ahead: Callable[[Account], None],
    ) -> None:
        """Draw again all indices up to where another run has left this epoch; `iterator` has just
        started its sampler. Batches that the consumer has had beyond that place are left out."""
        self.begun_at, had = resumed.done, frozenset(resumed.had_later)
        if resumed.samples is not None:
            self._skip_samples(iterator, resumed.samples)
            return
        index, last, begin = None, 0, 0
        if resumed.shuffled is not None:
            self._shuffle_as(iterator, resumed.shuffled)
        # Before its first draw a sampler that is a generator has not begun: its state is that of
        # the epoch before (`begin_sampler_again`). And substitutes are chosen among the indices
        # that were drawn, so with these all are drawn again.
        knows_place = resumed.sampler_state is not None and self.stateful and resumed.first_missing
        if knows_place and not (account is not None and account.replaces):
            self.states.clear()
            self.count = begin = resumed.first_missing
            if resumed.sampler_ended and not has_state(iterator._sampler_iter):
                stateful = _with_state(iterator._index_sampler)
                _end_epoch_before(stateful, resumed.sampler_state, left=False)
                iterator._sampler_iter = iter(())
                self.ended = begin
            else:
                load_sampler_state(iterator, resumed.sampler_state)
            self.watch(iterator)
            # Many samplers take a state over when they are begun: until then they give another.
            self.states[begin - 1] = copy.deepcopy(resumed.sampler_state)
        elif account is not None:
            look_ahead(account)
        for last in range(begin, resumed.first_missing):
            try:
                index = iterator._draw()
            except StopIteration:
                raise SamplerDiffers(last, resumed.first_missing) from None
            if account is not None:
                account.hints_for(last, keys_of(index, iterator._auto_collation))
        compares = resumed.index is not None and begin < resumed.first_missing
        if compares and fingerprint(copy_index(index)) != resumed.index:
            raise SamplerDiffers(last, resumed.first_missing)
        reached, left_out = resumed.first_missing, []
        if had:
            between = range(resumed.first_missing, max(had) + 1)
            drawn = [iterator._draw() for _ in between]
            self.first = tuple(number for number in between if number not in had)
            reached = between.stop
            left_out = [drawn[number - between.start] for number in self.first]
        if not begin and self.draws_from_default():
            self._draw_as_far(iterator, resumed.drawn - reached)
        iterator._ahead.extendleft(reversed(left_out))

    def draws_from_default(self) -> bool:
        """Whether the sampler may draw from default generators, and has no state that says where
        it is."""
        return not self.stateful and any(state is not None for state in self.start.default)

    def _draw_as_far(self, iterator: Any, ahead: int) -> None:
        """Have so many indices ahead, as when the run was broken off: the program's generators, to
        which later draws belong, are as they were after these."""
        while len(iterator._ahead) < ahead:
            try:
                iterator._ahead.append(copy_index(iterator._next_index()))
            except StopIteration:
                break

    def _shuffle_as(self, iterator: Any, state: bytes) -> None:
        """Give this epoch the order that a random sampler makes with this generator."""
        generator = torch.Generator()
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        sampler: Any = RandomSampler(iterator._dataset, generator=generator)
        batches = iterator._index_sampler
        if type(batches) is BatchSampler:
            sampler = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        iterator._sampler_iter = iter(sampler)

    def _skip_samples(self, iterator: Any, count: int) -> None:
        """The same for batches of another size: leave out so many samples."""
        batches = iterator._index_sampler
        samples = iter(batches.sampler)
        for _ in itertools.islice(samples, count):
            pass
        rest: Any = samples
        iterator._sampler_iter = iter(BatchSampler(rest, batches.batch_size, batches.drop_last))

    # -- samplers with a state ------------------------------------------------------------

    def watch(self, iterator: Any) -> None:
        """If the sampler of this iterator has a state, ask for it after every draw from now on."""
        begun = iterator._sampler_iter
        stateful = begun if has_state(begun) else _with_state(iterator._index_sampler)
        self.stateful = stateful is not None
        if stateful is None:
            iterator.__dict__.pop("_next_index", None)
        else:
            self.states[self.count - 1] = copy.deepcopy(stateful.state_dict())
            batches, full = iterator._index_sampler, 0
            if type(batches) is BatchSampler:
                full = batches.batch_size
            iterator._next_index = self._draw_with_state(iterator._sampler_iter, stateful, full)

    def _draw_with_state(
        self, source: Iterator[Any], stateful: Any, full: int
    ) -> Callable[[], Any]:
        """The sampler is the iterator's: it may refer to the loader, and a thread holds this.
        `full`: a batch of fewer indices is the last, and its sampler has told that it has ended."""

        def draw() -> Any:
            try:
                index = next(source)
            except StopIteration:
                self.ended = self.count
                _unfinished.pop(id(stateful), None)
                raise
            _note_unfinished(stateful)
            self.states[self.count] = copy.deepcopy(stateful.state_dict())
            self.count += 1
            if full and len(index) < full:
                self.ended = self.count
                _unfinished.pop(id(stateful), None)
            if not self.count % _SELDOM:
                self.state_before(self.oldest())
            return index

        return draw

    def state_before(self, draw: int) -> Any:
        """The sampler's state before this draw; those of earlier draws are not needed any more."""
        for number in [one for one in self.states if one < draw - 1]:
            del self.states[number]
        return self.states.get(draw - 1)


def first_missing_of(checkpointing: weakref.ref[Any]) -> Callable[[], int]:
    """For `SamplerDraws.oldest`, of a pool."""

    def oldest() -> int:
        there = checkpointing()
        return 0 if there is None else there.first_missing()

    return oldest


def begin_sampler_again(loader: Any, resumed: Checkpoint, policy: Policy | None) -> None:
    """Before the sampler of a loader is started: bring it to where it was when another run started
    it in the epoch that it was in. `policy` for bad samples: see `SamplerDraws.go_to`."""
    begun = resumed.begun
    if begun is None or resumed.finished:
        return
    redraws = not resumed.first_missing or (policy is not None and policy.replaces)
    begun.restore(loader, default=True, between_epochs=redraws)
    told = epoch_of(loader)
    if told is not None and begun.epoch not in (None, told[1]):
        log.warning(
            "resumed: %s was at epoch %d, and the state is of epoch %d: that is set",
            type(told[0]).__qualname__,
            told[1],
            begun.epoch,
        )
        told[0].set_epoch(begun.epoch)


_unfinished: dict[int, weakref.ref[Any]] = {}
"""By id: samplers with a state that were begun, have given an index, and have not ended."""


def _note_unfinished(sampler: Any) -> None:
    if id(sampler) not in _unfinished:
        with contextlib.suppress(TypeError):  # there are no weak references to it
            forget = functools.partial(_forget, id(sampler))
            _unfinished[id(sampler)] = weakref.ref(sampler, forget)


def _forget(number: int, gone: weakref.ref[Any], known: Any = _unfinished) -> None:
    if known.get(number) is gone:
        del known[number]


def _end_epoch_before(sampler: Any, state: Any, left: bool) -> None:
    """Bring a sampler with a state to the end of the epoch before the one that is to begin; `left`
    if that epoch was left in the middle.

    Some samplers go on from a loaded state once: begun there, they have no index left, and the next
    ``iter(sampler)`` begins a new epoch. For others the state at an end is that of the next
    beginning. These give an index, so the state is loaded again.

    In the middle both kinds give an index. There the first kind is begun, which the next
    ``iter(sampler)`` ends; the second kind goes on where it is with every ``iter(sampler)``."""
    if sampler is None or state is None or _is_at(sampler, state):
        return
    with default_generators_kept():
        first = _loaded_and_begun(sampler, state, 3 if left else 1)
        if not first:
            return
        if left:
            there = copy.deepcopy(sampler.state_dict())
            _loaded_and_begun(sampler, state, 1)
            after = itertools.islice(iter(sampler), 2)
            if _names(after) != _names(first[1:]) or not _is_at(sampler, there):
                _loaded_and_begun(sampler, state, 1)
                _note_unfinished(sampler)
                return
        sampler.load_state_dict(copy.deepcopy(state))


def _loaded_and_begun(sampler: Any, state: Any, count: int) -> list[Any]:
    """Let a sampler go on from this state for so many indices: those it has given."""
    sampler.load_state_dict(copy.deepcopy(state))
    return list(itertools.islice(iter(sampler), count))


def _names(indices: Iterable[Any]) -> list[int]:
    return [fingerprint(copy_index(one)) for one in indices]


def _is_at(sampler: Any, state: Any) -> bool:
    """Whether nothing need be loaded. States may hold tensors, which have no equality."""
    try:
        return pickle.dumps(sampler.state_dict()) == pickle.dumps(state)
    except Exception:  # it does not pickle, or is not as the sampler's
        return False


def draw_seed(loader: Any) -> None:
    """Draw what torch draws for the seed of the workers."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def load_sampler_state(iterator: Any, state: Any) -> None:
    """Bring the sampler of an iterator to a state that it, or another of its kind, gave."""
    state, part = copy.deepcopy(state), _with_state(iterator._index_sampler)
    if part is None or has_state(iterator._sampler_iter):
        iterator._sampler_iter.load_state_dict(state)
    else:
        part.load_state_dict(state)
        iterator._sampler_iter = iter(iterator._index_sampler)
