"""One iteration on several processes: which rows each computes, and what they must exchange."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_cli.algorithms.advantages import group_advantages
from rlhf_cli.algorithms.names import GroupBaseline
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.batches import deal
from rlhf_cli.errors import RewardError
from rlhf_cli.ppo.batch import UpdateBatch, merge, select
from rlhf_cli.training.distributed import World

T = TypeVar("T")


def responses_together(config: PPOConfig, num_processes: int) -> int:
    """How many adjacent responses of an iteration stay on one process.

    All responses to a prompt, so that the prompt is encoded once; 1 if the prompts cannot be divided evenly.
    """
    divides = config.num_prompts % num_processes == 0
    return config.rollout.samples_per_prompt if divides else 1


def over_groups(totals: Tensor, baseline: GroupBaseline, config: PPOConfig, world: World) -> Tensor:
    """`group_advantages` of the totals [B] of this process's responses, whose groups may span processes: [B]."""
    together = responses_together(config, world.size)
    everyone = torch.tensor(world.interleave(world.gather(totals.double().tolist()), together), dtype=torch.float64)
    compared = group_advantages(everyone, samples_per_prompt=config.rollout.samples_per_prompt, baseline=baseline)
    return compared[world.shard(range(len(compared)), together)].to(totals)


def rows_of_process(batch: UpdateBatch, minibatch: Sequence[int], world: World) -> list[int]:
    """This process's rows of a minibatch. Every process gets about the same number of tokens to compute.

    Rows are dealt one by one, or all responses to a prompt together so that the prompt is encoded once. The way whose
    slowest process has fewer tokens is used.
    """
    if world.size == 1:
        return sorted(minibatch)
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row in minibatch:
        by_prompt.setdefault(tuple(batch.prompts[row].ids), []).append(row)

    def tokens(rows: Sequence[int]) -> int:
        prompts = {tuple(batch.prompts[row].ids) for row in rows}
        return sum(map(len, prompts)) + sum(len(batch.responses[row].ids) for row in rows)

    ways = [
        [[row for piece in hand for row in pieces[piece]] for hand in deal([tokens(p) for p in pieces], world.size)]
        for pieces in ([[row] for row in minibatch], list(by_prompt.values()))
    ]
    return sorted(min(ways, key=lambda hands: max(map(tokens, hands)))[world.rank])


def from_all_processes(batch: UpdateBatch, world: World, together: int) -> UpdateBatch:
    """The rows of all processes in the order of the iteration, on the device of this process's rows."""
    if world.size == 1:
        return batch
    shards = world.gather(batch.to("cpu"))
    ends = list(itertools.accumulate(len(shard.responses) for shard in shards))
    rows = [range(end - len(shard.responses), end) for shard, end in zip(shards, ends, strict=True)]
    merged = select(merge(shards), world.interleave(rows, together))
    return merged.to(batch.response_mask.device)


def summed(stats: dict[str, float], world: World) -> dict[str, float]:
    """Each statistic summed over all processes. A process without rows of the minibatch has no statistics."""
    shards = world.gather(stats)
    return {key: sum(shard.get(key, 0.0) for shard in shards) for key in max(shards, key=len)}


def or_failure(world: World, compute: Callable[[], Sequence[T]]) -> list[T]:
    """The result of `compute`; if it raises RewardError on any process, all processes raise it."""
    result: list[T] = []
    failure = ""
    try:
        result = list(compute())
    except RewardError as error:
        failure = str(error)
    if first := world.first_failure(failure):
        raise RewardError(first)
    return result
