"""One function for each training. In its first part it saves its state in the middle of an epoch and is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import set_seed
from lightning import pytorch as lightning
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import holdfast
from tests.frameworks.resumed.parts import BATCH, BREAK, EPOCHS, Part, Samples
from tests.frameworks.trainings.lightning_trainer import QUIET
from tests.frameworks.trainings.parts import Network, loss_of
from tests.frameworks.trainings.transformers_trainer import TINY


def loader_of(part: Part, **given: Any) -> Any:
    kind = holdfast.DataLoader if part.way == "import" else torch.utils.data.DataLoader
    return kind(Samples(part), **{"batch_size": BATCH, "num_workers": 2, **given})


# -- Lightning ------------------------------------------------------------------------------


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return loss_of(self.network, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Saves(lightning.Callback):
    def __init__(self, part: Part, path: Path) -> None:
        self.part, self.path = part, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.part.breaks(trainer.global_step):
            trainer.save_checkpoint(self.path)
            self.part.end_by_kill()


def lightning_trainer(part: Part) -> None:
    path = part.folder / "checkpoint.ckpt"
    torch.manual_seed(11)
    loader = loader_of(
        part, shuffle=True, persistent_workers=True, generator=torch.Generator().manual_seed(3)
    )
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, callbacks=[Saves(part, path)], **QUIET
    )
    trainer.fit(module, loader, ckpt_path=path if part.which == "second" else None)
    assert trainer.global_step == 12
    part.end(module)


# -- Accelerate -----------------------------------------------------------------------------


def _accelerated(part: Part, skips: bool) -> None:
    set_seed(11)
    configuration = DataLoaderConfiguration(
        use_stateful_dataloader=not skips and part.way != "torch", use_seedable_sampler=True
    )
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    network = Network()
    model, optimizer, batches = accelerator.prepare(
        network,
        torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
        loader_of(part, shuffle=True),
    )
    begin, skipped = 0, 0
    if part.which == "second":
        accelerator.load_state(str(part.folder / "accelerate"))
        begin, skipped = divmod(BREAK, len(batches))
    step = BREAK if part.which == "second" else 0
    for epoch in range(begin, EPOCHS):
        batches.set_epoch(epoch)
        used = skip_first_batches(batches, skipped) if skips and skipped else batches
        skipped = 0
        for batch in used:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if part.breaks(step):
                accelerator.save_state(str(part.folder / "accelerate"))
                part.end_by_kill()
    assert step == 12
    part.end(network)


def accelerate_stateful(part: Part) -> None:
    """``use_stateful_dataloader=True``: ``load_state`` brings the loader to its place."""
    _accelerated(part, skips=False)


def accelerate_skip(part: Part) -> None:
    """``skip_first_batches``: nothing of the loader is saved."""
    _accelerated(part, skips=True)


# -- Transformers ---------------------------------------------------------------------------


class WithOurLoader(Trainer):
    part: Part

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(
            loader_of(self.part, sampler=self._get_train_sampler(), collate_fn=collated)
        )


class EndsAfterSaving(TrainerCallback):
    def __init__(self, part: Part) -> None:
        self.part = part

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.part.breaks(state.global_step):
            self.part.end_by_kill()


def collated(rows: list[Any]) -> Any:
    """The values of a sample are its tokens."""
    ids = torch.stack([one for one, _ in rows]).mul(1000).long().remainder(16)
    return {"input_ids": ids, "labels": torch.tensor([label for _, label in rows])}


def transformers_trainer(part: Part) -> None:
    arguments = TrainingArguments(
        output_dir=str(part.folder / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        dataloader_num_workers=2,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="steps",
        save_steps=BREAK,
    )
    kind = Trainer
    if part.way == "import":
        kind = type("Ours", (WithOurLoader,), {"part": part})
    trainer = kind(
        model=BertForSequenceClassification(BertConfig.from_dict(TINY.to_dict())),
        args=arguments,
        train_dataset=Samples(part),
        data_collator=collated,
        callbacks=[EndsAfterSaving(part)],
    )
    trainer.train(resume_from_checkpoint=part.which == "second")
    assert trainer.state.global_step == 12
    part.end(trainer.model)


# -- DistributedDataParallel ------------------------------------------------------------------


def two_ranks(part: Part) -> None:
    """One of two ranks; each saves the state of its loader."""
    path = part.folder / f"rank-{part.rank}.pt"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{part.folder / ('ranks-' + part.which)}",
        rank=part.rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    torch.manual_seed(11)
    samples = Samples(part)
    sampler: DistributedSampler[int] = DistributedSampler(samples, shuffle=True, seed=3)
    loader = loader_of(part, batch_size=BATCH // 2, sampler=sampler, persistent_workers=True)
    state = holdfast.of(loader) if part.way == "install" else loader
    network = Network()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    begin = step = 0
    if part.which == "second":
        saved = torch.load(path, weights_only=True)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["loader"])
        step, begin = BREAK, BREAK // len(loader)
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            step += 1
            if part.breaks(step):
                torch.save(
                    {
                        "model": network.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "loader": state.state_dict(),
                    },
                    path,
                )
                part.end_by_kill()
    assert step == 12
    part.end(network)
    distributed.destroy_process_group()
