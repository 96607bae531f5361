"""Prompts to sampled responses, with their log-probabilities.

The randomness is a table of uniforms given from outside, one row a prompt, one column a token: a token is
drawn by inverting the cumulative distribution at its uniform. A response therefore depends on its prompt and
its row only, and not on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.seeding import generator

COMPACT_BELOW = 0.75
"""Finished rows leave the batch and the cache when at most this share is still alive: leaving costs a copy of
the cache, staying costs a wasted row in every step."""


@dataclass(frozen=True)
class Response:
    """One sampled response."""

    ids: list[int]
    """Its tokens, the stop token included when it came."""
    logprobs: list[float]
    """Of each token when it was drawn, at the sampling temperature."""
    ended: bool
    """A stop token came before `max_new_tokens` were out."""


def uniforms(seed: int, purpose: str, iteration: int, rows: int, columns: int) -> torch.Tensor:
    """The table [rows, columns] of one iteration, in [0, 1), the same on every device."""
    return torch.rand(rows, columns, generator=generator(seed, purpose, iteration))


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token that ends a response: the tokenizer's EOS and all of generation_config's."""
    found = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = set(found) if isinstance(found, list | tuple) else {found}
    return {int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    table: torch.Tensor,
    *,
    temperature: float,
    stop: Collection[int],
) -> list[Response]:
    """Sample one response to each prompt.

    prompts: token ids, none empty. table [B, R]: uniforms, R the longest response. Log-probabilities and
    the cumulative distribution are float32 whatever the model computes in. With a temperature of 1 this is
    the model's own distribution: nothing is filtered.
    """
    device = next(model.parameters()).device
    num_rows, longest = len(prompts), table.shape[1]
    width = max(map(len, prompts))
    ids = torch.zeros(num_rows, width, dtype=torch.int64)
    mask = torch.zeros(num_rows, width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask, table = ids.to(device), mask.to(device), table.to(device)
    stop_tensor = torch.tensor(sorted(stop), dtype=torch.int64, device=device)

    # Where each row's tokens are kept; `rows` says which of them the live batch computes.
    tokens = torch.zeros(num_rows, longest, dtype=torch.int64, device=device)
    logprobs = torch.zeros(num_rows, longest, device=device)
    lengths = torch.full((num_rows,), longest, dtype=torch.int64, device=device)
    ended = torch.zeros(num_rows, dtype=torch.bool, device=device)
    rows = torch.arange(num_rows, device=device)

    # Left padding has no position of its own: the first real token is at 0.
    position_ids = (mask.cumsum(1) - 1).clamp_min(0)
    cache = DynamicCache(config=model.config)
    inputs = ids
    for step in range(longest):
        output = model(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        new, new_logprobs = draw(output.logits[:, -1], table[rows, step], temperature)
        tokens[rows, step], logprobs[rows, step] = new, new_logprobs
        stopped = torch.isin(new, stop_tensor) & ~ended[rows]
        ended[rows] |= stopped
        lengths[rows[stopped]] = step + 1
        alive = ~ended[rows]
        num_alive = int(alive.sum())
        if num_alive == 0:
            break
        if num_alive <= COMPACT_BELOW * len(rows):
            keep = alive.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            rows, new, mask, position_ids = rows[keep], new[keep], mask[keep], position_ids[keep]
        inputs = new[:, None]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        position_ids = position_ids[:, -1:] + 1
    return [
        Response(tokens[i, :n].tolist(), logprobs[i, :n].tolist(), bool(ended[i]))
        for i, n in enumerate(lengths.tolist())
    ]


def draw(logits: torch.Tensor, u: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens drawn from softmax(logits / temperature) by inverse CDF, and their log-probabilities.

    logits [B, V], u [B] in [0, 1) -> ids [B], logprobs [B]. The token is the first whose cumulative
    probability is above u, so one of probability 0 is never drawn.
    """
    scaled = logits.float() / temperature
    logsumexp = scaled.logsumexp(1, keepdim=True)
    cdf = (scaled - logsumexp).exp().cumsum(1)
    # u is scaled by the total, which rounding keeps from being exactly 1.
    ids = torch.searchsorted(cdf, u[:, None].to(cdf.dtype) * cdf[:, -1:], right=True)
    ids = ids.clamp_max(logits.shape[1] - 1)
    return ids[:, 0], (scaled.gather(1, ids) - logsumexp)[:, 0]
