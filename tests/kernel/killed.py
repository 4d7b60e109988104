"""A trainer that is killed in the middle of an epoch, after it has forked a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("refusing")))
import refusal

refusal.apply()

from holdfast import DataLoader  # noqa: E402


class Slow:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index:
            time.sleep(600)
        return index


def main() -> None:
    iterator = iter(DataLoader(Slow(), num_workers=2))
    next(iterator)
    holder = os.fork()
    if holder == 0:
        time.sleep(600)
    ours = [worker.pid for worker in iterator._workers] + [
        iterator._pool.driver.resources.nursery.pid
    ]
    Path(sys.argv[1]).write_text(json.dumps({"ours": ours, "holder": holder}))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
