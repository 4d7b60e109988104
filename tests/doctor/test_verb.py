"""`holdfast doctor` as it is typed."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from holdfast.cli import main


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_a_bad_dataset_is_told_in_json_and_by_the_exit_status() -> None:
    done = doctor("tests.doctor.patients:Raising", "--json", "--seconds", "0.1", "--samples", "4")
    assert done.exit_code == 3, done.output
    answer = json.loads(done.stdout)
    assert answer["status"] == "bad"
    found = {check["name"]: check for check in answer["tests.doctor.patients:Raising"]}
    assert found["samples"]["meaning"] == "sample 0: ValueError: broken file 0.jpg"
    assert {"memory", "swap", "/dev/shm"} <= {check["name"] for check in answer["machine"]}


def test_the_machine_alone_is_told_in_lines() -> None:
    done = doctor()
    assert done.exit_code in (0, 1, 3)
    assert " open files " in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if line[:10].strip()) <= 100


def test_wrong_usage_is_neither() -> None:
    done = doctor("tests.doctor.nobody:x")
    assert done.exit_code == 2
    assert "there is no module" in done.output


def test_a_dataset_that_cannot_be_made_is_bad_and_its_traceback_is_shown() -> None:
    done = doctor("tests.doctor.patients:Refusing", "--json")
    assert done.exit_code == 3, done.output
    answer = json.loads(done.stdout)
    (check,) = answer["tests.doctor.patients:Refusing"]
    assert check["meaning"] == "failed: FileNotFoundError: [Errno 2] no such folder: '/data'"
    assert "patients.py" in done.stderr
    assert len(answer["machine"]) > 10


def test_a_budget_that_is_none_is_wrong_usage() -> None:
    done = doctor("tests.doctor.patients:healthy", "--memory-budget", "5parsecs")
    assert done.exit_code == 2
    assert "memory_budget='5parsecs' is not an amount of memory" in done.output
