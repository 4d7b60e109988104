"""Pinned memory on your accelerator: is it right, and does it overlap with the training step?

    python -m benchmarks.pinned                 # with a GPU: checks and measures, about a minute
    python -m benchmarks.pinned --pretend 20    # without: pinning a batch is said to take 20 ms

Every way to pin is checked first: all batches arrive on the device as torch's loader delivers them,
although workers are killed, although each batch is dropped as soon as its copy to the device has
been ordered, and although the device is busy at that moment and copies late. Then steps of equal
length are timed, in turns; the table shows medians.

Exit status 1 if a batch was wrong, 2 if there is no accelerator.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data

from holdfast import DataLoader

ROUNDS = 3
KILL_EVERY = 7  # batches


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Sample k is full of k."""

    def __init__(self, size: int, nbytes: int) -> None:
        self.size, self.numbers = size, nbytes // 4

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.numbers,), index, dtype=torch.int32)


@dataclass(frozen=True)
class Way:
    """One way to get batches into pinned memory."""

    name: str
    loader: Callable[..., Any]
    options: dict[str, Any]
    by_hand: bool = False  # in the step, by the script


WAYS = (
    Way("torch, in its thread", torch.utils.data.DataLoader, {"pin_memory": True}),
    Way("holdfast, copied in the step", DataLoader, {}, by_hand=True),
    Way("holdfast, in its thread", DataLoader, {"pin_memory": True}),
    Way("holdfast, in place", DataLoader, {"pin_memory": True, "pin_in_place": "auto"}),
)


class Device:
    """What a training step does with a batch."""

    name = ""

    def prepare(self, milliseconds: float) -> None:
        """Find out how much work takes so long."""

    def send(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        raise NotImplementedError

    def step(self, batch: torch.Tensor) -> None:
        """Train, and wait for the result."""

    def synchronize(self) -> None:
        """Wait for everything."""


class Accelerator(Device):
    """A real one."""

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator()
        assert found is not None
        self.device = found
        index = torch.accelerator.current_device_index()
        self.name = f"{found.type}:{index}"
        if found.type == "cuda":
            self.name += f" ({torch.cuda.get_device_name(index)})"
        self._weights = torch.randn(2048, 2048, device=self.device)
        self._side = torch.Stream(self.device)
        self._products = 1

    def prepare(self, milliseconds: float) -> None:
        self._multiply(20)
        self.synchronize()
        began = time.perf_counter()
        self._multiply(50)
        self.synchronize()
        each = (time.perf_counter() - began) / 50
        self._products = max(1, round(milliseconds / 1000 / each))

    def send(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        """Late: behind work that the device has to do first. On another stream every second time,
        as loaders that prefetch to the device do."""
        if number % 2:
            self._multiply(self._products)
            return batch.to(self.device, non_blocking=True)
        main = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self._side)
        try:
            self._multiply(self._products)
            sent = batch.to(self.device, non_blocking=True)
        finally:
            torch.accelerator.set_stream(main)
        main.wait_stream(self._side)
        return sent

    def step(self, batch: torch.Tensor) -> None:
        batch.to(self.device, non_blocking=True)
        self._multiply(self._products)
        self.synchronize()

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            self._weights = torch.tanh(self._weights @ self._weights)


class Pretended(Device):
    """None: torch is told that there is one, and that to pin a tensor takes so long."""

    def __init__(self, milliseconds: float) -> None:
        self.name = f"none (pinning a tensor takes {milliseconds:g} ms)"
        self._seconds = 0.0
        accelerator: Any = torch.accelerator
        accelerator.is_available = lambda: True
        accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
        accelerator.current_device_index = lambda: 0
        accelerator.set_device_index = lambda index: None

        def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
            time.sleep(milliseconds / 1000)
            return tensor.clone()

        torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign]

    def prepare(self, milliseconds: float) -> None:
        self._seconds = milliseconds / 1000

    def send(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return batch.clone()

    def step(self, batch: torch.Tensor) -> None:
        time.sleep(self._seconds)


@dataclass
class Plan:
    """How much of it."""

    megabytes: float
    batches: int
    workers: int
    samples: int = 8  # in a batch

    def loader(self, way: Way) -> Any:
        nbytes = int(self.megabytes * 1e6 / self.samples)
        dataset = Samples(self.batches * self.samples, nbytes)
        return way.loader(dataset, batch_size=self.samples, num_workers=self.workers, **way.options)


def check(plan: Plan, way: Way, device: Device) -> tuple[bool, str]:
    """Whether every batch arrives on the device as it was made."""
    loader = plan.loader(way)
    ours = way.loader is DataLoader
    right: list[torch.Tensor] = []
    pinned = 0
    iterator = iter(loader)
    for number, batch in enumerate(iterator):
        if way.by_hand:
            batch = batch.pin_memory()
        pinned += batch.is_pinned()
        expected = torch.arange(plan.samples, dtype=torch.int32) + number * plan.samples
        sent = device.send(batch, number)
        del batch  # its memory may be used again, but not before it is copied
        right.append((sent == expected.to(sent.device)[:, None]).all())
        if ours and number % KILL_EVERY == KILL_EVERY - 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(iterator._workers[number // KILL_EVERY % plan.workers].pid, signal.SIGKILL)
    device.synchronize()
    wrong = [number for number, one in enumerate(right) if not bool(one)]
    told = f"{len(right)} batches, {pinned} pinned"
    if ours:
        told += f", {len(loader.incidents)} workers killed"
    if wrong or len(right) != plan.batches:
        return False, f"{told}: WRONG {wrong[:10]}"
    return True, f"{told}: all right"


def measure(plan: Plan, way: Way, device: Device) -> tuple[float, float]:
    """Milliseconds of a step, and of these in `next()`."""
    iterator = iter(plan.loader(way))
    waited: list[float] = []
    steps: list[float] = []
    while True:
        began = time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            break
        got = time.perf_counter()
        if way.by_hand:
            batch = batch.pin_memory()
        device.step(batch)
        waited.append(got - began)
        steps.append(time.perf_counter() - began)
    warm = len(steps) // 4
    return statistics.median(steps[warm:]) * 1000, statistics.median(waited[warm:]) * 1000


def ways(device: Device) -> Iterator[Way]:
    for way in WAYS:
        if "pin_in_place" in way.options and not device.name.startswith("cuda"):
            print(f"{way.name}: left out, it needs CUDA")
        else:
            yield way


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pinned", description="Pinned memory: checked and measured."
    )
    parser.add_argument("--pretend", type=float, metavar="MS", help="without an accelerator")
    parser.add_argument("--step", type=float, default=20, metavar="MS", help="of training (20)")
    parser.add_argument("--megabytes", type=float, default=40, help="of a batch (40)")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    if asked.pretend is not None:
        device: Device = Pretended(asked.pretend)
    elif torch.accelerator.is_available():
        device = Accelerator()
    else:
        print("There is no accelerator here. With --pretend 20 one is pretended.")
        return 2
    print(f"torch {torch.__version__}, accelerator: {device.name}")
    print(f"{asked.workers} workers, batches of {asked.megabytes:g} MB, steps of {asked.step:g} ms")
    plan = Plan(asked.megabytes, asked.batches, asked.workers)
    device.prepare(asked.step)
    chosen = list(ways(device))
    good = True
    for way in chosen:
        passed, told = check(plan, way, device)
        print(f"{way.name}: {told}")
        good &= passed
    taken: dict[str, list[tuple[float, float]]] = {way.name: [] for way in chosen}
    for number in range(ROUNDS):
        for way in (*chosen[number:], *chosen[:number]):
            taken[way.name].append(measure(plan, way, device))
    print(f"\n{'':32}{'ms per step':>12}{'in next()':>12}")
    for name, rounds in taken.items():
        whole, waiting = (statistics.median(one) for one in zip(*rounds, strict=True))
        print(f"{name:32}{whole:12.1f}{waiting:12.1f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
