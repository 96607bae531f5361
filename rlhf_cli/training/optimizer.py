"""AdamW and its schedule, from the config."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlhf_cli.config.stage import Optimizer
from rlhf_cli.training.checkpoint import State
from rlhf_cli.training.distributed import World


@dataclass
class Stepper:
    """A model's optimizer and schedule, and what happens between a backward pass and the next one."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    max_grad_norm: float

    @property
    def learning_rate(self) -> float:
        """The rate that the next step takes."""
        return float(self.scheduler.get_last_lr()[0])

    def clip(self, world: World) -> float:
        """Sum the gradients over processes and clip them; returns their norm before that."""
        world.sync_gradients(self.model.parameters())
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm).item()

    def state(self) -> State:
        """The optimizer's tensors, by the number of their parameter, and how far the schedule is."""
        inner = self.optimizer.state_dict()["state"]
        tensors = {f"{number}.{key}": value for number, own in inner.items() for key, value in own.items()}
        return tensors, {"steps": self.scheduler.last_epoch}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Become what `state` gave; the rate is what this run's own schedule says at that step."""
        whole = self.optimizer.state_dict()
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            number, _, key = name.partition(".")
            state.setdefault(int(number), {})[key] = tensor
        self.optimizer.load_state_dict({**whole, "state": state})
        assert isinstance(self.scheduler, torch.optim.lr_scheduler.LambdaLR)
        self.scheduler.last_epoch = int(numbers["steps"])
        rates = [
            base * scale(self.scheduler.last_epoch)
            for base, scale in zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.scheduler._last_lr = rates

    def advance(self, *, move: bool = True) -> None:
        """One step of the optimizer and of the schedule; without `move` of the schedule only."""
        if move:
            self.optimizer.step()
        with warnings.catch_warnings():
            # torch warns of a schedule that is ahead of its optimizer, which is what a skipped step is.
            warnings.simplefilter("ignore", UserWarning)
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)


def warmup_warning(warmup_steps: int, steps: int) -> str:
    """What to say where the warm-up outlasts the run."""
    return (
        f"optimizer.warmup_steps is {warmup_steps} and the run has {steps} steps: the learning rate never reaches "
        "its peak. Shorten the warm-up"
    )


def build_stepper(
    model: torch.nn.Module, config: Optimizer, total_steps: int, *, learning_rate: float | None = None
) -> Stepper:
    """AdamW over `model`'s trainable weights, with warm-up and schedule over `total_steps`.

    Matrices are decayed, biases and norms are not.
    """
    peak = learning_rate if learning_rate is not None else config.learning_rate
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=config.betas, eps=config.eps, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(rate_at, config=config, total_steps=max(total_steps, config.warmup_steps + 1))
    )
    return Stepper(model, optimizer, scheduler, config.max_grad_norm)


def rate_at(step: int, *, config: Optimizer, total_steps: int) -> float:
    """The learning rate of step `step` (from 0) as a share of its peak.

    step / warmup_steps while it warms up, so that the first step has rate 0. Then, with
    progress = (step - warmup_steps) / (total_steps - warmup_steps), from 1 to `min_lr_ratio` by
    1 - progress (linear) or (1 + cos(pi * progress)) / 2 (cosine), which would be there one step after the last; or
    1 (constant). These are the schedules of transformers' `get_scheduler`, whose module takes longer to import than a
    small model to begin.

    >>> config = Optimizer(learning_rate=1e-3, schedule="linear", warmup_steps=2, min_lr_ratio=0.5)
    >>> [rate_at(step, config=config, total_steps=6) for step in range(7)]
    [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5]
    """
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / (total_steps - config.warmup_steps))
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left
