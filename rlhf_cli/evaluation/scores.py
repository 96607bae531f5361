"""A reward model that predicts scores or labels: error, correlations and calibration on held-out answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.bootstrap import bootstrap_interval
from rlhf_cli.algorithms.calibration import calibration_error
from rlhf_cli.algorithms.reward_model import label_accuracy
from rlhf_cli.algorithms.statistics import kendall, pair_accuracy, ranks
from rlhf_cli.data.answers import ScoredIds
from rlhf_cli.evaluation.figures import bootstrapped, correlation_figure, mean_figure, share_figure
from rlhf_cli.report.figure import Figure, Figures

WORST = 20
"""Answers or mistakes that are kept with their texts."""
QUARTERS = ("smallest quarter", "second quarter", "third quarter", "largest quarter")
MOST_ORDERED = 2000
"""Rows of which all pairs are looked at."""


def score_figures(predicted: Tensor, target: Tensor, *, seed: int) -> Figures:
    """The figures of `agreement.score_figures` with their intervals, and Kendall's tau."""
    predicted, target = predicted.double(), target.double()
    return {
        "mse": mean_figure((predicted - target).square(), seed=seed),
        "target_variance": Figure(target.var(correction=0).item(), rows=len(target)),
        "pearson": correlation_figure(predicted, target, seed=seed),
        "spearman": correlation_figure(ranks(predicted), ranks(target), seed=seed),
        "kendall": _order_figure(kendall, predicted, target, seed=seed),
        "pair_accuracy": _order_figure(pair_accuracy, predicted, target, seed=seed),
    }


def label_figures(score: Tensor, label: Tensor, *, seed: int) -> Figures:
    """The figures of `agreement.label_figures` with their intervals."""
    score, label = score.double(), label.double()
    probability = score.sigmoid()
    good = label_accuracy(torch.ones_like(label), label).mean().item()
    return {
        "accuracy": share_figure(label_accuracy(score, label)),
        "base_rate": Figure(max(good, 1 - good), rows=len(label)),
        "brier": mean_figure((probability - label).square(), seed=seed),
        "brier_baseline": Figure(label.var(correction=0).item(), rows=len(label)),
        "calibration_error": bootstrapped(calibration_error, probability, label, seed=seed),
        "pair_accuracy": _order_figure(pair_accuracy, score, label, seed=seed),
    }


def _order_figure(statistic: Callable[..., Tensor], x: Tensor, y: Tensor, *, seed: int) -> Figure:
    """Kendall's tau or the share of pairs in the right order, of the first rows, which are resampled."""
    x, y = x[:MOST_ORDERED], y[:MOST_ORDERED]

    def resampled(rows: Tensor) -> Tensor:
        return statistic(x, y, torch.zeros(len(rows), len(x)).scatter_add_(1, rows, torch.ones(rows.shape)))

    interval = bootstrap_interval(resampled, torch.arange(len(x)), seed=seed)
    return Figure(statistic(x, y).item(), *interval, len(x))


def quarters(values: Tensor) -> dict[str, Tensor]:
    """The masks of the rows in each quarter of [n] numbers.

    Equal numbers are in one group, so there may be fewer than four; {} for fewer than 8 rows.
    """
    if len(values) < 8:
        return {}
    values = values.double()
    quarter = torch.bucketize(values, values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)))
    masks = {name: quarter == number for number, name in enumerate(QUARTERS)}
    return {name: mask for name, mask in masks.items() if bool(mask.any())}


def error_groups(stated: Tensor, target: Tensor, length: Tensor, *, seed: int) -> dict[str, Figures]:
    """The mean absolute error of [n] stated scores or probabilities, by quarters of the length and of the target."""
    error = (stated.double() - target.double()).abs()
    return {
        title: {name: mean_figure(error[mask], seed=seed) for name, mask in masks.items()}
        for title, values in (("length of the answer", length), ("true score", target))
        if (masks := quarters(values))
    }


def worst_answers(rows: Sequence[ScoredIds], stated: Tensor, target: Tensor) -> list[dict[str, Any]]:
    """The answers whose stated score or probability is farthest from the true one, with their texts."""
    found = []
    for i in (stated.double() - target.double()).abs().argsort(descending=True)[:WORST].tolist():
        row = rows[i].row
        texts = {"where": row.where, "prompt": row.prompt, "response": row.response}
        found.append({**texts, "stated": stated[i].item(), "target": target[i].item()})
    return found
