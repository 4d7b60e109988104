"""The training run of the demo, an ordinary script: a small network learns to tell shapes apart.

`demo.py` starts it with the loader to use, and sends it a line when it is to begin, and one for
each epoch after the first three. It reports what it does on standard output, one JSON object per
line, and dies of an error like any other script.

Loading a sample draws from the random state of `torch`, `random` and `numpy` in its worker, as
augmentations do. So the final loss depends on every random number that every worker draws, and a
worker that is replaced must go on exactly where its predecessor was to arrive at the same loss.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_run import BATCH_SIZE, BATCHES, EPOCHS, MEMORY_LIMIT, STALL_TIMEOUT, WORKERS
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, get_worker_info

SIZE = 32  # pixels each way
LEARNING_RATE, MOMENTUM = 0.05, 0.9
READ_SECONDS = 0.004  # what fetching one picture from a network disk may take
LEAK = 250_000  # bytes for each sample
SHAPES = ("disc", "ring", "square", "cross")
HELD_OUT = range(1_000_000, 1_000_256)  # pictures that are never trained on
Sample = tuple[Tensor, int]
Array = np.ndarray[Any, Any]


def report(event: str, **details: Any) -> None:
    """Write one line in one piece: workers write into the same pipe."""
    line = json.dumps({"event": event, "time": time.monotonic(), **details})
    os.write(1, line.encode() + b"\n")


# -- data ---------------------------------------------------------------------------------


class Shapes(Dataset[Sample]):
    """Pictures of a disc, a ring, a square or a cross, a file for each; some samples bring their
    worker down, and some stay in memory."""

    def __init__(self, pictures: Path, faults: Path) -> None:
        self.files = sorted(pictures.iterdir())
        self.faults = faults
        self.kept: list[bytearray] = []

    def __len__(self) -> int:
        return len(self.files)

    def sample_name(self, index: int) -> str:
        return f"{self.files[index].parent.name}/{self.files[index].name}"

    def __getitem__(self, index: int) -> Sample:
        time.sleep(READ_SECONDS)
        suffer(self.faults, index)
        if (self.faults / "leak").exists():
            self.kept.append(bytearray(LEAK))
        file = self.files[index]
        image = torch.from_numpy(np.load(file)).float()
        if random.random() < 0.5:
            image = image.flip(-1)
        gain = float(np.random.uniform(0.5, 1.5))
        noisy = image * gain + 0.2 * torch.randn(image.shape)
        return noisy, SHAPES.index(file.stem.partition("-")[2])


def draw(index: int) -> tuple[Array, int]:
    """Picture number `index`, always the same."""
    rng = np.random.default_rng(index)
    label = int(rng.integers(len(SHAPES)))
    y, x = np.mgrid[:SIZE, :SIZE] - rng.uniform(10, SIZE - 10, size=(2, 1, 1))
    radius, far = rng.uniform(5, 9), np.maximum(abs(x), abs(y))
    inside = (
        np.hypot(x, y) < radius,
        abs(np.hypot(x, y) - radius) < 2,
        far < radius,
        (far < radius) & (np.minimum(abs(x), abs(y)) < 2),
    )[label]
    return inside[None], label


def make_pictures(folder: Path) -> None:
    """The files, if they are not there yet."""
    folder.mkdir(exist_ok=True)
    for index in range(BATCHES * BATCH_SIZE):
        picture, label = draw(index)
        np.save(folder / f"{index:04d}-{SHAPES[label]}.npy", picture)


# -- faults -------------------------------------------------------------------------------


def segfault() -> None:
    ctypes.string_at(0)


def hang() -> None:
    threading.Event().wait()  # for what is never set


def suffer(folder: Path, sample: int) -> None:
    """Do what a token in the folder says, once: the worker that removes it, and no other."""
    for fault in (segfault, hang):
        try:
            (folder / fault.__name__).unlink()
        except FileNotFoundError:
            continue
        info = get_worker_info()
        assert info is not None
        report("fault", fault=fault.__name__, worker=info.id, pid=os.getpid(), sample=sample)
        fault()


# -- training -----------------------------------------------------------------------------


def present(worker: int) -> None:
    """As `worker_init_fn`: tell the demo which process this is."""
    report("worker", worker=worker, pid=os.getpid())


def make_loader(which: str, dataset: Shapes, logbook: Path | None) -> Any:
    options: dict[str, Any] = {}
    if which == "torch":
        from torch.utils.data import DataLoader
    else:
        from holdfast import DataLoader

        # The defaults (300 s, five restarts a minute per worker) are meant for longer runs.
        options = {
            "stall_timeout": STALL_TIMEOUT,
            "max_restarts": None,
            "worker_memory_limit": MEMORY_LIMIT,
            "on_bad_sample": "skip",
            "logbook": logbook,
            "name": "demo",
        }
    return DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        worker_init_fn=present,
        multiprocessing_context="fork",  # the quickest: nothing is imported anew
        **options,
    )


def batches(loader: Any, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The epochs, one batch after the other; incidents are reported before the batch they delay."""
    told = len(getattr(loader, "incidents", ()))
    for _ in range(epochs):
        for number, (images, labels) in enumerate(loader):
            arrived = time.monotonic()
            incidents = getattr(loader, "incidents", ())
            for incident in incidents[told:]:
                tell(incident)
            told = len(incidents)
            recycled = loader.stats()["recycled"] if hasattr(loader, "stats") else 0
            report("batch", batch=number, arrived=arrived, size=len(labels), recycled=recycled)
            yield images, labels


def tell(incident: Any) -> None:
    report(
        "incident",
        end=incident.kind,
        worker=incident.worker_id,
        pid=incident.pid,
        batch=incident.batch,
        sample=incident.sample,
        step=incident.step,
        action=incident.action,
        stack=incident.stack[:2000],
        noticed=time.monotonic() - (time.time() - incident.time),
        words=str(incident),
    )


def train(loader: Any, model: nn.Module, velocities: list[Tensor], epochs: int) -> None:
    """Stochastic gradient descent with momentum.

    Written out, because `torch.optim` imports torch's compiler, which takes longer than all this.
    """
    parameters = list(model.parameters())
    for images, labels in batches(loader, epochs):
        loss = cross_entropy(model(images), labels)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, velocity, gradient in zip(
                parameters, velocities, gradients, strict=True
            ):
                velocity.mul_(MOMENTUM).add_(gradient)
                parameter.sub_(LEARNING_RATE * velocity)
        report("loss", loss=float(loss).hex())


def examine(model: nn.Module) -> None:
    """The loss on pictures the model has not seen: the figure the runs are compared by."""
    pictures = [draw(index) for index in HELD_OUT]
    labels = torch.tensor([label for _, label in pictures])
    with torch.no_grad():
        answers = model(torch.stack([torch.from_numpy(image).float() for image, _ in pictures]))
    right = (answers.argmax(1) == labels).float().mean().item()
    report("end", loss=float(cross_entropy(answers, labels)).hex(), accuracy=right)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("loader", choices=("torch", "holdfast"))
    arguments.add_argument("folder", type=Path, help="for the pictures and tokens of faults")
    arguments.add_argument("--logbook", type=Path, help="holdfast's")
    given = arguments.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are meant; no core files
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    torch.manual_seed(7)
    pictures, faults = given.folder / "pictures", given.folder / f"faults-{os.getpid()}"
    if not pictures.exists():
        make_pictures(pictures)
    faults.mkdir()
    if not sys.stdin.readline():
        return  # the demo is gone
    report("begin")
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * (SIZE // 4) ** 2, 4)),
    )
    loader = make_loader(given.loader, Shapes(pictures, faults), given.logbook)
    velocities = [torch.zeros_like(parameter) for parameter in model.parameters()]
    train(loader, model, velocities, EPOCHS)
    examine(model)
    while sys.stdin.readline():
        train(loader, model, velocities, 1)
        for bad in getattr(loader, "bad_samples", ()):
            report("bad", name=bad.name, words=f"{bad.error}: {bad.message}", action=bad.action)
    report("bye")


if __name__ == "__main__":
    main()
