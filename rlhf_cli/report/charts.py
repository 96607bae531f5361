"""The charts of a report: the figures of `rlhf eval`, the curves of a run, and score and gold against the KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rlhf_cli.health.recap import unit_of
from rlhf_cli.report.chart import (
    BETTER,
    CURVES,
    GRAY,
    HELD_OUT,
    HELD_OUT_COLOR,
    SCHEMA,
    SETTING,
    TRAINING,
    WARNING,
    WORSE,
    Chart,
    Curve,
    by_name,
    layer,
    number,
    tip,
)
from rlhf_cli.report.run_data import RunData, StageData, config_of, meaning_of
from rlhf_cli.run.artifacts import flat

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


# ------------------------------------------------------------------------------- curves over steps, health findings

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
            {"run": name, "x": finding.steps[0], "name": finding.name, "message": finding.message}
            for name, data in shown.items()
            for finding in data.findings
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
    value = flat(config_of(stage)).get(curve.target)
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
    if findings:  # A dashed rule at the first step of each. Another dash than the runs' would split their legend.
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


def findings_chart(run: RunData, stage: StageData) -> Chart | None:
    """The health findings of a stage as bars on the axis of its steps."""
    rows: list[dict[str, Any]] = [
        {"name": finding.name, "start": start, "end": end, "until": end + 1, "message": finding.message}
        for finding in stage.findings
        for start, end in finding.stretches()
    ]
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
    name, note = f"{run.name}-{stage.stage}-findings", "steps after which each held"
    return Chart(name, stage.stage, "Health findings", note, spec, run=run.name)


# --------------------------------------------------------------- score and gold against the KL to the SFT model

DISTANCE = "distance"
FIGURES = {"gold": "gold", "score": "score_mean"}
"""Figure -> its key in a stage's own evaluations and, behind the policy's name, among its final metrics."""
FIT_POINTS = 60
MOST_KEYS = 3
"""A setting is named by the keys that differ if they are at most this many, else by the run's name."""
KL_CHANNEL = number(
    "kl",
    title="KL to the SFT model, nats (square-root scale)",
    scale={"type": "sqrt", "nice": False},
    axis={"tickCount": 6, "labelOverlap": True},
)


def distance_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Gold and score along the runs, then beside best-of-n. Runs share a chart if the figure means the same in them."""
    charts = [
        chart(group, figure, name_runs=len(runs) > 1)
        for figure in FIGURES
        for chart in (_path_chart, _best_of_n_chart)
        for group in comparable(runs, figure)
    ]
    return [chart for chart in charts if chart is not None]


def comparable(runs: Sequence[RunData], figure: str) -> list[list[RunData]]:
    """The runs in groups in which the figure has one meaning: the same rewards, or the same judge."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        if (stage := run.stages.get("ppo")) is not None:
            groups.setdefault(meaning_of(stage.manifest, figure), []).append(run)
    return list(groups.values())


def path_points(run: RunData, figure: str) -> list[dict[str, Any]]:
    """A figure on the held-out prompts along the run, from the SFT model on: `step`, `kl`, `value`, `low`, `high`."""
    stage, key = run.stages.get("ppo"), FIGURES[figure]
    return [
        {"run": run.name, "step": row.get("step", 0), "kl": max(0.0, row["kl"]), "value": row[key]}
        | {end: row[name] for end in ("low", "high") if isinstance(row.get(name := f"{key}_{end}95"), int | float)}
        for row in (stage.evaluations if stage is not None else [])
        if isinstance(row.get(key), int | float) and isinstance(row.get("kl"), int | float)
    ]


def _path_chart(runs: Sequence[RunData], figure: str, *, name_runs: bool) -> Chart | None:
    """A figure against the KL along each run, and for gold the fit of Gao et al. 2023."""
    paths = [rows for run in runs if len(rows := path_points(run, figure)) >= 3]
    if not paths:
        return None
    at = {"x": KL_CHANNEL, "y": _value(figure)}
    look = _by_run(runs) if name_runs else {"color": {"value": HELD_OUT_COLOR}}
    layers = []
    if fits := [row for run in runs for row in fit_points(run)] if figure == "gold" else []:
        dotted = {"strokeWidth": 1.5, "strokeDash": [1, 3], "color": GRAY}
        layers.append(layer(fits, "line", dotted, **at, detail={"field": "run"}))
    points = [row for rows in paths for row in rows]
    layers += _interval_layers(points, figure, {**look["color"], "legend": None} if name_runs else look["color"])
    tips = [tip("run"), tip("step", "iteration"), *_tips(figure)]
    line = {"strokeWidth": 2, "point": {"filled": True, "size": 40}}
    layers.append(layer(points, "line", line, **at, order={"field": "step"}, tooltip=tips, **look))
    if not name_runs:
        layers.append(_labels([{**paths[0][-1], "label": f"iteration {paths[0][-1]['step']:g}"}], figure, above=False))
    note = "held-out prompts, with 95 % intervals" + ("; dotted: fit of Gao et al. 2023" if fits else "")
    return _chart("path", runs, figure, f"{figure.capitalize()} along the run", note, layers)


def fit_points(run: RunData) -> list[dict[str, Any]]:
    """Points of the fit ``gold(0) + d (a - b log d)``, d = sqrt(KL), of `rlhf eval`."""
    found = run.stages["ppo"].evaluation.get("gold_curve")
    if not found or not {"start", "a", "b", "points"} <= found.keys():
        return []
    a, b, last = found["a"]["value"], found["b"]["value"], max(point["d"] for point in found["points"])
    grid = [last * (i + 1) / FIT_POINTS for i in range(FIT_POINTS)]
    return [{"run": run.name, "kl": d * d, "value": found["start"] + d * (a - b * math.log(d))} for d in grid]


def _best_of_n_chart(runs: Sequence[RunData], figure: str, *, name_runs: bool) -> Chart | None:
    """Score or gold against KL: best-of-n of the SFT model as a line, each PPO policy as a diamond."""
    found = [(run, best) for run in runs if (best := run.stages["ppo"].evaluation.get("best_of_n"))]
    found = [(run, best) for run, best in found if figure in best["rows"][0] and figure in best.get("ppo", {})]
    if not found:
        return None
    at = {"x": KL_CHANNEL, "y": _value(figure)}
    points, layers = [], []
    drawn: list[Any] = []
    for run, best in found:
        same = best.get("at_ppo_kl", {}).get("ppo", {}).get(figure, {})
        own = {"run": run.name, "kl": best["ppo"]["kl"], "value": best["ppo"][figure]}
        points.append({**own, **{key: same[key] for key in ("low", "high") if key in same}})
        if best["rows"] not in drawn:
            drawn.append(best["rows"])
            layers += _best_of_n_layers(best, figure)
    color = {**_by_run(runs)["color"], "legend": None} if name_runs else {"value": runs[0].color}
    diamond = {"shape": "diamond", "filled": True, "size": 170, "opacity": 1}
    layers.append(layer(points, "point", diamond, **at, tooltip=[tip("run"), *_tips(figure)], color=color))
    layers += _interval_layers(points, figure, color)
    labels = [{**point, "label": point["run"] if name_runs else "PPO"} for point in points]
    layers.append(_labels(labels, figure, above=False))
    prompts, every = found[0][1]["prompts"], found[0][1].get("of_prompts", 0)
    note = f"{prompts}{f' of the {every}' if prompts < every else ''} prompts; line: best-of-n, diamond: PPO, better "
    note += "if above the line"
    if any(best.get("tilt_curve") for _, best in found):
        note += "; dashed: the best policy for the score, as far as the samples suffice to estimate it"
    return _chart("frontier", runs, figure, f"{figure.capitalize()} beside best-of-n", note, layers)


def _best_of_n_layers(best: dict[str, Any], figure: str) -> list[dict[str, Any]]:
    """Best-of-n with its interval, and the exponential tilt."""
    rows = [
        {"kl": max(0.0, row["kl"]), "value": row[figure]["value"], "label": f"best of {row['n']}"}
        | {key: row[figure][key] for key in ("low", "high") if key in row[figure]}
        for row in best["rows"]
    ]
    tilt = [{"kl": row["kl"], "value": row[figure]} for row in best.get("tilt_curve", []) if figure in row]
    at = {"x": KL_CHANNEL, "y": _value(figure)}
    band = {"x": KL_CHANNEL, "y": {**at["y"], "field": "low"}, "y2": {"field": "high"}}
    line = {"strokeWidth": 1.5, "color": GRAY, "point": {"filled": True, "size": 30, "color": GRAY}}
    dashed = {"strokeWidth": 1.5, "strokeDash": [5, 4], "color": GRAY}
    return [
        layer(rows, "area", {"opacity": 0.2, "color": GRAY}, **band),
        *([layer(tilt, "line", dashed, **at)] if tilt else []),
        layer(rows, "line", line, **at, tooltip=[tip("label", "policy"), *_tips(figure)]),
        _labels(rows[-1:], figure, above=True),
    ]


def frontier_charts(runs: Sequence[RunData]) -> list[Chart]:
    """What each setting reached, and at what KL: a chart per figure that at least two finished PPO runs have."""
    settings = settings_of(runs)
    finals = {run.name: manifest.metrics for run in runs if (manifest := _manifest(run)) is not None}
    charts = []
    for figure in ("score", "gold"):
        key = FIGURES[figure]
        rows = [
            {"setting": settings[name], "run": name, "kl": metrics["ppo/kl"], "value": metrics[f"ppo/{key}"]}
            for name, metrics in finals.items()
            if {"ppo/kl", f"ppo/{key}"} <= metrics.keys()
        ]
        if len(rows) < 2:
            continue
        groups = {name: [row for row in rows if row["setting"] == name] for name in dict.fromkeys(settings.values())}
        line = [
            {"setting": name, "kl": fmean(row["kl"] for row in group), "value": fmean(row["value"] for row in group)}
            for name, group in groups.items()
            if group
        ]
        starts = [finals[row["run"]][f"sft/{key}"] for row in rows if f"sft/{key}" in finals[row["run"]]]
        if starts:
            line.insert(0, {"setting": "SFT", "kl": 0.0, "value": fmean(starts)})
        at = {
            "x": number("kl", title="KL to the SFT model, nats"),
            "y": number("value", title=figure, scale={"zero": False}),
        }
        shape = {"field": "setting", "type": "nominal", "sort": None, "legend": None}
        color = {**_by_run(runs)["color"], "legend": None}
        tips = [tip("run"), tip("setting"), tip("kl", format=".2f"), tip("value", figure, ".3f")]
        text = {"align": "left", "dx": 7, "dy": -7}
        layers = [
            layer(line, "line", {"color": GRAY, "strokeDash": [5, 4]}, **at, order={"field": "kl"}),
            layer(rows, "point", {"size": 60, "strokeWidth": 2}, **at, tooltip=tips, color=color, shape=shape),
            layer(line, "text", text, **at, text={"field": "setting"}),
        ]
        title, note = (
            f"{figure.capitalize()} against KL, all runs",
            "a point per run, a shape per setting; dashed: the means of the settings",
        )
        charts.append(Chart(f"frontier-{figure}", DISTANCE, title, note, {"$schema": SCHEMA, "layer": layers}))
    return charts


def settings_of(runs: Sequence[RunData]) -> dict[str, str]:
    """Run -> the keys and values that tell its PPO config from the other runs' configs, without the seed."""
    configs = {
        run.name: flat(manifest.identity["config"]) if (manifest := _manifest(run)) is not None else {} for run in runs
    }
    every = dict.fromkeys(key for config in configs.values() for key in config if key != "seed")
    differing = [key for key in every if len({repr(config.get(key)) for config in configs.values()}) > 1]
    if not 0 < len(differing) <= MOST_KEYS:
        return {run.name: run.name if differing else "all runs" for run in runs}
    return {
        name: ", ".join(f"{key.rpartition('.')[2]} {config.get(key)}" for key in differing)
        for name, config in configs.items()
    }


def _manifest(run: RunData) -> Any:
    """The manifest of PPO; None if it is not finished."""
    return run.stages["ppo"].manifest if "ppo" in run.stages else None


def _interval_layers(points: list[dict[str, Any]], figure: str, color: dict[str, Any]) -> list[dict[str, Any]]:
    """A rule over the interval of each point that has one."""
    rows = [point for point in points if "low" in point and "high" in point]
    ends = {"y": {**_value(figure), "field": "low"}, "y2": {"field": "high"}}
    return [layer(rows, "rule", {"strokeWidth": 2}, x=KL_CHANNEL, **ends, color=color)] if rows else []


def _by_run(runs: Sequence[RunData]) -> dict[str, Any]:
    return by_name("run", {run.name: run.color for run in runs})


def _value(figure: str) -> dict[str, Any]:
    return number("value", title=figure, scale={"zero": False}, axis={"tickCount": 5})


def _tips(figure: str) -> list[dict[str, Any]]:
    return [tip("kl", "KL", ".2f"), tip("value", figure, ".3f")]


def _labels(rows: list[dict[str, Any]], figure: str, *, above: bool) -> dict[str, Any]:
    """Texts that end at their points, so that the last one stays inside the chart."""
    style = {"fontSize": 11, "align": "right", "dy": -13 if above else 17, "dx": 6}
    return layer(rows, "text", style, x=KL_CHANNEL, y=_value(figure), text={"field": "label"})


def _chart(
    kind: str, runs: Sequence[RunData], figure: str, title: str, note: str, layers: list[dict[str, Any]]
) -> Chart:
    names = "-".join(run.name for run in runs)
    return Chart(f"{kind}-{figure}-{names}", DISTANCE, title, note, {"$schema": SCHEMA, "layer": layers})
