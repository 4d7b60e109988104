"""What torch's iterator shows in ``_workers``: workers, as `multiprocessing` shows processes."""

from __future__ import annotations

import time

from holdfast.engine.pool import Pool


class WorkerHandle:
    """The process that is this worker now."""

    daemon = True

    def __init__(self, pool: Pool, worker: int) -> None:
        self._pool = pool
        self._worker = worker
        self.name = f"Process-{worker + 1}"  # as multiprocessing calls it

    @property
    def pid(self) -> int | None:
        return self._pool.pid(self._worker)

    @property
    def exitcode(self) -> int | None:
        return self._pool.exitcode(self._worker)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive():
            left = 0.05 if deadline is None else min(0.05, deadline - time.monotonic())
            if left <= 0:
                return
            time.sleep(left)

    def terminate(self) -> None:
        self._pool.terminate(self._worker)

    kill = terminate

    def __repr__(self) -> str:
        return f"<holdfast worker {self._worker} pid={self.pid} exitcode={self.exitcode}>"
