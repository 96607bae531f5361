"""The losses that SFT and PPO minimise: how token losses become the loss of a minibatch, then the losses themselves.

Each loss returns `(loss, stats)`, both from one mask. The losses of the reward model are in reward_model.py, the KL to
ref_policy as a loss is in kl.py.
"""

from typing import TypedDict, assert_never

import torch
from torch import Tensor

from rlhf_cli.algorithms.names import LossAggregation, PtxMode
from rlhf_cli.tensor_ops import masked_sum

# --------------------------------------------------------------------------------------------- the weight of each token


class Weighting(TypedDict):
    """The two arguments that all losses of a microbatch share."""

    weights: Tensor
    """[b, r], from ``loss_weights``."""
    num_tokens: float
    """Real tokens of the whole minibatch."""


def loss_weights(
    mask: Tensor,
    *,
    aggregation: LossAggregation,
    num_tokens: Tensor | float,
    num_sequences: Tensor | float,
    max_new_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight of each token's loss in the loss of its minibatch.

    ``token: 1 / num_tokens``
    ``sequence: 1 / (num_sequences * length of the row)``
    ``constant: 1 / (num_sequences * max_new_tokens)``

    "token" is the mean over all tokens, so long responses weigh more than short ones. "sequence" takes the mean over
    each response's tokens, then the mean over responses: all responses weigh the same, and a token of a long one
    weighs less. "constant" sums over a response's tokens and divides by a number that does not depend on any response
    (Dr. GRPO). With max_new_tokens=1 it is the plain mean over responses of that sum.

    Args:
        mask: [B, R] bool, True on real response tokens, of whole rows of a microbatch.
        aggregation: "token", "sequence" or "constant".
        num_tokens: real tokens in the whole minibatch, over all its microbatches and all processes; read only by
            "token".
        num_sequences: rows in the whole minibatch, counted the same way; not read by "token".
        max_new_tokens: the length limit of sampling, 1 or more; read only by "constant".
        dtype: of the result.

    Returns:
        [B, R], 0 under padding. Over the whole minibatch "token" and "sequence" sum to 1 (rows without a real token
        excluded); "constant" sums to 1 only if every response has max_new_tokens tokens.

    "constant" is from Liu et al. 2025 (arXiv 2503.20783).

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> loss_weights(mask, aggregation="sequence", num_tokens=4, num_sequences=2, max_new_tokens=5)
    tensor([[0.1667, 0.1667, 0.1667],
            [0.5000, 0.0000, 0.0000]])
    >>> loss_weights(mask, aggregation="constant", num_tokens=4, num_sequences=2, max_new_tokens=5)
    tensor([[0.1000, 0.1000, 0.1000],
            [0.1000, 0.0000, 0.0000]])
    """
    divisor: Tensor | float
    match aggregation:
        case "token":
            divisor = num_tokens
        case "sequence":
            divisor = num_sequences * mask.sum(-1, keepdim=True).clamp(min=1)  # [B, 1]
        case "constant":
            divisor = num_sequences * max_new_tokens
        case _:
            assert_never(aggregation)
    return mask.to(dtype) / divisor


def weighted_sum(x: Tensor, mask: Tensor, *, weights: Tensor | None, num_tokens: Tensor | float) -> Tensor:
    """The weighted sum of the losses of real tokens.

    ``sum(weights * x)`` over the real tokens, with ``weights = 1 / num_tokens`` by default

    Args:
        x: any shape, carries the gradient; padding may hold anything.
        mask: the same shape, bool, True on real tokens.
        weights: the same shape, as from ``loss_weights``; padding may hold anything. None weighs all tokens equally.
        num_tokens: divisor of the sum if weights is None; otherwise not read.

    Returns:
        A scalar tensor; 0 without real tokens.

    >>> x, mask = torch.tensor([1.0, 2.0, 1e6]), torch.tensor([True, True, False])
    >>> weighted_sum(x, mask, weights=torch.tensor([0.5, 0.25, 9.0]), num_tokens=2)  # 0.5 * 1 + 0.25 * 2
    tensor(1.)
    >>> weighted_sum(x, mask, weights=None, num_tokens=2)
    tensor(1.5000)
    """
    if weights is None:
        return masked_sum(x, mask) / num_tokens
    # x is masked too: the gradient of x is weights, and inf in either would give 0 * inf = NaN under padding.
    return masked_sum(weights * torch.where(mask, x, 0), mask)


# ----------------------------------------------------------------------------------------------------------- the policy


def policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    num_tokens: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective, negated to be minimised.

    ``ratio = exp(new_logprobs - logprobs)``
    ``clipped_ratio = clip(ratio, 1 - clip_range, 1 + clip_range_high)``
    ``token_loss = max(-advantages * ratio, -advantages * clipped_ratio)``
    ``token_loss = min(token_loss, -dual_clip * advantages)`` where advantages < 0, if dual_clip is given
    ``loss = sum(weights * token_loss)``

    The clip acts on one side only. A token gets no gradient once its ratio is *beyond* the range in the direction of
    its advantage: ratio > 1 + clip_range_high for a positive one, ratio < 1 - clip_range for a negative one. A token
    that moved the other way keeps its full gradient, however far it is. dual_clip limits that for negative advantages,
    where the ratio, and so the gradient, is unbounded.

    Args:
        new_logprobs: [B, R] (or [N], packed, if all arguments are), nats, of the sampled tokens under the current
            policy; carries the gradient.
        logprobs: [B, R], the same under the policy that sampled them, at the same temperature; a constant.
        advantages: [B, R], as from ``gae``, whitened or not; a constant.
        mask: [B, R] bool, True on real response tokens; padding of the others may hold anything.
        clip_range: above 0, usually 0.1 to 0.3.
        clip_range_high: the upper range, above 0; None uses clip_range. A larger one gives rare tokens more room to
            become likely.
        dual_clip: above 1, usually 3; None switches it off.
        weights: [B, R], of each token's loss, as from ``loss_weights``; None uses 1 / num_tokens.
        num_tokens: divisor of the stats (and of the loss, without weights), by default mask.sum(). For a microbatch,
            pass the real tokens of its whole minibatch over all processes. Then the losses, gradients and stats of
            the microbatches *add up* to those of the minibatch, however it was cut.

    Returns:
        (loss, stats): a scalar to minimise, and detached scalars, which are means over tokens whatever the weights. A
        mask without real tokens gives 0 with num_tokens and NaN without.

        - ``policy/approx_kl``: ``(ratio - 1) - log(ratio)``, never negative, an estimate of the KL from the policy
          that sampled to the current one (k3 of Schulman 2020, joschu.net/blog/kl-approx.html);
        - ``policy/approx_kl_k1``: ``-log(ratio)``, an estimate of the same KL with more variance; it may be negative;
        - ``policy/clip_fraction``: the share of tokens whose gradient is clipped to 0, that is, whose clipped branch
          is the larger loss. A ratio out of range on the unclipped side does not count;
        - ``policy/dual_clip_fraction``: the share of tokens whose loss is capped by dual_clip, among all tokens and
          not only those with a negative advantage; 0 without it;
        - ``policy/ratio``: the mean ratio, which must be 1 before the first update.

    Schulman et al. 2017 (arXiv 1707.06347), equation 7; dual_clip is from Ye et al. 2020 (arXiv 1912.09729),
    clip_range_high from Yu et al. 2025 (arXiv 2503.14476).

    >>> logprobs, new_logprobs = torch.tensor([[0.25, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> loss, stats = policy_loss(new_logprobs, logprobs, torch.tensor([[1.0, -1.0]]), mask, clip_range=0.2)
    >>> loss  # ratio 2 twice: max(-2, -1.2) is clipped, max(2, 1.2) is not; (-1.2 + 2) / 2
    tensor(0.4000)
    >>> stats["policy/clip_fraction"], stats["policy/ratio"]
    (tensor(0.5000), tensor(2.))
    >>> advantages = torch.tensor([[1.0, -1.0]])
    >>> policy_loss(new_logprobs, logprobs, advantages, mask, clip_range=0.2, clip_range_high=0.5, dual_clip=1.7)[0]
    ... # (-1.5 + 1.7) / 2
    tensor(0.1000)
    """
    num_tokens = mask.sum() if num_tokens is None else num_tokens
    high = clip_range if clip_range_high is None else clip_range_high
    log_ratio = torch.where(mask, new_logprobs - logprobs, 0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + high)
    token_loss = torch.maximum(unclipped, clipped)
    clipped_mask, capped_mask = clipped > unclipped, torch.zeros_like(mask)
    if dual_clip is not None:
        cap = -dual_clip * advantages
        capped_mask = (advantages < 0) & (token_loss > cap)
        token_loss = torch.where(capped_mask, cap, token_loss)
    loss = weighted_sum(token_loss, mask, weights=weights, num_tokens=num_tokens)
    return loss, _policy_stats(log_ratio, clipped_mask, capped_mask, mask, num_tokens)


def penalty_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    policy_kl_coef: float,
    weights: Tensor | None = None,
    num_tokens: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's objective with a KL penalty in place of the clip, negated to be minimised.

    ``ratio = exp(new_logprobs - logprobs)``
    ``kl = (ratio - 1) - log(ratio)``
    ``loss = sum(weights * (-advantages * ratio + policy_kl_coef * kl))``

    The penalty is on KL(old policy, new policy), before and after one update, not on the KL to ref_policy. The tokens
    come from the old policy, so kl *and its gradient* are unbiased: E[ratio] is 1 and has no gradient, and
    -log(ratio) is the integrand of the KL. -log(ratio) alone would also be unbiased, with more variance. This is k3
    with its arguments swapped relative to ``kl_estimate``. There the policy that sampled carries the gradient, and the
    gradient of k3 is not that of the KL.

    Args:
        policy_kl_coef: 0 or more, as from ``adaptive_policy_kl_coef``.
        The others: as for ``policy_loss``.

    Returns:
        (loss, stats): a scalar to minimise, and the stats of ``policy_loss``. Nothing is clipped, so both fractions
        are 0. ``policy/approx_kl`` is the mean of kl.

    Schulman et al. 2017 (arXiv 1707.06347), equation 8.

    >>> logprobs, new_logprobs = torch.tensor([[0.25]]).log(), torch.tensor([[0.5]]).log()
    >>> loss, stats = penalty_loss(new_logprobs, logprobs, torch.ones(1, 1), torch.ones(1, 1).bool(), policy_kl_coef=3)
    >>> loss, stats["policy/approx_kl"]  # -2 + 3 * (2 - 1 - log(2)), 2 - 1 - log(2)
    (tensor(-1.0794), tensor(0.3069))
    """
    num_tokens = mask.sum() if num_tokens is None else num_tokens
    log_ratio = torch.where(mask, new_logprobs - logprobs, 0)
    kl = log_ratio.expm1() - log_ratio
    token_loss = -advantages * log_ratio.exp() + policy_kl_coef * kl
    loss = weighted_sum(token_loss, mask, weights=weights, num_tokens=num_tokens)
    no_mask = torch.zeros_like(mask)
    return loss, _policy_stats(log_ratio, no_mask, no_mask, mask, num_tokens)


def _policy_stats(
    log_ratio: Tensor, clipped_mask: Tensor, capped_mask: Tensor, mask: Tensor, num_tokens: Tensor | float
) -> dict[str, Tensor]:
    """The stats that both policy losses return."""
    log_ratio = log_ratio.detach()
    return {
        "policy/approx_kl": masked_sum(log_ratio.expm1() - log_ratio, mask) / num_tokens,
        "policy/approx_kl_k1": masked_sum(-log_ratio, mask) / num_tokens,
        "policy/clip_fraction": masked_sum(clipped_mask.to(log_ratio.dtype), mask) / num_tokens,
        "policy/dual_clip_fraction": masked_sum(capped_mask.to(log_ratio.dtype), mask) / num_tokens,
        "policy/ratio": masked_sum(log_ratio.exp(), mask) / num_tokens,
    }


def truncated_importance(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """The probability of a token before this update, relative to the policy that sampled it.

    ``min(exp(logprobs - behavior_logprobs), cap)``

    For responses that are older than one update, and for those of a sampler whose log-probabilities differ from those
    of training: the same weights in bfloat16. Multiply the advantages by it, and take the ratio of the loss against
    ``logprobs``. The proximal policy, which the ratio is taken against, then differs from the behavior policy, which
    sampled, as in decoupled PPO. Without a cap the product is unbiased for the single token but may be huge; the cap
    trades bias for bounded variance. The tokens before it are not corrected for.

    Args:
        logprobs: [B, R], nats, under the policy before this update, as training computes them.
        behavior_logprobs: [B, R], nats, under the policy that sampled, as the sampler computed them, at the sampling
            temperature.
        mask: [B, R] bool, True on real response tokens; padding of the others may hold anything.
        cap: 1 or more.

    Returns:
        [B, R], 0 to cap, 0 under padding, without gradient.

    The truncation is from Ionides 2008 (Truncated Importance Sampling, J. Comput. Graph. Stat. 17(2)). For older
    policies: Hilton et al. 2021 (arXiv 2110.00641). For samplers that differ from training: Yao et al. 2025 (Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training, fengyao.notion.site/off-policy-rl).

    >>> logprobs, behavior_logprobs = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 1.0]]).log()
    >>> truncated_importance(logprobs, behavior_logprobs, torch.tensor([[True, True]]), cap=1.5)
    tensor([[1.5000, 0.5000]])
    """
    return torch.where(mask, (logprobs - behavior_logprobs).exp().clamp(max=cap), 0).detach()


def entropy_bonus(
    entropy: Tensor, mask: Tensor, *, weights: Tensor | None = None, num_tokens: Tensor | float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The entropy of the current policy; *subtract* entropy_coef times it from the loss.

    ``bonus = sum(weights * entropy)``

    It is the entropy of the full distribution at each token, with its exact gradient. The gradient ignores that the
    choice of a token changes the entropy of later ones.

    Args:
        entropy: [B, R] (or [N], packed, if all arguments are), nats, as from ``token_entropy`` at the sampling
            temperature; carries the gradient.
        mask: [B, R] bool, True on real response tokens; padding of entropy may hold anything.
        weights, num_tokens: as for ``policy_loss``.

    Returns:
        (bonus, stats): a scalar to maximise, and ``policy/full_entropy``, the mean over tokens, detached.

    >>> bonus, stats = entropy_bonus(torch.tensor([[1.0, 2.0, 1e6]]), torch.tensor([[True, True, False]]))
    >>> bonus, stats["policy/full_entropy"]
    (tensor(1.5000), tensor(1.5000))
    """
    num_tokens = mask.sum() if num_tokens is None else num_tokens
    bonus = weighted_sum(entropy, mask, weights=weights, num_tokens=num_tokens)
    return bonus, {"policy/full_entropy": masked_sum(entropy.detach(), mask) / num_tokens}


# ------------------------------------------------------------------------------------------------------ the value model


def value_loss(
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip_range: float | None,
    weights: Tensor | None = None,
    num_tokens: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the values, optionally clipped around the values of the rollout.

    ``clipped_values = clip(new_values, values - value_clip_range, values + value_clip_range)``
    ``loss = 0.5 * sum(weights * max((new_values - returns)**2, (clipped_values - returns)**2))``

    The larger of the two errors counts. A value that moved more than value_clip_range towards its return gets no
    gradient; a value that moved away from it keeps its full gradient. The range is in units of the returns, so a good
    one depends on the scale of the rewards.

    Args:
        new_values: [B, R] (or [N], packed, if all arguments are), from the current value model; carries the gradient.
        values: [B, R], from the value model at the rollout, the centre of the clip; a constant.
        returns: [B, R], the targets, as from ``gae``; a constant.
        value_clip_range: above 0; None does not clip, and `values` is not read.
        mask, weights, num_tokens: as for ``policy_loss``.

    Returns:
        (loss, stats): a scalar to minimise, and detached scalars, which are means over tokens whatever the weights. A
        mask without real tokens gives 0 with num_tokens and NaN without.

        - ``value/clip_fraction``: the share of tokens whose clipped error is the larger one;
        - ``value/error``: ``(new_values - returns)**2``, without the half and without the clip.

    Not in the PPO paper but in its code (openai/baselines, ppo2); see Engstrom et al. 2020 (arXiv 2005.12729),
    section 3.

    >>> new_values, values, returns = torch.tensor([1.0, -1.0]), torch.zeros(2), torch.ones(2)
    >>> loss, stats = value_loss(new_values, values, returns, torch.ones(2).bool(), value_clip_range=0.5)
    >>> loss  # errors 0 and 2, clipped 0.5 and 1.5: 0.5 * (0.5**2 + 2**2) / 2
    tensor(1.0625)
    >>> stats["value/clip_fraction"], stats["value/error"]
    (tensor(0.5000), tensor(2.))
    """
    num_tokens = mask.sum() if num_tokens is None else num_tokens
    squared_error = torch.where(mask, new_values - returns, 0).square()
    if value_clip_range is None:
        clipped_squared_error = squared_error
    else:
        clipped_values = new_values.clamp(values - value_clip_range, values + value_clip_range)
        clipped_squared_error = torch.where(mask, clipped_values - returns, 0).square()
    token_loss = 0.5 * torch.maximum(squared_error, clipped_squared_error)
    loss = weighted_sum(token_loss, mask, weights=weights, num_tokens=num_tokens)
    with torch.no_grad():
        clipped_mask = (clipped_squared_error > squared_error).to(squared_error.dtype)
        stats = {
            "value/clip_fraction": masked_sum(clipped_mask, mask) / num_tokens,
            "value/error": squared_error.sum() / num_tokens,
        }
    return loss, stats


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """The share of the variance of the returns that the values predict.

    ``1 - var(returns - values) / var(returns)``

    A constant offset of all values does not change it (the squared error shows one). Values that predict worse than a
    constant give a negative number. If all returns are equal, there is nothing to explain and the result is 0.

    Args:
        values: [N], of the real tokens.
        returns: [N], in the same order.

    Returns:
        A scalar tensor without gradient, at most 1: 1 is perfect, 0 is no better than a constant. Also 0 without real
        tokens. The numbers of the parts of a batch do not add up to that of the batch.

    >>> explained_variance(torch.tensor([0.5, 1.5]), torch.tensor([0.0, 2.0]))  # 1 - 0.25 / 1
    tensor(0.7500)
    """
    errors, returns = (returns - values).detach(), returns.detach()
    if returns.numel() == 0 or returns.min() == returns.max():
        return returns.new_zeros(())
    return 1 - errors.var(correction=0) / returns.var(correction=0)


# --------------------------------------------------------------------------------------------------- the language model


def lm_loss(
    token_logprobs: Tensor, mask: Tensor | None = None, *, num_tokens: Tensor | float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the target tokens.

    ``loss = sum(-token_logprobs) / num_tokens``

    It is a mean over tokens, so long texts weigh more than short ones. Averaging the means of two microbatches of
    unequal length would give another number; with num_tokens the parts add up to the right one.

    Args:
        token_logprobs: any shape, [N] for packed rows: of each next token, as from ``tensor_ops.token_logprobs`` at
            temperature 1; carries the gradient.
        mask: the same shape, bool, True on target tokens, EOS among them; elsewhere token_logprobs may hold anything.
            None: every token is a target.
        num_tokens: divisor of the sum, by default the number of target tokens. For a microbatch, pass the number in
            its whole minibatch: then losses, gradients and stats *add up*.

    Returns:
        (loss, stats): a scalar to minimise, and ``lm/nll``, the same detached, in nats per token. A mask without any
        True gives 0 with num_tokens and NaN without.

    >>> logprobs = torch.tensor([0.5, 0.25, 0.001]).log()
    >>> loss, stats = lm_loss(logprobs, torch.tensor([True, True, False]))
    >>> loss  # (log(2) + log(4)) / 2
    tensor(1.0397)
    """
    mask = torch.ones_like(token_logprobs, dtype=torch.bool) if mask is None else mask
    num_tokens = mask.sum() if num_tokens is None else num_tokens
    loss = -masked_sum(token_logprobs, mask) / num_tokens
    return loss, {"lm/nll": loss.detach()}


def mixed_loss(policy: Tensor, lm: Tensor, *, ptx_coef: float, ptx_mode: PtxMode) -> Tensor:
    """The policy loss and the language-model loss as one loss.

    ``additive: policy + ptx_coef * lm``
    ``convex: (1 - ptx_coef) * policy + ptx_coef * lm``

    Args:
        policy: the policy loss, a scalar.
        lm: the language-model loss, as from ``lm_loss``; a mean over its own tokens.
        ptx_coef: 0 or more, and at most 1 for "convex". InstructGPT uses 27.8 (additive), ColossalChat 0.9 (convex):
            the same name for two different numbers.
        ptx_mode: "additive" or "convex".

    Returns:
        A scalar to minimise.

    Ouyang et al. 2022 (arXiv 2203.02155), equation 2, for "additive".

    >>> mixed_loss(torch.tensor(1.0), torch.tensor(2.0), ptx_coef=0.5, ptx_mode="additive")
    tensor(2.)
    >>> mixed_loss(torch.tensor(1.0), torch.tensor(2.0), ptx_coef=0.5, ptx_mode="convex")
    tensor(1.5000)
    """
    match ptx_mode:
        case "additive":
            return policy + ptx_coef * lm
        case "convex":
            return (1 - ptx_coef) * policy + ptx_coef * lm
        case _:
            assert_never(ptx_mode)
