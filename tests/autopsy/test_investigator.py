"""The investigator: counters compared with earlier ones, one kill among several deaths, last messages."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import holdfast
from holdfast import DataLoader
from holdfast.autopsy import thread_notes
from holdfast.autopsy.blackbox import NotedSize
from holdfast.autopsy.evidence import Evidence
from holdfast.autopsy.incident import Incident
from holdfast.autopsy.investigator import Investigator
from holdfast.autopsy.logbook import Logbook
from holdfast.autopsy.verdict import Verdict
from holdfast.run_report.logged_run import read
from tests.autopsy.made_up import MEMINFO, Tree
from tests.support.processes import kill


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    tree.process("self")
    tree.proc("meminfo", MEMINFO)
    for pid in ("self", 7, 8):
        tree.v2(pid, "/job/step" if pid != "self" else "/job")
    counters(tree, 0)
    tree.process(7, pages=5000)
    tree.process(8)
    tree.cgroup("job/memory.max", str(1 << 30))
    tree.cgroup("job/memory.current", str(1 << 30))
    return tree


def counters(tree: Tree, count: int, machine: int | None = None) -> None:
    for path in ("job/step", "job"):
        tree.cgroup(f"{path}/memory.events", f"oom 1\noom_kill {count}\n")
    tree.proc("vmstat", f"oom_kill {count if machine is None else machine}\n")


def bear(tree: Tree) -> Investigator:
    made = Investigator("fork", 2, roots=tree.roots)
    made.begin()
    made.born(0, 7)
    made.born(1, 8)
    return made


class Found(NamedTuple):
    evidence: Evidence
    verdict: Verdict


def examined(
    made: Investigator, worker: int = 0, size: NotedSize | None = None, **facts: Any
) -> Found:
    """The death of a worker of which the pool knows these facts."""
    stderr = facts.pop("stderr", None)
    left = made.remains(worker, stalled=facts.get("stalled", False), stderr=stderr, size=size)
    return Found(*made.examine(made.gather(replace(left, **facts))))


def killed(made: Investigator, worker: int = 0, **facts: Any) -> Found:
    return examined(made, worker, signal="SIGKILL", exitcode=-9, ready=True, **facts)


def reaped(tree: Tree, *pids: int) -> None:
    for pid in pids:
        for file in (tree.roots.proc / str(pid)).iterdir():
            file.unlink()


def test_a_counter_that_moved_is_a_kill_for_memory(tree: Tree) -> None:
    made = bear(tree)
    made._next_look = 0
    made.sample_counters(time.monotonic())
    counters(tree, 1)
    reaped(tree, 7)
    found = killed(made)
    assert (found.verdict.cause, found.verdict.confidence) == ("oom-killed", "high")
    assert found.evidence.worker_bytes == 5000 * os.sysconf("SC_PAGE_SIZE")
    assert str(tree.roots.cgroup / "job/step") in found.verdict.because[0]
    assert "1.0 GiB of 1.0 GiB" in " ".join(found.verdict.because)


def test_a_counter_that_stood_still_clears_the_kernel(tree: Tree) -> None:
    counters(tree, 41)
    found = killed(bear(tree))
    assert (found.verdict.cause, found.verdict.confidence) == ("killed-from-outside", "medium")


def test_a_kill_at_the_limit_on_cpu_time_is_no_outsiders(tree: Tree) -> None:
    made = bear(tree)
    made.reaped(0, cpu=3600.02, cpu_limit=3600.0)
    made.reaped(1, cpu=12.5, cpu_limit=3600.0)
    found = killed(made, 0).verdict
    assert (found.cause, found.confidence) == ("cpu-limit", "high")
    assert "3600.0 s of CPU time, and 3600 s is its hard limit" in found.because[0]
    assert killed(made, 1).verdict.cause == "killed-from-outside"


def test_a_look_between_the_kill_and_its_report_does_not_hide_it(tree: Tree) -> None:
    made = bear(tree)
    counters(tree, 1)
    made._next_look = 0
    made.sample_counters(time.monotonic())
    assert killed(made).verdict.cause == "oom-killed"


def test_one_kill_explains_one_death(tree: Tree) -> None:
    """The second death comes later and has no count of its own."""
    made = bear(tree)
    counters(tree, 1)
    assert killed(made, 0).verdict.cause == "oom-killed"
    assert killed(made, 1).verdict.cause == "killed-from-outside"


def test_one_kill_and_two_dead_at_once_is_certain_for_neither(tree: Tree) -> None:
    made = bear(tree)
    counters(tree, 1)
    reaped(tree, 7, 8)
    assert killed(made, 0).verdict.confidence == "low"


def test_two_kills_and_two_dead_at_once_are_both_certain(tree: Tree) -> None:
    made = bear(tree)
    counters(tree, 2)
    reaped(tree, 7, 8)
    for worker in (0, 1):
        verdict = killed(made, worker).verdict
        assert (verdict.cause, verdict.confidence) == ("oom-killed", "high")


def test_a_kill_in_another_group_is_not_ours(tree: Tree) -> None:
    made = bear(tree)
    counters(tree, 0, machine=1)
    assert killed(made).verdict.cause == "killed-from-outside"


def test_an_old_line_about_the_same_pid_is_not_ours(tree: Tree) -> None:
    tree.roots.kmsg.write_text("3,1,1,-;Memory cgroup out of memory: Killed process 7 (python)\n")
    assert killed(bear(tree)).verdict.cause == "killed-from-outside"


def test_a_kill_in_a_group_beside_ours_moves_only_the_one_above(tree: Tree) -> None:
    made = bear(tree)
    tree.cgroup("job/memory.events", "oom_kill 1\n")
    tree.proc("vmstat", "oom_kill 1\n")
    verdict = killed(made).verdict
    assert (verdict.cause, verdict.confidence) == ("killed-from-outside", "low")


def test_a_worker_that_was_moved_is_judged_by_its_new_group(tree: Tree) -> None:
    made = bear(tree)
    tree.v2(7, "/elsewhere")
    tree.cgroup("elsewhere/memory.events", "oom_kill 3\n")
    made._next_look = 0
    made.sample_counters(time.monotonic())
    tree.cgroup("elsewhere/memory.events", "oom_kill 4\n")
    assert killed(made).verdict.cause == "oom-killed"


def test_the_kernels_word_beats_every_counter(tree: Tree) -> None:
    now = int(time.monotonic() * 1e6)
    tree.roots.kmsg.write_text(
        f"3,1,{now},-;Memory cgroup out of memory: Killed process 7 (python)\n"
    )
    found = killed(bear(tree))
    assert (found.verdict.cause, found.verdict.confidence) == ("oom-killed", "high")
    assert "Killed process 7" in found.verdict.because[0]


def test_without_anything_to_read_it_says_so(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    found = killed(bear(tree))
    assert found.verdict.cause == "killed-unexplained"
    assert found.evidence.memory[-1].available is None


def test_memory_goes_into_the_logbook(tree: Tree, tmp_path: Path) -> None:
    book = Logbook(tmp_path / "book")
    made = Investigator("fork", 2, book, tree.roots)
    made.begin()
    made.born(0, 7)
    made._next_look = 0
    made.sample_counters(time.monotonic())
    made.sample_counters(time.monotonic())  # too soon for another
    book.flush()
    (record,) = read(tmp_path / "book").memory
    assert record["workers"] == {"0": 5000 * os.sysconf("SC_PAGE_SIZE")}
    assert record["limit"] == 1 << 30


def aborted(tree: Tree, stderr: str | None) -> Found:
    return examined(bear(tree), signal="SIGABRT", exitcode=-6, stderr=stderr)


def test_an_abort_is_judged_by_the_last_words(tree: Tree) -> None:
    unheard = aborted(tree, None).verdict
    assert (unheard.cause, unheard.confidence) == ("abort", "medium")
    heard = aborted(tree, "free(): double free detected in tcache 2\n").verdict
    assert (heard.cause, heard.confidence) == ("abort", "high")
    memory = aborted(tree, "terminate called after throwing an instance of 'std::bad_alloc'\n")
    assert (memory.verdict.cause, memory.verdict.confidence) == ("allocation-failed", "medium")


def _killed_at_size(made: Investigator, noted: float) -> Evidence:
    size = NotedSize(7 << 20, 1 << 20, noted)
    return killed(made, size=size).evidence


def test_what_the_worker_noted_of_its_size_counts_if_it_is_newer_than_what_we_saw(
    tree: Tree,
) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    for at, expected in ((-1.0, (5000 * page, None)), (1.0, (7 << 20, 6 << 20))):
        made = bear(tree)
        made._next_look = 0
        now = time.monotonic()
        made.sample_counters(now)
        found = _killed_at_size(made, now + at)
        assert (found.worker_bytes, found.worker_private) == expected


def test_a_size_in_the_black_box_is_enough_where_proc_shows_nothing(tmp_path: Path) -> None:
    made = Investigator("fork", 1, roots=Tree(tmp_path).roots)
    made.begin()
    found = _killed_at_size(made, time.monotonic())
    assert found.worker_bytes == 7 << 20


# -- threads -------------------------------------------------------------------------------


def test_threads_that_ended_with_an_error_are_noted_and_the_old_hook_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: heard.append(args.exc_type))
    fd = os.memfd_create("notes")

    def mishap() -> None:
        raise ValueError("x" * 1000)

    thread_notes.install(fd)
    for _ in range(30):
        thread = threading.Thread(target=mishap, name="reader")
        thread.start()
        thread.join()
    os.write(fd, b"Fatal Python error: Aborted\n")
    dump = os.pread(fd, 1 << 20, 0).decode()
    os.close(fd)
    notes, rest = thread_notes.split(dump)
    assert len(heard) == 30
    assert len(notes) == 20
    assert notes[0].startswith("thread 'reader' ended with ValueError: xxx")
    assert rest == "Fatal Python error: Aborted"


class LosesAThread:
    def __len__(self) -> int:
        return 4

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __getitem__(self, index: int) -> int:
        if index == 2 and not self.marker.exists():
            self.marker.touch()
            thread = threading.Thread(target=self.fail, name="prefetcher")
            thread.start()
            thread.join()
            os.abort()
        return index

    def fail(self) -> None:
        raise OSError("the server is gone")


@pytest.mark.faults
def test_a_dead_thread_stands_in_the_incident_of_its_worker(tmp_path: Path) -> None:
    loader = holdfast.DataLoader(
        LosesAThread(tmp_path / "struck"), num_workers=1, logbook=tmp_path / "book"
    )
    assert len(list(loader)) == 4
    (incident,) = loader.incidents
    assert (
        "before that, thread 'prefetcher' ended with OSError: the server is gone"
        in incident.because
    )
    assert "holdfast-note" not in incident.stack
    assert "fail" not in str(incident)
    (record,) = read(tmp_path / "book").incidents
    assert record["cause"] == "abort"
    assert read(tmp_path / "book").runs[0]["options"]["num_workers"] == 1


# -- the incident as users see it ----------------------------------------------------------


def incident(**more: Any) -> Incident:
    given: dict[str, Any] = {
        "kind": "killed", "worker_id": 3, "pid": 812, "signal": "SIGKILL", "exitcode": -9, "batch": 4,
        "sample": 18233, "position": 1, "step": "fetch", "stack": "", "action": "replaced; its batch is made again",
        "time": 1.0, "cause": "oom-killed", "confidence": "high", "because": ("oom_kill went up by 1",),
    }  # fmt: skip
    return Incident(**{**given, **more})


def test_the_first_line_is_plain_words() -> None:
    assert str(incident()) == (
        "worker 3 (pid 812) was killed by the kernel for lack of memory (SIGKILL) while loading sample 18233 "
        "(position 1 of batch 4); replaced; its batch is made again"
    )
    guess = "was killed by SIGKILL (probably by the kernel for lack of memory) while loading"
    assert guess in str(incident(confidence="medium"))
    assert "memory" not in str(incident(confidence="low"))
    assert str(incident(pid=None)).startswith("worker 3 was killed")
    refused = incident(kind="start-failed", cause="task-limit", signal=None, exitcode=None)
    assert "was refused another process or thread" in str(refused)
    stalled = incident(kind="stalled", cause="stopped", signal="SIGABRT")
    assert "made no progress (it was stopped or frozen, not hung) and was killed" in str(stalled)


@pytest.mark.parametrize(
    ("signal", "cause", "words"),
    [
        ("SIGKILL", "killed-from-outside", "was killed by SIGKILL (probably by another process, not by the kernel's OOM killer)"),
        ("SIGTERM", "killed-from-outside", "was terminated by SIGTERM (probably by another process, not by the kernel's OOM killer)"),
        ("SIGHUP", "killed-from-outside", "died of SIGHUP (probably it was killed by another process, not by the kernel's OOM killer)"),
        ("SIGTERM", "group-sigterm", "was terminated by SIGTERM (probably it was told to stop together with the whole job)"),
        ("SIGKILL", "cpu-limit", "was killed by SIGKILL (probably it used up its CPU time)"),
        ("SIGKILL", "killed-unexplained", "was killed by SIGKILL"),
        ("SIGSEGV", "stack-overflow", "crashed with a segmentation fault (SIGSEGV; probably it ran out of stack)"),
        ("SIGALRM", "stray-signal", "died of SIGALRM"),
    ],
)  # fmt: skip
def test_a_guess_is_a_sentence_with_every_cause(signal: str, cause: str, words: str) -> None:
    told = incident(signal=signal, cause=cause, confidence="medium").sentence()
    assert told.startswith(f"worker 3 (pid 812) {words} while loading sample 18233 ")


def test_the_report_has_reasons_below_it_and_json_has_everything() -> None:
    told = incident().report().splitlines()
    assert told[0] == str(incident())
    assert told[1] == "    because: oom_kill went up by 1"
    assert told[-1] == "    more: holdfast explain oom-killed"
    record = json.loads(json.dumps(incident(sample=("a", 1)).to_json()))
    assert record["sample"] == "('a', 1)"
    assert record["text"].startswith("worker 3")
    assert record["confidence"] == "high"


def test_an_examination_that_fails_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ValueError("not expected")

    monkeypatch.setattr(Investigator, "examine", fail)
    loader = DataLoader(range(40), num_workers=1)  # type: ignore[arg-type]
    iterator = iter(loader)
    seen = [next(iterator).item()]
    kill(iterator._workers[0].pid)
    seen += [batch.item() for batch in iterator]
    assert seen == list(range(40))
    assert "the run goes on" in caplog.text


class Spender:
    """Its sample 5 uses up all CPU time that is allowed, the first time it is asked for."""

    def __init__(self, struck: Path) -> None:
        self.struck = struck

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5 and not self.struck.exists():
            self.struck.touch()
            own = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(own.ru_utime + own.ru_stime) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            while True:
                pass
        return index


@pytest.mark.faults
def test_a_worker_that_the_kernel_kills_for_its_cpu_time_is_told_from_one_that_is_killed(
    tmp_path: Path,
) -> None:
    loader = DataLoader(Spender(tmp_path / "struck"), batch_size=2, num_workers=2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    (incident,) = loader.incidents
    assert (incident.signal, incident.cause, incident.confidence) == (
        "SIGKILL",
        "cpu-limit",
        "high",
    )
    assert "used up its CPU time (SIGKILL)" in str(incident)
