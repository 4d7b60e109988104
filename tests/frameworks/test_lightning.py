"""Lightning's own launchers put no rank into the environment: messages and logbooks tell the ranks
apart all the same, and the loader that Lightning makes anew keeps its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.run_report import logged_run

pytest.importorskip("lightning")
pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300, method="thread")]

TRAINING = """
import os
import signal
import sys
from pathlib import Path
import lightning
import torch
from holdfast import DataLoader

strategy, folder = sys.argv[1], Path(sys.argv[2])

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        mark = folder / f"killed-{torch.distributed.get_rank()}"
        if index in (6, 7) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([float(index)])

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, number):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def main():
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(
        Numbers(),
        batch_size=2,
        num_workers=1,
        name="train",
        logbook=folder / "book",
        multiprocessing_context="fork",
    )
    trainer.fit(Model(), loader)

if __name__ == "__main__":
    main()
"""
# `torch.distributed.get_rank()` in a worker: forked, it has what its trainer had.


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp_spawn", marks=pytest.mark.slow)])
def test_ranks_are_told_apart(strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launchers}
    ended = subprocess.run(
        [sys.executable, str(script), strategy, str(tmp_path)],
        capture_output=True, text=True, timeout=280, env=environment, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    story = logged_run.read(tmp_path / "book")
    assert [run["rank"] for run in story.runs] == [0, 1]
    told = sorted((one["rank"], one["loader"], one["cause"]) for one in story.incidents)
    assert told == [
        (0, "train", "killed-from-outside"),
        (1, "train", "killed-from-outside"),
    ]
    for rank in (0, 1):
        assert f"[train, rank {rank}] worker 0 (pid " in ended.stderr
    assert (tmp_path / "book" / "rank-1" / "incidents.jsonl").exists()
