"""The Trainer of Transformers, with a BERT of a few hundred weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import seed_worker

from tests.frameworks.trainings.accelerate_loop import new_accelerator
from tests.frameworks.trainings.parts import BATCH, EPOCHS, Loader, Samples, label

TINY = BertConfig(
    vocab_size=16,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    intermediate_size=8,
    max_position_embeddings=8,
)


class Sentences(Samples):
    def made(self, sample: torch.Tensor, index: int) -> Any:
        return {"input_ids": torch.randint(0, 16, (8,)), "labels": label(index)}


def without_none(rows: list[Any]) -> Any:
    return default_data_collator([row for row in rows if row is not None])


class WithOtherLoader(Trainer):
    """The Trainer makes torch's loaders. This is how to give it another."""

    loader: Loader

    def get_train_dataloader(self) -> Any:
        workers = self.args.dataloader_num_workers
        rank = self.args.process_index
        return self.accelerator.prepare(
            type(self).loader(
                self.train_dataset,
                batch_size=self._train_batch_size,
                sampler=self._get_train_sampler(),
                collate_fn=self.data_collator,
                num_workers=workers,
                worker_init_fn=functools.partial(seed_worker, num_workers=workers, rank=rank),
            )
        )


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        dataloader_num_workers=2,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **{"save_strategy": "no", "gradient_accumulation_steps": 4, **given},
    )


def trainer_for(loader: Loader, folder: Path, forgiving: bool, **given: Any) -> Trainer:
    kind: type[Trainer] = Trainer
    if loader is not torch.utils.data.DataLoader:
        kind = type("Ours", (WithOtherLoader,), {"loader": staticmethod(loader)})
    return kind(
        model=BertForSequenceClassification(TINY),
        args=arguments(folder, **given),
        train_dataset=Sentences(forgiving),
        data_collator=without_none,
    )


def train(loader: Loader, folder: Path, forgiving: bool) -> torch.nn.Module:
    new_accelerator()  # forgets the one of a training before this one
    trainer = trainer_for(loader, folder, forgiving)
    trainer.train()
    return trainer.model
