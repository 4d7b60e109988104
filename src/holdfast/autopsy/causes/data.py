"""Samples and batches that are wrong, repeated or refused."""

from __future__ import annotations

from holdfast.autopsy.cause import Cause, hint, proof, sign, todo

__all__ = ["CAUSES"]

_DAMAGED = (
    r"(UnidentifiedImageError|DecompressionBombError|JSONDecodeError|UnicodeDecodeError|BadZipFile|"
    r"TarError|ReadError|EOFError|LibsndfileError|SoundFileError|ArrowInvalid|EmptyDataError|"
    r"ParserError|FileNotFoundError|IsADirectoryError|PermissionError|OSError|SafetensorError)"
)
# After torch's own frame, and before the worker's message, which begins with "Caught".
_BEFORE_IT_IS_TOLD = r"((?!Caught )[\s\S]){0,400}"

CAUSES = (
    Cause(
        slug="bad-sample",
        title="could not read one sample",
        meaning=(
            "A file is damaged, missing or not what its name says, and reading it raised an error. With "
            "torch that ends the loop, and the message does not say which sample it was."
        ),
        evidence="An error in reading or decoding, raised in a worker; the same sample fails again.",
        signs=(
            sign(rf"Caught (\w+\.)*{_DAMAGED} in DataLoader worker process"),
            sign(r"PIL\.UnidentifiedImageError: cannot identify image file"),
            sign(r"image file is truncated \(\d+ bytes not processed\)"),
            sign(r"OSError: (broken|unrecognized) data stream when (reading|decoding) image file"),
            hint(r"Corrupt JPEG data:"),
            hint(r"libpng error:"),
        ),
        explains=("python-exception",),
        see=("python-exception", "storage-stall", "collate-shape"),
        remedies=(
            todo("Load it alone", "python -c 'import mydata; mydata.dataset[{sample}]'"),
            todo(
                "Let the run go on without it, and list it",
                "DataLoader(..., on_bad_sample='skip', max_bad_samples=0.01, quarantine='bad.jsonl')   # holdfast's",
            ),
            todo("Repair or replace that file"),
            todo(
                "Accept truncated images, if half an image is better than none",
                "PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True",
            ),
        ),
        already="The error has the sample's index, its position and its batch; with on_bad_sample='skip' or 'replace' no error is raised.",
    ),
    Cause(
        slug="python-exception",
        title="raised an error in the code that makes samples",
        meaning=(
            "__getitem__, the collate function or worker_init_fn raised, and it looks like a mistake in the "
            "code and not in one file. The original traceback is in the message."
        ),
        evidence="An exception that came from a worker, other than those of damaged data.",
        signs=(
            sign(r"Caught (\w+\.)*\w+ in DataLoader worker process \d+"),
            hint(r"holdfast\.(errors\.)?UnusualExit"),
        ),
        see=("bad-sample", "collate-shape", "reraise-broken"),
        remedies=(
            todo(
                "Read the traceback under 'Original Traceback' from its end; the last line of your own code is the place"
            ),
            todo("Try the sample alone", "python -c 'import mydata; mydata.dataset[{sample}]'"),
        ),
        already="The error keeps its type and has the sample's index; the next batch arrives.",
    ),
    Cause(
        slug="collate-shape",
        title="has samples that do not fit into one batch",
        meaning=(
            "Samples of one batch have different shapes, types or keys, or one of them is None, and "
            "stacking fails. In a worker torch says 'not resizable' instead, because it stacks into shared "
            "memory."
        ),
        evidence="The frame is in `default_collate`; the odd sample differs from its neighbours.",
        signs=(
            proof(r"stack expects each tensor to be equal size, but got"),
            proof(r"Trying to resize storage that is not resizable"),
            proof(r"default_collate: batch must contain tensors.*; found"),
            proof(
                r"/(_utils|memory)/collate\.py\", line \d+, in [^\n]*(\n[ \t][^\n]*){0,60}\n(?P<said>\w*Error: [^\n]*\bNoneType\b)"
            ),
            proof(r"each element in list of batch should be of equal size"),
            sign(r"batch must contain tensors, numbers, dicts or lists; found"),
            sign(
                r"(inconsistent tensor sizes at|Sizes of tensors must match except in dimension)[\s\S]{0,100}TH"
            ),
            sign(r"invalid argument 0: Sizes of tensors must match except in dimension 0"),
        ),
        explains=("python-exception", "bad-sample"),
        remedies=(
            todo("Find the odd one", "print({{dataset[i][0].shape for i in batch_indices}})"),
            todo("Resize or pad in the transform", "torchvision.transforms.v2.Resize((256, 256))"),
            todo("Or batch in your own way", "DataLoader(..., collate_fn=pad_collate)"),
        ),
        already="The error names the batch; with on_bad_sample='skip' or 'replace' the odd sample is found and left out.",
    ),
    Cause(
        slug="reraise-broken",
        title="raised an error that could not be rebuilt, so another one is shown",
        meaning=(
            "torch makes the worker's exception again in the trainer from its text alone. That fails for an "
            "exception whose constructor needs more arguments, and you see that second error."
        ),
        evidence="The frame `reraise` in torch/_utils.py, and an error about missing arguments.",
        signs=(
            sign(rf"in reraise{_BEFORE_IT_IS_TOLD}TypeError: \S*__init__\(\) (missing|takes)"),
            sign(rf"in reraise{_BEFORE_IT_IS_TOLD}KeyError: (?!Caught )"),
        ),
        explains=("python-exception", "bad-sample"),
        remedies=(
            todo(
                "Look for the real error further up, in the worker's own message, or load the sample directly",
                "python -c 'import mydata; mydata.dataset[0]'",
            ),
            todo(
                "Raise something simple in the dataset", "raise RuntimeError(str(error)) from error"
            ),
        ),
        already="Exceptions keep type, text and traceback whatever arguments their constructor needs.",
    ),
    Cause(
        slug="iterator-dead-after-error",
        title="has an iterator that ended with its error",
        meaning=(
            "A Python generator is finished once it has raised. If you catch the error and call next() "
            "again, you get StopIteration, or the data from its start, without a warning."
        ),
        evidence="The epoch is short after an error that was caught.",
        signs=(
            sign(r"RuntimeError: generator raised StopIteration"),
            hint(
                r"(?i)generator (is )?(already )?(finished|exhausted) after (an |the )?(error|exception)"
            ),
        ),
        see=("bad-sample",),
        remedies=(
            todo(
                "Catch errors inside __iter__, around one sample",
                "try: sample = load(path)\nexcept OSError: continue",
            ),
            todo("Or write the iterator as a class with __next__, which can go on after an error"),
        ),
        already="An iterable with a state continues after a death; a generator that raised does not.",
    ),
    Cause(
        slug="seed-duplication",
        title="draws the same random numbers as its siblings",
        meaning=(
            "A random generator made in the trainer is copied into every worker, and all copies draw the "
            "same numbers. torch, random and numpy's global generator are seeded per worker; your own "
            "generators and those of other libraries are not."
        ),
        evidence="Equal first draws in all workers; equal augmentations in every epoch.",
        signs=(
            hint(
                r"(?i)(identical|same|duplicate)[^.\n]{0,40}(augmentation|random numbers?)[^.\n]{0,60}worker"
            ),
        ),
        see=("workers-change-results", "stale-persistent-state"),
        remedies=(
            todo(
                "Make generators in the worker",
                "worker_init_fn=lambda i: dataset.reseed(torch.initial_seed() + i)",
            ),
            todo("Or draw from numpy.random, random or torch, which are seeded"),
        ),
        already=(
            "The three global generators are seeded as torch does. After a death they and the dataset's "
            "own generators are restored."
        ),
    ),
    Cause(
        slug="iterable-duplicates",
        title="delivers the same samples as its siblings",
        meaning=(
            "Every worker has its own copy of an IterableDataset and iterates all of it, unless the dataset "
            "takes only its share. With n workers the epoch is then n times too long."
        ),
        evidence="Equal first items in all workers; more batches than len().",
        signs=(
            proof(
                r"Length of IterableDataset .* was reported to be \d+\s*\(when accessing len\(dataloader\)\), but \d+ samples have been fetched"
            ),
        ),
        remedies=(
            todo(
                "Take a share", "info = get_worker_info(); items = items[info.id::info.num_workers]"
            ),
            todo(
                "For Hugging Face datasets",
                "datasets.distributed.split_dataset_by_node(dataset, rank, world_size)",
            ),
        ),
        already="It gives the same warning as torch.",
    ),
    Cause(
        slug="stream-not-repeatable",
        title="makes a stream that cannot be repeated exactly",
        meaning=(
            "When a worker of an IterableDataset dies, its replacement has to draw again what was delivered, or "
            "load a state, to get to the same place. A stream that is shuffled by the time of day or the pid, or "
            "read from a live queue, is different then: samples may be missing or come twice."
        ),
        evidence=(
            "holdfast keeps a fingerprint of every batch and compares what is drawn again with it: some of it differed."
        ),
        signs=(
            proof(r"this stream is not deterministic: "),
            proof(r"samples may be missing or come twice: "),
            proof(r"holdfast\.(errors\.)?StreamLost"),
        ),
        explains=(
            "exited-unexpectedly",
            "killed-unexplained",
            "killed-from-outside",
            "python-exception",
        ),
        see=("seed-duplication", "no-mid-epoch-resume"),
        remedies=(
            todo(
                "WebDataset's shuffle() is seeded by time and pid; use the one that can be repeated",
                ".compose(wds.detshuffle(1000, seed=42))   # in place of .shuffle(1000)",
            ),
            todo(
                "Hugging Face: give a seed, and use no unseeded random numbers in map()",
                "dataset.shuffle(seed=42, buffer_size=1000)",
            ),
            todo(
                "Your own generator: seed it with the worker's seed, in __iter__",
                "rng = random.Random(torch.utils.data.get_worker_info().seed)   # not Random(), not time.time()",
            ),
            todo(
                "A live source: give the dataset state_dict() and load_state_dict(), and continue from that state",
                'DataLoader(..., iterable_recovery="state")   # holdfast\'s; "raise" to stop instead',
            ),
        ),
        already=(
            "What is drawn again is compared; Incident.exact and the log say whether the stream continues exactly. "
            "Workers whose stream does not are not replaced for their size."
        ),
    ),
    Cause(
        slug="handle-shared-across-fork",
        title="shares an open file or connection with its siblings",
        meaning=(
            "An HDF5, LMDB, zip or database handle opened before the fork has one file position for all "
            "workers. They read each other's bytes, which gives errors, crashes or silently wrong samples."
        ),
        evidence="The same file is open in the trainer; with one worker it works.",
        signs=(
            sign(
                r"Unable to (open|synchronously open) object \(bad object header version number\)"
            ),
            sign(r"SSL error: decryption failed or bad record mac"),
            sign(r"DECRYPTION_FAILED_OR_BAD_RECORD_MAC"),
            sign(
                r"(OSError|KeyError)[^\n]*(wrong B-tree signature|addr overflow|inflate\(\) failed)"
            ),
            hint(
                r"zipfile\.BadZipFile: (Bad magic number for file header|Bad CRC-32 for file|File name in directory)"
            ),
        ),
        explains=("bad-sample", "python-exception"),
        see=("native-segv", "bad-sample"),
        remedies=(
            todo(
                "Open it in the worker, at first use",
                "def __getitem__(self, i): self.file = self.file or h5py.File(self.path)",
            ),
            todo(
                "Or in worker_init_fn", "worker_init_fn=lambda _: get_worker_info().dataset.open()"
            ),
        ),
        already="Nothing can repair a shared handle; replacements inherit it too.",
    ),
    Cause(
        slug="stale-persistent-state",
        title="does not see what was changed in the trainer",
        meaning=(
            "Persistent workers keep the dataset as it was when they started. set_epoch or another attribute "
            "set in the trainer never reaches them, and every epoch is shuffled or augmented alike."
        ),
        evidence="persistent_workers=True and an attribute of the dataset that changes per epoch.",
        signs=(hint(r"(?i)set_epoch[^.\n]{0,80}persistent_workers"),),
        see=("seed-duplication",),
        remedies=(
            todo(
                "Share the value", "self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()"
            ),
            todo("Or start workers with every epoch", "DataLoader(..., persistent_workers=False)"),
        ),
        already="A shared tensor in the dataset stays shared with every worker and replacement.",
    ),
    Cause(
        slug="workers-change-results",
        title="gives different results when the number of workers changes",
        meaning=(
            "Seeds depend on the worker's number, so the same sample is augmented differently when another "
            "worker makes it. torch is designed so."
        ),
        evidence="Equal results for equal num_workers, different ones otherwise.",
        signs=(hint(r"(?i)results? (differ|change)[^.\n]{0,60}num_workers"),),
        see=("seed-duplication",),
        remedies=(
            todo("Keep num_workers fixed for runs you compare"),
            todo(
                "Or seed by the sample", "generator = torch.Generator().manual_seed(seed + index)"
            ),
        ),
        already="With equal settings the stream is the same as torch's, also after any number of deaths.",
    ),
    Cause(
        slug="no-mid-epoch-resume",
        title="cannot resume in the middle of an epoch",
        meaning=(
            "torch's DataLoader has no state: after a crash of the trainer the epoch begins again. Batches "
            "that were prefetched but not used must not count as seen."
        ),
        evidence="No message; the step counter starts again.",
        signs=(hint(r"(?i)resum\w+[^.\n]{0,60}mid(dle of)?[ -](the |an )?epoch"),),
        see=("stateful-gaps",),
        remedies=(
            todo("Skip in the batch sampler what was done, without loading it"),
            todo(
                "Or use a loader with a state", "torchdata.stateful_dataloader.StatefulDataLoader"
            ),
        ),
        already="Deaths of workers never cost the epoch; for the trainer's own death use checkpoints.",
    ),
    Cause(
        slug="stateful-gaps",
        title="was resumed from an incomplete state",
        meaning=(
            "A stateful loader asked for its state too soon after loading one, or wrapped by another "
            "library, can lose an epoch or fail. The state then does not say what every worker had done."
        ),
        evidence="KeyError or an empty epoch right after load_state_dict.",
        signs=(
            sign(
                r"KeyError: '_(snapshot|worker_snapshots|steps_since_snapshot|num_yielded|iterator_finished|main_snapshot)'"
            ),
        ),
        see=("no-mid-epoch-resume", "accelerate-rebuild"),
        remedies=(
            todo("Take the state after at least one batch of every worker"),
            todo("Load it into the loader before it is wrapped or prepared"),
        ),
        already="Nothing yet.",
    ),
)
