"""The charts of a report: Vega-Lite specifications, drawn by the page in a browser and by `--png`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
"""Names the language of a specification; nothing is fetched from there."""
LEGEND = {"title": None, "orient": "top", "symbolOpacity": 1}
COLORS = [f"var(--series-{i})" for i in range(1, 7)]
"""Colours of runs, defined in page.css for light and dark. A picture takes PICTURE_COLORS.

A page about one run has one meaning for each colour: the first is for what was trained, a stage's figures in training
and the PPO policy, the second for figures on held-out rows. GRAY is for what PPO is compared with: the SFT model,
best-of-n of it, a target.
"""
TRAINING, HELD_OUT_COLOR = COLORS[:2]
WARNING, GRAY, BETTER, WORSE = "var(--warning)", "var(--soft)", "var(--better)", "var(--worse)"
INK = "var(--ink)"
PICTURE_COLORS = {
    **dict(zip(COLORS, ["#1d4ed8", "#0f766e", "#7e22ce", "#a16207", "#0369a1", "#78350f"], strict=True)),
    WARNING: "#c2410c",
    GRAY: "#5d5a56",
    BETTER: "#15803d",
    WORSE: "#be185d",
}
HELD_OUT = "held out"
"""Name of a series of held-out figures: few points, which are marked and never smoothed."""
SETTING = "setting"
"""Name of a series that is no measurement, such as a learning rate, and is never smoothed."""


@dataclass(frozen=True)
class Curve:
    """A chart of one or two metrics over the steps of a stage."""

    stage: str
    title: str
    metrics: dict[str, str]
    """Metric -> its name in the legend."""
    note: str
    is_share: bool = False
    """The values are between 0 and 1."""
    target: str = ""
    """The config key of the value that the metric is steered to."""


CURVES = (
    Curve("sft", "SFT loss", {"loss/sft": "training", "eval/loss": HELD_OUT}, "nats per target token"),
    Curve("sft", "SFT token accuracy", {"eval/token_accuracy": HELD_OUT}, "share of target tokens"),
    Curve("sft", "SFT gradient norm", {"sft/grad_norm": "training"}, "before clipping"),
    Curve("sft", "SFT learning rate", {"sft/learning_rate": SETTING}, "of the step"),
    Curve("rm", "RM loss", {"loss/rm": "training", "eval/loss": HELD_OUT}, "per pair or answer"),
    Curve("rm", "RM accuracy", {"rm/accuracy": "training", "eval/accuracy": HELD_OUT}, "chance is 0.5"),
    Curve("rm", "RM gradient norm", {"rm/grad_norm": "training"}, "before clipping"),
    Curve("rm", "RM learning rate", {"rm/learning_rate": SETTING}, "of the step"),
    Curve("ppo", "Score", {"objective/score": "training"}, "of the rewards, after normalization"),
    Curve("ppo", "Gold score on held-out prompts", {"eval:gold": HELD_OUT}, "the judge of evaluation.gold"),
    Curve("ppo", "KL to the SFT model", {"objective/kl": "training"}, "nats per reply", target="ppo.kl_target"),
    Curve("ppo", "KL coefficient", {"objective/kl_coef": SETTING}, "what a nat costs in score"),
    Curve("ppo", "Reply length", {"response/length": "training"}, "tokens"),
    Curve("ppo", "Entropy", {"policy/entropy": "training"}, "nats per token"),
    Curve("ppo", "Replies that ended", {"response/eos_fraction": "training"}, "share", is_share=True),
    Curve("ppo", "Diversity", {"response/distinct_2": "training"}, "share of different word pairs"),
    Curve("ppo", "Unfamiliar replies", {"response/unfamiliarity": "training"}, "1: as far as a single SFT reply"),
    Curve("ppo", "Clipped ratios", {"policy/clip_fraction": "training"}, "share of tokens"),
    Curve("ppo", "Explained variance", {"value/explained_variance": "training"}, "of the returns, by the value model"),
    Curve("ppo", "Gradient norm", {"policy/grad_norm": "training"}, "of the policy, before clipping"),
    Curve("ppo", "Learning rate", {"policy/learning_rate": SETTING}, "of the policy"),
)
_METRICS = dict.fromkeys(name for curve in CURVES for name in curve.metrics if ":" not in name)
METRICS = (*_METRICS, *(name.replace("eval/", "validation/") for name in _METRICS if name.startswith("eval/")))
"""Their metrics, of validation rows too. The others of a long run would only take time to read."""


@dataclass(frozen=True)
class Chart:
    """A specification, its title, and the section of the page that shows it."""

    id: str
    section: str
    title: str
    note: str
    spec: dict[str, Any]
    is_curve: bool = False
    """A curve over steps: the page's smoothing and logarithmic scale apply to it."""
    run: str = ""
    """The run that it shows; empty for a chart of all runs."""


# ------------------------------------------------------------------------------------ parts of a specification


def layer(rows: Sequence[dict[str, Any]], mark: str, style: dict[str, Any], **encoding: Any) -> dict[str, Any]:
    """Rows drawn as marks of one kind, in a style."""
    return {"data": {"values": rows}, "mark": {"type": mark, **style}, "encoding": encoding}


def number(field: str, **more: Any) -> dict[str, Any]:
    """The channel of a number."""
    return {"field": field, "type": "quantitative", **more}


def tip(field: str, title: str = "", format: str = "") -> dict[str, Any]:
    """A line of a tooltip. With a format it is a number."""
    named = {"field": field, "title": title} if title else {"field": field}
    return {**named, "type": "quantitative", "format": format} if format else named


def by_name(field: str, colors: Mapping[str, str], also: str = "strokeDash") -> dict[str, Any]:
    """The channels that tell names apart, under one legend: each has its colour, and a dash or shape of its own."""
    symbol = {"symbolType": "stroke"} if also == "strokeDash" else {}
    channel = {"field": field, "type": "nominal", "sort": None, "legend": {**LEGEND, **symbol}}
    return {
        "color": {**channel, "scale": {"domain": list(colors), "range": list(colors.values())}},
        also: {**channel, "scale": {"domain": list(colors)}},  # else it gets a legend of its own
    }
