"""The static decoder: fast sampling on a GPU with tensors of fixed shapes and one CUDA graph per shape.

A step of one token per row is some hundreds of small operations, and a GPU can finish each before Python has launched
the next one. So a step is recorded as a CUDA graph and replayed, which is a single launch. A graph reads and writes the
same memory each time. So there is a slot for each row, with room for the keys and values of the longest text. Token t
of a row is at place t of its slot: there is no padding on the left, and each row has its own length. The inputs and
outputs of a step are buffers.

Shapes come in steps, and each shape has its own graph. The number of rows is a power of two. Keys are read up to a
multiple of BUCKET tokens, so that the first steps do not read empty memory. When half of the rows have ended, the
others move to the front. Rows between the live ones and the power of two are computed and ignored.

Under bfloat16 autocast the weights of linear layers are copied to bfloat16 once per rollout, those with the same input
side by side. A step reads all of them, and in bfloat16 that is half the bytes. The residual stream, norms and rotations
stay float32, as they do in a forward pass under autocast, and softmax is float32 inside the attention. In float32 each
weight is read in place. A layer of another class (an adapter) is called as it is.

A decoder lives for one rollout. Keeping graphs and copies for the next rollout would hold their memory during training,
and a graph does not see what Python switches (adapters on or off). Building them again costs one copy of the weights
and a few steps per graph.

On a CPU the same step runs without a graph; the tests run that. Nothing in this file has been run on a GPU yet, so it
is used only if you set ``rollout.decoder: static``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from rlhf_cli.decoders.base import (
    Checked,
    UnsupportedError,
    batch_sizes,
    compare_with_forward,
    difference,
    distinct_prompts,
    prompt_of_row,
)
from rlhf_cli.decoders.network import Map, are_linear, joined, read_network, side_by_side
from rlhf_cli.kernels.attention import packed_attention, row_attention
from rlhf_cli.models.forward import TOLERANCE, vocabulary_rows
from rlhf_cli.packing import pack, send

BUCKET = 128
"""Keys are read up to a multiple of this many tokens."""
READ_TOKENS = 8192
"""Maximum prompt tokens per forward pass. It bounds the memory of intermediate tensors."""
WARM_UP = 3
"""Steps before a graph is recorded, as in torch.cuda.make_graphed_callables. What a library sets up at the first use of
a shape must not become part of the graph."""
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Backends for the attention of a step. cuDNN's would build a plan for each new shape. Flash attention accepts a mask
only on a CPU."""
MEMORY_SHARE = 0.8
"""Share of the free memory for keys, values and logits of the rows."""

_checked = Checked()


@torch.no_grad()
def static_decoder(model: PreTrainedModel, longest: int, rows: int) -> StaticDecoder:
    """A decoder for `rows` rows of at most `longest` tokens, in the precision of the surrounding autocast.

    It is compared with the model's own forward at the first use of a model, and again after modules of the model have
    been replaced. Raises UnsupportedError with the reason if the decoder does not support the model.
    """
    weight = next(model.parameters())
    device = weight.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    if weight.dtype != torch.float32 or dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedError("the static decoder needs weights in float32, with or without bfloat16 autocast")
    try:
        if reason := _checked.reason(model, dtype, lambda: _why_not(model, dtype)):
            raise UnsupportedError(reason)
        return StaticDecoder(model, longest, rows, dtype)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(f"its modules are not the ones this decoder expects ({type(error).__name__})") from error


def _why_not(model: PreTrainedModel, dtype: torch.dtype) -> str:
    """Why this decoder's logits are wrong, "" if they are right.

    In float32 they must equal those of the model's own forward to 1e-4. In bfloat16, two correct ways of computing
    differ from each other by as much as each differs from float32, and how much depends on the model. So the decoder's
    bfloat16 logits may be twice as far from the float32 logits as those of the model's own bfloat16 forward.
    """
    with torch.autocast(next(model.parameters()).device.type, enabled=False):
        logits, exact = compare_with_forward(model, lambda longest: StaticDecoder(model, longest, 2, torch.float32))
    gap = difference(logits, exact)
    if not gap <= TOLERANCE:
        return f"the static decoder differs from a plain forward by {gap:.1e}"
    if dtype == torch.float32:
        return ""
    logits, plain = compare_with_forward(model, lambda longest: StaticDecoder(model, longest, 2, dtype))
    gap, rounding = difference(logits, exact), difference(plain, exact)
    if not gap <= 2 * rounding + TOLERANCE:
        return f"in bfloat16 the static decoder is {gap:.1e} from float32, and a plain forward {rounding:.1e}"
    return ""


class StaticDecoder:
    """Next-token logits of live rows, from keys and values in fixed slots. See `Decoder` for its methods."""

    leaves_below = 0.5
    """Leaving costs a copy of keys and values, and only the next smaller power of two is less work."""
    admits_beside_others = True
    lag = 1
    """The host reads how many rows have ended after it has launched the next step, so the GPU never waits for it."""

    def __init__(self, model: PreTrainedModel, longest: int, rows: int, dtype: torch.dtype):
        """For at most `rows` live rows, or as many as fit into memory, of at most `longest` tokens each.

        dtype: float32, or bfloat16 for a model that runs under autocast. A row needs
        ``2 * layers * kv_heads * head_dim * longest * bytes per number``, plus its logits. Raises UnsupportedError.
        """
        self.model, self.longest, self.dtype = model, longest, dtype
        self.device = device = next(model.parameters()).device
        with self._autocast():
            self.network = network = read_network(model, longest, _linear_in(dtype), _rms_norm)
        places = -(-longest // BUCKET) * BUCKET
        numbers = 2 * len(network.layers) * network.kv_heads * network.head_dim * places
        # 16 bytes: the logits as they are kept, as the head returns them, and two more while a token is drawn.
        self.most_rows = _rows_that_fit(numbers * dtype.itemsize + 16 * vocabulary_rows(model), rows, device)
        shape = (self.most_rows, network.kv_heads, places, network.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in network.layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in network.layers]
        # Inputs and outputs of a step. `positions` are those of each row's next token.
        self.ids = torch.zeros(self.most_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.logits = torch.zeros(self.most_rows, vocabulary_rows(model), device=device)
        self._row_numbers = torch.arange(self.most_rows, device=device)
        self._places = torch.arange(places, device=device)
        # Tokens of each live row, on the host: it chooses a graph without waiting for the GPU.
        self.lengths: list[int] = []
        self.uses_graphs = device.type == "cuda"
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.uses_graphs else None

    # ------------------------------------------------------------------------------------ rows enter and leave

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Add a row for each prompt; return the logits [prompts, V]. Equal prompts are computed once.

        Raises ValueError if there are fewer free slots than prompts.
        """
        first, end = len(self.lengths), len(self.lengths) + len(prompts)
        if end > self.most_rows:
            raise ValueError(f"{end} rows, and there is room for {self.most_rows}")
        # Places that are not written yet are read with weight 0, and 0 * NaN would be NaN.
        for pool in (*self.keys, *self.values):
            pool[first:end] = 0.0
        distinct, rows = distinct_prompts(prompts)
        with self._autocast():
            hidden, done = [], 0
            for count in batch_sizes([len(prompt) for prompt in distinct], READ_TOKENS):
                batch = slice(done, done + count)
                slots = [[first + row for row in its_rows] for its_rows in rows[batch]]
                hidden.append(self._read_prompts(distinct[batch], slots))
                done += count
            logits = self.network.logits(torch.cat(hidden)).float()
        lengths = [len(prompt) for prompt in prompts]
        self.positions[first:end] = send(torch.tensor(lengths), self.device)
        self.lengths += lengths
        return logits[send(prompt_of_row(rows), self.device)]

    def _read_prompts(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states at the last token of each prompt [prompts, hidden]. Keys and values are written.

        slots: for each prompt, the slots of the rows that begin with it.
        """
        batch = pack(prompts, self.device)
        starts = itertools.accumulate(batch.lengths[:-1], initial=0)
        copies = zip(slots, starts, batch.lengths, strict=True)
        # For each copy of a prompt: its slot, where the prompt starts in the batch, and its length. Then, for each
        # token of each copy: its slot, its place in the slot, and its index in the batch.
        slot, start, length = torch.tensor([(slot, start, n) for rows, start, n in copies for slot in rows]).T
        place = torch.arange(int(length.sum())) - (length.cumsum(0) - length).repeat_interleave(length)
        where = torch.stack([slot.repeat_interleave(length), place, start.repeat_interleave(length) + place])
        row, place, token = send(where, self.device)
        attention = row_attention if self.device.type == "cuda" else packed_attention

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            self.keys[number][row, :, place] = key[token]
            self.values[number][row, :, place] = value[token]
            q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, heads, N, D]
            return attention(self.model, q, k, v, None, scaling=scaling, packed=batch)[0][0].flatten(1)

        return self.network.forward(batch.ids, batch.position_ids, attend, self.dtype)[batch.last]

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order, and move them to the front."""
        count = len(rows)
        for pool in (*self.keys, *self.values):
            pool[:count] = pool[rows]
        self.positions[:count] = self.positions[rows]
        self.lengths = [self.lengths[row] for row in rows.tolist()]

    # ---------------------------------------------------------------------------------------------- one token

    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each row, ids [B]; return the logits of the next tokens [B, V] float32.

        The next call overwrites the result. The host does not wait for the device. A row of `longest` tokens may be
        stepped further; its logits are then meaningless.
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
        """A step of this shape as a graph, following torch.cuda.make_graphed_callables.

        The warm-up steps write what the replay will write again. All graphs share one memory pool: one runs at a time,
        and everything that outlives it is outside the pool. Other threads may allocate pinned memory meanwhile.
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
        """Compute ids [num_rows] at their positions to logits [num_rows, V], reading num_keys places of each slot.

        The query heads that share a key head are passed as several queries to it, so SDPA copies no keys, whichever
        backend it uses.
        """
        row, positions = self._row_numbers[:num_rows], self.positions[:num_rows]
        future_mask = (self._places[:num_keys] > positions[:, None])[:, None, None]  # [num_rows, 1, 1, num_keys]
        bias = torch.zeros(future_mask.shape, dtype=self.dtype, device=self.device).masked_fill_(
            future_mask, -torch.inf
        )

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            keys, values = self.keys[number], self.values[number]
            keys[row, :, positions] = key
            values[row, :, positions] = value
            mixed = F.scaled_dot_product_attention(
                query.unflatten(1, (key.shape[1], -1)),  # [num_rows, kv_heads, heads / kv_heads, D]
                keys[:num_rows, :, :num_keys],
                values[:num_rows, :, :num_keys],
                bias,
                scale=scaling,
            )
            return mixed.reshape(num_rows, -1)

        with self._autocast(), sdpa_kernel(ATTENTION):
            hidden = self.network.forward(self.ids[:num_rows], positions, attend, self.dtype)
            self.logits[:num_rows] = self.network.logits(hidden)

    def _autocast(self) -> torch.autocast:
        """The context for layers that are called as they are. A graph could not read copies that autocast caches."""
        enabled = self.dtype != torch.float32
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


# ---------------------------------------------------------------------------------------- linear layers and norms


def _linear_in(dtype: torch.dtype) -> Callable[..., Map]:
    """How linear layers are computed: in float32 as they are, or from copies in `dtype`."""

    def linear(*modules: Any) -> Map:
        if dtype == torch.float32 or not are_linear(modules):
            return side_by_side(modules)
        weight, bias = joined(modules)
        weight, bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
        return lambda x: F.linear(x.to(dtype), weight, bias)

    return linear


def _rms_norm(module: Any) -> Map:
    """``x / sqrt(mean(x^2) + eps) * weight`` in float32, which is one operation on a GPU."""
    weight, eps = module.weight, module.variance_epsilon
    return lambda x: F.rms_norm(x.float(), weight.shape, weight, eps)


def _rows_that_fit(row_bytes: int, rows: int, device: torch.device) -> int:
    """`rows`, or fewer if the GPU has room for fewer. The number of live rows changes responses by rounding only."""
    if device.type != "cuda":
        return rows
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    fitting = min(rows, int(MEMORY_SHARE * free / row_bytes))
    if fitting == 0:
        raise UnsupportedError(
            f"keys, values and logits of one row take {row_bytes / 1e9:.1f} GB, more than the GPU has free"
        )
    return fitting
