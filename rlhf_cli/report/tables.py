"""The tables of a report."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rlhf_cli.report.differences import config_differences
from rlhf_cli.report.read import RunData, StageData, evaluations_of

TITLES = {"sft": "SFT", "rm": "Reward model", "ppo": "PPO"}
NAMES = {
    "kl": "KL to SFT, nats",
    "eos_rate": "EOS rate",
    "distinct_1": "distinct words",
    "distinct_2": "distinct word pairs",
    "length": "length, tokens",
    "brier": "Brier score",
    "gold_accuracy": "agreement with the gold scores",
    "longer_wins": "baseline: longer is better",
    "shorter_wins": "baseline: shorter is better",
    "score_length_correlation": "correlation of score and length",
    "length_controlled": "accuracy at equal length",
    "accuracy_longer_is_worse": "accuracy where the longer is worse",
    "accuracy_longer_is_better": "accuracy where the longer is better",
}
INTERVAL = {"value": "", "low": "_low95", "high": "_high95"}
"""Parts of a figure of `rlhf eval`, and how the name of a metric with this part ends."""
ROUNDING = 1e-5
"""A position shift below it is rounding."""
SIDE_BY_SIDE = (
    ("sft", "figures", ("loss",)),
    ("rm", "figures", ("accuracy", "calibration_error")),
    ("ppo", "ppo", ("score", "gold", "kl", "length", "eos_rate", "distinct_2")),
    ("ppo", "win_rate", ("score", "gold")),
)
"""Stage, part of its evaluation and figures of the table of several runs."""


def show(figure: dict[str, Any], digits: int | None = None) -> str:
    """A figure of evaluation.json with its interval, with `digits` after the point or those that it justifies.

    >>> show({"value": 0.925, "low": 0.901, "high": 0.944}), show({"value": 3.0}), show({"value": 7.25, "low": 1.5})
    ('0.93 [0.90, 0.94]', '3', '7.25 [1.5, ∞]')
    """
    if "value" not in figure:
        return "none"
    digits = _digits(figure) if digits is None else digits
    ends = [figure.get("low", -math.inf), figure.get("high", math.inf)]

    def text(number: float) -> str:
        if math.isinf(number):
            return "∞" if number > 0 else "-∞"
        return f"{number:.4g}" if digits is None else f"{number:.{digits}f}"

    interval = "" if all(map(math.isinf, ends)) else f" [{text(ends[0])}, {text(ends[1])}]"
    return f"{text(figure['value'])}{interval}"


def _digits(figure: dict[str, Any]) -> int | None:
    """Digits after the point that a figure's interval justifies; None without an interval, or if an end is infinite."""
    if "low" not in figure or "high" not in figure:
        return None
    width = figure["high"] - figure["low"]
    return 3 if 0 < width < 0.02 else 2 if width < 20 else 0


def _cells(name: str, figures: Sequence[dict[str, Any] | None]) -> list[str]:
    """The cells of a row, with as many digits as its narrowest interval justifies; "" for a missing figure."""
    digits = max((d for figure in figures if figure and (d := _digits(figure)) is not None), default=None)
    if name == "position_shift":
        return ["0 (rounding)" if f and f.get("value", 1) < ROUNDING else show(f, digits) if f else "" for f in figures]
    return ["" if figure is None else show(figure, digits) for figure in figures]


def readable(name: str) -> str:
    """The name of a figure in words. The name of a benchmark's task, before the /, is its own.

    >>> readable("score_p10"), readable("eos_rate"), readable("gold_equal_length"), readable("arc_easy/acc")
    ('score, 10th percentile', 'EOS rate', 'gold, equal length', 'arc_easy/acc')
    """
    if "/" in name:
        return name
    if match := re.fullmatch(r"(.*)_p(\d+)", name):
        return f"{match[1]}, {match[2]}th percentile"
    if name in NAMES:
        return NAMES[name]
    if name.endswith("_equal_length"):
        return f"{name.removesuffix('_equal_length')}, equal length"
    return name.replace("_", " ")


def side_by_side(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Tables of several runs: their figures, and the config keys that differ."""
    rows = []
    for stage, side, names in SIDE_BY_SIDE:
        found = [(run.stages[stage].evaluation if stage in run.stages else {}).get(side, {}) for run in runs]
        for name in names:
            if any(name in figures for figures in found):
                label = f"win rate against SFT by {name}" if side == "win_rate" else readable(name)
                label = f"{TITLES[stage]}: {label}"
                rows.append([label, *(show(figures[name]) if name in figures else "" for figures in found)])
    head = ["", *(run.name for run in runs)]
    tables = [{"title": "Held-out figures", "head": head, "rows": rows}] if rows else []
    manifests = [
        {name: data.manifest for name, data in run.stages.items() if data.manifest is not None} for run in runs
    ]
    if differing := config_differences(manifests):
        tables.append({"title": "Config keys that differ", "head": head, "rows": differing})
    return tables


def tables_of(data: StageData) -> list[dict[str, Any]]:
    """The tables of a stage's evaluation: title, head and rows of texts."""
    found, tables = data.evaluation, []
    sides = {
        "sft": [("before", "before"), ("figures", "SFT"), ("difference", "difference")],
        "rm": [("figures", "value"), ("chance", "chance")],
        "ppo": [("sft", "SFT"), ("ppo", "PPO"), ("difference", "difference")],
    }[data.stage]
    columns = [(key, label) for key, label in sides if key in found]
    if columns:
        names = list(dict.fromkeys(name for key, _ in columns for name in found[key]))
        rows = [[readable(name), *_cells(name, [found[key].get(name) for key, _ in columns])] for name in names]
        tables.append({"title": "Figures", "head": ["", *(label for _, label in columns)], "rows": rows})
    longer = found.get("groups_longer_wins", {})
    for title, group in found.get("groups", {}).items():
        rules = [longer[title]] if title in longer else []
        rows = [
            [name, show(figure), *("0.50" for _ in rules), *(f"{rule[name]['value']:.2f}" for rule in rules)]
            + [f"{figure.get('rows', 0):,}"]
            for name, figure in group.items()
        ]
        head = ["", "accuracy", *(["chance", "longer wins"] if rules else []), "rows"]
        tables.append({"title": f"Accuracy by {title}", "head": head, "rows": rows})
    for title, group in found.get("error_groups", {}).items():
        rows = [[name, show(figure), f"{figure.get('rows', 0):,}"] for name, figure in group.items()]
        tables.append({"title": f"Absolute error by {title}", "head": ["", "error", "rows"], "rows": rows})
    tables += [table for make in (_distributions, _bench) if (table := make(found)) is not None]
    tables += _along(data)
    if "win_rate" in found:
        rows = [[readable(name), show(figure)] for name, figure in found["win_rate"].items()]
        tables.append({"title": "How often PPO's reply is better than SFT's", "head": ["by", "win rate"], "rows": rows})
    if "alignment_tax" in found:
        rows = [["loss on SFT's held-out rows", show(found["alignment_tax"])]]
        tables.append({"title": "Alignment tax", "head": ["", "PPO minus SFT, nats"], "rows": rows})
    best = found.get("best_of_n", {})
    if same := best.get("at_ppo_kl"):
        rows = [
            [name, *(show(same[side][name]) for side in ("best_of_n", "ppo", "difference"))] for name in same["ppo"]
        ]
        head = ["", f"best of {same['n']:.0f}", "PPO", "difference"]
        title = f"PPO and best-of-n at PPO's KL on the same prompts, {best['ppo']['kl']:.2f} nats"
        tables.append({"title": title, "head": head, "rows": rows})
    if best:
        has_gold = "gold" in best["rows"][0]
        rows = [
            [f"best of {row['n']}", show(row["score"]), *([show(row["gold"])] if has_gold else []), f"{row['kl']:.2f}"]
            for row in best["rows"]
        ]
        own = best["ppo"]
        rows.append(["PPO", f"{own['score']:.2f}", *([f"{own['gold']:.2f}"] if has_gold else []), f"{own['kl']:.2f}"])
        head = ["", "score", *(["gold"] if has_gold else []), "KL, nats"]
        number, every = best["prompts"], best.get("of_prompts", best["prompts"])
        which = f"{number} of the {every} prompts" if number < every else f"{number} prompts"
        tables.append({"title": f"Best-of-n of the SFT model, {which}", "head": head, "rows": rows})
    return tables


def _distributions(found: dict[str, Any]) -> dict[str, Any] | None:
    """The raw scores of a reward model on each side."""
    if not (sides := found.get("distributions")):
        return None
    heads = [name for name in next(iter(sides.values())) if name != "rows"]
    rows = [[side, *(f"{row[name]:.2f}" for name in heads), f"{row['rows']:,.0f}"] for side, row in sides.items()]
    return {
        "title": "Raw scores of answers, and of samples of the policies",
        "head": ["", *heads, "rows"],
        "rows": rows,
    }


def _bench(found: dict[str, Any]) -> dict[str, Any] | None:
    """The scores of a reward model on a benchmark, by subset."""
    if not (bench := found.get("bench")):
        return None
    rows = [
        [name, show(figure), f"{bench['chance'][name]:.2f}" if name in bench["chance"] else "", f"{figure['rows']:,}"]
        for name, figure in bench["figures"].items()
    ]
    return {"title": f"Benchmark {bench['file']}", "head": ["subset", "score", "chance", "rows"], "rows": rows}


def _along(data: StageData) -> list[dict[str, Any]]:
    """Score, gold and KL at the evaluations of a run, with their intervals."""
    keys = {"score": "score_mean", "gold": "gold", "KL, nats": "kl"}
    rows = [
        (point["step"], {name: _figure(point, key) for name, key in keys.items() if key in point})
        for point in evaluations_of(data)
    ]
    if not rows:
        return []
    heads = list(rows[0][1])
    cells = [
        [f"{step:,}", *(show(figures[name], 2) if name in figures else "" for name in heads)] for step, figures in rows
    ]
    return [{"title": "Along the run, held-out prompts", "head": ["iteration", *heads], "rows": cells}]


def _figure(point: dict[str, Any], key: str) -> dict[str, float]:
    """A figure of a row of evaluations.jsonl, with the ends of its interval if the row has them."""
    return {name: point[key + end] for name, end in INTERVAL.items() if key + end in point}
