"""What torch's own loader makes of each script.

It is recorded for one release of torch and of Python, since half of the time would go into asking again what is known.
With other releases it is asked. `python -m tests.scripts.stock` records it anew, and `make test-all` looks whether the
record is still true.
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.scripts.play import play
from tests.scripts.table import SIZES, TABLE, Script
from tests.support import warm

RECORD = Path(__file__).with_name("stock.json")
RELEASES = {
    "torch": version("torch").partition("+")[0],
    "python": ".".join(map(str, sys.version_info[:2])),
}


@dataclass(frozen=True)
class Answer:
    code: int
    out: tuple[str, ...]
    err: tuple[str, ...]


def answer(script: Script, size: str, folder: Path) -> Answer:
    """torch's, from the record or by trying it in `folder`."""
    return recorded().get((script.name, size)) or asked(script, size, folder)


def asked(script: Script, size: str, folder: Path) -> Answer:
    folder.mkdir()
    played = play(script, "stock", size, folder)
    return Answer(played.code, played.out, played.err)


@cache
def recorded() -> dict[tuple[str, str], Answer]:
    """For these releases; by script and size."""
    found = json.loads(RECORD.read_text())
    if found["releases"] != RELEASES:
        return {}
    return {
        (name, size): Answer(said["code"], tuple(said["out"]), tuple(said["err"]))
        for name, answers in found["answers"].items()
        for size, said in answers.items()
    }


def record() -> None:
    """One line for each answer, so that a change can be read."""
    warm.with_torch()
    answers: dict[str, dict[str, Any]] = {}

    def ask(script: Script, size: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            said = asked(script, size, Path(folder) / "stock")
        answers[script.name][size] = vars(said)

    with ThreadPoolExecutor(2) as pool:
        for script in TABLE:
            answers[script.name] = dict.fromkeys(SIZES)
            for size in SIZES:
                pool.submit(ask, script, size)
    lines = [
        f"{json.dumps(name)}: {{\n  "
        + ",\n  ".join(f"{json.dumps(size)}: {json.dumps(said)}" for size, said in sizes.items())
        + "}"
        for name, sizes in answers.items()
    ]
    text = f'{{"releases": {json.dumps(RELEASES)},\n"answers": {{\n' + ",\n".join(lines) + "\n}}\n"
    json.loads(text)
    RECORD.write_text(text)


if __name__ == "__main__":
    record()
