"""A policy against the one it started from: before and after, and win rates."""

from __future__ import annotations

from functools import partial

import torch

from rlhf_cli.algorithms.comparison import wins
from rlhf_cli.evaluation.figures import (
    bootstrapped,
    difference_figure,
    equal_length_figure,
    mean_figure,
    rate_figure,
    share_figure,
)
from rlhf_cli.evaluation.language_model import reply_figures
from rlhf_cli.evaluation.replies import Replies
from rlhf_cli.report.figure import Figures

PERCENTILES = (10, 50, 90)


def side_figures(replies: Replies, *, seed: int) -> Figures:
    """One policy's first reply to each prompt: scores, each reward, gold numbers, KL, form."""
    score = replies.score[:, 0]
    figures = {"score": rate_figure(score, seed=seed)}
    for percent in PERCENTILES:
        quantile = partial(torch.quantile, q=percent / 100, dim=-1)
        figures[f"score_p{percent}"] = bootstrapped(quantile, score, seed=seed)
    if len(replies.each) > 1:
        figures |= {f"reward/{name}": rate_figure(values[:, 0], seed=seed) for name, values in replies.each.items()}
    figures |= {name: rate_figure(values[:, 0], seed=seed) for name, values in replies.gold.items()}
    figures["kl"] = mean_figure(replies.kl[:, 0], seed=seed)
    texts = [row[0] for row in replies.texts]
    return figures | reply_figures(texts, replies.length[:, 0], replies.ended[:, 0], seed=seed)


def differences(before: Replies, after: Replies, *, seed: int) -> Figures:
    """After minus before, paired by prompt."""
    columns = {"score": (before.score, after.score)}
    columns |= {f"reward/{name}": (before.each[name], after.each[name]) for name in before.each if len(before.each) > 1}
    columns |= {name: (before.gold[name], after.gold[name]) for name in before.gold}
    figures = {name: difference_figure(b[:, 0], a[:, 0], seed=seed) for name, (a, b) in columns.items()}
    for name, change in (("kl", after.kl - before.kl), ("length", after.length - before.length)):
        figures[name] = mean_figure(change[:, 0], seed=seed)
    return figures | {"eos_rate": difference_figure(after.ended[:, 0], before.ended[:, 0], seed=seed)}


def win_rates(before: Replies, after: Replies) -> Figures:
    """How often the reply after is better than the one before, by score and by the judge; ties count 1/2.

    `..._equal_length` is the rate that would remain if both were as long (`length_controlled_win_rate`).
    """
    judges = {"score": (before.score, after.score)}
    if (name := before.gold_name) is not None:
        judges[name] = (before.gold[name], after.gold[name])
    figures: Figures = {}
    for judge, (a, b) in judges.items():
        won = wins(b[:, 0], a[:, 0])
        figures[judge] = share_figure(won)
        figures[f"{judge}_equal_length"] = equal_length_figure(won, after.length[:, 0], before.length[:, 0])
    return figures
