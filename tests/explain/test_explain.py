"""`explain` on what people paste, and on texts that hold no such failure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.autopsy.catalogue import CATALOGUE
from holdfast.autopsy.cause import Sign
from holdfast.autopsy.machine_facts import MachineFacts
from holdfast.autopsy.readers.kernel_log import KernelLog
from holdfast.autopsy.readers.procfs import Fill
from holdfast.cli import main
from holdfast.explain.explanation import Scene
from holdfast.explain.text_windows import windows
from tests.autopsy.corpus import FAILURES, HEALTHY, caught
from tests.support.explained import explain

KILLED = "RuntimeError: DataLoader worker (pid 812) is killed by signal: Killed. "
GONE = "RuntimeError: DataLoader worker (pid(s) 812) exited unexpectedly"
BUS = "RuntimeError: DataLoader worker (pid 13) is killed by signal: Bus error. "
OOM = "Memory cgroup out of memory: Killed process 812 (python) total-vm:1kB"
SEGV = "python[812]: segfault at 0 ip 00007f sp 00007f error 4 in libjpeg.so"


def run(*arguments: str, text: str | bytes = "") -> Result:
    return CliRunner().invoke(main, ["explain", *arguments], input=text)


# -- the corpus ----------------------------------------------------------------------------


def test_every_message_of_the_corpus_finds_its_cause() -> None:
    assert len(FAILURES) >= 80
    wrong, sure = [], []
    for cause, text in FAILURES:
        verdicts = explain(text).verdicts
        found = verdicts[0].cause if verdicts else "nothing"
        if found != cause:
            wrong.append(f"{found}, not {cause}: {text[:100]!r}")
            if verdicts and verdicts[0].confidence == "high":
                sure.append(wrong[-1])
    assert not wrong, "\n".join(wrong)
    assert not sure


def test_a_message_is_found_in_the_midst_of_a_long_log() -> None:
    noise = "\n".join(text for text in HEALTHY) * 3
    for cause, text in FAILURES:
        verdicts = explain(f"{noise}\n{text}\n{noise}").verdicts
        assert cause in [verdict.cause for verdict in verdicts], text[:100]


def test_texts_without_such_a_failure_are_said_to_hold_none() -> None:
    assert len(HEALTHY) >= 15
    wrong = [
        (text[:60], explain(text).verdicts[0].cause) for text in HEALTHY if explain(text).verdicts
    ]
    assert not wrong


def test_most_causes_with_messages_stand_in_the_corpus() -> None:
    """What only has vague hints (a user's own words) need not."""
    spoken = {
        slug
        for slug, cause in CATALOGUE.items()
        if any(one.confidence != "low" for one in cause.signs)
    }
    missing = spoken - {cause for cause, _ in FAILURES}
    assert missing <= {
        "orphans-hold-gpu",
        "pin-thread-vs-fork-atexit",
        "sigbus-not-shm",
        "stateful-gaps",
    }


# -- on the machine where it happened ------------------------------------------------------


def scene(
    *lines: str, group: int | None = None, machine: int | None = None, shm: Fill | None = None
) -> Scene:
    log = KernelLog("/dev/kmsg", lines) if lines else None
    return Scene(MachineFacts(shm=shm), log, group, machine)


@pytest.mark.parametrize(
    ("text", "where", "cause", "confidence"),
    [
        (KILLED, scene(OOM), "oom-killed", "high"),
        (GONE, scene(OOM), "oom-killed", "medium"),
        (GONE, scene(SEGV), "native-segv", "medium"),
        (KILLED, scene(SEGV), "killed-unexplained", "medium"),
        (KILLED, scene("Killed process 8120 (python)"), "killed-unexplained", "medium"),
        (KILLED, scene(group=3, machine=3), "killed-unexplained", "medium"),
        (KILLED, scene(group=0, machine=0), "killed-unexplained", "medium"),
        (BUS, scene(shm=Fill(64 << 20, 60 << 20)), "shm-exhausted", "medium"),
        (BUS, scene(shm=Fill(64 << 30, 60 << 30)), "shm-exhausted", "low"),
    ],
)
def test_the_scene_helps(text: str, where: Scene, cause: str, confidence: str) -> None:
    verdict = explain(text, where).verdicts[0]
    assert (verdict.cause, verdict.confidence) == (cause, confidence)


def test_a_counter_alone_does_not_make_it_memory() -> None:
    said = " ".join(explain(KILLED, scene(group=3)).verdicts[0].because)
    assert "kills for memory that the kernel has counted in this control group: 3;" in said
    assert "not memory" in " ".join(explain(KILLED, scene(group=0, machine=0)).verdicts[0].because)


# -- Accelerate had another loader at work -------------------------------------------------------

TRACEBACKS = Path(__file__).parent / "tracebacks"


@pytest.mark.parametrize(
    ("file", "cause"),
    [("accelerate-segv.txt", "native-segv"), ("accelerate-exit.txt", "exited-unexpectedly")],
)
def test_a_traceback_through_accelerate_is_of_torchs_workers(file: str, cause: str) -> None:
    """Real ones, of a holdfast loader that was given to prepare()."""
    found = explain((TRACEBACKS / file).read_text())
    verdict = found.verdicts[0]
    assert verdict.cause == cause
    assert found.rebuilt
    (said,) = [reason for reason in verdict.because if "Accelerate" in reason]
    assert "the workers were torch's, so none was replaced, and the run ended" in said
    assert "holdfast explain accelerate-rebuild" in said
    assert "from holdfast import DataLoader" in verdict.remedies[-1].command
    shown = run("--elsewhere", str(TRACEBACKS / file)).output
    assert "was replaced" not in shown.replace("none was replaced", "")
    assert "What holdfast does about it, if it is the loader" in shown


def test_holdfasts_workers_below_accelerate_are_not_taken_for_torchs() -> None:
    text = (TRACEBACKS / "accelerate-segv.txt").read_text()
    ours = text.replace("torch/utils/data/dataloader.py", "holdfast/engine/iterator.py")
    found = explain(ours)
    assert not found.rebuilt
    assert not any("Accelerate" in reason for reason in found.verdicts[0].because)


def test_accelerate_is_not_blamed_for_an_error_that_is_none_of_a_loader() -> None:
    text = (TRACEBACKS / "accelerate-exit.txt").read_text()
    found = explain(text + "\nTraceback (most recent call last):\n  File \"x.py\"\nKeyError: 'y'\n")
    assert not found.rebuilt
    assert "KeyError" in found.ending


def test_no_upgrade_of_accelerate_is_recommended() -> None:
    assert "upgrade" not in run("--elsewhere", "accelerate-rebuild").output.lower()


# -- the command ---------------------------------------------------------------------------


def test_a_file_is_explained_with_cause_reason_and_remedy(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"Epoch 1\n{OOM}\n{GONE}\n")
    result = run("--elsewhere", str(log))
    assert result.exit_code == 0
    assert result.output.startswith(
        "oom-killed  (sure): a worker was killed by the kernel for lack of memory"
    )
    assert "line 2 says" in result.output
    assert "docker run --memory" in result.output


def test_standard_input_is_read_and_passed_on_if_wanted() -> None:
    assert run("--elsewhere", text=GONE).exit_code == 0
    result = run("--elsewhere", "--tee", "-", text=GONE + "\n")
    assert result.output.startswith(GONE)
    assert "exited-unexpectedly  (perhaps)" in result.output


def test_it_says_when_it_knows_nothing_and_what_to_collect() -> None:
    result = run(text="Epoch 1: loss 0.3\n")
    assert result.exit_code == 1
    assert "No known failure of data loading was found in" in result.output
    assert "Looked for" in result.output
    assert "dmesg" in result.output


def test_the_catalogue_is_a_manual() -> None:
    listed = run("--list").output
    assert all(slug in listed for slug in CATALOGUE)
    page = run("shm-exhausted").output
    assert "What it means" in page
    assert "df -h /dev/shm" in page
    assert "statvfs" not in page


def test_json_is_json() -> None:
    found = json.loads(run("--json", "--elsewhere", text=OOM).output)
    assert found["known"]
    assert found["verdicts"][0]["cause"] == "oom-killed"
    assert found["verdicts"][0]["remedies"][0]["text"]
    assert not json.loads(run("--json", text="fine").output)["known"]
    assert len(json.loads(run("--json", "--list").output)) == len(CATALOGUE)
    assert json.loads(run("--json", "abort").output)[0]["cause"] == "abort"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["oom-kiled"], "did you mean oom-killed"),
        (["./not/here.log"], "cannot read ./not/here.log: No such file"),
        (["abort", "/etc/hostname"], "either causes or files"),
        (["--nonsense"], "No such option"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize("where", [0, 30_000, 60_000])
def test_a_log_of_any_length_is_read_whole_with_the_numbers_of_its_lines(
    tmp_path: Path, where: int
) -> None:
    log = tmp_path / "long.log"
    with log.open("wb") as file:
        for number in range(60_001):
            file.write(
                KILLED.encode() + b"\n" if number == where else b"Epoch 1: all is well \xff\r\n"
            )
    found = json.loads(run("--elsewhere", "--json", str(log)).output)
    assert found["lines"] == 60_001
    assert found["verdicts"][0]["because"][0].startswith(f"line {where + 1} says: RuntimeError")


def test_no_message_is_lost_between_two_stretches_and_memory_stays_bounded() -> None:
    """Wherever the cuts fall, a traceback of many lines is found, and a line without an end ends."""
    text = f"{'x' * 70}\n" * 50 + dict(FAILURES)["py314-forkserver"]
    for size in range(600, 1800, 37):
        pieces = list(
            windows([text[i : i + 100] for i in range(0, len(text), 100)], size=size, overlap=550)
        )
        assert sum(len(one.lines) - one.fresh for one in pieces) == text.count("\n") + 1
        assert any(
            "popen_forkserver" in "".join(one.lines) and "PicklingError" in one.lines[-1]
            for one in pieces
        )
        assert all(sum(map(len, one.lines)) < size + 200 for one in pieces)
    endless = list(windows("x" * 10_000 for _ in range(100)))
    assert len(endless) > 2
    assert {number for one in endless for number in one.numbers} == {1}


def test_what_a_progress_bar_wrote_over_is_one_line() -> None:
    text = "step 1\rstep 2\r\x1b[31mstep 3\x1b[0m\r\nplain\r\n" + KILLED
    assert "line 3 says" in explain(text).verdicts[0].because[0]
    assert explain(text).lines == 3


def test_several_files_keep_their_own_line_numbers(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(f"Epoch 1\n{KILLED}\n")
    (tmp_path / "dmesg.txt").write_text(OOM)
    result = run("--elsewhere", str(tmp_path / "train.log"), str(tmp_path / "dmesg.txt"))
    assert result.output.startswith("oom-killed  (sure)")
    assert f"line 1 of {tmp_path / 'dmesg.txt'} says" in result.output


def test_what_every_match_holds_is_found_by_its_needle() -> None:
    """Messages are looked for only where their needle is: it must never be missing."""
    texts = [text for _, text in FAILURES] + HEALTHY
    for cause in CATALOGUE.values():
        for sign in cause.signs:
            for text in texts:
                if match := sign.regex.search(text):
                    assert sign.needle in match[0].lower(), sign.pattern
    assert Sign(r"a(b|c)?de+f?\.g[hi]jkl\d{2}", "high").needle == "jkl"
    assert Sign(r"one|two", "high").needle == ""


# -- whose line it is ----------------------------------------------------------------------

ELSE = "[12.6] Out of memory: Killed process 4242 (postgres) total-vm:81kB, anon-rss:76kB"
ELSE_CRASHED = "[55.1] python[900]: segfault at 0 ip 00007f sp 00007ffd error 4 in libjpeg.so.8"
CRASHED = "RuntimeError: DataLoader worker (pid 812) is killed by signal: Segmentation fault. "
ASKED = "[12.5] postgres invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER), order=0"


@pytest.mark.parametrize(
    ("text", "cause", "confidence"),
    [
        (f"{ASKED}\n{ELSE}", "oom-killed", "low"),
        (f"{KILLED}\n{ASKED}\n{ELSE}", "killed-unexplained", "medium"),
        (f"{ELSE}\n{GONE}", "exited-unexpectedly", "low"),
        (f"{ELSE_CRASHED}\n{KILLED}", "killed-unexplained", "medium"),
        (
            f"{CRASHED}\nMemory cgroup out of memory: Killed process 4242 (java)",
            "native-segv",
            "medium",
        ),
        (f"{KILLED}\n{ELSE}\n{OOM}\n{ELSE}", "oom-killed", "high"),
        (f"{ELSE}\n{OOM}", "oom-killed", "medium"),
        (OOM, "oom-killed", "medium"),
        ("worker 3 (pid 812) was killed by SIGKILL\n" + OOM, "oom-killed", "high"),
        (
            f"{GONE}\nINFO: task rsync:77 blocked for more than 120 seconds.",
            "exited-unexpectedly",
            "low",
        ),
    ],
)
def test_a_line_of_the_kernel_counts_for_the_process_it_names(
    text: str, cause: str, confidence: str
) -> None:
    verdict = explain(text).verdicts[0]
    assert (verdict.cause, verdict.confidence) == (cause, confidence)


def test_it_says_whose_line_it_was() -> None:
    assert "process 4242 (postgres)" in " ".join(explain(ELSE).verdicts[0].because)
    other = explain(f"{KILLED}\n{ELSE}").verdicts[1]
    assert (other.cause, other.confidence) == ("oom-killed", "low")
    assert "the workers in this text have pid 812" in other.because[1]


@given(
    st.lists(
        st.sampled_from(
            [
                OOM,
                ELSE,
                SEGV,
                KILLED,
                GONE,
                "Traceback (most recent call last):",
                "  File",
                "ValueError: x",
                "\r",
                "\x1b[3",
                "\u2028",
                "\x85",
                "Original Traceback (most recent call last):",
                "Killed process " + "9" * 5000 + " (x)",
                "worker (pid " + "8" * 5000 + ")",
            ]
        )
        | st.text(max_size=20)
    ),
    st.sampled_from(["\n", "\r", "\r\n", ""]),
)
def test_no_text_is_too_odd(parts: list[str], end: str) -> None:
    """Whatever it is, it is answered, and what is shown stands in the text."""
    text = end.join(parts)
    for verdict in explain(text).verdicts:
        # A sequence for the terminal is left out with the letter that ends it, if one follows.
        shown = verdict.because[0].partition(" says: ")[2].replace("\x1b[3", "")
        written = {re.sub(end, "", text) for end in (r"\x1b\[3[A-Za-z]?", r"\x1b\[3")}
        assert any(shown[:20].strip() in one for one in written)


# -- how it ended --------------------------------------------------------------------------

SKIPPED = "WARNING: sample 7 skipped: OSError: image file is truncated (14 bytes not processed)"
LOGGED = (
    f"ERROR:root:skipped\n{caught('OSError', 'image file is truncated (9 bytes not processed)')}"
)
MODEL = (
    "epoch 2 ok\nTraceback (most recent call last):\n"
    '  File "train.py", line 90, in <module>\n    loss = model(x)\n'
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x10 and 12x5)"
)
DIED = f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n{KILLED}'
IGNORED = (
    "Exception ignored in: <function X.__del__>\nTraceback (most recent call last):\nValueError: x"
)
RANKS = "Traceback (most recent call last):\ntorch.distributed.DistBackendError: NCCL error: remote"


@pytest.mark.parametrize("before", [SKIPPED, LOGGED, DIED])
def test_an_error_that_the_run_survived_is_not_what_it_died_of(before: str) -> None:
    found = explain(f"{before}\n{MODEL}")
    assert not found.known
    assert found.ending.endswith(
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x10 and 12x5)"
    )
    assert {verdict.confidence for verdict in found.verdicts} == {"low"}
    result = run("--elsewhere", text=f"{before}\n{MODEL}")
    assert result.exit_code == 1
    assert result.output.startswith(
        "The last error in this text is not a known failure of data loading"
    )
    assert "the run seems to have gone on after it" in result.output


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"{LOGGED}\nepoch 2\n{DIED}", "killed-unexplained"),
        (f"OSError: [Errno 24] Too many open files: '/x'\nepoch 2\n{DIED}", "killed-unexplained"),
        (f"{DIED}\n{IGNORED}", "killed-unexplained"),
        (f"{DIED}\n{RANKS}", "killed-unexplained"),
        (f"{OOM}\n{DIED}", "oom-killed"),
        (f"{DIED}\n\nThe above exception was the direct cause of the following exception:\n\n{MODEL[11:]}", "killed-unexplained"),
    ],
)  # fmt: skip
def test_the_last_traceback_with_what_led_to_it_decides(text: str, cause: str) -> None:
    found = explain(text)
    assert found.known
    assert found.verdicts[0].cause == cause


# -- real logs -----------------------------------------------------------------------------


def test_the_warning_about_python_314_comes_with_every_python() -> None:
    text = (
        "/lib/python3.11/site-packages/torch/utils/data/dataloader.py:438: UserWarning: Got pickle error when "
        "attempting to start a worker Process. Python 3.14+ changed the multiprocessing start method in non-Mac "
        "POSIX platforms to 'forkserver'\nTraceback (most recent call last):\n"
        '  File "/lib/python3.11/multiprocessing/popen_spawn_posix.py", line 47, in _launch\n'
        "_pickle.PicklingError: Can't pickle <function <lambda> at 0x7f>: attribute lookup failed"
    )
    assert [verdict.cause for verdict in explain(text).verdicts] == ["unpicklable-args"]


class Holes:
    """A dataset that has None for a sample."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return None if index else self.whole


def last_words(act: Callable[[], object]) -> str:
    """The traceback as Python prints it, and nothing that would keep its frames alive."""
    try:
        act()
    except Exception:
        return traceback.format_exc()
    return "no error"


@pytest.mark.parametrize("kind", ["torch", "holdfast"])
@pytest.mark.parametrize(
    "whole", [torch.ones(2), 1.5, np.ones(2), {"a": 1}], ids=lambda one: type(one).__name__
)
def test_none_in_a_batch_is_named_as_such(kind: str, whole: Any) -> None:
    make = holdfast.DataLoader if kind == "holdfast" else torch.utils.data.DataLoader
    workers = int(kind == "holdfast")
    said = last_words(lambda: list(make(Holes(whole), batch_size=2, num_workers=workers)))
    assert explain(said).verdicts[0].cause == "collate-shape", said


# -- starting it ---------------------------------------------------------------------------


def test_the_package_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "explain", "--elsewhere", "-"],
        input=GONE, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("exited-unexpectedly")


def test_the_command_starts_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from holdfast.cli import main\n"
        "main(['explain', '--elsewhere', '-'])"
    )
    environment: dict[str, Any] = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], input=GONE, capture_output=True, text=True, timeout=60, env=environment
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("exited-unexpectedly")


@pytest.mark.parametrize("error", ["KeyError: 'x'", "TypeError: Box.__init__() missing 1 argument"])
def test_an_error_that_was_rebuilt_is_not_called_one_that_could_not_be(error: str) -> None:
    name = error.partition(":")[0]
    text = (
        '  File "/lib/torch/_utils.py", line 794, in reraise\n    raise exception\n'
        f"{name}: Caught {name} in DataLoader worker process 1.\n"
        "Original Traceback (most recent call last):\n"
        f'  File "/home/me/data.py", line 17, in __getitem__\n    return self.table[i]\n{error}\n'
    )
    assert explain(text).verdicts[0].cause == "python-exception"


def test_a_report_of_our_own_is_understood() -> None:
    report = (
        "worker 1 (pid 812) crashed with a segmentation fault (SIGSEGV); replaced; its batch is made again\n"
        "    because: it died of SIGSEGV\n    more: holdfast explain native-segv\n"
    )
    assert explain(report).verdicts[0].cause == "native-segv"
    assert not explain("    more: holdfast explain no-such-cause\n").known
    later = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
    assert not explain(f"{report}epoch 2\n{later}ZeroDivisionError: division by zero\n").known
