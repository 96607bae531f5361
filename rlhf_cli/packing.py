"""The batch format of all stages: sequences packed into one row without padding. Shared prefixes are stored once.

Two answers, `7 8` and `9`, to the prompt `5 6`, packed as one group, and a separate sequence `3 4` (with two tokens as
the shortest shared prefix):

    sequence          0  0  0  0  1  2  2
    ids               5  6  7  8  9  3  4
    position_ids      0  1  2  3  2  0  1

The second answer has no prompt in the row. Its 9 is at position 2 and attends to the 5 and the 6 of sequence 0, but not
to the 7 and the 8. Those two tokens are computed once, and their gradients are the sum of both answers'.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SHORTEST_PREFIX = 8
"""Minimum number of tokens in a shared prefix. Fewer save nothing."""
FEWEST_EQUAL = 4
"""Minimum number of neighbours of equal length that share one attention call. Two or three lose as much in the backward
pass as they gain."""


class Segment(NamedTuple):
    """The part of one sequence that is in the row: all of it, or what follows a prefix shared with an earlier one."""

    start: int  # index of its first token in the row
    length: int  # tokens in the row, at least 1
    prefix_of: int = 0  # the sequence whose first tokens are the shared prefix; that one is complete in the row
    prefix_length: int = 0  # 0 if the sequence is complete in the row


class Neighbours(NamedTuple):
    """Sequences beside each other in the row that are complete and of equal length, or a single one."""

    num_sequences: int
    length: int  # tokens of each sequence in the row
    prefix: tuple[int, int, int] | None  # (run, begin, end): the tokens of another run that precede these


class Bounds(NamedTuple):
    """Bounds of the sequences among queries (the tokens of the row) and keys (each sequence with its prefix)."""

    queries: Tensor  # [B + 1] int32: where each sequence's queries begin, and the end of the last one
    keys: Tensor  # [B + 1] int32: the same for the keys
    most_queries: int
    most_keys: int
    key_indices: Tensor | None  # [keys[B]] index of each key in the row; None if the keys are the row itself


@dataclass(frozen=True)
class PackedBatch:
    """B sequences end to end in one row of N tokens. Attention never crosses the end of a sequence."""

    ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] position of each token in its sequence, from 0
    segments: list[Segment]  # [B] the place of each sequence in the row
    prompt_lengths: list[int] | None = None
    """[B] tokens of each prompt, for models that read it with an encoder. Only these models need it."""
    kept: Tensor | None = None
    """[n] indices in the row of the tokens whose last hidden states are read, n below N; None: all are. The last layer
    may compute only these (`ShortLayer`)."""

    @property
    def lengths(self) -> list[int]:
        """[B] tokens of each sequence, including its shared prefix."""
        return [segment.prefix_length + segment.length for segment in self.segments]

    @property
    def last(self) -> Tensor:
        """[B] index of each sequence's last token in the row, on the batch's device."""
        last = [segment.start + segment.length - 1 for segment in self.segments]
        return send(torch.tensor(last, dtype=torch.int64), self.ids.device)

    @functools.cached_property
    def keeps_last(self) -> bool:
        """Whether `kept` are the last tokens of the sequences, as a score reads them."""
        return self.kept is not None and len(self.kept) == len(self.segments) and torch.equal(self.kept, self.last)

    def rounded_up(self, multiple: int) -> PackedBatch:
        """The batch with a last sequence of tokens that nothing reads, so that N is a multiple; itself if N is one.

        >>> pack([[5, 6, 7], [8, 9]]).rounded_up(4).lengths
        [3, 2, 3]
        """
        missing = -len(self.ids) % multiple
        if not missing:
            return self
        # All at position 0: a model may have few positions.
        ids, position_ids = F.pad(self.ids, (0, missing)), F.pad(self.position_ids, (0, missing))
        segments = [*self.segments, Segment(len(self.ids), missing)]
        return replace(self, ids=ids, position_ids=position_ids, segments=segments)

    @functools.cached_property
    def runs(self) -> list[Neighbours]:
        """The row in pieces of one attention call each."""
        runs: list[Neighbours] = []
        starts: list[tuple[int, int]] = []  # For each sequence its run, and its first token in that run.
        equal = groupby(self.segments, key=lambda segment: (segment.length, segment.prefix_length == 0))
        for (length, is_complete), neighbours in equal:
            segments = list(neighbours)
            count = len(segments) if is_complete and len(segments) >= FEWEST_EQUAL else 1
            for segment in segments[::count]:
                prefix = None
                if segment.prefix_length:
                    run, begin = starts[segment.prefix_of]
                    prefix = (run, begin, begin + segment.prefix_length)
                starts += [(len(runs), i * length) for i in range(count)]
                runs.append(Neighbours(count, length, prefix))
        return runs

    @functools.cached_property
    def bounds(self) -> Bounds:
        """The bounds of each sequence's queries and keys, for kernels that take a row of many sequences."""
        num_queries, num_keys = [segment.length for segment in self.segments], self.lengths
        ends = np.cumsum([[0, *num_queries], [0, *num_keys]], axis=1, dtype=np.int32)
        queries, keys = send(torch.from_numpy(ends), self.ids.device)
        indices = None if num_queries == num_keys else self.indices([0] * len(num_keys), num_keys)
        return Bounds(queries, keys, max(num_queries), max(num_keys), indices)

    def indices(self, begin: Sequence[int] | np.ndarray, end: Sequence[int] | np.ndarray) -> Tensor:
        """Indices in the row of the tokens begin[b] to end[b] - 1 of each sequence b: [sum of end - begin] int64.

        The index of a token in a shared prefix is returned once for each sequence that includes it.

        >>> pack([[5, 6, 7, 8], [5, 6, 9]], groups=[0, 0], shortest_prefix=2).indices([1, 1], [3, 3]).tolist()
        [1, 2, 1, 4]
        """
        start, _, prefix_of, prefix_length = np.array(self.segments, np.int64).reshape(-1, 4).T
        first = np.asarray(begin, np.int64)
        counts = np.asarray(end, np.int64) - first
        sequence = np.repeat(np.arange(len(counts)), counts)
        # The position of each token in its sequence.
        token = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        start_of_own, start_of_prefix = (start - prefix_length)[sequence], start[prefix_of][sequence]
        row = token + np.where(token < prefix_length[sequence], start_of_prefix, start_of_own)
        return send(torch.from_numpy(row), self.ids.device)


def pack(
    sequences: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
    *,
    groups: Sequence[Hashable] | None = None,
    shortest_prefix: int = SHORTEST_PREFIX,
) -> PackedBatch:
    """Pack sequences of token ids, none empty, end to end into one row.

    With a group for each sequence, a sequence shares its common prefix with the first one of its group, unless that
    prefix is all of it or shorter than `shortest_prefix`.

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
    in_row = lengths - prefix_length  # [B] tokens of each sequence in the row
    starts = np.cumsum(in_row) - in_row
    row = np.empty((2, in_row.sum()), np.int64)  # ids and position_ids, [2, N]
    row[1] = np.arange(in_row.sum()) - np.repeat(starts - prefix_length, in_row)
    # Position p of sequence b is at p after the sequence's first token in `ids`.
    row[0] = ids[row[1] + np.repeat(np.cumsum(lengths) - lengths, in_row)]
    # One copy to the device for both.
    on_device = send(torch.from_numpy(row), device)
    segments = list(map(Segment, starts.tolist(), in_row.tolist(), prefix_of.tolist(), prefix_length.tolist()))
    return PackedBatch(on_device[0], on_device[1], segments)


def _prefixes(
    ids: np.ndarray, lengths: np.ndarray, groups: Sequence[Hashable], shortest: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each sequence the first one of its group, and the number of tokens it shares with that: int64 [B] each."""
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
        # Equal sequences are all complete in the row, so that their scores are equal to the last bit.
        if shortest <= shared < len(text):
            prefix_of[b], prefix_length[b] = other, shared
    return prefix_of, prefix_length


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """The length of the prefix that all sequences have in common.

    >>> common_prefix([[5, 6, 7], [5, 6, 8], [5, 6]])
    2
    """
    room = min(map(len, sequences))
    rows = np.array([sequence[:room] for sequence in sequences], np.int64)
    differ = (rows != rows[0]).any(0)
    return int(differ.argmax()) if differ.any() else room


def response_positions(batch: PackedBatch, prompt_lengths: Sequence[int]) -> Tensor:
    """Indices in the packed row of the tokens that predict each response token: [sum of R_b].

    Token t is predicted at t - 1, so these run from each prompt's last token to the sequence's last but one.
    """
    return batch.indices(np.asarray(prompt_lengths) - 1, np.asarray(batch.lengths) - 1)


def end_to_end(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """The integers of all rows, row after row: [sum of their lengths] int64.

    >>> end_to_end([[5, 6], [], [7]]).tolist()
    [5, 6, 7]
    """
    return send(torch.from_numpy(_flat(rows)), device)


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor from the host to the device.

    The copy goes through pinned memory, which a GPU reads on its own. From other memory it would wait for all queued
    work, so each microbatch would start only after the previous one had finished.
    """
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _flat(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), np.int64, sum(map(len, rows)))
