"""A moving average of a model's weights, kept on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rlhf_cli.algorithms.ema import ema
from rlhf_cli.training.checkpoint import State


class WeightAverage:
    """``average = decay * average + (1 - decay) * weight`` after each optimizer step, of the trained weights.

    It starts at the weights as they are: no bias is to be corrected. float32, whatever the weights' device.
    """

    def __init__(self, model: torch.nn.Module, *, decay: float):
        self.model, self.decay = model, decay
        self.weights = {name: p.detach().float().cpu().clone() for name, p in self._trained()}

    def update(self) -> None:
        """Take the weights as they are now into the average."""
        for name, p in self._trained():
            self.weights[name] = ema(self.weights[name], p.detach().float().cpu(), decay=self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the averaged weights, for a while."""
        own = {name: p.detach().clone() for name, p in self._trained()}
        self._set(self.weights)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, weights: dict[str, torch.Tensor]) -> None:
        for name, p in self._trained():
            p.copy_(weights[name])

    def state(self) -> State:
        return dict(self.weights), {}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.weights = {name: tensors[name].clone() for name in self.weights}

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
