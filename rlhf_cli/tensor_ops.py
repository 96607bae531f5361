"""Masked sums, log-probabilities of tokens, and conversion between packed and padded rows.

A mask is bool, True on real tokens, and is applied before any sum: padding (1e6, inf, NaN) reaches neither a result nor
a gradient. Float64 inputs give float64 results.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x over the real tokens, a scalar tensor: ``sum(x[i] for i where mask[i])``, 0 without any.

    x has any shape, and the mask the same. Padding may hold anything, inf and NaN included.

    >>> x, mask = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, True, False])
    >>> masked_sum(x, mask)
    tensor(3.)
    """
    return torch.where(mask, x, 0).sum()


def totals(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Each statistic summed over the parts of a batch, in float64: ``sum(part[name] for part in parts)``.

    There is one part per microbatch, each with the same names in the same order. All numbers are read together, after
    the last microbatch has been launched: reading one after every microbatch would make the host wait for the device
    each time, and then the device for the host.

    >>> half, quarter = torch.tensor(0.5), torch.tensor(0.25)
    >>> totals([{"loss": half, "n": torch.tensor(3.0)}, {"loss": quarter, "n": torch.tensor(4.0)}])
    {'loss': 0.75, 'n': 7.0}
    """
    if not parts:
        return {}
    values = torch.stack([value.detach() for part in parts for value in part.values()])
    rows = values.view(len(parts), -1).tolist()
    return {name: sum(column) for name, column in zip(parts[0], zip(*rows, strict=True), strict=True)}


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token under the tempered distribution.

    ``logits[ids] / temperature - logsumexp(logits / temperature)``

    Nothing is shifted: ``logits[..., t, :]`` must predict ``ids[..., t]``, so they are the model's output one position
    earlier. Pass the sampling temperature; with another one the ratio of new to old probabilities compares two policies
    that were not sampled from.

    logits [..., V] of any float type and ids [...] int64 -> [...], nats, at most 0; computed in float32, or float64 if
    the logits are. The only other [..., V] tensor that is allocated is the gradient of the logits.

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    >>> token_logprobs(logits, torch.tensor([0, 1]))  # log(1/2)
    tensor([-0.6931, -0.6931])
    >>> logits = torch.tensor([0.0, 3.0]).log()  # odds 0 : 3, an impossible token and a certain token
    >>> token_logprobs(logits, torch.tensor(1), temperature=0.5)
    tensor(0.)
    """
    flat: Tensor = _TokenLogprobs.apply(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1), temperature)
    return flat.view(ids.shape)


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs` of [n, V], in chunks of rows: 3 to 4 times as fast on a CPU as logsumexp and gather.

    Their autograd keeps exp(logits - max) beside the logits and adds two [n, V] gradients; the one of gather is zero
    except for one number per row. Here the gradient, onehot(ids) - softmax(logits), is written once. It uses exp2
    because torch takes exp from MKL, which runs at a quarter of the speed on processors that are not Intel's.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        logsumexp = torch.empty(len(ids), dtype=wide, device=logits.device)
        room = torch.empty(_rows_at_a_time(logits), logits.shape[-1], dtype=wide, device=logits.device)
        for part, out in _chunks(logits, logsumexp):
            part = part.to(wide)
            most = part.amax(1, keepdim=True)
            most = torch.where(most.isinf(), 0, most)
            odds = exp_(torch.sub(part, most, out=room[: len(part)]), temperature)
            torch.add(odds.sum(1).log_(), most[:, 0], alpha=1 / temperature, out=out)
        ctx.save_for_backward(logits, ids, logsumexp)
        ctx.temperature = temperature
        return _at_temperature(logits.gather(1, ids[:, None])[:, 0], temperature) - logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, logsumexp = ctx.saved_tensors
        grad = grad / ctx.temperature
        result = torch.empty_like(logits)
        for part, total, of_row, out in _chunks(logits, logsumexp, -grad, result):
            room = out if out.dtype == total.dtype else None
            p = exp_(torch.sub(part.to(total.dtype), total[:, None] * ctx.temperature, out=room), ctx.temperature)
            out.copy_(p.mul_(of_row[:, None]))
        return result.scatter_add_(1, ids[:, None], grad[:, None].to(result.dtype)), None, None


def exp_(x: Tensor, temperature: float) -> Tensor:
    """exp(x / temperature), in place.

    >>> exp_(torch.tensor([0.0, 2.0]), temperature=2.0)
    tensor([1.0000, 2.7183])
    """
    return x.mul_(1 / (math.log(2) * temperature)).exp2_()


def _rows_at_a_time(logits: Tensor) -> int:
    """Rows per chunk: on a CPU as many as fit into its cache."""
    return max(1, (1 << 18 if logits.device.type == "cpu" else 1 << 26) // logits.shape[-1])


def _chunks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield from zip(*(tensor.split(_rows_at_a_time(logits)) for tensor in (logits, *others)), strict=True)


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy of the distribution that each token is sampled from.

    ``-sum(p * log(p))`` over V, ``p = softmax(logits / temperature)``,
    computed as ``logsumexp(logits / temperature) - sum(p * logits / temperature)``

    A token that cannot be sampled (logit -inf) adds 0, not NaN. logits [..., V] of any float type -> [...], nats, from
    0 to log(V); computed in float32, or float64 if the logits are.

    >>> token_entropy(torch.tensor([0.0, 0.0]))  # log(2)
    tensor(0.6931)
    >>> token_entropy(torch.tensor([1.0, -float("inf")]))
    tensor(0.)
    """
    logits = _at_temperature(logits, temperature)
    p = logits.softmax(-1)
    return logits.logsumexp(-1) - (p * torch.where(p > 0, logits, 0)).sum(-1)


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature in float32 or float64, without a copy if nothing changes."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits / temperature


def length_mask(lengths: Sequence[int] | Tensor, width: int | None = None) -> Tensor:
    """The mask [B, R] of left-aligned rows with these B lengths: ``mask[b, t] = t < lengths[b]``.

    R is `width`, by default the largest length; a longer row is True throughout. On the device of the lengths (the CPU
    for a sequence).

    >>> length_mask([2, 0, 3])
    tensor([[ True,  True, False],
            [False, False, False],
            [ True,  True,  True]])
    """
    lengths = torch.as_tensor(lengths, dtype=torch.long)
    if width is None:
        width = max(lengths.tolist(), default=0)
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def pad_rows(flat: Tensor, lengths: Sequence[int] | Tensor, *, value: float = 0.0) -> Tensor:
    """Convert packed rows, flat [N, ...], to a padded batch [B, max(lengths), ...] with left-aligned rows.

    ``padded[b, t] = flat[sum(lengths[:b]) + t]`` for ``t < lengths[b]``, otherwise value

    Gradients pass through to flat. Raises ValueError if the lengths do not add up to N.

    >>> pad_rows(torch.tensor([1, 2, 3]), [2, 1])
    tensor([[1, 2],
            [3, 0]])
    """
    mask = length_mask(lengths).to(flat.device)
    num_tokens = int(mask.sum())
    if num_tokens != flat.shape[0]:  # otherwise a flat tensor of one token would be broadcast
        raise ValueError(f"the lengths add up to {num_tokens} but there are {flat.shape[0]} tokens")
    padded = flat.new_full((*mask.shape, *flat.shape[1:]), value)
    padded[mask] = flat
    return padded


def num_weights(weight: torch.Tensor) -> int:
    """The numbers in a weight. A quantized one holds two in a byte, so its own shape does not tell.

    >>> num_weights(torch.zeros(2, 3))
    6
    """
    return weight_shape(weight).numel()


def weight_shape(weight: torch.Tensor) -> torch.Size:
    """The shape [out, in] of a weight, also of a quantized one, which is stored as bytes.

    >>> weight_shape(torch.zeros(2, 3))
    torch.Size([2, 3])
    """
    state: Any = getattr(weight, "quant_state", None)
    return weight.shape if state is None else torch.Size(state.shape)
