"""What ``holdfast explain`` concludes from a text."""

from __future__ import annotations

from holdfast.explain.clues import Clues
from holdfast.explain.explanation import Explanation, Scene, conclude


def explain(text: str, scene: Scene | None = None) -> Explanation:
    clues = Clues()
    clues.read([text])
    return conclude(clues, scene)
