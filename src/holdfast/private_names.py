"""Private names of torch and of Python that holdfast uses, and what it does where one is gone.

A release may remove or change them without notice. So all of them are looked up here, when this
module is imported, and the rest of the source takes them from here; a test looks for private names
anywhere else. `PARTS` lists them: what each is used for, what is done without it, and what is wrong
with it here. Without a few of them our workers cannot replace torch's; then the workers are torch's
own, and a warning says so (`lacking`). Without any other name something is slower, or some kind of
data takes another way.

If something is wrong, one line in the log says what (`tell_once`). Otherwise there is none, also
with releases that did not exist when this was written: their version number alone says nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import operator
import os
import platform
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import dataloader

from holdfast import at_fork
from holdfast.takeover import bootstrap

__all__ = [  # those that come from torch as they are
    "BaseDataLoaderIter",
    "IterDataPipe",
    "MapDataPipe",
    "MultiProcessingDataLoaderIter",
    "SingleProcessDataLoaderIter",
]

log = logging.getLogger("holdfast")

Needed = Literal["", "always", "for DataPipes", "for pin_memory=True"]


@dataclass(frozen=True)
class Part:
    """A private name that we use."""

    name: str
    used_for: str
    without: str
    """What is done where it is gone."""
    needed: Needed
    """When our workers cannot do without it."""
    wrong: str
    """What is wrong with it here; empty if nothing is."""


PARTS: list[Part] = []
_TORCHS_WORKERS = "workers are torch's own"


def _find(
    place: str,
    used_for: str,
    without: str,
    default: Any = None,
    *,
    needed: Needed = "",
    works: Callable[[Any], bool] = lambda found: True,
) -> Any:
    """What is at `place` ("module:name.name"), or `default` if it is gone or `works` says no."""
    module, _, path = place.partition(":")
    wrong, found = "is gone", None
    try:
        found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        wrong = "" if works(found) else "works in another way"
    except Exception as error:
        if not isinstance(error, (ImportError, AttributeError)) or found is not None:
            wrong = f"works in another way ({type(error).__name__}: {error})"
    PARTS.append(Part(place.replace(":", "."), used_for, without, needed, wrong))
    return default if wrong else found


# -- torch: the loader ------------------------------------------------------------------------

_ATTRIBUTES = (
    *("_IterableDataset_len_called", "_auto_collation", "_base_seed", "_collate_fn", "_dataset"),
    *("_dataset_fetcher", "_drop_last", "_index_sampler", "_next_data", "_next_index"),
    *("_num_workers", "_num_yielded", "_persistent_workers", "_pin_memory", "_pin_memory_device"),
    *("_rank", "_reset", "_shared_seed", "_timeout", "_world_size"),
)
"""Of torch's iterators: those that ours read."""


def _has_all_attributes(kind: Any) -> bool:
    with torch.device("cpu"), bootstrap.paused():  # whatever the user's default is
        numbers: Any = [0]
        iterator = kind(dataloader.DataLoader(numbers, generator=torch.Generator()))
    gone = [name for name in _ATTRIBUTES if not hasattr(iterator, name)]
    if gone:
        raise AttributeError(f"without {', '.join(gone)}")
    return True


if TYPE_CHECKING:
    from torch.utils.data import IterDataPipe, MapDataPipe
    from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter
    from torch.utils.data.dataloader import (
        _MultiProcessingDataLoaderIter as MultiProcessingDataLoaderIter,
    )
    from torch.utils.data.dataloader import (
        _SingleProcessDataLoaderIter as SingleProcessDataLoaderIter,
    )
else:
    _Nothing = type("_Nothing", (), {})  # no object is one
    BaseDataLoaderIter = _find(
        "torch.utils.data.dataloader:_BaseDataLoaderIter",
        "the base class of all iterators: it draws the seeds and warns as torch does",
        _TORCHS_WORKERS,
        _Nothing,
        needed="always",
    )
    MultiProcessingDataLoaderIter = _find(
        "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
        "the class of iterators with workers, as which ours pass too",
        "they do not pass as one",
        BaseDataLoaderIter,
    )
    SingleProcessDataLoaderIter = _find(
        "torch.utils.data.dataloader:_SingleProcessDataLoaderIter",
        "the iterator without workers",
        "iterators are torch's own, also with num_workers=0",
        _Nothing,
        needed="always",
        works=_has_all_attributes,
    )
    IterDataPipe = getattr(torch.utils.data, "IterDataPipe", _Nothing)
    MapDataPipe = getattr(torch.utils.data, "MapDataPipe", _Nothing)

_find(
    "torch.utils.data.dataloader:DataLoader._get_iterator",
    "the method that makes an iterator",
    _TORCHS_WORKERS,
    needed="always",
)
shard: Any = _find(
    "torch.utils.data.dataloader:_sharding_worker_init_fn",
    "dividing a DataPipe among workers and ranks",
    f"{_TORCHS_WORKERS} for DataPipes",
    needed="for DataPipes",
)
apply_sharding: Any = _find(
    "torch.utils.data.graph_settings:apply_sharding",
    "dividing a DataPipe among ranks",
    f"{_TORCHS_WORKERS} for DataPipes",
    needed="for DataPipes",
)
apply_random_seed: Any = _find(
    "torch.utils.data.graph_settings:apply_random_seed",
    "shuffling DataPipes",
    f"{_TORCHS_WORKERS} for DataPipes",
    needed="for DataPipes",
)
pin: Any = _find(
    "torch.utils.data._utils.pin_memory:pin_memory",
    "pinning a batch as torch does",
    f"{_TORCHS_WORKERS} if pin_memory=True has an effect",
    needed="for pin_memory=True",
)
new_stream_fetcher: Any = _find(
    "torch.utils.data._utils.fetch:_IterableDatasetFetcher",
    "drawing batches of an iterable dataset without workers, as quickly as torch does",
    "holdfast's own is used, which takes some microseconds more for each batch",
    works=lambda kind: kind([5, 6], True, tuple, False).fetch([None] * 3) == (5, 6),
)
profiler_enabled: Callable[[], bool] = _find(
    "torch._C:_autograd._profiler_enabled",
    "knowing whether a profiler records each next()",
    "each next() takes the way that a profiler can record",
    lambda: True,
)


# -- torch: in a worker -----------------------------------------------------------------------

_find(
    "torch.utils.data._utils.worker:_worker_info",
    "what get_worker_info() returns",
    _TORCHS_WORKERS,
    needed="always",
    works=lambda _: "_worker_info" in torch.utils.data.get_worker_info.__code__.co_names,
)
new_worker_info: Any = _find(
    "torch.utils.data._utils.worker:WorkerInfo",
    "the class of what get_worker_info() returns",
    _TORCHS_WORKERS,
    needed="always",
    works=lambda kind: kind(id=0, num_workers=2, seed=3, dataset=None).num_workers == 2,
)

_WORKER_MODULE = "torch.utils.data._utils.worker"


def set_worker_info(info: Any) -> None:
    """From now on ``get_worker_info()`` returns this in this process."""
    module: Any = importlib.import_module(_WORKER_MODULE)
    module._worker_info = info


_thread_infos = threading.local()


def _info_of_this_thread() -> Any:
    """Takes the place of the body of torch's ``get_worker_info``, in torch's module."""
    return getattr(_holdfast_thread_infos, "info", _worker_info)


_holdfast_thread_infos, _worker_info = _thread_infos, None  # as these names are called there


@functools.cache  # once in a process
def _make_worker_info_per_thread() -> None:
    """The function is replaced from inside: many modules have imported it by name."""
    module: Any = importlib.import_module(_WORKER_MODULE)
    module._holdfast_thread_infos = _thread_infos
    torch.utils.data.get_worker_info.__code__ = _info_of_this_thread.__code__


def set_thread_worker_info(info: Any) -> None:
    """From now on ``get_worker_info()`` returns this in this thread; None: what it returns in all
    threads that have none of their own."""
    if info is not None:
        _make_worker_info_per_thread()
        _thread_infos.info = info
    else:
        _thread_infos.__dict__.clear()


_torchs_module = importlib.import_module(_WORKER_MODULE)


def is_worker_thread() -> bool:
    """Whether this is a worker thread of ours."""
    return hasattr(_thread_infos, "info")


def _in_child_of_thread(infos: Any = _thread_infos, module: Any = _torchs_module) -> None:
    """In a process that a worker thread has forked: it is as if a worker process had forked it. A
    loader there may set what its own workers get."""
    info = infos.__dict__.pop("info", None)
    if info is not None:
        module._worker_info = info


at_fork.in_child(_in_child_of_thread)


@functools.cache
def openmp() -> bool:
    """Whether torch computes with OpenMP, where the number of threads belongs to a thread."""
    return "OpenMP" in torch.__config__.parallel_info().partition("backend:")[2]


def _numpy_seeds(base_seed: int, worker: int) -> Any:
    words = [worker, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]
    return np.random.SeedSequence(words).generate_state(4)


numpy_seeds: Callable[[int, int], Any] = _find(
    "torch.utils.data._utils.worker:_generate_state",
    "the seeds of NumPy in a worker",
    "NumPy computes the same numbers",
    _numpy_seeds,
    works=lambda generate: len(generate(1, 0)) == 4,
)


def _set_comm(name: str) -> None:
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name)


set_thread_name: Callable[[str], None] = _find(
    "torch.multiprocessing:_set_thread_name",
    "the name of a process in ps and top",
    "it is written to /proc/self/comm",
    _set_comm,
)


class _PlainText(str):
    def __repr__(self) -> str:
        return str(self)


key_error_message: Callable[[str], str] = _find(
    "torch._utils:KeyErrorMessage",
    "showing the text of a KeyError in lines",
    "a class of our own does it",
    _PlainText,
)


# -- torch: collating and pinning -------------------------------------------------------------

_COPIED = "torch collates batches, and they are copied into shared memory"
collate_functions: dict[Any, Any] = _find(
    "torch.utils.data._utils.collate:default_collate_fn_map",
    "collating directly into shared memory",
    _COPIED,
    {},
)
collate_tensors: Any = _find(
    "torch.utils.data._utils.collate:collate_tensor_fn",
    "telling torch's function for tensors from a user's",
    _COPIED,
    works=callable,
)
collate_array: Any = _find(
    "torch.utils.data._utils.collate:collate_numpy_array_fn",
    "telling torch's function for arrays from a user's",
    _COPIED,
    works=callable,
)


_Storage: Any = torch.UntypedStorage


def _typed(kind: Any, untyped: Any, dtype: torch.dtype) -> Any:
    return kind(wrap_storage=untyped, dtype=dtype, _internal=True)


_TypedStorage: Any = _find(
    "torch:TypedStorage",
    "stacking tensors of subclasses directly into shared memory (its argument _internal)",
    "torch stacks them, and they are copied",
    works=lambda kind: _typed(kind, _Storage(2), torch.uint8) is not None,
)
typed_storage: Callable[[Any, torch.dtype], Any] | None = (
    None if _TypedStorage is None else functools.partial(_typed, _TypedStorage)
)
has_cuda_context: Callable[[int], bool] = lambda device: False  # noqa: E731
if torch.version.cuda is not None:
    has_cuda_context = _find(
        "torch._C:_cuda_hasPrimaryContext",
        "knowing on which GPUs a copy may be under way, without opening a context there",
        "only the current GPU is asked",
        has_cuda_context,
    )


# -- torch: sending tensors -------------------------------------------------------------------

storage_key: Callable[[torch.UntypedStorage], int] = (
    operator.attrgetter("_cdata")
    if _find(
        "torch:UntypedStorage._cdata",
        "knowing which tensors of a batch share a storage",
        "the address of the memory tells",
        works=lambda _: _Storage(1)._cdata > 0,
    )
    else torch.UntypedStorage.data_ptr
)
is_zero_tensor: Callable[[torch.Tensor], bool] = _find(
    "torch:Tensor._is_zerotensor",
    "sending tensors of zeros that have no memory",
    "such a tensor cannot be sent",
    lambda tensor: False,
)
_AS_TORCH = "they are sent as torch's workers send them, through /dev/shm"
_sparse = [
    _find(f"torch:Tensor.{name}", "sending sparse tensors", _AS_TORCH)
    for name in ("_indices", "_values")
]
_nested = [
    _find(f"torch:Tensor.{name}", "sending nested tensors", _AS_TORCH)
    for name in (
        "_nested_tensor_size",
        "_nested_tensor_strides",
        "_nested_tensor_storage_offsets",
    )
]
nested_from: Any = _find(
    "torch:_nested_view_from_buffer_copy", "receiving nested tensors", _AS_TORCH
)
without_torch_function: Callable[[], contextlib.AbstractContextManager[Any]] = _find(
    "torch._C:DisableTorchFunctionSubclass",
    "reading tensors of subclasses without running the subclass's code",
    "its code runs",
    contextlib.nullcontext,
)


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Indices and values of a sparse COO tensor; None if they cannot be had."""
    return None if None in _sparse else tuple(part(tensor) for part in _sparse)


def nested_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """What `nested_from` makes the tensor from again; None if it cannot be had."""
    if nested_from is None or None in _nested:
        return None
    return (tensor.values(), *(part(tensor) for part in _nested))


# -- Python -----------------------------------------------------------------------------------


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


flush_streams: Callable[[], None] = _find(
    "multiprocessing.util:_flush_std_streams",
    "writing buffered output before a fork and at a worker's end",
    "done by ourselves",
    _flush,
)
interpreter_flags: Callable[[], list[str]] = _find(
    "subprocess:_args_from_interpreter_flags",
    "starting processes with the options of this Python (-X, -W, -O)",
    "they are started without",
    list,
)
_find(
    "multiprocessing.process:BaseProcess._bootstrap",
    "running a worker as multiprocessing runs its processes",
    _TORCHS_WORKERS,
    needed="always",
)
_find(
    "multiprocessing.process:current_process",
    "a worker's number and parent for multiprocessing (_identity, _parent_pid, _config)",
    _TORCHS_WORKERS,
    needed="always",
    works=lambda current: all(
        hasattr(current(), name) for name in ("_identity", "_parent_pid", "_config")
    ),
)
_NOT_RUN = "functions that a worker registers with atexit are not run"
_clear: Any = _find("atexit:_clear", "forgetting the trainer's exit functions", _NOT_RUN)
_run: Any = _find("atexit:_run_exitfuncs", "running a worker's exit functions", _NOT_RUN)
_exit_function: Any = _find(
    "multiprocessing.util:_exit_function", "running a worker's finalizers", _NOT_RUN
)
_runs_exit_functions = sys.version_info >= (3, 13) and None not in (_clear, _run, _exit_function)
"""Since 3.13 multiprocessing runs them in its processes, and no longer its own finalizers."""


def forget_exit_functions() -> None:
    """In a worker that was just forked: the trainer's exit functions are not its own."""
    if _runs_exit_functions:
        _clear()
        importlib.import_module("atexit").register(_exit_function)


def run_exit_functions() -> None:
    """At the end of a worker: its own, as a process of multiprocessing does in this Python."""
    if _runs_exit_functions:
        _run()
        flush_streams()


_tracker: Any = _find(
    "multiprocessing.resource_tracker:_resource_tracker",
    "sharing the trainer's resource tracker with spawned workers (its _fd)",
    "each has one of its own",
    works=lambda tracker: hasattr(tracker, "_fd"),
)


def use_tracker(fd: int) -> None:
    """The resource tracker of this process is the one at the other end of `fd`."""
    if _tracker is not None:
        _tracker._fd = fd


reducers: dict[type, Callable[[Any], Any]] = _find(
    "multiprocessing.reduction:ForkingPickler._extra_reducers",
    "pickling types that are registered with multiprocessing",
    "those registered after holdfast was imported are pickled as others",
    ForkingPickler(io.BytesIO()).dispatch_table,
)
current_frames: Callable[[], dict[int, Any]] = _find(
    "sys:_current_frames",
    "the stack of a worker thread that hangs",
    "there is none",
    dict,
)
_asks_owner = _find(
    "threading:_RLock._is_owned",
    "closing a loader from inside one of its own calls",
    "closing waits for its deadline then",
)


def is_owned(lock: Any) -> bool:
    """Whether this thread has the lock, an RLock."""
    return bool(lock._is_owned()) if _asks_owner is not None else False


_raw_environment: Any = _find(
    "os:environ._data",
    "seeing quickly that no variable of ours is set",
    "each of them is looked up",
    works=lambda found: all(os.fsencode(name) in found for name in os.environ),
)


def may_be_set(variables: frozenset[bytes]) -> bool:
    """Whether one of them may be in the environment. To look up one that is not takes os.environ a
    microsecond."""
    raw = getattr(os.environ, "_data", None) if _raw_environment is not None else None
    return raw is None or not raw.keys().isdisjoint(variables)


# -- what is wrong ----------------------------------------------------------------------------


def lacking(loader: Any) -> Part | None:
    """The name for lack of which this loader's workers have to be torch's own; None if they need
    not."""
    pipe = isinstance(loader.dataset, (IterDataPipe, MapDataPipe))
    cases = {"always": True, "for DataPipes": pipe, "for pin_memory=True": loader.pin_memory}
    return next((part for part in PARTS if part.wrong and cases.get(part.needed)), None)


@functools.cache  # once in a process
def tell_once() -> None:
    """Say in the log what is wrong, if anything is."""
    wrong = [part for part in PARTS if part.wrong]
    if wrong:
        log.warning(
            "torch %s and Python %s differ from those holdfast was tried with (docs/versions.md): "
            "%s. `holdfast doctor` tells more",
            torch.__version__,
            platform.python_version(),
            "; ".join(f"{part.name} {part.wrong}: {part.without}" for part in wrong),
        )
