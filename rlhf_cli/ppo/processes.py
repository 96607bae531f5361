"""What the processes of an iteration exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor

from rlhf_cli.algorithms.advantages import group_advantages
from rlhf_cli.algorithms.names import GroupBaseline
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.errors import RewardError
from rlhf_cli.ppo.setup import adjacent_responses
from rlhf_cli.processes.distributed import World, where

T = TypeVar("T")


def over_groups(totals: Tensor, baseline: GroupBaseline, config: PPOConfig, world: World) -> Tensor:
    """`group_advantages` of the totals [B] of this process's responses, whose groups may span processes: [B]."""
    adjacent = adjacent_responses(config, world.size)
    shards = [part.tolist() for part in world.gather_tensors(totals.double())]
    everyone = torch.tensor(world.interleave(shards, adjacent), dtype=torch.float64)
    compared = group_advantages(everyone, samples_per_prompt=config.rollout.samples_per_prompt, baseline=baseline)
    return compared[world.shard(range(len(compared)), adjacent)].to(totals)


def summed(stats: dict[str, float], world: World) -> dict[str, float]:
    """Each statistic summed over all processes. A process without rows of the minibatch has no statistics."""
    shards = world.gather(stats)
    return {key: sum(shard.get(key, 0.0) for shard in shards) for key in max(shards, key=len)}


class _PlacedError(RewardError):
    """A failed reward whose message begins with the step and the process."""


def or_failure(world: World, compute: Callable[[], T], save: Callable[[], object] = lambda: None) -> T:
    """The result of `compute`; if it raises RewardError on any process, all processes call `save` and raise it."""
    result, failure = None, ""
    try:
        result = compute()
    except RewardError as error:
        failure = str(error) if isinstance(error, _PlacedError) else f"{where(world)}: {error}"
    world.barrier("the rewards")  # a slow reward or judge may take longer than a collective operation
    if first := world.first_failure(failure):
        save()
        raise _PlacedError(first)
    return cast(T, result)
