"""The tables of a report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli.config.stage import STAGES
from rlhf_cli.report.figure import Figure, Figures, figures_of, readable, rows_of_figures
from rlhf_cli.report.run_data import RunData, StageData
from rlhf_cli.run.artifacts import Manifest, flat

TITLES = {"sft": "SFT", "rm": "Reward model", "ppo": "PPO"}
SIDES = {
    "sft": {"before": "before", "figures": "SFT", "difference": "difference"},
    "rm": {"figures": "value", "chance": "chance"},
    "ppo": {"sft": "SFT", "ppo": "PPO", "difference": "difference"},
}
"""Parts of a stage's evaluation that have the same figures, and the heads of their columns."""
SIDE_BY_SIDE = (
    ("sft", "figures", ("loss",)),
    ("rm", "figures", ("accuracy", "calibration_error")),
    ("ppo", "ppo", ("score", "gold", "kl", "length", "eos_rate", "distinct_2")),
    ("ppo", "win_rate", ("score", "gold")),
)
"""Stage, part of its evaluation and figures of the table of several runs."""
LONGEST_VALUE = 40

Table = dict[str, Any]  # `title`, `head`, and `rows` of texts


def show(found: Mapping[str, Any]) -> str:
    return str(Figure.of(found))


def side_by_side(runs: Sequence[RunData]) -> list[Table]:
    """Tables of several runs: their figures, and the config keys that differ."""
    rows = []
    for stage, side, names in SIDE_BY_SIDE:
        found = [(run.stages[stage].evaluation if stage in run.stages else {}).get(side, {}) for run in runs]
        for name in names:
            if any(name in figures for figures in found):
                label = f"win rate against SFT by {name}" if side == "win_rate" else readable(name)
                shown = (show(figures[name]) if name in figures else "" for figures in found)
                rows.append([f"{TITLES[stage]}: {label}", *shown])
    manifests = [{name: data.manifest for name, data in run.stages.items() if data.manifest} for run in runs]
    head = ["", *(run.name for run in runs)]
    parts = {"Held-out figures": rows, "Config keys that differ": config_differences(manifests)}
    return [_table(title, head, part) for title, part in parts.items() if part]


def config_differences(runs: Sequence[Mapping[str, Manifest]]) -> list[list[str]]:
    """Rows of stage and key, then the value in each run, for every key that differs. `runs` are manifests by stage."""
    rows = []
    for stage in STAGES:
        configs = [flat(run[stage].identity["config"]) if stage in run else {} for run in runs]
        for key in dict.fromkeys(key for config in configs for key in config):
            values = [config.get(key, "") for config in configs]
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            if len(set(texts)) > 1:
                short = [text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..." for text in texts]
                rows.append([f"{stage}: {key}", *short])
    return rows


def tables_of(data: StageData) -> list[Table]:
    found, tables = data.evaluation, []
    if shown := {label: figures_of(found[key]) for key, label in SIDES[data.stage].items() if key in found}:
        tables.append(_table("Figures", ["", *shown], rows_of_figures(shown)))
    for title, group in found.get("groups", {}).items():
        columns = {"accuracy": figures_of(group)}
        if (rules := found.get("groups_longer_wins", {}).get(title)) is not None:
            columns["chance"] = dict.fromkeys(group, Figure(0.5))
            columns["longer wins"] = {name: Figure(figure["value"]) for name, figure in rules.items()}
        tables.append(_groups(f"Accuracy by {title}", columns))
    for title, group in found.get("error_groups", {}).items():
        tables.append(_groups(f"Absolute error by {title}", {"error": figures_of(group)}))
    if scores := found.get("distributions"):
        heads = [name for name in next(iter(scores.values())) if name != "rows"]
        rows = [[side, *(f"{row[name]:.2f}" for name in heads), f"{row['rows']:,.0f}"] for side, row in scores.items()]
        tables.append(_table("Raw scores of answers, and of samples of the policies", ["", *heads, "rows"], rows))
    if bench := found.get("bench"):
        chance = {name: Figure(value) for name, value in bench["chance"].items()}
        columns = {"score": figures_of(bench["figures"]), "chance": chance}
        tables.append(_groups(f"Benchmark {bench['file']}", columns, "subset"))
    if points := data.evaluations:  # score, gold and KL at the evaluations of a run, with their intervals
        keys = {"score": "score_mean", "gold": "gold", "KL, nats": "kl"}
        heads = [head for head, key in keys.items() if key in points[0]]
        rows = [[f"{point['step']:,}", *(_metric(point, keys[head]) for head in heads)] for point in points]
        tables.append(_table("Along the run, held-out prompts", ["iteration", *heads], rows))
    if "win_rate" in found:
        rows = rows_of_figures({"win rate": figures_of(found["win_rate"])})
        tables.append(_table("How often PPO's reply is better than SFT's", ["by", "win rate"], rows))
    if "alignment_tax" in found:
        rows = [["loss on SFT's held-out rows", show(found["alignment_tax"])]]
        tables.append(_table("Alignment tax", ["", "PPO minus SFT, nats"], rows))
    if not (best := found.get("best_of_n")):
        return tables
    own, names = best["ppo"], ["score", "gold"] if "gold" in best["rows"][0] else ["score"]
    if same := best.get("at_ppo_kl"):
        sides = {f"best of {same['n']:.0f}": same["best_of_n"], "PPO": same["ppo"], "difference": same["difference"]}
        rows = [[name, *(show(side[name]) for side in sides.values())] for name in same["ppo"]]
        title = f"PPO and best-of-n at PPO's KL on the same prompts, {own['kl']:z.2f} nats"
        tables.append(_table(title, ["", *sides], rows))
    rows = [[f"best of {row['n']}", *(show(row[name]) for name in names), f"{row['kl']:z.2f}"] for row in best["rows"]]
    rows.append(["PPO", *(f"{own[name]:z.2f}" for name in [*names, "kl"])])
    number, every = best["prompts"], best.get("of_prompts", best["prompts"])
    which = f"{number} of the {every} prompts" if number < every else f"{number} prompts"
    return [*tables, _table(f"Best-of-n of the SFT model, {which}", ["", *names, "KL, nats"], rows)]


def _table(title: str, head: list[str], rows: list[list[str]]) -> Table:
    return {"title": title, "head": head, "rows": rows}


def _groups(title: str, columns: Mapping[str, Figures], of: str = "") -> Table:
    """A row per group of rows: its figure, what simple rules reach in it, and its number of rows."""
    return _table(title, [of, *columns, "rows"], rows_of_figures(columns, counts=True))


def _metric(row: Mapping[str, Any], key: str) -> str:
    """A metric with the ends of its interval, which are metrics of their own; "" without it."""
    ends = {end: row[f"{key}_{end}95"] for end in ("low", "high") if f"{key}_{end}95" in row}
    return Figure.of({"value": row[key], **ends}).text(2) if key in row else ""
