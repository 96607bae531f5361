"""How token losses become the loss of a minibatch: the weight of each token."""

from typing import TypedDict, assert_never

import torch
from torch import Tensor

from rlhf_cli.algorithms.names import LossAggregation
from rlhf_cli.tensor_ops import masked_sum


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
