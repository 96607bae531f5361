"""The scale of the loss in float16 (Micikevicius et al. 2018, arXiv 1710.03740), by torch's GradScaler.

Gradients below 6e-8 are 0 in float16. So the loss is multiplied by a scale before the backward pass, and the gradients
are divided by it before they are clipped. If a gradient overflows, the step is skipped and the scale halved. After
2,000 steps without an overflow it doubles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rlhf_cli.run.checkpoint import State, Stateful

SMALLEST = 1.0
"""An infinite gradient at this scale is not explained by the scale."""


class LossScale:
    """The scale of the loss. In every precision but float16 it is 1 and nothing is computed. Saved in checkpoints."""

    def __init__(self, device: torch.device, precision: str):
        self._scaler = torch.amp.GradScaler(device.type) if precision == "float16" else None
        self._is_unscaled = False

    @property
    def is_used(self) -> bool:
        return self._scaler is not None

    @property
    def scale(self) -> float:
        return self._scaler.get_scale() if self._scaler is not None else 1.0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return self._scaler.scale(loss) if self._scaler is not None else loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale. They must be those of all processes."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
            self._is_unscaled = True

    def explains(self, numbers: Mapping[str, float]) -> bool:
        """Whether the scale may be what made these figures infinite: they are norms of gradients, and it can fall."""
        wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
        return bool(wrong) and self.scale > SMALLEST and all(name.endswith("/grad_norm") for name in wrong)

    def update(self) -> None:
        """Choose the scale of the next step, after `unscale` of every optimizer that had a gradient."""
        if self._scaler is not None and self._is_unscaled:
            self._scaler.update()
            self._is_unscaled = False

    def figures(self, group: str) -> dict[str, float]:
        """The scale as a row of metrics; {} if it is not used."""
        return {f"{group}/loss_scale": self.scale} if self.is_used else {}

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint stores of it."""
        return {"loss_scale": self} if self.is_used else {}

    def state(self) -> State:
        return {}, self._scaler.state_dict() if self._scaler is not None else {}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        if self._scaler is not None:
            self._scaler.load_state_dict(dict(numbers))
