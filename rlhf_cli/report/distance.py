"""Score and gold against the KL to the SFT model: along a run, beside best-of-n, and of all runs together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rlhf_cli.report.chart import GRAY, HELD_OUT_COLOR, SCHEMA, Chart, by_name, layer, number, tip
from rlhf_cli.report.read import RunData, meaning_of
from rlhf_cli.run.artifacts import flat

SECTION = "distance"
KEYS = {"gold": "gold", "score": "score_mean"}
"""Figure -> its key in a stage's own evaluations and, behind the policy's name, among its final metrics."""
FIT_POINTS = 60
MOST_KEYS = 3
"""A setting is named by the keys that differ if they are at most this many, else by the run's name."""
X = number(
    "kl",
    title="KL to the SFT model, nats (square-root scale)",
    scale={"type": "sqrt", "nice": False},
    axis={"tickCount": 6, "labelOverlap": True},
)


def distance_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Gold and score along the runs, then beside best-of-n. Runs share a chart if the figure means the same in them."""
    charts = [
        chart(group, figure, name_runs=len(runs) > 1)
        for figure in KEYS
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
    stage, key = run.stages.get("ppo"), KEYS[figure]
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
    at = {"x": X, "y": _value(figure)}
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
    at = {"x": X, "y": _value(figure)}
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
    note = f"{prompts}{f' of the {every}' if prompts < every else ''} prompts; line: best-of-n"
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
    at = {"x": X, "y": _value(figure)}
    band = {"x": X, "y": {**at["y"], "field": "low"}, "y2": {"field": "high"}}
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
        key = KEYS[figure]
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
        charts.append(Chart(f"frontier-{figure}", SECTION, title, note, {"$schema": SCHEMA, "layer": layers}))
    return charts


def settings_of(runs: Sequence[RunData]) -> dict[str, str]:
    """Run -> what tells its PPO config from those of the other runs, without the seed."""
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
    return [layer(rows, "rule", {"strokeWidth": 2}, x=X, **ends, color=color)] if rows else []


def _by_run(runs: Sequence[RunData]) -> dict[str, Any]:
    return by_name("run", {run.name: run.color for run in runs})


def _value(figure: str) -> dict[str, Any]:
    return number("value", title=figure, scale={"zero": False}, axis={"tickCount": 5})


def _tips(figure: str) -> list[dict[str, Any]]:
    return [tip("kl", "KL", ".2f"), tip("value", figure, ".3f")]


def _labels(rows: list[dict[str, Any]], figure: str, *, above: bool) -> dict[str, Any]:
    """Texts that end at their points, so that the last one stays inside the chart."""
    style = {"fontSize": 11, "align": "right", "dy": -13 if above else 17, "dx": 6}
    return layer(rows, "text", style, x=X, y=_value(figure), text={"field": "label"})


def _chart(
    kind: str, runs: Sequence[RunData], figure: str, title: str, note: str, layers: list[dict[str, Any]]
) -> Chart:
    names = "-".join(run.name for run in runs)
    return Chart(f"{kind}-{figure}-{names}", SECTION, title, note, {"$schema": SCHEMA, "layer": layers})
