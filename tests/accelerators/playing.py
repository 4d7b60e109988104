"""Runs a script as a trainer with an accelerator, and reads what it says."""

from __future__ import annotations

import textwrap

from tests.lifecycle.trainer import Ended, Stage, Trainer

PRELUDE = """\
from tests.accelerators.batches import *

torch.set_num_threads(1)  # threads that wait for each other take long on a busy machine

"""


def begin(stage: Stage, body: str) -> Trainer:
    return stage.start(PRELUDE + textwrap.dedent(body))


def play(stage: Stage, body: str, *, code: int = 0, seconds: float = 60.0) -> Ended:
    """Runs it to its end, which has to have this code and leave nothing behind."""
    return finish(begin(stage, body), code=code, seconds=seconds)


def finish(trainer: Trainer, *, code: int = 0, seconds: float = 60.0) -> Ended:
    ended = trainer.wait(seconds)
    assert ended.code == code, (ended.lines, ended.err)
    assert not ended.left
    return ended


def said(ended: Ended) -> dict[str, list[str]]:
    """What was said, by the first word of the line."""
    words: dict[str, list[str]] = {}
    for line in ended.lines:
        word, _, rest = line.partition(" ")
        words.setdefault(word, []).append(rest)
    return words
