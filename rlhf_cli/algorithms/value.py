"""The loss of the value model, and a measure of its predictions."""

import torch
from torch import Tensor

from rlhf_cli.algorithms.aggregation import weighted_sum
from rlhf_cli.tensor_ops import masked_sum


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
        mask: [B, R] bool, True on real response tokens; padding of the others may hold anything.
        value_clip_range: above 0; None does not clip, and `values` is not read.
        weights: [B, R], of each token's loss, as from ``loss_weights``; None uses 1 / num_tokens.
        num_tokens: divisor of the stats (and of the loss, without weights), by default mask.sum(). For a microbatch,
            pass the real tokens of its whole minibatch: then losses, gradients and stats *add up*.

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


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """The share of the variance of the returns that the values predict.

    ``1 - var(returns - values) / var(returns)`` over the real tokens

    A constant offset of all values does not change it (the squared error shows one). Values that predict worse than a
    constant give a negative number. If all returns are equal, there is nothing to explain and the result is 0.

    Args:
        values: [B, R]; padding may hold anything.
        returns: [B, R]; padding may hold anything.
        mask: [B, R] bool, True on real response tokens.

    Returns:
        A scalar tensor without gradient, at most 1: 1 is perfect, 0 is no better than a constant. Also 0 without real
        tokens. The numbers of the parts of a batch do not add up to that of the batch.

    >>> returns, mask = torch.tensor([0.0, 2.0, 1e6]), torch.tensor([True, True, False])
    >>> explained_variance(torch.tensor([0.5, 1.5, 0.0]), returns, mask)  # 1 - 0.25 / 1
    tensor(0.7500)
    """
    errors, returns = (returns - values)[mask].detach(), returns[mask].detach()
    if returns.numel() == 0 or returns.min() == returns.max():
        return returns.new_zeros(())
    return 1 - errors.var(correction=0) / returns.var(correction=0)
