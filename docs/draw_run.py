"""Draw a finished PPO run as one SVG: score, gold and KL over the iterations, beside replies before and after.

    rlhf pipeline configs/support --set ppo:evaluation.every_iterations=2
    python docs/draw_run.py artifacts/support

writes docs/run.svg (or the path given by --out). Standard library only.

The curves are held-out figures: iteration 0 is the SFT model and the last point is the final policy, both from
`ppo/evaluation.json`; the points between them are the rows of `ppo/evaluations.jsonl`. The replies are the first
three of the examples in `evaluation.json`; the script does not choose among them.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH = 1000
LEFT, CHART_WIDTH, CHART_HEIGHT = 62, 312, 84
RIGHT, RIGHT_EDGE = 432, WIDTH - 30
TOP, LINE = 34, 18.5
REPLY_CHARACTERS, PROMPT_CHARACTERS = 62, 78
"""Characters per line at 13 px: the longest lines that fit in the widest common sans-serif (DejaVu Sans)."""

PANELS = (
    ("gold", "gold", "by the task's own judge, 0 to 5"),
    ("score", "score_mean", "by the reward model"),
    ("KL", "kl", "to the SFT model, nats per reply"),
)

LIGHT = {"card": "#ffffff", "edge": "#d8dee4", "ink": "#1f2328", "quiet": "#59636e"}
LIGHT |= {"grid": "#e6eaef", "after": "#0969da"}
DARK = {"card": "#0d1117", "edge": "#3d444d", "ink": "#f0f6fc", "quiet": "#9198a1"}
DARK |= {"grid": "#262c36", "after": "#4493f8"}

BOLD_END: dict[str, Any] = {"weight": 600, "anchor": "end"}
Point = tuple[int, float]


def stylesheet(palette: dict[str, str]) -> str:
    """The colour rules of one palette; sizes and weights are attributes of the elements."""
    fills = {"card": "card", "ink": "ink", "quiet": "quiet", "after": "after"}
    strokes = {"card": "edge", "grid": "grid", "line": "after", "dot": "card", "rule": "edge"}
    rules = [f".{name} {{ fill: {palette[colour]} }}" for name, colour in fills.items()]
    rules += [f".{name} {{ stroke: {palette[colour]} }}" for name, colour in strokes.items()]
    return " ".join(rules)


def text(x: float, y: float, content: str, colour: str, size: float = 13, **attributes: Any) -> str:
    """One line of text; `anchor` and `weight` are the SVG attributes text-anchor and font-weight."""
    names = {"anchor": "text-anchor", "weight": "font-weight"}
    more = "".join(f' {names[key]}="{value}"' for key, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}" class="{colour}" font-size="{size:g}"{more}>{escape(content)}</text>'


def read_run(run: Path) -> tuple[dict[str, list[Point]], list[dict[str, Any]]]:
    """The curve of each panel as (iteration, value) pairs, and the examples of evaluation.json."""
    folder = run / "ppo" if (run / "ppo").is_dir() else run
    for name in ("evaluation.json", "evaluations.jsonl"):
        if not (folder / name).exists():
            sys.exit(
                f"error: {folder / name}: not found. This drawing needs a finished PPO run with held-out figures on "
                "the way: run `rlhf ppo` with --set evaluation.every_iterations=2"
            )
    final = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    between = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curves: dict[str, list[Point]] = {}
    for name, key, _ in PANELS:
        if key not in final["ppo"]:
            sys.exit(f"error: {folder / 'evaluation.json'}: has no `{key}`. Set evaluation.gold to a judge of your own")
        points = {0: final["sft"][key], **{row["step"]: row[key] for row in between}, max(steps): final["ppo"][key]}
        curves[name] = sorted(points.items())
    return curves, final["examples"][:3]


def nice_top(highest: float) -> float:
    """The upper end of an axis: the smallest of 1, 2, 3, 4, 5, 8 times a power of ten that is not below `highest`."""
    scale = 1.0
    while scale * 10 < highest:
        scale *= 10
    while scale > highest > 0:
        scale /= 10
    return next(step * scale for step in (1, 2, 3, 4, 5, 8, 10) if step * scale >= highest)


def draw_panel(name: str, note: str, points: Sequence[Point], top: float) -> list[str]:
    """One curve with its heading, which gives the first and the last value."""
    last = points[-1][0]
    low = min(0.0, *(value for _, value in points))
    high = nice_top(max(value for _, value in points))

    def place(point: Point) -> tuple[float, float]:
        share = (point[1] - low) / (high - low)
        return LEFT + CHART_WIDTH * point[0] / last, top + CHART_HEIGHT * (1 - share)

    parts = [
        f'<text x="{LEFT - 30}" y="{top - 25:g}" font-size="14" font-weight="600" class="ink">{name}'
        f'<tspan dx="8" font-size="11" font-weight="400" class="quiet">{escape(note)}</tspan></text>',
        text(LEFT + CHART_WIDTH, top - 25, f"{points[0][1]:.2f} → {points[-1][1]:.2f}", "after", 13, **BOLD_END),
    ]
    for value in (0.0, high / 2, high):
        y = place((0, value))[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + CHART_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(LEFT - 8, y + 4, f"{value:g}", "quiet", 11, anchor="end"))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
    parts.append(f'<polyline class="line" fill="none" stroke-width="2.5" stroke-linejoin="round" points="{path}"/>')
    for point, colour in ((points[0], "quiet"), (points[-1], "after")):
        x, y = place(point)
        parts.append(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="5" stroke-width="2"/>')
    return parts


def draw_example(example: dict[str, Any], top: float) -> tuple[list[str], float]:
    """A prompt and its two replies, each with its gold score; also the y below them."""
    question = example["prompt"].removeprefix("Human:").removesuffix("Assistant:").strip()
    parts, y = [], top
    for line in textwrap.wrap(question, PROMPT_CHARACTERS):
        parts.append(text(RIGHT, y, line, "quiet", 13))
        y += LINE
    y += 5
    for label, model, colour in (("SFT", "sft", "quiet"), ("PPO", "ppo", "after")):
        reply = example[model]
        parts.append(text(RIGHT, y, label, colour, 13, weight=600))
        parts.append(text(RIGHT_EDGE, y, f"{reply['gold']:g}", colour, 13, **BOLD_END))
        for line in textwrap.wrap(reply["reply"].strip(), REPLY_CHARACTERS):
            parts.append(text(RIGHT + 40, y, line, "ink", 13))
            y += LINE
        y += 5
    return parts, y


def draw(run: Path) -> str:
    """The whole picture as SVG text."""
    curves, examples = read_run(run)
    parts, y = [], TOP + 22.0
    for name, _, note in PANELS:
        parts += draw_panel(name, note, curves[name], y)
        y += CHART_HEIGHT + 62
    axis = y - 62 + 18
    last = curves["gold"][-1][0]
    for step, label, anchor in ((0, "SFT", "start"), (last, f"iteration {last}", "end")):
        parts.append(text(LEFT + CHART_WIDTH * step / last, axis, label, "quiet", 11, anchor=anchor))

    y = TOP
    parts.append(text(RIGHT, y - 3, "Replies to held-out prompts", "ink", 14, weight=600))
    parts.append(text(RIGHT_EDGE, y - 3, "gold", "quiet", 11, anchor="end"))
    y += 24
    for number, example in enumerate(examples):
        if number:
            parts.append(f'<line class="rule" x1="{RIGHT}" x2="{RIGHT_EDGE}" y1="{y - 6:.1f}" y2="{y - 6:.1f}"/>')
            y += 22
        more, y = draw_example(example, y)
        parts += more
    height = max(axis + 20, y + 4)
    title = f"Gold, score and KL over {last} PPO iterations, and three replies before and after"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" role="img" aria-label="{escape(title)}" '
            "font-family=\"-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif\">",
            f"<title>{escape(title)}</title>",
            f"<style>{stylesheet(LIGHT)} @media (prefers-color-scheme: dark) {{ {stylesheet(DARK)} }}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a finished PPO run as an SVG.")
    parser.add_argument("run", type=Path, help="the run's directory, which holds ppo/")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("run.svg"))
    arguments = parser.parse_args()
    arguments.out.write_text(draw(arguments.run), encoding="utf-8")


if __name__ == "__main__":
    main()
