"""Attention over packed rows, through transformers' AttentionInterface.

A model whose attention has one of the names below takes [1, N] ids with `position_ids` and `packed`, the PackedBatch.
Each sequence attends to itself and to its shared prefix, if it has one: by one SDPA call per sequence, or on a GPU in
16 bits by one call of flash attention for the row. Without `packed` (padded batches, decoding with a cache) it computes
what transformers' own SDPA attention computes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_cli.packing import PackedBatch

EACH, ROW = "rlhf_packed", "rlhf_packed_row"
"""One call per sequence; and one call for the row where that is possible, in 16 bits on a GPU."""
PACKED = (EACH, ROW)
_watching: list[list[str]] = []


@contextlib.contextmanager
def watched_masks() -> Iterator[list[str]]:
    """Collect, in words, what packed rows would ignore of the model's masks; empty if they ignore nothing.

    A packed row has no mask, so a window that is only in the model's mask would be lost. Inside this context all
    entries of a mask are the length of its window (0 for none), and each attention call checks that it was passed the
    same.
    """
    losses: list[str] = []
    _watching.append(losses)
    try:
        yield losses
    finally:
        _watching.remove(losses)


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
    """query [1, H, N, D], key and value [1, H_kv, N, D] -> ([1, N, H, D], None).

    With fewer queries than keys in a packed row, they are those of the last token of each sequence.
    """
    if packed is None:
        num_queries, num_keys = query.shape[2], key.shape[2]
        window = min(sliding_window or num_keys, num_keys)
        # `packed_mask` has built no mask, and SDPA's own causal mask needs as many keys as queries.
        if attention_mask is None and num_queries > 1 and (num_queries < num_keys or window < num_keys):
            attention_mask = causal_mask(num_queries, num_keys, window, query.dtype, query.device)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if _watching and attention_mask is not None:
        low, high = attention_mask.min().item(), attention_mask.max().item()
        if low != high or low < 0:
            _watching[-1].append("its attention builds its own masks")
        elif high != (sliding_window or 0):
            _watching[-1].append(f"its attention window of {high:.0f} tokens is in its masks only")
    assert kwargs.get("softcap") is None, "SDPA has no softcap; choose_attention excludes such models"
    shares_heads = query.shape[1] != key.shape[1]
    sizes = [run.num_sequences * run.length for run in packed.runs]
    of_last = query.shape[2] < key.shape[2]
    # split, because the gradient of n slices is n tensors as long as the row.
    queries = query.split([run.num_sequences for run in packed.runs] if of_last else sizes, 2)
    keys, values = key.split(sizes, 2), value.split(sizes, 2)
    outputs = []
    for (count, length, prefix), q, k, v in zip(packed.runs, queries, keys, values, strict=True):
        mask, prefix_length = None, 0
        if prefix is not None:
            run, begin, end = prefix
            prefix_length = end - begin
            k = torch.cat([keys[run][:, :, begin:end], k], 2)
            v = torch.cat([values[run][:, :, begin:end], v], 2)
        num_queries = 1 if of_last else length
        is_cut = sliding_window is not None and prefix_length + length > sliding_window
        if is_cut or (prefix_length and not of_last):
            mask = causal_mask(num_queries, prefix_length + length, sliding_window, q.dtype, q.device)
        if count > 1:
            # [1, H, count * length, D] -> [count, H, length, D]
            q, k, v = (x[0].unflatten(1, (count, -1)).transpose(0, 1) for x in (q, k, v))
        output = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, mask is None and num_queries > 1, scale=scaling, enable_gqa=shares_heads
        )
        if count > 1:
            output = output.transpose(0, 1).flatten(1, 2)[None]
        outputs.append(output)
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


LARGEST_KEPT = 2048
"""Keys of the largest mask that is cached: 16 MB in float32."""


def causal_mask(
    num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The additive mask of the last `num_queries` of `num_keys` tokens: [num_queries, num_keys], 0 or -inf.

    A token attends to itself and to those before it, `window` tokens in total. The mask is cached: building one for
    each sequence and layer would cost a tenth of the attention's time, or more.

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
    with unset_fake_temporarily():  # a cached mask outlives the fake tensors of `rlhf plan`
        return _new_mask(size, size, window, dtype, device)


def _new_mask(num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    position = torch.arange(num_keys, device=device)
    distance = position[num_keys - num_queries :, None] - position  # [num_queries, num_keys]
    unseen_mask = (distance < 0) | (distance >= (window or num_keys))
    return torch.zeros(num_queries, num_keys, dtype=dtype, device=device).masked_fill_(unseen_mask, -torch.inf)


def row_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """`packed_attention` as one call of flash attention, for 16 bits on a GPU without dropout; else `packed_attention`.

    The keys have a copy of each shared prefix: the kernel aligns the causal mask of a sequence with its last key.
    """
    packed: PackedBatch | None = kwargs.get("packed")
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    if packed is None or kwargs.get("dropout") or dtype not in (torch.bfloat16, torch.float16):
        return packed_attention(module, query, key, value, attention_mask, **kwargs)
    assert kwargs.get("softcap") is None, "no softcap here; choose_attention excludes such models"
    from torch.nn.attention.varlen import varlen_attn  # here, because a CPU does not need it

    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))  # [N, H, D]
    bounds = packed.bounds
    if bounds.key_indices is not None:
        k, v = k[bounds.key_indices], v[bounds.key_indices]
    window = kwargs.get("sliding_window")
    output: Any = varlen_attn(
        q,
        k,
        v,
        bounds.queries,
        bounds.keys,
        bounds.most_queries,
        bounds.most_keys,
        scale=kwargs.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return output[None], None


def packed_mask(**kwargs: Any) -> Tensor | None:
    """None for a packed row; SDPA's own mask for a padded batch."""
    if kwargs.get("attention_mask") is not None:
        mask: Tensor | None = sdpa_mask(**kwargs)
        return mask
    if not _watching:
        return None
    shape = kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"]
    return torch.full(shape, float(kwargs.get("local_size") or 0), device=kwargs["device"])


for _name, _function in ((EACH, packed_attention), (ROW, row_attention)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, packed_mask)
