"""The loss of the value model, and how well it predicts."""

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
    """Half the squared error of the values, which may be kept near those of the rollout.

    ``clipped_values = clip(new_values, values - value_clip_range, values + value_clip_range)``
    ``loss = 0.5 * sum(weights * max((new_values - returns)**2, (clipped_values - returns)**2))``

    The larger of the two errors counts: a value that went further than value_clip_range towards its return
    gets no gradient, one that went away from it gets its whole gradient. The range is in units of the
    returns, so a good one depends on the scale of the rewards.

    Args:
        new_values: [B, R] (or [N], packed, as long as all are), by the value model as it is now;
            carries the gradient.
        values: [B, R], by the value model at the rollout, the centre of the clip; a constant.
        returns: [B, R], what is to be predicted, as from ``gae``; a constant.
        mask: [B, R] bool, True on real response tokens; under padding the others may be anything at all.
        value_clip_range: above 0; None doesn't clip, and values aren't read.
        weights: [B, R], of each token's loss, as from ``loss_weights``; None takes 1 / num_tokens for all.
        num_tokens: what the stats are divided by (and the loss, without weights), by default mask.sum(). Give
            a microbatch the number of real tokens in its whole minibatch: then losses, gradients and stats
            *add up*.

    Returns:
        (loss, stats): a scalar to minimise, and detached scalars, means over tokens whatever the weights. A
        mask without real tokens gives 0 with num_tokens and nan without.

        - ``value/clip_fraction``: the share of tokens whose clipped error is the larger one;
        - ``value/error``: ``(new_values - returns)**2``, without the half and without the clip.

    Not in the paper of PPO; from its code (openai/baselines, ppo2), see Engstrom et al. 2020
    (arXiv 2005.12729), section 3.

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
        is_clipped = (clipped_squared_error > squared_error).to(squared_error.dtype)
        stats = {
            "value/clip_fraction": masked_sum(is_clipped, mask) / num_tokens,
            "value/error": squared_error.sum() / num_tokens,
        }
    return loss, stats


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """The share of the variance of the returns that the values predict.

    ``1 - var(returns - values) / var(returns)`` over the real tokens

    A constant offset of all the values costs nothing here (the squared error shows it), and values worse
    than a constant give a negative number. Where all returns are equal there is nothing to explain: 0.

    Args:
        values: [B, R]; under padding anything at all.
        returns: [B, R]; under padding anything at all.
        mask: [B, R] bool, True on real response tokens.

    Returns:
        A scalar tensor without gradient, at most 1: 1 is perfect, 0 no better than a constant. 0 too where
        no token is real. Numbers of parts of a batch don't add up to that of the batch.

    >>> returns, mask = torch.tensor([0.0, 2.0, 1e6]), torch.tensor([True, True, False])
    >>> explained_variance(torch.tensor([0.5, 1.5, 0.0]), returns, mask)  # 1 - 0.25 / 1
    tensor(0.7500)
    """
    errors, returns = (returns - values)[mask].detach(), returns[mask].detach()
    if returns.numel() == 0 or returns.min() == returns.max():
        return returns.new_zeros(())
    return 1 - errors.var(correction=0) / returns.var(correction=0)
