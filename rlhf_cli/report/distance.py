"""Score and gold against the KL to the SFT model: along the run, and beside best-of-n. Several runs share a chart."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rlhf_cli.report.chart import GRAY, HELD_OUT_COLOR, LEGEND, SCHEMA, Chart
from rlhf_cli.report.read import RunData, evaluations_of, run_scale

SECTION = "distance"
KEYS = {"score": "score_mean", "gold": "gold"}
"""Figure -> its key in a stage's own evaluations."""
FIT_POINTS = 60
X = {
    "field": "kl",
    "type": "quantitative",
    "title": "KL to the SFT model, nats (square-root scale)",
    "scale": {"type": "sqrt", "nice": False},
    "axis": {"tickCount": 6, "labelOverlap": True},
}


def distance_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Gold and score along the runs, then beside best-of-n. Runs share a chart if the figure means the same in them."""
    charts = []
    for figure in ("gold", "score"):
        for chart in (path_chart, frontier_chart):
            for group in comparable(runs, figure):
                charts.append(chart(group, figure, name_runs=len(runs) > 1))
    return [chart for chart in charts if chart is not None]


def comparable(runs: Sequence[RunData], figure: str) -> list[list[RunData]]:
    """The runs in groups in which the figure has one meaning: the same rewards, or the same judge."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        if (stage := run.stages.get("ppo")) is None:
            continue
        identity = stage.manifest.identity if stage.manifest is not None else {}
        config, meaning = identity.get("config", {}), [config_of(identity, "evaluation", "gold")]
        if figure == "score":
            inputs = {name: digest for name, digest in identity.get("inputs", {}).items() if name.startswith("rewards")}
            meaning = [config.get("rewards"), inputs]
        groups.setdefault(json.dumps(meaning, sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def config_of(identity: dict[str, Any], *keys: str) -> Any:
    """A nested value of a manifest's config; None if a key is missing."""
    value: Any = identity.get("config", {})
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def path_points(run: RunData, figure: str) -> list[dict[str, Any]]:
    """A figure on the held-out prompts along the run, from the SFT model on: `step`, `kl`, `value`, `low`, `high`."""
    stage = run.stages.get("ppo")
    if stage is None:
        return []
    key = KEYS[figure]
    return [
        {"run": run.name, "step": row.get("step", 0), "kl": max(0.0, row["kl"]), "value": row[key]}
        | {end: row[name] for end in ("low", "high") if isinstance(row.get(name := f"{key}_{end}95"), int | float)}
        for row in evaluations_of(stage)
        if isinstance(row.get(key), int | float) and isinstance(row.get("kl"), int | float)
    ]


def path_chart(runs: Sequence[RunData], figure: str, *, name_runs: bool) -> Chart | None:
    """A figure against the KL along each run, and for gold the fit of Gao et al. 2023."""
    paths = [rows for run in runs if len(rows := path_points(run, figure)) >= 3]
    if not paths:
        return None
    y = _value(figure)
    tooltip = [{"field": "run"}, {"field": "step", "title": "iteration"}, *_tooltip(figure)]
    line = {"type": "line", "strokeWidth": 2, "point": {"filled": True, "size": 40}}
    by_run = _by_run(runs) if name_runs else {"color": {"value": HELD_OUT_COLOR}}
    encoding = {"x": X, "y": y, "order": {"field": "step"}, "tooltip": tooltip, **by_run}
    layers: list[dict[str, Any]] = []
    fits = [row for run in runs for row in fit_points(run)] if figure == "gold" else []
    if fits:
        dotted = {"type": "line", "strokeWidth": 1.5, "strokeDash": [1, 3], "color": GRAY}
        detail = {"x": X, "y": y, "detail": {"field": "run"}}
        layers.append({"data": {"values": fits}, "mark": dotted, "encoding": detail})
    points = [row for rows in paths for row in rows]
    layers += _interval_layers(points, y, {**by_run["color"], "legend": None} if name_runs else by_run["color"])
    layers.append({"data": {"values": points}, "mark": line, "encoding": encoding})
    if not name_runs:
        layers.append(_labels([{**paths[0][-1], "label": f"iteration {paths[0][-1]['step']:g}"}], y, above=False))
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


def frontier_chart(runs: Sequence[RunData], figure: str, *, name_runs: bool) -> Chart | None:
    """Score or gold against KL: best-of-n of the SFT model as a line, each PPO policy as a diamond."""
    found = [(run, best) for run in runs if (best := run.stages["ppo"].evaluation.get("best_of_n"))]
    found = [(run, best) for run, best in found if figure in best["rows"][0] and figure in best.get("ppo", {})]
    if not found:
        return None
    y, points, layers = _value(figure), [], []
    drawn: list[Any] = []
    for run, best in found:
        same = best.get("at_ppo_kl", {}).get("ppo", {}).get(figure, {})
        own = {"run": run.name, "kl": best["ppo"]["kl"], "value": best["ppo"][figure]}
        points.append({**own, **{key: same[key] for key in ("low", "high") if key in same}})
        if best["rows"] not in drawn:
            drawn.append(best["rows"])
            layers += _best_of_n_layers(best, figure, y)
    tooltip = [{"field": "run"}, *_tooltip(figure)]
    diamond = {"type": "point", "shape": "diamond", "filled": True, "size": 170, "opacity": 1}
    color = {**_by_run(runs)["color"], "legend": None} if name_runs else {"value": runs[0].color}
    encoding = {"x": X, "y": y, "tooltip": tooltip, "color": color}
    layers.append({"data": {"values": points}, "mark": diamond, "encoding": encoding})
    layers += _interval_layers(points, y, color)
    labels = [{**point, "label": point["run"] if name_runs else "PPO"} for point in points]
    layers.append(_labels(labels, y, above=False))
    prompts, every = found[0][1]["prompts"], found[0][1].get("of_prompts", 0)
    note = f"{prompts}{f' of the {every}' if prompts < every else ''} prompts; line: best-of-n"
    if any(best.get("tilt_curve") for _, best in found):
        note += "; dashed: the best policy for the score, as far as the samples suffice to estimate it"
    return _chart("frontier", runs, figure, f"{figure.capitalize()} beside best-of-n", note, layers)


def _best_of_n_layers(best: dict[str, Any], figure: str, y: dict[str, Any]) -> list[dict[str, Any]]:
    """Best-of-n with its interval, and the exponential tilt."""
    rows = [
        {"kl": max(0.0, row["kl"]), "value": row[figure]["value"], "label": f"best of {row['n']}"}
        | {key: row[figure][key] for key in ("low", "high") if key in row[figure]}
        for row in best["rows"]
    ]
    tilt = [{"kl": row["kl"], "value": row[figure]} for row in best.get("tilt_curve", []) if figure in row]
    tooltip = [{"field": "label", "title": "policy"}, *_tooltip(figure)]
    band = {"x": X, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    line = {"type": "line", "strokeWidth": 1.5, "color": GRAY, "point": {"filled": True, "size": 30, "color": GRAY}}
    dashed = {"type": "line", "strokeWidth": 1.5, "strokeDash": [5, 4], "color": GRAY}
    return [
        {"data": {"values": rows}, "mark": {"type": "area", "opacity": 0.2, "color": GRAY}, "encoding": band},
        *([{"data": {"values": tilt}, "mark": dashed, "encoding": {"x": X, "y": y}}] if tilt else []),
        {"data": {"values": rows}, "mark": line, "encoding": {"x": X, "y": y, "tooltip": tooltip}},
        _labels(rows[-1:], y, above=True),
    ]


def _interval_layers(points: list[dict[str, Any]], y: dict[str, Any], color: dict[str, Any]) -> list[dict[str, Any]]:
    """A rule over the interval of each point that has one."""
    rows = [point for point in points if "low" in point and "high" in point]
    encoding = {"x": X, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": color}
    mark = {"type": "rule", "strokeWidth": 2}
    return [{"data": {"values": rows}, "mark": mark, "encoding": encoding}] if rows else []


def _by_run(runs: Sequence[RunData]) -> dict[str, Any]:
    channel = {"field": "run", "type": "nominal", "sort": None, "legend": {**LEGEND, "symbolType": "stroke"}}
    scale = run_scale(runs)
    dash = {**channel, "scale": {"domain": scale["domain"]}}  # else it gets a legend of its own
    return {"color": {**channel, "scale": scale}, "strokeDash": dash}


def _value(figure: str) -> dict[str, Any]:
    axis = {"tickCount": 5}
    return {"field": "value", "type": "quantitative", "title": figure, "scale": {"zero": False}, "axis": axis}


def _tooltip(figure: str) -> list[dict[str, Any]]:
    return [
        {"field": "kl", "type": "quantitative", "title": "KL", "format": ".2f"},
        {"field": "value", "type": "quantitative", "title": figure, "format": ".3f"},
    ]


def _labels(rows: list[dict[str, Any]], y: dict[str, Any], *, above: bool) -> dict[str, Any]:
    """Texts that end at their points, so that the last one stays inside the chart."""
    mark = {"type": "text", "fontSize": 11, "align": "right", "dy": -13 if above else 17, "dx": 6}
    return {"data": {"values": rows}, "mark": mark, "encoding": {"x": X, "y": y, "text": {"field": "label"}}}


def _chart(
    kind: str, runs: Sequence[RunData], figure: str, title: str, note: str, layers: list[dict[str, Any]]
) -> Chart:
    names = "-".join(run.name for run in runs)
    return Chart(f"{kind}-{figure}-{names}", SECTION, title, note, {"$schema": SCHEMA, "layer": layers})
