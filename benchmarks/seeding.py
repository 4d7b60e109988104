"""What ``seeding="sample"`` costs for each sample, and what it saves for each batch.

    python -m benchmarks.seeding

In one process, in turns: the smallest of many short rounds, in microseconds.
"""

from __future__ import annotations

import random
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from holdfast.worker.generator_states import default_generators_kept
from holdfast.worker.randomness import OWN_AT, Randomness
from holdfast.worker.sample_seeding import _RAW, _WORDS, SampleSeeds, kept_states

CALLS, ROUNDS = 300, 100


class _Slots:
    """Where random states are kept after each batch, as in a worker's black box."""

    def __init__(self) -> None:
        self._slot = np.zeros(OWN_AT, np.uint8)

    def free_slot(self) -> Any:
        return self._slot

    def commit(self, number: int, size: int) -> None: ...
    def still(self, number: int) -> None: ...


def main() -> None:
    seeds, slots = SampleSeeds(1, 0), _Slots()
    kept = Randomness(instead=kept_states(seeds, iterable=False))
    all_kept = Randomness()

    def public() -> None:
        random.seed(1 << 60)
        np.random.seed(1)
        torch.default_generator.manual_seed(1 << 60)

    def borrowed() -> None:
        with default_generators_kept():
            pass

    def a_batch(randomness: Randomness) -> Callable[[], None]:
        def keep() -> None:
            torch.rand(1), random.random(), np.random.rand()
            randomness.keep(slots, 1)

        return keep

    raw = np.zeros(_RAW, np.uint64)
    words = raw.view(np.uint32)[:_WORDS]
    measured: dict[str, Callable[[], object]] = {
        "a sample whose key is a number": lambda: seeds.for_sample(12345),
        "a sample whose key is a text": lambda: seeds.for_sample("images/12345.jpg"),
        "an element of a stream": seeds.for_element,
        "    of it: the words of all states, from Philox": lambda: seeds.draw(0, 12345, 0),
        "    of it: the state of random": lambda: seeds.set_random(words),
        "    of it: the state of numpy.random": lambda: seeds.set_numpy(words),
        "    of it: the state of torch": lambda: seeds.set_torch(words, raw[-1:]),
        "for comparison: random.seed, numpy.random.seed, torch.manual_seed": public,
        "num_workers=0: the trainer's generators, saved and restored, per batch": borrowed,
        'random states after a batch that draws, seeding="worker"': a_batch(all_kept),
        'random states after a batch that draws, seeding="sample"': a_batch(kept),
    }
    best = dict.fromkeys(measured, float("inf"))
    for _ in range(ROUNDS):
        for name, call in measured.items():
            best[name] = min(best[name], timeit.timeit(call, number=CALLS) / CALLS)
    for name, seconds in best.items():
        print(f"{seconds * 1e6:8.1f} µs  {name}")


if __name__ == "__main__":
    main()
