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
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from rlhf_cli.algorithms.advantages import broadcast_to_tokens, gae, reward_to_go, token_rewards
from rlhf_cli.algorithms.kl import kl_estimate, kl_full, kl_loss, sequence_k2_loss
from rlhf_cli.algorithms.losses import entropy_bonus, loss_weights, penalty_loss, policy_loss, value_loss
from rlhf_cli.config.rewards import Limit
from rlhf_cli.ppo.scores import Limits
from rlhf_cli.tensor_ops import token_entropy, token_logprobs
from support.optimum_task import (
    Task,
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
KlInLoss = Literal["k1", "k2", "k3", "full", "k2_sequence"]


@dataclass(frozen=True)
class Algorithm:
    """The options of a run. They have the names of the config keys where such keys exist."""

    advantage_estimator: Literal["gae", "monte_carlo", "reinforce", "rloo", "grpo", "dr_grpo"] = "gae"
    gamma: float = 1.0
    gae_lambda: float = 0.95
    whiten_advantages: bool = False
    kl_coef: float = BETA
    kl_in_reward: Literal["k1", "k2", "k3", "abs"] | None = "k1"
    kl_in_loss: KlInLoss | None = None
    objective: Literal["clip", "penalty"] = "clip"
    dual_clip: float | None = None
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    entropy_coef: float = 0.0
    ppo_epochs: int = 1


def train(
    options: Algorithm,
    task: Task = TASK,
    *,
    num_updates: int = 160,
    score_of: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Train on TASK with the steps of stages/ppo.py; return pi(y|x) [B] of the trained policy.

    `score_of` gives the score of an update, from pi(y|x); None: the task's.
    """
    mask = task.mask
    logits = TASK.ref_logits.clone().requires_grad_()
    values = torch.zeros(len(TASK.states), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits, values], lr=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / num_updates)
    ref_logits = TASK.ref_logits[task.state]
    ref_logprobs = token_logprobs(ref_logits, task.token)

    for _ in range(num_updates // options.ppo_epochs):
        # 1. Rollout: every response, weighted by its probability under the policy.
        with torch.no_grad():
            chance = chances(TASK, logits)
            logprobs = token_logprobs(logits[task.state], task.token)
            old_values = values[task.state]

        # 2, 3. Score and token rewards.
        kl = kl_estimate(logprobs, ref_logprobs, estimator=options.kl_in_reward or "k1")
        score = task.score if score_of is None else score_of(chance)
        rewards = token_rewards(score, kl, mask, kl_coef=options.kl_coef if options.kl_in_reward else 0.0)

        # 4. Advantages.
        advantages, returns = advantages_and_returns(options, mask, rewards, old_values, chance)
        if options.whiten_advantages:
            advantages = whiten(advantages, chance.unsqueeze(1) * mask)

        # 5. Update. A mean over samples becomes a sum over all responses with weights pi(y|x).
        weights = chance.unsqueeze(1) * loss_weights(
            mask,
            aggregation=options.loss_aggregation,
            num_tokens=(chance.unsqueeze(1) * mask).sum(),
            num_sequences=TASK.num_prompts,
            max_new_tokens=mask.shape[1],
            dtype=torch.float64,
        )
        for _ in range(options.ppo_epochs):
            new_logits = logits[task.state]
            new_logprobs = token_logprobs(new_logits, task.token)
            loss = policy_term(options, new_logprobs, logprobs, advantages, mask, weights)
            if options.kl_in_loss:
                loss = loss + options.kl_coef * kl_term(
                    options.kl_in_loss, new_logits, ref_logits, task.token, mask, weights
                )
            if options.entropy_coef:
                loss = loss - options.entropy_coef * entropy_bonus(token_entropy(new_logits), mask, weights=weights)[0]
            error, _ = value_loss(values[task.state], old_values, returns, mask, value_clip_range=None, weights=weights)
            optimizer.zero_grad()
            (loss + error).backward()
            optimizer.step()
            schedule.step()
    return chances(TASK, logits.detach())


def advantages_and_returns(
    options: Algorithm, mask: Tensor, rewards: Tensor, values: Tensor, chance: Tensor
) -> tuple[Tensor, Tensor]:
    """Both [B, R]. Every run trains values on the returns, but only gae and monte_carlo read the values."""
    to_go = reward_to_go(rewards, mask, gamma=options.gamma)
    if options.advantage_estimator == "gae":
        return gae(rewards, values, mask, gamma=options.gamma, gae_lambda=options.gae_lambda)
    if options.advantage_estimator == "monte_carlo":
        return torch.where(mask, to_go - values, 0), to_go
    if options.advantage_estimator == "reinforce":
        return to_go, to_go
    # rloo, grpo and dr_grpo subtract the mean of an infinite group; grpo also divides by its standard deviation.
    total = rewards.sum(1)
    deviation = total - mean_of_prompt(TASK, total, chance)
    if options.advantage_estimator == "grpo":
        deviation = deviation / (mean_of_prompt(TASK, deviation.square(), chance).sqrt() + 1e-6)
    return broadcast_to_tokens(deviation, mask), to_go


def whiten(x: Tensor, weight: Tensor) -> Tensor:
    """The limit of `masked_whiten` for infinitely many samples."""
    deviation = x - (weight * x).sum() / weight.sum()
    return deviation / ((weight * deviation.square()).sum() / weight.sum() + 1e-8).sqrt()


def policy_term(
    options: Algorithm, new_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> Tensor:
    batch = (new_logprobs, logprobs, advantages, mask)
    if options.objective == "penalty":
        return penalty_loss(*batch, policy_kl_coef=1.0, weights=weights)[0]
    return policy_loss(*batch, clip_range=0.2, dual_clip=options.dual_clip, weights=weights)[0]


def kl_term(kind: KlInLoss, logits: Tensor, ref_logits: Tensor, token: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    logprobs, ref_logprobs = token_logprobs(logits, token), token_logprobs(ref_logits, token)
    if kind == "k2_sequence":
        return sequence_k2_loss(logprobs, ref_logprobs, mask, weights=weights)[0]
    kl = kl_full(logits, ref_logits) if kind == "full" else kl_estimate(logprobs, ref_logprobs, estimator=kind)
    return kl_loss(kl, mask, weights=weights)[0]


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
        pytest.param(Algorithm(), id="gae"),
        pytest.param(Algorithm(whiten_advantages=True), id="gae, whitened"),
        pytest.param(Algorithm(gae_lambda=1.0), id="gae, lambda 1"),
        pytest.param(Algorithm(gae_lambda=1.0, whiten_advantages=True), id="gae, lambda 1, whitened"),
        pytest.param(Algorithm(gae_lambda=0.0), id="gae, lambda 0"),
        pytest.param(Algorithm(ppo_epochs=4), id="gae, 4 epochs"),
        pytest.param(Algorithm(ppo_epochs=4, whiten_advantages=True), id="gae, 4 epochs, whitened"),
        pytest.param(Algorithm(ppo_epochs=4, dual_clip=1.1, whiten_advantages=True), id="gae, 4 epochs, dual clip"),
        pytest.param(Algorithm(ppo_epochs=4, objective="penalty", whiten_advantages=True), id="gae, penalty"),
        pytest.param(Algorithm(loss_aggregation="sequence"), id="gae, sequence mean"),
        pytest.param(Algorithm(loss_aggregation="constant"), id="gae, constant divisor"),
        pytest.param(Algorithm("monte_carlo"), id="monte_carlo"),
        pytest.param(Algorithm("reinforce"), id="reinforce"),
        pytest.param(Algorithm("reinforce", whiten_advantages=True), id="reinforce_pp"),
        pytest.param(Algorithm("rloo"), id="rloo"),
        pytest.param(Algorithm("rloo", ppo_epochs=4), id="rloo, 4 epochs"),
        pytest.param(Algorithm("rloo", loss_aggregation="sequence"), id="rloo, sequence mean"),
        pytest.param(Algorithm("grpo"), id="grpo, KL in the reward"),
        pytest.param(Algorithm("rloo", kl_in_reward=None, kl_in_loss="k2_sequence"), id="k2 of the sequence as a loss"),
        pytest.param(Algorithm(kl_in_reward=None, kl_in_loss="k2_sequence"), id="gae, k2 of the sequence as a loss"),
    ],
)
def test_training_ends_at_pi_star(algorithm):
    assert distance(train(algorithm), PI_STAR) < NEAR


# ---- training to another optimum than pi*


def kl_loss_of(kind: KlInLoss, estimator: Any = "dr_grpo", kl_coef: float = BETA, **choices: Any) -> Algorithm:
    return Algorithm(estimator, kl_in_reward=None, kl_in_loss=kind, kl_coef=kl_coef, **choices)


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
        pytest.param(Algorithm(entropy_coef=0.1), backwards(TASK, entropy_rule(BETA, 0.1)), id="gae, entropy bonus"),
        pytest.param(
            Algorithm("rloo", entropy_coef=0.1), backwards(TASK, entropy_rule(BETA, 0.1)), id="rloo, entropy bonus"
        ),
        pytest.param(
            Algorithm("rloo", entropy_coef=-0.1), backwards(TASK, entropy_rule(BETA, -0.1)), id="rloo, entropy cost"
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

    learned = train(Algorithm(whiten_advantages=whiten), score_of=score_of)
    assert limits.lambdas["c"] == pytest.approx(high, rel=0.05)
    assert mean_cost(learned) == pytest.approx(beyond, abs=0.02)
    assert distance(learned, policy(high)) < NEAR
