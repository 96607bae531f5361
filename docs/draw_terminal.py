"""Draw what PPO prints at its end as a picture of the terminal: docs/terminal.svg.

script -qec "rlhf pipeline configs/support" run.txt
python docs/draw_terminal.py run.txt
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

FIRST, LINES, WIDTH = "SFT against PPO", 33, 100
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="A run's end">
<style>
.{unique_id}-matrix {{ font: {char_height}px Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre }}
.{unique_id}-title {{ font: 18px Arial, sans-serif }}
{styles}</style>
<defs>{lines}</defs>
{chrome}<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
"""Rich's own picture loads a font from another host; this one takes the reader's."""


def draw(recording: str) -> str:
    lines = [line for line in re.split(r"[\r\n]+", recording) if line.strip()]
    first = max(i for i, line in enumerate(lines) if FIRST in line)
    shown = [re.sub(r"\x1b\[[\d;?]*[A-HJKhl]", "", line) for line in lines[first : first + LINES]]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ rlhf pipeline configs/support", style="bold"), Text("...", style="dim"), sep="\n")
    for line in shown:
        console.print(Text.from_ansi(line))
    return console.export_svg(title="The end of a run: SFT against PPO", code_format=SVG, unique_id="t")


if __name__ == "__main__":
    out = Path(__file__).with_name("terminal.svg")
    out.write_text(draw(Path(sys.argv[1]).read_text(encoding="utf-8")), encoding="utf-8")
    print(out)
