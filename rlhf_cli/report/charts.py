"""The charts of `rlhf eval`'s figures: calibration, histograms, score against KL and length."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rlhf_cli.report.chart import GRAY, HELD_OUT_COLOR, LEGEND, SCHEMA, Chart, side_scale
from rlhf_cli.report.read import RunData

MOST_SCATTER = 1000
HISTOGRAM_BINS = 24


def reliability_chart(run: RunData) -> Chart | None:
    """Stated confidence of the reward model against how often it is right."""
    bins = [b for b in _evaluation(run, "rm").get("reliability", []) if b.get("count")]
    if not bins:
        return None
    rows = [{"stated": b["confidence"], "true": b["frequency"], "pairs": b["count"]} for b in bins]
    x = {"field": "stated", "type": "quantitative", "title": "stated confidence", "scale": {"domain": [0.5, 1]}}
    y = {"field": "true", "type": "quantitative", "title": "how often it is right", "scale": {"domain": [0, 1]}}
    spec = {
        "$schema": SCHEMA,
        "layer": [
            {
                "data": {"values": [{"stated": 0.5, "true": 0.5}, {"stated": 1, "true": 1}]},
                "mark": {"type": "line", "strokeDash": [4, 4], "color": GRAY},
                "encoding": {"x": x, "y": y},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "line", "point": False, "strokeWidth": 2, "color": HELD_OUT_COLOR},
                "encoding": {"x": x, "y": y},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "circle", "opacity": 0.9, "color": HELD_OUT_COLOR},
                "encoding": {
                    "x": x,
                    "y": y,
                    "size": {"field": "pairs", "type": "quantitative", "legend": None, "scale": {"range": [10, 200]}},
                    "tooltip": [
                        {"field": name, "type": "quantitative", "format": ".3~g"}
                        for name in ("stated", "true", "pairs")
                    ],
                },
            },
        ],
    }
    note = "dashed: confidence comes true"
    return Chart(f"{run.name}-reliability", "rm", "Calibration", note, spec)


def histogram_chart(run: RunData) -> Chart | None:
    """The scores of better and worse answers, and of samples of the policies for the same prompts."""
    scores = _evaluation(run, "rm").get("scores", {})
    sides = {name: [x for x in values if math.isfinite(x)] for name, values in scores.items()}
    return _histogram(
        f"{run.name}-scores", "rm", "Scores of held-out answers", "raw scores of the reward model", sides, run.color
    )


def policy_histogram(run: RunData) -> Chart | None:
    """The scores of the replies of SFT and PPO."""
    replies = _evaluation(run, "ppo").get("replies", [])
    sides = {label: [row[side]["score"] for row in replies] for side, label in (("sft", "SFT"), ("ppo", "PPO"))}
    note = "one reply to each held-out prompt; score = (raw - score_mean) / score_std of a reward model"
    return _histogram(f"{run.name}-policy-scores", "ppo", "Scores of replies", note, sides, run.color)


def _histogram(
    name: str, section: str, title: str, note: str, sides: dict[str, list[float]], policy: str
) -> Chart | None:
    every = [x for side in sides.values() for x in side]
    if not every:
        return None
    low, high = min(every), max(every)
    width = (high - low) / HISTOGRAM_BINS or 1.0
    rows = []
    for name_of_side, numbers in sides.items():
        counts = [0] * HISTOGRAM_BINS
        for number in numbers:
            counts[min(int((number - low) / width), HISTOGRAM_BINS - 1)] += 1
        rows += [
            {
                "side": name_of_side,
                "from": low + i * width,
                "to": low + (i + 1) * width,
                "share": count / max(1, len(numbers)),
            }
            for i, count in enumerate(counts)
        ]
        rows.append({"side": name_of_side, "from": low + HISTOGRAM_BINS * width, "share": 0.0})  # closes the outline
    legend = {**LEGEND, "symbolType": "stroke"}
    side: dict[str, Any] = {"field": "side", "type": "nominal", "sort": None, "legend": legend}
    scale = side_scale(list(sides), policy)
    spec = {
        "$schema": SCHEMA,
        "data": {"values": rows},
        "encoding": {
            "x": {"field": "from", "type": "quantitative", "title": "score", "scale": {"zero": False, "nice": False}},
            "y": {"field": "share", "type": "quantitative", "title": "share", "stack": None, "axis": {"format": "%"}},
        },
        "layer": [
            *(
                {
                    "transform": [{"filter": {"field": "side", "equal": name}}],
                    "mark": {"type": "area", "interpolate": "step-after", "opacity": 0.2, "color": color},
                }
                for name, color in zip(scale["domain"], scale["range"], strict=True)
            ),
            {
                "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
                "encoding": {
                    "color": side | {"scale": scale},
                    "strokeDash": side | {"scale": {"domain": list(sides)}},  # else it gets a legend of its own
                    "tooltip": [
                        {"field": "side"},
                        {"field": "from", "type": "quantitative", "format": ".2f"},
                        {"field": "to", "type": "quantitative", "format": ".2f"},
                        {"field": "share", "type": "quantitative", "format": ".1%"},
                    ],
                },
            },
        ],
    }
    return Chart(name, section, title, note, spec)


def length_chart(run: RunData) -> Chart | None:
    """Score against length of the replies of SFT and PPO."""
    replies = _evaluation(run, "ppo").get("replies", [])[:MOST_SCATTER]
    rows = [
        {"side": label, "tokens": row[side]["length"], "score": row[side]["score"]}
        for row in replies
        for side, label in (("sft", "SFT"), ("ppo", "PPO"))
    ]
    if not rows:
        return None
    spec = {
        "$schema": SCHEMA,
        "data": {"values": rows},
        "mark": {"type": "point", "size": 28, "opacity": 0.6},
        "encoding": {
            "x": {"field": "tokens", "type": "quantitative", "scale": {"zero": False}},
            "y": {"field": "score", "type": "quantitative", "scale": {"zero": False}},
            "color": {
                "field": "side",
                "type": "nominal",
                "legend": LEGEND,
                "sort": None,
                "scale": side_scale(["SFT", "PPO"], run.color),
            },
            "shape": {
                "field": "side",
                "type": "nominal",
                "legend": LEGEND,
                "sort": None,
                "scale": {"domain": ["SFT", "PPO"]},
            },
            "tooltip": [
                {"field": "side"},
                {"field": "tokens", "type": "quantitative"},
                {"field": "score", "type": "quantitative", "format": ".2f"},
            ],
        },
    }
    return Chart(f"{run.name}-length", "ppo", "Score against length", "one point per reply", spec)


def _evaluation(run: RunData, stage: str) -> dict[str, Any]:
    return run.stages[stage].evaluation if stage in run.stages else {}


def evaluation_charts(run: RunData) -> list[Chart]:
    """The charts of `rlhf eval`'s figures for one run."""
    found = [
        reliability_chart(run),
        histogram_chart(run),
        policy_histogram(run),
        length_chart(run),
    ]
    return [replace(chart, run=run.name) for chart in found if chart is not None]
