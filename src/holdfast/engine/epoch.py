"""What begins anew with every epoch of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.engine import vocabulary as v
from holdfast.engine.answers import Refused
from holdfast.samples.ledger import Account
from holdfast.samples.record import BadSample

__all__ = ["Epoch", "Taken"]


Taken = v.Delivery | v.GaveUp | Refused | v.End


@dataclass(slots=True)
class Epoch:
    """Under the pool's lock, as everything of it."""

    shared_seed: int | None
    account: Account | None = None  # of bad samples; None to let them raise
    unclaimed: list[BadSample] = field(default_factory=list)  # reported with a replica's end
    due: int = 0  # indices that are to be drawn from the sampler
    drawn: int = 0  # indices that were
    delivered: v.Delivery | v.End | v.GaveUp | None = None  # by the machine; the consumer's next
    taken: Taken | None = None  # until the consumer has made its batch of it
    ended: bool = False
    sampler_error: str | None = None  # the last word of the sampler
