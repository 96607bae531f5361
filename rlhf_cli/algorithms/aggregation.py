"""How the losses of single tokens become the loss of a minibatch: the weight of each token."""

from typing import Literal

import torch
from torch import Tensor

from rlhf_cli.tensor_ops import masked_sum


def loss_weights(
    mask: Tensor,
    *,
    aggregation: Literal["token", "sequence", "constant"],
    num_tokens: Tensor | float,
    num_sequences: Tensor | float,
    max_new_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight that the loss of each token has in the loss of its minibatch.

    ``token: 1 / num_tokens``
    ``sequence: 1 / (num_sequences * length of the row)``
    ``constant: 1 / (num_sequences * max_new_tokens)``

    "token" is the mean over all tokens, so a long response weighs more than a short one. "sequence" is the
    mean over responses of the mean over their tokens: every response weighs the same, and so a token of a
    long one weighs less. "constant" is the sum over the tokens of a response, with a divisor that no response
    has a say in (Dr. GRPO); with max_new_tokens=1 it is the plain mean over responses of that sum.

    Args:
        mask: [B, R] bool, True on real response tokens; of a microbatch, in whole rows.
        aggregation: "token", "sequence" or "constant".
        num_tokens: real tokens in the whole minibatch, over all its microbatches and all processes; only
            "token" reads it.
        num_sequences: rows in the whole minibatch, likewise; "token" doesn't read it.
        max_new_tokens: the length limit of the sampling, 1 or more; only "constant" reads it.
        dtype: of the result.

    Returns:
        [B, R], 0 under padding. Over the whole minibatch "token" and "sequence" add up to 1 (without rows
        that have no real token), "constant" to 1 only where every response has max_new_tokens.

    Raises:
        ValueError: an aggregation by another name.

    "constant" is from Liu et al. 2025 (arXiv 2503.20783).

    >>> mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> loss_weights(mask, aggregation="sequence", num_tokens=4, num_sequences=2, max_new_tokens=5)
    tensor([[0.1667, 0.1667, 0.1667],
            [0.5000, 0.0000, 0.0000]])
    >>> loss_weights(mask, aggregation="constant", num_tokens=4, num_sequences=2, max_new_tokens=5)
    tensor([[0.1000, 0.1000, 0.1000],
            [0.1000, 0.0000, 0.0000]])
    """
    if aggregation == "token":
        divisor = num_tokens
    elif aggregation == "sequence":
        divisor = num_sequences * mask.sum(-1, keepdim=True).clamp(min=1)
    elif aggregation == "constant":
        divisor = num_sequences * max_new_tokens
    else:
        raise ValueError(f"aggregation is {aggregation!r}, not one of token, sequence, constant")
    return mask.to(dtype) / divisor


def weighted_sum(x: Tensor, mask: Tensor, *, weights: Tensor | None, num_tokens: Tensor | float) -> Tensor:
    """The sum of the losses of real tokens, each times its weight.

    ``sum(weights * x)`` over the real tokens, with ``weights = 1 / num_tokens`` by default

    Args:
        x: any shape, carries the gradient; under padding anything at all.
        mask: the same shape, bool, True on real tokens.
        weights: the same shape, as from ``loss_weights``; under padding anything at all. None weighs all alike.
        num_tokens: what the sum is divided by where weights is None; not read otherwise.

    Returns:
        A scalar tensor; 0 where no token is real.

    >>> x, mask = torch.tensor([1.0, 2.0, 1e6]), torch.tensor([True, True, False])
    >>> weighted_sum(x, mask, weights=torch.tensor([0.5, 0.25, 9.0]), num_tokens=2)  # 0.5 * 1 + 0.25 * 2
    tensor(1.)
    >>> weighted_sum(x, mask, weights=None, num_tokens=2)
    tensor(1.5000)
    """
    if weights is None:
        return masked_sum(x, mask) / num_tokens
    # x is masked on its own too: its gradient is weights, and an inf there would come out of 0 * inf as nan.
    return masked_sum(weights * torch.where(mask, x, 0), mask)
