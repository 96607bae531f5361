"""One iteration on several processes: which rows each computes, and what they must exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_cli.algorithms.advantages import group_advantages
from rlhf_cli.algorithms.names import GroupBaseline
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.batches import deal
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.errors import RewardError
from rlhf_cli.ppo.batch import TENSORS, UpdateBatch
from rlhf_cli.rollout.exchange import gather_responses
from rlhf_cli.tensor_ops import length_mask
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
    shards = [part.tolist() for part in world.gather_tensors(totals.double())]
    everyone = torch.tensor(world.interleave(shards, together), dtype=torch.float64)
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


def from_all_processes(
    batch: UpdateBatch, prompts: Callable[[], list[PromptRow]], world: World, together: int
) -> UpdateBatch:
    """The rows of all processes in the order of the iteration, on the device of this process's rows.

    `prompts` gives those of the whole iteration. Only the numbers of real tokens are exchanged, as tensors.
    """
    if world.size == 1:
        return batch
    responses = world.interleave(gather_responses(world, batch.responses), together)
    names = [name for name in TENSORS if name != "response_mask"]
    packed = torch.stack([getattr(batch, name)[batch.response_mask] for name in names], dim=1)  # [own tokens, 6]
    lengths = [len(response.ids) for response in responses]
    table = packed.new_zeros(len(names), len(lengths), max(lengths))  # [6, B, R]
    parts = world.gather_tensors(packed)
    for part, rows in zip(parts, _rows_by_process(len(lengths), world, together), strict=True):
        for row, numbers in zip(rows, part.split([lengths[row] for row in rows]), strict=True):
            table[:, row, : lengths[row]] = numbers.T
    tensors = dict(zip(names, table, strict=True))
    mask = length_mask(torch.tensor(lengths, device=packed.device))
    return UpdateBatch(prompts=prompts(), responses=responses, response_mask=mask, **tensors)


def _rows_by_process(num_rows: int, world: World, together: int) -> list[list[int]]:
    """The row numbers of an iteration that each process has (`World.shard`)."""
    return [replace(world, rank=rank).shard(range(num_rows), together) for rank in range(world.size)]


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
    world.barrier("the rewards")  # a slow reward or judge may take longer than a collective operation
    if first := world.first_failure(failure):
        raise RewardError(first)
    return result
