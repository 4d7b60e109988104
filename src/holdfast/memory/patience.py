"""How long a worker waits for a block to come back before it reserves another.

A worker that runs ahead of the others has one batch waiting for its turn and another in the hands
of the consumer, who lets go of it as soon as the next one arrives, from a slower worker. To wait a
moment for that, no longer than a few of the slower batches take, costs nothing then: in the end all
wait for the slowest. It saves a third of the memory of large batches. Where the consumer keeps
what it has (to accumulate gradients, in a list) nothing comes back: each wait in vain makes the
next one rarer, so that nobody ever waits for the consumer more than a few times.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Patience"]

MOST: Final = 0.1  # seconds
BATCHES: Final = 3
FORGETS: Final = 0.9  # of how slow a batch was, with every one after it
RAREST: Final = 1024


class Patience:
    """Pure: whoever asks does the waiting, and says whether it was worth it."""

    def __init__(self) -> None:
        self._every = 1  # out of so many occasions one is taken
        self._passed = 0
        self._slow = 0.0  # seconds that a batch may take

    def made(self, took: float) -> None:
        """Another batch, in so many seconds. The first ones, on fresh memory, are the slowest."""
        self._slow = max(took, FORGETS * self._slow)

    def seconds(self) -> float:
        """To wait now."""
        self._passed += 1
        if self._passed < self._every:
            return 0.0
        self._passed = 0
        return min(MOST, BATCHES * self._slow)

    def judge(self, rewarded: bool) -> None:
        """Whether something came while it was waited for."""
        self._every = 1 if rewarded else min(4 * self._every, RAREST)
