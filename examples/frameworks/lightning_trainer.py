"""Lightning's Trainer. One line is different: where DataLoader comes from.

The loaders that Lightning makes of ours are ours, with their options.
"""

import lightning
import torch

from holdfast import DataLoader


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    loader = DataLoader(torch.rand(64, 4), batch_size=8, shuffle=True, num_workers=2, name="train")
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False
    )
    trainer.fit(Model(), loader)
    print("workers that died:", len(loader.incidents))
