"""Layers that compute the same as transformers' in less time: norms, attention, and the last layer (`swap_class`)."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from rlhf_cli.kernels.attention import PACKED
from rlhf_cli.kernels.linear import swap_class
from rlhf_cli.packing import PackedBatch, pack

# --------------------------------------------------------------------------------------- root-mean-square normalisation
#
# transformers' RMSNorm is six operations and a dozen more backward: 8 to 15 % of a training step for a hidden size of
# 128 or 512. Here it is three passes over memory forward and five backward.


NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
"""transformers' layers that compute `rms_norm`. Gemma's adds 1 to its weight."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019, eq. 4).

    x [..., H] in float32 or float64, weight [H] -> [..., H]. First derivatives only.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)  # root mean square sqrt(12.5)
    tensor([[0.8485, 2.2627]])
    """
    normed: Tensor = _RMSNorm.apply(x, weight, eps)
    return normed


def use_fast_norm(model: nn.Module) -> str | None:
    """Let the model's RMSNorm layers compute by `rms_norm`. Returns a line for the user as `swap_class` does."""
    layers = [module for module in model.modules() if type(module).__name__ in NORMS]
    return swap_class(layers, FastRMSNorm, _probe_norm)


def _probe_norm(layer: Any) -> Tensor:
    x = torch.arange(3.0 * len(layer.weight), device=layer.weight.device).sin().view(3, -1)  # [3, H]
    output: Tensor = layer(x.to(layer.weight.dtype))
    return output


class FastRMSNorm(nn.Module):
    """transformers' layer: `rms_norm` in float32 on a CPU, torch's kernel on a GPU, and its own formula elsewhere."""

    weight: Tensor
    variance_epsilon: float
    narrows = False
    """Whether only linear layers read the output. Under autocast it is then cast here, once for all of them."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        if x.dtype == self.weight.dtype == torch.float32:
            if x.device.type == "cuda":  # one operation where the formula has six, and a dozen more backward
                return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)
            if x.device.type == "cpu" and not torch.compiler.is_compiling():
                normed = rms_norm(x, self.weight, self.variance_epsilon)
                casts = self.narrows and torch.is_autocast_enabled("cpu")
                return normed.to(torch.get_autocast_dtype("cpu")) if casts else normed
        wide = x.float()
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * unit.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()  # [..., 1]
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        grad_weight = (grad * unit).reshape(-1, unit.shape[-1]).sum(0)  # [H]
        grad_unit = grad * weight
        # Remove the component along unit: changing the length of x does not change unit.
        along = torch.linalg.vecdot(grad_unit, unit).unsqueeze(-1).div_(unit.shape[-1])  # [..., 1]
        return grad_unit.addcmul_(unit, along, value=-1).mul_(scale), grad_weight, None


# -------------------------------------------------------------------------------------------- rotary position embedding
#
# transformers rotates queries and keys with six operations each, and more backward. Here a rotation is three passes
# over memory, and its gradient the rotation in the other direction: 7 % of a small Llama's forward and backward pass.


ATTENTIONS = {"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"}
"""transformers' layers that compute what `FastAttention` computes."""
BFLOAT16_KEYS = 512
"""Length of a sequence from which attention under autocast computes in 16 bits. Below, torch's backward pass on a CPU
is up to five times as fast in float32."""
LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
"""transformers' layers that compute what `ShortLayer` computes: norms before attention and before the feed-forward."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: ``[a * cos - b * sin, b * cos + a * sin]`` of ``[a, b]`` (Su et al. 2021, eq. 34).

    x [B, H, N, D] in any strides, which the result has, too; cos and sin [B, N, D], whose second half equals the first.
    First derivatives with respect to x only.

    >>> quarter_turn = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[1.0, 1.0]]])
    >>> rotate(torch.tensor([[[[3.0, 4.0]]]]), *quarter_turn)
    tensor([[[[-4.,  3.]]]])
    """
    rotated: Tensor = _Rotation.apply(x, cos[:, None], sin[:, None])
    return rotated


def use_fast_attention(model: PreTrainedModel) -> str | None:
    """Let the model's attention layers rotate by `rotate`, and read norms that are cast once for all projections.

    Returns a line for the user as `swap_class` does.
    """
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ in ATTENTIONS]
    if not layers or model.device.type != "cpu":
        return None
    plain = type(layers[0])
    members = {"is_mistral": plain.__name__ == "MistralAttention", "cache_name": cache_name(plain)}
    line = swap_class(layers, type(f"Fast{plain.__name__}", (FastAttention, plain), members), _probe_attention)
    blocks: list[Any] = [module for module in model.modules() if line is None and type(module).__name__ in LAYERS]
    for block in blocks:
        block.input_layernorm.narrows = block.post_attention_layernorm.narrows = True
    return line


def cache_name(module: nn.Module | type[nn.Module]) -> str:
    """The argument for keys and values: `cache` since transformers 5.24, `past_key_values` before, Mamba's own name."""
    known = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in known), "past_key_values")


def _probe_attention(layer: Any) -> Tensor:
    """The layer's output for three tokens at different angles, read at once and then one by one with a cache."""
    x, turn = _probe_input(layer)
    cached = {layer.cache_name if isinstance(layer, FastAttention) else cache_name(layer): DynamicCache()}
    outputs = [layer(hidden_states=x, position_embeddings=turn, attention_mask=None)[0]]
    for one, cos, sin in zip(*(part.split(1, 1) for part in (x, *turn)), strict=True):
        outputs.append(layer(hidden_states=one, position_embeddings=(cos, sin), attention_mask=None, **cached)[0])
    return torch.cat(outputs, 1)


def _probe_input(attention: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Three tokens for an attention layer, [1, 3, H], and the cosines and sines of their angles, [1, 3, D] each."""
    weight = attention.q_proj.weight
    like = weight if weight.is_floating_point() else weight.float()  # bytes of 4-bit weights compute in float32
    x = torch.arange(3.0 * attention.q_proj.in_features).sin().view(1, 3, -1).to(like)
    angles = torch.arange(1.5 * attention.head_dim).view(1, 3, -1)
    cos, sin = (torch.cat([half, half], -1).to(like) for half in (angles.cos(), angles.sin()))
    # Queries and keys of order one: with small ones attention would be even, whatever the rotation.
    return x / attention.q_proj(x).std(), (cos, sin)


class FastAttention(nn.Module):
    """transformers' attention layer, with `rotate` in float32 on a CPU and with its own forward elsewhere.

    Under autocast it reads packed rows only, because a cache keeps 16 bits. The projections then compute in 16 bits,
    what lies between them in float32: torch's operations on two number formats are slow. A layer's new class derives
    from this one and from its own class.
    """

    is_mistral: bool
    cache_name: str

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        kept: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See transformers' layer. `kept` are the indices [n] of the tokens whose output is wanted, None for all."""
        x, (cos, sin) = hidden_states, position_embeddings
        attend = AttentionInterface().get(self.config._attn_implementation)
        packed: PackedBatch | None = kwargs.get("packed")
        casts = torch.is_autocast_enabled("cpu")
        is_plain = cos.dtype == torch.float32 and x.device.type == "cpu"
        is_plain &= packed is not None if casts else x.dtype == torch.float32
        if not is_plain or attend is None or torch.compiler.is_compiling():
            output, weights = super().forward(x, position_embeddings, attention_mask=attention_mask, **kwargs)
            return output if kept is None else output[:, kept], weights
        # A score reads the last token of each sequence: it has the only queries.
        is_last = kept is not None and packed is not None and packed.keeps_last
        asking, turn = (x[:, kept], (cos[:, kept], sin[:, kept])) if is_last else (x, (cos, sin))
        # [B, N, H, D] each
        query, key, value = (
            projection(y).float().unflatten(-1, (-1, self.head_dim))
            for projection, y in ((self.q_proj, asking), (self.k_proj, x), (self.v_proj, x))
        )
        if hasattr(self, "q_norm"):  # Qwen3
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, H, N, D]
        query, key = rotate(query, *turn), rotate(key, cos, sin)
        if (cache := kwargs.pop(self.cache_name, None)) is not None:
            key, value = cache.update(key, value, self.layer_idx)
        settings = self.config if self.is_mistral else self  # a Llama's config may name a window that it ignores
        kwargs["sliding_window"] = getattr(settings, "sliding_window", None)
        dropout = self.attention_dropout if self.training else 0.0
        is_short = casts and packed is not None and max(packed.lengths) < BFLOAT16_KEYS
        with torch.autocast("cpu", enabled=False) if is_short else nullcontext():
            output, weights = attend(
                self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        output = output.flatten(2)
        return self.o_proj(output if kept is None or is_last else output[:, kept]), weights


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


# ------------------------------------------------------------------------------- the last layer, for some of the tokens
#
# A loss or a score reads the last hidden states of some tokens only: those that predict a response, or each text's last
# one. After the attention of the last layer the others are not needed.


def use_short_layer(model: PreTrainedModel) -> str | None:
    """Let the model's last layer compute only `PackedBatch.kept`. Returns a line for the user as `swap_class` does."""
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ in LAYERS]
    if not layers or isinstance(layers[-1], ShortLayer) or model.config._attn_implementation not in PACKED:
        return None
    first, plain = layers[0], type(layers[0])
    # The name stays, by which transformers and FSDP find the layers of a family.
    short = type(plain.__name__, (ShortLayer, plain), {"__qualname__": ShortLayer.__name__})
    line = swap_class([first], short, _probe_layer)
    if line is None:
        first.__class__, layers[-1].__class__ = plain, short
    return line


def _probe_layer(layer: Any) -> Tensor:
    """The layer's output for three tokens, in another order."""
    x, turn = _probe_input(layer.self_attn)
    order = torch.tensor([2, 0, 1], device=x.device)
    batch = replace(pack([[0, 1, 2]], x.device), kept=order)
    # Weights that are held in 16 bits compute under autocast only.
    with torch.autocast(x.device.type, x.dtype, enabled=x.dtype in (torch.bfloat16, torch.float16)):
        output: Tensor = layer(x, position_embeddings=turn, attention_mask=None, packed=batch)
    return output if isinstance(layer, ShortLayer) else output[:, order]


class ShortLayer(nn.Module):
    """A decoder layer that computes what comes after its attention only for `PackedBatch.kept`, if that is given."""

    def forward(self: Any, hidden_states: Tensor, packed: PackedBatch | None = None, **kwargs: Any) -> Tensor:
        """[1, N, H] -> [1, n, H] of the n tokens that are kept, or [1, N, H]."""
        if packed is None or packed.kept is None or torch.compiler.is_compiling():
            every: Tensor = super().forward(hidden_states, packed=packed, **kwargs)
            return every
        kept = packed.kept
        normed = self.input_layernorm(hidden_states)
        if isinstance(self.self_attn, FastAttention):
            attended, _ = self.self_attn(normed, packed=packed, kept=kept, **kwargs)
        else:
            attended = self.self_attn(hidden_states=normed, packed=packed, **kwargs)[0][:, kept]
        x = hidden_states[:, kept] + attended
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output
