"""Rotary position embedding in few passes over memory, for training and scoring on a CPU.

transformers rotates queries and keys by six operations each, which copy halves and put them together again, and
autograd fills with zeros and adds up what comes back. Here a rotation is three passes and its gradient the rotation
back: of a small Llama's forward and backward pass 7 %, of its forward pass 4 %.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

TOLERANCE = 1e-4
"""Of the check at the start, relative."""

WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "LlamaAttention": lambda _attention: None,
    "MistralAttention": lambda attention: attention.config.sliding_window,
    "Qwen2Attention": lambda attention: attention.sliding_window,
    "Qwen3Attention": lambda attention: attention.sliding_window,
}
"""transformers' layers that compute what `FastAttention` does, by name, since to import their modules takes 0.1 s; and
where each has its sliding window."""
WITH_HEAD_NORMS = {"Qwen3Attention"}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, the halves of each head as real and imaginary part (Su et al. 2021, eq. 34).

    ``[a * cos - b * sin, b * cos + a * sin]`` of ``[a, b]``

    Args:
        x: [B, H, N, D], in any strides, which the result has too.
        cos: [B, N, D], its second half as its first.
        sin: likewise.

    Returns:
        [B, H, N, D]; gradients go to x, once (no second derivatives).

    >>> quarter_turn = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[1.0, 1.0]]])
    >>> rotate(torch.tensor([[[[3.0, 4.0]]]]), *quarter_turn)
    tensor([[[[-4.,  3.]]]])
    """
    rotated: Tensor = _Rotation.apply(x, cos[:, None], sin[:, None])
    return rotated


@torch.no_grad()
def use_fast_attention(model: PreTrainedModel) -> str | None:
    """Let the model's attention layers rotate by `rotate`: their class changes, names and weights stay what they are.

    Returns a line where they are left as they are, since what the first of them gives would change.
    """
    layers = [module for module in model.modules() if type(module).__name__ in WINDOWS]
    if not layers or model.device.type != "cpu":
        return None
    first: Any = layers[0]
    plain = type(layers[0])
    fast = type(f"Fast{plain.__name__}", (FastAttention, plain), {"family": plain.__name__})
    size, head_dim = first.q_proj.in_features, first.head_dim
    x, angles = torch.arange(3.0 * size).sin().view(1, 3, size), torch.arange(1.5 * head_dim).view(1, 3, -1)
    cos, sin = (torch.cat([half, half], -1) for half in (angles.cos(), angles.sin()))
    dtype = first.q_proj.weight.dtype
    x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
    x /= first.q_proj(x).std()  # Queries and keys of size one, or attention would be even whatever the rotation.
    wanted, _ = first(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)
    first.__class__ = fast
    found, _ = first(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)
    gap = ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()
    if not gap <= TOLERANCE:
        first.__class__ = plain
        return (
            f"{plain.__name__}: rotated in place it differs by {gap:.1e}; it rotates by its own code, which is slower"
        )
    for layer in layers:
        layer.__class__ = fast
    return None


class FastAttention(nn.Module):
    """The forward of transformers' layer with our rotation, in float32 on a CPU, and its own elsewhere.

    The class that a layer gets is made of this one and its own.
    """

    family: str
    """The name of its own class."""
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        x, (cos, sin) = hidden_states, position_embeddings
        attend = AttentionInterface().get(self.config._attn_implementation)
        is_plain = x.dtype == cos.dtype == torch.float32 and x.device.type == "cpu"
        if not is_plain or attend is None or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            plain: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
            return plain
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.family in WITH_HEAD_NORMS:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=WINDOWS[self.family](self),
            **kwargs,
        )
        return self.o_proj(output.flatten(2)), weights


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    rotated[..., half:].addcmul_(x[..., :half], sin[..., :half], value=sign)
    return rotated
