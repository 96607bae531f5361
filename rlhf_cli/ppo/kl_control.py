"""The KL coefficients of a run, and how they follow the measured KL."""

from __future__ import annotations

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


def follow_kl(setup: Setup, coefs: KLCoefs, newest: UpdateBatch, kl: float) -> dict[str, float]:
    """Move the adaptive coefficients after an update; `kl` is the KL to ref_policy, in nats per response.

    Returns the figures of PPO-penalty's coefficient.
    """
    ppo, world = setup.config.ppo, setup.world
    metrics = {}
    match ppo.kl_controller:
        case "fixed":
            pass
        case "adaptive":
            assert ppo.kl_target is not None
            coefs.kl_coef = adaptive_kl_coef(
                coefs.kl_coef,
                kl,
                target=ppo.kl_target,
                horizon=ppo.kl_horizon,
                num_episodes=ppo.rollout_batch_size,
            )
        case _:
            assert_never(ppo.kl_controller)
    if ppo.objective == "penalty":
        metrics["policy/policy_kl_coef"] = coefs.policy_kl_coef
    if ppo.policy_kl_target is not None:
        # KL(old, new) after the update, by k3 on the newest rollout's tokens.
        logprobs, _ = current_scores(setup, newest)
        token_kl = kl_estimate(newest.logprobs, logprobs.to(newest.logprobs), estimator="k3")  # [B, R]
        mask = newest.response_mask
        sums = world.sum_floats({"kl": (token_kl * mask).sum().item(), "tokens": float(mask.sum().item())})
        metrics["policy/kl_after_update"] = sums["kl"] / sums["tokens"]
        coefs.policy_kl_coef = adaptive_policy_kl_coef(
            coefs.policy_kl_coef, metrics["policy/kl_after_update"], target=ppo.policy_kl_target
        )
    return metrics
