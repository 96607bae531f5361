"""The curves of a report: metrics over the steps of a stage, of one or several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cli.report.chart import SCHEMA, Chart
from rlhf_cli.report.read import RunData, StageData

SMOOTHING = 0.03
"""Share of a curve's points that its smoothing spans, until the reader of the page chooses another."""

TOOLTIP = [
    {"field": "run", "type": "nominal"},
    {"field": "series", "type": "nominal"},
    {"field": "x", "type": "quantitative", "title": "step"},
    {"field": "y", "type": "quantitative", "title": "value", "format": ".4~g"},
    {"field": "s", "type": "quantitative", "title": "smoothed", "format": ".4~g"},
]
NEAREST = {"type": "point", "on": "pointerover", "nearest": True, "fields": ["x"], "clear": "pointerout"}
"""The point nearest to the pointer, whose values are shown."""


@dataclass(frozen=True)
class Curve:
    """A chart of one or two metrics over the steps of a stage."""

    stage: str
    title: str
    metrics: dict[str, str]
    """Metric -> its name in the legend."""
    note: str


CURVES = (
    Curve("sft", "SFT loss", {"loss/sft": "training", "eval/loss": "held out"}, "nats per target token"),
    Curve("sft", "SFT token accuracy", {"eval/token_accuracy": "held out"}, "share of target tokens"),
    Curve("rm", "RM loss", {"loss/rm": "training"}, "per pair or answer"),
    Curve("rm", "RM accuracy", {"rm/accuracy": "training", "eval/accuracy": "held out"}, "chance is 0.5"),
    Curve("ppo", "Score", {"objective/score": "training"}, "of the rewards, after normalization"),
    Curve("ppo", "KL to the SFT model", {"objective/kl": "training"}, "nats per reply"),
    Curve("ppo", "Gold score on held-out prompts", {"eval:gold": "held out"}, "the judge of evaluation.gold"),
    Curve("ppo", "Reply length", {"response/length": "training"}, "tokens"),
    Curve("ppo", "Entropy", {"policy/entropy": "training"}, "nats per token"),
    Curve("ppo", "Replies that ended", {"response/eos_fraction": "training"}, "share"),
    Curve("ppo", "Diversity", {"response/distinct_2": "training"}, "share of different word pairs"),
    Curve("ppo", "Clipped ratios", {"policy/clip_fraction": "training"}, "share of tokens"),
    Curve("ppo", "Explained variance", {"value/explained_variance": "training"}, "of the returns, by the value model"),
)


def curve_charts(runs: Sequence[RunData]) -> list[Chart]:
    """A chart per entry of CURVES for which a run has data; several runs share it."""
    charts = []
    for curve in CURVES:
        series = [
            {"run": run.name, "series": label, "x": steps, "y": values}
            for run in runs
            if (stage := run.stages.get(curve.stage)) is not None
            for metric, label in curve.metrics.items()
            if len((points := _points(stage, metric))[0]) > 0
            for steps, values in [points]
        ]
        if not series or all(len(one["x"]) < 2 for one in series):
            continue
        findings = [
            {
                "run": run.name,
                "x": row["step"],
                "name": str(row.get("name", "")),
                "message": str(row.get("message", "")),
            }
            for run in runs
            if curve.stage == "ppo" and "ppo" in run.stages
            for row in first_findings(run.stages["ppo"])
        ]
        spec = _curve_spec(series, findings, several=len(runs) > 1)
        name = f"{curve.stage}-{curve.title}".lower().replace(" ", "-")
        charts.append(Chart(name, "curves", curve.title, curve.note, spec, is_curve=True))
    return charts


def _points(stage: StageData, metric: str) -> tuple[list[float], list[float]]:
    if metric != "eval:gold":
        return stage.metrics.get(metric, ([], []))
    rows = [row for row in stage.evaluations if isinstance(row.get("gold"), int | float)]
    points = [(row["step"], row["gold"]) for row in rows]
    own = stage.own_evaluation
    if points and isinstance(own.get("sft", {}).get("gold"), int | float):
        points.insert(0, (0, own["sft"]["gold"]))
    return [x for x, _ in points], [y for _, y in points]


def first_findings(stage: StageData) -> list[dict[str, Any]]:
    """The first row of each stretch of iterations in which a finding held."""
    last: dict[str, float] = {}
    found = []
    for row in stage.findings:
        name = str(row.get("name", ""))
        if name not in last or row["step"] > last[name] + 1:
            found.append(row)
        last[name] = row["step"]
    return found


def smooth(values: Sequence[float], share: float) -> list[float]:
    """The mean of two exponential moving averages, one from each end, so that the curve does not lag behind.

    Their time constant is `share` of the number of points.

    >>> smooth([1.0, 2.0, 3.0, 4.0], 0.0)
    [1.0, 2.0, 3.0, 4.0]
    >>> [round(x, 2) for x in smooth([0.0, 0.0, 8.0, 0.0, 0.0], 0.2)]
    [0.34, 0.95, 5.32, 0.95, 0.34]
    """
    span = share * len(values)
    if span <= 0:
        return list(values)
    weight = math.exp(-1 / span)
    there = _moving_average(values, weight)
    back = _moving_average(values[::-1], weight)[::-1]
    return [(a + b) / 2 for a, b in zip(there, back, strict=True)]


def _moving_average(values: Sequence[float], weight: float) -> list[float]:
    """The exponential moving average without the bias of its start."""
    mean, total, out = 0.0, 0.0, []
    for value in values:
        mean = weight * mean + (1 - weight) * value
        total = weight * total + (1 - weight)
        out.append(mean / total)
    return out


def values_of(series: Sequence[dict[str, Any]], share: float = SMOOTHING) -> list[dict[str, Any]]:
    """One row per point of the series of a curve, with the smoothed value `s`. The page computes the same."""
    rows = []
    for one in series:
        for x, y, s in zip(one["x"], one["y"], smooth(one["y"], share), strict=True):
            rows.append({"run": one["run"], "series": one["series"], "x": x, "y": y, "s": s})
    return rows


def _curve_spec(series: list[dict[str, Any]], findings: list[dict[str, Any]], *, several: bool) -> dict[str, Any]:
    """Faint points as they are, the smoothed curve over them, and a dashed rule at each health finding."""
    x = {"field": "x", "type": "quantitative", "title": "step", "axis": {"grid": False, "tickMinStep": 1}}
    scale = {"zero": False, "nice": True}
    names = list(dict.fromkeys(one["series"] for one in series))
    legend = {"title": None, "orient": "top", "symbolType": "stroke"} if several or len(names) > 1 else None
    colour: dict[str, Any] = {"field": "run", "type": "nominal", "sort": None, "legend": legend}
    dash: dict[str, Any] = {
        "field": "series",
        "type": "nominal",
        "sort": None,
        "legend": legend if len(names) > 1 else None,
    }
    if not several:
        colour |= {"field": "series", "scale": {"domain": names}}
        dash["scale"] = {"domain": names}
    y = {"type": "quantitative", "title": None, "scale": scale}
    layers: list[dict[str, Any]] = [
        {
            "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.3},
            "encoding": {"x": x, "y": {**y, "field": "y"}, "color": colour, "detail": {"field": "series"}},
        },
        {
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {"x": x, "y": {**y, "field": "s"}, "color": colour, "strokeDash": dash},
        },
        {
            "params": [{"name": "near", "select": NEAREST}],
            "mark": {"type": "point", "filled": True, "size": 40},
            "encoding": {
                "x": x,
                "y": {**y, "field": "s"},
                "color": colour,
                "tooltip": TOOLTIP,
                "opacity": {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0},
            },
        },
    ]
    if findings:
        layers.append(_finding_rules(findings, x))
    return {"$schema": SCHEMA, "usermeta": {"series": series}, "data": {"values": values_of(series)}, "layer": layers}


def _finding_rules(findings: list[dict[str, Any]], x: dict[str, Any]) -> dict[str, Any]:
    """A dashed rule at the first iteration of each finding."""
    return {
        "data": {"values": findings},
        "mark": {"type": "rule", "strokeDash": [2, 3], "strokeWidth": 1.5, "color": "#c2410c"},
        "encoding": {
            "x": x,
            "tooltip": [
                {"field": "name", "title": "finding"},
                {"field": "x", "type": "quantitative", "title": "step"},
                {"field": "message"},
            ],
        },
    }
