"""A chart of a report: a Vega-Lite specification, drawn by the page in a browser and by `--png`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""Names the language of a specification; nothing is fetched from there."""
LEGEND = {"title": None, "orient": "top", "symbolOpacity": 1}
COLORS = [f"var(--series-{i})" for i in range(1, 7)]
"""Colours of runs, defined in page.css for light and dark. A picture takes PICTURE_COLORS.

A page about one run has one meaning for each colour: the first is for what was trained, a stage's figures in training
and the PPO policy, the second for figures on held-out rows. GRAY is for what PPO is compared with: the SFT model,
best-of-n of it, a target.
"""
TRAINING, HELD_OUT_COLOR = COLORS[:2]
WARNING, GRAY, BETTER, WORSE = "var(--warning)", "var(--soft)", "var(--better)", "var(--worse)"
PICTURE_COLORS = {
    **dict(zip(COLORS, ["#1d4ed8", "#0f766e", "#7e22ce", "#a16207", "#0369a1", "#78350f"], strict=True)),
    WARNING: "#c2410c",
    GRAY: "#5d5a56",
    BETTER: "#15803d",
    WORSE: "#be185d",
}


def side_scale(sides: Sequence[str], policy: str) -> dict[str, list[str]]:
    """The colours of SFT, PPO (the colour of its run, `policy`), better and worse answers, and other held-out rows."""
    colors = {"SFT": GRAY, "PPO": policy, "better": BETTER, "worse": WORSE}
    return {"domain": list(sides), "range": [colors.get(side, HELD_OUT_COLOR) for side in sides]}


@dataclass(frozen=True)
class Chart:
    """A specification, its title, and the section of the page that shows it."""

    id: str
    section: str
    title: str
    note: str
    spec: dict[str, Any]
    is_curve: bool = False
    """A curve over steps: the page's smoothing and logarithmic scale apply to it."""
    run: str = ""
    """The run that it shows; empty for a chart of all runs."""
