"""Responses exchanged between processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_cli.rollout.distribution import Response
from rlhf_cli.training.distributed import World
from rlhf_cli.training.exchange import gather_rows


def gather_responses(world: World, responses: Sequence[Response]) -> list[list[Response]]:
    """Every process's responses, in order of rank, on every process; with several, without their log-probabilities."""
    if world.size == 1:
        return [list(responses)]
    ids = gather_rows(world, [response.ids for response in responses])
    ended = world.gather_tensors(torch.tensor([response.ended for response in responses], dtype=torch.bool))
    allowed = _gather_ids_of_tokens(world, [response.allowed_ids for response in responses])
    forbidden = _gather_ids_of_tokens(world, [response.forbidden_ids for response in responses])
    return [
        [Response(a, [], b, c, d) for a, b, c, d in zip(*columns, strict=True)]
        for columns in zip(ids, (part.tolist() for part in ended), allowed, forbidden, strict=True)
    ]


def _gather_ids_of_tokens(
    world: World, responses: Sequence[list[list[int]] | None]
) -> list[list[list[list[int]] | None]]:
    """For each process and each of its responses, the ids that belong to each token, or None."""
    absent = -1
    counts = world.gather_tensors(
        torch.tensor([absent if tokens is None else len(tokens) for tokens in responses]).long()
    )
    if all(bool((part == absent).all()) for part in counts):
        return [[None] * len(part) for part in counts]
    everyone = gather_rows(world, [ids for tokens in responses if tokens is not None for ids in tokens])
    found: list[list[list[list[int]] | None]] = []
    for rows, sizes in zip(everyone, counts, strict=True):
        remaining = iter(rows)
        found.append([None if n == absent else [next(remaining) for _ in range(n)] for n in sizes.tolist()])
    return found
