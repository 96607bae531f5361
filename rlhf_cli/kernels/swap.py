"""Replace the class of a model's layers by a faster one that computes the same.

Names and weights of the layers stay as they are, so a checkpoint and a saved model do not change. The new class is
compared with the old one on one layer of the model first. If they differ, the layers keep their class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

TOLERANCE = 1e-4
"""Largest difference that counts as rounding, relative to the largest output."""


@torch.no_grad()
def swap_class(layers: Sequence[nn.Module], fast: type[nn.Module], probe: Callable[[Any], Tensor]) -> str | None:
    """Give the layers, which are all of one class, the class `fast`.

    `probe` computes a layer's output for a fixed input. It runs on the first layer with its old class and with the new
    one.

    Returns:
        None, or a line for the user if the outputs differ. The layers then keep their class.
    """
    if not layers:
        return None
    first, plain = layers[0], type(layers[0])
    if isinstance(next(first.parameters(), None), FakeTensor):  # Shapes without numbers: nothing can be compared.
        for layer in layers:
            layer.__class__ = fast
        return None
    expected = probe(first)
    first.__class__ = fast
    gap = ((probe(first) - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
    if not gap <= TOLERANCE:  # Also true of a NaN gap.
        first.__class__ = plain
        return f"{plain.__name__}: {fast.__name__} differs from it by {gap:.1e}; the layers stay as they are (slower)"
    for layer in layers:
        layer.__class__ = fast
    return None
