"""The curves of a report: metrics over the steps of a stage, of one or several runs, and its health findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli.health.recap import unit_of
from rlhf_cli.report.chart import (
    CURVES,
    GRAY,
    HELD_OUT,
    HELD_OUT_COLOR,
    SCHEMA,
    SETTING,
    TRAINING,
    WARNING,
    Chart,
    Curve,
    by_name,
    layer,
    number,
    tip,
)
from rlhf_cli.report.read import RunData, StageData, config_of

SMOOTHING = 0.03
"""Share of a curve's points that its smoothing spans, until the reader of the page chooses another."""
NEAREST = {"type": "point", "on": "pointerover", "nearest": True, "fields": ["x"], "clear": "pointerout"}
"""The point nearest to the pointer, whose values are shown."""
AXIS = {"tickMinStep": 1, "labelOverlap": True, "labelSeparation": 6}


def curve_charts(runs: Sequence[RunData]) -> list[Chart]:
    """A chart per entry of CURVES for which a run has data; several runs share it."""
    charts = []
    for curve in CURVES:
        shown = shared_runs(runs, curve.stage)
        series = [
            {"run": name, "series": label, "x": steps, "y": values}
            for name, data in shown.items()
            for metric, label in curve.metrics.items()
            for steps, values in [_points(data, metric)]
            if steps
        ]
        if not series or all(len(one["x"]) < 2 for one in series):
            continue
        findings = [
            {"run": name, "x": row["start"], "name": row["name"], "message": row["message"]}
            for name, data in shown.items()
            for row in first_of_each(data)
        ]
        targets = [row for name, data in shown.items() for row in _target(data, curve, name)]
        note = curve.note
        if len({one["series"] for one in series}) > 1:
            note += f"; points: {HELD_OUT}"
        if targets:
            note += f"; dashed: {curve.target}"
        # A stage that runs share has none of their colours.
        colors = {name: next((run.color for run in runs if run.name == name), GRAY) for name in shown}
        spec = _curve_spec(curve, series, findings, targets, colors if len(runs) > 1 else None)
        name = f"{curve.stage}-{curve.title}".lower().replace(" ", "-")
        charts.append(Chart(name, f"curves-{curve.stage}", curve.title, note, spec, is_curve=True))
    return charts


def shared_runs(runs: Sequence[RunData], stage: str) -> dict[str, StageData]:
    """The stage of each run that has it, by the name in the legend: runs with the same finished stage share a curve."""
    groups: list[tuple[StageData, list[str]]] = []
    for run in runs:
        if (data := run.stages.get(stage)) is None:
            continue
        same = next((names for first, names in groups if same_stage(first, data)), None)
        if same is None:
            groups.append((data, [run.name]))
        else:
            same.append(run.name)
    return {
        f"all {len(runs)} runs" if 2 < len(names) == len(runs) else ", ".join(names): first for first, names in groups
    }


def same_stage(one: StageData, other: StageData) -> bool:
    """Whether both are the same finished stage, as in runs that share SFT and RM."""
    return one.manifest is not None and one.manifest == other.manifest


def _points(stage: StageData, metric: str) -> tuple[list[float], list[float]]:
    if metric != "eval:gold":
        watched = metric.replace("eval/", "validation/")  # a run with validation rows has one point of the test rows
        return stage.metrics.get(watched, stage.metrics.get(metric, ([], [])))
    rows = [row for row in stage.evaluations if isinstance(row.get("gold"), int | float)]
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


def smoothed() -> list[dict[str, Any]]:
    """The transforms that turn series into points and smooth those of training: `s` beside `x` and `y`.

    `s` is the mean of two exponential moving averages, one from each end, so that the curve does not lag behind:

        ``s[i] = (sum over j <= i of w^(i-j) y[j] / sum of w^(i-j) + the same over j >= i) / 2``

    with ``w = exp(-1 / (share * n))``, where the parameter `share` of the specification is the share of the n points
    that a time constant spans; 0 leaves the values as they are. The first value, where a run starts, stays as it is:
    ``(y[1] - s[1]) w^(i-1)`` is added, which fades. Vega sums w^-j from each end, at most exp(1 / share).
    """
    group = {"groupby": ["run", "series"]}

    def calculated(**formulas: str) -> list[dict[str, str]]:
        return [{"calculate": formula, "as": name} for name, formula in formulas.items()]

    def sums(*fields: str, order: str) -> dict[str, Any]:
        window = [{"op": "sum", "field": name, "as": f"sum_{name}"} for name in fields]
        return {"window": window, "sort": [{"field": "x", "order": order}], "frame": [None, 0], **group}

    first = [{"op": "first_value", "field": name, "as": f"first_{name}"} for name in ("y", "mean")]
    return [
        {"flatten": ["x", "y"]},
        {"window": [{"op": "row_number", "as": "i"}], "sort": [{"field": "x"}], **group},
        {"joinaggregate": [{"op": "count", "as": "n"}], **group},
        *calculated(
            span="share * datum.n",
            there="exp(datum.i / datum.span)",
            back="exp((datum.n - datum.i) / datum.span)",
            y_there="datum.y * datum.there",
            y_back="datum.y * datum.back",
        ),
        sums("there", "y_there", order="ascending"),
        sums("back", "y_back", order="descending"),
        *calculated(mean="(datum.sum_y_there / datum.sum_there + datum.sum_y_back / datum.sum_back) / 2"),
        {"window": first, "sort": [{"field": "x"}], **group},
        *calculated(
            s="datum.series === 'training' && share > 0 ? "
            "datum.mean + (datum.first_y - datum.first_mean) * exp((1 - datum.i) / datum.span) : datum.y"
        ),
    ]


def _curve_spec(
    curve: Curve,
    series: list[dict[str, Any]],
    findings: list[dict[str, Any]],
    targets: list[dict[str, Any]],
    runs: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Faint values as they are, the smoothed curve over them, held-out figures as points, targets and findings.

    Several runs differ in colour, `runs`, and in dash; training and held-out figures of one run in colour and points.
    """
    unit = unit_of(curve.stage)
    x = number("x", title=unit, axis={"grid": False, "tickCount": 5, **AXIS}, scale={"nice": False})
    if runs is not None:
        shared = {"x": x, **by_name("run", runs)}
    else:
        scale = {"domain": ["training", HELD_OUT, SETTING], "range": [TRAINING, HELD_OUT_COLOR, TRAINING]}
        shared = {"x": x, "color": {"field": "series", "type": "nominal", "sort": None, "legend": None, "scale": scale}}

    def y(field: str) -> dict[str, Any]:
        scale = {"domain": [0, 1]} if curve.is_share else {"zero": False, "nice": True}
        return number(field, title=None, scale=scale, axis={"tickCount": 5})

    def line(names: Sequence[str], field: str, **style: Any) -> dict[str, Any]:
        chosen = [{"filter": {"field": "series", "oneOf": names}}]
        encoding = {"y": y(field), "detail": {"field": "series"}}
        return {"transform": chosen, "mark": {"type": "line", **style}, "encoding": encoding}

    names = {one["series"] for one in series}
    layers = []
    if names != {HELD_OUT}:
        layers.append(line(["training", SETTING], "y", strokeWidth=1, opacity=0.3))
        layers.append(line(["training", SETTING], "s", strokeWidth=2))
    if HELD_OUT in names:
        layers.append(line([HELD_OUT], "s", strokeWidth=1.5, point={"filled": True, "size": 36}))
    tips = [number("x", title=unit), tip("run"), tip("series"), tip("y", "value", ".4~g"), tip("s", "smoothed", ".4~g")]
    near = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    layers.append(
        {
            "params": [{"name": "near", "select": NEAREST}],
            "mark": {"type": "point", "filled": True, "size": 50},
            "encoding": {"y": y("s"), "tooltip": tips, "opacity": near},
        }
    )
    if targets:
        color = {"color": {"value": GRAY}} if runs is None else {}
        style = {"strokeWidth": 1.5, "strokeDash": [6, 4]}
        layers.append(layer(targets, "line", style, y=y("target"), detail={"field": "run"}, **color))
    if (
        findings
    ):  # A dashed rule at the first step of each. Another dash than that of the runs would split their legend.
        look = {"color": {"value": WARNING}, "strokeDash": {"value": [2, 3]}} if runs is None else {}
        tips = [tip("run"), tip("name", "finding"), number("x", title=unit), tip("message")]
        layers.append(layer(findings, "rule", {"strokeWidth": 1.5}, **look, tooltip=tips))
    return {
        "$schema": SCHEMA,
        "params": [{"name": "share", "value": SMOOTHING}],
        "data": {"values": series},
        "transform": smoothed(),
        "encoding": shared,
        "layer": layers,
    }


# ---------------------------------------------------------------------------------------------- health findings


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
    """The first stretch of each finding, with all its stretches as text in `steps`, such as `4, 28 to 47`."""
    found: dict[str, dict[str, Any]] = {}
    for row in stretches(stage):
        steps = f"{row['start']}" if row["start"] == row["end"] else f"{row['start']} to {row['end']}"
        if row["name"] in found:
            found[row["name"]]["steps"] += f", {steps}"
        else:
            found[row["name"]] = {**row, "steps": steps}
    return list(found.values())


def findings_chart(run: RunData, stage: StageData) -> Chart | None:
    """The health findings of a stage as bars on the axis of its steps."""
    rows = [{**row, "until": row["end"] + 1} for row in stretches(stage)]
    if not rows:
        return None
    last = max(max((steps[-1] for steps, _ in stage.metrics.values()), default=0), *(row["until"] for row in rows))
    axis = {"grid": True, "tickCount": 8, **AXIS}
    bars = layer(
        rows,
        "bar",
        {"height": 10, "minBandSize": 3, "color": WARNING},
        x=number("start", title=unit_of(stage.stage), scale={"domain": [0, last]}, axis=axis),
        x2={"field": "until"},
        y={"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 130}},
        tooltip=[tip(field) for field in ("name", "start", "end", "message")],
    )
    spec = {"$schema": SCHEMA, "height": 30 + 22 * len({row["name"] for row in rows}), **bars}
    name, note = f"{run.name}-{stage.stage}-findings", "steps at which each was reported"
    return Chart(name, stage.stage, "Health findings", note, spec, run=run.name)
