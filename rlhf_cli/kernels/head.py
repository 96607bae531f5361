"""Log-probabilities directly from hidden states: the head and its softmax for a few tokens at a time.

The logits of a chunk of tokens stay in the processor's cache until their log-probabilities are known. One [n, V] tensor
is kept for the backward pass. If it would be too large (5 GB for 8,000 tokens and a vocabulary of 150,000) nothing is
kept, and the backward pass computes each chunk again, which costs one more product with the head's weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_cli.kernels.linear import linear
from rlhf_cli.tensor_ops import exp_

MOST_LOGITS = 1 << 26
"""Numbers in the largest [n, V] tensor that is kept as a whole: 256 MB in float32."""
CHUNK = 1 << 24
"""Numbers in the largest chunk."""
CACHED = 1 << 18, 256
"""Numbers of a chunk on a CPU, which fit into its cache, and the fewest tokens: with fewer, the product reads all
weights of a large head for little work."""
GPU_TOKENS = 512
"""Fewest tokens of a chunk on a GPU if the head is trained. Each chunk adds to the gradient of all its weights: with
110 tokens at a time, for a vocabulary of 152,000, these sums took an eighth of a training step."""


def chunk_tokens(vocabulary: int, device: str, *, trains_head: bool) -> int:
    """The tokens whose logits are computed at a time on a type of device.

    >>> [chunk_tokens(152_000, "cuda", trains_head=trains) for trains in (True, False)]
    [512, 110]
    >>> chunk_tokens(2048, "cpu", trains_head=True)
    256
    """
    if device != "cpu":
        return max(1, CHUNK // vocabulary, GPU_TOKENS * trains_head)
    return max(1, min(CHUNK, max(CACHED[0], CACHED[1] * vocabulary)) // vocabulary)


def linear_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """``token_logprobs(hidden @ weight.T + bias, ids, temperature=temperature)``, a chunk of logits at a time.

    hidden [n, H], weight [V, H], bias [V], ids [n] -> [n] float32 (float64 if hidden is), nats. First derivatives only.

    >>> linear_logprobs(torch.zeros(1, 3), torch.ones(2, 3), None, torch.tensor([1]))  # log(1/2)
    tensor([-0.6931])
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    derives = torch.is_grad_enabled()
    keeps = derives and len(ids) * len(weight) <= MOST_LOGITS
    rows = chunk_tokens(len(weight), device, trains_head=derives and weight.requires_grad)
    logprobs: Tensor = _LinearLogprobs.apply(hidden, weight, bias, ids, temperature, keeps, rows)
    return logprobs


class _LinearLogprobs(torch.autograd.Function):
    """The gradient of a token's logits is ``grad / temperature * (onehot(id) - p)``: the forward pass keeps the second
    factor, and the backward pass multiplies the small [n, H] tensors by the first."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float,
        keeps: bool,
        rows: int,
    ) -> Tensor:
        logprobs = hidden.new_empty(len(ids), dtype=torch.promote_types(hidden.dtype, torch.float32))
        kept = hidden.new_empty(len(ids), len(weight)) if keeps else None
        for at in range(0, len(ids), rows):
            part = slice(at, at + rows)
            out = None if kept is None else kept[part]
            logprobs[part] = _of_chunk(hidden[part], weight, bias, ids[part], temperature, out, derive=keeps)[0]
        ctx.save_for_backward(hidden, weight, bias, ids, kept)
        ctx.temperature, ctx.rows = temperature, rows
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, kept = ctx.saved_tensors
        scale = (grad / ctx.temperature)[:, None]  # [n, 1]
        if kept is not None:
            scaled = (hidden * scale).to(hidden.dtype)
            of_weight = linear(kept.t(), scaled.t()) if ctx.needs_input_grad[1] else None
            of_bias = None if bias is None else (scale.t().to(kept.dtype) @ kept)[0]
            return linear(kept, weight.t()).mul_(scale), of_weight, of_bias, None, None, None, None
        grad_hidden = torch.empty_like(hidden)
        # These are sums over many chunks. In bfloat16 the last ones would be rounded away.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for h, i, of_row, grad_h in zip(*(t.split(ctx.rows) for t in (hidden, ids, scale, grad_hidden)), strict=True):
            _, error = _of_chunk(h, weight, bias, i, ctx.temperature, None, derive=True)
            grad_h.copy_(linear(error, weight.t()).mul_(of_row))
            if grad_weight is not None:
                # A part at a time: the whole product would be a second [V, H].
                parts = max(1, CHUNK // weight.shape[1])
                scaled = (h * of_row).to(h.dtype)
                for part, of_part in zip(grad_weight.split(parts), error.t().split(parts), strict=True):
                    part += linear(of_part, scaled.t())
            if grad_bias is not None:
                grad_bias += (error * of_row).sum(0)
        grad_weight, grad_bias = (None if g is None else g.to(weight.dtype) for g in (grad_weight, grad_bias))
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _of_chunk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    temperature: float,
    out: Tensor | None,
    *,
    derive: bool,
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of some tokens, [n], and with `derive` ``onehot(ids) - p``, [n, V], in `out` if given."""
    logits = linear(hidden, weight, bias)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    highest = wide.amax(1, keepdim=True)
    own = wide.gather(1, ids[:, None]).sub_(highest).div_(temperature)
    in_place = out if out is not None and out.dtype == wide.dtype else wide
    odds = exp_(torch.sub(wide, highest, out=in_place), temperature)
    total = odds.sum(1, keepdim=True)
    error = odds
    if derive:
        error = odds.div_(total.neg()).scatter_add_(1, ids[:, None], torch.ones_like(own))
        error = error.to(hidden.dtype) if out is None or error is out else out.copy_(error)
    return (own - total.log_())[:, 0], error
