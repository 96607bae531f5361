"""The charts of `rlhf eval`'s figures: calibration, histograms, score against length."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rlhf_cli.report.chart import (
    BETTER,
    GRAY,
    HELD_OUT_COLOR,
    SCHEMA,
    WORSE,
    Chart,
    by_name,
    layer,
    number,
    tip,
)
from rlhf_cli.report.read import RunData

MOST_SCATTER = 1000
HISTOGRAM_BINS = 24


def evaluation_charts(run: RunData) -> list[Chart]:
    """The charts of `rlhf eval`'s figures for one run."""
    rm, ppo = ((run.stages[stage].evaluation if stage in run.stages else {}) for stage in ("rm", "ppo"))
    found = [_reliability(rm.get("reliability", []))]
    scores = {name: [x for x in values if math.isfinite(x)] for name, values in rm.get("scores", {}).items()}
    found.append(_histogram(run, "rm", "Scores of held-out answers", "raw scores of the reward model", scores))
    replies = [
        {"side": label, "tokens": row[side]["length"], "score": row[side]["score"]}
        for row in ppo.get("replies", [])
        for side, label in (("sft", "SFT"), ("ppo", "PPO"))
    ]
    scores = {label: [row["score"] for row in replies if row["side"] == label] for label in ("SFT", "PPO")}
    note = "one reply to each held-out prompt; score = (raw - score_mean) / score_std of a reward model"
    found.append(_histogram(run, "ppo", "Scores of replies", note, scores))
    found.append(_lengths(replies[: 2 * MOST_SCATTER], run))
    return [replace(chart, id=f"{run.name}-{chart.id}", run=run.name) for chart in found if chart is not None]


def _reliability(bins: list[dict[str, Any]]) -> Chart | None:
    """Stated confidence of the reward model against how often it is right."""
    rows = [{"stated": b["confidence"], "true": b["frequency"], "pairs": b["count"]} for b in bins if b.get("count")]
    if not rows:
        return None
    at = {
        "x": number("stated", title="stated confidence", scale={"domain": [0.5, 1]}),
        "y": number("true", title="how often it is right", scale={"domain": [0, 1]}),
    }
    size = number("pairs", legend=None, scale={"range": [10, 200]})
    tips = [tip(name, format=".3~g") for name in ("stated", "true", "pairs")]
    layers = [
        layer([{"stated": x, "true": x} for x in (0.5, 1)], "line", {"strokeDash": [4, 4], "color": GRAY}, **at),
        layer(rows, "line", {"point": False, "strokeWidth": 2, "color": HELD_OUT_COLOR}, **at),
        layer(rows, "circle", {"opacity": 0.9, "color": HELD_OUT_COLOR}, **at, size=size, tooltip=tips),
    ]
    note = "dashed: confidence comes true"
    return Chart("reliability", "rm", "Calibration", note, {"$schema": SCHEMA, "layer": layers})


def side_colors(run: RunData, sides: list[str]) -> dict[str, str]:
    """The colours of SFT, PPO (the colour of its run), better and worse answers, and other held-out rows."""
    colors = {"SFT": GRAY, "PPO": run.color, "better": BETTER, "worse": WORSE}
    return {side: colors.get(side, HELD_OUT_COLOR) for side in sides}


def _histogram(run: RunData, stage: str, title: str, note: str, sides: dict[str, list[float]]) -> Chart | None:
    """The scores of each side: better and worse answers, or replies of policies."""
    every = [x for side in sides.values() for x in side]
    if not every:
        return None
    low, high = min(every), max(every)
    width = (high - low) / HISTOGRAM_BINS or 1.0
    rows = []
    for side, numbers in sides.items():
        counts = [0] * HISTOGRAM_BINS
        for score in numbers:
            counts[min(int((score - low) / width), HISTOGRAM_BINS - 1)] += 1
        rows += [
            {"side": side, "from": low + i * width, "to": low + (i + 1) * width, "share": count / max(1, len(numbers))}
            for i, count in enumerate(counts)
        ]
        rows.append({"side": side, "from": low + HISTOGRAM_BINS * width, "share": 0.0})  # closes the outline
    colors = side_colors(run, list(sides))
    areas = [
        {
            "transform": [{"filter": {"field": "side", "equal": side}}],
            "mark": {"type": "area", "interpolate": "step-after", "opacity": 0.2, "color": color},
        }
        for side, color in colors.items()
    ]
    tips = [
        tip("side"),
        *(tip(name, format=form) for name, form in {"from": ".2f", "to": ".2f", "share": ".1%"}.items()),
    ]
    outline = {
        "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
        "encoding": {**by_name("side", colors), "tooltip": tips},
    }
    at = {
        "x": number("from", title="score", scale={"zero": False, "nice": False}),
        "y": number("share", title="share", stack=None, axis={"format": "%"}),
    }
    spec = {"$schema": SCHEMA, "data": {"values": rows}, "encoding": at, "layer": [*areas, outline]}
    return Chart("scores" if stage == "rm" else "policy-scores", stage, title, note, spec)


def _lengths(rows: list[dict[str, Any]], run: RunData) -> Chart | None:
    """Score against length of the replies of SFT and PPO."""
    if not rows:
        return None
    at = {name: number(field, scale={"zero": False}) for name, field in (("x", "tokens"), ("y", "score"))}
    tips = [tip("side"), tip("tokens"), tip("score", format=".2f")]
    sides = by_name("side", side_colors(run, ["SFT", "PPO"]), also="shape")
    spec = layer(rows, "point", {"size": 28, "opacity": 0.6}, **at, **sides, tooltip=tips)
    return Chart("length", "ppo", "Score against length", "one point per reply", {"$schema": SCHEMA, **spec})
