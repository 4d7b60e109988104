"""A training script that can be killed at any time, even by SIGKILL, and started again.

    python examples/resume.py        # kill it, start it again, as often as you like
    python examples/resume.py --steps 12   # ends by itself after so many steps, as a preempted job

It ends with the same weights, to the last bit, as a run that was never killed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from holdfast import DataLoader

EPOCHS = 3


class Points(torch.utils.data.Dataset[torch.Tensor]):
    """Points near a line, with noise that is drawn anew each time."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        x = index / 64
        return torch.tensor([x, 3 * x + 1]) + 0.01 * torch.randn(2)


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Never half a checkpoint: the new one replaces the old one when it is complete."""
    new = path.with_suffix(".new")
    torch.save(checkpoint, new)
    os.replace(new, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--steps", type=int, default=1 << 30)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)  # shuffles; its state is in the loader's
    loader = DataLoader(Points(), batch_size=4, shuffle=True, num_workers=2, generator=generator)
    begin = 0
    if arguments.checkpoint.exists():
        checkpoint = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loader"])
        begin = checkpoint["epoch"]
        print(f"goes on in epoch {begin} after batch {checkpoint['loader']['batches']}")

    steps = 0
    for epoch in range(begin, EPOCHS):
        for batch in loader:
            x, y = batch[:, :1], batch[:, 1:]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            save(
                arguments.checkpoint,
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                    "epoch": epoch,
                },
            )
            steps += 1
            if steps >= arguments.steps:
                return
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest()[:16])


if __name__ == "__main__":
    main()
