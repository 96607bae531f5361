"""How far the policy is from the reference policy, and that as a loss."""

from typing import Literal

import torch
from torch import Tensor

from rlhf_cli.algorithms.aggregation import weighted_sum
from rlhf_cli.tensor_ops import masked_sum


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: Literal["k1", "k2", "k3", "abs"]) -> Tensor:
    """Estimates KL(policy, ref_policy) at each token that the policy sampled.

    ``difference = logprobs - ref_logprobs``
    ``k1 = difference``
    ``k2 = difference**2 / 2``
    ``k3 = exp(-difference) - 1 + difference``
    ``abs = |difference|``

    k1 and k3 are right on average, k1 with either sign at a single token, k3 never below 0 and with less
    spread; k2 is never below 0 and slightly off; abs is no estimate of the KL, only a distance that is never
    below 0. Nothing is clamped, so k3 of a token that the reference finds far likelier than the policy can be
    huge (verl stops at 10). As a reward take k1: the others lead to another optimum. As a loss, mind what the
    gradient is on average over tokens of the policy: of k1 0, of k2 that of KL(policy, ref_policy), of k3 that
    of KL(ref_policy, policy).

    Args:
        logprobs: [...], nats, of the sampled tokens by the policy that sampled them.
        ref_logprobs: [...], the same by the reference policy, at the same temperature.
        estimator: "k1", "k2", "k3" or "abs".

    Returns:
        [...], nats. There is no mask in here: what comes of padding is to be masked afterwards.

    Raises:
        ValueError: an estimator by another name.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).

    >>> logprobs, ref_logprobs = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> kl_estimate(logprobs, ref_logprobs, estimator="k1")  # log(2)
    tensor([0.6931])
    >>> kl_estimate(logprobs, ref_logprobs, estimator="k3")  # 1/2 - 1 + log(2)
    tensor([0.1931])
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    if estimator == "abs":
        return difference.abs()
    raise ValueError(f"estimator is {estimator!r}, not one of k1, k2, k3, abs")


def kl_full(logits: Tensor, ref_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(policy, ref_policy) at each token, exactly, over the whole vocabulary.

    ``sum(p * (log(p) - log(q)))`` over V,
    ``p = softmax(logits / temperature)``, ``q = softmax(ref_logits / temperature)``

    A token that the policy can't sample (logit -inf) adds 0, whatever the reference makes of it. One that
    only the reference can't sample makes the KL inf, without gradient. The result is 0 or more but for
    rounding. It is the KL of the next token only: that the choice of a token leads to another KL further on
    isn't in its gradient.

    Args:
        logits: [..., V], any float type, carries the gradient; computed in float32, or float64 if they are
            float64.
        ref_logits: [..., V], of the reference policy; a constant.
        temperature: above 0, of the sampling.

    Returns:
        [...], nats. Some [..., V] tensors are kept for the backward pass.

    >>> logits, ref_logits = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> kl_full(logits, ref_logits)  # (log(2) + log(2/3)) / 2
    tensor([0.1438])
    >>> kl_full(torch.tensor([0.0, -float("inf")]), torch.tensor([0.0, -float("inf")]))
    tensor(0.)
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    ref_logits = ref_logits.detach().to(precise)
    logits = logits.to(precise)
    is_possible = logits > -torch.inf
    is_infinite = (is_possible & (ref_logits == -torch.inf)).any(-1)
    log_p, log_q = (logits / temperature).log_softmax(-1), (ref_logits / temperature).log_softmax(-1)
    # Only finite terms are multiplied, as 0 * inf would be nan here or in the backward pass.
    log_p_over_q = torch.where(is_possible & (ref_logits > -torch.inf), log_p - log_q, 0)
    kl = (log_p.exp() * log_p_over_q).sum(-1)
    return torch.where(is_infinite, torch.inf, kl)


def kl_loss(
    kl: Tensor, mask: Tensor, *, weights: Tensor | None = None, num_tokens: Tensor | float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The KL to the reference as a term of the loss, which kl_coef times is added.

    ``loss = sum(weights * kl)``

    For kl of ``kl_full`` or of ``kl_estimate`` from the logprobs as they are now, with their gradient. None
    of them is the same as the KL in the reward: the KL of later tokens isn't charged to the token that led
    there, so the policy that it comes to is another one (k2 and full), or another still (k3), or none at all
    (k1, whose gradient is 0 on average). ``sequence_k2_loss`` comes to the same one.

    Args:
        kl: [B, R] (or [N], packed, as long as all are), nats; carries the gradient.
        mask: [B, R] bool, True on real response tokens; under padding kl may be anything at all.
        weights: [B, R], of each token's loss, as from ``loss_weights``; None takes 1 / num_tokens for all.
        num_tokens: what the stats are divided by (and the loss, without weights), by default mask.sum();
            for a microbatch that of its whole minibatch.

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
    """The KL of whole responses to the reference as a term of the loss, which kl_coef times is added.

    ``log_ratio[b] = sum over t of (new_logprobs - ref_logprobs)[b, t]``
    ``loss = sum over b of weight[b] * log_ratio[b]**2 / 2``

    Its gradient is ``weight * log_ratio * grad(log pi(response))``: what a reward of -log_ratio would give. So,
    on responses of the policy as it is now, it leads where the KL in the reward leads, to
    ``ref_policy * exp(score / kl_coef) / Z``; no KL loss of single tokens does, for responses of more than
    one token. On responses of an older policy it is off, as the policy moves.

    Args:
        new_logprobs: [B, R], padded (a row is a response), nats, of the sampled tokens by the policy as it is
            now; carries the gradient.
        ref_logprobs: [B, R], the same by the reference policy, at the same temperature; a constant.
        mask: [B, R] bool, True on real response tokens; under padding the others may be anything at all.
        weights: [B, R], as from ``loss_weights``, the same for all tokens of a row; what counts is their mean
            over the row. None takes 1 / num_tokens. With the weights of the policy loss, the two losses
            weigh the responses alike.
        num_tokens: what the stats are divided by (and the loss, without weights), by default mask.sum();
            for a microbatch, in whole rows, that of its whole minibatch.

    Returns:
        (loss, stats): a scalar to minimise, and ``policy/ref_kl``, the mean of new_logprobs - ref_logprobs
        over tokens (k1, of either sign), detached.

    >>> new_logprobs, ref_logprobs = torch.tensor([[-1.0, -1.0, 1e6]]), torch.tensor([[-2.0, -4.0, 0.0]])
    >>> mask = torch.tensor([[True, True, False]])
    >>> loss, stats = sequence_k2_loss(new_logprobs, ref_logprobs, mask)  # log ratio 1 + 3
    >>> loss, stats["policy/ref_kl"]  # 4**2 / 2 / 2, 4 / 2
    (tensor(4.), tensor(2.))
    """
    num_tokens = mask.sum() if num_tokens is None else num_tokens
    difference = torch.where(mask, new_logprobs - ref_logprobs, 0)
    k2 = difference.sum(-1).square() / 2
    if weights is None:
        loss = k2.sum() / num_tokens
    else:
        row_weights = torch.where(mask, weights, 0).sum(-1) / mask.sum(-1).clamp(min=1)
        loss = (row_weights * k2).sum()
    return loss, {"policy/ref_kl": difference.detach().sum() / num_tokens}
