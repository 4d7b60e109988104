"""What limits a run: the training step, or a part of the loading. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TOO_SHORT: Final = 2.0  # seconds
TOO_FEW: Final = 5  # batches
LITTLE: Final = 0.1  # of the time: the trainer hardly waits
MUCH: Final = 0.4  # of the workers' time


@dataclass(frozen=True)
class Bottleneck:
    """Where the time goes, and what may help."""

    where: str
    """``unknown``, ``consumer``, ``fetch``, ``collate``, ``send``, ``start`` or ``held``."""
    words: str
    advice: str = ""


def find_bottleneck(
    active: float,
    waited: float,
    batches: int,
    seconds: Mapping[str, float],
    *,
    workers: bool = True,
) -> Bottleneck:
    """`seconds` of all workers together, by step; without workers `waited` is how long loading took
    in the training process."""
    if active < TOO_SHORT or batches < TOO_FEW:
        return Bottleneck("unknown", "The run was too short to say what limits it.")
    share = min(1.0, waited / active)
    whole = sum(seconds.values())
    parts = {step: spent / whole for step, spent in seconds.items()} if whole else {}
    if share < LITTLE:
        idle = parts.get("idle", 0.0)
        too = f", and workers had nothing to do {_percent(idle)} of theirs" if idle >= MUCH else ""
        return Bottleneck(
            "consumer",
            f"The training step. It waited for data {_percent(share)} of the time{too}.",
            "Faster loading would hardly make this run faster.",
        )
    if not workers:
        return Bottleneck(
            "fetch",
            "Loading, in the training process itself: there are no workers. It took "
            f"{_percent(share)} of the time.",
            "With num_workers=1 or more, batches are loaded while the model trains.",
        )
    waits = f"The trainer waited for data {_percent(share)} of the time."
    if not whole:
        return Bottleneck("unknown", waits)
    if parts.get("start", 0.0) >= MUCH:
        return Bottleneck(
            "start",
            f"Starting workers. {waits} Workers spent {_percent(parts['start'])} of their time "
            "starting.",
            "persistent_workers=True keeps them from epoch to epoch.",
        )
    if parts.get("idle", 0.0) >= MUCH:
        return Bottleneck(
            "held",
            f"Neither side all the time. {waits} Workers had nothing to do "
            f"{_percent(parts['idle'])} of theirs.",
            "That is so if batches are held back by memory_budget, if one slow batch makes all "
            "others wait (in_order=False delivers them as they come), or if some training steps "
            "are much longer than others (a larger prefetch_factor evens that out).",
        )
    step = max(("fetch", "collate", "send"), key=lambda name: parts.get(name, 0.0))
    what, advice = _STEPS[step]
    words = f"{what}. {waits} Workers spent {_percent(parts[step])} of theirs on it."
    return Bottleneck(step, words, advice)


_STEPS: Final = {
    "fetch": (
        "Loading samples (the dataset's __getitem__ or __iter__)",
        "More workers, if there are processors for them; or less work for each sample. The "
        "slowest samples are named below.",
    ),
    "collate": (
        "Putting batches together (collate_fn)",
        "Do less in collate_fn, or do it for each sample, in the dataset.",
    ),
    "send": (
        "Handing batches to the trainer",
        "Send less: smaller types (uint8 images, converted on the GPU), and no objects that have "
        "to be pickled.",
    ),
}


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"
