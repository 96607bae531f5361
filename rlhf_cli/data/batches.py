"""Which rows make which batch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

from rlhf_cli.seeding import generator

T = TypeVar("T")


def stream(num_rows: int, batch_size: int, step: int, seed: int, purpose: str) -> list[int]:
    """The row numbers of optimizer step `step` (from 0), over an endless stream of shuffled epochs.

    Every row is taken once an epoch; a batch may span two epochs, so no row is dropped at an epoch's end.
    """
    rows: list[int] = []
    at = step * batch_size
    while len(rows) < batch_size:
        epoch, offset = divmod(at, num_rows)
        rows += _order(num_rows, seed, purpose, epoch)[offset : offset + batch_size - len(rows)].tolist()
        at = step * batch_size + len(rows)
    return rows


@functools.lru_cache(maxsize=8)
def _order(num_rows: int, seed: int, purpose: str, epoch: int) -> torch.Tensor:
    """An epoch's order, kept for its other steps: over millions of rows it takes longer than a small model's step."""
    return torch.randperm(num_rows, generator=generator(seed, purpose, epoch))


def chunks(items: Sequence[T], size: int | None) -> Iterator[Sequence[T]]:
    """Consecutive pieces of at most `size` items (one piece where size is None)."""
    step = size or max(1, len(items))
    for at in range(0, len(items), step):
        yield items[at : at + step]
