"""The general tier of sampling: any decoder of transformers, through its own forward and its DynamicCache."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


class PlainDecoder:
    """Next-token logits of live rows, padded at the left to the longest prompt."""

    leaves_below = 0.75
    """Rows that have ended leave when at most this share is still alive: leaving costs a copy of the cache, staying
    costs a wasted row in every step."""
    admits_beside_others = False
    """A prompt can't be read while others go on: new rows begin when all have ended."""
    most_rows = sys.maxsize
    """Rows that it has room for."""
    lag = 0
    """Steps that a row goes on after it has ended, before the sampler sees it."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Rows for these prompts, when there are none: [len(prompts), V], the logits of their first tokens."""
        device = next(self.model.parameters()).device
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self.mask = mask.to(device)
        # Left padding has no position of its own: the first real token is at 0.
        self.position_ids = (self.mask.cumsum(1) - 1).clamp_min(0)
        self.cache = DynamicCache(config=self.model.config)
        return self._forward(ids.to(device))

    def step(self, ids: Tensor) -> Tensor:
        """One more token [B] of each row: [B, V], the logits of the next."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        self.position_ids = self.position_ids[:, -1:] + 1
        return self._forward(ids[:, None])

    def keep(self, rows: Tensor) -> None:
        """Only these rows stay, in this order."""
        if len(rows) > 0:
            self.cache.batch_select_indices(rows)
        self.mask, self.position_ids = self.mask[rows], self.position_ids[rows]

    def _forward(self, ids: Tensor) -> Tensor:
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
