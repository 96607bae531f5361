"""The distance of the policy from ref_policy: estimates, losses, and controllers of their coefficients."""

from typing import assert_never

import torch
from torch import Tensor

from rlhf_cli.algorithms.losses import weighted_sum
from rlhf_cli.algorithms.names import TokenKL
from rlhf_cli.tensor_ops import masked_sum


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: TokenKL) -> Tensor:
    """Estimate KL(policy, ref_policy) at each token that the policy sampled.

    ``difference = logprobs - ref_logprobs``
    ``k1 = difference``
    ``k2 = difference**2 / 2``
    ``k3 = exp(-difference) - 1 + difference``
    ``abs = |difference|``

    k1 and k3 are unbiased. k1 may be negative at a single token; k3 is never negative and has less variance. k2 is
    never negative and slightly biased. abs is a distance, not an estimate of the KL. Nothing is clamped, so k3 can be
    huge at a token that ref_policy finds far likelier than the policy (verl clamps it at 10).

    In the reward, use k1: the others lead to another optimum. In the loss, consider the expected gradient over tokens
    of the policy: for k1 it is 0, for k2 that of KL(policy, ref_policy), for k3 that of KL(ref_policy, policy).

    Args:
        logprobs: [...], nats, of the sampled tokens under the policy that sampled them.
        ref_logprobs: [...], the same under ref_policy, at the same temperature.
        estimator: "k1", "k2", "k3" or "abs".

    Returns:
        [...], nats. No mask is applied: mask the result.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).

    >>> logprobs, ref_logprobs = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> kl_estimate(logprobs, ref_logprobs, estimator="k1")  # log(2)
    tensor([0.6931])
    >>> kl_estimate(logprobs, ref_logprobs, estimator="k3")  # 1/2 - 1 + log(2)
    tensor([0.1931])
    """
    difference = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference
        case "abs":
            return difference.abs()
        case _:
            assert_never(estimator)


def kl_full(logits: Tensor, ref_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Compute KL(policy, ref_policy) at each token exactly, over the whole vocabulary.

    ``sum(p * (log(p) - log(q)))`` over V,
    ``p = softmax(logits / temperature)``, ``q = softmax(ref_logits / temperature)``

    A token that the policy cannot sample (logit -inf) adds 0, whatever ref_policy gives it. A token that only
    ref_policy cannot sample makes the KL inf, without gradient. The result is 0 or more, except for rounding. It is
    the KL of the next token only: its gradient ignores that the choice of a token changes the KL of later ones.

    Args:
        logits: [..., V], any float type, carries the gradient; computed in float32, or in float64 if it is float64.
        ref_logits: [..., V], of ref_policy; a constant.
        temperature: above 0, of the sampling.

    Returns:
        [...], nats. Several [..., V] tensors are kept for the backward pass.

    >>> logits, ref_logits = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> kl_full(logits, ref_logits)  # (log(2) + log(2/3)) / 2
    tensor([0.1438])
    >>> kl_full(torch.tensor([0.0, -float("inf")]), torch.tensor([0.0, -float("inf")]))
    tensor(0.)
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    ref_logits = ref_logits.detach().to(precise)
    logits = logits.to(precise)
    possible_mask = logits > -torch.inf  # [..., V]
    infinite_mask = (possible_mask & (ref_logits == -torch.inf)).any(-1)  # [...]
    log_p, log_q = (logits / temperature).log_softmax(-1), (ref_logits / temperature).log_softmax(-1)
    # Multiply only finite terms: 0 * inf would be NaN here or in the backward pass.
    log_p_over_q = torch.where(possible_mask & (ref_logits > -torch.inf), log_p - log_q, 0)
    kl = (log_p.exp() * log_p_over_q).sum(-1)
    return torch.where(infinite_mask, torch.inf, kl)


def kl_loss(
    kl: Tensor, mask: Tensor, *, weights: Tensor | None = None, num_tokens: Tensor | float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL to ref_policy as a loss term; add kl_coef times it to the policy loss.

    ``loss = sum(weights * kl)``

    kl is computed with gradient by ``kl_full``, or by ``kl_estimate`` from the current log-probabilities. None of these
    losses equals the KL in the reward, because a token is not charged for the KL of the tokens that follow it. k2 and
    full have another optimum than the KL in the reward, and k3 has a third one. k1 has an expected gradient of 0, so it
    does not hold the policy at all. ``sequence_k2_loss`` has the same optimum as the KL in the reward.

    Args:
        kl: [B, R] (or [N], packed, if all arguments are), nats; carries the gradient.
        mask: [B, R] bool, True on real response tokens; padding of kl may hold anything.
        weights, num_tokens: as for ``policy_loss``.

    Returns:
        (loss, stats): a scalar to minimise, and ``policy/ref_kl``, the mean of kl over tokens, detached.

    >>> loss, stats = kl_loss(torch.tensor([[1.0, 2.0, 1e6]]), torch.tensor([[True, True, False]]))
    >>> loss, stats["policy/ref_kl"]
    (tensor(1.5000), tensor(1.5000))
    """
    num_tokens = mask.sum() if num_tokens is None else num_tokens
    loss = weighted_sum(kl, mask, weights=weights, num_tokens=num_tokens)
    return loss, {"policy/ref_kl": masked_sum(kl.detach(), mask) / num_tokens}


def sequence_k2_loss(
    new_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    num_tokens: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL of whole responses to ref_policy as a loss term; add kl_coef times it to the policy loss.

    ``log_ratio[b] = sum over t of (new_logprobs - ref_logprobs)[b, t]``
    ``loss = sum over b of weight[b] * log_ratio[b]**2 / 2``

    Its gradient is ``weight * log_ratio * grad(log pi(response))``, which is what a reward of -log_ratio would give.
    On responses of the current policy it therefore has the optimum of the KL in the reward,
    ``ref_policy * exp(score / kl_coef) / Z``. No KL loss on single tokens has it for responses of more than one token.
    On responses of an older policy it is biased, more so the further the policy has moved.

    Args:
        new_logprobs: [B, R], padded (one response per row), nats, of the sampled tokens under the current policy;
            carries the gradient.
        ref_logprobs: [B, R], the same under ref_policy, at the same temperature; a constant.
        mask: [B, R] bool, True on real response tokens; padding of the others may hold anything.
        weights: [B, R], as from ``loss_weights``, constant within a row; their mean over the row is used. None uses
            1 / num_tokens. With the weights of the policy loss, both losses weigh the responses the same way.
        num_tokens: as for ``policy_loss``; a microbatch has whole rows.

    Returns:
        (loss, stats): a scalar to minimise, and ``policy/ref_kl``, the mean of new_logprobs - ref_logprobs over
        tokens (k1, which may be negative), detached.

    >>> new_logprobs, ref_logprobs = torch.tensor([[-1.0, -1.0, 1e6]]), torch.tensor([[-2.0, -4.0, 0.0]])
    >>> mask = torch.tensor([[True, True, False]])
    >>> loss, stats = sequence_k2_loss(new_logprobs, ref_logprobs, mask)  # log ratio 1 + 3
    >>> loss, stats["policy/ref_kl"]  # 4**2 / 2 / 2, 4 / 2
    (tensor(4.), tensor(2.))
    """
    num_tokens = mask.sum() if num_tokens is None else num_tokens
    difference = torch.where(mask, new_logprobs - ref_logprobs, 0)  # [B, R]
    k2 = difference.sum(-1).square() / 2  # [B]
    if weights is None:
        loss = k2.sum() / num_tokens
    else:
        row_weights = torch.where(mask, weights, 0).sum(-1) / mask.sum(-1).clamp(min=1)  # [B]
        loss = (row_weights * k2).sum()
    return loss, {"policy/ref_kl": difference.detach().sum() / num_tokens}


# ------------------------------------------------------------------ controllers: plain numbers, once per update


def adaptive_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: float, num_episodes: float) -> float:
    """The next coefficient of the KL penalty in the reward, moved so that the KL approaches a target.

    ``error = clip(kl / target - 1, -0.2, 0.2)``
    ``kl_coef * (1 + error * num_episodes / horizon)``

    The control is proportional in the logarithm. While the KL is off by 20 % or more, the coefficient changes by a
    factor of about e every 5 * horizon episodes. A negative kl (possible for an estimate from few responses) counts as
    far below the target. The coefficient never becomes negative. A batch of 5 * horizon episodes or more below the
    target would set it to 0, where it stays, so keep num_episodes well below horizon.

    Args:
        kl_coef: the current coefficient, 0 or more.
        kl: nats, the mean over responses of the KL to ref_policy summed over tokens (not a mean over tokens).
        target: nats per response, above 0; 6 is usual.
        horizon: in episodes, above 0; 10000 is usual.
        num_episodes: responses since the last call, over all processes; not optimizer steps.

    Returns:
        The coefficient for the next rollout; NaN if kl is NaN.

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.

    >>> adaptive_kl_coef(0.5, 9.0, target=6.0, horizon=1000, num_episodes=500)  # error 0.5, clipped to 0.2
    0.55
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return max(kl_coef * (1 + error * num_episodes / horizon), 0.0)  # in this order NaN stays NaN


def adaptive_policy_kl_coef(coef: float, kl: float, *, target: float) -> float:
    """The next coefficient of PPO-penalty's KL term, moved so that one update changes the policy by a target.

    ``coef / 2 if kl < target / 1.5, coef * 2 if kl > 1.5 * target, else coef``

    Args:
        coef: the current coefficient, above 0.
        kl: nats, the mean over tokens of KL(old policy, new policy), measured after the update. ``policy/approx_kl``
            is measured during it.
        target: nats per token, above 0.

    Returns:
        The coefficient for the next update; unchanged if kl is NaN.

    Schulman et al. 2017 (arXiv 1707.06347), section 4.

    >>> adaptive_policy_kl_coef(1.0, 0.031, target=0.02), adaptive_policy_kl_coef(1.0, 0.03, target=0.02)
    (2.0, 1.0)
    >>> adaptive_policy_kl_coef(1.0, 0.013, target=0.02)
    0.5
    """
    if kl < target / 1.5:
        return coef / 2
    if kl > 1.5 * target:
        return coef * 2
    return coef
