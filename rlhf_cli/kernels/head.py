"""Log-probabilities straight from hidden states: the head and its softmax a few tokens at a time.

A vocabulary of 150,000 makes 600 kB of logits a token, and their gradient as much again: 10 GB for 8,000 tokens.
Here a chunk of them exists at a time, once going forward and again going back, which is one more product with the
head's weight than the whole way has. It saves memory and no time, so small vocabularies take the whole way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_cli.kernels.linear import linear
from rlhf_cli.tensor_ops import token_logprobs

LOGITS_AT_ONCE = 1 << 26
"""Numbers of a [n, V] that are held whole, 256 MB in float32; more of them are made in chunks."""
CHUNK = 1 << 24
"""Numbers of a chunk."""


def linear_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """``token_logprobs(hidden @ weight.T + bias, ids, temperature=temperature)`` without all of the logits at once.

    Args:
        hidden: [n, H], the states that predict the tokens.
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
        kind = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
    logprobs: Tensor = _LinearLogprobs.apply(hidden, weight, bias, ids, temperature)
    return logprobs


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, temperature: float):
        rows = max(1, CHUNK // len(weight))
        parts = zip(hidden.split(rows), ids.split(rows), strict=True)
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.temperature, ctx.rows = temperature, rows
        return torch.cat([token_logprobs(linear(h, weight, bias), own, temperature=temperature) for h, own in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # A sum over many chunks: in bfloat16 what is added last would be rounded away.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        parts = zip(*(t.split(ctx.rows) for t in (hidden, ids, grad, grad_hidden)), strict=True)
        for h, own, of_token, out in parts:
            with torch.enable_grad():
                logits = linear(h, weight, bias).detach().requires_grad_()
                logprobs = token_logprobs(logits, own, temperature=ctx.temperature)
            (of_logits,) = torch.autograd.grad(logprobs, logits, of_token)
            out.copy_(linear(of_logits, weight.t()))
            if grad_weight is not None:
                grad_weight += linear(of_logits.t(), h.t())
            if grad_bias is not None:
                grad_bias += of_logits.sum(0)
        of_weight, of_bias = (None if g is None else g.to(weight.dtype) for g in (grad_weight, grad_bias))
        return grad_hidden, of_weight, of_bias, None, None
