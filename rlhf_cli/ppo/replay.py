"""The batch of an update: the newest rollout, and older ones brought up to date (`num_rollouts_per_update`)."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rlhf_cli.algorithms.policy import truncated_importance
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.ppo.batch import UpdateBatch, merge
from rlhf_cli.ppo.processes import from_all_processes
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.rollout.distribution import Response
from rlhf_cli.rollout.rollout import cut_responses, padded_rows
from rlhf_cli.rollout.scoring import IDLE_PROMPT, TokenScores, idle_response, score_tokens
from rlhf_cli.sharding import in_step

Recent = deque[tuple[int, UpdateBatch]]
"""The rollouts that an update trains on, each with its iteration."""


def batch_of_update(setup: Setup, recent: Recent, newest: UpdateBatch, iteration: int) -> UpdateBatch:
    """Add the newest rollout to the recent ones; returns all their rows, of all processes.

    The advantages of rollouts that another policy, or the same policy in another computation, may have sampled are
    corrected for it.
    """
    one = setup.config.ppo.num_rollouts_per_update == 1
    recent.append((iteration, newest if one else newest.to("cpu")))
    parts = []
    for made_in, batch in recent:
        batch = batch.to(setup.world.device)
        if made_in < iteration:
            batch = refreshed(setup, batch)
        if made_in < iteration or setup.sampler_may_differ:
            batch = corrected(batch, cap=setup.config.ppo.importance_ratio_cap)
        parts.append(from_all_processes(batch, partial(setup.prompts_of, made_in), setup.world, setup.together))
    return merge(parts)


def refreshed(setup: Setup, batch: UpdateBatch) -> UpdateBatch:
    """A batch of an older policy, with the log-probabilities and values of the current one.

    The ratio and the value clip then start from the current policy.
    """
    logprobs, values = current_scores(setup, batch)
    return replace(batch, logprobs=logprobs, values=values if values is not None else batch.values)


def corrected(batch: UpdateBatch, *, cap: float) -> UpdateBatch:
    """The batch with ``advantages * min(exp(logprobs - sampled_logprobs), cap)`` (`truncated_importance`).

    `logprobs` are those at the start of the update; `sampled_logprobs` those of the sampler, whether it is an older
    policy, another engine or the same weights in bfloat16.
    """
    importance = truncated_importance(batch.logprobs, batch.sampled_logprobs, batch.response_mask, cap=cap)
    return replace(batch, advantages=batch.advantages * importance)


@torch.no_grad()
def current_scores(setup: Setup, batch: UpdateBatch) -> tuple[Tensor, Tensor | None]:
    """(log-probabilities, values), [B, R] each, of a batch under the current models; values None without any."""
    prompts, responses = batch.prompts, batch.responses
    cut = cut_responses(setup.budget, setup.models.policy, prompts, responses)

    def score(rows: list[PromptRow], answers: list[Response]) -> TokenScores:
        return score_tokens(setup.models, rows, answers, setup.sampling, setup.config.precision)

    scores = [
        score([prompts[i] for i in rows], [responses[i] for i in rows])
        for rows in in_step(
            setup.models.first_sharded, cut, lambda: score([IDLE_PROMPT], [idle_response(setup.sampling)])
        )
    ]
    lengths = [len(r.ids) for r in responses]
    values = [part.values for part in scores if part.values is not None]
    return (
        padded_rows([part.logprobs for part in scores], cut, lengths),
        padded_rows(values, cut, lengths) if values else None,
    )
