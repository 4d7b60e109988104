"""What torch's own loader shows for plans that are drawn again and again, as a digest each.

Half of the time of a comparison would go into asking torch what it has answered before. A loader whose observations
have torch's digest shows what torch shows; for one that has not, or for another release of torch, torch is asked, and
it is what torch shows then that counts. `python -m tests.differential.record` writes down every plan that
`make test` draws, and `make test-all` looks whether it is still true.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

from tests.support.observe import Event, Plan, Seen, of_any_worker

RECORD = Path(__file__).with_name("stock.json")
ROOT = Path(__file__).parents[2]
RELEASES = {
    "torch": version("torch").partition("+")[0],
    "numpy": version("numpy"),
    "python": ".".join(map(str, sys.version_info[:2])),
}
RECORDING = "HOLDFAST_RECORD_TORCH"  # a file, while a record is made
OURS = "\nholdfast: "  # begins what we add to the text of an error


def digest(seen: Seen, *, ordered: bool = True) -> str:
    """Equal for observations between which `differences` finds none: torch's text of an error, which ours may go on
    from, and with `ordered=False` neither order nor workers."""
    told: list[object] = [
        _plain(seen.construction),
        [_plain(event) for event in seen.length],
        seen.warnings,
    ]
    for epoch in seen.epochs:
        events = [repr(_plain(event)) for event in epoch.events]
        if not ordered:
            events = sorted(
                repr(_plain(of_any_worker(event)))
                for event in epoch.events
                if event[0] != "consumer drew"
            )
        told += [epoch.random_after_iter, events, epoch.random_after_epoch]
    text = repr(told).replace(str(ROOT), "ROOT")
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _plain(event: Event) -> Event:
    """Of an error, torch's part of the text."""
    return tuple(
        part.partition(OURS)[0].rstrip("\n") if isinstance(part, str) else part for part in event
    )


def known(plan: Plan, *, ordered: bool = True) -> str | None:
    """torch's digest, if it is on record for these releases."""
    return _recorded().get(_key(plan, ordered))


def note(plan: Plan, stock: Seen, *, ordered: bool = True) -> None:
    """torch was asked."""
    file = os.environ.get(RECORDING)
    if file is not None:
        with open(file, "a") as lines:
            line = json.dumps([_key(plan, ordered), digest(stock, ordered=ordered)])
            lines.write(line + "\n")


def plans() -> list[tuple[Plan, bool, str]]:
    """All that is on record: a plan, whether its batches have an order, and the digest."""
    found = []
    for key, told in _recorded().items():
        text, _, how = key.rpartition(" ")
        found.append((eval(text, {"Plan": Plan}), how == "ordered", told))
    return found


def _key(plan: Plan, ordered: bool) -> str:
    return f"{plan!r} {'ordered' if ordered else 'unordered'}"


@cache
def _recorded() -> dict[str, str]:
    if RECORDING in os.environ or not RECORD.exists():
        return {}
    found = json.loads(RECORD.read_text())
    return dict(found["seen"]) if found["releases"] == RELEASES else {}


def record() -> None:
    """By playing the quick tests."""
    lines = ROOT / ".pytest_cache" / "stock.jsonl"
    lines.parent.mkdir(exist_ok=True)
    lines.unlink(missing_ok=True)
    here = str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", here]
    subprocess.run(command, env={**os.environ, RECORDING: str(lines)}, cwd=ROOT, check=True)
    seen = dict(sorted(map(json.loads, lines.read_text().splitlines())))
    RECORD.write_text(json.dumps({"releases": RELEASES, "seen": seen}, indent=0) + "\n")
    lines.unlink()


if __name__ == "__main__":
    record()
