"""A moving average of a model's trained weights, kept on the CPU in float32.

Why not `torch.optim.swa_utils.AveragedModel`: it deep-copies the whole module, so with LoRA it would hold a second copy
of the frozen base model, and a checkpoint would store it. This average holds the trained weights only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rlhf_cli.processes.sharding import like, local
from rlhf_cli.run.checkpoint import State
from rlhf_cli.run.checkpoint_shards import restored


def ema(average: torch.Tensor, value: torch.Tensor, *, decay: float) -> torch.Tensor:
    """One step of an exponential moving average.

    ``decay * average + (1 - decay) * value``

    decay is the weight that is *kept*. Some libraries name the weight of the new value instead: TRL's
    ref_model_mixup_alpha is 1 - decay. Keep the average in float32: in bfloat16 a step with decay near 1 is smaller
    than the spacing of the numbers and changes nothing.

    Args:
        average: any shape.
        value: the same shape.
        decay: 0 to 1; 0 returns the value, 1 the old average.

    Returns:
        A new tensor of that shape; average is not changed.

    >>> ema(torch.tensor([1.0]), torch.tensor([5.0]), decay=0.75)
    tensor([2.])
    """
    return decay * average + (1 - decay) * value


class WeightAverage:
    """The exponential moving average of a model's trained weights, updated after each optimizer step.

    It starts at the initial weights, so there is no bias to correct.
    """

    def __init__(self, model: torch.nn.Module, *, decay: float):
        self.model, self.decay = model, decay
        self.weights = {name: local(p.detach()).float().cpu().clone() for name, p in self._trained()}

    def update(self) -> None:
        """Move the average towards the current weights."""
        for name, p in self._trained():
            self.weights[name] = ema(self.weights[name], local(p.detach()).float().cpu(), decay=self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside the context."""
        own = {name: local(p.detach()).clone() for name, p in self._trained()}
        self._set(self.weights)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, weights: dict[str, torch.Tensor]) -> None:
        for name, p in self._trained():
            local(p).copy_(weights[name])

    def state(self) -> State:
        """The average, for a checkpoint."""
        return {name: like(p, self.weights[name].to(local(p).device)) for name, p in self._trained()}, {}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Take the average from a checkpoint."""
        self.weights = {name: local(restored(tensors, name, p)).float().cpu().clone() for name, p in self._trained()}

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
