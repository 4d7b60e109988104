"""What workers write to standard error: it reaches the user whole, and its end is kept.

Trainers are forked here with a standard error of the test's choosing: a pipe, a file, a terminal,
nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.processes.stderr import _Outlet
from tests.autopsy.trainers import train
from tests.faults.outside import nursery, pids
from tests.support.processes import alive, eventually

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]


# -- what workers do -----------------------------------------------------------------------


def print_and_die() -> None:
    print("printed by Python", file=sys.stderr)
    signal.raise_signal(signal.SIGKILL)


def write_half_a_line_and_die() -> None:
    os.write(2, b"a line\nhalf of anoth")
    signal.raise_signal(signal.SIGKILL)


def write_natively_and_die() -> None:
    libc = ctypes.CDLL(None)
    libc.write(2, b"written in C\n", 13)
    libc.abort()


def free_what_is_not_allocated() -> None:
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    place = ctypes.create_string_buffer(256)
    libc.free(ctypes.addressof(place) + 16)


def throw_in_cpp() -> None:
    ctypes.CDLL("libstdc++.so.6")._ZSt17__throw_bad_allocv()


def write_ten_megabytes_and_die() -> None:
    line = b"x" * 99 + b"\n"
    for number in range(100_000):
        os.write(2, b"%08d" % number + line[8:])
    signal.raise_signal(signal.SIGKILL)


def leave_a_child_that_writes() -> None:
    """It goes on after the loader is closed, when it finds the file `go`."""
    program = (
        "import os, sys, time\n"
        "deadline = time.monotonic() + 60\n"
        "while not os.path.exists('go') and time.monotonic() < deadline: time.sleep(0.02)\n"
        "os.write(2, b'the child lives\\n')\n"
        "open('written', 'w').close()\n"
    )
    # SIGPIPE ends it, as it ends every program but Python.
    program = "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n" + program
    child = subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.DEVNULL)
    Path("child").write_text(str(child.pid))
    child.returncode = 0


def tell_about_the_terminal() -> None:
    size = os.get_terminal_size(2) if os.isatty(2) else None
    print("terminal", os.isatty(2), sys.stderr.isatty(), size and tuple(size), file=sys.stderr)
    os.write(2, b"\x1b[1mas it is\x1b[0m\r50%\r100%\n")
    signal.raise_signal(signal.SIGKILL)


class Talker:
    """Sample 2i+1 does the i-th of `acts`, once."""

    def __init__(self, *acts: Callable[[], None]) -> None:
        self.acts = acts

    def __len__(self) -> int:
        return 2 * len(self.acts) + 2

    def __getitem__(self, index: int) -> int:
        which, odd = divmod(index, 2)
        if odd and which < len(self.acts) and not os.path.exists(f"struck-{which}"):
            Path(f"struck-{which}").touch()
            self.acts[which]()
        return index


def load(dataset: Any, method: str = "fork", **options: Any) -> Any:
    loader = holdfast.DataLoader(
        dataset,
        num_workers=2,
        multiprocessing_context=None if method == "fork" else method,
        **options,
    )
    with loader:
        assert [int(batch[0]) for batch in loader] == list(range(len(dataset)))
    return loader


# -- reading the other end -----------------------------------------------------------------


def collect(fd: int, seconds: float = 60.0, enough: bytes | None = None) -> bytes:
    """Read until the other end is closed, or until `enough` has been read."""
    deadline = time.monotonic() + seconds
    found = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while time.monotonic() < deadline:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            break
        try:
            data = os.read(fd, 1 << 16)
        except OSError:
            data = b""  # a terminal without another end
        found += data
        if not data or (enough is not None and enough in found):
            return found
    raise AssertionError(f"the end did not come within {seconds} s; so far: {found[-2000:]!r}")


def through_a_pipe(folder: Path, body: Callable[[], Any]) -> tuple[bytes, list[dict[str, Any]]]:
    """All that came through the pipe until it was closed, and the incidents."""
    reading, writing = os.pipe()
    trainer = train(folder, writing, body)
    os.close(writing)
    try:
        found = collect(reading)
        assert trainer.ended() == 0, (folder / "trouble").read_text()
    finally:
        os.close(reading)
    return found, trainer.told()


LAST_WORDS = {
    "Python": (print_and_die, "printed by Python\n", "killed-from-outside"),
    "half a line": (write_half_a_line_and_die, "a line\nhalf of anoth", "killed-from-outside"),
    "C": (write_natively_and_die, "written in C\n", "abort"),
    "glibc": (free_what_is_not_allocated, "free(): invalid pointer\n", "abort"),
    "C++": (throw_in_cpp, "std::bad_alloc", "allocation-failed"),
    "nothing": (lambda: signal.raise_signal(signal.SIGKILL), "", "killed-from-outside"),
}


def test_last_words_reach_the_user_and_the_evidence(tmp_path: Path) -> None:
    acts = [act for act, _, _ in LAST_WORDS.values()]
    found, incidents = through_a_pipe(tmp_path, lambda: load(Talker(*acts)))
    by_sample = {incident["sample"]: incident for incident in incidents}
    for number, (name, (_, words, cause)) in enumerate(LAST_WORDS.items()):
        incident = by_sample[2 * number + 1]
        assert words in found.decode(), name
        logged = f"worker 1 (pid {incident['pid']})".encode()
        assert found.index(words.encode()) < found.index(logged), name
        assert words in incident["evidence"]["stderr"], name
        others = {said for _, said, _ in LAST_WORDS.values()} - {words, ""}
        assert not [said for said in others if said in incident["evidence"]["stderr"]], name
        assert incident["cause"] == cause, name


def write_half_a_line() -> None:
    os.write(2, b"half of one")


def test_a_report_begins_on_a_line_of_its_own_whoever_left_half_of_one(tmp_path: Path) -> None:
    """And where nothing is reported nothing is added to what workers write."""
    found, incidents = through_a_pipe(tmp_path, lambda: load(Talker(write_half_a_line)))
    assert (found, incidents) == (b"half of one", [])

    one = tmp_path / "one"
    one.mkdir()
    found, (incident,) = through_a_pipe(one, lambda: load(Talker(write_half_a_line_and_die)))
    assert found.startswith(
        f"a line\nhalf of anoth\n[Talker] worker 1 (pid {incident['pid']})".encode()
    )

    def another_dies() -> Any:
        Path("struck-0").unlink()  # worker 1 writes its half, and lives
        loader = holdfast.DataLoader(Talker(write_half_a_line), num_workers=2)
        with loader:
            iterator = iter(loader)
            words = iterator._pool.driver.resources.boxes.stderr_tail
            assert eventually(lambda: words(1) == "half of one")
            os.kill(pids(iterator)[0], signal.SIGKILL)
            assert eventually(lambda: loader.incidents)
        return loader

    found, (incident,) = through_a_pipe(tmp_path, another_dies)
    assert found.startswith(
        f"half of one\n[Talker] worker 0 (pid {incident['pid']}) was killed".encode()
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_under_other_start_methods_too(method: str, tmp_path: Path) -> None:
    found, (incident,) = through_a_pipe(
        tmp_path, lambda: load(Talker(free_what_is_not_allocated), method)
    )
    assert b"free(): invalid pointer\n" in found
    assert "free(): invalid pointer\n" in incident["evidence"]["stderr"]


def test_ten_megabytes_arrive_whole_and_a_few_kilobytes_are_kept(tmp_path: Path) -> None:
    found, (incident,) = through_a_pipe(tmp_path, lambda: load(Talker(write_ten_megabytes_and_die)))
    lines = [line for line in found.splitlines() if line[:8].isdigit()]
    assert lines == [b"%08d" % number + b"x" * 91 for number in range(100_000)]
    kept = incident["evidence"]["stderr"]
    assert 4096 <= len(kept) <= 8192
    assert kept.splitlines()[-1].startswith("00099999")
    assert all(len(line) == 99 for line in kept.splitlines())


def test_a_pipe_that_is_full_has_whole_lines_in_it() -> None:
    """The trainer writes to the same pipe as soon as there is room again."""
    lines = b"".join(b"%08d" % number + b"x" * 91 + b"\n" for number in range(2_000))
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        outlet, written, found = _Outlet(writing, guarded=False), 0, b""
        while written < len(lines):
            with contextlib.suppress(BlockingIOError):
                while written < len(lines):
                    written += outlet.write(lines, written)
            assert lines[:written].endswith(b"\n")
            found += os.read(reading, 5_000)  # half of a line may be what makes room
        assert found == lines[: len(found)]
    finally:
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def opened(path: str | Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def test_a_file_is_written_in_order_and_devnull_hides_nothing_from_us(tmp_path: Path) -> None:
    with opened(tmp_path / "log", os.O_CREAT | os.O_WRONLY) as log:
        os.write(log, b"before\n")
        trainer = train(tmp_path, log, lambda: load(Talker(print_and_die)))
        assert trainer.ended() == 0, (tmp_path / "trouble").read_text()
        os.write(log, b"after\n")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:2] == ["before", "printed by Python"]
    assert lines[-1] == "after"
    (tmp_path / "struck-0").unlink()
    with opened(os.devnull, os.O_WRONLY) as nowhere:
        trainer = train(tmp_path, nowhere, lambda: load(Talker(print_and_die)))
        assert trainer.ended() == 0, (tmp_path / "trouble").read_text()
    (incident,) = trainer.told()
    assert incident["evidence"]["stderr"] == "printed by Python\n"


def test_without_standard_error_nothing_is_read(tmp_path: Path) -> None:
    act = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    trainer = train(tmp_path, None, lambda: load(Talker(act)))
    assert trainer.ended() == 0, (tmp_path / "trouble").read_text()
    (incident,) = trainer.told()
    assert "stderr" not in incident["evidence"]


def test_a_reader_that_goes_away_does_no_harm(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    trainer = train(tmp_path, writing, lambda: load(Talker(print_and_die)))
    os.close(writing)
    assert trainer.ended() == 0, (tmp_path / "trouble").read_text()
    (incident,) = trainer.told()
    assert incident["evidence"]["stderr"] == "printed by Python\n"


def test_a_reader_that_does_not_read_blocks_neither_the_others_nor_the_end(tmp_path: Path) -> None:
    """One worker waits to write, and is replaced for it; when the reader reads again, all is there."""
    reading, writing = os.pipe()
    size = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"." * size)  # full

    def body() -> Any:
        logging.getLogger("holdfast").setLevel(logging.CRITICAL)  # or the trainer would wait too
        return load(Talker(write_ten_megabytes_and_die), stall_timeout=1.0)

    trainer = train(tmp_path, writing, body)
    os.close(writing)
    assert trainer.ended() == 0, (tmp_path / "trouble").read_text()
    (incident,) = trainer.told()
    assert (incident["kind"], incident["sample"]) == ("stalled", 1)
    found = collect(reading)  # to its end: no process holds it for ever
    os.close(reading)
    text = found[size:]
    lines = text.splitlines()
    assert len(text) >= 60_000  # what the worker's own pipe took
    assert lines == [(b"%08d" % number + b"x" * 91) for number in range(len(lines) - 1)] + [
        (b"%08d" % (len(lines) - 1) + b"x" * 91)[: len(lines[-1])]
    ]


def test_a_trainer_that_is_killed_leaves_no_process_that_holds_its_pipe(tmp_path: Path) -> None:
    def body() -> Any:
        loader = holdfast.DataLoader(Talker(lambda: print("said", file=sys.stderr)), num_workers=2)
        iterator = iter(loader)
        assert int(next(iterator)[0]) == 0
        assert int(next(iterator)[0]) == 1
        Path("loaded").touch()
        time.sleep(60)

    reading, writing = os.pipe()
    trainer = train(tmp_path, writing, body)
    os.close(writing)
    assert eventually(lambda: (tmp_path / "loaded").exists()), (tmp_path / "trouble").read_text()
    collect(reading, enough=b"said\n")
    os.kill(trainer.pid, signal.SIGKILL)
    assert collect(reading) == b""  # to its end
    os.close(reading)
    assert trainer.ended() == -signal.SIGKILL


def test_a_socket_as_services_have_it_is_written_to(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    trainer = train(tmp_path, theirs.fileno(), lambda: load(Talker(write_ten_megabytes_and_die)))
    theirs.close()
    found = collect(ours.fileno())
    assert trainer.ended() == 0, (tmp_path / "trouble").read_text()
    ours.close()
    assert sum(line[:8].isdigit() for line in found.splitlines()) == 100_000


def test_a_child_that_outlives_its_worker_and_the_loader_may_go_on_writing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    trainer = train(tmp_path, writing, lambda: load(Talker(leave_a_child_that_writes)))
    os.close(writing)
    assert trainer.ended() == 0, (tmp_path / "trouble").read_text()
    child = int((tmp_path / "child").read_text())
    assert alive(child)
    (tmp_path / "go").touch()
    assert b"the child lives\n" in collect(reading)  # and then no process holds it any more
    os.close(reading)
    assert eventually(lambda: not alive(child))
    assert (tmp_path / "written").exists()


def test_on_a_terminal_workers_have_a_terminal(tmp_path: Path) -> None:
    """As wide as the user's, and what is written to it is not changed on the way."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 123, 0, 0))
    trainer = train(tmp_path, slave, lambda: load(Talker(tell_about_the_terminal)))
    found = collect(master, enough=b"its batch is made again")
    os.close(slave)
    assert trainer.ended() == 0, (tmp_path / "trouble").read_text()
    os.close(master)
    assert b"terminal True True (123, 33)\r\n" in found  # this terminal's own \r, and one only
    assert b"\x1b[1mas it is\x1b[0m\r50%\r100%\r\n" in found
    (incident,) = trainer.told()
    assert incident["evidence"]["stderr"].endswith("\r50%\r100%\n")


def test_a_terminal_that_is_stopped_stops_only_the_process_that_writes(tmp_path: Path) -> None:
    """Ctrl-S, while a worker writes; then Ctrl-Q."""
    master, slave = pty.openpty()
    termios.tcflow(slave, termios.TCOOFF)

    def body() -> Any:
        logging.getLogger("holdfast").setLevel(logging.CRITICAL)
        return load(Talker(print_and_die))

    trainer = train(tmp_path, slave, body)
    assert trainer.ended() == 0, (tmp_path / "trouble").read_text()
    (incident,) = trainer.told()
    assert incident["evidence"]["stderr"] == "printed by Python\n"
    termios.tcflow(slave, termios.TCOON)
    assert b"printed by Python\r\n" in collect(master, enough=b"Python\r\n")
    os.close(slave)
    os.close(master)


class Quiet(Talker):
    """Says nothing; tells which descriptors its worker has."""

    def __getitem__(self, index: int) -> Any:
        return os.readlink("/proc/self/fd/2"), len(os.listdir("/proc/self/fd"))


def test_workers_do_not_hold_the_users_end(tmp_path: Path) -> None:
    def body() -> Any:
        mine = os.readlink("/proc/self/fd/2")
        loader = holdfast.DataLoader(Quiet(print_and_die), num_workers=2, batch_size=None)
        with loader:
            seen = list(loader)
        assert mine not in {link for link, _ in seen}
        assert len({link for link, _ in seen}) == 2  # one for each worker
        return loader

    found, incidents = through_a_pipe(tmp_path, body)
    assert (found, incidents) == (b"", [])


def replaced(index: int) -> None:
    import io

    sys.stderr = io.StringIO()


def test_a_standard_error_replaced_in_python_is_the_users_own(tmp_path: Path) -> None:
    """As notebooks and pytest do: what does not go through descriptor 2 is not ours to see."""
    found, (incident,) = through_a_pipe(
        tmp_path, lambda: load(Talker(print_and_die), worker_init_fn=replaced)
    )
    assert b"printed by Python" not in found
    assert incident["evidence"]["stderr"] == ""


class Chatter:
    """Says where it is; every third sample kills its worker, once."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        os.write(2, b"sample %d\n" % index)
        if index % 3 == 2:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(f"{self.folder}/{index}", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_after_many_deaths_the_nursery_holds_no_more_than_before(tmp_path: Path) -> None:
    """And each of them has its own last message."""
    loader = holdfast.DataLoader(
        Chatter(str(tmp_path)), num_workers=2, max_restarts=None, persistent_workers=True
    )
    with loader:
        iterator = iter(loader)
        next(iterator)
        assert eventually(lambda: None not in pids(iterator))
        folder = f"/proc/{nursery(iterator)}/fd"
        before = len(os.listdir(folder))
        assert len(list(iterator)) == 59
        assert eventually(lambda: len(os.listdir(folder)) <= before + 1)  # the line to a spare
    assert len(loader.incidents) == 20
    for incident in loader.incidents:
        assert incident.evidence["stderr"].splitlines()[-1] == f"sample {incident.sample}"
