"""Attention over packed rows, through transformers' AttentionInterface.

A model whose attention has one of the names here takes [1, N] ids with `position_ids` and `packed`, the PackedBatch,
and each sequence attends to itself only, and to the prefix that stands under another sequence where it has one there.
On a CPU that is one SDPA call a sequence, no padding and no N x N mask; on a GPU in 16 bits one call of flash attention
for the row. Called without `packed` (padded batches, decoding with a cache) it computes what transformers' own SDPA
attention does: a mask that is not given is made here, since only here is it known that the row is not packed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_cli.packing import PackedBatch

EACH, EACH_UNSHARED = "rlhf_packed", "rlhf_packed_unshared"
"""One call a sequence; the same for a model that is given no shared prefixes: who packs for it reads the name."""
ROW, ROW_UNSHARED = "rlhf_packed_row", "rlhf_packed_row_unshared"
"""One call for the row, where that is possible: in 16 bits on a GPU."""
PACKED = {
    ROW: "in one attention call a row",
    ROW_UNSHARED: "on packed rows that share no prompts",
    EACH: "with one attention call a sequence",
    EACH_UNSHARED: "on packed rows that share no prompts",
}
"""From the fastest, with what a model does that runs on it."""
SHARED = (ROW, EACH)


_watching: list[list[str]] = []


@contextlib.contextmanager
def watched_masks() -> Iterator[list[str]]:
    """What packed rows leave out of a model's masks, in words, for what is computed meanwhile; empty for a model that
    they compute whole.

    A packed row has no mask: each sequence is causal, and a layer's window is what it hands to its attention. Whoever
    keeps a window in the mask only, or makes masks of its own, loses them. So meanwhile a mask says in each place how
    long the window is that it is for, 0 for none, and each layer's attention is asked if that is what it was handed.
    """
    found: list[str] = []
    _watching.append(found)
    try:
        yield found
    finally:
        _watching.remove(found)


def _compare(attention_mask: Tensor | None, sliding_window: int | None) -> None:
    if attention_mask is not None:
        low, high = attention_mask.min().item(), attention_mask.max().item()
        if low != high or low < 0:
            _watching[-1].append("its attention makes masks of its own")
        elif high != (sliding_window or 0):
            _watching[-1].append(f"its attention window of {high:.0f} tokens is in its masks only")


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: PackedBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, N, D], key and value [1, H_kv, N, D] -> ([1, N, H, D], None)."""
    if packed is None:
        num_queries, num_keys = query.shape[2], key.shape[2]
        window = min(sliding_window or num_keys, num_keys)
        # `packed_mask` has made none where none was given. SDPA's own causal mask is for as many keys as queries.
        if attention_mask is None and num_queries > 1 and (num_queries < num_keys or window < num_keys):
            attention_mask = causal_mask(num_queries, num_keys, window, query.dtype, query.device)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if _watching:
        _compare(attention_mask, sliding_window)
    assert kwargs.get("softcap") is None, "SDPA has no softcap; the equality check sends such models elsewhere"
    shares_heads = query.shape[1] != key.shape[1]
    sizes = [run.num_sequences * run.length for run in packed.runs]
    # Split, not sliced: the gradient of n slices is n tensors as long as the row.
    queries, keys, values = (x.split(sizes, 2) for x in (query, key, value))
    outputs = []
    for (count, length, prefix), q, k, v in zip(packed.runs, queries, keys, values, strict=True):
        mask, before = None, 0
        if prefix is not None:
            run, begin, end = prefix
            before = end - begin
            k = torch.cat([keys[run][:, :, begin:end], k], 2)
            v = torch.cat([values[run][:, :, begin:end], v], 2)
        if before or (sliding_window is not None and length > sliding_window):
            mask = causal_mask(length, before + length, sliding_window, q.dtype, q.device)
        if count > 1:
            q, k, v = (x[0].unflatten(1, (count, length)).transpose(0, 1) for x in (q, k, v))
        output = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, mask is None and length > 1, scale=scaling, enable_gqa=shares_heads
        )
        if count > 1:
            output = output.transpose(0, 1).flatten(1, 2)[None]
        outputs.append(output)
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


LARGEST_KEPT = 2048
"""Keys of the largest mask that is kept: 16 MB in float32."""


def causal_mask(
    num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What the last `num_queries` of `num_keys` tokens must not attend to: [num_queries, num_keys], -inf there, else 0.

    A token attends to itself and those before it, `window` tokens in all where that is given. It is a view of a mask
    that is made once: one for each sequence and layer would cost a tenth of their attention, or more.

    >>> causal_mask(2, 3, None, torch.float32, torch.device("cpu"))
    tensor([[0., 0., -inf],
            [0., 0., 0.]])
    >>> causal_mask(2, 3, 2, torch.float32, torch.device("cpu"))
    tensor([[0., 0., -inf],
            [-inf, 0., 0.]])
    """
    if num_keys > LARGEST_KEPT:
        return _new_mask(num_queries, num_keys, window, dtype, device)
    kept = _kept_mask(max(128, 1 << (num_keys - 1).bit_length()), window, dtype, device)
    return kept[num_keys - num_queries : num_keys, :num_keys]


@functools.lru_cache(maxsize=8)
def _kept_mask(size: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _new_mask(size, size, window, dtype, device)


def _new_mask(num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    at = torch.arange(num_keys, device=device)
    distance = at[num_keys - num_queries :, None] - at
    unseen = (distance < 0) | (distance >= (window or num_keys))
    return torch.zeros(num_queries, num_keys, dtype=dtype, device=device).masked_fill_(unseen, -torch.inf)


def row_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: PackedBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`packed_attention` by one call of flash attention, which takes 16 bits on a GPU and no dropout; it gets the rest.

    Queries are the tokens of the row, keys those of each whole sequence, its prefix fetched from where it stands: the
    kernel aligns the causal mask of a sequence with its last key.
    """
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    if packed is None or dropout or dtype not in (torch.bfloat16, torch.float16):
        return packed_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            packed=packed,
            **kwargs,
        )
    assert kwargs.get("softcap") is None, "no softcap here; the equality check sends such models elsewhere"
    # Late: a start on a CPU would pay for a module that it has no use for.
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    bounds = packed.bounds
    if bounds.key_indices is not None:
        k, v = k[bounds.key_indices], v[bounds.key_indices]
    output = varlen_attn(
        q,
        k,
        v,
        bounds.queries,
        bounds.keys,
        bounds.most_queries,
        bounds.most_keys,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(output, Tensor)
    return output[None], None


def packed_mask(**kwargs: Any) -> Tensor | None:
    """No mask for a packed row; SDPA's own for a padded batch."""
    if kwargs.get("attention_mask") is None:
        if _watching:
            shape = kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"]
            return torch.full(shape, float(kwargs.get("local_size") or 0), device=kwargs["device"])
        return None
    mask: Tensor | None = sdpa_mask(**kwargs)
    return mask


for _name in PACKED:
    AttentionInterface.register(_name, row_attention if _name in (ROW, ROW_UNSHARED) else packed_attention)
    AttentionMaskInterface.register(_name, packed_mask)
