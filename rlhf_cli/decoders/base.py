"""What all decoders share: their interface, the grouping of prompts, and the check against the model's own forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_cli.decoders.paged_cache import PAGE
from rlhf_cli.models.forward import vocabulary_rows
from rlhf_cli.models.limits import positions
from rlhf_cli.sharding import device_of


class UnsupportedError(Exception):
    """A fast decoder does not support this model, or this text length. The message is the reason."""


class Decoder(Protocol):
    """Computes next-token logits of live rows. A row is a prompt with the tokens that were drawn for it."""

    leaves_below: float
    """Finished rows leave once at most this share of the live rows is unfinished. 1.0: each leaves immediately."""
    admits_beside_others: bool
    """Whether new rows can enter while others are unfinished."""

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Add a row for each prompt behind the live rows; return the logits of their first tokens [prompts, V]."""

    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each live row, ids [B]; return the logits of the next tokens [B, V]."""

    def keep(self, rows: Tensor) -> None:
        """Drop all live rows except those with these indices, and put those in this order."""


# ------------------------------------------------------------------------------------------ reading prompts


def distinct_prompts(prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """The different prompts, and for each the rows that have it.

    >>> distinct_prompts([[5, 6], [7], [5, 6]])
    ([(5, 6), (7,)], [[0, 2], [1]])
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(tuple(prompt), []).append(row)
    return list(rows), list(rows.values())


def prompt_of_row(rows: Sequence[Sequence[int]]) -> Tensor:
    """For each row, the index of its prompt, [number of rows] int64. `rows` is as from `distinct_prompts`.

    >>> prompt_of_row([[0, 2], [1]]).tolist()
    [0, 1, 0]
    """
    index = torch.empty(sum(map(len, rows)), dtype=torch.int64)
    for prompt, its_rows in enumerate(rows):
        index[list(its_rows)] = prompt
    return index


def batch_sizes(lengths: Sequence[int], most: int) -> list[int]:
    """Split prompts into batches of at most `most` tokens, or of one prompt; return the size of each batch.

    >>> batch_sizes([900, 100, 100, 2000, 3], 1024)
    [2, 1, 1, 1]
    """
    counts, tokens = [0], 0
    for length in lengths:
        if counts[-1] > 0 and tokens + length > most:
            counts.append(0)
            tokens = 0
        counts[-1] += 1
        tokens += length
    return counts


# ------------------------------------------------------------------------------- is it the model's own forward?


class Checked:
    """Results of a check that runs at the first use of a model, and again once its modules have been replaced."""

    def __init__(self) -> None:
        self._results: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[type, ...], str]] = (
            weakref.WeakKeyDictionary()
        )

    def reason(self, model: PreTrainedModel, check: Callable[[], str]) -> str:
        """What `check` returned for the model: why the decoder cannot be used, "" if it can."""
        # Adapters, for instance, replace modules by modules of other classes.
        key = tuple(type(module) for module in model.modules())
        results = self._results.setdefault(model, {})
        if key not in results:
            results[key] = check()
        return results[key]


def difference(logits: Tensor, expected: Tensor) -> float:
    """The largest difference of two logits, relative to the largest expected logit or to 1 if that is smaller."""
    return ((logits - expected).abs().max() / expected.abs().max().clamp_min(1.0)).item()


def compare_with_forward(model: PreTrainedModel, new_decoder: Callable[[int], Decoder]) -> tuple[Tensor, Tensor]:
    """The logits of a decoder and those of one forward pass per sequence, [n, V] float32 each.

    Both read two prompts of different lengths and a few more tokens of each; one of them crosses the end of a page.
    `new_decoder` takes the length of the longest text.
    """
    steps, device = 3, device_of(model)
    lengths = [min(n, positions(model) - steps) for n in (PAGE - 1, 5)]
    texts = [[(7 * i + 3) % vocabulary_rows(model) for i in range(n + steps)] for n in lengths]
    decoder = new_decoder(max(map(len, texts)))
    logits = [decoder.admit([text[:n] for text, n in zip(texts, lengths, strict=True)]).float()]
    for step in range(steps):
        ids = torch.tensor([text[n + step] for text, n in zip(texts, lengths, strict=True)], device=device)
        logits.append(decoder.step(ids).float().clone())
    was_training = model.training
    model.eval()
    expected = [
        model(input_ids=torch.tensor([text], device=device)).logits[0, n - 1 :].float()
        for text, n in zip(texts, lengths, strict=True)
    ]
    model.train(was_training)
    return torch.stack(logits, dim=1).flatten(0, 1), torch.cat(expected)
