"""The one batch format: sequences packed into a row without padding, whatever their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedBatch:
    """B sequences laid end to end in one row of N = sum(lengths) tokens.

    Token j of sequence b stands at index `starts[b] + j`; attention never crosses a sequence's end.
    """

    ids: torch.Tensor
    """[N] token ids, int64."""
    position_ids: torch.Tensor
    """[N] position of each token in its own sequence, from 0."""
    lengths: list[int]
    """[B] tokens of each sequence, all positive."""

    @property
    def starts(self) -> list[int]:
        """[B] index of each sequence's first token."""
        starts, at = [], 0
        for length in self.lengths:
            starts.append(at)
            at += length
        return starts

    @property
    def last(self) -> torch.Tensor:
        """[B] index of each sequence's last token, on the batch's device."""
        return torch.tensor(self.lengths, device=self.ids.device).cumsum(0) - 1


def pack(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> PackedBatch:
    """Lay sequences of token ids end to end.

    >>> batch = pack([[5, 6, 7], [8, 9]])
    >>> batch.ids.tolist(), batch.position_ids.tolist(), batch.lengths, batch.last.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 0, 1], [3, 2], [2, 4])
    """
    lengths = [len(sequence) for sequence in sequences]
    assert min(lengths, default=0) > 0, "an empty sequence has no last token"
    ids = torch.tensor([i for sequence in sequences for i in sequence], dtype=torch.int64)
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    return PackedBatch(ids.to(device), position_ids.to(device), lengths)


def response_positions(batch: PackedBatch, prompt_lengths: Sequence[int]) -> torch.Tensor:
    """Indices into the packed row of the tokens that predict each response token, [sum of R_b].

    Token t of a sequence is predicted at t - 1, so these run from each prompt's last token to the token
    before the sequence's last.
    """
    parts = [
        torch.arange(start + prompt - 1, start + length - 1)
        for start, prompt, length in zip(batch.starts, prompt_lengths, batch.lengths, strict=True)
    ]
    return torch.cat(parts).to(batch.ids.device)
