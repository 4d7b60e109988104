"""One channel per worker: a socket pair that nobody else ever touches.

A queue shared by all workers needs a lock, and a worker killed while it holds the lock, or half-way
through a message, takes all the others with it (`queue-poisoned-by-death`). Here every worker has
its own pair of sequenced-packet sockets: the kernel queues a packet whole or not at all, so there
is no half packet to read, and the channel is thrown away together with its worker.

A message larger than a packet travels as several, each saying whether more follow; what a dying
worker left unfinished is dropped with its channel. The parent's end never blocks: what the kernel
will not take now waits in an outbox and is flushed when the socket is writable.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence

from holdfast import kernel

__all__ = ["PACKET", "Channel", "pair"]

PACKET = 64 * 1024  # of payload; well below the default socket buffer of 208 KiB
_LAST = b"\x00"
_MORE = b"\x01"

Buffer = bytes | bytearray | memoryview


def pair() -> tuple[Channel, socket.socket]:
    """A new channel: the parent's end, and the socket for the worker."""
    ours, theirs = kernel.socket_pair()
    ours.setblocking(False)
    return Channel(ours), theirs


class Channel:
    """One end of a channel."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.open = True
        self.parts = 0  # packets received so far that were not the last of their message
        self._parts: list[bytes] = []
        self._outbox: deque[bytes] = deque()

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.open = False
        self._outbox.clear()
        self._parts.clear()
        try:
            self.sock.shutdown(socket.SHUT_RDWR)  # also for copies a forked child may hold
        except OSError:
            pass  # the other end is gone already
        self.sock.close()

    def disown(self) -> None:
        """In a process forked from the owner: let go without ending the channel."""
        self.sock.close()

    # -- the worker's side: blocking ------------------------------------------------------

    def send(self, message: Buffer, between: Callable[[], None] | None = None) -> None:
        """Send a whole message, waiting as long as the other end does not read."""
        if len(message) <= PACKET:
            self.sock.send(b"".join((_LAST, message)))
            return
        packets = _packets(message)
        for number, packet in enumerate(packets):
            self.sock.sendmsg(packet)
            if between is not None and number == 0:
                between()

    def receive(self, flags: int = 0) -> bytes | None:
        """The next whole message; None when the other end is gone."""
        while True:
            packet = self.sock.recv(PACKET + 1, flags)
            if not packet:
                return None
            message = self._assemble(packet)
            if message is not None:
                return message

    def waiting(self) -> bytes | None:
        """The next whole message if it is there already; None if not, or at the end."""
        try:
            return self.receive(socket.MSG_DONTWAIT)
        except OSError:
            return None  # if something is wrong, `receive` will say what

    # -- the parent's side: never blocks --------------------------------------------------

    def post(self, message: Buffer) -> bool:
        """Send now what the kernel takes, keep the rest for `flush`; whether there is a rest."""
        if not self.open:
            return False
        if not self._outbox and len(message) <= PACKET:
            try:
                self.sock.send(b"".join((_LAST, message)))
                return False
            except BlockingIOError:
                pass
            except OSError:  # the worker is gone; its death is reported elsewhere
                return False
        self._outbox.extend(b"".join(packet) for packet in _packets(message))
        self.flush()
        return self.pending

    def flush(self) -> None:
        """Send what waits in the outbox, as far as the kernel takes it."""
        while self._outbox:
            try:
                self.sock.send(self._outbox[0])
            except BlockingIOError:
                return
            except OSError:  # the worker is gone; its death is reported elsewhere
                self._outbox.clear()
                return
            self._outbox.popleft()

    @property
    def pending(self) -> bool:
        """Whether something waits to be flushed."""
        return bool(self._outbox)

    def poll(self) -> bytes | None:
        """The next whole message if one is there; None if not, or if the other end is gone."""
        while self.open:
            try:
                packet = self.sock.recv(PACKET + 1)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # Said once, before what is still queued, when the other end died with something
                # unread: its last words come after it.
                continue
            except OSError:
                packet = b""
            if not packet:
                self.open = False
                return None
            message = self._assemble(packet)
            if message is not None:
                return message
        return None

    def _assemble(self, packet: bytes) -> bytes | None:
        if packet[:1] == _MORE:
            self._parts.append(packet[1:])
            self.parts += 1
            return None
        if not self._parts:
            return packet[1:]
        self._parts.append(packet[1:])
        message = b"".join(self._parts)
        self._parts.clear()
        return message


def _packets(message: Buffer) -> list[Sequence[Buffer]]:
    view = memoryview(message)
    starts = range(0, max(len(view), 1), PACKET)
    last = starts[-1]
    return [(_LAST if at == last else _MORE, view[at : at + PACKET]) for at in starts]
