"""The curves of a report: metrics over the steps of a stage, of one or several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlhf_cli.health.recap import unit_of
from rlhf_cli.report.chart import GRAY, HELD_OUT_COLOR, LEGEND, SCHEMA, TRAINING, WARNING, Chart
from rlhf_cli.report.curve import CURVES, HELD_OUT, SETTING, Curve
from rlhf_cli.report.read import RunData, StageData, config_of, evaluations_of

SMOOTHING = 0.03
"""Share of a curve's points that its smoothing spans, until the reader of the page chooses another."""

TOOLTIP = [
    {"field": "run", "type": "nominal"},
    {"field": "series", "type": "nominal"},
    {"field": "y", "type": "quantitative", "title": "value", "format": ".4~g"},
    {"field": "s", "type": "quantitative", "title": "smoothed", "format": ".4~g"},
]
NEAREST = {"type": "point", "on": "pointerover", "nearest": True, "fields": ["x"], "clear": "pointerout"}
"""The point nearest to the pointer, whose values are shown."""


def curve_charts(runs: Sequence[RunData]) -> list[Chart]:
    """A chart per entry of CURVES for which a run has data; several runs share it."""
    charts = []
    for curve in CURVES:
        shown = shared_runs(runs, curve.stage)
        colors = {run.name: run.color for run in runs}
        series = [
            {"run": name, "series": label, "x": steps, "y": values}
            for name, run in shown.items()
            for metric, label in curve.metrics.items()
            if len((points := _points(run.stages[curve.stage], metric))[0]) > 0
            for steps, values in [points]
        ]
        if not series or all(len(one["x"]) < 2 for one in series):
            continue
        findings = [
            {"run": name, "x": row["start"], "name": row["name"], "message": row["message"]}
            for name, run in shown.items()
            for row in first_of_each(run.stages[curve.stage])
        ]
        labels = {one["series"] for one in series}
        note = f"{curve.note}; points: {HELD_OUT}" if len(labels) > 1 else curve.note
        targets = [row for name, run in shown.items() for row in _target(run.stages[curve.stage], curve, name)]
        note = f"{note}; dashed: {curve.target}" if targets else note
        # A stage that runs share has none of their colours.
        scale = {"domain": list(shown), "range": [colors.get(name, GRAY) for name in shown]}
        spec = _curve_spec(curve, series, findings, targets, scale if len(runs) > 1 else None)
        name = f"{curve.stage}-{curve.title}".lower().replace(" ", "-")
        charts.append(Chart(name, f"curves-{curve.stage}", curve.title, note, spec, is_curve=True))
    return charts


def shared_runs(runs: Sequence[RunData], stage: str) -> dict[str, RunData]:
    """The runs that have the stage, by the name in the legend: runs with the same finished stage share one curve."""
    groups: list[list[RunData]] = []
    for run in runs:
        if (data := run.stages.get(stage)) is None:
            continue
        same = [group for group in groups if same_stage(group[0].stages[stage], data)]
        if same:
            same[0].append(run)
        else:
            groups.append([run])
    return {
        f"all {len(runs)} runs" if 2 < len(group) == len(runs) else ", ".join(run.name for run in group): group[0]
        for group in groups
    }


def same_stage(one: StageData, other: StageData) -> bool:
    """Whether both are the same finished stage, as in runs that share SFT and RM."""
    return one.manifest is not None and one.manifest == other.manifest


def _points(stage: StageData, metric: str) -> tuple[list[float], list[float]]:
    if metric != "eval:gold":
        watched = metric.replace("eval/", "validation/")  # a run with validation rows has one point of the test rows
        return stage.metrics.get(watched, stage.metrics.get(metric, ([], [])))
    rows = [row for row in evaluations_of(stage) if isinstance(row.get("gold"), int | float)]
    return [row["step"] for row in rows], [row["gold"] for row in rows]


def _target(stage: StageData, curve: Curve, name: str) -> list[dict[str, Any]]:
    """Both ends of the line at the value that the config steers a metric to; empty without one."""
    value: Any = config_of(stage) if curve.target else None
    for key in curve.target.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    steps = [x for metric in curve.metrics for x in _points(stage, metric)[0]]
    if not isinstance(value, int | float) or not steps:
        return []
    return [{"run": name, "x": x, "target": value} for x in (min(steps), max(steps))]


def stretches(stage: StageData) -> list[dict[str, Any]]:
    """The stretches of steps in which a finding held: `name`, `start`, `end`, and the first `message` and `advice`."""
    last: dict[str, dict[str, Any]] = {}
    found = []
    for row in stage.findings:
        name, step = str(row.get("name", "")), row["step"]
        if name not in last or step > last[name]["end"] + 1:
            texts = {key: str(row.get(key, "")) for key in ("message", "advice")}
            last[name] = {"name": name, "start": step, "end": step, **texts}
            found.append(last[name])
        last[name]["end"] = step
    return found


def first_of_each(stage: StageData) -> list[dict[str, Any]]:
    """The first stretch of each finding, with all its stretches as text in `steps`.

    A stretch of several steps is written as `28 to 47`.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in stretches(stage):
        steps = f"{row['start']}" if row["start"] == row["end"] else f"{row['start']} to {row['end']}"
        if row["name"] in found:
            found[row["name"]]["steps"] += f", {steps}"
        else:
            found[row["name"]] = {**row, "steps": steps}
    return list(found.values())


def smooth(values: Sequence[float], share: float) -> list[float]:
    """The mean of two exponential moving averages, one from each end, so that the curve does not lag behind.

    Their time constant is `share` of the number of points. The first value, where a run starts, stays as it is; what
    that changes fades with the same constant.

    >>> smooth([1.0, 2.0, 3.0, 4.0], 0.0)
    [1.0, 2.0, 3.0, 4.0]
    >>> [round(x, 2) for x in smooth([0.0, 0.0, 8.0, 0.0, 0.0], 0.2)]
    [0.0, 0.82, 5.28, 0.93, 0.34]
    """
    span = share * len(values)
    if span <= 0:
        return list(values)
    weight = math.exp(-1 / span)
    there = _moving_average(values, weight)
    back = _moving_average(values[::-1], weight)[::-1]
    smoothed = [(a + b) / 2 for a, b in zip(there, back, strict=True)]
    return [value + (values[0] - smoothed[0]) * weight**i for i, value in enumerate(smoothed)]


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
        smoothed = smooth(one["y"], share) if one["series"] == "training" else one["y"]
        for x, y, s in zip(one["x"], one["y"], smoothed, strict=True):
            rows.append({"run": one["run"], "series": one["series"], "x": x, "y": y, "s": s})
    return rows


def _curve_spec(
    curve: Curve,
    series: list[dict[str, Any]],
    findings: list[dict[str, Any]],
    targets: list[dict[str, Any]],
    by_run: dict[str, list[str]] | None,
) -> dict[str, Any]:
    """Faint values as they are, the smoothed curve over them, held-out figures as points, targets and findings.

    Several runs differ in colour, `by_run`, and in dash; training and held-out figures of one run in colour and points.
    """
    several = by_run is not None
    axis = {"grid": False, "tickMinStep": 1, "tickCount": 5, "labelOverlap": True, "labelSeparation": 6}
    x = {"field": "x", "type": "quantitative", "title": unit_of(curve.stage), "axis": axis, "scale": {"nice": False}}
    scale = {"domain": [0, 1]} if curve.is_share else {"zero": False, "nice": True}
    y = {"type": "quantitative", "title": None, "scale": scale, "axis": {"tickCount": 5}}
    names = list(dict.fromkeys(one["series"] for one in series))
    color: dict[str, Any] = {"field": "run" if several else "series", "type": "nominal", "sort": None, "legend": None}
    shared: dict[str, Any] = {"x": x, "color": color}
    if by_run is not None:
        color |= {"legend": {**LEGEND, "symbolType": "stroke"}, "scale": by_run}
        dash = {"field": "run", "type": "nominal", "sort": None, "legend": color["legend"]}
        shared["strokeDash"] = {**dash, "scale": {"domain": by_run["domain"]}}  # else it gets a legend of its own
    else:
        color["scale"] = {"domain": ["training", HELD_OUT, SETTING], "range": [TRAINING, HELD_OUT_COLOR, TRAINING]}
    training, held_out = (
        [{"filter": {"field": "series", "oneOf": chosen}}]
        for chosen in ([n for n in names if n != HELD_OUT], [HELD_OUT])
    )
    smoothed = {"y": {**y, "field": "s"}}
    faint = {"y": {**y, "field": "y"}, "detail": {"field": "series"}}
    layers: list[dict[str, Any]] = []
    if names != [HELD_OUT]:
        thin, thick = {"type": "line", "strokeWidth": 1, "opacity": 0.3}, {"type": "line", "strokeWidth": 2}
        layers.append({"transform": training, "mark": thin, "encoding": faint})
        layers.append({"transform": training, "mark": thick, "encoding": smoothed})
    if HELD_OUT in names:
        line = {"type": "line", "strokeWidth": 1.5, "point": {"filled": True, "size": 36}}
        layers.append({"transform": held_out, "mark": line, "encoding": smoothed})
    layers.append(
        {
            "params": [{"name": "near", "select": NEAREST}],
            "mark": {"type": "point", "filled": True, "size": 50},
            "encoding": {
                **smoothed,
                "tooltip": [{"field": "x", "type": "quantitative", "title": unit_of(curve.stage)}, *TOOLTIP],
                "opacity": {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0},
            },
        }
    )
    if targets:
        color = {} if several else {"color": {"value": GRAY}}
        line = {"type": "line", "strokeWidth": 1.5, "strokeDash": [6, 4]}
        encoding = {"y": {**y, "field": "target"}, "detail": {"field": "run"}, **color}
        layers.append({"data": {"values": targets}, "mark": line, "encoding": encoding})
    if findings:
        layers.append(_finding_rules(findings, unit_of(curve.stage), several=several))
    values = {"values": values_of(series)}
    return {"$schema": SCHEMA, "usermeta": {"series": series}, "data": values, "encoding": shared, "layer": layers}


def _finding_rules(findings: list[dict[str, Any]], unit: str, *, several: bool) -> dict[str, Any]:
    """A dashed rule at the first step of each finding."""
    return {
        "data": {"values": findings},
        "mark": {"type": "rule", "strokeWidth": 1.5},
        "encoding": {
            # Another dash than that of the runs would split their legend.
            **({} if several else {"color": {"value": WARNING}, "strokeDash": {"value": [2, 3]}}),
            "tooltip": [
                {"field": "run"},
                {"field": "name", "title": "finding"},
                {"field": "x", "type": "quantitative", "title": unit},
                {"field": "message"},
            ],
        },
    }


def findings_chart(run: RunData, stage: StageData) -> Chart | None:
    """The health findings of a stage as bars on the axis of its steps."""
    rows = [{**row, "until": row["end"] + 1} for row in stretches(stage)]
    if not rows:
        return None
    last = max(max((steps[-1] for steps, _ in stage.metrics.values()), default=0), *(row["until"] for row in rows))
    x_axis = {"grid": True, "tickMinStep": 1, "tickCount": 8, "labelOverlap": True, "labelSeparation": 6}
    x = {
        "field": "start",
        "type": "quantitative",
        "title": unit_of(stage.stage),
        "scale": {"domain": [0, last]},
        "axis": x_axis,
    }
    y = {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 130}}
    spec = {
        "$schema": SCHEMA,
        "height": 30 + 22 * len({row["name"] for row in rows}),
        "data": {"values": rows},
        "mark": {"type": "bar", "height": 10, "minBandSize": 3, "color": WARNING},
        "encoding": {
            "x": x,
            "x2": {"field": "until"},
            "y": y,
            "tooltip": [{"field": "name"}, {"field": "start"}, {"field": "end"}, {"field": "message"}],
        },
    }
    name, note = f"{run.name}-{stage.stage}-findings", "steps at which each was reported"
    return Chart(name, stage.stage, "Health findings", note, spec, run=run.name)
