"""The last screen of the demo as a picture: an SVG that needs no font and no network."""

from __future__ import annotations

import io
from pathlib import Path

from demo_screen import Runs, frame, summary
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

WIDTH, HEIGHT = 104, 25
LOOK = {"": "", "bold": "bold", "dim": "bright_black", "red": "red", "green": "green"}
INK, GROUND = (201, 209, 217), (13, 17, 23)
PLAIN = [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34)]
REST = [(88, 166, 255), (188, 140, 255), (57, 197, 207), INK]
THEME = TerminalTheme(GROUND, INK, [*PLAIN, *REST], [(110, 118, 129), *PLAIN[1:], *REST])
# As Rich's own, without the fonts that it would fetch.
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img"
 aria-label="torch's run dies of one dead worker and of a damaged file; holdfast's goes on">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""


def save(runs: Runs, path: Path) -> None:
    """The panes as they are at the end, and what is said of memory, the file and the loss."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), color_system="standard", highlight=False
    )
    told = summary(runs)
    rest = told[next(place for place, line in enumerate(told) if not line) :]
    for line in [*frame(runs, WIDTH, HEIGHT), *rest]:
        text = Text(no_wrap=True)
        for style, part in line:
            text.append(part, LOOK.get(style, style))
        console.print(text)
    svg = console.export_svg(
        title="make demo", theme=THEME, code_format=FORMAT, unique_id="demo", font_aspect_ratio=0.61
    )
    path.write_text(svg, encoding="utf-8")
