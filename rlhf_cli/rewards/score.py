"""From the weighted sum of the rewards to the score that PPO optimises: normalised, clipped, minus penalties."""

from __future__ import annotations

from typing import assert_never

import torch

from rlhf_cli.algorithms.moments import Moments, merge, moments_of
from rlhf_cli.algorithms.shaping import clip_score, length_penalty, missing_eos, overlong_penalty
from rlhf_cli.config.ppo_update import PPO
from rlhf_cli.processes.distributed import World


class ScoreScale:
    """The mean and standard deviation that normalise scores, in addition to each reward model's own.

    `none` leaves scores unchanged. `running` updates them with every batch before it normalises that batch.
    `reference` computes them once, from samples of ref_policy. `running_std` and `reference_std` divide by the standard
    deviation and leave the mean. The moments are the whole state.
    """

    def __init__(self, ppo: PPO):
        self.kind = ppo.score_normalization
        self.moments = Moments(0, 0.0, 0.0)

    def take(self, score: torch.Tensor, world: World) -> None:
        """Update the moments with the scores [B] of all processes."""
        for part in world.gather(moments_of(score)):
            self.moments = merge(self.moments, part.count, part.mean, part.squared_deviations)

    def apply(self, score: torch.Tensor) -> torch.Tensor:
        """``(score - mean) / std`` or ``score / std``, [B]; a standard deviation of 0 counts as 1."""
        std = self.moments.std if self.moments.std > 0 else 1.0
        match self.kind:
            case "none":
                return score
            case "running" | "reference":
                return (score - self.moments.mean) / std
            case "running_std" | "reference_std":
                return score / std
            case _:
                assert_never(self.kind)


def shaped_score(
    raw: torch.Tensor,
    lengths: list[int],
    ended: list[bool],
    scale: ScoreScale,
    ppo: PPO,
    *,
    max_new_tokens: int,
) -> torch.Tensor:
    """The score [B] that PPO optimises, from the weighted sum [B] of the rewards.

    ``clip((raw - mean) / std) - missing_eos - length_penalty - overlong_penalty``

    `PPO` in rlhf_cli/config/ppo_update.py gives the reason for each step.
    """
    tokens = torch.tensor(lengths, dtype=raw.dtype)
    score = scale.apply(raw)
    if ppo.score_clip is not None:
        score = clip_score(score, ppo.score_clip)
    score = score - missing_eos(torch.tensor(ended), penalty=ppo.missing_eos_penalty)
    score = score - length_penalty(tokens, per_token=ppo.length_penalty)
    if ppo.overlong_buffer:
        score = score - overlong_penalty(
            tokens, max_new_tokens=max_new_tokens, buffer=ppo.overlong_buffer, penalty=ppo.overlong_penalty
        )
    return score
