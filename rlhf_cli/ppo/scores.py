"""What the rewards are asked and answer; the scores of ref_policy; what the processes exchange for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar, cast

import torch
from torch import Tensor

from rlhf_cli.algorithms.advantages import group_advantages
from rlhf_cli.algorithms.names import GroupBaseline
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.batches import chunks, stream
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.errors import RewardError
from rlhf_cli.ppo.setup import Setup, adjacent_responses
from rlhf_cli.processes.distributed import World, where
from rlhf_cli.processes.pass_loop import over_pieces
from rlhf_cli.processes.sharding import is_sharded
from rlhf_cli.rewards.base import Scores
from rlhf_cli.rewards.models import RewardModel
from rlhf_cli.rewards.score import ScoreScale
from rlhf_cli.rewards.sources import samples_of, total_score
from rlhf_cli.rollout.distribution import Response
from rlhf_cli.rollout.rollout import RolloutBatch, collect
from rlhf_cli.rollout.sampling import draw_uniforms, response_text
from rlhf_cli.rollout.token_scores import Models
from rlhf_cli.tensor_ops import pad_rows

T = TypeVar("T")


def rows_at_once(setup: Setup) -> int:
    """The most responses that a process samples and scores together: as many as its share of a rollout batch."""
    return -(-setup.config.ppo.rollout_batch_size // setup.world.size)


def texts_of(setup: Setup, responses: Sequence[Response]) -> list[str]:
    """The responses as text."""
    return [response_text(setup.tokenizer, response, setup.sampling) for response in responses]


def ask_rewards(setup: Setup, prompts: Sequence[PromptRow], texts: list[str], responses: Sequence[Response]) -> Scores:
    """The weighted sum of the rewards, and each reward's own score.

    ``total = sum of weight * score`` (`total_score`). A reward model gives ``(logit - score_mean) / score_std``, with
    the logit of its head at the last token (`RewardModel.score` in rewards/models.py). Raises RewardError.
    """
    samples = samples_of(setup.rewards, setup.tokenizer, prompts, texts, responses)
    return total_score(setup.rewards, samples)


def sampled_and_scored(
    setup: Setup,
    models: Models,
    prompts: Sequence[PromptRow],
    uniforms: Tensor,
    read: Callable[[RolloutBatch, list[str], Scores], list[T]],
    *,
    with_kl: bool,
) -> list[T]:
    """Sample a response to each prompt of this process's share, and score it, `rows_at_once` of them at a time.

    `read` gets each rollout (without values, and with ref_policy's log-probabilities only if `with_kl`), the responses
    as text and their scores; returns all that it returns. With sharded models all processes pass over as many rollouts,
    and all raise RewardError if a reward fails on one.
    """
    config, world = setup.config, setup.world
    of_rewards = [source.model for source in setup.rewards if isinstance(source, RewardModel)]
    computing = [*models.with_weights, *of_rewards]
    shares_passes = any(model is not None and is_sharded(model) for model in computing)

    def score(rows: Sequence[int]) -> list[T]:
        rollout = collect(
            [prompts[i] for i in rows],
            uniforms[list(rows)],
            models,
            sampling=setup.sampling,
            tokenizer=setup.tokenizer,
            budget=setup.budget,
            precision=config.precision,
            recompute=with_kl,
            with_ref_logprobs=with_kl,
            max_live_rows=config.rollout.max_live_rows,
            with_values=False,
        )
        texts = texts_of(setup, rollout.responses)

        def ask() -> Scores:
            return ask_rewards(setup, rollout.prompts, texts, rollout.responses)

        # The next rollout of a sharded policy begins with a collective operation, which a slow reward must not delay.
        return read(rollout, texts, or_failure(world, ask) if shares_passes else ask())

    parts = list(chunks(world.shard(list(range(len(prompts)))), rows_at_once(setup)))
    return list(chain.from_iterable(over_pieces(parts, score, *computing, in_turn=True)))


def scores_of_rollout(setup: Setup, rollout: RolloutBatch, iteration: int) -> tuple[list[str], Scores]:
    """The responses as text, and their scores.

    If a reward fails on any process, a checkpoint of the last finished iteration is saved before RewardError is raised.
    """
    texts = texts_of(setup, rollout.responses)
    scores = or_failure(
        setup.world,
        lambda: ask_rewards(setup, rollout.prompts, texts, rollout.responses),
        save=lambda: setup.stage.save_now(iteration),
    )
    return texts, scores


def note_reward_errors(setup: Setup) -> None:
    """Tell the user how many scores each reward failed to give during the run."""
    for line in dict.fromkeys(source.report() for source in setup.rewards):
        if line:
            setup.stage.display.note(line)


def split_dense(scores: Scores, lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(score, dense): the part of the scores for the last token, [B], and the rewards of single tokens, [B, R]."""
    total = scores.total if scores.optimised is None else scores.optimised
    if scores.dense is None:
        return total, None
    dense = pad_rows(torch.tensor([x for row in scores.dense for x in row]), lengths)
    return total - torch.tensor([sum(row) for row in scores.dense]), dense.to(device)


def measure_reference(setup: Setup, scale: ScoreScale) -> None:
    """Set the scale to the mean and standard deviation of ref_policy's scores on training prompts.

    Raises RewardError if a reward fails on any process.
    """
    total = setup.config.ppo.num_reference_samples
    # Each process has its own number of chunks, so nothing is exchanged before all of them are scored.
    scale.take(torch.tensor(or_failure(setup.world, lambda: _reference_scores(setup, total))), setup.world)
    setup.stage.display.note(
        f"scores are normalised by those of {total} samples of ref_policy: mean {scale.moments.mean:.3g}, "
        f"standard deviation {scale.moments.std:.3g}"
    )


def _reference_scores(setup: Setup, total: int) -> list[float]:
    """The scores of this process's share of `total` samples of ref_policy."""
    config = setup.config
    numbers = stream(len(setup.train), total, 0, config.seed, "ppo reference prompts")
    uniforms = draw_uniforms(config.seed, "ppo reference", 0, total, config.rollout.max_new_tokens)
    prompts = [setup.train[number] for number in numbers]

    def read(rollout: RolloutBatch, _: list[str], scores: Scores) -> list[float]:
        score, _dense = split_dense(scores, [len(r.ids) for r in rollout.responses], setup.world.device)
        return score.tolist()

    return sampled_and_scored(setup, models_of_reference(setup), prompts, uniforms, read, with_kl=False)


def models_of_reference(setup: Setup) -> Models:
    """The models with ref_policy as the policy. To be called before training, when the policy is its own reference
    unless the config names another."""
    models = setup.models_to_sample()
    return replace(
        models,
        policy=models.ref_policy or models.policy,
        sampler=models.sampler if setup.config.ref_policy is None else None,
    )


# ------------------------------------------------------------------------------- between the processes


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
