"""The tee: what workers write to standard error reaches the user, and its end is remembered.

The last words of glibc, of the C++ runtime and of decoders are often the only reason a dying worker
gives, and they bypass Python: they go to descriptor 2. So that descriptor is, in each worker, a
pipe of its own, or a terminal of its own if the user's is one. The nursery reads it, writes to the
user's at once, and keeps the last few KiB in the worker's black box. Nothing runs in the worker; so
nothing is lost whatever moment a SIGKILL chooses, because the pipe is held from outside and emptied
before the death is reported.

Accidents that must not happen:

- A terminal stopped by Ctrl-S, or a reader that does not read, must block only who writes. The
  user's standard error is shared with the trainer and with the shell, so its flags are not ours to
  change: it is opened anew, without blocking, where it can be. While it takes nothing, nothing is
  read either, and in the end the writing worker waits, as it would without us.
- Children of a worker may outlive it and write. They are listened to for as long as the nursery
  lives, and then by a small process that ends with the last of them; else SIGPIPE would end them.
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

__all__ = ["Tee"]

_ERROR = 2
_CHUNK = 64 * 1024
_LAST_CHUNKS = 32  # read at a death, at most: a pipe holds one, and somebody may still write
_GUARDED = 512  # bytes written at once where waiting cannot be ruled out

# What listens to children that outlive the nursery: as little as can be.
_HEIR = """\
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
    """The user's standard error, and a way to write to it without waiting."""

    def __init__(self, fd: int, *, guarded: bool) -> None:
        self.fd = fd
        self._guarded = guarded

    @classmethod
    def find(cls, taken: tuple[int, ...]) -> _Outlet | None:
        """None if there is none: it was closed, and its number may be another's (`taken`)."""
        if sys.__stderr__ is None or _ERROR in taken:
            return None
        try:
            mode = os.fstat(_ERROR).st_mode
            if fcntl.fcntl(_ERROR, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                return None
        except OSError:
            return None
        if stat.S_ISSOCK(mode):
            return cls(_ERROR, guarded=True)  # which cannot be opened anew
        if not stat.S_ISFIFO(mode) and not os.isatty(_ERROR):
            return cls(_ERROR, guarded=False)  # a file, which never makes anybody wait
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        try:
            return cls(kernel.reopen(_ERROR, flags), guarded=False)
        except OSError:
            return cls(_ERROR, guarded=True)  # another user's, after su

    def write(self, data: bytes) -> int:
        """How much of it was written; raises `BlockingIOError` if that would be nothing."""
        if not self._guarded:
            return os.write(self.fd, data)
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError
        return os.write(self.fd, data[:_GUARDED])

    def let_go(self) -> None:
        if self.fd != _ERROR:
            os.close(self.fd)


@dataclass(slots=True)
class _Stream:
    """The standard error of one worker process, and of the children it has."""

    reading: int
    worker: int
    current: bool = True  # no other process is in that worker's place yet
    tail: bytes = b""


class Tee:
    """The nursery's. `poll` is its loop's; `taken` are descriptors that are not the user's."""

    def __init__(self, poll: select.poll, blackboxes: int, taken: tuple[int, ...]) -> None:
        self._poll = poll
        self._blackboxes = blackboxes
        self._outlet = _Outlet.find(taken)
        self._streams: dict[int, _Stream] = {}  # by reading end
        self._pending = b""  # read and not yet written
        self._half = False  # the last that was read ended in the middle of a line

    # -- a worker begins -------------------------------------------------------------------

    def open(self, worker: int) -> int | None:
        """What is to be standard error of a process to be forked; None to leave it as it is."""
        for stream in self._streams.values():
            stream.current &= stream.worker != worker
        ends = None if self._outlet is None else _ends()
        blackbox.keep_words(self._blackboxes, worker, None if ends is None else b"")
        if ends is None:
            return None
        reading, writing = ends
        os.set_blocking(reading, False)
        self._streams[reading] = _Stream(reading, worker)
        if not self._pending:
            self._poll.register(reading, select.POLLIN)
        return writing

    def in_worker(self, writing: int | None) -> None:
        """In the forked process: this is now its standard error; the others' are none of its."""
        if self._outlet is not None:
            self._outlet.let_go()
        for reading in self._streams:
            os.close(reading)
        if writing is not None:
            os.dup2(writing, _ERROR)
            os.close(writing)

    # -- it writes -------------------------------------------------------------------------

    def owns(self, fd: int) -> bool:
        return fd in self._streams or (bool(self._pending) and fd == self._outlet_fd)

    def serve(self, fd: int) -> None:
        """One of our descriptors is ready."""
        if fd in self._streams and not self._pending:
            self._read(self._streams[fd])
        self._forward()

    def emptied(self, worker: int, *, told: bool = False) -> None:
        """A worker is dead: what it has still written is read, whether the user's end takes it.

        `told` if its death is going to be reported, in the log and as a rule on this very terminal:
        that is to begin on a line of its own, whoever has left half of one.
        """
        for stream in list(self._streams.values()):
            if stream.worker == worker and stream.current:
                self._empty(stream)
        if told and self._half:
            self._take_in(b"\n")
        self._forward()

    def _empty(self, stream: _Stream) -> None:
        for _ in range(_LAST_CHUNKS):
            if not self._read(stream):
                return

    def _read(self, stream: _Stream) -> bool:
        """Whether there was anything."""
        try:
            data = os.read(stream.reading, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""  # a terminal whose other end is closed
        if not data:
            self._close(stream)
            return False
        if stream.current:
            stream.tail = (stream.tail + data)[-blackbox.WORDS :]
            blackbox.keep_words(self._blackboxes, stream.worker, stream.tail)
        self._take_in(data)
        return True

    def _take_in(self, data: bytes) -> None:
        """To be written to the user's end."""
        self._half = not data.endswith(b"\n")
        self._await(self._pending + data)

    def _forward(self) -> None:
        outlet = self._outlet
        while self._pending and outlet is not None:
            try:
                written = outlet.write(self._pending)
            except BlockingIOError:
                return
            except OSError:
                # Its reader is gone, or the disk is full. The worker is not to suffer for it.
                written = len(self._pending)
            self._await(self._pending[written:])

    def _await(self, pending: bytes) -> None:
        """While something waits to be written nothing more is read, and the other way round."""
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
        assert self._outlet is not None  # or nothing would have been read
        return self._outlet.fd

    def _close(self, stream: _Stream) -> None:
        del self._streams[stream.reading]
        if not self._pending:
            self._poll.unregister(stream.reading)
        os.close(stream.reading)

    # -- all workers are gone --------------------------------------------------------------

    def empty(self) -> None:
        """Read what is there, and write what the user's end takes."""
        for stream in list(self._streams.values()):
            self._empty(stream)
        self._forward()

    def finish(self) -> None:
        """Write what is left. If somebody can still write more, leave somebody who listens."""
        self.empty()
        if not self._streams and not self._pending:
            return
        rest = kernel.memory_file("holdfast-stderr", room=len(self._pending))
        os.write(rest, self._pending)
        os.lseek(rest, 0, os.SEEK_SET)
        heirs = (rest, *self._streams)
        heir = subprocess.Popen(
            [spawn.get_executable(), "-I", "-S", "-c", _HEIR, *map(str, heirs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=heirs,
        )
        heir.returncode = 0  # it outlives us, and that is no reason for Popen to complain


def _ends() -> tuple[int, int] | None:
    """A reading and a writing end; None when there are no descriptors left for them."""
    try:
        if os.isatty(_ERROR):
            return _terminal()
        return kernel.pipe()
    except OSError:
        return None


def _terminal() -> tuple[int, int]:
    """A terminal as wide as the user's, that changes nothing of what is written to it."""
    try:
        reading, writing = map(kernel.above_stdio, os.openpty())
    except OSError:
        return kernel.pipe()  # a container without /dev/ptmx
    tty.setraw(writing)
    size = fcntl.ioctl(_ERROR, termios.TIOCGWINSZ, bytes(struct.calcsize("HHHH")))
    fcntl.ioctl(writing, termios.TIOCSWINSZ, size)
    return reading, writing
