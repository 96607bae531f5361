"""The best held-out figure of a run so far. Its model is saved as `best_model`, beside the last one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhf_cli.errors import ConfigError
from rlhf_cli.run.checkpoint import State


class Best:
    """The step with the best value of the figure `metric`. With metric None nothing is kept.

    >>> best = Best("eval/loss", lower=True)
    >>> [best.is_better(step, {"eval/loss": loss}) for step, loss in enumerate((3.0, 2.0, 2.0, 2.5, math.nan), 1)]
    [True, True, False, False, False]
    >>> best.step, best.value
    (2, 2.0)
    """

    def __init__(self, metric: str | None, *, lower: bool):
        self.metric, self.lower = metric, lower
        self.step: int | None = None
        self.value: float | None = None

    def is_better(self, step: int, figures: Mapping[str, float]) -> bool:
        """Compare the figures of `step` with the best so far, and remember them if they are better."""
        if self.metric is None:
            return False
        value, sign = figures[self.metric], -1 if self.lower else 1
        if math.isnan(value) or (self.value is not None and sign * value <= sign * self.value):
            return False
        self.step, self.value = step, value
        return True

    def state(self) -> State:
        return {}, {"step": self.step, "value": self.value}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.step, self.value = numbers["step"], numbers["value"]


def require_held_out(best: Best, rows: Sequence[Any]) -> None:
    """Raise ConfigError if the best model is to be kept but no held-out rows exist to choose it by."""
    if best.metric is not None and not rows:
        raise ConfigError("evaluation.keep_best: no held-out rows. Set data.validation or data.test")
