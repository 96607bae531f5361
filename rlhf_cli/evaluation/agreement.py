"""The agreement of a reward model with held-out preferences, scores or labels, beside that of simple rules."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_cli.algorithms.calibration import brier_score, calibration_error
from rlhf_cli.algorithms.counts import longer_wins
from rlhf_cli.algorithms.length import regression_on_length, value_at
from rlhf_cli.algorithms.names import RewardModelLoss
from rlhf_cli.algorithms.reward_model import label_accuracy, ranking_pairs
from rlhf_cli.algorithms.statistics import correlation, kendall, pair_accuracy, pearson, ranks, wilson_interval
from rlhf_cli.data.answers import RankedIds
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.records import Record
from rlhf_cli.data.splits import HeldOutRows
from rlhf_cli.evaluation.figures import bootstrapped, mean_figure, order_figure, share_figure
from rlhf_cli.processes.distributed import World
from rlhf_cli.report.figure import Figure, Figures, as_metrics
from rlhf_cli.rewards.models import score_sequences


def margins_of(scores: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(margin, accuracy, loss) of each ranking, [n] each: means over its pairs.

    The scores are laid end to end, best answer first within each ranking. A pair's margin is the better answer's score
    minus the worse one's. Its accuracy is 1 for a positive margin and 1/2 for zero, its loss -log(sigmoid(margin)).

    >>> margins_of(torch.tensor([2.0, 0.0, 0.0]), [3])  # log(1 + exp(-2)) twice, log(2) once
    (tensor([1.3333]), tensor([0.8333]), tensor([0.3157]))
    """
    better, worse, weight = ranking_pairs(sizes)
    row = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor([size * (size - 1) // 2 for size in sizes]))
    lead = scores[better] - scores[worse]

    def mean(each: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(sizes)).index_add(0, row, weight.float() * each)

    return mean(lead), mean((lead.sign() + 1) / 2), mean(-torch.nn.functional.logsigmoid(lead))


def scores_of_rows(
    model: PreTrainedModel,
    rows: list[list[list[int]]],
    budget: Budget,
    precision: str,
    world: World,
    lengths: list[list[int]] | None = None,
) -> torch.Tensor:
    """The scores of the sequences of all rows, row by row. Each process computes its share of the rows.

    `lengths` are as in `scores_and_features`, row by row.
    """
    mine = world.shard(rows)
    groups = [i for i, row in enumerate(mine) for _ in row]
    own_lengths = None if lengths is None else [length for row in world.shard(lengths) for length in row]
    sequences = [ids for row in mine for ids in row]
    scores = score_sequences(model, sequences, precision, budget, groups=groups, lengths=own_lengths)
    shards = [
        part.split([len(row) for row in rows[rank :: world.size]])
        for rank, part in enumerate(world.gather_tensors(scores))
    ]
    return torch.tensor([score for row in world.interleave(shards) for score in row.tolist()])


def figures_of_rankings(rankings: Sequence[RankedIds], scores: torch.Tensor) -> dict[str, float]:
    """The `ranking_figures` of rankings, from the scores of their answers, ranking by ranking."""
    longer = [longer_wins([len(ids) for ids in item.answers]) for item in rankings]
    gold = [gold_gap(item.row) for item in rankings]
    return ranking_figures(scores, [len(item.answers) for item in rankings], longer, gold)


def ranking_figures(
    scores: torch.Tensor, sizes: Sequence[int], longer: Sequence[float], gold: Sequence[float | None]
) -> dict[str, float]:
    """The held-out figures of rankings, from the scores as for `margins_of`, and each one's `longer_wins`, `gold_gap`.

    The pairs of a ranking are not independent, so a ranking counts as one trial of the 95 % interval.
    `eval/length_baseline` is the accuracy of a rule that prefers the longer answer, `eval/shorter_baseline` of one that
    prefers the shorter; a reward model must beat both. `eval/gold_accuracy` is the share of rankings in whose order of
    best and worst the model agrees with the gold scores; ties do not count. `eval/loss` is without the margins that
    training may add.
    """
    margin, accuracy, loss = margins_of(scores, sizes)
    low, high = wilson_interval(accuracy.sum().item(), len(accuracy))
    length_baseline = sum(longer) / len(longer)
    figures = {
        "eval/loss": loss.mean().item(),
        "eval/accuracy": accuracy.mean().item(),
        "eval/accuracy_low95": low,
        "eval/accuracy_high95": high,
        "eval/margin": margin.mean().item(),
        "eval/num_rows": len(accuracy),
        "eval/length_baseline": length_baseline,
        "eval/shorter_baseline": 1 - length_baseline,
    }
    agrees = [m * gap > 0 for m, gap in zip(margin.tolist(), gold, strict=True) if gap]
    if agrees and None not in gold:
        figures["eval/gold_accuracy"] = sum(agrees) / len(agrees)
    return figures


def length_accuracies(scores: torch.Tensor, lengths: Sequence[int], sizes: Sequence[int]) -> tuple[float, float]:
    """(accuracy of the score that the length of an answer predicts, accuracy of the score minus that) on rankings.

    `scores` and `lengths` are those of the answers of all rankings, end to end.
    """
    each = torch.tensor(lengths)
    predicted = value_at(regression_on_length(each, scores), each)
    by_length, without = (margins_of(one.float(), sizes)[1].mean().item() for one in (predicted, scores - predicted))
    return by_length, without


def agreement_of_members(scores: Sequence[torch.Tensor], sizes: Sequence[int] | None) -> dict[str, float]:
    """The agreement of several reward models on the same answers: means over all pairs of models.

    With the `sizes` of rankings it compares margins (`margins_of`), by their correlation and the share with one sign;
    without them single answers, by the share of pairs that both models put in the same order.
    """
    judged = [one if sizes is None else margins_of(one, sizes)[0] for one in scores]
    pairs = list(combinations(judged, 2))
    alike = [pair_accuracy(a, b) if sizes is None else (a.sign() == b.sign()).double().mean().item() for a, b in pairs]
    return {
        "members/agreement": fmean(alike),
        "members/correlation": fmean(pearson(a.double(), b.double()) for a, b in pairs),
    }


def score_figures(predicted: torch.Tensor, target: torch.Tensor, *, seed: int | None = None) -> Figures:
    """The figures of scored answers, [n] each: error, correlations, and the share of pairs in the right order.

    `target_variance` is the error of predicting the mean target for every answer. With a seed every figure has its
    interval, and there is Kendall's tau.
    """
    predicted, target = predicted.double(), target.double()
    return {
        "mse": mean_figure((predicted - target).square(), seed=seed or 0),
        "target_variance": Figure(target.var(correction=0).item(), rows=len(target)),
        "pearson": bootstrapped(correlation, predicted, target, seed=seed),
        "spearman": bootstrapped(correlation, ranks(predicted), ranks(target), seed=seed),
        **({} if seed is None else {"kendall": order_figure(kendall, predicted, target, seed=seed)}),
        "pair_accuracy": order_figure(pair_accuracy, predicted, target, seed=seed),
    }


def label_figures(score: torch.Tensor, label: torch.Tensor, *, seed: int | None = None) -> Figures:
    """The figures of answers labelled from 0 (bad) to 1 (good), [n] each: accuracy and calibration.

    `base_rate` is the accuracy of giving every answer the more frequent label, and `brier_baseline` the Brier score
    (mean squared error of the probability) of predicting the mean label. With a seed every figure has its interval.
    """
    score, label = score.double(), label.double()
    probability, good = score.sigmoid(), label_accuracy(torch.ones_like(label), label).mean().item()
    return {
        "accuracy": share_figure(label_accuracy(score, label)),
        "base_rate": Figure(max(good, 1 - good), rows=len(label)),
        "brier": mean_figure((probability - label).square(), seed=seed),
        "brier_baseline": Figure(brier_score(label.mean(), label), rows=len(label)),
        "calibration_error": bootstrapped(calibration_error, probability, label, seed=seed),
        "pair_accuracy": order_figure(pair_accuracy, score, label, seed=seed),
    }


def answer_metrics(
    stated: torch.Tensor, target: torch.Tensor, rows: Sequence[Record], loss: RewardModelLoss
) -> dict[str, float]:
    """The held-out metrics of scored or labelled answers, and what their length in characters tells of their order."""
    figures = score_figures(stated, target) if loss == "mse" else label_figures(stated, target)
    lengths = torch.tensor([float(len(row.response)) for row in rows])
    longer = order_figure(pair_accuracy, lengths, target, seed=None).value
    return as_metrics(figures) | {"eval/length_baseline": longer, "eval/shorter_baseline": 1 - longer}


def probe_shares(probes: Sequence[RankedIds], scores: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The rows of each named probe: accuracy of the model, from the scores of their answers, and `longer_wins`, [n].

    An accuracy over all pairs can hide a defect that the model never sees.
    """
    accuracy = margins_of(scores, [len(item.answers) for item in probes])[1]
    longer = torch.tensor([longer_wins([len(ids) for ids in item.answers]) for item in probes])
    names = [item.row.columns["probe"] for item in probes]
    masks = {name: torch.tensor([other == name for other in names]) for name in dict.fromkeys(names)}
    return {name: (accuracy[mask], longer[mask]) for name, mask in masks.items()}


def held_out_lines(
    figures: Mapping[str, float], held_out: HeldOutRows[Any], probes: Sequence[RankedIds]
) -> list[list[str]]:
    """The rows of a table of held-out figures, each with the number of rows that it was computed from."""
    of_probes = Counter(str(item.row.columns["probe"]) for item in probes)
    counts = {f"probe/{name}": f"{number:,}" for name, number in of_probes.items()}
    lines = []
    for key, value in figures.items():
        section, _, name = key.partition("/")
        rows = held_out.validation if section == "validation" else held_out.test
        source = name.partition("/")[2].removesuffix("_low95").removesuffix("_high95")
        count = f"{len(rows.by_source[source]):,}" if source in rows.by_source else str(rows)
        if name == "gold_accuracy":  # Pairs of equal gold scores do not count.
            count = f"{sum(bool(gold_gap(i.row)) for i in rows if isinstance(i, RankedIds)):,}"
        if name != "num_rows":
            lines.append([key, f"{value:.4g}", counts.get(key, count)])
    return lines


def gold_gap(row: Record) -> float | None:
    """gold_chosen - gold_rejected, or None if the row lacks one of them or has no finite number there."""
    gold = [row.columns.get(name) for name in ("gold_chosen", "gold_rejected")]
    found = [float(x) for x in gold if isinstance(x, int | float) and abs(x) <= sys.float_info.max]
    return found[0] - found[1] if len(found) == 2 else None
