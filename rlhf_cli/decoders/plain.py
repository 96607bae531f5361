"""The plain decoder: sampling from any decoder of transformers, through its own forward and its DynamicCache.

Prompts of different lengths are padded on the left. Not every family supports that: BART's decoder has no position ids,
so it counts the padding; RWKV takes neither a mask nor a cache of transformers. `supported_layout` finds out what a
model supports at its first use, by comparing it with one forward pass per sequence.

From a model that is sharded among the processes all sample together, each its own rows. A process announces each pass;
one whose rows have ended, or that has none, makes passes over two tokens until all have ended (`join_sampling`).
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf_cli.decoders.decoder import Decoder, gap_to_forward, once_per_model
from rlhf_cli.errors import ArtifactError
from rlhf_cli.kernels.layers import cache_name
from rlhf_cli.models.forward import BFLOAT16_TOLERANCE, TOLERANCE, autocast, held_precision
from rlhf_cli.processes.sharding import announce, device_of

LEAVES_BELOW = 0.75
"""Finished rows leave once at most this share of the rows is unfinished."""
Layout = Literal["padded", "equal", "whole"]
PADDED: Layout = "padded"
"""All rows in one forward pass, padded on the left."""
EQUAL: Layout = "equal"
"""One forward pass for the rows whose prompts have the same length."""
WHOLE: Layout = "whole"
"""As EQUAL, without a cache: each token costs a forward pass over the whole text."""
SLOWER = {
    EQUAL: "padding on the left changes its logits, so prompts of one length are sampled at a time",
    WHOLE: "padding and caching change its logits, so the whole text is read again for every token",
}


class PlainDecoder:
    """Next-token logits of live rows, from the model's own forward. See `Decoder` for its methods."""

    admits_beside_others = False
    """The model cannot read a prompt while other rows continue, so new rows enter once all have ended."""

    def __init__(self, model: PreTrainedModel, layout: Layout | None = None):
        """layout: None takes the fastest one that gives the model's own logits."""
        self.model = model
        self.layout = layout or supported_layout(model)
        self.groups: list[Group] = []

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Add a row for each prompt when there are no live rows; return the logits [prompts, V]."""
        by_length: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            by_length.setdefault(0 if self.layout == PADDED else len(prompt), []).append(row)
        self.groups = [
            Group(self.model, rows, [prompts[row] for row in rows], cached=self.layout != WHOLE)
            for rows in by_length.values()
        ]
        return self._in_row_order([group.forward(group.ids) for group in self.groups])

    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each row, ids [B]; return the logits of the next tokens [B, V]."""
        if len(self.groups) == 1:
            return self.groups[0].step(ids)
        return self._in_row_order([group.step(ids[group.rows]) for group in self.groups])

    def apart(self, rows: int) -> list[Decoder]:  # noqa: ARG002
        return [self]

    def leave(self, rows: int, unfinished: int) -> bool:
        """Leaving costs a copy of the cache; staying costs a wasted row in every step."""
        return unfinished <= LEAVES_BELOW * rows

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        staying = rows.tolist()
        for group in self.groups:
            group.keep(staying)
        self.groups = [group for group in self.groups if group.rows]

    def _in_row_order(self, logits: list[Tensor]) -> Tensor:
        """The logits of all groups in the order of the rows: [b, V] each -> [B, V]."""
        if len(logits) == 1:
            return logits[0]
        rows = torch.tensor([row for group in self.groups for row in group.rows], device=logits[0].device)
        return torch.cat(logits)[rows.argsort()]


class Group:
    """Rows that share a forward pass, padded on the left to the longest of their prompts."""

    def __init__(self, model: PreTrainedModel, rows: list[int], prompts: Sequence[Sequence[int]], *, cached: bool):
        """rows: their indices among the decoder's rows. cached: if False, each step computes the whole text."""
        self.model, self.rows = model, rows
        device = device_of(model)
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        real_mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            real_mask[row, width - len(prompt) :] = 1
        self.ids, self.real_mask = ids.to(device), real_mask.to(device)  # [b, width]
        # Padding has no position of its own: the first real token has position 0.
        self.position_ids = (self.real_mask.cumsum(1) - 1).clamp_min(0)
        self.cache = DynamicCache(config=model.config) if cached else None
        self.cache_name = cache_name(model)
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.is_mamba = getattr(model, "_is_stateful", False) and not takes_positions

    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each row, ids [b]; return the logits of the next tokens [b, V]."""
        if self.cache is None:
            self.ids = torch.cat([self.ids, ids[:, None]], dim=1)
            return self.forward(self.ids)
        self.real_mask = torch.cat([self.real_mask, self.real_mask.new_ones(len(ids), 1)], dim=1)
        self.position_ids = self.position_ids[:, -1:] + 1
        return self.forward(ids[:, None])

    def forward(self, ids: Tensor) -> Tensor:
        """The logits after the last of these tokens: [b, n] -> [b, V]."""
        announce(self.model)
        if self.cache is None:
            output = self.model(input_ids=ids, use_cache=False, logits_to_keep=1)
        else:
            if self.is_mamba:  # its mask covers only the tokens of this call
                places = {"attention_mask": self.real_mask if ids.shape == self.real_mask.shape else None}
            else:
                places = {"attention_mask": self.real_mask, "position_ids": self.position_ids}
            cache = {self.cache_name: self.cache}
            output = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **places, **cache)
        logits: Tensor = output.logits[:, -1]
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Keep those of the group's rows that are among these rows of the decoder."""
        index_of = {row: index for index, row in enumerate(self.rows)}
        staying = [index_of[row] for row in rows if row in index_of]
        chosen = torch.tensor(staying, dtype=torch.int64, device=self.real_mask.device)
        self.rows = [new_row for new_row, row in enumerate(rows) if row in index_of]
        if self.cache is not None and self.rows:
            # Not batch_select_indices: the state of a recurrent layer does not have it.
            self.cache.reorder_cache(cast(torch.LongTensor, chosen))
        self.ids, self.position_ids = self.ids[chosen], self.position_ids[chosen]
        self.real_mask = self.real_mask[chosen]


# ------------------------------------------------------------------------------- is it the model's own forward?


def why_not_padded(model: PreTrainedModel) -> str | None:
    """A line for the user that says why rows of different lengths cannot share a forward pass; None if they can.

    Raises ArtifactError as `supported_layout` does.
    """
    layout = supported_layout(model)
    return None if layout == PADDED else f"{type(model).__name__}: {SLOWER[layout]} (slower, as exact)"


@torch.no_grad()
@once_per_model
def supported_layout(model: PreTrainedModel) -> Layout:
    """The fastest layout whose logits equal those of one forward pass per sequence, to 1e-4 of their size.

    A model is checked once, in float32: how it treats padding and a cache does not depend on the precision. A model
    whose weights are held in 16 bits is checked in those, to 3e-2. Raises ArtifactError if no layout passes.
    """
    gaps = []
    for layout in (PADDED, EQUAL, WHOLE):
        gaps.append(_gap(model, layout))
        if gaps[-1] <= (TOLERANCE if held_precision(model) is None else BFLOAT16_TOLERANCE):
            return layout
    raise ArtifactError(
        f"{type(model).__name__}: its logits for several texts differ from those for one text by {min(gaps):.1e}, so "
        "it cannot be sampled from. Use a model of another family"
    )


def _gap(model: PreTrainedModel, layout: Layout) -> float:
    """`gap_to_forward` of this layout; inf if the model does not accept such calls."""
    with (
        contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError, AssertionError),
        autocast(device_of(model), held_precision(model) or "float32"),
    ):
        return gap_to_forward(model, lambda _: PlainDecoder(model, layout))
    return math.inf
