"""`explain` on what people paste, and on texts that hold no such failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from holdfast.autopsy.catalogue import CATALOGUE
from holdfast.autopsy.explain import explain
from holdfast.autopsy.machine import Machine
from holdfast.autopsy.readers.filesystem import Fill
from holdfast.autopsy.readers.kernel_log import KernelLog
from holdfast.autopsy.scene import Scene
from holdfast.cli import main
from tests.autopsy.corpus import FAILURES, HEALTHY

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
    return Scene(Machine(shm=shm), log, group, machine)


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
    assert "3 for memory in this control group" in said
    assert "not memory" in " ".join(explain(KILLED, scene(group=0, machine=0)).verdicts[0].because)


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
    assert "No failure of data loading that we know" in result.output
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


def test_a_log_of_any_length_is_read_in_bounded_memory(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    with log.open("wb") as file:
        for _ in range(60):
            file.write(b"Epoch 1: all is well \xff\n" * 4000)
        file.write(OOM.encode())
    result = run("--elsewhere", "--json", str(log))
    assert json.loads(result.output)["verdicts"][0]["cause"] == "oom-killed"


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
