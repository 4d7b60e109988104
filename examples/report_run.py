"""A short training in which much goes wrong, with a logbook: something for ``holdfast report``.

    python examples/report_run.py runs/demo
    holdfast report runs/demo --open

Workers are killed, one crashes in a sample, three files are damaged, and the dataset leaks, so that
workers are replaced for their size. The training goes on to its end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from pathlib import Path

import torch

from holdfast import DataLoader

DAMAGED = (117, 404, 731)
CRASHES = 250  # once
EVERY = 60  # batches from one kill to the next


class Images(torch.utils.data.Dataset):
    """Pictures that take some milliseconds to load, from a folder that does not exist."""

    def __init__(self, length: int, crash: Path | None = None) -> None:
        self.length = length
        self.crash = crash
        self.cache: list[bytearray] = []

    def __len__(self) -> int:
        return self.length

    def sample_name(self, index: int) -> str:
        return f"images/{index // 100:02d}/{index:05d}.jpg"

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(random.Random(index).lognormvariate(-5.6, 0.6))
        if index in DAMAGED:
            raise OSError(f"image file is truncated: '{self.sample_name(index)}'")
        if index == CRASHES and self.crash is not None and not self.crash.exists():
            self.crash.touch()
            os.abort()
        if self.crash is not None:
            self.cache.append(bytearray(150_000))  # the leak
        side = 64 if index % 7 else 96
        picture = torch.randn(3, side, side)
        return torch.nn.functional.adaptive_avg_pool2d(picture, 64), index % 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logbook", type=Path)
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    book: Path = arguments.logbook
    book.mkdir(parents=True, exist_ok=True)
    crash = book / "crashed"
    train = DataLoader(
        Images(1200, crash), batch_size=24, shuffle=True, num_workers=4, persistent_workers=True,
        on_bad_sample="skip", worker_memory_limit="120MiB", logbook=book, name="train",
    )  # fmt: skip
    validate = DataLoader(
        Images(200), batch_size=50, num_workers=2, on_bad_sample="skip", logbook=book, name="val"
    )
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64 * 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dice = random.Random(1)
    done = 0
    for epoch in range(arguments.epochs):
        iterator = iter(train)
        for pictures, labels in iterator:
            loss = torch.nn.functional.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.02)  # a larger model
            done += 1
            if done % EVERY == 0:
                os.kill(iterator._workers[dice.randrange(4)].pid, signal.SIGKILL)
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in validate)
        print(f"epoch {epoch}: {right} right", flush=True)
    crash.unlink(missing_ok=True)
    print(f"Now: holdfast report {book} --open")


if __name__ == "__main__":
    main()
