"""A training script that is run where the kernel or Python refuses something.

For each start method it is given: an epoch as it is, and one in which a worker is killed from
outside and another hangs in a sample, once; and torch's own loader in the same process, where it works. What
came is written to a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("refusing")))
import refusal

refusal.apply()  # before anything of ours is imported

import torch  # noqa: E402
import torch.utils.data  # noqa: E402

import holdfast  # noqa: E402

LENGTH, BATCH, WORKERS = 32, 4, 2
HANGS = 26  # in the batch before the last


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Random, so that a batch made again must be made from the same random state."""

    def __init__(self, hang: Path | None = None) -> None:
        self.hang = hang

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == HANGS and self.hang is not None and self.hang.exists():
            self.hang.unlink()
            time.sleep(600)
        return torch.rand(2048) + index


def digest(batch: torch.Tensor) -> str:
    return hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:16]


def loader(kind: Any, method: str, **options: Any) -> Any:
    torch.manual_seed(7)
    return kind(
        options.pop("dataset"),
        batch_size=BATCH,
        num_workers=WORKERS,
        multiprocessing_context=method,
        persistent_workers=True,
        **options,
    )


def epochs(method: str, folder: Path) -> dict[str, Any]:
    hang = folder / f"hang-{method}"
    ours = loader(holdfast.DataLoader, method, dataset=Samples(hang), stall_timeout=1.0)
    plain = [digest(batch) for batch in ours]
    iterator = ours._iterator
    survives = hasattr(iterator, "_pool")  # else its workers are torch's
    if survives:
        hang.touch()
    broken = []
    for number, batch in enumerate(ours):
        if number == 0 and survives:
            # As another process would: `kill()` of the handle is told apart.
            os.kill(iterator._workers[1].pid, signal.SIGKILL)
        broken.append(digest(batch))
    incidents = [
        {"kind": one.kind, "cause": one.cause, "because": list(one.because), "stack": one.stack}
        for one in ours.incidents
    ]
    low = {
        fd: os.readlink(f"/proc/self/fd/{fd}")
        for fd in range(3)
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    result = {
        "low": low,
        "plain": plain,
        "broken": broken,
        "incidents": incidents,
        "iterator": type(iterator).__name__,
    }
    ours.close()
    return result


def stock() -> list[list[str]]:
    """Two epochs of torch's own loader."""
    theirs = loader(torch.utils.data.DataLoader, "fork", dataset=Samples())
    return [[digest(batch) for batch in theirs] for _ in range(2)]


def main() -> None:
    folder, closed, beside, *methods = sys.argv[1:]
    for fd in map(int, closed):
        os.close(fd)
    found: dict[str, Any] = {"stock": stock() if beside == "stock" else None}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for method in methods:
            found[method] = epochs(method, Path(folder))
    found["warnings"] = [str(one.message) for one in said]
    (Path(folder) / "found.json").write_text(json.dumps(found))
    # A log line that could not be written waits in Python's buffer. Whether it is written at the exit
    # depends on which file has the number by then; if it is not, Python exits with status 120.
    if "1" in closed:
        sys.stdout = sys.__stdout__ = None  # type: ignore[assignment, misc]
    if "2" in closed:
        sys.stderr = sys.__stderr__ = None  # type: ignore[assignment, misc]


if __name__ == "__main__":
    main()
