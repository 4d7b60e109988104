"""One channel per worker: a socket pair that is shared with no other worker.

A queue shared by all workers needs a lock. A worker that is killed while it holds the lock, or in
the middle of a message, then blocks all others (`queue-poisoned-by-death`). Here every worker has
its own pair of sequenced-packet sockets. The kernel queues a packet whole or not at all, so there
are no partial packets, and the channel is closed together with its worker.

A message larger than a packet is sent as several, each of which says whether more follow. A message
that a dying worker has not finished is dropped with its channel. The parent's end never blocks:
packets that do not fit into the socket wait in an outbox and are sent when it is writable.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence

from holdfast import kernel

PACKET = 64 * 1024  # bytes of payload; well below the default socket buffer of 208 KiB
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
        """In a process forked from the owner: close this copy without ending the channel."""
        self.sock.close()

    # -- the worker's side: blocking ------------------------------------------------------

    def send(self, message: Buffer, between: Callable[[], None] | None = None) -> None:
        """Send a whole message. Blocks while the socket is full."""
        if len(message) <= PACKET:
            self.sock.send(b"".join((_LAST, message)))
            return
        packets = _packets(message)
        for number, packet in enumerate(packets):
            self.sock.sendmsg(packet)
            if between is not None and number == 0:
                between()

    def receive(self, flags: int = 0) -> bytes | None:
        """The next whole message; None if the other end is closed."""
        while True:
            packet = self.sock.recv(PACKET + 1, flags)
            if not packet:
                return None
            message = self._assemble(packet)
            if message is not None:
                return message

    def waiting(self) -> bytes | None:
        """The next whole message if it has arrived; None if not, or if the other end is closed."""
        try:
            return self.receive(socket.MSG_DONTWAIT)
        except OSError:
            return None  # an error is raised again by the next `receive`

    # -- the parent's side: never blocks --------------------------------------------------

    def post(self, message: Buffer) -> bool:
        """Send what fits into the socket and keep the rest for `flush`. Returns whether there is a
        rest."""
        if not self.open:
            return False
        if not self._outbox and len(message) <= PACKET:
            try:
                self.sock.send(b"".join((_LAST, message)))
                return False
            except BlockingIOError:
                pass
            except OSError:  # the worker is dead, which is reported elsewhere
                return False
        self._outbox.extend(b"".join(packet) for packet in _packets(message))
        self.flush()
        return self.pending

    def flush(self) -> None:
        """Send the packets in the outbox, until the socket is full."""
        while self._outbox:
            try:
                self.sock.send(self._outbox[0])
            except BlockingIOError:
                return
            except OSError:  # the worker is dead, which is reported elsewhere
                self._outbox.clear()
                return
            self._outbox.popleft()

    @property
    def pending(self) -> bool:
        """Whether something waits to be flushed."""
        return bool(self._outbox)

    @property
    def unread(self) -> bool:
        """Whether a packet has arrived that was not read yet."""
        try:
            return self.open and bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def poll(self) -> bytes | None:
        """The next whole message if it has arrived; None if not, or if the other end is closed."""
        while self.open:
            try:
                packet = self.sock.recv(PACKET + 1)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # Raised once if the other end died before it had read everything. The messages that
                # it sent come after it.
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
