"""The tee: copies what workers write to standard error to the user's, and keeps the end of it.

Messages of glibc, of the C++ runtime and of decoders are often the only reason that a dying worker
gives, and they bypass Python: they go to descriptor 2. So that descriptor is, in each worker, a
pipe of its own, or a terminal of its own if the user's is one. The nursery reads it, writes to the
user's at once, and keeps the last few KiB in the worker's black box (memory that survives the
worker). Nothing of this runs in the worker. So nothing is lost whenever a SIGKILL comes: the
nursery holds the pipe, and empties it before it reports the death.

Accidents that must not happen:

- A terminal stopped by Ctrl-S, or a reader that does not read, must block only the process that
  writes. The user's standard error is shared with the trainer and with the shell, so its flags must
  not be changed: it is opened again, without blocking, where that is possible. While it accepts
  nothing, nothing is read either, and in the end the writing worker blocks, as it would without us.
- Children of a worker may outlive it and write. The nursery reads their output as long as it lives.
  After that a small process does so, which exits with the last of them. Otherwise SIGPIPE would end
  them.
- `python train.py 2>&1 | tee log` must end with the trainer: workers do not hold the user's end.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import struct
import subprocess
import sys
import termios
import tty
from dataclasses import dataclass
from multiprocessing import spawn

from holdfast import kernel
from holdfast.autopsy import blackbox

_STDERR = 2
_CHUNK_BYTES = 64 * 1024
_MAX_LAST_CHUNKS = 32  # read at a death, at most: a pipe holds one, and a child may still write
_GUARDED_BYTES = 512  # bytes written at once where a write may block
_WHOLE_BYTES = select.PIPE_BUF  # a pipe takes so many at once, or none

# Reads the output of children that outlive the nursery. As little code as possible.
_READER = """\
import os, select, sys
poll = select.poll()
left = set(map(int, sys.argv[1:]))
for fd in left:
    poll.register(fd, select.POLLIN)
while left:
    for fd, _ in poll.poll():
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            continue
        except OSError:
            data = b""
        if not data:
            poll.unregister(fd)
            left.discard(fd)
            os.close(fd)
        while data:
            data = data[os.write(2, data):]
"""


class _Outlet:
    """The user's standard error, to be written to without blocking."""

    def __init__(self, fd: int, *, guarded: bool) -> None:
        self.fd = fd
        self._guarded = guarded

    @classmethod
    def find(cls, taken: tuple[int, ...]) -> _Outlet | None:
        """None if it is closed. Its number may then be one of ours (`taken`)."""
        if sys.__stderr__ is None or _STDERR in taken:
            return None
        try:
            mode = os.fstat(_STDERR).st_mode
            if fcntl.fcntl(_STDERR, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                return None
        except OSError:
            return None
        if stat.S_ISSOCK(mode):
            return cls(_STDERR, guarded=True)  # a socket cannot be opened again
        if not stat.S_ISFIFO(mode) and not os.isatty(_STDERR):
            return cls(_STDERR, guarded=False)  # a write to a file never blocks
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        try:
            return cls(kernel.reopen(_STDERR, flags), guarded=False)
        except OSError:
            return cls(_STDERR, guarded=True)  # it belongs to another user, after su

    def write(self, data: bytes, at: int) -> int:
        """Write a part of `data` that begins there. Returns how much was written. Raises
        `BlockingIOError` if nothing can be.

        It is a part that a pipe takes as a whole, and it ends with a line if it can: the trainer
        writes to the same pipe, and its lines must not come in the middle of others.
        """
        most = _WHOLE_BYTES
        if self._guarded:
            poll = select.poll()
            poll.register(self.fd, select.POLLOUT)
            if not poll.poll(0):
                raise BlockingIOError
            most = _GUARDED_BYTES
        end = at + most
        if end < len(data):
            end = data.rfind(b"\n", at, end) + 1 or end
        return os.write(self.fd, data[at:end])

    def close(self) -> None:
        if self.fd != _STDERR:
            os.close(self.fd)


@dataclass(slots=True)
class _Stream:
    """The standard error of one worker process and of its children."""

    reading: int
    worker: int
    current: bool = True  # the worker has not been replaced
    tail: bytes = b""


class StderrTee:
    """Used by the nursery. `poll` belongs to its loop; `taken` are descriptors of ours."""

    def __init__(self, poll: select.poll, blackboxes: int, taken: tuple[int, ...]) -> None:
        self._poll = poll
        self._blackboxes = blackboxes
        self._outlet = _Outlet.find(taken)
        self._streams: dict[int, _Stream] = {}  # by reading end
        self._pending = b""  # read and not yet written
        self._half = False  # what was read last ended in the middle of a line

    # -- a worker starts -------------------------------------------------------------------

    def open(self, worker: int) -> int | None:
        """The standard error for a process that is about to be forked; None to leave it
        unchanged."""
        for stream in self._streams.values():
            stream.current &= stream.worker != worker
        ends = None if self._outlet is None else _ends()
        blackbox.keep_stderr_tail(self._blackboxes, worker, None if ends is None else b"")
        if ends is None:
            return None
        reading, writing = ends
        os.set_blocking(reading, False)
        self._streams[reading] = _Stream(reading, worker)
        if not self._pending:
            self._poll.register(reading, select.POLLIN)
        return writing

    def in_worker(self, writing: int | None) -> None:
        """In the forked process: make this its standard error, and close those of other workers."""
        if self._outlet is not None:
            self._outlet.close()
        for reading in self._streams:
            os.close(reading)
        self.replace(writing)

    def replace(self, writing: int | None) -> None:
        """Make this the standard error of this process."""
        if writing is not None:
            os.dup2(writing, _STDERR)
            os.close(writing)

    # -- it writes -------------------------------------------------------------------------

    def owns(self, fd: int) -> bool:
        return fd in self._streams or (bool(self._pending) and fd == self._outlet_fd)

    def serve(self, fd: int) -> None:
        """One of our descriptors is ready."""
        if fd in self._streams and not self._pending:
            self._read(self._streams[fd])
        self._forward()

    def drain(self, worker: int, *, reported: bool) -> None:
        """A worker is dead: read all that it has written, even if it cannot be forwarded yet.

        `reported`: its death will be reported in the log, as a rule on this very terminal. The
        report must begin on a new line, whichever process has left half of one.
        """
        for stream in list(self._streams.values()):
            if stream.worker == worker and stream.current:
                self._empty(stream)
        if reported and self._half:
            self._queue(b"\n")
        self._forward()

    def _empty(self, stream: _Stream) -> None:
        for _ in range(_MAX_LAST_CHUNKS):
            if not self._read(stream):
                return

    def _read(self, stream: _Stream) -> bool:
        """Read one chunk. Returns whether there was any."""
        try:
            data = os.read(stream.reading, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # a terminal whose other end is closed
        if not data:
            self._close(stream)
            return False
        if stream.current:
            stream.tail = (stream.tail + data)[-blackbox.STDERR_TAIL :]
            blackbox.keep_stderr_tail(self._blackboxes, stream.worker, stream.tail)
        self._queue(data)
        return True

    def _queue(self, data: bytes) -> None:
        """Queue `data` for the user's end."""
        self._half = not data.endswith(b"\n")
        self._set_pending(self._pending + data)

    def _forward(self) -> None:
        outlet, pending, written = self._outlet, self._pending, 0
        if outlet is None:
            return
        while written < len(pending):
            try:
                written += outlet.write(pending, written)
            except BlockingIOError:
                break
            except OSError:
                # Its reader has exited, or the disk is full. Drop the data: the worker must go on.
                written = len(pending)
        self._set_pending(pending[written:])

    def _set_pending(self, pending: bytes) -> None:
        """While data waits to be written, poll for that; otherwise poll for more to read."""
        before, self._pending = self._pending, pending
        if bool(before) == bool(pending):
            return
        for reading in self._streams:
            if pending:
                self._poll.unregister(reading)
            else:
                self._poll.register(reading, select.POLLIN)
        if pending:
            self._poll.register(self._outlet_fd, select.POLLOUT)
        else:
            self._poll.unregister(self._outlet_fd)

    @property
    def _outlet_fd(self) -> int:
        assert self._outlet is not None  # without it nothing is read
        return self._outlet.fd

    def _close(self, stream: _Stream) -> None:
        del self._streams[stream.reading]
        if not self._pending:
            self._poll.unregister(stream.reading)
        os.close(stream.reading)

    # -- all workers are gone --------------------------------------------------------------

    def empty(self) -> None:
        """Read what there is, and forward what the user's end accepts."""
        for stream in list(self._streams.values()):
            self._empty(stream)
        self._forward()

    def finish(self) -> None:
        """Forward what is left. If a child may still write, start a process that reads it."""
        self.empty()
        if not self._streams and not self._pending:
            return
        rest = kernel.memory_file("holdfast-stderr", room=len(self._pending))
        os.write(rest, self._pending)
        os.lseek(rest, 0, os.SEEK_SET)
        descriptors = (rest, *self._streams)
        reader = subprocess.Popen(
            [spawn.get_executable(), "-I", "-S", "-c", _READER, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
        )
        reader.returncode = 0  # it outlives this process, and Popen must not warn about that


def _ends() -> tuple[int, int] | None:
    """A reading and a writing end; None if there are no descriptors left."""
    try:
        if os.isatty(_STDERR):
            return _terminal()
        return kernel.pipe()
    except OSError:
        return None


def _terminal() -> tuple[int, int]:
    """A terminal of the size of the user's, which does not change what is written to it."""
    try:
        reading, writing = map(kernel.above_stdio, os.openpty())
    except OSError:
        return kernel.pipe()  # a container without /dev/ptmx
    tty.setraw(writing)
    size = fcntl.ioctl(_STDERR, termios.TIOCGWINSZ, bytes(struct.calcsize("HHHH")))
    fcntl.ioctl(writing, termios.TIOCSWINSZ, size)
    return reading, writing
