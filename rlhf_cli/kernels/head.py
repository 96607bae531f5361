"""Log-probabilities directly from hidden states: the head and its softmax for a few tokens at a time.

With a vocabulary of 150,000 the logits of one token take 600 kB, and their gradient as much again: 10 GB for 8,000
tokens. Here only one chunk of logits exists at a time. It is computed in the forward pass and again in the backward
pass, which costs one more product with the head's weight. This saves memory and no time, so small vocabularies keep
all of their logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_cli.kernels.linear import linear
from rlhf_cli.tensor_ops import token_logprobs

MOST_LOGITS = 1 << 26
"""Numbers in the largest [n, V] tensor of logits that is kept as a whole: 256 MB in float32."""
CHUNK = 1 << 24
"""Numbers in a chunk of a larger one."""


def linear_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """``token_logprobs(hidden @ weight.T + bias, ids, temperature=temperature)``, a chunk of logits at a time.

    Args:
        hidden: [n, H], the hidden states that predict the tokens.
        weight: [V, H].
        bias: [V] or None.
        ids: [n], int64.
        temperature: above 0.

    Returns:
        [n] float32, nats.

    >>> linear_logprobs(torch.zeros(1, 3), torch.ones(2, 3), None, torch.tensor([1]))  # log(1/2)
    tensor([-0.6931])
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    logprobs: Tensor = _LinearLogprobs.apply(hidden, weight, bias, ids, temperature)
    return logprobs


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, temperature: float):
        rows = max(1, CHUNK // len(weight))
        chunks = zip(hidden.split(rows), ids.split(rows), strict=True)  # [rows, H], [rows]
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.temperature, ctx.rows = temperature, rows
        return torch.cat([token_logprobs(linear(h, weight, bias), i, temperature=temperature) for h, i in chunks])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # These are sums over many chunks. In bfloat16 the last ones would be rounded away.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for h, i, grad_logprobs, grad_h in zip(
            *(t.split(ctx.rows) for t in (hidden, ids, grad, grad_hidden)), strict=True
        ):
            with torch.enable_grad():
                logits = linear(h, weight, bias).detach().requires_grad_()  # [rows, V]
                logprobs = token_logprobs(logits, i, temperature=ctx.temperature)
            (grad_logits,) = torch.autograd.grad(logprobs, logits, grad_logprobs)
            grad_h.copy_(linear(grad_logits, weight.t()))
            if grad_weight is not None:
                # A part at a time: the whole product would be a second [V, H].
                parts = max(1, CHUNK // weight.shape[1])
                for part, of_part in zip(grad_weight.split(parts), grad_logits.t().split(parts), strict=True):
                    part += linear(of_part, h.t())
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        grad_weight, grad_bias = (None if g is None else g.to(weight.dtype) for g in (grad_weight, grad_bias))
        return grad_hidden, grad_weight, grad_bias, None, None
