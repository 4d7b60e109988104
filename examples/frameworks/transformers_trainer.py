"""The Trainer of Transformers.

It makes torch's loaders itself, so holdfast is installed for all loaders of the program.
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import holdfast

holdfast.install(on_bad_sample="replace")


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"input_ids": torch.randint(0, 16, (8,)), "labels": index % 2}


if __name__ == "__main__":
    tiny = BertConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=True,
        num_train_epochs=2,
        dataloader_num_workers=2,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
    )
    Trainer(BertForSequenceClassification(tiny), arguments, train_dataset=Sentences()).train()
    print("workers that died:", len(holdfast.incidents()))
    holdfast.uninstall()
