"""Shards of WebDataset. One line is different: where DataLoader comes from.

WebDataset's own shuffle() is seeded by the time. Use `detshuffle` with a seed: a replacement for a
dead worker can then draw the same.
"""

import tempfile

import webdataset as wds

from holdfast import DataLoader

folder = tempfile.mkdtemp()
for shard in range(4):
    with wds.TarWriter(f"{folder}/{shard}.tar") as tar:
        for number in range(shard * 16, shard * 16 + 16):
            tar.write({"__key__": f"{number:04d}", "cls": number})

shards = [f"{folder}/{shard}.tar" for shard in range(4)]
samples = (
    wds.WebDataset(shards, shardshuffle=4, seed=7)
    .compose(wds.detshuffle(16, seed=42))
    .decode()
    .to_tuple("cls")
)
loader = DataLoader(samples, batch_size=8, num_workers=2)
print("samples:", sum(len(numbers) for (numbers,) in loader))
print("workers that died:", len(loader.incidents))
