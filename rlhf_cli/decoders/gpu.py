"""The fast tier of sampling on a GPU: tensors of fixed shapes, and one CUDA graph for each shape of a step.

A step of one token a row is some hundreds of small operations, and a GPU can be done with each before Python has
launched the next. So a step is recorded once as a CUDA graph and replayed, which is one launch. A graph reads and
writes the same memory each time: there is a slot for each row, keys and values have room for the longest text, a row's
token t lies at place t of its slot (no padding at the left, each row has its own length), and what a step takes and
gives are buffers.

Shapes come in steps, each with a graph of its own: the rows are a power of two, and keys are read up to a multiple of
BUCKET tokens, so that the first steps do not read what is empty. When half of the rows have ended the others move to
the front. Rows between those that live and the power of two compute something that nobody reads.

Under bfloat16 autocast the weights of linear layers are copied to bfloat16, once a rollout, those with the same input
side by side: a step reads all of them, and in bfloat16 that is half of the bytes. The residual stream, norms and
rotations are float32, as they are in a forward pass under autocast, and softmax is float32 inside the attention. In
float32 every weight is read where it is. A layer of any other class (an adapter) is called as it is.

A decoder lives for one rollout. To keep graphs and copies for the next one would hold their memory while the model is
trained, and a graph does not see what is switched in Python (adapters on or off); to make them anew costs a copy of
the weights and a few steps for each graph.

On a CPU the same step runs without a graph; that is what the tests run. No part of it was run on a GPU yet.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from rlhf_cli.decoders.cpu import (
    Map,
    NotFastError,
    are_linear,
    compared,
    difference,
    joined,
    read,
    rotated,
    shares,
)
from rlhf_cli.kernels.attention import packed_attention, row_attention
from rlhf_cli.models.forward import TOLERANCE, vocabulary_rows
from rlhf_cli.packing import pack, send

BUCKET = 128
"""Keys are read up to a multiple of it."""
READ_TOKENS = 8192
"""Prompts are read so many tokens at a time, which bounds what lies between two operations."""
WARM_UP = 3
"""Steps before a graph is recorded, as torch.cuda.make_graphed_callables has it: what a library sets up at the first
use of a shape must not become part of the graph."""
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Of a step. cuDNN's would make a plan for each new shape; flash attention takes a mask on a CPU only."""
MEMORY_SHARE = 0.8
"""Of the free memory, for keys, values and logits of the rows."""


class StaticDecoder:
    """Next-token logits of live rows, each a prompt with what was drawn since."""

    leaves_below = 0.5
    """Leaving costs a copy of keys and values, and only a smaller power of two is fewer rows to compute."""
    admits_beside_others = True
    lag = 1
    """The host reads how many rows have ended when it has launched the step after, so the GPU never waits for it."""

    def __init__(self, model: PreTrainedModel, longest: int, rows: int, dtype: torch.dtype):
        """For at most `rows` rows at a time, or as many as fit into memory, of at most `longest` tokens.

        dtype: float32, or bfloat16 for a model that runs under autocast. A row takes
        ``2 * layers * kv_heads * head_dim * longest * bytes a number``, and its logits. Raises NotFastError.
        """
        self.model, self.longest, self.dtype = model, longest, dtype
        self.device = device = next(model.parameters()).device
        with self._autocast():
            self.network = network = read(model, longest, _linear_in(dtype), _rms_norm)
        places = -(-longest // BUCKET) * BUCKET
        numbers = 2 * len(network.layers) * network.kv_heads * network.head_dim * places
        # Logits as they are kept, as the head gives them, and what a draw makes of them.
        self.most_rows = _rows_that_fit(numbers * dtype.itemsize + 16 * vocabulary_rows(model), rows, device)
        shape = (self.most_rows, network.kv_heads, places, network.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in network.layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in network.layers]
        # What a step takes and gives. A row's position is that of its next token.
        self.ids = torch.zeros(self.most_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.logits = torch.zeros(self.most_rows, vocabulary_rows(model), device=device)
        self._row_numbers = torch.arange(self.most_rows, device=device)
        self._places = torch.arange(places, device=device)
        # Tokens of each live row, for the host to choose a graph by without asking the GPU.
        self.lengths: list[int] = []
        self.uses_graphs = device.type == "cuda"
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.uses_graphs else None

    # ------------------------------------------------------------------------------------ rows come and go

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Rows for these prompts behind those that are there: [len(prompts), V], the logits of their first tokens.

        Equal prompts are computed once. Raises ValueError: there are not so many free slots.
        """
        first, end = len(self.lengths), len(self.lengths) + len(prompts)
        if end > self.most_rows:
            raise ValueError(f"{end} rows, and there is room for {self.most_rows}")
        # What a row before left behind is read with weight 0, and 0 * nan would be nan.
        for pool in (*self.keys, *self.values):
            pool[first:end] = 0.0
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows_of.setdefault(tuple(prompt), []).append(row)
        different, copies = list(rows_of), list(rows_of.values())
        with self._autocast():
            last, done = [], 0
            for count in shares([len(prompt) for prompt in different], READ_TOKENS):
                chosen = slice(done, done + count)
                slots = [[first + row for row in rows] for rows in copies[chosen]]
                last.append(self._read_prompts(different[chosen], slots))
                done += count
            logits = self.network.head(self.network.norm(torch.cat(last))).float()
        lengths = [len(prompt) for prompt in prompts]
        self.positions[first:end] = send(torch.tensor(lengths), self.device)
        self.lengths += lengths
        number = torch.empty(len(prompts), dtype=torch.int64)
        for i, rows in enumerate(copies):
            number[rows] = i
        return logits[send(number, self.device)]

    def _read_prompts(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        """[prompts, hidden]: at the last token of each, before the last norm; their keys and values are written.

        slots: of each prompt, one for every row that begins with it.
        """
        batch = pack(prompts, self.device)
        starts = itertools.accumulate(batch.lengths[:-1], initial=0)
        parts = zip(slots, starts, batch.lengths, strict=True)
        # Each copy of a prompt: its slot, where the prompt begins in the batch, and its tokens. Then each token of it.
        each = torch.tensor([(slot, start, length) for rows, start, length in parts for slot in rows])
        slot, start, length = each.T
        place = torch.arange(int(length.sum())) - (length.cumsum(0) - length).repeat_interleave(length)
        where = torch.stack([slot.repeat_interleave(length), place, start.repeat_interleave(length) + place])
        row, place, token = send(where, self.device)
        attention = row_attention if self.device.type == "cuda" else packed_attention

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.keys[number][row, :, place] = key[token]
            self.values[number][row, :, place] = value[token]
            q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
            scaling = self.network.layers[number].scaling
            return attention(self.model, q, k, v, None, scaling=scaling, packed=batch)[0][0].flatten(1)

        return self._forward(batch.ids, batch.position_ids, attend)[batch.last]

    def keep(self, rows: Tensor) -> None:
        """Only these rows stay, in this order, and move to the front."""
        count = len(rows)
        for pool in (*self.keys, *self.values):
            pool[:count] = pool[rows]
        self.positions[:count] = self.positions[rows]
        self.lengths = [self.lengths[row] for row in rows.tolist()]

    # ---------------------------------------------------------------------------------------------- one token

    def step(self, ids: Tensor) -> Tensor:
        """One more token [B] of each row: [B, V] float32, the logits of the next, which the next call overwrites.

        The host waits for nothing here. A row that is as long as `longest` can go on, for nothing.
        """
        count = len(ids)
        self.lengths = [min(length + 1, self.longest) for length in self.lengths]
        self.ids[:count] = ids
        num_rows = min(1 << (count - 1).bit_length(), self.most_rows)
        num_keys = -(-max(self.lengths) // BUCKET) * BUCKET
        if self.uses_graphs:
            if (num_rows, num_keys) not in self.graphs:
                self.graphs[num_rows, num_keys] = self._record(num_rows, num_keys)
            self.graphs[num_rows, num_keys].replay()
        else:
            self._step(num_rows, num_keys)
        self.positions.add_(1).clamp_max_(self.longest - 1)
        return self.logits[:count]

    def _record(self, num_rows: int, num_keys: int) -> torch.cuda.CUDAGraph:
        """A step of this shape as a graph, after the example of torch.cuda.make_graphed_callables.

        The steps before write what the replay will write again. All graphs share one pool of memory: one runs at a
        time, and what has to outlive it lies outside. Other threads may go on to ask for pinned memory.
        """
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(WARM_UP):
                self._step(num_rows, num_keys)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(num_rows, num_keys)
        return graph

    def _step(self, num_rows: int, num_keys: int) -> None:
        """ids [num_rows] at their positions to logits [num_rows, V]; it reads num_keys places of each slot.

        The query heads of one key head are so many queries to it: SDPA then copies no keys, whatever it is made of.
        """
        row, positions = self._row_numbers[:num_rows], self.positions[:num_rows]
        unseen = (self._places[:num_keys] > positions[:, None])[:, None, None]
        mask = torch.zeros(unseen.shape, dtype=self.dtype, device=self.device).masked_fill_(unseen, -torch.inf)

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.keys[number], self.values[number]
            keys[row, :, positions] = key
            values[row, :, positions] = value
            mixed = F.scaled_dot_product_attention(
                query.unflatten(1, (key.shape[1], -1)),
                keys[:num_rows, :, :num_keys],
                values[:num_rows, :, :num_keys],
                mask,
                scale=self.network.layers[number].scaling,
            )
            return mixed.reshape(num_rows, -1)

        with self._autocast(), sdpa_kernel(ATTENTION):
            hidden = self._forward(self.ids[:num_rows], positions, attend)
            self.logits[:num_rows] = self.network.head(self.network.norm(hidden))

    def _forward(
        self, ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """[N] ids -> [N, hidden] before the last norm; `attend` takes a layer's number, queries, keys and values."""
        network = self.network
        heads, kv_heads = network.heads, network.kv_heads
        rotation = None if network.rotation is None else network.rotation[positions][:, None]
        x = network.embed(ids, positions)
        for number, layer in enumerate(network.layers):
            qkv = layer.qkv(layer.norm_1(x)).view(len(x), -1, network.head_dim)
            qk, value = qkv.split([heads + kv_heads, kv_heads], dim=1)
            if layer.norm_query is not None and layer.norm_key is not None:
                qk = torch.cat([layer.norm_query(qk[:, :heads]), layer.norm_key(qk[:, heads:])], dim=1)
            if rotation is not None:
                qk = rotated(qk.float(), rotation)
            query, key = qk.to(self.dtype).split([heads, kv_heads], dim=1)
            x = x + layer.out(attend(number, query, key, value))
            x = x + layer.feed(layer.norm_2(x))
        return x

    def _autocast(self) -> torch.autocast:
        """What a layer that is called as it is runs under; a copy that autocast kept would be read by no graph."""
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


# ---------------------------------------------------------------------------------------- reading a model


def _linear_in(dtype: torch.dtype) -> Callable[..., Map]:
    """How linear layers are computed: from copies in dtype, or in float32 as they are."""

    def linear(*modules: Any) -> Map:
        if dtype == torch.float32 or not are_linear(modules):
            if len(modules) == 1:
                only: Map = modules[0]
                return only
            return lambda x: torch.cat([module(x) for module in modules], dim=-1)
        weight, bias = joined(modules)
        weight, bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
        return lambda x: F.linear(x.to(dtype), weight, bias)

    return linear


def _rms_norm(module: Any) -> Map:
    """``x / sqrt(mean(x^2) + eps) * weight`` in float32, in one operation on a GPU."""
    weight, eps = module.weight, module.variance_epsilon
    return lambda x: F.rms_norm(x.float(), weight.shape, weight, eps)


def _rows_that_fit(row_bytes: int, rows: int, device: torch.device) -> int:
    """`rows`, or as many as a GPU has room for. Fewer rows at a time change no response but for its rounding."""
    if device.type != "cuda":
        return rows
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    fitting = min(rows, int(MEMORY_SHARE * free / row_bytes))
    if fitting == 0:
        raise NotFastError(
            f"keys, values and logits of a row take {row_bytes / 1e9:.1f} GB, more than the GPU has free"
        )
    return fitting


# ------------------------------------------------------------------------------------------ is it the model?

_WHY_NOT: weakref.WeakKeyDictionary[PreTrainedModel, tuple[list[type], torch.dtype, str]] = weakref.WeakKeyDictionary()
"""Of each model that was checked, the classes of its modules then, the precision, and what `_why_not` found."""


@torch.no_grad()
def static_decoder(model: PreTrainedModel, longest: int, rows: int) -> StaticDecoder:
    """A decoder for rows of at most `longest` tokens, `rows` at a time, in the precision of the autocast around it.

    Like `fast_decoder`, for a GPU: it is checked at the first use. Raises NotFastError, with the reason.
    """
    weight = next(model.parameters())
    device = weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    if weight.dtype != torch.float32 or dtype not in (torch.float32, torch.bfloat16):
        raise NotFastError("the fast sampler takes weights in float32, by themselves or under bfloat16 autocast")
    classes = [type(module) for module in model.modules()]
    try:
        if model not in _WHY_NOT or _WHY_NOT[model][:2] != (classes, dtype):
            _WHY_NOT[model] = classes, dtype, _why_not(model, dtype)
        if _WHY_NOT[model][2]:
            raise NotFastError(_WHY_NOT[model][2])
        return StaticDecoder(model, longest, rows, dtype)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise NotFastError(f"its modules are not those that the fast sampler knows ({type(error).__name__})") from error


def _why_not(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """What is wrong with this decoder's logits, "" if nothing is.

    In float32 they are those of the model's own forward to 1e-4. In bfloat16 two right ways of computing differ by as
    much as either differs from float32, which depends on the model; so they may be twice as far from the float32
    logits as those of the model's own forward in bfloat16 are.
    """
    with torch.autocast(next(model.parameters()).device.type, enabled=False):
        found, exact = compared(model, lambda longest: StaticDecoder(model, longest, 2, torch.float32))
    gap = difference(found, exact)
    if not gap <= TOLERANCE:
        return f"the fast sampler differs from a plain forward by {gap:.1e}"
    if dtype == torch.float32:
        return ""
    found, plain = compared(model, lambda longest: StaticDecoder(model, longest, 2, dtype))
    gap, rounding = difference(found, exact), difference(plain, exact)
    if not gap <= 2 * rounding + TOLERANCE:
        return f"in bfloat16 the fast sampler is {gap:.1e} from float32, and a plain forward {rounding:.1e}"
    return ""
