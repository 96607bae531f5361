"""Score and gold against KL over several runs: what each setting reached, and at what distance from SFT."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rlhf_cli.artifacts import flat
from rlhf_cli.report.chart import GRAY, SCHEMA, Chart
from rlhf_cli.report.read import RunData, run_scale

FIGURES = {"score": "score_mean", "gold": "gold"}
"""Title of a chart, and its metric among the final figures of PPO and SFT."""
MOST_KEYS = 3
"""A setting is named by the keys that differ if they are at most this many, else by the run's name."""


def frontier_charts(runs: Sequence[RunData]) -> list[Chart]:
    """A chart per figure that at least two finished PPO runs have."""
    settings = settings_of(runs)
    charts = []
    for figure, metric in FIGURES.items():
        rows, starts = [], []
        for run in runs:
            manifest = run.stages["ppo"].manifest if "ppo" in run.stages else None
            metrics = manifest.metrics if manifest is not None else {}
            if f"ppo/{metric}" in metrics and "ppo/kl" in metrics:
                point = {"kl": metrics["ppo/kl"], "value": metrics[f"ppo/{metric}"]}
                rows.append({"setting": settings[run.name], "run": run.name, **point})
                starts += [metrics[f"sft/{metric}"]] if f"sft/{metric}" in metrics else []
        if len(rows) > 1:
            charts.append(_chart(figure, rows, fmean(starts) if starts else None, run_scale(runs)))
    return charts


def settings_of(runs: Sequence[RunData]) -> dict[str, str]:
    """Run -> what tells its PPO config from those of the other runs, without the seed."""
    keys: dict[str, dict[str, Any]] = {}
    for run in runs:
        manifest = run.stages["ppo"].manifest if "ppo" in run.stages else None
        config = flat(manifest.identity["config"]) if manifest is not None else {}
        keys[run.name] = {key: value for key, value in config.items() if key != "seed"}
    every = dict.fromkeys(key for config in keys.values() for key in config)
    differing = [key for key in every if len({repr(config.get(key)) for config in keys.values()}) > 1]
    if not 0 < len(differing) <= MOST_KEYS:
        return {run.name: run.name if differing else "all runs" for run in runs}
    return {
        name: ", ".join(f"{key.rpartition('.')[2]} {config.get(key)}" for key in differing)
        for name, config in keys.items()
    }


def _chart(figure: str, rows: list[dict[str, Any]], start: float | None, by_run: dict[str, list[str]]) -> Chart:
    by_setting: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_setting.setdefault(row["setting"], []).append(row)
    means = [
        {"setting": name, "kl": fmean(row["kl"] for row in group), "value": fmean(row["value"] for row in group)}
        for name, group in by_setting.items()
    ]
    line = [{"setting": "SFT", "kl": 0.0, "value": start}, *means] if start is not None else means
    x = {"field": "kl", "type": "quantitative", "title": "KL to the SFT model, nats"}
    y = {"field": "value", "type": "quantitative", "title": figure, "scale": {"zero": False}}
    tooltip = [
        {"field": "run"},
        {"field": "setting"},
        {"field": "kl", "type": "quantitative", "format": ".2f"},
        {"field": "value", "type": "quantitative", "title": figure, "format": ".3f"},
    ]

    def layer(values: list[dict[str, Any]], mark: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"data": {"values": values}, "mark": mark, "encoding": {"x": x, "y": y, **more}}

    shape = {"field": "setting", "type": "nominal", "sort": None, "legend": None}
    color = {**shape, "field": "run", "scale": by_run}
    layers = [
        layer(line, {"type": "line", "color": GRAY, "strokeDash": [5, 4]}, order={"field": "kl"}),
        layer(rows, {"type": "point", "size": 60, "strokeWidth": 2}, tooltip=tooltip, color=color, shape=shape),
        layer(line, {"type": "text", "align": "left", "dx": 7, "dy": -7}, text={"field": "setting"}),
    ]
    spec = {"$schema": SCHEMA, "layer": layers}
    note = "a point per run, a shape per setting; dashed: the means of the settings"
    return Chart(f"frontier-{figure}", "distance", f"{figure.capitalize()} against KL, all runs", note, spec)
