"""Which rows make which batch, which process computes them, and how many at a time."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Budget:
    """How much a process computes at a time: microbatches of at most so many tokens, and rows."""

    tokens: int
    """A row that is longer makes a microbatch by itself."""
    rows: int | None = None
    """At most so many rows, however short."""
    padded: bool = False
    """The model runs on padded batches: a microbatch's tokens are its rows times its longest one."""

    def cut(
        self, lengths: Sequence[int], groups: Sequence[Hashable] | None = None, shared: Sequence[int] | None = None
    ) -> list[list[int]]:
        """The row numbers of each microbatch of rows of these lengths (`token_chunks`)."""
        return token_chunks(lengths, self.tokens, self.rows, groups, shared, padded=self.padded)


def token_chunks(
    lengths: Sequence[int],
    budget: int,
    max_rows: int | None = None,
    groups: Sequence[Hashable] | None = None,
    shared: Sequence[int] | None = None,
    *,
    padded: bool = False,
) -> list[list[int]]:
    """Cut rows into chunks of at most `budget` tokens, the longest rows first.

    The first chunk is then about the largest one: what does not fit into memory says so at once. The same lengths
    always give the same chunks, and rows that are of one chunk come in the same order whatever else is cut with them.

    Args:
        lengths: [B] tokens of each row.
        budget: tokens of a chunk; a row that is longer is a chunk by itself.
        max_rows: rows of a chunk, at most; None sets no limit.
        groups: [B] a name for each row: rows of one name stay beside each other, and in one chunk where they fit into
            one. None: each row stands for itself.
        shared: [B] tokens that a row has in common with all rows of its group; a chunk computes them once.
        padded: a chunk of n rows counts n times its longest row.

    Returns:
        The row numbers of each chunk, [] for no rows. `in_order` puts what was computed back into the rows' order.

    >>> token_chunks([3, 9, 4, 2], 7)
    [[1], [2, 0], [3]]
    >>> token_chunks([3, 9, 4, 2], 7, groups="abca")
    [[1], [2], [0, 3]]
    >>> token_chunks([5, 6, 5], 9, groups="aaa", shared=[4, 4, 4])  # 5 + 2 + 1
    [[0, 1, 2]]
    """
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups if groups is not None else range(len(lengths))):
        members.setdefault(group, []).append(row)
    cut: list[list[int]] = []
    tokens = longest = 0

    def fits(num_rows: int, num_tokens: int) -> bool:
        whole = len(cut[-1]) + num_rows
        return (max_rows is None or whole <= max_rows) and (
            whole * longest if padded else tokens + num_tokens
        ) <= budget

    for rows in sorted(members.values(), key=lambda rows: -max(lengths[row] for row in rows)):
        once = shared[rows[0]] if shared is not None else 0
        for row in rows:
            is_first = row == rows[0]
            own = lengths[row] - (0 if is_first else once)
            # A group begins where all of it fits, and is cut only if that is nowhere.
            if not cut or not (
                fits(len(rows), sum(lengths[r] for r in rows) - (len(rows) - 1) * once) if is_first else fits(1, own)
            ):
                cut.append([])
                tokens, longest, own = 0, max(lengths[r] for r in rows), lengths[row]
            cut[-1].append(row)
            tokens += own
    return cut


def in_order(parts: Iterable[Iterable[T]], cut: Sequence[Sequence[int]]) -> list[T]:
    """The items of `parts`, which are those of the rows of `cut` chunk by chunk, in the order of the rows.

    >>> in_order([["b"], ["c", "a"]], [[1], [2, 0]])
    ['a', 'b', 'c']
    """
    rows = [row for chunk in cut for row in chunk]
    items = [item for part in parts for item in part]
    found = dict(zip(rows, items, strict=True))
    return [found[row] for row in range(len(rows))]


def deal(lengths: Sequence[int], num_processes: int) -> list[list[int]]:
    """The row numbers of each process: as many rows as can be alike, and about as many tokens.

    The rows are dealt from the longest to the shortest, to the processes there and back again.

    >>> deal([5, 9, 2, 7, 1], 2)  # 9, then 7 and 5, then 2 and 1
    [[1, 2, 4], [3, 0]]
    >>> deal([5, 9, 2], 1)
    [[0, 1, 2]]
    """
    if num_processes == 1:
        return [list(range(len(lengths)))]
    hands: list[list[int]] = [[] for _ in range(num_processes)]
    for place, row in enumerate(sorted(range(len(lengths)), key=lambda row: -lengths[row])):
        there, at = divmod(place, num_processes)
        hands[at if there % 2 == 0 else num_processes - 1 - at].append(row)
    return hands
