"""What pool and worker say to each other."""

from __future__ import annotations

from holdfast.processes import protocol


def test_every_message_of_a_worker_has_a_letter_of_its_own() -> None:
    letters = [value for value in vars(protocol).values() if type(value) is bytes]
    assert len(letters) >= 14
    assert {len(letter) for letter in letters} == {1}
    assert len(set(letters)) == len(letters)
