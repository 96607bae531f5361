"""How well a reward model agrees with the order of held-out answers: scores, margins, accuracy, and two baselines."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rlhf_cli.algorithms.reward_model import ranking_pairs
from rlhf_cli.algorithms.statistics import pair_accuracy, pearson, spearman, wilson_interval
from rlhf_cli.data.answers import RankedIds
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.records import Ranking
from rlhf_cli.rewards.models import score_sequences
from rlhf_cli.training.distributed import World


def margins(
    model: PreTrainedModel, rankings: list[RankedIds], budget: Budget, precision: str, world: World
) -> tuple[torch.Tensor, torch.Tensor]:
    """(margin, accuracy) of each ranking, both [n]: means over its pairs.

    A pair's margin is the better answer's score minus the worse one's. Its accuracy is 1 for a positive margin and 1/2
    for zero.
    """
    scores = scores_of_rows(model, [item.answers for item in rankings], budget, precision, world)
    sizes = [len(item.answers) for item in rankings]
    better, worse, weight = ranking_pairs(sizes)
    weight = weight.float()
    row = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor([size * (size - 1) // 2 for size in sizes]))
    lead = scores[better] - scores[worse]
    margin, accuracy = torch.zeros(len(sizes)), torch.zeros(len(sizes))
    return margin.index_add(0, row, weight * lead), accuracy.index_add(0, row, weight * (lead.sign() + 1) / 2)


def scores_of_rows(
    model: PreTrainedModel, rows: list[list[list[int]]], budget: Budget, precision: str, world: World
) -> torch.Tensor:
    """The scores of the sequences of all rows, row by row. Each process computes its share of the rows."""
    mine = world.shard(rows)
    groups = [i for i, row in enumerate(mine) for _ in row]
    scores = score_sequences(model, [ids for row in mine for ids in row], precision, budget, groups=groups)
    by_row = [row.tolist() for row in scores.split([len(row) for row in mine])]
    return torch.tensor([score for row in world.interleave(world.gather(by_row)) for score in row])


def ranking_figures(rankings: list[RankedIds], margin: torch.Tensor, accuracy: torch.Tensor) -> dict[str, float]:
    """The held-out figures of rankings, from the margin and accuracy of each.

    The pairs of a ranking are not independent, so a ranking counts as one trial of the 95 % interval.
    `eval/length_baseline` is the accuracy of a rule that prefers the longer answer. `eval/gold_accuracy` is the share
    of rankings in whose order of best and worst the model agrees with the gold scores; ties do not count.
    """
    low, high = wilson_interval(accuracy.sum().item(), len(rankings))
    baseline = [longer_wins(item) for item in rankings]
    figures = {
        "eval/accuracy": accuracy.mean().item(),
        "eval/accuracy_low95": low,
        "eval/accuracy_high95": high,
        "eval/margin": margin.mean().item(),
        "eval/length_baseline": sum(baseline) / len(baseline),
    }
    gold = [gold_gap(item.row) for item in rankings]
    if all(gap is not None for gap in gold):
        agrees = [m * gap > 0 for m, gap in zip(margin.tolist(), gold, strict=True) if gap]
        figures["eval/gold_accuracy"] = sum(agrees) / max(1, len(agrees))
    return figures


def score_figures(predicted: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """The held-out figures of scored answers: error, correlations, and the share of pairs in the right order."""
    return {
        "eval/mse": (predicted - target).square().mean().item(),
        "eval/target_variance": target.var(correction=0).item(),
        "eval/pearson": pearson(predicted, target),
        "eval/spearman": spearman(predicted, target),
        "eval/pair_accuracy": pair_accuracy(predicted, target),
    }


def longer_wins(item: RankedIds) -> float:
    """The share of a ranking's pairs in which the better answer is longer; a tie counts one half.

    A reward model must beat this.
    """
    lengths = [len(ids) for ids in item.answers]
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for i, a in enumerate(lengths) for b in lengths[i + 1 :]]
    return sum(wins) / len(wins)


def gold_gap(row: Ranking) -> float | None:
    """gold_chosen - gold_rejected, or None if the row lacks one of them."""
    a, b = row.columns.get("gold_chosen"), row.columns.get("gold_rejected")
    return a - b if isinstance(a, int | float) and isinstance(b, int | float) else None
