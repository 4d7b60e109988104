"""The catalogue: complete, in one tone, and honest."""

from __future__ import annotations

import re

import pytest

from holdfast.autopsy.catalogue import CATALOGUE, GROUPS, UnknownCause, lookup
from holdfast.autopsy.cause import Cause, Remedy
from holdfast.autopsy.machine_facts import PLACEHOLDERS, MachineFacts
from holdfast.explain.clues import find

HERE = MachineFacts.read().facts(workers=4, pid=7)


def test_every_cause_has_a_name_of_its_own() -> None:
    assert len(CATALOGUE) == sum(len(group) for group in GROUPS.values()) >= 75


def test_a_cause_says_what_it_means_what_to_do_and_what_was_done() -> None:
    for cause in CATALOGUE.values():
        _check_words(cause)


def _check_words(cause: Cause) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", cause.slug)
    sentences = re.findall(r"[.?!](?= |$)", re.sub(r"\b\d\.\d+", "", cause.meaning))
    assert len(sentences) == 2, cause.meaning
    assert cause.evidence.endswith(".")
    assert cause.already.endswith(".")
    assert not cause.title.endswith(".")
    assert cause.remedies
    for slug in (*cause.explains, *cause.see):
        assert slug in CATALOGUE
        assert slug != cause.slug


def _remedies() -> list[Remedy]:
    return [remedy for cause in CATALOGUE.values() for remedy in cause.remedies]


def test_no_remedy_gives_up_the_workers() -> None:
    assert not [one for one in _remedies() if re.search(r"num_workers\s*=\s*0", str(one))]


def test_remedies_fill_in_for_any_machine() -> None:
    for facts in (PLACEHOLDERS, MachineFacts().facts(), HERE):
        for remedy in _remedies():
            filled = remedy.filled(facts)
            assert "None" not in filled.text + filled.command.replace("'file': None", "")


def test_patterns_compile_and_do_not_match_nothing() -> None:
    for cause in CATALOGUE.values():
        for sign in cause.signs:
            assert not sign.regex.search("")
            assert not sign.regex.search("Epoch 1: 100%|####| 10/10 [00:01<00:00, 9.9it/s]")


def test_a_misspelt_name_is_told_what_was_meant() -> None:
    with pytest.raises(UnknownCause, match="did you mean oom-killed"):
        lookup("oom-kiled")


def test_a_consequence_is_not_reported_beside_its_cause() -> None:
    text = (
        "RuntimeError: DataLoader worker (pid 812) is killed by signal: Killed.\n"
        "RuntimeError: DataLoader worker (pid(s) 812) exited unexpectedly\n"
        "[1.2] Memory cgroup out of memory: Killed process 812 (python) total-vm:1kB\n"
    )
    assert [finding.slug for finding in find(text)] == ["oom-killed"]
    assert [finding.slug for finding in find(text[: text.index("[1.2]")])] == ["killed-unexplained"]


@pytest.mark.timeout(20)
def test_searching_a_long_log_takes_no_time() -> None:
    line = (
        'File "/x/popen_fork.py", line 1, in _recv_bytes _shutdown_workers spawn_main Process-1:\n'
    )
    find(line * 2_000)
