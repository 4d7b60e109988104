"""What the machine takes and returns: values without behaviour.

Events are in the past tense (`consumer_events`, `worker_events`) and actions in the imperative
(`actions`). They carry tasks (`tasks`) and exits (`worker_exits`); `limits` are given to the
machine when it is made. The decisions are in `engine.machine`, `engine.flow` and `engine.restarts`.

Some fields are opaque: the machine takes them from an event, puts them into an action, and never
reads them (`BatchReady.result`, `WorkerExited.evidence`, `Rehearsed.finding`, `EpochBegan.seeds`,
`Announced.change`).
"""

from __future__ import annotations

from holdfast.engine.events.actions import *
from holdfast.engine.events.consumer_events import *
from holdfast.engine.events.limits import *
from holdfast.engine.events.tasks import *
from holdfast.engine.events.worker_events import *
from holdfast.engine.events.worker_exits import *
