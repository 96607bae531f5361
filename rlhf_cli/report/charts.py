"""The charts of a report: the figures of `rlhf eval`, the curves of a run, and score and gold against the KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rlhf_cli.health.recap import unit_of
from rlhf_cli.report.run_data import COLORS, CURVES, HELD_OUT, SETTING, Curve, RunData, StageData, config_of, meaning_of
from rlhf_cli.run.artifacts import flat

TRAINING, HELD_OUT_COLOR = COLORS[:2]
WARNING, GRAY, BETTER, WORSE = "var(--warning)", "var(--soft)", "var(--better)", "var(--worse)"
INK = "var(--ink)"
MOST_SCATTER = 1000


@dataclass(frozen=True)
class Chart:
    """A specification in Vega-Lite, its title, and the section of the page that shows it."""

    id: str
    section: str
    title: str
    note: str
    spec: dict[str, Any]
    run: str = ""  # the run that it shows; empty for a chart of all runs


def layer(rows: Sequence[dict[str, Any]], mark: str, style: dict[str, Any], **encoding: Any) -> dict[str, Any]:
    return {"data": {"values": rows}, "mark": {"type": mark, **style}, "encoding": encoding}


def number(field: str, **more: Any) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", **more}


def tip(field: str, title: str = "", format: str = "") -> dict[str, Any]:
    """A line of a tooltip. With a format it is a number."""
    named = {"field": field, "title": title} if title else {"field": field}
    return {**named, "type": "quantitative", "format": format} if format else named


def by_name(field: str, colors: Mapping[str, str], also: str = "strokeDash") -> dict[str, Any]:
    """The channels that tell names apart, under one legend: each has its colour, and a dash or shape of its own."""
    symbol = {"symbolType": "stroke"} if also == "strokeDash" else {}
    legend = {"title": None, "orient": "top", "symbolOpacity": 1, **symbol}
    channel = {"field": field, "type": "nominal", "sort": None, "legend": legend}
    return {
        "color": {**channel, "scale": {"domain": list(colors), "range": list(colors.values())}},
        also: {**channel, "scale": {"domain": list(colors)}},  # else it gets a legend of its own
    }


# ------------------------------------------------------------------------------------------- figures of `rlhf eval`


def evaluation_charts(run: RunData) -> list[Chart]:
    rm, ppo = ((run.stages[stage].evaluation if stage in run.stages else {}) for stage in ("rm", "ppo"))
    replies = [
        {"side": label, "tokens": row[side]["length"], "score": row[side]["score"]}
        for row in ppo.get("replies", [])
        for side, label in (("sft", "SFT"), ("ppo", "PPO"))
    ]
    sides = {label: [row["score"] for row in replies if row["side"] == label] for label in ("SFT", "PPO")}
    note = "one reply to each held-out prompt; score = (raw - score_mean) / score_std of a reward model"
    found = [
        _reliability([bin for bin in rm.get("reliability", []) if bin.get("count")]),
        _histogram(
            run, "scores", "rm", "Scores of held-out answers", "raw scores of the reward model", rm.get("scores", {})
        ),
        _histogram(run, "policy-scores", "ppo", "Scores of replies", note, sides),
        _lengths(replies[: 2 * MOST_SCATTER], run),
    ]
    return [replace(chart, id=f"{run.name}-{chart.id}", run=run.name) for chart in found if chart is not None]


def _reliability(bins: list[dict[str, Any]]) -> Chart | None:
    if not bins:
        return None
    rows = [{"stated": bin["confidence"], "true": bin["frequency"], "pairs": bin["count"]} for bin in bins]
    at = {
        "x": number("stated", title="stated confidence", scale={"domain": [0.5, 1]}),
        "y": number("true", title="how often it is right", scale={"domain": [0, 1]}),
    }
    size = number("pairs", legend=None, scale={"range": [10, 200]})
    tips = [tip(name, format=".3~g") for name in ("stated", "true", "pairs")]
    layers = [
        layer([{"stated": x, "true": x} for x in (0.5, 1)], "line", {"strokeDash": [4, 4], "color": GRAY}, **at),
        layer(rows, "line", {"strokeWidth": 2, "color": HELD_OUT_COLOR}, **at),
        layer(rows, "circle", {"opacity": 0.9, "color": HELD_OUT_COLOR}, **at, size=size, tooltip=tips),
    ]
    return Chart("reliability", "rm", "Calibration", "dashed: confidence comes true", {"layer": layers})


def side_colors(run: RunData, sides: Sequence[str]) -> dict[str, str]:
    """The colours of SFT, PPO (the colour of its run), better and worse answers, and other held-out rows."""
    colors = {"SFT": GRAY, "PPO": run.color, "better": BETTER, "worse": WORSE}
    return {side: colors.get(side, HELD_OUT_COLOR) for side in sides}


def _histogram(
    run: RunData, name: str, stage: str, title: str, note: str, sides: Mapping[str, Sequence[float]]
) -> Chart | None:
    """The share of each side's scores in each interval: better and worse answers, or replies of policies."""
    rows = [
        {"side": side, "score": [float(f"{x:.4g}") for x in scores if math.isfinite(x)]}
        for side, scores in sides.items()
    ]
    if not any(row["score"] for row in rows):
        return None
    share = [{"calculate": "1 / datum.score.length", "as": "share"}, {"flatten": ["score"]}]
    x = number("score", title="score", bin={"maxbins": 24})
    y = number("share", title="share", aggregate="sum", stack=None, axis={"format": "%"})
    named = by_name("side", side_colors(run, list(sides)))  # the outlines tell the sides apart without colour
    look = {name: {**one, "legend": {**one["legend"], "symbolType": "square"}} for name, one in named.items()}
    style, tips = {"opacity": 0.5, "binSpacing": 0, "stroke": INK}, [tip("side"), x, {**y, "format": ".1%"}]
    bars = layer(rows, "bar", style, x=x, y=y, **look, tooltip=tips)
    return Chart(name, stage, title, note, {"transform": share, **bars})


def _lengths(rows: list[dict[str, Any]], run: RunData) -> Chart | None:
    if not rows:
        return None
    at = {name: number(field, scale={"zero": False}) for name, field in (("x", "tokens"), ("y", "score"))}
    tips = [tip("side"), tip("tokens"), tip("score", format=".2f")]
    sides = by_name("side", side_colors(run, ["SFT", "PPO"]), also="shape")
    spec = layer(rows, "point", {"size": 28, "opacity": 0.6}, **at, **sides, tooltip=tips)
    return Chart("length", "ppo", "Score against length", "one point per reply", spec)


# ------------------------------------------------------------------------------- curves over steps, health findings

SMOOTHING = 0.03  # share of a curve's points that its smoothing spans, until the reader of the page chooses another
NEAREST = {"type": "point", "on": "pointerover", "nearest": True, "fields": ["x"], "clear": "pointerout"}
"""The point nearest to the pointer, whose values are shown."""


def step_axis(steps: float, most_ticks: int, **more: Any) -> dict[str, Any]:
    """An axis over so many steps, with ticks at whole ones: Vega's `tickMinStep` allows 1.5 in a run of two steps."""
    ticks = max(1, min(most_ticks, int(steps)))
    return {"tickCount": ticks, "labelOverlap": True, "labelSeparation": 6, **more}


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
        if all(len(one["x"]) < 2 for one in series):
            continue
        findings = [
            {"run": name, "x": finding.steps[0], "name": finding.name, "message": finding.message}
            for name, data in shown.items()
            for finding in data.findings
        ]
        targets = [row for name, data in shown.items() for row in _target(data, curve, name)]
        points = f"; points: {HELD_OUT}" if len({one["series"] for one in series}) > 1 else ""
        note = curve.note + points + (f"; dashed: {curve.target}" if targets else "")
        # A stage that runs share has none of their colours.
        colors = {name: next((run.color for run in runs if run.name == name), GRAY) for name in shown}
        spec = _curve_spec(curve, series, findings, targets, colors if len(runs) > 1 else None)
        name = f"{curve.stage}-{curve.title}".lower().replace(" ", "-")
        charts.append(Chart(name, f"curves-{curve.stage}", curve.title, note, spec))
    return charts


def shared_runs(runs: Sequence[RunData], stage: str) -> dict[str, StageData]:
    """The stage of each run that has it, by the name in the legend: runs with the same finished stage share a curve."""
    groups: list[tuple[StageData, list[str]]] = []
    for run in runs:
        if (data := run.stages.get(stage)) is not None:
            names = next((names for first, names in groups if same_stage(first, data)), None)
            if names is None:
                groups.append((data, names := []))
            names.append(run.name)
    return {
        f"all {len(runs)} runs" if 2 < len(names) == len(runs) else ", ".join(names): first for first, names in groups
    }


def same_stage(one: StageData, other: StageData) -> bool:
    """True for one finished stage that two runs share."""
    return one.manifest is not None and one.manifest == other.manifest


def _points(stage: StageData, metric: str) -> tuple[list[float], list[float]]:
    if metric != "eval:gold":
        watched = metric.replace("eval/", "validation/")  # a run with validation rows has one point of the test rows
        return stage.metrics.get(watched, stage.metrics.get(metric, ([], [])))
    rows = [row for row in stage.evaluations if isinstance(row.get("gold"), int | float)]
    return [row["step"] for row in rows], [row["gold"] for row in rows]


def _target(stage: StageData, curve: Curve, name: str) -> list[dict[str, Any]]:
    """Both ends of the line at the value that the config steers a metric to; empty without one."""
    value = flat(config_of(stage)).get(curve.target) if curve.target else None
    steps = [x for metric in curve.metrics for x in _points(stage, metric)[0]]
    if not isinstance(value, int | float) or not steps:
        return []
    return [{"run": name, "x": x, "target": value} for x in (min(steps), max(steps))]


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
    steps = [x for one in series for x in one["x"]] + [one["x"] for one in findings]
    axis = step_axis(max(steps) - min(steps), 5, grid=False)
    x = number("x", title=unit, axis=axis, scale={"nice": False})
    if runs is not None:
        shared = {"x": x, **by_name("run", runs)}
    else:
        scale = {"domain": ["training", HELD_OUT, SETTING], "range": [TRAINING, HELD_OUT_COLOR, TRAINING]}
        shared = {"x": x, "color": {"field": "series", "type": "nominal", "sort": None, "legend": None, "scale": scale}}

    def y(field: str) -> dict[str, Any]:
        scale = {"domain": [0, 1]} if curve.is_share else {"zero": False, "nice": True}
        return number(field, title=None, scale=scale, axis={"tickCount": 5})

    def line(name: str, *transforms: dict[str, Any], **style: Any) -> dict[str, Any]:
        chosen = [{"filter": {"field": "series", "equal": name}}, *transforms]
        return {"transform": chosen, "mark": {"type": "line", **style}, "encoding": {"y": y("y")}}

    # Local regression has no lag. The page sets the share of the points that each of its lines is fitted to.
    smoothed = {"loess": "y", "on": "x", "groupby": ["run", "series"], "bandwidth": SMOOTHING}
    styles: dict[str, list[dict[str, Any]]] = {
        "training": [line("training", strokeWidth=1, opacity=0.3), line("training", smoothed, strokeWidth=2)],
        SETTING: [line(SETTING, strokeWidth=2)],
        HELD_OUT: [line(HELD_OUT, strokeWidth=1.5, point={"filled": True, "size": 36})],
    }
    names = {one["series"] for one in series}
    layers = [one for name, lines in styles.items() if name in names for one in lines]
    tips = [number("x", title=unit), tip("run"), tip("series"), tip("y", "value", ".4~g")]
    near = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    layers.append(
        {
            "params": [{"name": "near", "select": NEAREST}],
            "mark": {"type": "point", "filled": True, "size": 50},
            "encoding": {"y": y("y"), "tooltip": tips, "opacity": near},
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
    points = {"data": {"values": series}, "transform": [{"flatten": ["x", "y"]}]}
    return {**points, "encoding": shared, "layer": layers}


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
    axis = step_axis(last, 8, grid=True)
    bars = layer(
        rows,
        "bar",
        {"height": 10, "minBandSize": 3, "color": WARNING},
        x=number("start", title=unit_of(stage.stage), scale={"domain": [0, last]}, axis=axis),
        x2={"field": "until"},
        y={"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 130}},
        tooltip=[tip(field) for field in ("name", "start", "end", "message")],
    )
    spec = {"height": 30 + 22 * len({row["name"] for row in rows}), **bars}
    name, note = f"{run.name}-{stage.stage}-findings", "steps after which each held"
    return Chart(name, stage.stage, "Health findings", note, spec, run=run.name)


# --------------------------------------------------------------- score and gold against the KL to the SFT model

DISTANCE = "distance"
FIGURES = {"gold": "gold", "score": "score_mean"}
"""Figure -> its key in a stage's own evaluations and, behind the policy's name, among its final metrics."""
FIT_POINTS = 60
MOST_KEYS = 3  # a setting is named by the keys that differ if they are at most this many, else by the run's name


def _on_kl(
    figure: str,
    rows: Sequence[dict[str, Any]],
    mark: str,
    style: dict[str, Any],
    *,
    ends: bool = False,
    **encoding: Any,
) -> dict[str, Any]:
    """A layer with the `value` of rows, or with `ends` their interval from `low` to `high`, against their `kl`.

    Estimates of a KL near 0 may be negative, and have no square root.
    """
    rows = [{**row, "kl": max(0.0, row["kl"])} for row in rows]
    axis, scale = {"tickCount": 6, "labelOverlap": True}, {"type": "sqrt", "nice": False}
    x = number("kl", title="KL to the SFT model, nats (square-root scale)", scale=scale, axis=axis)
    y = number("low" if ends else "value", title=figure, scale={"zero": False}, axis={"tickCount": 5})
    return layer(rows, mark, style, x=x, y=y, **({"y2": {"field": "high"}} if ends else {}), **encoding)


def _intervals(figure: str, points: Sequence[dict[str, Any]], color: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [point for point in points if {"low", "high"} <= point.keys()]
    return [_on_kl(figure, rows, "rule", {"strokeWidth": 2}, ends=True, color=color)] if rows else []


def _labels(figure: str, rows: Sequence[dict[str, Any]], *, above: bool) -> dict[str, Any]:
    """Texts that end at their points, so that the last one stays inside the chart."""
    style = {"fontSize": 11, "align": "right", "dy": -13 if above else 17, "dx": 6}
    return _on_kl(figure, rows, "text", style, text={"field": "label"})


def _tips(figure: str) -> list[dict[str, Any]]:
    return [tip("kl", "KL", ".2f"), tip("value", figure, ".3f")]


def distance_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Gold and score along the runs, then beside best-of-n.

    Runs share a chart if the figure means the same in them: the same rewards, or the same judge.
    """
    charts = []
    for figure in FIGURES:
        groups: dict[str, list[RunData]] = {}
        for run in runs:
            if (stage := run.stages.get("ppo")) is not None:
                groups.setdefault(meaning_of(stage.manifest, figure), []).append(run)
        for kind, draw in (("path", _path), ("frontier", _beside_best_of_n)):
            for group in groups.values():
                if (drawn := draw(group, figure, name_runs=len(runs) > 1)) is not None:
                    title, note, layers = drawn
                    name = "-".join([kind, figure, *(run.name for run in group)])
                    charts.append(Chart(name, DISTANCE, f"{figure.capitalize()} {title}", note, {"layer": layers}))
    return charts


Drawn = tuple[str, str, list[dict[str, Any]]]
"""The title behind the name of the figure, the note and the layers of a chart."""


def path_points(run: RunData, figure: str) -> list[dict[str, Any]]:
    """A figure on the held-out prompts along the run, from the SFT model on: `step`, `kl`, `value`, `low`, `high`."""
    stage, key = run.stages.get("ppo"), FIGURES[figure]
    return [
        {"run": run.name, "step": row.get("step", 0), "kl": row["kl"], "value": row[key]}
        | {end: row[name] for end in ("low", "high") if isinstance(row.get(name := f"{key}_{end}95"), int | float)}
        for row in (stage.evaluations if stage is not None else [])
        if isinstance(row.get(key), int | float) and isinstance(row.get("kl"), int | float)
    ]


def _path(runs: Sequence[RunData], figure: str, *, name_runs: bool) -> Drawn | None:
    """A figure against the KL along each run, and for gold the fit of Gao et al. 2023."""
    paths = [rows for run in runs if len(rows := path_points(run, figure)) >= 3]
    if not paths:
        return None
    look = _by_run(runs) if name_runs else {"color": {"value": HELD_OUT_COLOR}}
    points, layers = [row for rows in paths for row in rows], []
    if fits := [row for run in runs for row in _fit(run)] if figure == "gold" else []:
        dotted = {"strokeWidth": 1.5, "strokeDash": [1, 3], "color": GRAY}
        layers.append(_on_kl(figure, fits, "line", dotted, detail={"field": "run"}))
    layers += _intervals(figure, points, {**look["color"], "legend": None} if name_runs else look["color"])
    line, tips = {"strokeWidth": 2, "point": {"filled": True, "size": 40}}, [tip("run"), tip("step", "iteration")]
    layers.append(
        _on_kl(figure, points, "line", line, order={"field": "step"}, tooltip=[*tips, *_tips(figure)], **look)
    )
    if not name_runs:
        layers.append(_labels(figure, [{**points[-1], "label": f"iteration {points[-1]['step']:g}"}], above=False))
    note = "held-out prompts, with 95 % intervals" + ("; dotted: fit of Gao et al. 2023" if fits else "")
    return "along the run", note, layers


def _fit(run: RunData) -> list[dict[str, Any]]:
    """Points of the fit ``gold(0) + d (a - b log d)``, d = sqrt(KL), of `rlhf eval`."""
    found = run.stages["ppo"].evaluation.get("gold_curve")
    if not found or not {"start", "a", "b", "points"} <= found.keys():
        return []
    a, b, last = found["a"]["value"], found["b"]["value"], max(point["d"] for point in found["points"])
    grid = [last * (i + 1) / FIT_POINTS for i in range(FIT_POINTS)]
    return [{"run": run.name, "kl": d * d, "value": found["start"] + d * (a - b * math.log(d))} for d in grid]


def _beside_best_of_n(runs: Sequence[RunData], figure: str, *, name_runs: bool) -> Drawn | None:
    """Score or gold against KL: best-of-n of the SFT model as a line, each PPO policy as a diamond."""
    found = [(run, best) for run in runs if (best := run.stages["ppo"].evaluation.get("best_of_n"))]
    found = [(run, best) for run, best in found if figure in best["rows"][0] and figure in best.get("ppo", {})]
    if not found:
        return None
    points, layers = [], []
    drawn: list[Any] = []
    for run, best in found:
        same = best.get("at_ppo_kl", {}).get("ppo", {}).get(figure, {})
        own = {"run": run.name, "kl": best["ppo"]["kl"], "value": best["ppo"][figure]}
        points.append({**own, **_ends(same), "label": run.name if name_runs else "PPO"})
        if best["rows"] in drawn:
            continue
        drawn.append(best["rows"])
        rows = [
            {"kl": row["kl"], "value": row[figure]["value"], "label": f"best of {row['n']}"} | _ends(row[figure])
            for row in best["rows"]
        ]
        layers.append(_on_kl(figure, rows, "area", {"opacity": 0.2, "color": GRAY}, ends=True))
        if tilt := [{"kl": row["kl"], "value": row[figure]} for row in best.get("tilt_curve", []) if figure in row]:
            dashed = {"strokeWidth": 1.5, "strokeDash": [5, 4], "color": GRAY}
            layers.append(_on_kl(figure, tilt, "line", dashed))
        line = {"strokeWidth": 1.5, "color": GRAY, "point": {"filled": True, "size": 30, "color": GRAY}}
        layers.append(_on_kl(figure, rows, "line", line, tooltip=[tip("label", "policy"), *_tips(figure)]))
        layers.append(_labels(figure, rows[-1:], above=True))
    color = {**_by_run(runs)["color"], "legend": None} if name_runs else {"value": runs[0].color}
    diamond = {"shape": "diamond", "filled": True, "size": 170, "opacity": 1}
    layers.append(_on_kl(figure, points, "point", diamond, tooltip=[tip("run"), *_tips(figure)], color=color))
    layers += [*_intervals(figure, points, color), _labels(figure, points, above=False)]
    prompts, every = found[0][1]["prompts"], found[0][1].get("of_prompts", 0)
    note = f"{prompts}{f' of the {every}' if prompts < every else ''} prompts; line: best-of-n, diamond: PPO, better "
    note += "if above the line"
    if any(best.get("tilt_curve") for _, best in found):
        note += "; dashed: the best policy for the score, as far as the samples suffice to estimate it"
    return "beside best-of-n", note, layers


def _ends(figure: Mapping[str, float]) -> dict[str, float]:
    return {end: figure[end] for end in ("low", "high") if end in figure}


def frontier_charts(runs: Sequence[RunData]) -> list[Chart]:
    """A chart per figure that at least two finished PPO runs have: its value and KL in each setting."""
    manifests = {run.name: run.stages["ppo"].manifest for run in runs if "ppo" in run.stages}
    finished = {name: manifest for name, manifest in manifests.items() if manifest is not None}
    settings = _settings({name: flat(manifest.identity["config"]) for name, manifest in finished.items()})
    charts = []
    for figure in ("score", "gold"):
        ours, start = f"ppo/{FIGURES[figure]}", f"sft/{FIGURES[figure]}"
        found = {name: one.metrics for name, one in finished.items() if {"ppo/kl", ours} <= one.metrics.keys()}
        if len(found) < 2:
            continue
        groups: dict[str, list[dict[str, Any]]] = {}
        for name, metrics in found.items():
            row = {"setting": settings[name], "run": name, "kl": metrics["ppo/kl"], "value": metrics[ours]}
            groups.setdefault(settings[name], []).append(row)
        means = [
            {"setting": name, "kl": fmean(row["kl"] for row in rows), "value": fmean(row["value"] for row in rows)}
            for name, rows in groups.items()
        ]
        if starts := [metrics[start] for metrics in found.values() if start in metrics]:
            means.insert(0, {"setting": "SFT", "kl": 0.0, "value": fmean(starts)})
        look: dict[str, Any] = {
            "shape": {"field": "setting", "type": "nominal", "sort": None, "legend": None},
            "color": {**_by_run(runs)["color"], "legend": None},
            "tooltip": [tip("run"), tip("setting"), *_tips(figure)],
        }
        points, text = [row for rows in groups.values() for row in rows], {"align": "left", "dx": 7, "dy": -7}
        layers = [
            _on_kl(figure, means, "line", {"color": GRAY, "strokeDash": [5, 4]}, order={"field": "kl"}),
            _on_kl(figure, points, "point", {"size": 60, "strokeWidth": 2}, **look),
            _on_kl(figure, means, "text", text, text={"field": "setting"}),
        ]
        title = f"{figure.capitalize()} against KL, all runs"
        note = "a point per run, a shape per setting; dashed: the means of the settings"
        charts.append(Chart(f"frontier-{figure}", DISTANCE, title, note, {"layer": layers}))
    return charts


def _settings(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Run -> the keys and values that tell its config from the other runs' configs, without the seed."""
    every = dict.fromkeys(key for config in configs.values() for key in config if key != "seed")
    differing = [key for key in every if len({repr(config.get(key)) for config in configs.values()}) > 1]
    if not 0 < len(differing) <= MOST_KEYS:
        return {name: name if differing else "all runs" for name in configs}
    return {
        name: ", ".join(f"{key.rpartition('.')[2]} {config.get(key)}" for key in differing)
        for name, config in configs.items()
    }


def _by_run(runs: Sequence[RunData]) -> dict[str, Any]:
    return by_name("run", {run.name: run.color for run in runs})
