"""AdamW and the learning-rate schedule, built from the config; and a moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlhf_cli.config.stage import Optimizer
from rlhf_cli.processes.distributed import World, collective
from rlhf_cli.processes.sharding import like, local
from rlhf_cli.run.checkpoint import State, restored
from rlhf_cli.training.adamw import BLOCK, has_whole_blocks, new_adamw, restored_state, saved_state
from rlhf_cli.training.bad_steps import LossScale

SMALLEST_8BIT = 4096
"""Numbers of the smallest weight whose moments bitsandbytes keeps in 8 bits."""


@dataclass
class Stepper:
    """A model's optimizer and learning-rate schedule: everything between one backward pass and the next."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float]
    """The learning rate of a step, counted from 0."""
    max_grad_norm: float
    """Infinite if nothing is clipped."""
    scale: LossScale | None = None
    """The scale of the gradients of a backward pass."""
    steps: int = 0
    """Steps of the schedule so far, skipped ones included."""

    def __post_init__(self) -> None:
        self._set_rate()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self.rate(self.steps)

    def _set_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate

    def clip(self, world: World) -> float:
        """Unscale and clip the gradients, summed over all processes; returns their norm before clipping."""
        if self.scale is not None:
            self.scale.unscale(self.optimizer)
        weights = [p for p in self.model.parameters() if p.grad is not None]
        gradients = [p.grad for p in weights if p.grad is not None]
        if any(isinstance(gradient, DTensor) for gradient in gradients):
            norm = sharded_norm(gradients, world.device)
            scale = self.max_grad_norm / (norm + 1e-6)
            for gradient in gradients:
                local(gradient).mul_(scale.clamp(max=1.0).to(local(gradient).device))
            return norm.item()
        if all(p.dtype == torch.float32 for p in weights):
            return torch.nn.utils.clip_grad_norm_(weights, self.max_grad_norm).item()
        # The norm of a bfloat16 gradient would be bfloat16.
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        torch.nn.utils.clip_grads_with_norm_(weights, self.max_grad_norm, norm)
        return norm.item()

    def release(self) -> None:
        """Free the optimizer's moments, which are twice the size of the model. No step may follow."""
        self.optimizer.state.clear()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> State:
        """The optimizer's tensors by parameter number, and the schedule's step."""
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        tensors = {
            f"{number}.{key}": value
            for number, p in enumerate(weights)
            for key, value in saved_state(p, self.optimizer.state.get(p, {})).items()
        }
        return tensors, {"steps": self.steps}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:
        """Take over what `state` returned. The learning rate follows this run's schedule from the restored step."""
        full_state = self.optimizer.state_dict()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        names: dict[int, dict[str, str]] = {}
        for name in tensors:
            number, _, key = name.partition(".")
            names.setdefault(int(number), {})[key] = name
        state = {number: restored_state(parameters[number], tensors, of_one) for number, of_one in names.items()}
        self.optimizer.load_state_dict({**full_state, "state": state})
        self.steps = int(numbers["steps"])
        self._set_rate()

    def advance(self, *, move: bool = True) -> None:
        """One step of the optimizer and the schedule; without `move`, of the schedule only (a bad step)."""
        if move:
            self.optimizer.step()
        self.steps += 1
        self._set_rate()
        self.optimizer.zero_grad(set_to_none=True)


def sharded_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norm of gradients of which some are sharded among the processes, and the others the same on all: [].

    Rows may be in the CPU's memory. Only the sum of their squares goes to `device`, where the processes add theirs.
    All processes must call this.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of the others, of the sharded ones
    mesh = None
    for gradient in gradients:
        square = torch.linalg.vector_norm(local(gradient), dtype=torch.float32).double().square()
        sums[int(isinstance(gradient, DTensor))] += square.to(device)
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else mesh
    assert mesh is not None
    sharded, group = sums[1:], mesh.get_group(mesh.ndim - 1)  # machines that hold the same rows count once
    collective("the norm of the gradients", lambda: dist.all_reduce(sharded, group=group))
    return sums.sum().sqrt().float()


def warmup_warning(warmup_steps: int, steps: int) -> str:
    """The warning for a warm-up that is at least as long as the run."""
    return (
        f"optimizer.warmup_steps is {warmup_steps} and the run has {steps} steps: the learning rate never reaches "
        "its peak. Lower optimizer.warmup_steps"
    )


def float32_moments(config: Optimizer, *models: torch.nn.Module | None) -> list[str]:
    """The line about large sharded weights that 8-bit AdamW steps with float32 moments, if there are any."""
    trained = {p for model in models if model is not None for p in model.parameters() if p.requires_grad}
    # bitsandbytes keeps the moments of smaller weights in float32 everywhere.
    sizes = [p.numel() for p in trained if p.numel() >= SMALLEST_8BIT and not has_whole_blocks(p)]
    if config.precision != "8bit" or not sizes:
        return []
    share = sum(sizes) / sum(p.numel() for p in trained)
    return [
        f"optimizer.precision: 8bit keeps the moments of {len(sizes):,} sharded weights ({share:.2%} of the trained "
        f"numbers) in float32: their rows are no multiple of {BLOCK} numbers. One process has them in 8 bits, so its "
        "result differs"
    ]


def build_stepper(
    model: torch.nn.Module,
    config: Optimizer,
    total_steps: int,
    *,
    learning_rate: float | None = None,
    seed: int = 0,
    scale: LossScale | None = None,
) -> Stepper:
    """AdamW over the trainable weights of `model`, with warm-up and schedule over `total_steps`.

    Weight decay applies to matrices, not to biases and normalization weights. `seed` is that of stochastic rounding.

    No schedule of torch is used: LinearLR and CosineAnnealingLR compute each rate from the one before. The last bits
    would differ, and resuming at a step with another `total_steps` would not be exact.
    """
    peak = learning_rate if learning_rate is not None else config.learning_rate
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = new_adamw(groups, config, peak, seed)
    config = config.model_copy(update={"warmup_steps": config.warmup(total_steps)})
    total_steps = max(total_steps, config.warmup_steps + 1)
    # Clipping to an infinite norm multiplies every gradient by exactly 1.
    max_grad_norm = math.inf if config.max_grad_norm is None else config.max_grad_norm
    return Stepper(
        model,
        optimizer,
        lambda step: peak * rate_at(step, config=config, total_steps=total_steps),
        max_grad_norm,
        scale,
    )


def rate_at(step: int, *, config: Optimizer, total_steps: int) -> float:
    """The learning rate of `step` (from 0) as a fraction of its peak.

    During warm-up it is step / warmup_steps, so the first step has rate 0. After it, with
    progress = (step - warmup_steps) / (total_steps - warmup_steps), it is
    min_lr_ratio + (1 - min_lr_ratio) * left, where left is 1 - progress (linear), (1 + cos(pi * progress)) / 2
    (cosine) or 1 (constant). The minimum would be reached one step after the last. These are the schedules of
    transformers' `get_scheduler`, whose module takes longer to import than a small model takes to train.

    >>> config = Optimizer(learning_rate=1e-3, schedule="linear", warmup_steps=2, min_lr_ratio=0.5)
    >>> [rate_at(step, config=config, total_steps=6) for step in range(7)]
    [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5]
    """
    if step < config.warmup_steps:
        return step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / (total_steps - config.warmup_steps))
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            assert_never(config.schedule)
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left


# ------------------------------------------------------------------------------ a moving average of the trained weights


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
    """The exponential moving average of a model's trained weights, on the CPU in float32, updated after each step.

    It starts at the initial weights, so there is no bias to correct.

    Why not `torch.optim.swa_utils.AveragedModel`: it deep-copies the whole module, so with LoRA it would hold a second
    copy of the frozen base model, and a checkpoint would store it. This average holds the trained weights only.
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
