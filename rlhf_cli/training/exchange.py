"""Lists whose size grows with the batch, exchanged between processes as tensors.

Pickled objects would be several times as large, and each process would hold the bytes of all beside the objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from rlhf_cli.training.distributed import World


def gather_rows(world: World, rows: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Every process's lists of integers, in order of rank, on every process.

    >>> gather_rows(World(0, 1, torch.device("cpu")), [[7], [], [8, 9]])
    [[[7], [], [8, 9]]]
    """
    if world.size == 1:
        return [[list(row) for row in rows]]
    lengths = world.gather_tensors(torch.tensor([len(row) for row in rows], dtype=torch.int32))
    flat = world.gather_tensors(torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=torch.int32))
    return [_split(numbers.tolist(), sizes.tolist()) for numbers, sizes in zip(flat, lengths, strict=True)]


def gather_texts(world: World, texts: Sequence[str]) -> list[list[str]]:
    """Every process's texts, in order of rank, on every process.

    >>> gather_texts(World(0, 1, torch.device("cpu")), ["a", "\\ud800"]) == [["a", "\\ud800"]]
    True
    """
    if world.size == 1:
        return [list(texts)]
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    lengths = world.gather_tensors(torch.tensor([len(data) for data in encoded], dtype=torch.int64))
    flat = world.gather_tensors(torch.frombuffer(bytearray(b"".join(encoded) or b"\0"), dtype=torch.uint8))
    found = []
    for data, sizes in zip(flat, lengths, strict=True):
        everything = bytes(data.numpy())
        ends = list(itertools.accumulate(sizes.tolist(), initial=0))
        found.append([everything[a:b].decode("utf-8", "surrogatepass") for a, b in itertools.pairwise(ends)])
    return found


def _split(numbers: list[int], sizes: list[int]) -> list[list[int]]:
    """Consecutive pieces of these sizes."""
    ends = itertools.accumulate(sizes, initial=0)
    return [numbers[a:b] for a, b in itertools.pairwise(ends)]
