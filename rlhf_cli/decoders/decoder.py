"""What all decoders share: their interface, and the check against the model's own forward."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_cli.models.forward import positions, vocabulary_rows
from rlhf_cli.processes.sharding import device_of

T = TypeVar("T")


class UnsupportedError(Exception):
    """A fast decoder does not support this model, or this text length. The message is the reason."""


class Decoder(Protocol):
    """Computes next-token logits of live rows. A row is a prompt with the tokens that were drawn for it."""

    admits_beside_others: bool
    """Whether new rows can enter while others are unfinished."""

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Add a row for each prompt behind the live rows; return the logits of their first tokens [prompts, V]."""

    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each live row, ids [B]; return the logits of the next tokens [B, V]."""

    def leave(self, rows: int, unfinished: int) -> bool:
        """Whether the finished ones of its rows should leave now; some rows are finished."""

    def keep(self, rows: Tensor) -> None:
        """Drop all live rows except those with these indices, and put those in this order."""

    def apart(self, rows: int) -> Sequence[Decoder]:
        """Decoders with the same weights, of which each decodes some of `rows` rows in a thread of its own.

        Only one if a split would not be faster, or would change the last digits.
        """


# ------------------------------------------------------------------------------- is it the model's own forward?


def once_per_model(check: Callable[[PreTrainedModel], T]) -> Callable[[PreTrainedModel], T]:
    """Keep the result of a check for each model. It runs again once modules have been replaced, as by adapters."""
    results: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[type, ...], T]] = weakref.WeakKeyDictionary()

    @functools.wraps(check)
    def kept(model: PreTrainedModel) -> T:
        of_model, key = results.setdefault(model, {}), tuple(type(module) for module in model.modules())
        if key not in of_model:
            of_model[key] = check(model)
        return of_model[key]

    return kept


def own_logits(model: PreTrainedModel, text: list[int], prompt_length: int) -> Tensor:
    """The logits after each token of a text from the last one of its prompt on, by one forward pass: [n, V]."""
    logits: Tensor = model(input_ids=torch.tensor([text], device=device_of(model)), use_cache=False).logits
    return logits[0, prompt_length - 1 :]


def gap_to_forward(
    model: PreTrainedModel,
    new_decoder: Callable[[int], Decoder],
    *,
    lengths: Sequence[int] = (9, 5, 5),
    own: Callable[[PreTrainedModel, list[int], int], Tensor] = own_logits,
) -> float:
    """The largest difference between a decoder's logit and that of one pass per text, relative to the largest or to 1.

    The texts are prompts of these lengths and a few more tokens of each, while one row leaves. `new_decoder` takes the
    length of the longest text. 0 if the model's own logits are NaN or infinite: then no decoder is at fault.
    """
    steps, device = 4, device_of(model)
    lengths = [min(n, positions(model) - steps) for n in lengths]
    texts = [[((7 + row) * i + 3) % vocabulary_rows(model) for i in range(n + steps)] for row, n in enumerate(lengths)]
    was_training = model.training
    model.eval()
    try:
        alone = [own(model, text, n).float() for text, n in zip(texts, lengths, strict=True)]
        largest = max(logits.abs().max().item() for logits in alone)
        live, differences, decoder = [0, 1, 2], list[Tensor](), new_decoder(max(map(len, texts)))
        logits = decoder.admit([text[:n] for text, n in zip(texts, lengths, strict=True)])
        for step in range(steps):
            differences += [(logits[i].float() - alone[row][step]).abs().max() for i, row in enumerate(live)]
            if step == 1:
                live = [0, 2]
                decoder.keep(torch.tensor(live, device=device))
            logits = decoder.step(torch.tensor([texts[row][lengths[row] + step] for row in live], device=device))
    finally:
        model.train(was_training)
    return torch.stack(differences).max().item() / max(largest, 1.0) if math.isfinite(largest) else 0.0
