"""The charts of a report as Vega-Lite specifications, drawn by the page in a browser and by `--png`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_cli.report.read import RunData, StageData

SMOOTHING = 0.03
"""Share of a curve's points that its smoothing spans, until the reader of the page chooses another."""
MOST_SCATTER = 1000
HISTOGRAM_BINS = 24
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""Names the language of a specification; nothing is fetched from there."""


@dataclass(frozen=True)
class Chart:
    """A specification and where it stands in the page."""

    id: str
    section: str
    title: str
    note: str
    spec: dict[str, Any]
    is_curve: bool = False
    """A curve over steps: the page's smoothing and logarithmic scale apply to it."""
    run: str = ""
    """The run that it shows; empty for a chart of all runs."""


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
    tooltip = [
        {"field": "run", "type": "nominal"},
        {"field": "series", "type": "nominal"},
        {"field": "x", "type": "quantitative", "title": "step"},
        {"field": "y", "type": "quantitative", "title": "value", "format": ".4~g"},
        {"field": "s", "type": "quantitative", "title": "smoothed", "format": ".4~g"},
    ]
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
            "params": [
                {
                    "name": "near",
                    "select": {
                        "type": "point",
                        "on": "pointerover",
                        "nearest": True,
                        "fields": ["x"],
                        "clear": "pointerout",
                    },
                }
            ],
            "mark": {"type": "point", "filled": True, "size": 40},
            "encoding": {
                "x": x,
                "y": {**y, "field": "s"},
                "color": colour,
                "tooltip": tooltip,
                "opacity": {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0},
            },
        },
    ]
    if findings:
        layers.append(
            {
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
        )
    return {"$schema": SCHEMA, "usermeta": {"series": series}, "data": {"values": values_of(series)}, "layer": layers}


# ------------------------------------------------------------------------------------------- evaluations


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
                "mark": {"type": "line", "strokeDash": [4, 4], "color": "gray"},
                "encoding": {"x": x, "y": y},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "line", "point": False, "strokeWidth": 2},
                "encoding": {"x": x, "y": y},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "circle", "opacity": 0.9},
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
    """The scores of better and worse answers."""
    scores = _evaluation(run, "rm").get("scores", {})
    sides = {name: [x for x in scores.get(name, []) if math.isfinite(x)] for name in ("better", "worse")}
    return _histogram(f"{run.name}-scores", "rm", "Scores of held-out answers", "raw scores of the reward model", sides)


def policy_histogram(run: RunData) -> Chart | None:
    """The scores of the replies of SFT and PPO."""
    replies = _evaluation(run, "ppo").get("replies", [])
    sides = {label: [row[side]["score"] for row in replies] for side, label in (("sft", "SFT"), ("ppo", "PPO"))}
    note = "one reply to each held-out prompt"
    return _histogram(f"{run.name}-policy-scores", "ppo", "Scores of replies", note, sides)


def _histogram(name: str, section: str, title: str, note: str, sides: dict[str, list[float]]) -> Chart | None:
    every = [x for side in sides.values() for x in side]
    if not every:
        return None
    low, high = min(every), max(every)
    width = (high - low) / HISTOGRAM_BINS or 1.0
    rows = []
    for side, numbers in sides.items():
        counts = [0] * HISTOGRAM_BINS
        for number in numbers:
            counts[min(int((number - low) / width), HISTOGRAM_BINS - 1)] += 1
        rows += [
            {"side": side, "from": low + i * width, "to": low + (i + 1) * width, "share": count / max(1, len(numbers))}
            for i, count in enumerate(counts)
        ]
    spec = {
        "$schema": SCHEMA,
        "data": {"values": rows},
        "mark": {"type": "bar", "opacity": 0.55, "binSpacing": 0},
        "encoding": {
            "x": {"field": "from", "bin": {"binned": True}, "type": "quantitative", "title": "score"},
            "x2": {"field": "to"},
            "y": {"field": "share", "type": "quantitative", "title": "share", "stack": None, "axis": {"format": "%"}},
            "color": {"field": "side", "type": "nominal", "legend": {"title": None, "orient": "top"}, "sort": None},
            "tooltip": [
                {"field": "side"},
                {"field": "from", "type": "quantitative", "format": ".2f"},
                {"field": "to", "type": "quantitative", "format": ".2f"},
                {"field": "share", "type": "quantitative", "format": ".1%"},
            ],
        },
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
            "color": {"field": "side", "type": "nominal", "legend": {"title": None, "orient": "top"}, "sort": None},
            "shape": {
                "field": "side",
                "type": "nominal",
                "legend": {"title": None, "orient": "top"},
                "sort": None,
            },
            "tooltip": [
                {"field": "side"},
                {"field": "tokens", "type": "quantitative"},
                {"field": "score", "type": "quantitative", "format": ".2f"},
            ],
        },
    }
    return Chart(f"{run.name}-length", "ppo", "Score against length", "one point per reply", spec)


def frontier_chart(run: RunData, figure: str) -> Chart | None:
    """Score or gold against KL: best-of-n of the SFT model as a line, PPO as a point."""
    found = _evaluation(run, "ppo").get("best_of_n", {})
    rows = [
        {
            "kl": row["kl"],
            "value": row[figure]["value"],
            "low": row[figure].get("low"),
            "high": row[figure].get("high"),
            "label": f"best of {row['n']}",
        }
        for row in found.get("rows", [])
        if figure in row
    ]
    if not rows or figure not in found.get("ppo", {}):
        return None
    points = [{"kl": found["ppo"]["kl"], "value": found["ppo"][figure], "label": "PPO"}]
    tilt = [
        {"kl": row["kl"], "value": row[figure], "label": "exponential tilt"}
        for row in found.get("tilt_curve", [])
        if figure in row
    ]
    x = {"field": "kl", "type": "quantitative", "title": "KL to the SFT model, nats"}
    y = {"field": "value", "type": "quantitative", "title": figure, "scale": {"zero": False}}
    tooltip = [
        {"field": "label", "title": "policy"},
        {"field": "kl", "type": "quantitative", "format": ".2f"},
        {"field": "value", "type": "quantitative", "title": figure, "format": ".3f"},
    ]
    spec = {
        "$schema": SCHEMA,
        "layer": [
            {
                "data": {"values": rows},
                "mark": {"type": "area", "opacity": 0.2},
                "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "line", "point": True},
                "encoding": {"x": x, "y": y, "tooltip": tooltip},
            },
            {
                "data": {"values": tilt},
                "mark": {"type": "line", "strokeDash": [5, 4], "color": "gray"},
                "encoding": {"x": x, "y": y, "tooltip": tooltip},
            },
            {
                "data": {"values": [rows[-1]]},
                "mark": {"type": "text", "align": "right", "dy": -10},
                "encoding": {"x": x, "y": y, "text": {"field": "label"}},
            },
            {
                "data": {"values": points},
                "mark": {"type": "point", "shape": "diamond", "filled": True, "size": 160, "color": "#c2410c"},
                "encoding": {"x": x, "y": y, "tooltip": tooltip},
            },
            {
                "data": {"values": points},
                "mark": {"type": "text", "align": "left", "dx": 10, "fontWeight": "bold"},
                "encoding": {"x": x, "y": y, "text": {"field": "label"}},
            },
        ],
    }
    note = "line: best-of-n; dashed: about the best possible"
    return Chart(f"{run.name}-frontier-{figure}", "ppo", f"{figure.capitalize()} against KL", note, spec)


def _evaluation(run: RunData, stage: str) -> dict[str, Any]:
    return run.stages[stage].evaluation if stage in run.stages else {}


def evaluation_charts(run: RunData) -> list[Chart]:
    """The charts of `rlhf eval`'s figures for one run."""
    found = [
        reliability_chart(run),
        histogram_chart(run),
        policy_histogram(run),
        frontier_chart(run, "score"),
        frontier_chart(run, "gold"),
        length_chart(run),
    ]
    return [replace(chart, run=run.name) for chart in found if chart is not None]
