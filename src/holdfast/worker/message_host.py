"""What worker threads and actors have in common as hosts of a worker: each says what it has to say
in tuples, and none is replaced for its size."""

from __future__ import annotations

from typing import Any, Final

from holdfast.engine.continuation import ResumptionResult
from holdfast.samples.bad_sample import BadSample
from holdfast.transport.placement import Memory

Message = tuple[Any, ...]
"""What it says, and the content: one of these, or a kind of answer (see `worker.interface`)."""

READY: Final = "ready"
REFUSED: Final = "refused"  # a `Failure`: it has no dataset
REPORT: Final = "report"
REMARK: Final = "remark"
SURVIVED: Final = "survived"
TAKEN_UP: Final = "taken up"
GONE: Final = "gone"  # it is not to be used any more


class MessageHost:
    """Implements the part of `worker.interface.Host` that is the same for both. Their memory is the
    trainer's, or another program looks after it."""

    memory: Memory | None = None
    faults = None
    limits_allocations = False

    def _say(self, *message: Any) -> None:
        raise NotImplementedError

    def report(self, bad: list[BadSample], samples: int | None) -> None:
        self._say(REPORT, bad, samples)

    def remark(self, about: str, words: str) -> None:
        self._say(REMARK, about, words)

    def survived(self) -> None:
        self._say(SURVIVED)

    def taken_up(self, result: ResumptionResult) -> None:
        self._say(TAKEN_UP, result)

    def private(self) -> int:
        return 0

    def begin_epoch(self) -> None:
        pass

    def may_retire(self) -> bool:
        return False

    def retire(self) -> None:
        raise AssertionError("this worker is not replaced for its size")
