"""What the supervisor asks of a driver: of that which has the workers, whatever they are.

The other direction is `Supervisor.tell`. A driver tells of what has happened to a worker as soon as
it knows, and of the messages of a worker in the order in which they came, all of them before its
exit. From the moment it has told of a worker's exit, or of a start that came to nothing, there is
no process in that place for the supervisor, whatever the system thinks.

Methods here are called while actions are being carried out. What they cause (a start that fails, a
worker that is given up) may be told inside of them: it waits until all actions are carried out.
What has to be read first, and could change until then, is left to `Supervisor.after`.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from holdfast.engine import vocabulary as v

__all__ = ["Driver", "Urgent"]

Urgent = Literal["ask", "retire", "stay"]


class Driver(Protocol):
    """Workers of one kind."""

    def start(self, order: v.Start) -> None:
        """Order a process; it is told when it is ready, or is gone."""

    def send(self, worker: int, item: v.Item, hint: Any) -> None:
        """Have the worker answer this, after all that it was sent before. `hint` is what it is told
        about the samples of a batch besides their indices, None for nothing. It may wait for
        `flush`, so that a worker gets several in one message."""

    def flush(self) -> None:
        """All that is to be sent now is known."""

    def urge(self, worker: int, kind: Urgent, content: object = None) -> None:
        """An order that does not wait behind what was sent before: say anew that you are too large;
        go, because you are; or go on, although you are."""

    def rehearse(self, order: v.Rehearse) -> None:
        """Try whether another process could take up the worker's stream; tell `Rehearsed`."""

    def dump(self, worker: int, generation: int) -> None:
        """Make a stalled worker write its stack and die of it."""

    def kill(self, worker: int, generation: int) -> None: ...

    def abandon(self, worker: int, generation: int) -> None:
        """Leave a worker that even `kill` did not end; never use its memory again. Its exit is told
        all the same."""

    def renew(self) -> None:
        """Have later workers forked anew; those that live go, and their exits are `renewed`."""

    def report(self, report: v.Report, sample: Any) -> None:
        """A death was decided on: examine it and tell the user. `sample` is what the sampler calls
        the one that was being loaded."""

    def forget(self, worker: int, recycled: bool) -> None:
        """A worker has gone as it was to: there is nothing to be told."""
