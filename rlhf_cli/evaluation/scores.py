"""A reward model that predicts scores: error and correlations on held-out answers."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_cli.algorithms.bootstrap import bootstrap_interval
from rlhf_cli.algorithms.statistics import kendall, pair_accuracy
from rlhf_cli.evaluation.figures import Figure, Figures, correlation_figure, ranks

MOST_KENDALL = 2000
"""Rows that Kendall's tau reads; its time grows with their square."""


def score_figures(predicted: Tensor, target: Tensor, *, seed: int) -> Figures:
    """Error, its baseline, and the correlations of [n] predicted and true scores.

    `target_variance` is the error of always predicting the mean; a model above it has learnt nothing.
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
