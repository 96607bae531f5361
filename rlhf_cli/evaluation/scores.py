"""A reward model that predicts scores or labels: error, correlations and calibration on held-out answers."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_cli.algorithms.bootstrap import bootstrap_interval
from rlhf_cli.algorithms.calibration import expected_calibration_error, reliability
from rlhf_cli.algorithms.reward_model import label_accuracy
from rlhf_cli.algorithms.statistics import kendall, pair_accuracy
from rlhf_cli.evaluation.figures import Figure, Figures, correlation_figure, mean_figure, ranks, share_figure

MOST_KENDALL = 2000
"""Rows that Kendall's tau reads; its time grows with their square."""


def score_figures(predicted: Tensor, target: Tensor, *, seed: int) -> Figures:
    """Error, its baseline, and the correlations of [n] predicted and true scores.

    `target_variance` is the error of always predicting the mean. A useful model is below it.
    """
    predicted, target = predicted.double(), target.double()
    interval = bootstrap_interval(lambda a, b: (a - b).square().mean(-1), predicted, target, seed=seed)
    few = torch.arange(min(len(target), MOST_KENDALL))
    return {
        "mse": Figure((predicted - target).square().mean().item(), *interval, len(target)),
        "target_variance": Figure(target.var(correction=0).item(), rows=len(target)),
        "pearson": correlation_figure(predicted, target, seed=seed),
        "spearman": correlation_figure(ranks(predicted), ranks(target), seed=seed),
        "kendall": Figure(kendall(predicted[few], target[few]), rows=len(few)),
        "pair_accuracy": Figure(pair_accuracy(predicted[few], target[few]), rows=len(few)),
    }


def label_figures(score: Tensor, label: Tensor, *, seed: int) -> Figures:
    """Accuracy and calibration of [n] scores, the log-odds of a good answer, against labels from 0 to 1.

    `base_rate` is the accuracy of giving every answer the more frequent label, and `brier_baseline` the Brier score of
    always predicting the mean label.
    """
    score, label = score.double(), label.double()
    probability = score.sigmoid()
    good = label_accuracy(torch.ones_like(label), label).mean().item()
    few = torch.arange(min(len(label), MOST_KENDALL))
    return {
        "accuracy": share_figure(label_accuracy(score, label)),
        "base_rate": Figure(max(good, 1 - good), rows=len(label)),
        "brier": mean_figure((probability - label).square(), seed=seed),
        "brier_baseline": Figure(label.var(correction=0).item(), rows=len(label)),
        "calibration_error": Figure(expected_calibration_error(reliability(probability, label)), rows=len(label)),
        "pair_accuracy": Figure(pair_accuracy(score[few], label[few]), rows=len(few)),
    }
