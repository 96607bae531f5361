"""Which rows make a batch, which process computes them, how they are cut into microbatches, and when they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from rlhf_cli.processes.distributed import World
from rlhf_cli.seeding import generator

T = TypeVar("T")


def stream(num_rows: int, batch_size: int, step: int, seed: int, purpose: str) -> list[int]:
    """The row numbers of optimizer step `step` (from 0), from an endless stream of shuffled epochs.

    Every epoch takes each row once. A batch may span two epochs, so no row is dropped at the end of an epoch.
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
    """The order of an epoch, cached for its steps: for millions of rows it takes longer than a small model's step."""
    return torch.randperm(num_rows, generator=generator(seed, purpose, epoch))


PART_TOKENS = 512
"""Fewest tokens, on average, of the microbatches into which rows are cut for the threads of a CPU. For a model of half
a million weights two halves of 760 tokens take as long as the whole on one core, of 440 9 % longer, of 280 16 %. On two
cores, whose threads wait for each other's Python, eight microbatches of 620 take 14 % longer than four of 1,240."""
PART_TOKENS_OF_LARGE = 256
"""The same for a model of MANY_WEIGHTS, whose operations are larger."""
MANY_WEIGHTS = 8_000_000
PART_TOKENS_IN_HALF = 768
"""The same for passes in 16 bits. There products take less time, and what each microbatch does once takes more, such as
casting weights and gradients: a token of a microbatch of 730 takes 1.2 times as long as of 1,460, of 365 1.5 times
(benchmarks/COSTS.md)."""


def part_tokens(num_weights: int, *, is_half: bool) -> int:
    """The fewest tokens of a microbatch of a model for the threads of a CPU."""
    if is_half:
        return PART_TOKENS_IN_HALF
    return PART_TOKENS if num_weights < MANY_WEIGHTS else PART_TOKENS_OF_LARGE


def num_parts(total: float, parts: int, fewest: int) -> int:
    """How many equal microbatches `total` tokens give, for threads; `fewest` is `part_tokens`.

    There are `parts`, or 1 for fewer than 1.5 times `fewest` tokens. Up to 4 keep the threads busy. More than 4
    must be larger, because a token of a larger microbatch takes less time.

    >>> [num_parts(total, 1, 512) for total in (1279, 1280, 2560, 8191, 8192)], num_parts(768, 2, 512)
    ([1, 2, 4, 4, 8], 2)
    """
    count = parts if 2 * total >= 3 * fewest else 1
    while total >= (2.5 if count < 4 else 4) * count * fewest:
        count *= 2
    return count


@dataclass(frozen=True)
class Budget:
    """The largest microbatch that a process computes."""

    tokens: int
    """Maximum tokens. A longer row makes a microbatch by itself."""
    rows: int | None = None
    """Maximum rows, however short. None sets no limit."""
    padded: bool = False
    """The model runs on padded batches: a microbatch costs its number of rows times its longest row."""
    parts: int = 0
    """On a CPU: into how many equal microbatches rows are cut at least, for its threads. 0: as few as possible."""
    part_tokens: int | None = None
    """In place of PART_TOKENS: fewer are enough for a large model."""

    def cut(
        self, lengths: Sequence[int], groups: Sequence[Hashable] | None = None, shared: Sequence[int] | None = None
    ) -> list[list[int]]:
        """The row numbers of each microbatch, [] for no rows. `in_order` restores the order of the rows.

        Args:
            lengths: [B] tokens of each row.
            groups: [B] a name for each row. Rows with the same name stay together, in one microbatch if they fit. None:
                each row is its own group.
            shared: [B] tokens that a row has in common with all rows of its group. A microbatch computes them once.

        >>> Budget(7).cut([3, 9, 4, 2])
        [[1], [2, 0], [3]]
        >>> Budget(9).cut([5, 8, 1], groups="abb")
        [[1, 2], [0]]
        >>> Budget(9).cut([5, 6, 5], groups="aaa", shared=[4, 4, 4])  # 5 + 2 + 1
        [[0, 1, 2]]
        >>> Budget(2048, parts=2).cut([300, 200, 260, 240]), Budget(2048, parts=2).cut([100, 90])
        ([[0, 1], [2, 3]], [[0, 1]])
        >>> Budget(2048, rows=1, parts=2).cut([300, 260])
        [[0], [1]]
        """
        members: dict[Hashable, list[int]] = {}
        for row, group in enumerate(groups if groups is not None else range(len(lengths))):
            members.setdefault(group, []).append(row)
        units = []
        for rows in members.values():
            once = shared[rows[0]] if shared is not None else 0
            units.append(_Unit(rows, once, sum(lengths[row] for row in rows) - (len(rows) - 1) * once))
        if self.parts and not self.padded:
            cut = self._equal(units)
            if cut is not None and (self.rows is None or max(map(len, cut), default=0) <= self.rows):
                return cut
        return self._full(units, lengths)

    def _full(self, units: list[_Unit], lengths: Sequence[int]) -> list[list[int]]:
        """As few microbatches as possible, the longest rows first.

        The first microbatch is then about the largest, so a lack of memory shows in the first one. The same lengths
        always give the same cut. Rows of one microbatch keep their order, whatever other rows are cut with them.
        """
        cut: list[list[int]] = []
        tokens = longest = 0

        def fits(num_rows: int, num_tokens: int) -> bool:
            total_rows = len(cut[-1]) + num_rows
            total_tokens = total_rows * longest if self.padded else tokens + num_tokens
            return (self.rows is None or total_rows <= self.rows) and total_tokens <= self.tokens

        for unit in sorted(units, key=lambda unit: -max(lengths[row] for row in unit.rows)):
            for row in unit.rows:
                is_first = row == unit.rows[0]
                own = lengths[row] - (0 if is_first else unit.once)
                # A group starts in a microbatch that has room for all of it, and is cut only if none has.
                if not cut or not (fits(len(unit.rows), unit.tokens) if is_first else fits(1, own)):
                    cut.append([])
                    tokens, longest, own = 0, max(lengths[r] for r in unit.rows), lengths[row]
                cut[-1].append(row)
                tokens += own
        return cut

    def _equal(self, units: list[_Unit]) -> list[list[int]] | None:
        """Microbatches of about as many tokens each, so that threads that compute them end together.

        There are `num_parts`, or twice as many until each fits the budget. It depends on the rows alone, not on the
        number of threads. Returns None if one is over the budget however many there are.
        """
        total = sum(unit.tokens for unit in units)
        count = num_parts(total, self.parts, self.part_tokens or PART_TOKENS)
        while True:
            cut: list[list[int]] = [[] for _ in range(min(count, len(units)))]
            tokens = [0] * len(cut)
            for unit in sorted(units, key=lambda unit: -unit.tokens):
                smallest = tokens.index(min(tokens))
                cut[smallest] += unit.rows
                tokens[smallest] += unit.tokens
            if max(tokens, default=0) <= self.tokens:
                return cut
            if count >= len(units):
                return None
            count *= 2


class _Unit(NamedTuple):
    """The rows of a group, the tokens that they share, and the tokens of all of them together."""

    rows: list[int]
    once: int
    tokens: int


def in_order(parts: Iterable[Iterable[T]], microbatches: Sequence[Sequence[int]]) -> list[T]:
    """The items of `parts`, which come microbatch by microbatch, in the order of the rows.

    >>> in_order([["b"], ["c", "a"]], [[1], [2, 0]])
    ['a', 'b', 'c']
    """
    rows = [row for microbatch in microbatches for row in microbatch]
    items = [item for part in parts for item in part]
    found = dict(zip(rows, items, strict=True))
    return [found[row] for row in range(len(rows))]


def deal(lengths: Sequence[int], num_processes: int) -> list[list[int]]:
    """The row numbers of each process: equal numbers of rows up to one, and about equal numbers of tokens.

    Rows are dealt from the longest to the shortest, to the processes in order and then in reverse order.

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


def own_share(items: Sequence[T], length_of: Callable[[T], int], world: World) -> list[T]:
    """This process's share of a batch. The shares have about the same number of tokens."""
    return [items[i] for i in deal(list(map(length_of, items)), world.size)[world.rank]]


def ahead(make: Callable[[int], T], first: int, last: int, device: torch.device) -> Iterator[tuple[int, T]]:
    """`(step, make(step))` for the steps from `first` to `last` - 1. For a GPU, a thread works one step ahead.

    `make` is called once per step, in order. An exception from it is raised at its own step. The thread ends with the
    caller's loop: a `break` or an exception closes the generator, which waits for the call in progress.

    A CPU uses no thread: handing a batch over takes as long as decoding it (0.4 ms of a 100 ms step of a
    model with one million weights). A GPU would wait, longer with more processes, since each decodes the whole batch.

    >>> list(ahead(lambda step: 10 * step, 2, 5, torch.device("cpu")))
    [(2, 20), (3, 30), (4, 40)]
    """
    if device.type == "cpu":
        yield from ((step, make(step)) for step in range(first, last))
        return
    if first >= last:
        return
    with ThreadPoolExecutor(1, thread_name_prefix="next batch") as thread:
        pending = thread.submit(make, first)
        for step in range(first, last):
            made = pending.result()
            if step + 1 < last:
                pending = thread.submit(make, step + 1)
            yield step, made
