"""The graphed decoder: fast sampling from Llama-like models and GPT-2 on a GPU.

A step is about a thousand small operations, and to start each from Python takes ten times as long as to compute it. So
a step is captured as a CUDA graph, which starts as a whole, and captured again when rows enter or leave.

Keys and values lie in one tensor per layer, with room for the longest row. Attention reads all of it with a mask.
Float32 weights are cast to the number format of the passes once per rollout: autocast would cast them in every step.

The decoder is compared with the model's own forward at its first use. If they differ, or the step cannot be captured,
and for any other family, plain.py samples.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from rlhf_cli.decoders.decoder import Decoder, UnsupportedError, cast_format, exact_gap, gap_to_forward, once_per_model
from rlhf_cli.decoders.network import LINEAR, Map, NetworkWeights, read_network, side_by_side
from rlhf_cli.models.cost import READ_TOKENS
from rlhf_cli.models.forward import tolerance_of
from rlhf_cli.processes.sharding import device_of
from rlhf_cli.processes.threads import is_out_of_memory

LEAVES_BELOW = 0.5
"""Finished rows leave once at most this share of the rows is unfinished. A new graph takes as long as several steps."""
FEWEST_ROWS = 32
"""A step of at most this many rows takes as long as reading the weights: finished rows stay beside unfinished ones."""
CAPTURE_BYTES = 1 << 29
"""Memory that must be free for a capture, beside four times the logits. While it captures, torch does not give back the
memory that it keeps for later, but raises OutOfMemoryError."""
ALIGNED = 8
"""The width of the mask is a multiple of it, for torch's memory-efficient attention."""


@torch.no_grad()
def graphed_decoder(model: PreTrainedModel, longest: int) -> GraphedDecoder:
    """A decoder for rows of at most `longest` tokens. Raises UnsupportedError with the reason."""
    if reason := _why_not(model):
        raise UnsupportedError(reason)
    return GraphedDecoder(model, longest)


@once_per_model
def _why_not(model: PreTrainedModel) -> str:
    """Why the decoder cannot be used, "" if it can: it is compared in float32, and runs once as it will be used."""
    new = functools.partial(GraphedDecoder, model)
    try:
        gap, in_use = exact_gap(model, new), gap_to_forward(model, new)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        return f"no CUDA graph of its steps ({type(error).__name__}: {error})"
    if not gap <= tolerance_of(model):  # also true of NaN
        return f"the graphed decoder differs from a plain forward by {gap:.1e}"
    return "" if math.isfinite(in_use) else "the graphed decoder overflows"


class GraphedDecoder(Decoder):
    """Next-token logits of live rows, a step as one CUDA graph. On a CPU, for tests, it runs by single operations."""

    admits_beside_others = True

    def __init__(self, model: PreTrainedModel, longest: int):
        """`longest` is the maximum length of a row in tokens. Raises UnsupportedError."""
        device = device_of(model)
        half = cast_format(model)
        self.network = network = read_network(model, longest, _Weights(half))
        self.dtype = half or next(model.parameters()).dtype
        self.length = longest + -longest % ALIGNED
        shape = 0, network.kv_heads, self.length, network.head_dim  # [N, kv_heads, length, D]
        pools = [torch.zeros(2, *shape, dtype=self.dtype, device=device) for _ in network.layers]
        self.keys, self.values = [pool[0] for pool in pools], [pool[1] for pool in pools]
        self.positions = torch.zeros(0, dtype=torch.int64, device=device)  # of the next token of each row [N]
        self._ids = self.positions.clone()
        self._logits = torch.zeros(0, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        number = {prompt: row for row, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        distinct, device = list(number), self.positions.device  # equal prompts are computed once
        keys, values = ([p.new_zeros(len(distinct), *p.shape[1:]) for p in pool] for pool in (self.keys, self.values))
        most, hidden = max(1, READ_TOKENS // max(map(len, distinct))), []
        for first in range(0, len(distinct), most):
            part = slice(first, first + most)
            hidden.append(self._read(distinct[part], [p[part] for p in keys], [p[part] for p in values]))
        rows = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=device)
        self._graph = None
        for pool, new in ((self.keys, keys), (self.values, values)):  # layer by layer: both are as large as the cache
            for layer, old in enumerate(pool):
                pool[layer] = torch.cat([old, new.pop(0)[rows]])
        self.positions = torch.cat([self.positions, torch.tensor([len(p) for p in prompts], device=device)])
        return self.network.logits(torch.cat(hidden))[rows]

    def _read(self, prompts: Sequence[Sequence[int]], keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Hidden states at the last token of each prompt [n, hidden]; writes keys and values."""
        count, width = len(prompts), max(map(len, prompts))
        device = self.positions.device
        # Padding is behind the prompt, where causal attention does not see it, and new tokens overwrite it.
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
        positions = torch.arange(width, device=device).repeat(count)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            q, k, v = (x.to(self.dtype).unflatten(0, (count, width)).transpose(1, 2) for x in (query, key, value))
            keys[layer][:, :, :width], values[layer][:, :, :width] = k, v
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
            return output.transpose(1, 2).reshape(count * width, -1)

        hidden = self.network.forward(ids.flatten(), positions, attend).unflatten(0, (count, width))
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        return hidden[torch.arange(count, device=device), last]

    def step(self, ids: Tensor) -> Tensor:
        """See `Decoder`. The next step writes its own logits into the same tensor."""
        if self.positions.device.type != "cuda":
            self._ids = ids
            self._logits = self._next_logits()
        else:
            if self._graph is None:
                self._ids = ids.clone()
                self._graph = self._captured()
            self._ids.copy_(ids)
            self._graph.replay()
        self.positions += 1
        return self._logits

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The step of the present rows as a graph."""
        device = self.positions.device
        here, beside = torch.cuda.current_stream(device), _stream(device)
        beside.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        dtype, enabled = torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        try:
            # Autocast must not keep weights in a graph's memory, which is reused. cuDNN's attention would build a plan
            # for each new number of rows.
            with (
                torch.cuda.stream(beside),
                torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=False),
                sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
            ):
                first = self._next_logits()  # libraries allocate what they need at the first call
                if torch.cuda.mem_get_info(device)[0] < CAPTURE_BYTES + 4 * first.nbytes:
                    torch.cuda.empty_cache()
                del first
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._logits = self._next_logits()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # says only that the capture has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:  # others may get the memory that the first call still writes to
            here.wait_stream(beside)
        return graph

    def _next_logits(self) -> Tensor:
        """The logits [N, V] after `_ids` at `positions`; writes their keys and values."""
        count, (kv_heads, length, size) = len(self.positions), self.keys[0].shape[1:]
        device = self.positions.device
        head = torch.arange(count * kv_heads, device=device)
        slots = head * length + self.positions.repeat_interleave(kv_heads)
        unseen_mask = torch.arange(length, device=device) > self.positions[:, None]
        bias = torch.zeros(count, length, dtype=self.dtype, device=device).masked_fill_(unseen_mask, -torch.inf)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys.view(-1, size).index_copy_(0, slots, key.to(self.dtype).flatten(0, 1))
            values.view(-1, size).index_copy_(0, slots, value.to(self.dtype).flatten(0, 1))
            # The queries that share a key head are as many queries of one head.
            q = query.to(self.dtype).unflatten(1, (kv_heads, -1))  # [N, kv_heads, heads / kv_heads, D]
            mask = bias[:, None, None].expand(-1, kv_heads, q.shape[2], -1)
            return F.scaled_dot_product_attention(q, keys, values, mask, scale=scaling).flatten(1)

        return self.network.logits(self.network.forward(self._ids, self.positions, attend))

    def leave(self, rows: int, unfinished: int) -> bool:
        return unfinished == 0 or (rows > FEWEST_ROWS and unfinished <= LEAVES_BELOW * rows)

    def keep(self, rows: Tensor) -> None:
        self._graph = None
        for pool in (self.keys, self.values):
            for layer, old in enumerate(pool):  # layer by layer: a copy of them all would be as large as the cache
                pool[layer] = old[rows]
        self.positions = self.positions[rows]


class _Weights(NetworkWeights):
    """Linear layers in the number format of the passes, and torch's own norm. The functions hold their weights."""

    def linear(self, *modules: Any) -> Map:
        """As one product if their weights are copied anyway."""
        if len(modules) == 1:
            return self._linear(modules[0])
        if all(type(module) in LINEAR and self.half not in (None, module.weight.dtype) for module in modules):
            return _product(*side_by_side(modules, self.cast))
        maps = [self._linear(module) for module in modules]
        return lambda x: torch.cat([one(x) for one in maps], dim=-1)

    def _linear(self, module: Any) -> Map:
        """``x @ W.T + b``, with LoRA adapters ``+ (x @ A.T) @ (scaling * B).T``; any other layer is called as it is."""
        base = getattr(module, "base_layer", module)
        is_lora = base is not module and hasattr(module, "lora_variant") and not module.lora_variant
        is_known = type(base) in LINEAR and (base is module or is_lora)
        if not is_known or any(getattr(module, "lora_bias", {}).values()):
            return cast(Map, module)
        product = _product(*side_by_side([base], self.cast))
        names = [] if base is module or module.disable_adapters or module.merged else module.active_adapters
        adapters = []
        for name in names:
            if name in module.lora_A:
                scaled = module.lora_B[name].weight * module.scaling[name]
                adapters.append((_product(self.cast(module.lora_A[name].weight)), _product(self.cast(scaled))))
        return lambda x: sum((up(down(x)) for down, up in adapters), product(x))

    def rms_norm(self, module: Any) -> Map:
        weight, eps = module.weight.float(), module.variance_epsilon
        return lambda x: F.rms_norm(x.float(), weight.shape, weight, eps)


def _product(weight: Tensor, bias: Tensor | None = None) -> Map:
    return lambda x: F.linear(x.to(weight.dtype), weight, bias)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps 32 MB for each stream that it has worked on."""
    return torch.cuda.Stream(device)
