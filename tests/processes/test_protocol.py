"""What pool and worker say to each other."""

from __future__ import annotations

from holdfast.processes import protocol
from holdfast.worker import interface


def test_every_message_of_a_worker_has_a_letter_of_its_own() -> None:
    known = [*vars(protocol).values(), *vars(interface).values()]
    letters = [value for value in known if type(value) is bytes]
    assert len(letters) >= 14
    assert {len(letter) for letter in letters} == {1}
    assert len(set(letters)) == len(letters)
