"""The layers of Llama-like models and GPT-2, as functions of tensors, for the decoders paged.py and graphed.py."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from rlhf_cli.decoders.decoder import UnsupportedError
from rlhf_cli.kernels.linear import FastConv1D, FastLinear, fixed_linear, fixed_weight
from rlhf_cli.models.frozen import HeldEmbedding

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
LINEAR = (nn.Linear, FastLinear, Conv1D, FastConv1D)
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend only on the position, not on the length of the text."""

Map = Callable[[Tensor], Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Attention of a layer: its number, query [N, heads, D], key and value [N, kv_heads, D], and the scaling of the scores
-> [N, heads * D]. It also writes keys and values to the decoder's cache."""


@dataclass(frozen=True)
class Layer:
    """One block: ``x += out(attention(qkv(norm_1(x))))``, ``x += feed(norm_2(x))``."""

    norm_1: Map
    qkv: Map  # [N, hidden] -> [N, (heads + 2 * kv_heads) * head_dim]: queries, keys, values
    scaling: float
    out: Map
    norm_2: Map
    feed: Map
    head_norms: tuple[Map, Map] | None = None  # of queries and of keys, before the rotation (Qwen3)


@dataclass(frozen=True)
class Network:
    """A model as functions of tensors."""

    weights: NetworkWeights  # all that the functions read
    embed: Callable[[Tensor, Tensor], Tensor]  # token ids [N] and their positions [N] -> [N, hidden]
    layers: list[Layer]
    norm: Map
    head: Map
    heads: int
    kv_heads: int
    head_dim: int
    rotation: Map | None = None  # positions [N] -> [N, head_dim / 2] complex

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states before the last norm: ids [N] at `positions` [N] -> [N, hidden]."""
        heads, kv_heads = self.heads, self.kv_heads
        rotation = None if self.rotation is None else self.rotation(positions)[:, None]  # [N, 1, D / 2]
        x = self.embed(ids, positions)  # [N, hidden]
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.norm_1(x)).view(-1, heads + 2 * kv_heads, self.head_dim)
            qk, value = qkv.split([heads + kv_heads, kv_heads], dim=1)
            if layer.head_norms is not None:
                norm_query, norm_key = layer.head_norms
                qk = torch.cat([norm_query(qk[:, :heads]), norm_key(qk[:, heads:])], dim=1)
            if rotation is not None:
                qk = rotate(qk, rotation)
            query, key = qk.split([heads, kv_heads], dim=1)
            x = x + layer.out(attend(number, query, key, value, layer.scaling))
            x = x + layer.feed(layer.norm_2(x))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, hidden] as from `forward` -> [N, V]."""
        return self.head(self.norm(hidden))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021): x [N, heads, D], rotation [N, 1, D / 2] complex -> [N, heads, D].

    Entries d and d + D/2 rotate as one complex number, and are neighbours in the result, of queries and keys alike.
    """
    half = x.shape[-1] // 2
    x = x.float() if x.dtype.itemsize == 2 else x  # torch has no complex numbers of two 16-bit ones
    rotated = torch.complex(x[..., :half], x[..., half:]).mul_(rotation)
    return torch.view_as_real(rotated).flatten(2)


class NetworkWeights(list[Tensor]):
    """The weights of a network, and functions that read them from this list when they are called.

    So a recorded step (`recorded`) computes with the weights that it is given.
    """

    are_all = True
    """Whether the functions read nothing else. A module of an unknown class, such as an adapter, is called as it is."""

    def __init__(self, half: torch.dtype | None = None):
        """half: the format to which autocast casts what linear layers multiply; None if it is off."""
        super().__init__()
        self.half = half

    def cast(self, weight: Tensor) -> Tensor:
        return weight.to(self.half or weight.dtype)

    def read(self, weight: Tensor) -> Callable[[], Tensor]:
        """Append a weight; return a function that reads it."""
        self.append(weight.detach())
        return functools.partial(self.__getitem__, len(self) - 1)

    @contextlib.contextmanager
    def replaced(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Inside the block, the functions read these instead."""
        own = list(self)
        self[:] = others
        try:
            yield
        finally:
            self[:] = own

    def linear(self, *modules: Any) -> Map:
        """Linear layers with the same input as one product, side by side."""
        if not all(type(module) in LINEAR for module in modules):
            self.are_all = False
            joined = modules[0] if len(modules) == 1 else lambda x: torch.cat([module(x) for module in modules], dim=-1)
            return joined if self.half is None else lambda x: joined(x).float()
        values, biases = side_by_side(modules, self.cast)
        weight, half = self.read(fixed_weight(values)), self.half
        bias = (lambda: None) if biases is None else self.read(biases)
        if half is None:
            return lambda x: fixed_linear(x, weight(), bias())
        return lambda x: fixed_linear(x.to(half), weight(), bias()).float()

    def rms_norm(self, module: Any) -> Map:
        """``x / sqrt(mean(x^2) + eps) * weight``, as ``x / hypot(|x|, sqrt(size * eps)) * (sqrt(size) * weight)``: four
        operations, where torch's own rms_norm takes seven on a CPU."""
        size = len(module.weight)
        least = torch.tensor(math.sqrt(size * module.variance_epsilon))
        weight = self.read(module.weight * math.sqrt(size))
        return lambda x: x.div(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(least)).mul_(weight())

    def layer_norm(self, module: Any) -> Map:
        if type(module) is not nn.LayerNorm or module.bias is None:
            self.are_all = False
            return module
        weight, bias = self.read(module.weight), self.read(module.bias)
        return lambda x: F.layer_norm(x, module.normalized_shape, weight(), bias(), module.eps)

    def activation(self, module: Any) -> Map:
        self.are_all &= not list(module.parameters())
        return module

    def rows(self, table: Tensor) -> Map:
        """Rows of a table by their numbers: [N] -> [N, ...]."""
        weight = self.read(table)
        return lambda numbers: weight().index_select(0, numbers)

    def embedding(self, module: Any) -> Map:
        if type(module) in (nn.Embedding, HeldEmbedding) and module.max_norm is None:
            rows = self.rows(module.weight)
            return rows if type(module) is nn.Embedding else lambda ids: rows(ids).float()
        self.are_all = False
        return module


def side_by_side(modules: Sequence[Any], cast: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
    """The weights [out, in] of linear layers below each other, and their biases, each in the format of `cast`."""
    weights = [cast(m.weight.t() if isinstance(m, Conv1D) else m.weight) for m in modules]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(module.bias is None for module in modules):
        return weight, None
    biases = [w.new_zeros(len(w)) if m.bias is None else cast(m.bias) for m, w in zip(modules, weights, strict=True)]
    return weight, torch.cat(biases)


def read_network(model: PreTrainedModel, longest: int, weights: NetworkWeights) -> Network:
    """The network with the model's current weights, for rows of at most `longest` tokens. Raises UnsupportedError.

    The methods of `weights`, which is empty, make its functions.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        raise UnsupportedError("its modules have hooks")
    family = model.config.model_type
    if family == "gpt2":
        return _read_gpt2(model, weights)
    if family not in LLAMA_LIKE:
        raise UnsupportedError(f"no fast decoder supports the family {family}")
    window = getattr(model.config, "sliding_window", None)
    if window is not None and longest > window:
        raise UnsupportedError(f"a text of {longest} tokens is longer than its sliding window of {window}")
    return _read_llama(model, longest, weights)


def _read_llama(model: Any, longest: int, weights: NetworkWeights) -> Network:
    config, backbone = model.config, model.model
    rope = config.rope_parameters["rope_type"]
    if rope not in FIXED_ROPE:
        raise UnsupportedError(f"its rotary embedding ({rope}) changes with the length of the text")
    head_dim, qwen3 = backbone.layers[0].self_attn.head_dim, config.model_type == "qwen3"
    device = next(model.parameters()).device
    embed = weights.embedding(backbone.embed_tokens)
    positions = torch.arange(longest, device=device)[None]
    cos, sin = (x[0, :, : head_dim // 2] for x in backbone.rotary_emb(torch.zeros(1, device=device), positions))

    def layer(block: Any) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        gate_and_up, down = weights.linear(mlp.gate_proj, mlp.up_proj), weights.linear(mlp.down_proj)
        activation = weights.activation(mlp.act_fn)

        def feed(x: Tensor) -> Tensor:
            gate, up = gate_and_up(x).chunk(2, dim=-1)
            return down(activation(gate) * up)

        return Layer(
            norm_1=weights.rms_norm(block.input_layernorm),
            qkv=weights.linear(attention.q_proj, attention.k_proj, attention.v_proj),
            scaling=attention.scaling,
            out=weights.linear(attention.o_proj),
            norm_2=weights.rms_norm(block.post_attention_layernorm),
            feed=feed,
            head_norms=(weights.rms_norm(attention.q_norm), weights.rms_norm(attention.k_norm)) if qwen3 else None,
        )

    return Network(
        weights=weights,
        embed=lambda ids, _: embed(ids),
        rotation=weights.rows(torch.complex(cos, sin)),
        layers=[layer(block) for block in backbone.layers],
        norm=weights.rms_norm(backbone.norm),
        head=weights.linear(model.lm_head),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
    )


def _read_gpt2(model: Any, weights: NetworkWeights) -> Network:
    config, backbone = model.config, model.transformer
    token, position = weights.embedding(backbone.wte), weights.embedding(backbone.wpe)

    def layer(block: Any) -> Layer:
        up, down = weights.linear(block.mlp.c_fc), weights.linear(block.mlp.c_proj)
        activation = weights.activation(block.mlp.act)
        if type(activation) is NewGELUActivation:  # The same function as one operation instead of eight.
            activation = functools.partial(F.gelu, approximate="tanh")
        return Layer(
            norm_1=weights.layer_norm(block.ln_1),
            qkv=weights.linear(block.attn.c_attn),
            scaling=block.attn.scaling,
            out=weights.linear(block.attn.c_proj),
            norm_2=weights.layer_norm(block.ln_2),
            feed=lambda x: down(activation(up(x))),
        )

    return Network(
        weights=weights,
        embed=lambda ids, positions: token(ids) + position(positions),
        layers=[layer(block) for block in backbone.h],
        norm=weights.layer_norm(backbone.ln_f),
        head=weights.linear(model.lm_head),
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
    )
