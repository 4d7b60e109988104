"""Accelerate makes another loader of every loader: of ours it is ours again, and training is the same, bit for bit, when
workers die. That it was torch's is seen afterwards in the traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.explained import explain

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300, method="thread")]

DEATH = """
import multiprocessing
import os
import torch
from accelerate import Accelerator
import holdfast

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 40:
            received.wait(60)
            os.kill(os.getpid(), HOW)
        return torch.tensor(index)

# A batch that was not read dies with torch's worker, and then one error interrupts the printing of another. So worker 0
# waits until all it has made so far was received.
received = multiprocessing.Event()

accelerator = Accelerator(cpu=True)
prepared = accelerator.prepare(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2))
for number, batch in enumerate(prepared):
    if number == 8:
        received.set()
print("through", flush=True)
"""

TRAINING = """
import hashlib
import os
import signal
import sys
from pathlib import Path
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
import holdfast

which, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])

def load(index):
    if which != "torch" and index == 17:
        try:
            (folder / f"killed-{which}").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass
    return torch.tensor([float(index), 1.0]), torch.rand(1)

class Map(torch.utils.data.Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, index):
        return load(index)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return map(load, range(info.id, 48, info.num_workers))

def main():
    torch.manual_seed(3)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=3,
        dataloader_config=DataLoaderConfiguration(
            split_batches=kind == "split", dispatch_batches=True if kind == "dispatch" else None
        ),
    )
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    dataset = Stream() if kind == "stream" else Map()
    shuffle = None if kind == "stream" else True
    arguments = dict(batch_size=4, shuffle=shuffle, num_workers=2)
    if which == "ours":
        loader = holdfast.DataLoader(dataset, **arguments, name="train")
    else:
        loader = torch.utils.data.DataLoader(dataset, **arguments)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    del loader
    seen = []
    for epoch in range(2):
        used = skip_first_batches(prepared, 2) if kind == "skip" and epoch == 0 else prepared
        for inputs, targets in used:
            with accelerator.accumulate(model):
                loss = ((model(inputs) - targets) ** 2).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.append((inputs[:, 0].tolist(), accelerator.sync_gradients))
    weights = [one.tolist() for one in accelerator.unwrap_model(model).parameters()]
    digest = hashlib.sha256(repr((seen, weights)).encode()).hexdigest()
    steps = sum(synchronised for _, synchronised in seen)
    (folder / f"learned-{which}-{accelerator.process_index}").write_text(
        f"{len(seen)} batches, {steps} steps, {digest}"
    )
    if which == "ours":
        loaders = sorted({one.loader for one in holdfast.incidents()})
        (folder / f"deaths-{accelerator.process_index}").write_text(" ".join(loaders))
    accelerator.end_training()

if __name__ == "__main__":
    main()
"""


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, timeout=250, check=False, cwd=cwd,
    )  # fmt: skip


def training(folder: Path, which: str, kind: str, processes: int) -> list[str]:
    """What each rank has seen and learned."""
    script = folder / "train.py"
    script.write_text(TRAINING)
    command = [str(script), which, kind, str(folder)]
    if processes > 1:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = ["-m", *launcher, *command]
    if which == "run":
        command = ["-m", "holdfast", "run", *command]
    ended = python(*command, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert "Accelerate replaces" not in ended.stderr
    return [path.read_text() for path in sorted(folder.glob(f"learned-{which}-*"))]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "processes"),
    [
        ("map", 1),
        ("map", 2),
        ("skip", 1),
        pytest.param("skip", 2, marks=slow),
        pytest.param("split", 1, marks=slow),
        pytest.param("split", 2, marks=slow),
        pytest.param("dispatch", 1, marks=slow),
        pytest.param("dispatch", 2, marks=slow),
        pytest.param("stream", 1, marks=slow),
        pytest.param("stream", 2, marks=slow),
    ],
)
def test_with_our_loader_training_is_the_same_and_survives_a_death(
    kind: str, processes: int, tmp_path: Path
) -> None:
    """Batches, optimizer steps at the end of the loader too, and weights, bit for bit. The loader that Accelerate makes
    has the name of ours."""
    expected = training(tmp_path, "torch", kind, processes)
    assert len(expected) == processes
    assert training(tmp_path, "ours", kind, processes) == expected
    deaths = [path.read_text() for path in tmp_path.glob("deaths-*")]
    assert sorted(deaths) == [""] * (processes - 1) + ["train"]


@pytest.mark.parametrize(("kind", "processes"), [("map", 1), pytest.param("map", 2, marks=slow)])
def test_below_holdfast_run_training_is_the_same_and_survives_a_death(
    kind: str, processes: int, tmp_path: Path
) -> None:
    expected = training(tmp_path, "torch", kind, processes)
    assert training(tmp_path, "run", kind, processes) == expected
    assert (tmp_path / "killed-run").exists()


@pytest.mark.parametrize("how", ["signal.SIGKILL", "signal.SIGSEGV"])
def test_a_death_below_prepare_is_told_as_that_of_torchs_worker(how: str) -> None:
    died = python("-c", "import signal\n" + DEATH.replace("HOW", how))
    assert died.returncode != 0
    found = explain(died.stderr)
    assert found.known, died.stderr
    assert found.rebuilt, died.stderr
    assert "none was replaced, and the run ended" in " ".join(found.verdicts[0].because)
