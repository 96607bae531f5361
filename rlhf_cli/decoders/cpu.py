"""The fast tier of sampling: a decoder of Llama-like and GPT-2 models, written out, for float32 on a CPU.

transformers' forward of one token a row spends most of its time between its operations, on a padded cache and in an
attention that is made for many queries. Here a layer is some fifteen operations, prompts are read without padding
and each different one once, and attention reads what is there and no more (paged_cache.py).

A model is read anew for every rollout, so that what is sampled from is what is trained. Its linear layers are copied
once a rollout, those with the same input side by side and in the order in which oneDNN reads them: that takes as long
as a step or two and makes a step of a model with a hidden size of 512 a quarter shorter. A layer of any other class
(an adapter around it) is called as it is.

What is read here is checked against the model's own forward at the first use (`fast_decoder`). Where it differs, and
for any other family, sampling goes through that forward (plain_decoder.py).
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from rlhf_cli.decoders.paged_cache import PAGE, PagedCache
from rlhf_cli.kernels.linear import FastConv1D, FastLinear, fixed_linear, rounded_up
from rlhf_cli.models.forward import TOLERANCE, vocabulary_rows
from rlhf_cli.models.limits import positions
from rlhf_cli.packing import pack

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that are the same function of the position whatever the length of the text."""

READ_TOKENS = 1024
"""Prompts are read so many tokens at a time: what lies between two operations then stays in the processor's cache,
which takes a quarter off the time of 64 prompts read at once."""

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """One block: ``x += out(attention(qkv(norm_1(x))))``, ``x += feed(norm_2(x))``."""

    norm_1: Map
    qkv: Map
    """[N, hidden] -> [N, (heads + 2 * kv_heads) * head_dim]: queries, keys, values."""
    norm_query: Map | None
    norm_key: Map | None
    """Of each head, before the rotation (Qwen3)."""
    scaling: float
    out: Map
    norm_2: Map
    feed: Map


@dataclass(frozen=True)
class Network:
    """A model, as maps of tensors."""

    embed: Callable[[Tensor, Tensor], Tensor]
    """Token ids [N] and their positions [N] -> [N, hidden]."""
    rotation: Tensor | None
    """[longest, head_dim / 2] complex, of each position; None without rotary embeddings."""
    layers: list[Layer]
    norm: Map
    head: Map
    heads: int
    kv_heads: int
    head_dim: int


class NotFastError(Exception):
    """Why a model, or this text length, is nothing for the fast tier."""


# -------------------------------------------------------------------------------------------- decoding


class FastDecoder:
    """Next-token logits of live rows, each a prompt with what was drawn since."""

    leaves_below = 1.0
    """To leave costs nothing, so a row that has ended leaves at once."""
    admits_beside_others = True
    most_rows = sys.maxsize
    lag = 0

    def __init__(self, model: PreTrainedModel, longest: int):
        """longest: tokens that a row may come to have. Raises NotFastError."""
        weight = next(model.parameters())
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            raise NotFastError("the fast sampler computes in float32 on a CPU")
        self.network = network = read(model, longest, _linear, _rms_norm)
        self.cache = PagedCache(len(network.layers), network.heads, network.kv_heads, network.head_dim)

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Rows for these prompts behind those that are there: [len(prompts), V], the logits of their first tokens.

        Equal prompts are computed once.
        """
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of.setdefault(tuple(prompt), []).append(row)
        different = list(rows_of)
        places = self.cache.open_rows(different, list(rows_of.values()))
        last, first = [], 0
        for count in shares([len(prompt) for prompt in different], READ_TOKENS):
            chosen = slice(first, first + count)
            last.append(self._read_prompts(different[chosen], places[chosen]))
            first += count
        logits = self.network.head(self.network.norm(_filled_up(torch.cat(last))))
        number = torch.empty(len(prompts), dtype=torch.int64)
        for i, rows in enumerate(rows_of.values()):
            number[rows] = i
        return logits[number]

    def _read_prompts(self, prompts: Sequence[Sequence[int]], places: Sequence[Tensor]) -> Tensor:
        """[prompts, hidden]: at the last token of each, before the last norm; their keys and values are written."""
        batch = pack(prompts)
        starts = itertools.accumulate(batch.lengths[:-1], initial=0)
        where = torch.cat(
            [place + torch.tensor([[start], [0], [0]]) for place, start in zip(places, starts, strict=True)], dim=1
        )

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            self.cache.write_prompts(number, key, value, where)
            return causal_attention(query, key, value, batch.lengths, scaling)

        ids, position_ids = _filled_up(batch.ids), _filled_up(batch.position_ids)
        return self._forward(ids, position_ids, attend)[batch.last]

    def step(self, ids: Tensor) -> Tensor:
        """One more token [B] of each row: [B, V], the logits of the next."""
        positions = self.cache.add_token()
        x = self._forward(_filled_up(ids), positions, self.cache.attend)
        return self.network.head(self.network.norm(x))[: len(ids)]

    def keep(self, rows: Tensor) -> None:
        """Only these rows stay, in this order."""
        self.cache.keep(rows.tolist())

    def _forward(
        self, ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
    ) -> Tensor:
        """[N] ids -> [N, hidden] before the last norm.

        `attend` takes a layer's number, queries, keys, values and scaling.
        """
        network = self.network
        heads, kv_heads, size = network.heads, network.kv_heads, network.head_dim
        rotation = None
        if network.rotation is not None:
            rotation = network.rotation[positions][:, None]
        x = network.embed(ids, positions)
        for number, layer in enumerate(network.layers):
            qkv = layer.qkv(layer.norm_1(x)).view(len(x), -1, size)
            value = qkv[:, heads + kv_heads :]
            if layer.norm_query is not None and layer.norm_key is not None:
                query, key = layer.norm_query(qkv[:, :heads]), layer.norm_key(qkv[:, heads : heads + kv_heads])
                qk = torch.cat([query, key], dim=1)
            else:
                qk = qkv[:, : heads + kv_heads]
            if rotation is not None:
                qk = rotated(qk, rotation)
            mixed = attend(number, qk[:, :heads], qk[:, heads:], value, layer.scaling)
            x = x + layer.out(mixed)
            x = x + layer.feed(layer.norm_2(x))
        return x


def _filled_up(x: Tensor) -> Tensor:
    """x with rows of 0 behind it, so that there is a usual number of them."""
    missing = rounded_up(len(x)) - len(x)
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def shares(lengths: Sequence[int], most: int) -> list[int]:
    """How many prompts are read at a time: of at most so many tokens together, or one prompt.

    >>> shares([900, 100, 100, 2000, 3], 1024)
    [2, 1, 1, 1]
    """
    counts, tokens = [0], 0
    for length in lengths:
        if counts[-1] > 0 and tokens + length > most:
            counts.append(0)
            tokens = 0
        counts[-1] += 1
        tokens += length
    return counts


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021), with the two halves of a head's numbers interleaved in what comes out.

    x [N, heads, D], rotation [N, 1, D / 2] complex. Numbers d and d + D/2 turn together as one complex number; in
    what order they lie is all the same to the product of a query and a key, as long as it is the same in both.
    """
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]).mul_(rotation)
    return torch.view_as_real(turned).flatten(2)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float) -> Tensor:
    """Attention of sequences end to end: query [N, heads, D], key, value [N, H_kv, D] -> [N, heads * D].

    N may be more than the sum of the lengths; what comes out for the rest is 0.
    """
    count = sum(lengths)
    parts = [
        F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            is_causal=True,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )[0].transpose(0, 1)
        for q, k, v in zip(*(x[:count].split(lengths) for x in (query, key, value)), strict=True)
    ]
    return torch.cat([*parts, query.new_zeros(len(query) - count, *query.shape[1:])]).flatten(1)


# ---------------------------------------------------------------------------------------- reading a model


def read(model: PreTrainedModel, longest: int, linear: Callable[..., Map], rms_norm: Callable[[Any], Map]) -> Network:
    """The model's weights as they are now; for rows of at most `longest` tokens.

    linear makes the map of some linear layers side by side, rms_norm that of a norm. Raises NotFastError.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        raise NotFastError("its modules have hooks")
    family = model.config.model_type
    if family in LLAMA_LIKE:
        window = model.config.to_dict().get("sliding_window")
        if window is not None and longest > window:
            raise NotFastError(f"a text of {longest} tokens is longer than its sliding window of {window}")
        return _read_llama(model, longest, linear, rms_norm)
    if family == "gpt2":
        return _read_gpt2(model, linear)
    raise NotFastError(f"the fast sampler does not know the family {family}")


def _read_llama(model: Any, longest: int, linear: Callable[..., Map], rms_norm: Callable[[Any], Map]) -> Network:
    config, backbone = model.config, model.model
    kind = config.rope_parameters["rope_type"]
    if kind not in FIXED_ROPE:
        raise NotFastError(f"its rotary embedding ({kind}) changes with the length of the text")
    head_dim = backbone.layers[0].self_attn.head_dim
    device = next(model.parameters()).device
    at = torch.arange(longest, device=device)[None]
    cos, sin = (x[0, :, : head_dim // 2] for x in backbone.rotary_emb(torch.zeros(1, device=device), at))

    def layer(block: Any) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        with_head_norms = config.model_type == "qwen3"
        return Layer(
            norm_1=rms_norm(block.input_layernorm),
            qkv=linear(attention.q_proj, attention.k_proj, attention.v_proj),
            norm_query=rms_norm(attention.q_norm) if with_head_norms else None,
            norm_key=rms_norm(attention.k_norm) if with_head_norms else None,
            scaling=attention.scaling,
            out=linear(attention.o_proj),
            norm_2=rms_norm(block.post_attention_layernorm),
            feed=_gated(linear(mlp.gate_proj, mlp.up_proj), mlp.act_fn, linear(mlp.down_proj)),
        )

    return Network(
        embed=lambda ids, _: backbone.embed_tokens(ids),
        rotation=torch.complex(cos, sin),
        layers=[layer(block) for block in backbone.layers],
        norm=rms_norm(backbone.norm),
        head=linear(model.lm_head),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
    )


def _read_gpt2(model: Any, linear: Callable[..., Map]) -> Network:
    config, backbone = model.config, model.transformer

    def layer(block: Any) -> Layer:
        up, down = linear(block.mlp.c_fc), linear(block.mlp.c_proj)
        activation = block.mlp.act
        if type(activation) is NewGELUActivation:  # The same function in one operation instead of eight.
            activation = functools.partial(F.gelu, approximate="tanh")
        return Layer(
            norm_1=block.ln_1,
            qkv=linear(block.attn.c_attn),
            norm_query=None,
            norm_key=None,
            scaling=block.attn.scaling,
            out=linear(block.attn.c_proj),
            norm_2=block.ln_2,
            feed=lambda x: down(activation(up(x))),
        )

    return Network(
        embed=lambda ids, positions: backbone.wte(ids) + backbone.wpe(positions),
        rotation=None,
        layers=[layer(block) for block in backbone.h],
        norm=backbone.ln_f,
        head=linear(model.lm_head),
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=config.n_embd // config.n_head,
    )


def _linear(*modules: Any) -> Map:
    """The outputs of some linear layers side by side; in one product where they are no more than linear layers."""
    if not are_linear(modules):
        return lambda x: torch.cat([module(x) for module in modules], dim=-1)
    return fixed_linear(*joined(modules))


def are_linear(modules: Sequence[Any]) -> bool:
    """Is none of them more than a linear layer, an adapter around one for instance?"""
    return all(type(module) in (nn.Linear, FastLinear, Conv1D, FastConv1D) for module in modules)


def joined(modules: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in] and bias [out], or None, of linear layers side by side; of a single one its own."""
    weights = [m.weight.t() if isinstance(m, Conv1D) else m.weight for m in modules]
    bias = None
    if any(module.bias is not None for module in modules):
        bias = torch.cat(
            [w.new_zeros(len(w)) if m.bias is None else m.bias for m, w in zip(modules, weights, strict=True)]
        )
    return (weights[0] if len(weights) == 1 else torch.cat(weights)), bias


def _rms_norm(module: Any) -> Map:
    """``x / sqrt(mean(x^2) + eps) * weight``.

    That is ``x / hypot(|x|, sqrt(size * eps)) * (sqrt(size) * weight)``: four operations, where torch's own rms_norm
    is seven on a CPU.
    """
    size = len(module.weight)
    least = torch.tensor(math.sqrt(size * module.variance_epsilon))
    weight = module.weight * math.sqrt(size)
    return lambda x: x.div(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(least)).mul_(weight)


def _gated(gate_and_up: Map, activation: Map, down: Map) -> Map:
    def feed(x: Tensor) -> Tensor:
        gate, up = gate_and_up(x).chunk(2, dim=-1)
        return down(activation(gate) * up)

    return feed


# ------------------------------------------------------------------------------------------ is it the model?

_GAPS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[list[type], float]] = weakref.WeakKeyDictionary()
"""Of each model that was checked, the classes of its modules then, and what `_gap` found."""


@torch.no_grad()
def fast_decoder(model: PreTrainedModel, longest: int) -> FastDecoder:
    """A decoder for rows of at most `longest` tokens, if it gives the logits of the model's own forward.

    That is checked at the first use of a model, and again when modules of it have been replaced (adapters). Raises
    NotFastError, with the reason.
    """
    try:
        decoder = FastDecoder(model, longest)
        classes = [type(module) for module in model.modules()]
        if model not in _GAPS or _GAPS[model][0] != classes:
            _GAPS[model] = classes, _gap(model)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise NotFastError(f"its modules are not those that the fast sampler knows ({type(error).__name__})") from error
    gap = _GAPS[model][1]
    if not gap <= TOLERANCE:
        raise NotFastError(f"the fast sampler differs from a plain forward by {gap:.1e}")
    return decoder


def _gap(model: PreTrainedModel) -> float:
    return difference(*compared(model, lambda longest: FastDecoder(model, longest)))


class Decoder(Protocol):
    """What `compared` asks of a decoder."""

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Rows for these prompts."""

    def step(self, ids: Tensor) -> Tensor:
        """One more token of each row."""


def difference(logits: Tensor, wanted: Tensor) -> float:
    """The largest difference of a logit, over the largest logit or 1."""
    return ((logits - wanted).abs().max() / wanted.abs().max().clamp_min(1.0)).item()


def compared(model: PreTrainedModel, new: Callable[[int], Decoder]) -> tuple[Tensor, Tensor]:
    """The logits of a decoder, new(longest), and those of one forward a sequence: [n, V] float32 each.

    Of two prompts of unequal length and of a few tokens more, into a new page.
    """
    steps, device = 3, next(model.parameters()).device
    lengths = [min(n, positions(model) - steps) for n in (PAGE - 1, 5)]
    texts = [[(7 * i + 3) % vocabulary_rows(model) for i in range(n + steps)] for n in lengths]
    decoder = new(max(map(len, texts)))
    found = [decoder.admit([text[:n] for text, n in zip(texts, lengths, strict=True)]).float()]
    for step in range(steps):
        ids = torch.tensor([text[n + step] for text, n in zip(texts, lengths, strict=True)], device=device)
        found.append(decoder.step(ids).float().clone())
    was_training = model.training
    model.eval()
    plain = [
        model(input_ids=torch.tensor([text], device=device)).logits[0, n - 1 :].float()
        for text, n in zip(texts, lengths, strict=True)
    ]
    model.train(was_training)
    return torch.stack(found, dim=1).flatten(0, 1), torch.cat(plain)
