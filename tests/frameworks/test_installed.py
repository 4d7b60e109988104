"""``holdfast.install`` in programs of Lightning, and beside torchdata's StatefulDataLoader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300, method="thread")]

LIGHTNING = """
import hashlib
import os
import signal
import sys
import time
from pathlib import Path
import lightning
import torch
from torch.utils.data import DataLoader
import holdfast

which, persistent, folder = sys.argv[1], sys.argv[2] == "persistent", Path(sys.argv[3])

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        mark = folder / f"killed-{index}"
        if which == "ours" and index in (7, 15) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([float(index)]) + torch.rand(1)

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, number):
        return self.layer(batch).mean()
    def validation_step(self, batch, number):
        self.log("seen", batch.sum())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def children():
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [pid for one in found for pid in one.read_text().split()]

def loader(shuffle):
    return DataLoader(Numbers(), batch_size=2, shuffle=shuffle, num_workers=2, persistent_workers=persistent)

def main():
    if which == "ours":
        holdfast.install()
    lightning.seed_everything(3, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    model = Model()
    train, val = loader(True), loader(False)
    trainer.fit(model, train, val)
    seen = trainer.callback_metrics["seen"].tolist(), [one.tolist() for one in model.parameters()]
    print(hashlib.sha256(repr(seen).encode()).hexdigest())
    if which == "ours":
        assert holdfast.of(train).engine == holdfast.of(val).engine == "holdfast"
        assert [one.kind for one in holdfast.incidents()] == ["killed", "killed"]
        deadline = time.monotonic() + 10
        while children() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not children(), "workers are left after fit"

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("kept", ["persistent", pytest.param("", marks=pytest.mark.slow)])
def test_training_with_lightning_is_the_same_and_leaves_no_worker(
    kept: str, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING)
    seen = []
    for which in ("torch", "ours"):
        ended = subprocess.run(
            [sys.executable, str(script), which, kept, str(tmp_path)],
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        seen.append(ended.stdout)
    assert seen[0] == seen[1]


STATEFUL = """
import holdfast
from torchdata.stateful_dataloader import StatefulDataLoader

holdfast.install()
loader = StatefulDataLoader(list(range(8)), batch_size=2, num_workers=2)
iterator = iter(loader)
next(iterator)
state = loader.state_dict()
del iterator
loader = StatefulDataLoader(list(range(8)), batch_size=2, num_workers=2)
loader.load_state_dict(state)
print([batch.tolist() for batch in loader], holdfast.of(loader).engine)
"""


def test_torchdatas_loader_keeps_its_own_iterator_and_that_is_said_once() -> None:
    pytest.importorskip("torchdata")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STATEFUL],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.stdout == "[[2, 3], [4, 5], [6, 7]] torch\n", ended.stderr
    assert ended.stderr.splitlines() == [
        "StatefulDataLoader keeps torch's engine: it makes an iterator of its own "
        "(_StatefulMultiProcessingDataLoaderIter). Its workers are not replaced when they die or hang, and holdfast's "
        "options have no effect on it"
    ]
