"""The one batch format: sequences packed into a row without padding, a beginning that several share only once.

Two answers, `7 8` and `9`, to the prompt `5 6`, packed as one group, and a sequence `3 4` by itself (where two tokens
are enough to share):

    sequence          0  0  0  0  1  2  2
    ids               5  6  7  8  9  3  4
    position_ids      0  1  2  3  2  0  1

The second answer has no prompt of its own in the row: its 9 stands at position 2 and attends to the 5 and the 6 of
sequence 0, never to the 7 and the 8. What is computed for those two tokens is computed once, and the gradients of
both answers meet there.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
import torch

SHORTEST_PREFIX = 8
"""Tokens that it takes to share: fewer save nothing."""
FEWEST_EQUAL = 4
"""Neighbours that it takes to go through attention in one call: twice as fast at ten tokens each, where two or three
lose as much in the backward pass as they gain."""


class Segment(NamedTuple):
    """What stands in the row of one sequence: all of it, or what follows a prefix that an earlier sequence has too."""

    start: int
    """Index in the row of its first token."""
    length: int
    """Its tokens in the row, at least 1."""
    prefix_of: int = 0
    """The sequence under whose first tokens its prefix stands; that one is whole."""
    prefix_length: int = 0
    """Tokens of the prefix; 0: the sequence is whole."""


class Run(NamedTuple):
    """Neighbours in the row that stand whole and are equally long, or one sequence."""

    num_sequences: int
    length: int
    """Tokens of each in the row."""
    prefix: tuple[int, int, int] | None
    """(run, begin, end): the tokens of another run that come before these."""


class Bounds(NamedTuple):
    """Queries are the tokens of the row, keys those of each sequence with its prefix, end to end."""

    queries: torch.Tensor
    """[B + 1] where each sequence's queries begin, and the end of all, int32."""
    keys: torch.Tensor
    """[B + 1] likewise of the keys."""
    most_queries: int
    most_keys: int
    key_indices: torch.Tensor | None
    """[keys[B]] where each key stands in the row; None: the keys are the row."""


@dataclass(frozen=True)
class PackedBatch:
    """B sequences laid end to end in one row of N tokens; attention never crosses a sequence's end."""

    ids: torch.Tensor
    """[N] token ids, int64."""
    position_ids: torch.Tensor
    """[N] position of each token in its own sequence, from 0."""
    segments: list[Segment]
    """[B] where each sequence stands."""

    @property
    def lengths(self) -> list[int]:
        """[B] tokens of each sequence, those of a shared prefix too."""
        return [segment.prefix_length + segment.length for segment in self.segments]

    @property
    def last(self) -> torch.Tensor:
        """[B] index of each sequence's last token, on the batch's device."""
        last = [segment.start + segment.length - 1 for segment in self.segments]
        return send(torch.tensor(last), self.ids.device)

    @functools.cached_property
    def runs(self) -> list[Run]:
        """The row in pieces that attention takes in one call each."""
        runs: list[Run] = []
        place: list[tuple[int, int]] = []  # The run of each sequence, and where in that it begins.
        same = groupby(self.segments, key=lambda segment: (segment.length, segment.prefix_length == 0))
        for (length, is_whole), neighbours in same:
            segments = list(neighbours)
            count = len(segments) if is_whole and len(segments) >= FEWEST_EQUAL else 1
            for segment in segments[::count]:
                prefix = None
                if segment.prefix_length:
                    run, begin = place[segment.prefix_of]
                    prefix = (run, begin, begin + segment.prefix_length)
                place += [(len(runs), i * length) for i in range(count)]
                runs.append(Run(count, length, prefix))
        return runs

    @functools.cached_property
    def bounds(self) -> Bounds:
        """Where queries and keys of each sequence end, for kernels that take a row of many sequences."""
        own, whole = [segment.length for segment in self.segments], self.lengths
        ends = np.cumsum([[0, *own], [0, *whole]], axis=1, dtype=np.int32)
        queries, keys = send(torch.from_numpy(ends), self.ids.device)
        indices = None if own == whole else self.indices([0] * len(whole), whole)
        return Bounds(queries, keys, max(own), max(whole), indices)

    def indices(self, begin: Sequence[int] | np.ndarray, end: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Where tokens begin[b] to end[b] - 1 of each sequence b stand in the row: [sum of end - begin] int64.

        In the order of the sequences, on the batch's device; a token of a shared prefix comes once for each
        sequence that asks for it.

        >>> pack([[5, 6, 7, 8], [5, 6, 9]], groups=[0, 0], shortest_prefix=2).indices([1, 1], [3, 3]).tolist()
        [1, 2, 1, 4]
        """
        start, _, prefix_of, prefix_length = np.array(self.segments, np.int64).reshape(-1, 4).T
        first = np.asarray(begin, np.int64)
        counts = np.asarray(end, np.int64) - first
        sequence = np.repeat(np.arange(len(counts)), counts)
        # Which token of its sequence each one is.
        token = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        own, shared = (start - prefix_length)[sequence], start[prefix_of][sequence]
        row = token + np.where(token < prefix_length[sequence], shared, own)
        return send(torch.from_numpy(row), self.ids.device)


def pack(
    sequences: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    *,
    groups: Sequence[Hashable] | None = None,
    shortest_prefix: int = SHORTEST_PREFIX,
) -> PackedBatch:
    """Lay sequences of token ids end to end.

    Args:
        sequences: none of them empty.
        device: of the batch.
        groups: a name for each sequence. One that begins as the first sequence of its name does shares that
            beginning with it, unless that is all it has; None: no sequence shares anything.
        shortest_prefix: beginnings of fewer tokens are not shared.

    >>> batch = pack([[5, 6, 7], [8, 9]])
    >>> batch.ids.tolist(), batch.position_ids.tolist(), batch.lengths, batch.last.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 0, 1], [3, 2], [2, 4])
    >>> batch = pack([[5, 6, 7, 8], [5, 6, 9], [3, 4]], groups=["a", "a", "b"], shortest_prefix=2)
    >>> batch.ids.tolist(), batch.position_ids.tolist(), batch.last.tolist()
    ([5, 6, 7, 8, 9, 3, 4], [0, 1, 2, 3, 2, 0, 1], [3, 4, 6])
    """
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    assert lengths.min(initial=1) > 0, "an empty sequence has no last token"
    ids = _flat(sequences)
    prefix_of = prefix_length = np.zeros_like(lengths)
    if groups is not None:
        prefix_of, prefix_length = _prefixes(ids, lengths, groups, shortest_prefix)
    own = lengths - prefix_length
    starts = np.cumsum(own) - own
    row = np.empty((2, own.sum()), np.int64)
    row[1] = np.arange(own.sum()) - np.repeat(starts - prefix_length, own)
    # Position p of sequence b stands at p after the sequence's first token in `ids`.
    row[0] = ids[row[1] + np.repeat(np.cumsum(lengths) - lengths, own)]
    # One copy to the device for both.
    on_device = send(torch.from_numpy(row), device)
    segments = list(map(Segment, starts.tolist(), own.tolist(), prefix_of.tolist(), prefix_length.tolist()))
    return PackedBatch(on_device[0], on_device[1], segments)


def _prefixes(
    ids: np.ndarray, lengths: np.ndarray, groups: Sequence[Hashable], shortest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of each sequence in `ids`, the first of its group and how many tokens it shares with that: int64 [B] each."""
    ends = np.cumsum(lengths).tolist()
    texts = [ids[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
    first: dict[Hashable, int] = {}
    prefix_of, prefix_length = np.zeros_like(lengths), np.zeros_like(lengths)
    for b, (text, group) in enumerate(zip(texts, groups, strict=True)):
        other = first.setdefault(group, b)
        room = min(len(texts[other]), len(text))
        if other == b or room < shortest:
            continue
        differ = texts[other][:room] != text[:room]
        shared = int(differ.argmax()) if differ.any() else room
        # Of equal sequences each stands whole: their scores then are equal to the last bit.
        if shortest <= shared < len(text):
            prefix_of[b], prefix_length[b] = other, shared
    return prefix_of, prefix_length


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """With how many equal tokens all of the sequences begin.

    >>> common_prefix([[5, 6, 7], [5, 6, 8], [5, 6]])
    2
    """
    room = min(map(len, sequences))
    rows = np.array([sequence[:room] for sequence in sequences], np.int64)
    differ = (rows != rows[0]).any(0)
    return int(differ.argmax()) if differ.any() else room


def response_positions(batch: PackedBatch, prompt_lengths: Sequence[int]) -> torch.Tensor:
    """Indices into the packed row of the tokens that predict each response token, [sum of R_b].

    Token t of a sequence is predicted at t - 1, so these run from each prompt's last token to the token
    before the sequence's last.
    """
    return batch.indices(np.asarray(prompt_lengths) - 1, np.asarray(batch.lengths) - 1)


def end_to_end(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> torch.Tensor:
    """The integers of all rows, one row after the other: [sum of their lengths] int64.

    >>> end_to_end([[5, 6], [], [7]]).tolist()
    [5, 6, 7]
    """
    return send(torch.from_numpy(_flat(rows)), device)


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the host on the device, without waiting for what a GPU still computes.

    From pinned memory, which a GPU reads by itself; from other memory the host would wait for all that it was told to
    compute before, and each microbatch would begin only when the one before it is done.
    """
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _flat(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), np.int64, sum(map(len, rows)))
