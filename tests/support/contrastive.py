"""Contrastive search, computed anew for each candidate from the whole sequence, without a cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlhf_cli.models.load import load_tokenizer

ALPHA, CANDIDATES, LENGTH = 0.6, 3, 6


@torch.no_grad()
def contrastive_response(path: str, start: list[int], compute: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]):
    """(text, whether it ended) of LENGTH tokens after `start`. `compute` gives logits and last hidden states of ids."""
    tokenizer, ids = load_tokenizer(path), list(start)
    while len(ids) < len(start) + LENGTH and (len(ids) == len(start) or ids[-1] != tokenizer.eos_token_id):
        p = compute(torch.tensor([ids]))[0][0, -1].softmax(-1)
        scores = {}
        for token in p.topk(CANDIDATES).indices.tolist():
            hidden = compute(torch.tensor([[*ids, token]]))[1][0]
            similarity = torch.cosine_similarity(hidden[-1:], hidden[:-1]).max()
            scores[token] = ((1 - ALPHA) * p[token] - ALPHA * similarity).item()
        ids.append(max(scores, key=lambda token: scores[token]))
    response = ids[len(start) :]
    return tokenizer.decode(response, skip_special_tokens=True), response[-1] == tokenizer.eos_token_id
