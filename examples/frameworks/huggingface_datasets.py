"""A table and a stream of Hugging Face's datasets.

One line is different: where DataLoader comes from. After a death a stream is continued from its
state, or drawn again and compared: each row comes once.
"""

from datasets import Dataset

from holdfast import DataLoader

table = Dataset.from_dict({"number": list(range(64))}).with_format("torch")
loader = DataLoader(table, batch_size=8, shuffle=True, num_workers=2)
print("rows of the table:", sum(len(batch["number"]) for batch in loader))
print("workers that died:", len(loader.incidents))

stream = table.to_iterable_dataset(num_shards=4).shuffle(seed=42, buffer_size=16)
loader = DataLoader(stream, batch_size=8, num_workers=2, persistent_workers=True)
for epoch in range(2):
    stream.set_epoch(epoch)  # reaches persistent workers, and those that replace them
    print(
        "rows of the stream:", sorted(n for batch in loader for n in batch["number"].tolist())[-1]
    )
loader.close()
