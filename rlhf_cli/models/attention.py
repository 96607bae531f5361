"""Attention over packed rows, through transformers' AttentionInterface.

A model whose attention is `rlhf_packed` takes [1, N] ids with `position_ids` and `packed_lengths`, and each
sequence attends to itself only: one SDPA call a sequence, no padding and no N x N mask. Called without
`packed_lengths` (padded batches, decoding with a cache) it is transformers' own SDPA attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "rlhf_packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_lengths: list[int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, N, D], key and value [1, H_kv, N, D] -> ([1, N, H, D], None)."""
    if packed_lengths is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    assert kwargs.get("softcap") is None, "SDPA has no softcap; the equality check sends such models elsewhere"
    outputs = []
    for q, k, v in zip(
        query.split(packed_lengths, dim=2),
        key.split(packed_lengths, dim=2),
        value.split(packed_lengths, dim=2),
        strict=True,
    ):
        mask = None
        if sliding_window is not None and q.shape[2] > sliding_window:
            at = torch.arange(q.shape[2], device=q.device)
            distance = at[:, None] - at[None, :]
            mask = (distance >= 0) & (distance < sliding_window)
        outputs.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None and q.shape[2] > 1,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def packed_mask(**kwargs: Any) -> torch.Tensor | None:
    """No mask for a packed row; SDPA's own for a padded batch."""
    if kwargs.get("attention_mask") is None:
        return None
    mask: torch.Tensor | None = sdpa_mask(**kwargs)
    return mask


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)
