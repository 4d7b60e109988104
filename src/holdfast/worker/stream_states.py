"""States of an iterable dataset after a bad element: whether the stream can be continued from them.

A generator that has raised is finished. If the dataset has ``state_dict``, another one can be made
from its state after the failure, but only if that state is exact. The states of some datasets leave
something out, such as the contents of a shuffle buffer: the stream would go on without these
elements, or with others once more. So it is tried, with elements before the failure and after it,
whether other states of this dataset lead to where they were taken. The random state is afterwards
as it was before.

Not noticed: a state that is right in these places and wrong in the one that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from holdfast.worker import loaded_state
from holdfast.worker.batch_fingerprint import NO_BATCH, fingerprint, fingerprint_of_error
from holdfast.worker.fetch import state_of
from holdfast.worker.randomness import Snapshot, restore_in_process

States = tuple[Any, Any]  # of the dataset, and of its iterator
AHEAD: Final = 4  # elements after a failure that are drawn to compare them
MOST_BAD: Final = 16  # bad ones in a row, before these
_GOOD, _BAD, _END = "good", "bad", "end"
_Outcome = tuple[str, int]
"""Of asking for an element: which of these three, and what tells it from others."""


class _Place:
    """A place in the stream, and what came since."""

    def __init__(self, states: States | None, random_state: Snapshot | None) -> None:
        self.states = states
        self.random_state = random_state
        self.outcomes: list[str] = []
        self.last: tuple[int, Any] | None = None  # the last good element, and when it came


class StreamStates:
    """Those of one dataset, in one epoch."""

    def __init__(
        self,
        dataset: Any,
        catch: type[BaseException],
        random_state: Callable[[], Snapshot],
        draw: Callable[[Iterator[Any]], Any] = next,
    ) -> None:
        self._dataset = dataset
        self._catch = catch
        self._random_state = random_state
        self._next = draw
        self._place = _Place(None, None)

    def now(self, iterator: Iterator[Any]) -> States | None:
        """None if neither has a state, or it cannot be had."""
        try:
            own = None if iterator is self._dataset else state_of(iterator)
            states = (state_of(self._dataset), own)
        except self._catch:
            return None
        return None if states == (None, None) else states

    def load(self, states: States) -> Iterator[Any]:
        """The stream from there."""
        if states[0] is not None:
            loaded_state.load(self._dataset, states[0])
        iterator: Iterator[Any] = iter(self._dataset)
        if states[1] is not None:
            iterator.load_state_dict(states[1])  # type: ignore[attr-defined]
        return iterator

    # -- what happens meanwhile -----------------------------------------------------------

    def remember(self, iterator: Iterator[Any], *, first: bool) -> None:
        """A batch begins. The `first` of an epoch is no place to try: from the start every state
        is right."""
        states = None if first else self.now(iterator)
        self._place = _Place(states, None if states is None else self._random_state())

    def let_go(self) -> None:
        """The batch before was the consumer's to change: its elements cannot be compared."""
        self._place.last = None

    def came(self, element: Any) -> None:
        self._place.last = len(self._place.outcomes), element
        self._place.outcomes.append(_GOOD)

    def failed(self) -> None:
        self._place.outcomes.append(_BAD)

    def ended(self) -> None:
        self._place.outcomes.append(_END)

    # -- whether they are exact -----------------------------------------------------------

    def are_exact(self, states: States, error: BaseException) -> bool:
        """Of the `states` after an `error`. It is enough to try it before the failure or after it,
        if the other cannot be."""
        random_state = self._random_state()
        try:
            found = {self._comes_here_again(error), self._goes_on_alike(states)}
        except self._catch:  # it does not even load
            return False
        finally:
            restore_in_process(random_state)
        return True in found and False not in found

    def _comes_here_again(self, error: BaseException) -> bool | None:
        """Whether from the last place the same elements come, and then the same failure; None if
        there is none."""
        place = self._place
        if place.states is None or place.random_state is None:
            return None
        iterator = self.load(place.states)
        restore_in_process(place.random_state)
        found = [self._draw(iterator) for _ in place.outcomes]
        if [outcome for outcome, _ in found] != place.outcomes:
            return False
        if place.last is not None:
            at, element = place.last
            if found[at][1] != fingerprint(element):
                return False
        failures = [mark for outcome, mark in found if outcome == _BAD]
        return failures[-1:] == [fingerprint_of_error(error)]

    def _goes_on_alike(self, states: States) -> bool | None:
        """Whether the elements after the failure are the same from a state taken among them; None
        if there are too few."""
        outcome, between = _BAD, states
        for _ in range(MOST_BAD):
            iterator = self.load(between)
            outcome, _ = self._draw(iterator)
            found, random_state = self.now(iterator), self._random_state()
            if found is None or outcome == _END:
                return None
            between = found
            if outcome == _GOOD:
                break
        expected = [self._draw(iterator) for _ in range(AHEAD)]
        if expected[0][0] != _GOOD:
            return None
        iterator = self.load(between)
        restore_in_process(random_state)
        return [self._draw(iterator) for _ in range(AHEAD)] == expected

    def _draw(self, iterator: Iterator[Any]) -> _Outcome:
        try:
            return _GOOD, fingerprint(self._next(iterator))
        except StopIteration:
            return _END, NO_BATCH
        except self._catch as error:
            return _BAD, fingerprint_of_error(error)
