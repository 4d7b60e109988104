"""Accelerate makes a torch loader of ours: that it is seen afterwards, and that what we recommend
against it leaves training as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.autopsy.catalogue import CATALOGUE
from holdfast.autopsy.explain import explain

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300, method="thread")]

RECIPE = CATALOGUE["accelerate-rebuild"].remedies[0].command

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

# A batch that nobody has read dies with torch's worker, and then one error interrupts the printing
# of another. So worker 0 waits until all it has made so far was received.
received = multiprocessing.Event()

accelerator = Accelerator(cpu=True)
prepared = accelerator.prepare(holdfast.DataLoader(Data(), batch_size=4, num_workers=2))
RECIPE
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
from accelerate import Accelerator
import holdfast

which, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])

def load(index):
    if which == "holdfast" and index == 17:
        try:
            (folder / "killed").touch(exist_ok=False)
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
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    loader_class = torch.utils.data.DataLoader if which == "torch" else holdfast.DataLoader
    dataset = Map() if kind == "map" else Stream()
    loader = loader_class(dataset, batch_size=4, shuffle=kind == "map" or None, num_workers=2)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    if which == "holdfast":
        RECIPE
    seen = []
    for _ in range(2):
        for inputs, targets in prepared:
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
    if which == "holdfast":
        (folder / f"deaths-{accelerator.process_index}").write_text(
            str(len(prepared.base_dataloader.incidents))
        )
    accelerator.end_training()

if __name__ == "__main__":
    main()
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=250, check=False
    )


def training(folder: Path, which: str, kind: str, processes: int) -> list[str]:
    """What each rank has seen and learned."""
    recipe = RECIPE
    if kind == "stream":  # as the remedy says in words
        recipe = recipe.replace(
            "batch_sampler=base.batch_sampler",
            "batch_size=base.batch_size, drop_last=base.drop_last",
        )
    script = folder / f"train_{which}.py"
    script.write_text(TRAINING.replace("RECIPE", recipe.replace("\n", "\n        ")))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    ended = python(*(launcher if processes > 1 else []), str(script), which, kind, str(folder))
    assert ended.returncode == 0, ended.stderr
    return [path.read_text() for path in sorted(folder.glob(f"learned-{which}-*"))]


@pytest.mark.parametrize(
    ("kind", "processes"),
    [
        ("map", 1),
        ("map", 2),
        pytest.param("stream", 1, marks=pytest.mark.slow),
        pytest.param("stream", 2, marks=pytest.mark.slow),
    ],
)
def test_with_our_loader_put_back_training_is_the_same_and_survives_a_death(
    kind: str, processes: int, tmp_path: Path
) -> None:
    """Batches, optimizer steps at the end of the loader too, and weights, bit for bit."""
    expected = training(tmp_path, "torch", kind, processes)
    assert len(expected) == processes
    assert training(tmp_path, "holdfast", kind, processes) == expected
    deaths = [int(path.read_text()) for path in tmp_path.glob("deaths-*")]
    assert (len(deaths), sum(deaths)) == (processes, 1)


@pytest.mark.parametrize("how", ["signal.SIGKILL", "signal.SIGSEGV"])
def test_a_death_below_prepare_is_told_as_that_of_torchs_worker(how: str) -> None:
    died = python("-c", "import signal\n" + DEATH.replace("HOW", how).replace("RECIPE", ""))
    assert died.returncode != 0
    found = explain(died.stderr)
    assert found.known, died.stderr
    assert found.rebuilt, died.stderr
    assert "none was replaced, and the run ended" in " ".join(found.verdicts[0].because)
