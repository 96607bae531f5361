"""How well a reward model agrees with the order of held-out answers: scores, margins, accuracy, and two baselines."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from rlhf_cli.algorithms.reward_model import ranking_pairs
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
