"""From the weighted sum of the rewards to the score that PPO optimises: normalised, clipped, minus penalties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, assert_never

import torch

from rlhf_cli.algorithms.moments import Moments, merge, moments_of
from rlhf_cli.algorithms.shaping import (
    clip_score,
    length_penalty,
    limited_score,
    missing_eos,
    next_lambda,
    overlong_penalty,
)
from rlhf_cli.config.ppo_update import PPO
from rlhf_cli.config.rewards import Limit
from rlhf_cli.processes.distributed import World
from rlhf_cli.run.checkpoint import State

S = TypeVar("S", float, torch.Tensor)
NO_SCORES = Moments(0, 0.0, 0.0)


class ScoreScale:
    """The mean and standard deviation that normalise scores, in addition to each reward model's own.

    `none` leaves scores unchanged. `running` updates them with every batch before it normalises that batch.
    `reference` computes them once, from samples of ref_policy. `running_std` and `reference_std` divide by the standard
    deviation and leave the mean. The moments are the whole state.
    """

    def __init__(self, ppo: PPO):
        self.kind = ppo.score_normalization
        self.moments = NO_SCORES

    def take(self, score: torch.Tensor, world: World) -> None:
        """Update the moments with the scores [B] of all processes."""
        self.moments = _moments(score, world, self.moments)

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


WITHIN = 0.1
"""The first multiplier of a limit that already holds."""


class Limits:
    """The multiplier lambda of each limit (`rewards: - {limit: ...}`), by the name of its source.

    The excess of a score over its limit is measured in standard deviations of the source's scores in the first
    iteration. So the same learning rate fits a probability and a number of words.

    A multiplier starts at 1, or at WITHIN if the first scores hold the limit: otherwise it would reward what is further
    within the limit before anything has gone beyond it.
    """

    def __init__(self, limits: Mapping[str, Limit]):
        self.limits = limits
        self.lambdas = dict.fromkeys(limits, 1.0)
        self.units: dict[str, float] = {}

    def measure(self, each: Mapping[str, torch.Tensor], world: World) -> None:
        """Take units and first multipliers from the first scores [B] of each source on all processes."""
        if not self.units:
            first = {name: _moments(each[name], world) for name in self.limits}
            self.units = {name: moments.std or 1.0 for name, moments in first.items()}
            self.lambdas = {name: WITHIN if self._excess(name, first[name].mean) < 0 else 1.0 for name in first}

    def apply(self, score: torch.Tensor, each: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`limited_score` [B], from the score [B] and the scores [B] of each source."""
        if not self.limits:
            return score
        excess = torch.stack([self._excess(name, each[name].to(score)) for name in self.limits])
        return limited_score(score, excess, torch.tensor(list(self.lambdas.values()), dtype=score.dtype))

    @property
    def score_share(self) -> float:
        """The share of the score beside the limits: ``1 / (1 + sum of lambdas)``."""
        return 1 / (1 + sum(self.lambdas.values()))

    def figures(self) -> dict[str, float]:
        """The multipliers as metrics."""
        return {f"lambda/{name}": lam for name, lam in self.lambdas.items()}

    def follow(self, metrics: Mapping[str, float]) -> None:
        """Move the multipliers after an iteration with these metrics, unless the policy did not learn in it."""
        if "policy/grad_norm" not in metrics:
            return
        for name, limit in self.limits.items():
            excess = self._excess(name, metrics[f"reward/{name}"])
            self.lambdas[name] = next_lambda(self.lambdas[name], excess, learning_rate=limit.learning_rate)

    def _excess(self, name: str, score: S) -> S:
        """By how much a score is beyond its limit, in units; below 0 within it."""
        limit = self.limits[name]
        return (limit.above - score if limit.above is not None else score - (limit.below or 0.0)) / self.units[name]

    def state(self) -> State:
        return {}, {"lambdas": self.lambdas, "units": self.units}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, dict[str, float]]) -> None:  # noqa: ARG002
        self.lambdas, self.units = numbers["lambdas"], numbers["units"]


def _moments(score: torch.Tensor, world: World, before: Moments = NO_SCORES) -> Moments:
    """The moments of the scores [B] of all processes, together with those of earlier ones."""
    for part in world.gather(moments_of(score)):
        before = merge(before, part.count, part.mean, part.squared_deviations)
    return before


def shaped_score(
    raw: torch.Tensor,
    each: Mapping[str, torch.Tensor],
    lengths: list[int],
    ended: list[bool],
    scale: ScoreScale,
    limits: Limits,
    ppo: PPO,
    *,
    max_new_tokens: int,
) -> torch.Tensor:
    """The score [B] that PPO optimises, from the weighted sum [B] of the rewards.

    ``limited(clip((raw - mean) / std)) - missing_eos - length_penalty - overlong_penalty``

    `limited` is the part of the limits on sources of their own (`Limits.apply`), whose scores are in `each`.

    `PPO` in rlhf_cli/config/ppo_update.py gives the reason for each step.
    """
    tokens = torch.tensor(lengths, dtype=raw.dtype)
    score = scale.apply(raw)
    if ppo.score_clip is not None:
        score = clip_score(score, ppo.score_clip)
    score = limits.apply(score, each) - missing_eos(torch.tensor(ended), penalty=ppo.missing_eos_penalty)
    score = score - length_penalty(tokens, per_token=ppo.length_penalty)
    if ppo.overlong_buffer:
        score = score - overlong_penalty(
            tokens, max_new_tokens=max_new_tokens, buffer=ppo.overlong_buffer, penalty=ppo.overlong_penalty
        )
    return score
