"""The KL coefficients of a run, and how they follow the measured KL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from rlhf_cli.algorithms.kl import adaptive_kl_coef, adaptive_policy_kl_coef, kl_estimate
from rlhf_cli.ppo.batch import UpdateBatch
from rlhf_cli.ppo.replay import current_scores
from rlhf_cli.ppo.setup import Setup


@dataclass
class KLCoefs:
    """The current coefficients."""

    kl_coef: float
    """Of the KL to ref_policy."""
    policy_kl_coef: float
    """Of PPO-penalty's KL between the policy before and after an update."""


def follow_kl(setup: Setup, coefs: KLCoefs, newest: UpdateBatch, metrics: Mapping[str, float]) -> dict[str, float]:
    """Move the adaptive coefficients after an update, given the figures of its iteration.

    An iteration in which the policy did not learn, as in the warm-up of the value model, moves neither: its KL says
    nothing about the coefficients.

    Returns the figures of PPO-penalty's coefficient.
    """
    ppo = setup.config.ppo
    learned = "policy/grad_norm" in metrics  # absent in the warm-up, and if every step was bad
    penalty = {}
    match ppo.kl_controller:
        case "fixed":
            pass
        case "adaptive":
            assert ppo.kl_target is not None
            if learned:
                coefs.kl_coef = adaptive_kl_coef(
                    coefs.kl_coef,
                    metrics["objective/kl"],
                    target=ppo.kl_target,
                    horizon=ppo.kl_horizon,
                    num_episodes=ppo.rollout_batch_size,
                )
        case _:
            assert_never(ppo.kl_controller)
    if ppo.objective == "penalty":
        penalty["policy/policy_kl_coef"] = coefs.policy_kl_coef
    if ppo.policy_kl_target is not None:
        kl = penalty["policy/kl_after_update"] = _kl_after_update(setup, newest)
        if learned:
            coefs.policy_kl_coef = adaptive_policy_kl_coef(coefs.policy_kl_coef, kl, target=ppo.policy_kl_target)
    return penalty


def _kl_after_update(setup: Setup, newest: UpdateBatch) -> float:
    """KL(old, new) per token after the update, by k3 on the newest rollout's tokens."""
    logprobs, _ = current_scores(setup, newest)
    token_kl = kl_estimate(newest.logprobs, logprobs.to(newest.logprobs), estimator="k3")  # [B, R]
    mask = newest.response_mask
    sums = setup.world.sum_floats({"kl": (token_kl * mask).sum().item(), "tokens": float(mask.sum().item())})
    return sums["kl"] / sums["tokens"]
