"""The general tier of sampling: any decoder of transformers, through its own forward and its DynamicCache.

Prompts of unequal length are padded at the left. Not every family takes that: BART's decoder has no position ids, so it
counts the padding, and RWKV takes neither a mask nor a cache of transformers. What a model takes is found out at its
first use, by comparing it with one forward a sequence (`how_to_decode`).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import weakref
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf_cli.errors import ArtifactError
from rlhf_cli.models.forward import TOLERANCE, vocabulary_rows
from rlhf_cli.models.limits import positions

PADDED, EQUAL, WHOLE = "padded", "equal", "whole"
"""All rows together, padded at the left; those with prompts of one length together; the same without a cache, each
token by a forward of the whole text."""
SLOWER = {
    EQUAL: "padding at the left changes its logits; it samples prompts of one length at a time",
    WHOLE: "neither padding nor a cache gives its own logits; it reads the whole text again for every token",
}
_hows: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()


class PlainDecoder:
    """Next-token logits of live rows."""

    leaves_below = 0.75
    """Rows that have ended leave when at most this share is still alive: leaving costs a copy of the cache, staying
    costs a wasted row in every step."""
    admits_beside_others = False
    """A prompt can't be read while others go on: new rows begin when all have ended."""
    most_rows = sys.maxsize
    """Rows that it has room for."""
    lag = 0
    """Steps that a row goes on after it has ended, before the sampler sees it."""

    def __init__(self, model: PreTrainedModel, how: str | None = None):
        """how: PADDED, EQUAL or WHOLE; None for the first of them that gives the model's own logits."""
        self.model = model
        self.how = how or how_to_decode(model)
        self.groups: list[Group] = []

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Rows for these prompts, when there are none: [len(prompts), V], the logits of their first tokens."""
        by_length: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            by_length.setdefault(0 if self.how == PADDED else len(prompt), []).append(row)
        self.groups = [
            Group(self.model, rows, [prompts[row] for row in rows], cached=self.how != WHOLE)
            for rows in by_length.values()
        ]
        return self._in_order([group.forward(group.ids) for group in self.groups])

    def step(self, ids: Tensor) -> Tensor:
        """One more token [B] of each row: [B, V], the logits of the next."""
        if len(self.groups) == 1:
            return self.groups[0].step(ids)
        return self._in_order([group.step(ids[group.rows]) for group in self.groups])

    def keep(self, rows: Tensor) -> None:
        """Only these rows stay, in this order."""
        stay = rows.tolist()
        for group in self.groups:
            group.keep(stay)
        self.groups = [group for group in self.groups if group.rows]

    def _in_order(self, parts: list[Tensor]) -> Tensor:
        """The groups' logits in the order of the rows. A group has its rows in that order."""
        if len(parts) == 1:
            return parts[0]
        rows = torch.tensor([row for group in self.groups for row in group.rows], device=parts[0].device)
        return torch.cat(parts)[rows.argsort()]


class Group:
    """Rows that are computed in one forward, padded at the left to the longest of their prompts."""

    def __init__(self, model: PreTrainedModel, rows: list[int], prompts: Sequence[Sequence[int]], *, cached: bool):
        """rows: their numbers among the decoder's. cached: else each step computes the whole text."""
        self.model, self.rows = model, rows
        device = next(model.parameters()).device
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self.ids, self.mask = ids.to(device), mask.to(device)
        # Left padding has no position of its own: the first real token is at 0.
        self.position_ids = (self.mask.cumsum(1) - 1).clamp_min(0)
        self.cache = DynamicCache(config=model.config) if cached else None
        self.is_mamba = "cache_params" in inspect.signature(model.forward).parameters

    def step(self, ids: Tensor) -> Tensor:
        """One more token [b] of each row: [b, V], the logits of the next."""
        if self.cache is None:
            self.ids = torch.cat([self.ids, ids[:, None]], dim=1)
            return self.forward(self.ids)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        self.position_ids = self.position_ids[:, -1:] + 1
        return self.forward(ids[:, None])

    def forward(self, ids: Tensor) -> Tensor:
        """[b, n] -> [b, V], the logits behind the last."""
        if self.cache is None:
            output = self.model(input_ids=ids, use_cache=False, logits_to_keep=1)
        elif self.is_mamba:
            # Its cache has a name of its own, and a mask is for the tokens of this call only.
            mask = self.mask if ids.shape == self.mask.shape else None
            output = self.model(
                input_ids=ids, attention_mask=mask, cache_params=self.cache, use_cache=True, logits_to_keep=1
            )
        else:
            output = self.model(
                input_ids=ids,
                attention_mask=self.mask,
                position_ids=self.position_ids,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = output.logits[:, -1]
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Of the decoder's rows only these stay; the group keeps those that are its own."""
        own = {row: index for index, row in enumerate(self.rows)}
        chosen = torch.tensor([own[row] for row in rows if row in own], dtype=torch.int64, device=self.mask.device)
        self.rows = [place for place, row in enumerate(rows) if row in own]
        if self.cache is not None and self.rows:
            # Not batch_select_indices, which the state of a recurrent layer has not.
            self.cache.reorder_cache(cast(torch.LongTensor, chosen))
        self.ids, self.mask, self.position_ids = self.ids[chosen], self.mask[chosen], self.position_ids[chosen]


# ------------------------------------------------------------------------------------------ is it the model?


def why_not_padded(model: PreTrainedModel) -> str | None:
    """None where rows of unequal length are computed together, else a line for the user that says why not.

    Raises ArtifactError as `how_to_decode` does.
    """
    how = how_to_decode(model)
    return None if how == PADDED else f"{type(model).__name__}: {SLOWER[how]}, which is slower and as exact"


@torch.no_grad()
def how_to_decode(model: PreTrainedModel) -> str:
    """The fastest of PADDED, EQUAL and WHOLE that gives the logits of one forward a sequence, to 1e-4 of their size.

    A model is asked once, in float32: what it makes of padding and of a cache is no matter of precision. Raises
    ArtifactError where none of them does.
    """
    if model not in _hows:
        gaps = []
        for how in (PADDED, EQUAL, WHOLE):
            gaps.append(_gap(model, how))
            if gaps[-1] <= TOLERANCE:
                _hows[model] = how
                break
        else:
            raise ArtifactError(
                f"{type(model).__name__}: several texts at a time differ from one at a time by {min(gaps):.1e}, so "
                "nothing can be sampled from it. Give a model of another family"
            )
    return _hows[model]


def _gap(model: PreTrainedModel, how: str) -> float:
    """The largest difference of a logit from that of one forward a sequence, over the largest logit.

    Of prompts of unequal length and a few tokens more, while one of them leaves. inf where the model takes no such
    call; 0 where its own logits are no numbers.
    """
    steps, device = 4, next(model.parameters()).device
    lengths = [min(n, positions(model) - steps) for n in (9, 5, 5)]
    texts = [[((7 + row) * i + 3) % vocabulary_rows(model) for i in range(n + steps)] for row, n in enumerate(lengths)]
    was_training = model.training
    model.eval()
    gap, live, decoder = math.inf, [0, 1, 2], PlainDecoder(model, how)
    with (
        contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError, AssertionError),
        torch.autocast(device.type, enabled=False),
    ):
        plain = [model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0] for text in texts]
        largest = max(logits.abs().max().item() for logits in plain)
        found = decoder.admit([text[:n] for text, n in zip(texts, lengths, strict=True)])
        differences = []
        for step in range(steps):
            differences += [(found[i] - plain[row][lengths[row] - 1 + step]).abs().max() for i, row in enumerate(live)]
            if step == 1:
                live = [0, 2]
                decoder.keep(torch.tensor(live, device=device))
            found = decoder.step(torch.tensor([texts[row][lengths[row] + step] for row in live], device=device))
        gap = torch.stack(differences).max().item() / max(largest, 1.0) if math.isfinite(largest) else 0.0
    model.train(was_training)
    return gap
