"""The paged decoder: fast sampling from Llama-like models and GPT-2 on a CPU, in float32 or bfloat16.

transformers' forward of one token per row spends most of its time between operations. Here a layer is about fifteen
operations, each different prompt is read once, and attention reads only the tokens that exist (paged_cache.py).

For every rollout the linear layers are copied: those with the same input lie side by side, in the order that oneDNN
reads. That takes one or two steps, and makes each step of a model with hidden size 512 a quarter shorter. A layer of
another class, such as an adapter, is called as it is. In bfloat16 only the linear layers compute in that format.

The decoder is compared with the model's own forward at its first use. If they differ, and for any other family,
plain.py samples.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_cli.decoders.decoder import (
    Decoder,
    UnsupportedError,
    cast_format,
    exact_gap,
    gap_to_forward,
    once_per_model,
    recorded,
)
from rlhf_cli.decoders.network import NetworkWeights, read_network
from rlhf_cli.decoders.paged_cache import PAGE, PagedCache, Places, attend
from rlhf_cli.models.forward import BFLOAT16_TOLERANCE, positions, tolerance_of, vocabulary_rows
from rlhf_cli.packing import pack
from rlhf_cli.processes.threads import is_out_of_memory, num_threads

FEWEST_ROWS = 16
"""Rows of a step when rows are decoded in threads. Products of fewer rows may have other last digits."""
GROUP_NUMBERS = 8192
"""Fewest rows that a thread decodes, times the width of the model, if the step is not recorded."""
READ_TOKENS = 1024
"""Maximum prompt tokens per forward pass, whose tensors stay in the processor's cache: a quarter less time."""


@torch.no_grad()
def paged_decoder(model: PreTrainedModel, longest: int) -> PagedDecoder:
    """A decoder for rows of at most `longest` tokens. Raises UnsupportedError with the reason."""
    try:
        # Before the decoder exists: each has a copy of the weights.
        if reason := _why_not(model):
            raise UnsupportedError(reason)
        return PagedDecoder(model, longest, _recorded_step(model))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedError(f"its modules are not the ones this decoder expects ({type(error).__name__})") from error


@once_per_model
def _why_not(model: PreTrainedModel) -> str:
    """Why the decoder cannot be used, "" if it can: it is compared in float32, and then as it will be used.

    One of the texts crosses the end of a page.
    """
    new, lengths = functools.partial(PagedDecoder, model), (PAGE - 1, 5, 5)
    gap, tolerance = exact_gap(model, new, lengths=lengths), tolerance_of(model)
    if gap <= tolerance and cast_format(model) is not None:
        gap, tolerance = gap_to_forward(model, new, lengths=lengths), 2 * BFLOAT16_TOLERANCE  # both sides round
    return "" if gap <= tolerance else f"the paged decoder differs from a plain forward by {gap:.1e}"


@once_per_model
@torch.no_grad()
def _recorded_step(model: PreTrainedModel) -> Callable[..., Tensor] | None:
    """A step for any weights, rows and texts of this model, without Python; None if it cannot be recorded."""
    longest = min(PAGE + 3, positions(model))
    decoder = PagedDecoder(model, longest)
    weights = decoder.network.weights

    def step(given: list[Tensor], ids: Tensor, positions: Tensor, places: Sequence[Tensor], *pools: Any) -> Tensor:
        with weights.replaced(given):
            return decoder._next_logits(ids, positions, Places(*places), *pools)

    def example(rows: int, length: int) -> tuple[Any, ...]:
        cache = decoder.cache = decoder._new_cache()
        decoder.admit([[1 + row % 3] * length for row in range(rows)])
        positions, places = cache.add_token()
        ids = torch.arange(rows) % 3
        return list(weights), ids, positions, tuple(places), cache.keys, cache.values

    if not weights.are_all:
        return None
    return recorded(step, example(FEWEST_ROWS, 3), example(2 * FEWEST_ROWS - 3, longest - 1))


@once_per_model
@torch.no_grad()
def _rows_are_independent(model: PreTrainedModel) -> bool:
    """Whether a row's logits are the same bytes whatever other rows are decoded with it. No library promises that.

    The prompts together have nearly READ_TOKENS tokens.
    """
    sizes = (FEWEST_ROWS, FEWEST_ROWS + 4, 220)
    vocabulary, longest = vocabulary_rows(model), min(PAGE + 3, positions(model))
    lengths = [longest - 3, *(1 + row % 6 for row in range(1, sum(sizes)))]
    prompts = [[(7 * row + i) % vocabulary for i in range(length)] for row, length in enumerate(lengths)]
    decoder = PagedDecoder(model, longest)

    def logits(rows: Sequence[Sequence[int]]) -> Tensor:  # of three tokens: [rows, 3 * V]
        one = decoder.another()
        steps = [one.admit(rows)]
        for _ in range(2):
            steps.append(one.step(steps[-1].argmax(1)))
        return torch.cat(steps, 1)

    starts = list(itertools.accumulate(sizes, initial=0))
    parts = [logits(prompts[first:last]) for first, last in itertools.pairwise(starts)]
    return torch.equal(logits(prompts), torch.cat(parts))


class PagedDecoder(Decoder):
    """Next-token logits of live rows, from keys and values in pages."""

    admits_beside_others = True

    def __init__(self, model: PreTrainedModel, longest: int, step: Callable[..., Tensor] | None = None):
        """`longest` is the maximum length of a row in tokens, `step` a recorded one. Raises UnsupportedError."""
        weight, self._half = next(model.parameters()), cast_format(model)
        if weight.device.type != "cpu" or self._half not in (None, torch.bfloat16):
            raise UnsupportedError("the paged decoder needs float32 or bfloat16 on a CPU")
        if self._half is None and weight.dtype != torch.float32:
            raise UnsupportedError("its weights are not in float32")
        self._model = model
        self.network = read_network(model, longest, NetworkWeights(self._half))
        self.cache = self._new_cache()
        self._recorded = step

    def _new_cache(self) -> PagedCache:
        network = self.network
        return PagedCache(len(network.layers), network.heads, network.kv_heads, network.head_dim)

    def apart(self, rows: int) -> Sequence[Callable[[], Decoder]]:
        if rows < 2 * FEWEST_ROWS:
            return super().apart(rows)
        width = self.network.heads * self.network.head_dim
        fewest = FEWEST_ROWS if self._recorded else max(FEWEST_ROWS, GROUP_NUMBERS // width)
        count = min(num_threads(), rows // fewest)
        return [self.another] * (count if count > 1 and _rows_are_independent(self._model) else 1)

    def another(self) -> PagedDecoder:
        """A decoder with the same weights and no rows, whose steps compute FEWEST_ROWS at least."""
        other = copy.copy(self)
        other.cache = self._new_cache()
        other.cache.fewest_rows = FEWEST_ROWS
        return other

    def _autocast(self) -> torch.autocast:
        """The caller's autocast, which a thread does not have."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self._half is not None)

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        rows: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows.setdefault(tuple(prompt), []).append(row)
        distinct = list(rows)  # equal prompts are computed once
        slots = self.cache.open_rows(distinct, list(rows.values()))
        hidden, first = [], 0
        with self._autocast():
            while first < len(distinct):  # as many prompts as have READ_TOKENS tokens, at least one
                last, tokens = first + 1, len(distinct[first])
                while last < len(distinct) and tokens + len(distinct[last]) <= READ_TOKENS:
                    tokens += len(distinct[last])
                    last += 1
                hidden.append(self._read_prompts(distinct[first:last], slots[first:last]))
                first = last
            logits = self.network.logits(self._round_up_rows(torch.cat(hidden)))
        number = {prompt: number for number, prompt in enumerate(distinct)}
        return logits[[number[tuple(prompt)] for prompt in prompts]]

    def _read_prompts(self, prompts: Sequence[Sequence[int]], slots: Sequence[Tensor]) -> Tensor:
        """Hidden states at the last token of each prompt [prompts, hidden]. Keys and values go to the cache."""
        batch = pack(prompts)
        starts = itertools.accumulate(batch.lengths[:-1], initial=0)
        # `slots` numbers the tokens of each prompt, and `where` those of the batch.
        where = torch.cat(
            [slot + torch.tensor([[start], [0], [0]]) for slot, start in zip(slots, starts, strict=True)], dim=1
        )

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            self.cache.write_prompts(number, key, value, where)
            return causal_attention(query, key, value, batch.lengths, scaling)

        ids, position_ids = self._round_up_rows(batch.ids), self._round_up_rows(batch.position_ids)
        return self.network.forward(ids, position_ids, attend)[batch.last]

    def step(self, ids: Tensor) -> Tensor:
        cache = self.cache
        positions, places = cache.add_token()
        with self._autocast():
            if self._recorded is None:
                return self._next_logits(ids, positions, places, cache.keys, cache.values)
            weights = list(self.network.weights)
            return self._recorded(weights, ids, positions, tuple(places), cache.keys, cache.values)

    def _next_logits(
        self, ids: Tensor, positions: Tensor, places: Places, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """ids [B], positions [N] -> [B, V]. Writes keys and values to the pools of the layers."""
        now, bias = places.at(positions), places.bias(positions)
        rounded = torch.zeros_like(positions)
        rounded[: ids.shape[0]] = ids

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            return attend(now, bias, keys[layer], values[layer], query, key, value, scaling)

        return self.network.logits(self.network.forward(rounded, positions, attention))[: ids.shape[0]]

    def leave(self, rows: int, unfinished: int) -> bool:
        # To leave costs a new layout. It saves time if the next steps have fewer rows, or much less attention.
        rounded_up = self.cache.rounded_up
        return super().leave(rows, unfinished) or rounded_up(unfinished) < rounded_up(rows)

    def keep(self, rows: Tensor) -> None:
        self.cache.keep(rows.tolist())

    def _round_up_rows(self, x: Tensor) -> Tensor:
        """x with rows of zeros appended, so that their number is one of a few (`PagedCache.rounded_up`)."""
        missing = self.cache.rounded_up(len(x)) - len(x)
        return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def causal_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float) -> Tensor:
    """Attention of sequences that lie end to end: query [N, heads, D], key, value [N, kv_heads, D] -> [N, heads * D].

    N may be larger than the sum of the lengths; the result for the surplus rows is 0.
    """
    count = sum(lengths)
    with torch.autocast("cpu", enabled=False):
        outputs = [
            F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                is_causal=True,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )[0].transpose(0, 1)  # [length, heads, D]
            for q, k, v in zip(*(x[:count].split(lengths) for x in (query, key, value)), strict=True)
        ]
    return torch.cat([*outputs, query.new_zeros(len(query) - count, *query.shape[1:])]).flatten(1)
