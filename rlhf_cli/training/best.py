"""The best held-out figure of a run so far: whose model is kept beside the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlhf_cli.errors import ConfigError
from rlhf_cli.training.checkpoint import State


class Best:
    """Which step had the best figure `metric`; None keeps nothing. A part of the run's state.

    >>> best = Best("eval/loss", lower=True)
    >>> [best.is_better(step, {"eval/loss": loss}) for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, float("nan")))]
    [True, True, False, False]
    >>> best.step, best.value
    (2, 2.0)
    """

    def __init__(self, metric: str | None, *, lower: bool):
        self.metric, self.lower = metric, lower
        self.step: int | None = None
        self.value: float | None = None

    def is_better(self, step: int, figures: Mapping[str, float]) -> bool:
        """Are these the best figures so far? They then count as that."""
        if self.metric is None:
            return False
        value = figures[self.metric]
        # What is no number (not even equal to itself) is never the best.
        if value != value or (self.value is not None and (value >= self.value if self.lower else value <= self.value)):
            return False
        self.step, self.value = step, value
        return True

    def state(self) -> State:
        return {}, {"step": self.step, "value": self.value}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.step, self.value = numbers["step"], numbers["value"]


def require_held_out(best: Best, test: Sequence[Any]) -> None:
    """Raise ConfigError where the best is to be kept and nothing is held out to tell it by."""
    if best.metric is not None and not test:
        raise ConfigError("evaluation.keep_best: there are no held-out rows. Give data.test or data.test_fraction")
