"""What a worker thread does, from its start to its end.

It carries out orders (`worker.items`), for which it is the host. Orders come in a queue, several at
a time, and answers go into a deque, as they are: nothing is pickled or copied.

A thread cannot be killed. When it is not wanted any more it is *dismissed*: it ends after the
sample it is loading, and what it answers until then is not read. It has no reference to its driver
or pool, so a thread that is stuck keeps alive nothing but its own batch and the dataset.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from types import MethodType
from typing import Any

import torch

from holdfast import private_names
from holdfast.autopsy.blackbox import IDLE, START, STOP
from holdfast.engine.bells import Bell
from holdfast.introspection.data_size import weigh
from holdfast.threads.shared_generators import SharedGenerators
from holdfast.threads.turns import Inbox, Turns
from holdfast.transport.placement import Memory
from holdfast.transport.stacking import use_memory
from holdfast.worker.exceptions import describe
from holdfast.worker.interface import BATCH, Blueprint, WorkerSetup
from holdfast.worker.items import Worker
from holdfast.worker.message_host import GONE, READY, REFUSED, Message, MessageHost
from holdfast.worker.notes import ThreadNotes

Orders = Sequence[tuple[str, int, Any]] | None
"""What to do, in this order; None: end."""

OFTEN = 0.001  # seconds for a sample, above which it is asked after each whether to go on
SELDOM = 64  # samples after which it is asked otherwise
COPY_TRIES = 10  # of a dataset that changes meanwhile


class Dismissed(BaseException):
    """Raised in a thread between two samples, if what it makes is not wanted any more."""


class Manner:
    """What Python and torch keep for each thread, as it is in the one that makes this: context
    variables, among them NumPy's ``errstate``, and whether gradients are recorded. Processes that
    are forked there have the same."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()

    def run(self, call: Callable[[], None]) -> None:
        """Call this in this manner, in any thread."""
        torch.set_grad_enabled(self._grad)
        self._context.copy().run(call)


class ThreadBatch:
    """A batch, as it was made. Implements `engine.driver.Batch`."""

    __slots__ = ("_content", "nbytes")

    def __init__(self, content: Any) -> None:
        self._content = content
        try:
            self.nbytes = weigh(content)
        except Exception:  # of an odd object: a batch that is not counted is better than none
            self.nbytes = 0

    def unpack(self) -> Any:
        return self._content


class Copies:
    """The datasets of the workers of a pool: one for all, or a copy for each."""

    def __init__(self, blueprint: Blueprint, each: bool, *, required: bool) -> None:
        """With `each` every worker gets a copy. If one cannot be made, that is an error if it is
        `required`."""
        self.each = each
        self._blueprint = blueprint
        self._error: Exception | None = None
        self._one_at_a_time = threading.Lock()
        if each:
            # Workers copy this one: the user may change the original while they run, and a
            # replacement is told again of the changes that `loader.broadcast` makes.
            try:
                self._blueprint = _copied(blueprint)
            except Exception as error:
                self._error, self.each = error, required

    def take(self) -> tuple[Blueprint, str]:
        """The blueprint for one worker; and why it has no copy, if it should have one."""
        if not self.each:
            error = self._error
            return self._blueprint, "" if error is None else f"{type(error).__name__}: {error}"
        if self._error is not None:
            raise self._error
        with self._one_at_a_time:  # `__deepcopy__` and `__getstate__` may be the user's
            return _copied(self._blueprint), ""


def _copied(blueprint: Blueprint) -> Blueprint:
    """With a copy of the dataset, to which methods of it are bound too, as when it is pickled."""
    for tries_left in reversed(range(COPY_TRIES)):
        memo: dict[int, Any] = {}
        try:
            dataset = copy.deepcopy(blueprint.dataset, memo)
            break
        except RuntimeError as error:
            # A dict or set that is not the dataset's alone, such as a cache. The copying itself may
            # add to that: fsspec (and so Hugging Face) caches a file system for each thread.
            if "changed size during iteration" not in str(error) or not tries_left:
                raise

    def bound(function: Any) -> Any:
        if isinstance(function, MethodType) and id(function.__self__) in memo:
            return MethodType(function.__func__, memo[id(function.__self__)])
        return function

    return dataclasses.replace(
        blueprint,
        dataset=dataset,
        collate_fn=bound(blueprint.collate_fn),
        worker_init_fn=bound(blueprint.worker_init_fn),
    )


class WorkerThread(MessageHost):
    """One worker. Implements `worker.interface.Host`."""

    own_process = False

    def __init__(
        self,
        setup: WorkerSetup,
        copies: Copies,
        notes: ThreadNotes,
        bell: Bell,
        watch_bell: Bell,
        memory: Memory,
        turns: Turns,
        manner: Manner,
    ) -> None:
        self.recorder = notes
        self.inbox: Inbox[Orders] = Inbox()
        self.outbox: deque[Message] = deque()
        self.dismissed = False
        self.own_dataset = copies.each
        self._setup = setup
        self._copies = copies
        self._bell = bell
        self._watch_bell = watch_bell
        self.memory = memory
        self._rest = partial(turns.end, setup.worker)
        self._last_look = 0.0
        self._shared: SharedGenerators | None = None
        self.thread = threading.Thread(
            target=manner.run, args=(self._run,), name=name_of(setup.worker), daemon=True
        )

    def dismiss(self) -> None:
        """Have it end. Does not wait."""
        self.dismissed = True
        self.inbox.put(None)
        self.inbox.wake()

    # -- the loop -------------------------------------------------------------------------

    def _run(self) -> None:
        """The whole life of the thread."""
        error = ""
        try:
            _use_one_intra_op_thread()
            use_memory(self.memory)
            self._work()
        except BaseException:  # a mistake of ours: everything of the user's is caught further in
            error = traceback.format_exc()
        private_names.set_thread_worker_info(None)
        self.recorder.note(-1, -1, STOP)
        self._say(GONE, error)  # the traceback, if that was not intended
        self._watch_bell.ring()

    def _work(self) -> None:
        self.recorder.note(-1, -1, START)
        try:
            blueprint, not_copied = self._copies.take()
        except BaseException as error:
            self._say(REFUSED, describe(error, position=None, step="bootstrap"))
            self._watch_bell.ring()
            while self._wait() is not None:
                pass  # orders that were given before that was known
            return
        dataset = blueprint.dataset
        worker = Worker(self._setup, blueprint, self)
        try:
            self._serve(worker, dataset, not_copied)
        finally:
            self._shared = None
            worker.replica.release()

    def _serve(self, worker: Worker, dataset: Any, not_copied: str) -> None:
        before = dict(getattr(dataset, "__dict__", ()))
        worker.begin()
        self._say(READY)
        if not self.own_dataset and worker.blueprint.worker_init_fn is not None:
            self._compare(before, getattr(dataset, "__dict__", {}))
        if not_copied:
            self.remark("dataset-not-copied", _not_copied(not_copied))
        if not worker.take_up():
            return
        self._shared = SharedGenerators(self._bell, None if self.own_dataset else dataset)
        while (orders := self._wait()) is not None:
            for kind, number, content in orders:
                if self.dismissed:
                    return
                self._shared.before_batch()
                worker.carry_out(kind, number, content)

    def _compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Say so if `worker_init_fn` has changed the dataset that all workers share."""
        changed = [name for name, value in list(after.items()) if before.get(name) is not value]
        if changed:
            self.remark(
                "shared-dataset-changed",
                f"worker_init_fn changes the dataset's {', '.join(changed[:5])}. All worker "
                "threads share the dataset, so each sees what the last one has set. Set "
                "`thread_safe = False` on it: then each worker has a copy, as a process has",
            )

    def _wait(self) -> Orders:
        self.recorder.note(-1, -1, IDLE)
        return self.inbox.get(self._rest)

    # -- what it says ---------------------------------------------------------------------

    def _say(self, *message: Any) -> None:
        self.outbox.append(message)
        bell = self._bell
        if bell.waiting:
            if not bell.patient:
                bell.ring()
        elif self._watch_bell.waiting:  # for batches: see `ThreadDriver.prepare_watch`
            self._watch_bell.ring()

    def publish(self, info: Any) -> None:
        private_names.set_thread_worker_info(info)

    def encode(self, batch: Any) -> ThreadBatch:
        return ThreadBatch(batch)

    def answer(self, kind: bytes, number: int, content: Any, mark: int, state: bytes) -> None:
        if kind is BATCH and self._shared is not None:
            moved = self._shared.moved()
            if moved is not None:
                self.remark(*moved)
                self._shared = SharedGenerators(self._bell, None)
        self._say(kind, number, content, mark, state or None)

    def between_samples(self) -> int:
        if self.dismissed:
            raise Dismissed
        now = monotonic()
        slow = now - self._last_look > OFTEN * SELDOM
        self._last_look = now
        return 1 if slow else SELDOM

    def pause(self, seconds: float) -> bool:
        return not self.dismissed  # a pause is for kills from outside, which no thread can get


def name_of(worker: int) -> str:
    """The name of its thread."""
    return f"holdfast-worker-{worker}"


def _not_copied(why: str) -> str:
    return (
        "the worker threads share one iterable dataset, because it could not be copied for each "
        f"({why}). That is right if iter() of it gives independent iterators; if so, set "
        "`thread_safe = True` on it, and nothing is copied"
    )


_setting_threads = threading.Lock()


def _use_one_intra_op_thread() -> None:
    """Have torch compute in this thread alone, as in a worker process: so results are the same to
    the last bit, and workers do not start a team of threads each.

    With OpenMP the number belongs to the thread that sets it; but torch also notes it for threads
    that have none yet. So a second thread puts that back at once. Other backends have one number
    for all threads, which is the trainer's.
    """
    if not private_names.openmp():
        return
    with _setting_threads:
        before = torch.get_num_threads()
        if before == 1:
            return
        torch.set_num_threads(1)
        back = threading.Thread(target=torch.set_num_threads, args=(before,), daemon=True)
        back.start()
        back.join()
