"""Bad steps: those with a NaN or infinite loss or gradient. They are skipped and counted, and their batches kept.

A bad step changes no weight, optimizer state or moving average. The learning-rate schedule and the data stream advance
as usual, so the run has its planned length.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_cli.health.findings import Finding
from rlhf_cli.run.checkpoint import State, Stateful


class BadSteps:
    def __init__(self, limit: int):
        self.limit = limit  # consecutive bad steps that stop the run
        self.in_a_row = self.total = 0

    def count(self, numbers: Mapping[str, float], *, is_excused: bool = False) -> str | None:
        """Count a step; returns which of its loss and gradient norm is not finite, or None for a good step.

        An excused bad step is not counted among the consecutive ones.

        >>> steps = BadSteps(2)
        >>> steps.count({"loss": 0.5, "norm": math.inf}), steps.in_a_row
        ('norm is inf', 1)
        >>> steps.count({"loss": 0.5, "norm": 1.0}), steps.in_a_row, steps.total
        (None, 0, 1)
        """
        wrong = ", ".join(f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value))
        if not is_excused:
            self.in_a_row = self.in_a_row + 1 if wrong else 0
        self.total += bool(wrong)
        return wrong or None

    def state(self) -> State:
        return {}, {"in_a_row": self.in_a_row, "total": self.total}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.in_a_row, self.total = numbers["in_a_row"], numbers["total"]


def no_gradient(norms: Mapping[str, float], what: str) -> list[Finding]:
    """The finding that stops the run if a gradient norm of a step that should learn is exactly 0; else nothing.

    >>> no_gradient({"sft/grad_norm": 1e-9}, "step 3")
    []
    """
    zero = [key for key, norm in norms.items() if norm == 0.0]
    if not zero:
        return []
    verb = "is" if len(zero) == 1 else "are"
    return [
        Finding(
            "no_gradient",
            "stop",
            f"{' and '.join(zero)} {verb} exactly 0 in {what}, although there is something to learn. No weight would "
            "ever change.",
            "Look for torch.set_grad_enabled(False), torch.no_grad() or requires_grad_(False) in your reward, judge "
            "and model code, and for weights that are 0 or not finite",
        )
    ]


def append_new(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a .jsonl file, instead of an incomplete last row, and flush it to disk.

    A resumed run repeats its last steps, so rows that the file has are left out.
    """
    lines = [json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n" for row in rows]
    path.touch()
    with path.open("r+b") as file:
        known, end = set(), 0
        for line in file:
            if line.endswith(b"\n"):
                known.add(line)
                end += len(line)
        file.truncate(end)
        file.seek(end)
        file.writelines(line for line in lines if line not in known)
        file.flush()
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------- the scale of the loss in float16


class LossScale:
    """The scale of the loss in float16 (Micikevicius et al. 2018, arXiv 1710.03740), by torch's GradScaler.

    Gradients below 6e-8 are 0 in float16. So the loss is multiplied by a scale before the backward pass, and the
    gradients are divided by it before they are clipped. If a gradient overflows, the step is skipped and the scale
    halved. After 2,000 steps without an overflow it doubles. In other precisions the scale is 1.
    """

    def __init__(self, device: torch.device, precision: str):
        self._scaler = torch.amp.GradScaler(device.type, enabled=precision == "float16")
        self._is_unscaled = False

    @property
    def scale(self) -> float:
        return self._scaler.get_scale()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, after they have been summed over all processes."""
        self._scaler.unscale_(optimizer)
        self._is_unscaled = True

    def explains(self, numbers: Mapping[str, float]) -> bool:
        """Whether the scale may have made these figures infinite: they are norms of gradients, and it can fall."""
        wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
        return bool(wrong) and self.scale > 1.0 and all(name.endswith("/grad_norm") for name in wrong)

    def update(self) -> None:
        """Choose the scale of the next step, after `unscale` of every optimizer that had a gradient."""
        if self._is_unscaled:
            self._scaler.update()
            self._is_unscaled = False

    def figures(self, group: str) -> dict[str, float]:
        """The scale as a row of metrics; {} if it is not used."""
        return {f"{group}/loss_scale": self.scale} if self._scaler.is_enabled() else {}

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint stores of it."""
        return {"loss_scale": self} if self._scaler.is_enabled() else {}

    def state(self) -> State:
        return {}, self._scaler.state_dict()

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._scaler.load_state_dict(dict(numbers))
