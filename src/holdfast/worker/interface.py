"""What a worker is given and what it needs, whatever kind of worker it is.

A worker is given a `Blueprint`, which all workers of a pool have in common, and a `WorkerSetup` of
its own. It carries out orders (`items`), and everything else reaches it through a `Host`: the
process, thread or actor that it runs in. The host sends answers, keeps notes that outlive the
worker, measures its memory and decides whether it has to be replaced for its size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.autopsy.tally import SampleWatch
from holdfast.engine.continuation import ResumptionPlan, ResumptionResult
from holdfast.engine.events import PastNotice
from holdfast.samples.bad_sample import BadSample
from holdfast.samples.policy import Policy
from holdfast.transport.placement import Memory
from holdfast.worker.faults import Faults
from holdfast.worker.sample_seeding import EpochSeeds

# Kinds of answers; the letters are how worker processes send them.
BATCH: Final = b"B"
ERROR: Final = b"E"  # a `Failure`
NOTHING_LEFT: Final = b"N"  # all samples of the batch were bad
ENDED: Final = b"S"  # the replica of an iterable dataset has nothing more
TOLD: Final = b"O"  # it has heard a notice
RESUMED: Final = b"A"  # another epoch has begun: the random state at its beginning


@dataclass(frozen=True)
class Blueprint:
    """What all workers of a pool have in common; under spawn it is pickled once."""

    dataset: Any
    iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    worker_init_fn: Callable[[int], Any] | None
    base_seed: int
    num_workers: int
    batch_index: Any  # what an iterable dataset is asked with, for every batch
    policy: Policy | None = None  # for bad samples; None to let them raise
    pinned_in_place: bool = False  # the trainer may pin the memory in which batches are sent

    @property
    def on_bad_sample(self) -> Any:
        return None if self.policy is None else self.policy.on_bad_sample


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """What one worker is told when it starts."""

    worker: int
    generation: int
    seeds: EpochSeeds
    answered: int = 0
    epochs_done: int = 0  # epochs the replica has been in before this one
    batches_done: int = 0  # batches it has made in this one
    exhausted: bool = False
    random_state: bytes | None = None  # before the first item it will be asked for
    epoch_state: bytes | None = None  # when the replica's epoch began, if that was not its first
    told: tuple[PastNotice, ...] = ()  # what its predecessors were told
    settled: int = 0  # after so many of these a batch was answered, with the error if one raised,
    settled_earlier: int = 0  # and after so many before this epoch
    plan: ResumptionPlan | None = None  # how to take up a stream; None for a seat's first worker
    rehearsal: int | None = None  # it only tries to take up, growing by no more than these bytes
    marks: bool = False  # whether its batches leave fingerprints
    dataset_state: bytes | None = None  # of a map-style dataset, if its predecessors gave one
    states: bool = False  # whether an iterable one is asked for its state after every batch,
    rests: bool = False  # and at the end of an epoch


class Notes(Protocol):
    """Notes that outlive a worker: what it is doing, and its last random states. Those of a process
    are in its black box (`blackbox.Recorder`)."""

    room: int  # bytes that a random state may take
    cell: Any  # cell[0] is the position of the sample that is being loaded
    watch: SampleWatch | None  # measures samples, if there is a logbook

    @property
    def position(self) -> int | None: ...
    def note(self, task: int, position: int, step: int) -> None: ...
    def take_up(self, number: int) -> bool: ...
    def free_slot(self) -> NDArray[np.uint8]: ...
    def commit(self, number: int, size: int) -> None: ...
    def still(self, number: int) -> None: ...


class Host(Protocol):
    """What a worker runs in."""

    own_process: bool
    """Whether no other worker is in this process: else the global random generators are shared."""
    own_dataset: bool
    """Whether no other worker uses the same object as its dataset."""

    @property
    def recorder(self) -> Notes: ...
    @property
    def memory(self) -> Memory | None:
        """Where large samples are collated to, if there is such memory."""

    @property
    def faults(self) -> Faults | None:
        """Faults that a test asks for."""

    def publish(self, info: Any) -> None:
        """Let ``torch.utils.data.get_worker_info()`` return this in the worker."""

    # -- what it says ---------------------------------------------------------------------

    def encode(self, batch: Any) -> Any:
        """The batch as `answer` takes it. Raises if it cannot be sent."""

    def answer(self, kind: bytes, number: int, content: Any, mark: int, state: bytes) -> None:
        """Send the answer to an item, with the batch's fingerprint and the dataset's state."""

    def report(self, bad: list[BadSample], samples: int | None) -> None:
        """Send the bad samples of the batch whose answer comes next, and how many samples of a
        stream it took, unless that is the usual number."""

    def remark(self, about: str, words: str) -> None:
        """Tell the user something."""

    def survived(self) -> None:
        """Say that the sample that was tested alone did not end the worker."""

    def taken_up(self, result: ResumptionResult) -> None:
        """Say how the stream of the predecessor was taken up."""

    # -- its memory -----------------------------------------------------------------------

    @property
    def limits_allocations(self) -> bool:
        """Whether an allocation may fail because of the worker's own limit."""

    def private(self) -> int:
        """Bytes that the worker has in use and shares with no other; 0 if that is not known."""

    def between_samples(self) -> int:
        """Called after a sample; returns after how many samples to call again."""

    def begin_epoch(self) -> None:
        """Called at the beginning of every epoch but the first."""

    def may_retire(self) -> bool:
        """Ask whether another worker can continue the stream of this one; waits for the answer."""

    def retire(self) -> None:
        """Say that the worker exits because of its size. All that it has not answered is left to
        its replacement."""

    # -- tests of single samples ----------------------------------------------------------

    def pause(self, seconds: float) -> bool:
        """Wait, without looking stalled. False if the worker is not needed any more."""
