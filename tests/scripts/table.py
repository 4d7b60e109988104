"""Scripts as people write them.

Everything is at the top level of the script, because that is where it lives longest: what a function holds is gone
when it returns, and what a module holds dies while the interpreter takes its modules apart.

Each script is run with torch's loader and with ours; the two differ in one line, the import. `LOAD` stands for that
line and for a dataset whose batches have the size of the run; where a script does not say where it belongs, it is at
the top.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

LOADERS = {"stock": "torch.utils.data", "holdfast": "holdfast"}
SIZES = {"40 B": 5, "64 kB": 8_000, "3 MB": 375_000}
"""Of a batch of two samples, and how many floats are in each. Small ones travel inside a message, the others lie in
memory that is shared."""

LOAD = """\
import torch
from torch.utils.data import Dataset
from {place} import DataLoader


class Data(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full(({floats},), float(index))


"""


OF_A_FORK = (
    "WHERE: DeprecationWarning: This process (PID) is multi-threaded, use of fork() may lead to deadlocks in the child.",
    "  pid = os.fork()",
)
"""What Python says since 3.12 to a script that forks in a loop over a loader, also over torch's."""


@dataclass(frozen=True)
class Script:
    name: str
    body: str
    how: str = "file"
    quick: str | None = "64 kB"  # the size it has in the quick suite; None if it is not there
    more: tuple[str, ...] = ()  # what we say on purpose, and torch does not
    right: tuple[int, tuple[str, ...]] | None = None  # code and output where torch's are wrong

    def source(self, loader: str, size: str) -> str:
        load = LOAD.format(place=LOADERS[loader], floats=SIZES[size])
        body = textwrap.dedent(self.body)
        return body.replace("LOAD\n", load) if "LOAD\n" in body else load + body

    def __str__(self) -> str:
        return self.name


TABLE = (
    # --- what is kept, and where --------------------------------------------------------------
    Script(
        "a loop",
        """
        loader = DataLoader(Data(), batch_size=2, num_workers=2)
        total = 0.0
        for batch in loader:
            total += batch.mean().item()
        print(total)
        """,
    ),
    Script(
        "one batch to look at",
        """
        batch = next(iter(DataLoader(Data(), batch_size=2, num_workers=2)))
        print(batch.shape, batch.sum())
        """,
        quick=None,
    ),
    Script(
        "all batches in a list",
        """
        kept = list(DataLoader(Data(), batch_size=2, num_workers=2))
        print(sum(batch.mean().item() for batch in kept))
        """,
        quick="3 MB",
    ),
    Script(
        "views of batches, and arrays",
        """
        loader = DataLoader(Data(), batch_size=2, num_workers=2)
        rows = [batch[1, 1:] for batch in loader]
        arrays = [batch.numpy()[:, ::2] for batch in loader]
        turned = {number: batch.t() for number, batch in enumerate(loader)}
        print(len(rows), arrays[-1].mean(), turned[2].mean().item())
        """,
    ),
    Script(
        "batches in reference cycles",
        """
        class Node:
            def __init__(self, batch):
                self.batch, self.me = batch, self

        last = [Node(batch) for batch in DataLoader(Data(), batch_size=2, num_workers=2)][-1]
        print(last.me.batch.mean().item())
        """,
        quick=None,
    ),
    Script(
        "batches in attributes of a class, defaults and closures",
        """
        class Model:
            cache = []
            mean = None

        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            Model.cache.append(batch)
            Model.mean = batch.mean(0)

        def step(example=batch[:1]):
            return example.mean().item() + kept[0].mean().item()

        def keeper(batch=batch):
            return lambda: batch

        kept = [keeper()()]
        print(step(), Model.mean[0].item())
        """,
    ),
    Script(
        "batches kept by sys, builtins and torch",
        """
        import builtins, sys
        loader = DataLoader(Data(), batch_size=2, num_workers=2)
        sys.kept, builtins.kept, torch.kept, *rest = loader
        torch.loader = loader
        print(sys.kept.mean(), builtins.kept.mean(), torch.kept.mean())
        """,
    ),
    Script(
        "weights that are a batch, and an optimiser",
        """
        layer = torch.nn.Linear(1, 1)
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            layer.weight.data = batch[:, :1]
            layer.register_buffer("seen", batch)
        best = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer.weight.sum().backward()
        best.step()
        print(layer.weight.detach().flatten().tolist())
        """,
        quick=None,
    ),
    Script(
        "batches of dicts and tuples",
        """
        class Pairs(Data):
            def __getitem__(self, index):
                return {"x": super().__getitem__(index), "y": index}, f"name {index}"

        loader = DataLoader(Pairs(), batch_size=2, num_workers=2)
        for batch, names in loader:
            first = batch
        print(names, batch["y"], first["x"].mean())
        """,
        quick=None,
    ),
    Script(
        "a finaliser of the user's that reads its batch",
        """
        import weakref
        class Holder:
            def __init__(self, batch):
                self.batch = batch
            def __del__(self):
                self.batch.add_(1)
        holders = [Holder(batch) for batch in DataLoader(Data(), batch_size=2, num_workers=2)]
        batch = holders[0].batch.view(-1)
        weakref.finalize(batch, print, "gone")
        del batch
        """,
    ),
    # --- iterators ----------------------------------------------------------------------------
    Script(
        "an iterator that is still there",
        """
        iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2))
        print(next(iterator).mean(), next(iterator).mean())
        """,
    ),
    Script(
        "a break",
        """
        loader = DataLoader(Data(), batch_size=2, num_workers=2, shuffle=True)
        for step, batch in enumerate(loader):
            if step == 1:
                break
        print(step, batch.shape)
        """,
        quick="40 B",
    ),
    Script(
        "persistent workers, several epochs and a break",
        """
        loader = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True)
        for epoch in range(3):
            for batch in loader:
                pass
        for batch in loader:
            break
        print(epoch, batch.mean())
        """,
    ),
    Script(
        "a loader for training and one for validation",
        """
        train = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True)
        valid = DataLoader(Data(), batch_size=4, num_workers=1)
        for epoch in range(2):
            for batch in train:
                pass
            seen = [batch.mean().item() for batch in valid]
        for a, b in zip(train, valid):
            pass
        print(seen, a.mean(), b.mean())
        """,
        quick=None,
    ),
    Script(
        "a generator left half way",
        """
        def forever(loader):
            while True:
                yield from loader

        batches = forever(DataLoader(Data(), batch_size=2, num_workers=2))
        for _ in range(8):
            batch = next(batches)
        print(batch.mean())
        """,
        quick=None,
    ),
    Script(
        "loaders in cycles, caches and weak references",
        """
        import functools, weakref
        class Module:
            pass

        @functools.lru_cache
        def loader_of(number):
            return DataLoader(Data(), batch_size=2, num_workers=1, persistent_workers=True)

        module = Module()
        module.loader, module.me = loader_of(1), module
        module.iterator = iter(module.loader)
        module.ref = weakref.ref(module.loader, print)
        module.batch = next(module.iterator)
        print(module.batch.mean())
        """,
        quick=None,
    ),
    Script(
        "a loader that is deleted, and what it was imported with",
        """
        loader = DataLoader(Data(), batch_size=2, num_workers=2)
        for batch in loader:
            if batch.mean() > 2:
                del loader
                break
        print(batch.mean())
        del torch, DataLoader, Data, Dataset
        """,
    ),
    Script(
        "sys.modules emptied by hand",
        """
        import sys
        iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2))
        batch, kept = next(iterator), [next(iterator)]
        print(batch.mean())
        for name in [name for name in sys.modules if name.partition(".")[0] == DataLoader.__module__.partition(".")[0]]:
            if name.partition(".")[0] != "torch":
                del sys.modules[name]
        """,
        quick=None,
    ),
    Script(
        "an iterator that its owner shuts down in __del__",
        """
        class Trainer:
            def __init__(self):
                self.loader = DataLoader(Data(), batch_size=2, num_workers=2)
                self.iterator = iter(self.loader)
                self.batch = next(self.iterator)
            def __del__(self):
                self.iterator._shutdown_workers()
                getattr(self.loader, "close", int)()

        trainer, me = Trainer(), Trainer()
        me.me = me
        print(trainer.batch.mean())
        """,
    ),
    Script(
        "a stream",
        """
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return (Data()[index] for index in range(6))

        loader = DataLoader(Stream(), batch_size=2, num_workers=2)
        means = [batch.mean().item() for batch in loader]
        half = iter(loader)
        batch = next(half)
        print(means, batch.mean())
        """,
    ),
    Script(
        "no workers",
        """
        for batch in DataLoader(Data(), batch_size=2):
            pass
        iterator = iter(DataLoader(Data(), batch_size=2))
        print(batch.mean(), next(iterator).mean())
        """,
        quick=None,
    ),
    Script(
        "pinned memory where there is no accelerator",
        """
        for batch in DataLoader(Data(), batch_size=2, num_workers=2, pin_memory=True):
            pass
        print(batch.mean())
        """,
        quick=None,
        more=("  BaseDataLoaderIter.__init__(self, loader)",),  # the line that warns
    ),
    Script(
        "the loader's module imported by a sample",
        """
        class Inner(Data):
            def __getitem__(self, index):
                loader = __import__(DataLoader.__module__, fromlist=["DataLoader"]).DataLoader
                return next(iter(loader(Data(), batch_size=None))) + index

        for batch in DataLoader(Inner(), batch_size=2, num_workers=2):
            pass
        print(batch.mean())
        """,
        quick=None,
    ),
    # --- how it ends --------------------------------------------------------------------------
    Script(
        "sys.exit in the loop",
        """
        import sys
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            print(batch.mean())
            sys.exit(3)
        """,
    ),
    Script(
        "sys.exit with a message",
        """
        import sys
        iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True))
        batch = next(iterator)
        sys.exit(f"stopped at {batch.mean()}")
        """,
        quick=None,
    ),
    Script(
        "an error in the loop",
        """
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            print(batch.mean())
            batch.view(7, -1, 11)
        """,
    ),
    Script(
        "an error that is kept with its traceback",
        """
        import sys
        def train():
            iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2))
            for batch in iterator:
                raise ValueError("mine")
        try:
            train()
        except ValueError as error:
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
            kept = error
        print(repr(kept))
        """,
        quick=None,
    ),
    Script(
        "an error in the dataset",
        """
        class Broken(Data):
            def __getitem__(self, index):
                if index == 5:
                    raise OSError(5, "unreadable", "image-5.png")
                return super().__getitem__(index)

        kept = []
        for batch in DataLoader(Broken(), batch_size=2, num_workers=2):
            kept.append(batch)
        """,
        more=("holdfast: [Broken] raised by sample 5 (position 1 of 2 in batch 2, worker 0)",),
    ),
    Script(
        "os._exit in the loop",
        """
        import os
        for batch in DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True):
            print(batch.mean(), flush=True)
            os._exit(5)
        """,
    ),
    Script(
        "Ctrl-C in the loop",
        """
        import os, signal
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            os.kill(os.getpid(), signal.SIGINT)
        """,
    ),
    Script(
        "Ctrl-C that is caught",
        """
        import os, signal
        loader = DataLoader(Data(), batch_size=2, num_workers=2)
        try:
            for batch in loader:
                os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("interrupted", batch.shape)
        kept = [batch for batch in loader]
        """,
        quick=None,
    ),
    Script(
        "SIGTERM in the loop",
        """
        import os, signal
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            os.kill(os.getpid(), signal.SIGTERM)
        """,
        quick=None,
    ),
    Script(
        "SIGTERM with a handler that exits",
        """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            os.kill(os.getpid(), signal.SIGTERM)
        """,
        quick=None,
    ),
    Script(
        "an exit handler that still iterates",
        """
        import atexit
        loader = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True)
        atexit.register(lambda: print("at exit", sum(batch.mean().item() for batch in loader)))
        for batch in loader:
            pass
        print(batch.mean())
        """,
    ),
    Script(
        "an exit handler from before the imports that looks at a batch",
        """
        import atexit
        batches = []
        atexit.register(lambda: print("at exit", [batch.mean().item() for batch in batches]))
        LOAD
        loader = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True)
        batches += loader
        """,
        quick=None,
    ),
    Script(
        "a log whose handler is closed at exit",
        """
        import io, logging
        stream = io.StringIO()
        logging.basicConfig(stream=stream, level=logging.DEBUG)
        iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True))
        print(next(iterator).mean())
        stream.close()
        """,
    ),
    Script(
        "fatal signals are told by faulthandler",
        """
        import faulthandler
        faulthandler.enable()
        iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2))
        print(next(iterator).mean())
        """,
        quick=None,
    ),
    Script(
        "garbage is not collected",
        """
        import gc
        gc.disable()
        class Node:
            def __init__(self, batch):
                self.batch, self.me = batch, self
        iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2))
        node = Node(next(iterator))
        del node
        gc.freeze()
        node = Node(next(iterator))
        print(node.batch.mean())
        """,
    ),
    Script(
        "an exit handler from before the imports that iterates",
        """
        import atexit
        atexit.register(lambda: print("at exit", sum(batch.mean().item() for batch in loader)))
        LOAD
        loader = DataLoader(Data(), batch_size=2, num_workers=2)
        batch = next(iter(loader))
        """,
        quick=None,
    ),
    Script(
        "an iterator that its owner goes on with in __del__",
        """
        class Trainer:
            def __del__(self):
                try:
                    next(self.iterator)
                except BaseException as error:
                    self.write(1, b"no more\\n")
        import os
        trainer = Trainer()
        trainer.write = os.write
        trainer.iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2))
        trainer.batch = next(trainer.iterator)
        """,
        how="fresh",
        quick=None,
    ),
    Script(
        "streams closed by the script",
        """
        import sys
        iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2))
        print(next(iterator).mean())
        sys.stdout.close()
        sys.stderr.close()
        """,
        quick=None,
    ),
    Script(
        "another program takes over in the loop",
        """
        import os, sys
        for batch in DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True):
            print(batch.mean(), flush=True)
            os.execv("/bin/echo", ["echo", "another"])
        """,
    ),
    Script(
        "a crash in the loop",
        """
        import ctypes
        for batch in DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True):
            ctypes.string_at(0)
        """,
        quick=None,
    ),
    Script(
        "an abort in the loop",
        """
        import os
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            os.abort()
        """,
        quick=None,
    ),
    Script(
        "an error in a thread, and sys.exit in another",
        """
        import sys, threading
        def fail():
            for batch in DataLoader(Data(), batch_size=2, num_workers=1):
                raise ValueError("in a thread")
        def leave():
            for batch in DataLoader(Data(), batch_size=2, num_workers=1):
                sys.exit(4)
        for target in (fail, leave):
            thread = threading.Thread(target=target, name="mine")
            thread.start()
            thread.join()
        batch = next(iter(DataLoader(Data(), batch_size=2, num_workers=1)))
        """,
        quick=None,
    ),
    Script(
        "a pool of processes beside a loader",
        """
        import multiprocessing, os
        iterator = iter(DataLoader(Data(), batch_size=2, num_workers=1))
        batch = next(iterator)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(abs, [-1, -2, -3]))
        print(next(iterator).mean())
        """,
        quick=None,
    ),
    Script(
        "many loaders, some of them begun",
        """
        import itertools
        loaders = [DataLoader(Data(), batch_size=2, num_workers=1) for _ in range(20)]
        begun = [iter(loader) for loader in loaders[:6]]
        batches = [next(iterator) for iterator in begun[::2]]
        endless = itertools.cycle(loaders[7])
        print(len(batches), [next(endless).mean().item() for _ in range(8)])
        """,
        quick=None,
    ),
    Script(
        "a script that is run by another",
        """
        import pathlib, runpy, sys
        if len(sys.argv) == 1:
            sys.argv.append("inner")
            kept = runpy.run_path("script.py")
            exec(compile(pathlib.Path("script.py").read_text(), "again", "exec"), dict(kept))
            exit(2)
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            pass
        print(batch.mean(), __name__)
        """,
        quick=None,
    ),
    # --- threads ------------------------------------------------------------------------------
    Script(
        "a thread that goes on when the script has ended",
        """
        import threading, time
        def run():
            for batch in DataLoader(Data(), batch_size=2, num_workers=2):
                time.sleep(0.02)
                kept.append(batch)
            print(sum(batch.mean().item() for batch in kept))
        kept = []
        threading.Thread(target=run).start()
        """,
    ),
    Script(
        "a daemon thread in the middle of an epoch",
        """
        import threading
        begun = threading.Event()
        def run():
            while True:
                for batch in DataLoader(Data(), batch_size=2, num_workers=2):
                    kept.append(batch)
                    begun.set()
        kept = []
        threading.Thread(target=run, daemon=True).start()
        print(begun.wait(60))
        """,
        right=(0, ("True",)),  # whether torch's thread prints an exception is a race
    ),
    Script(
        "a daemon thread that waits for its batch",
        """
        import threading, time
        class Slow(Data):
            def __getitem__(self, index):
                if index > 1:
                    time.sleep(0.3)
                return super().__getitem__(index)
        begun = threading.Event()
        def run():
            for batch in DataLoader(Slow(), batch_size=2, num_workers=1):
                begun.set()
        threading.Thread(target=run, daemon=True).start()
        print(begun.wait(60))
        time.sleep(0.05)
        """,
        quick=None,
    ),
    Script(
        "batches kept by a thread, and as its own",
        """
        import threading
        local = threading.local()
        local.batch = next(iter(DataLoader(Data(), batch_size=2, num_workers=2)))
        stop = threading.Event()
        def run():
            mine = threading.local()
            mine.batches = list(DataLoader(Data(), batch_size=2, num_workers=2))
            print(len(mine.batches), local.__dict__, flush=True)
            begun.set()
            stop.wait()
        begun = threading.Event()
        threading.Thread(target=run, daemon=True).start()
        begun.wait(60)
        """,
        quick=None,
    ),
    Script(
        "an executor's threads",
        """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2)
        loaders = [DataLoader(Data(), batch_size=2, num_workers=1) for _ in range(3)]
        kept = list(pool.map(list, loaders))
        left = pool.submit(lambda: [batch.mean().item() for batch in loaders[0]])
        print([len(batches) for batches in kept])
        """,
        quick=None,
    ),
    Script(
        "asyncio with the loader in an executor",
        """
        import asyncio
        async def main():
            loop = asyncio.get_running_loop()
            iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2))
            while (batch := await loop.run_in_executor(None, next, iterator, None)) is not None:
                kept.append(batch)
            return sum(batch.mean().item() for batch in kept)
        kept = []
        print(asyncio.run(main()))
        """,
    ),
    # --- other processes ----------------------------------------------------------------------
    Script(
        "a process around a loader",
        """
        import multiprocessing
        def run():
            for batch in DataLoader(Data(), batch_size=2, num_workers=1):
                pass
            print(batch.mean(), flush=True)
        held = iter(DataLoader(Data(), batch_size=2, num_workers=1))
        batch = next(held)
        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join()
        print(process.exitcode)
        """,
    ),
    Script(
        "batches sent to another process",
        """
        import multiprocessing, pickle
        def run(given, back):
            back.put(sum(given.get().mean().item() for _ in range(6)))
        context = torch.multiprocessing.get_context("fork")
        given, back = context.Queue(), context.Queue()
        process = context.Process(target=run, args=(given, back))
        process.start()
        kept = []
        for batch in DataLoader(Data(), batch_size=2, num_workers=1):
            kept.append(batch)
            given.put(batch)
        print(back.get(timeout=60), pickle.loads(pickle.dumps(batch)).mean())
        process.join()
        print(process.exitcode)
        """,
        quick=None,
    ),
    Script(
        "a child that is forked in the loop and ends as it likes",
        """
        import os, sys
        kept = []
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            kept.append(batch)
            pid = os.fork()
            if pid == 0:
                if len(kept) == 1:
                    sys.exit(int(batch.mean().item() * 2))
                if len(kept) == 2:
                    os._exit(11)
                del batch, kept
                sys.exit(12)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            if len(kept) == 3:
                break
        """,
        right=(0, ("1", "11", "12")),  # torch's iterators complain in the child, and kill workers
        more=OF_A_FORK,
    ),
    Script(
        "commands in the loop",
        """
        import os, subprocess
        for batch in DataLoader(Data(), batch_size=4, num_workers=2):
            subprocess.run(["echo", "saved"], check=True)
            subprocess.run(["true"], preexec_fn=os.getpid, check=True)
        os.system("echo done")
        """,
        quick=None,
    ),
    Script(
        "workers that are spawned, under the guard",
        """
        if __name__ == "__main__":
            loader = DataLoader(Data(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
            for batch in loader:
                pass
            print(batch.mean())
        """,
        quick=None,
    ),
    Script(
        "workers of a fork server, under the guard",
        """
        if __name__ == "__main__":
            torch.multiprocessing.set_start_method("forkserver")
            loader = DataLoader(Data(), batch_size=2, num_workers=1, persistent_workers=True)
            for batch in loader:
                pass
            print(batch.mean())
        """,
        quick=None,
    ),
    # --- how it is begun ----------------------------------------------------------------------
    Script(
        "python -c",
        """
        for batch in DataLoader(Data(), batch_size=2, num_workers=2): pass
        print(batch.mean())
        """,
        how="-c",
        quick=None,
    ),
    Script(
        "python -m",
        """
        kept = [batch for batch in DataLoader(Data(), batch_size=2, num_workers=2)]
        print(kept[1].mean(), __name__)
        """,
        how="-m",
    ),
    Script(
        "a script that comes through standard input",
        """
        iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2))
        print(next(iterator).mean())
        """,
        how="stdin",
        quick=None,
    ),
    Script(
        "python -i",
        """
        loader = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True)
        for batch in loader:
            break

        print(batch.mean())
        for batch in loader:
            raise ValueError(batch.mean())

        print(batch.shape)
        """,
        how="-i",
        quick=None,
    ),
    Script(
        "python -i after an error in a script",
        """
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            raise ValueError(batch.mean())
        """,
        how="-i script",
        quick=None,
    ),
    Script(
        "a cell of a notebook",
        """
        loader = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True)
        for batch in loader:
            pass
        iterator = iter(loader)
        print(batch.mean())
        batch
        """,
        how="notebook",
        quick=None,
    ),
    Script(
        "standard output closed",
        """
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            pass
        """,
        how="closed stdout",
        quick=None,
    ),
    Script(
        "standard error closed",
        """
        for batch in DataLoader(Data(), batch_size=2, num_workers=2):
            pass
        print(batch.mean())
        """,
        how="closed stderr",
        quick=None,
    ),
    Script(
        "all standard streams closed",
        """
        loader = DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True)
        for batch in loader:
            pass
        """,
        how="closed all",
        quick=None,
    ),
    Script(
        "development mode",
        """
        iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2))
        kept = [next(iterator)]
        for batch in DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True):
            pass
        print(batch.mean())
        """,
        how="-X dev",
        quick=None,
    ),
    Script(
        "warnings are errors",
        """
        iterator = iter(DataLoader(Data(), batch_size=2, num_workers=2))
        kept = [next(iterator)]
        for batch in DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=True):
            pass
        print(batch.mean())
        """,
        how="-W error",
        quick=None,
    ),
)
