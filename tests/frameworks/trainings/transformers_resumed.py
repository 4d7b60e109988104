"""The Trainer of Transformers, stopped in the middle of the second epoch and resumed from its checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tests.frameworks.trainings.accelerate_loop import new_accelerator
from tests.frameworks.trainings.parts import Loader
from tests.frameworks.trainings.transformers_trainer import trainer_for

SAVED = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 1}
STOPS_AT = 8
"""Of 12 steps."""
_trainings = itertools.count()


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == STOPS_AT


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    folder = folder / f"training-{next(_trainings)}"
    new_accelerator()
    first = trainer_for(loader, folder, forgiving, **SAVED)
    first.add_callback(Stops())
    first.train()
    assert first.state.global_step == STOPS_AT
    new_accelerator()
    second = trainer_for(loader, folder, forgiving, **SAVED)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 12
    return second.model
