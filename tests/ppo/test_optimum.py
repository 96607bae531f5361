"""Training with exact gradients ends at the optimum of each loss.

The task has 40 responses to each of two prompts, so sampling is not needed. A policy is a table of logits with one row
per state. A rollout contains every possible response y with weight pi(y|x), the probability that the policy samples it.
So the gradient is the *expected* gradient, and its fixed point can be compared with a formula.
tests/support/optimum_task.py has the formulas and explains the notation.

The group of a prompt is infinite in such a rollout. Its mean and standard deviation are those under pi, and the mean of
the other responses equals the mean of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_cli.algorithms.advantages import broadcast_to_tokens, reward_to_go
from rlhf_cli.algorithms.kl import kl_full
from rlhf_cli.algorithms.losses import Weighting, loss_weights, value_loss
from rlhf_cli.config.ppo import PPO
from rlhf_cli.config.rewards import Limit
from rlhf_cli.ppo.scores import Limits
from rlhf_cli.ppo.update import KLCoefs
from rlhf_cli.processes.distributed import ALONE
from rlhf_cli.rollout.rollout import TokenScores
from rlhf_cli.tensor_ops import token_entropy, token_logprobs
from stages import ppo as stage
from support.optimum_task import (
    backwards,
    chances,
    entropy_rule,
    kl_regularised,
    make_task,
    mean_of_prompt,
    soft_rule,
    token_k3_rule,
    token_kl_rule,
    total_variation,
)

TASK = make_task(seed=0, vocab_size=4, longest=3, num_prompts=2)
BETA = 0.3
PI_STAR = kl_regularised(TASK, BETA)
NEAR, FAR = 0.01, 0.03
"""Total variation distances. A correct run ends within NEAR of its optimum, a run with a bug farther away than FAR."""
NUM_UPDATES = 160


def algorithm(estimator: str = "gae", **keys: Any) -> PPO:
    """The section `ppo` of a config."""
    common = {"advantage_estimator": estimator, "kl_coef": BETA, "whiten_advantages": False, "ppo_epochs": 1}
    sizes = {"num_iterations": 1, "rollout_batch_size": 1, "minibatch_size": 1}
    return PPO.model_validate(common | sizes | keys)


def train(ppo: PPO, score_of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Train on TASK with the functions of stages/ppo.py; return pi(y|x) [B] of the trained policy.

    `score_of` gives the score of an update, from pi(y|x); None: the task's.
    """
    mask, config = TASK.mask, SimpleNamespace(ppo=ppo, ptx=None)
    logits = TASK.ref_logits.clone().requires_grad_()
    values = torch.zeros(len(TASK.states), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits, values], lr=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / NUM_UPDATES)
    ref_logits = TASK.ref_logits[TASK.state]
    batch: Any = SimpleNamespace(response_mask=mask, kl_full=None, pad=lambda x: x)
    batch.ref_logprobs = token_logprobs(ref_logits, TASK.token)
    for _ in range(NUM_UPDATES // ppo.ppo_epochs):
        # 1. Rollout: every response, weighted by its probability under the policy.
        with torch.no_grad():
            chance = chances(TASK, logits)
            batch.logprobs = token_logprobs(logits[TASK.state], TASK.token)
            old_values = values[TASK.state]

        # 2 to 4. Score, token rewards, advantages.
        score = TASK.score if score_of is None else score_of(chance)
        rewards = stage._token_rewards(batch, score, None, config, ALONE, kl_coef=ppo.kl_coef)
        batch.advantages, returns = advantages_and_returns(ppo, rewards, old_values, chance)

        # 5. Update. A mean over samples becomes a sum over all responses with weights pi(y|x).
        weights = chance.unsqueeze(1) * loss_weights(
            mask,
            aggregation=ppo.loss_aggregation,
            num_tokens=(chance.unsqueeze(1) * mask).sum(),
            num_sequences=TASK.num_prompts,
            max_new_tokens=mask.shape[1],
            dtype=torch.float64,
        )
        weighting = Weighting(weights=weights, num_tokens=1.0)
        for _ in range(ppo.ppo_epochs):
            new_logits = logits[TASK.state]
            new = TokenScores(
                token_logprobs(new_logits, TASK.token),
                entropy=token_entropy(new_logits) if ppo.entropy_coef else None,
                kl_full=kl_full(new_logits, ref_logits),
            )
            coefs = KLCoefs(ppo.kl_coef, policy_kl_coef=1.0)
            loss, _ = stage._policy_terms(batch, new, new.logprobs, config, coefs, weighting)
            error, _ = value_loss(values[TASK.state], old_values, returns, mask, value_clip_range=None, **weighting)
            optimizer.zero_grad()
            (loss + error).backward()
            optimizer.step()
            schedule.step()
    return chances(TASK, logits.detach())


def advantages_and_returns(ppo: PPO, rewards: Tensor, values: Tensor, chance: Tensor) -> tuple[Tensor, Tensor]:
    """Both [B, R]. Whitening and groups are those of infinitely many samples."""
    mask = TASK.mask
    if ppo.advantage_estimator in ("rloo", "grpo", "dr_grpo"):
        total = rewards.sum(1)
        deviation = total - mean_of_prompt(TASK, total, chance)
        if ppo.advantage_estimator == "grpo":
            deviation = deviation / (mean_of_prompt(TASK, deviation.square(), chance).sqrt() + 1e-6)
        return broadcast_to_tokens(deviation, mask), reward_to_go(rewards, mask, gamma=1.0)
    config: Any = SimpleNamespace(ppo=ppo.model_copy(update={"whiten_advantages": False}))
    advantages, returns = stage._advantages(rewards, values, mask, config, ALONE)
    return whiten(advantages, chance.unsqueeze(1) * mask) if ppo.whitens_advantages else advantages, returns


def whiten(x: Tensor, weight: Tensor) -> Tensor:
    """The limit of `masked_whiten` for infinitely many samples."""
    deviation = x - (weight * x).sum() / weight.sum()
    return deviation / ((weight * deviation.square()).sum() / weight.sum() + 1e-8).sqrt()


def distance(p: Tensor, q: Tensor) -> float:
    return total_variation(TASK, p, q)


# ---- the optima


def test_the_task_leaves_room_to_learn():
    reference = chances(TASK, TASK.ref_logits)
    torch.testing.assert_close(reference.view(2, -1).sum(1), torch.ones(2, dtype=torch.float64))
    assert distance(reference, PI_STAR) > 0.4


def test_pi_star_from_whole_responses_equals_pi_star_token_by_token():
    assert distance(backwards(TASK, soft_rule(BETA)), PI_STAR) < 1e-12


# ---- training to pi*


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(algorithm(), id="gae"),
        pytest.param(algorithm(whiten_advantages=True), id="gae, whitened"),
        pytest.param(algorithm(gae_lambda=1.0), id="gae, lambda 1"),
        pytest.param(algorithm(gae_lambda=1.0, whiten_advantages=True), id="gae, lambda 1, whitened"),
        pytest.param(algorithm(gae_lambda=0.0), id="gae, lambda 0"),
        pytest.param(algorithm(ppo_epochs=4), id="gae, 4 epochs"),
        pytest.param(algorithm(ppo_epochs=4, whiten_advantages=True), id="gae, 4 epochs, whitened"),
        pytest.param(algorithm(ppo_epochs=4, dual_clip=1.1, whiten_advantages=True), id="gae, 4 epochs, dual clip"),
        pytest.param(algorithm(ppo_epochs=4, objective="penalty", whiten_advantages=True), id="gae, penalty"),
        pytest.param(algorithm(loss_aggregation="sequence"), id="gae, sequence mean"),
        pytest.param(algorithm(loss_aggregation="constant"), id="gae, constant divisor"),
        pytest.param(algorithm("monte_carlo"), id="monte_carlo"),
        pytest.param(algorithm("reinforce"), id="reinforce"),
        pytest.param(algorithm("reinforce", whiten_advantages=True), id="reinforce_pp"),
        pytest.param(algorithm("rloo"), id="rloo"),
        pytest.param(algorithm("rloo", ppo_epochs=4), id="rloo, 4 epochs"),
        pytest.param(algorithm("rloo", loss_aggregation="sequence"), id="rloo, sequence mean"),
        pytest.param(algorithm("grpo"), id="grpo, KL in the reward"),
        pytest.param(algorithm("rloo", kl_in="loss"), id="k2 of the sequence as a loss"),
        pytest.param(algorithm(kl_in="loss"), id="gae, k2 of the sequence as a loss"),
    ],
)
def test_training_ends_at_pi_star(algorithm):
    assert distance(train(algorithm), PI_STAR) < NEAR


# ---- training to another optimum than pi*


def kl_loss_of(kind: str, estimator: str = "dr_grpo", **keys: Any) -> PPO:
    return algorithm(estimator, kl_in="loss", kl_estimator=kind, **keys)


@pytest.mark.parametrize(
    ("algorithm", "optimum"),
    [
        pytest.param(kl_loss_of("k2"), backwards(TASK, token_kl_rule(BETA)), id="k2 as a loss"),
        pytest.param(kl_loss_of("full"), backwards(TASK, token_kl_rule(BETA)), id="full KL as a loss"),
        pytest.param(kl_loss_of("full", "gae"), backwards(TASK, token_kl_rule(BETA)), id="gae, full KL as a loss"),
        pytest.param(kl_loss_of("k3"), backwards(TASK, token_k3_rule(BETA)), id="k3 as a loss"),
        pytest.param(
            kl_loss_of("k3", loss_aggregation="constant"),
            backwards(TASK, token_k3_rule(BETA)),
            id="k3 as a loss, constant divisor",
        ),
        pytest.param(algorithm(entropy_coef=0.1), backwards(TASK, entropy_rule(BETA, 0.1)), id="gae, entropy bonus"),
        pytest.param(
            algorithm("rloo", entropy_coef=0.1), backwards(TASK, entropy_rule(BETA, 0.1)), id="rloo, entropy bonus"
        ),
        pytest.param(
            algorithm("rloo", entropy_coef=-0.1), backwards(TASK, entropy_rule(BETA, -0.1)), id="rloo, entropy cost"
        ),
    ],
)
def test_training_ends_at_another_optimum_than_pi_star(algorithm, optimum):
    policy = train(algorithm)
    assert distance(policy, optimum) < NEAR
    assert distance(policy, kl_regularised(TASK, algorithm.kl_coef)) > FAR


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("side", ["above", "below"])
def test_a_limit_ends_at_the_constrained_optimum(side: str, whiten: bool) -> None:
    """Of the policies ref * exp((r - lambda * c) / (1 + lambda) / beta) it is the one whose mean c is the limit."""
    cost = 0.5 * torch.randn(TASK.score.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = cost if side == "below" else -cost
    limits = Limits({"c": Limit.model_validate({side: -0.3 if side == "below" else 0.3})})
    limits.units = {"c": 1.0}
    beyond = -0.3

    def policy(lam: float) -> Tensor:
        return kl_regularised(replace(TASK, score=(TASK.score - lam * cost) / (1 + lam)), BETA)

    def mean_cost(chance: Tensor) -> float:
        return ((chance * cost).sum() / TASK.num_prompts).item()

    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if mean_cost(policy(middle)) > beyond else (low, middle)
    assert mean_cost(PI_STAR) > beyond + 0.3
    assert 2 < high < 3

    def score_of(chance: Tensor) -> Tensor:
        score = limits.apply(TASK.score, {"c": found})
        limits.adapt({"reward/c": ((chance * found).sum() / TASK.num_prompts).item(), "policy/grad_norm": 1.0})
        return score

    learned = train(algorithm(whiten_advantages=whiten), score_of=score_of)
    assert limits.lambdas["c"] == pytest.approx(high, rel=0.05)
    assert mean_cost(learned) == pytest.approx(beyond, abs=0.02)
    assert distance(learned, policy(high)) < NEAR
