"""The loss of the policy: PPO with the clipped objective."""

import torch
from torch import Tensor

from rlhf_cli.tensor_ops import masked_sum


def policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_range: float,
    num_tokens: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective, negated to be minimised.

    ``ratio = exp(new_logprobs - logprobs)``
    ``clipped_ratio = clip(ratio, 1 - clip_range, 1 + clip_range)``
    ``loss = sum(max(-advantages * ratio, -advantages * clipped_ratio)) / num_tokens``

    The clip cuts one side only: a token stops being pushed once it is *further* than clip_range in the
    direction of its advantage (ratio > 1 + clip_range for a positive one, ratio < 1 - clip_range for a
    negative one). A token that moved the other way keeps its whole gradient, however far it is.

    Args:
        new_logprobs: [B, R] (or [N], packed, as long as all four are), nats, of the sampled tokens by the
            policy as it is now; carries the gradient.
        logprobs: [B, R], the same by the policy that sampled them, at the same temperature; a constant.
        advantages: [B, R], as from ``gae``, whitened or not; a constant.
        mask: [B, R] bool, True on real response tokens; under padding the three may be anything at all.
        clip_range: above 0, usually 0.1 to 0.3.
        num_tokens: what the sums are divided by, by default mask.sum(). Give a microbatch the number of real
            tokens in its whole minibatch (on all processes): then the losses, the gradients and the stats of
            the microbatches *add up* to those of the minibatch, however it was cut.

    Returns:
        (loss, stats): a scalar to minimise, and detached scalars with the same divisor. A mask without real
        tokens gives 0 with num_tokens and nan without.

        - ``policy/approx_kl``: ``(ratio - 1) - log(ratio)``, never negative, an estimate of the KL from the
          policy that sampled to the one now (k3 of Schulman 2020, joschu.net/blog/kl-approx.html);
        - ``policy/clip_fraction``: the share of tokens whose gradient is cut, that is, whose clipped branch
          is the larger loss; a ratio out of range on the side that isn't cut doesn't count;
        - ``policy/ratio``: the mean ratio; 1 before the first update, or something is wrong.

    Schulman et al. 2017 (arXiv 1707.06347), equation 7.

    >>> logprobs, new_logprobs = torch.tensor([[0.25, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    >>> mask = torch.tensor([[True, True]])
    >>> loss, stats = policy_loss(new_logprobs, logprobs, torch.tensor([[1.0, -1.0]]), mask, clip_range=0.2)
    >>> loss  # ratio 2 twice: max(-2, -1.2) is cut, max(2, 1.2) is not; (-1.2 + 2) / 2
    tensor(0.4000)
    >>> stats["policy/clip_fraction"], stats["policy/ratio"]
    (tensor(0.5000), tensor(2.))
    """
    num_tokens = mask.sum() if num_tokens is None else num_tokens
    log_ratio = torch.where(mask, new_logprobs - logprobs, 0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = masked_sum(torch.maximum(unclipped, clipped), mask) / num_tokens
    with torch.no_grad():
        stats = {
            "policy/approx_kl": masked_sum(log_ratio.expm1() - log_ratio, mask) / num_tokens,
            "policy/clip_fraction": masked_sum((clipped > unclipped).to(ratio.dtype), mask) / num_tokens,
            "policy/ratio": masked_sum(ratio, mask) / num_tokens,
        }
    return loss, stats
