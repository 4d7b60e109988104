"""Problems around the loader: frameworks, ranks, GPUs, left-over processes."""

from __future__ import annotations

from holdfast.autopsy.cause import Cause, hint, proof, sign, todo

__all__ = ["CAUSES"]

CAUSES = (
    Cause(
        slug="orphans-hold-gpu",
        title="outlived its trainer and still holds memory or a GPU",
        meaning=(
            "The trainer was killed and its workers did not notice: they wait in a write to a full pipe "
            "whose reader is gone. If they were forked after CUDA was used, they keep the GPU's memory."
        ),
        evidence="`pt_data_worker` processes with parent 1, asleep in pipe_write, with /dev/nvidia* open.",
        signs=(
            hint(r"\bpt_data_worker\b[^\n]*\b(defunct|PPID\s*1)\b"),
            hint(r"(?i)nvidia-smi[^.\n]{0,80}(no such process|zombie|dead process)"),
        ),
        see=("pool-accumulation",),
        remedies=(
            todo(
                "Find them",
                "ps -eo pid,ppid,etime,rss,comm | awk '$2==1 && /pt_data_worker|python/'",
            ),
            todo("See which processes hold the GPU", "fuser -v /dev/nvidia*"),
            todo("Look at each of them, then end it", "kill -9 PID"),
        ),
        already="Workers die with the trainer, whatever kills it and whatever they are doing.",
    ),
    Cause(
        slug="pool-accumulation",
        title="is one of many that were never closed",
        meaning=(
            "Every new loader with persistent workers adds a pool, and Python's garbage collector does not "
            "know of memory in other processes. Evaluations and hyper-parameter trials pile pools up."
        ),
        evidence="More worker processes than living loaders have workers.",
        signs=(
            hint(
                r"(?i)(number of|too many) (worker )?processes[^.\n]{0,60}(each|every) (evaluation|trial|epoch)"
            ),
        ),
        see=("prefetch-bytes", "orphans-hold-gpu"),
        remedies=(
            todo(
                "Close what you no longer use",
                "with DataLoader(...) as loader: ...   # or loader.close()",
            ),
            todo("Make the evaluation loader once and keep it"),
            todo(
                "In the Hugging Face Trainer",
                "TrainingArguments(dataloader_persistent_workers=False)",
            ),
        ),
        already="`close()` and `with`; workers end with the last reference to their iterator.",
    ),
    Cause(
        slug="uneven-ranks",
        title="gave its rank fewer batches than other ranks got",
        meaning=(
            "One rank left the loop while the others wait for it in a collective, which gives up after "
            "minutes. The usual reasons are skipped samples, iterable shards of different length, and filters."
        ),
        evidence="Batch counters of the ranks differ; the watchdog of NCCL or Gloo reports a timeout.",
        signs=(
            sign(r"Watchdog caught collective operation timeout: WorkNCCL"),
            sign(r"Some NCCL operations have failed or timed out"),
            hint(r"\[Gloo\][^\n]*Timed out waiting \d+ms for (recv|send) operation to complete"),
        ),
        see=("silent-stall", "iterable-duplicates"),
        remedies=(
            todo("Print the number of batches per rank; it must be equal"),
            todo(
                "Drop the incomplete end",
                "DataLoader(..., drop_last=True)   # or DistributedSampler(..., drop_last=True)",
            ),
            todo(
                "Let ranks leave early", "with torch.distributed.algorithms.join.Join([model]): ..."
            ),
            todo(
                "See whether a worker of that rank stalled just before",
                "holdfast incidents LOGBOOK",
            ),
        ),
        already="A death or stall never changes the number of batches.",
    ),
    Cause(
        slug="lightning-reinstantiate",
        title="belongs to a loader class that Lightning cannot re-create",
        meaning=(
            "To insert a distributed sampler, Lightning makes a second loader of the same class from the "
            "attributes of the first. That fails for a class whose arguments are not attributes of the same "
            "name."
        ),
        evidence="MisconfigurationException about injecting a sampler, or an unexpected argument.",
        signs=(
            proof(r"Trying to inject (custom )?`?\w*Sampler`? into the `?\S+`? instance"),
            sign(
                r"lightning[\s\S]{0,4000}__init__\(\) got an unexpected keyword argument '(generator|batch_sampler|sampler|multiprocessing_context)'"
            ),
        ),
        remedies=(
            todo("Keep every argument of __init__ as an attribute, and pass on **kwargs"),
            todo("Or provide the sampler yourself", "Trainer(use_distributed_sampler=False)"),
        ),
        already="Its options are keyword-only and stored under their names, so it can be re-created.",
    ),
    Cause(
        slug="accelerate-rebuild",
        title="was one of torch's own, because Accelerate had replaced your loader with torch's",
        meaning=(
            "accelerator.prepare() makes a torch loader of any loader it is given, from the dataset and the "
            "batch sampler, and iterates that. What a subclass adds is lost: the workers are torch's, and the "
            "death of one ends the run."
        ),
        evidence=(
            "`type(prepared.base_dataloader)` is torch's; in a traceback, the frame below "
            "`accelerate/data_loader.py` is in `torch/utils/data/dataloader.py`."
        ),
        signs=(
            proof(r"KeyError: '_sampler_iter_yielded'"),
            sign(
                r"accelerate/data_loader\.py[\s\S]{0,2000}(AttributeError: '\w*DataLoader\w*' object has no attribute)"
            ),
        ),
        see=("stateful-gaps",),
        remedies=(
            todo(
                "Make the loader with holdfast's class: what Accelerate makes of it is holdfast's too, and "
                "sharding, devices and gradient accumulation stay Accelerate's",
                "from holdfast import DataLoader",
            ),
            todo(
                "Or give holdfast's engine to all loaders",
                "import holdfast; holdfast.install()",
            ),
            todo(
                "Or change nothing in the program, and start it with holdfast",
                "holdfast run accelerate launch train.py",
            ),
        ),
        already=(
            "What Accelerate makes of a holdfast loader is one too, with the same options. With "
            "use_stateful_dataloader it is torchdata's, and that is said once."
        ),
    ),
    Cause(
        slug="gpu0-context",
        title="and its loader take memory on GPU 0 from every rank",
        meaning=(
            "The current device belongs to a thread, and an iterator made in a helper thread pins memory on "
            "device 0. Every rank then has a context there."
        ),
        evidence="nvidia-smi shows all ranks' pids on GPU 0.",
        signs=(hint(r"(?i)(every|each|all) ranks?[^.\n]{0,60}(GPU|cuda:) ?0"),),
        see=("pin-thread",),
        remedies=(
            todo(
                "Set the device in every thread that iterates", "torch.cuda.set_device(local_rank)"
            ),
            todo(
                "Or show each rank only its GPU", "CUDA_VISIBLE_DEVICES=$LOCAL_RANK python train.py"
            ),
        ),
        already="Memory is pinned in the thread that calls next().",
    ),
    Cause(
        slug="timeout-api",
        title="does not exist: `timeout` was given without workers",
        meaning=(
            "torch refuses a timeout for a loader that loads in the main process, because there is no worker "
            "to wait for. In older releases the assertion has no message."
        ),
        evidence="An AssertionError from `_SingleProcessDataLoaderIter`.",
        signs=(
            proof(r"_SingleProcessDataLoaderIter requires timeout == 0"),
            sign(r"_SingleProcessDataLoaderIter[\s\S]{0,400}assert self\._timeout == 0"),
        ),
        remedies=(
            todo(
                "Give the timeout only with workers",
                "DataLoader(..., timeout=60 if num_workers else 0)",
            ),
        ),
        already="It says the same as torch.",
    ),
)
