"""The optimizer of a model: its learning-rate schedule, AdamW, and a moving average of the weights.

AdamW (Loshchilov and Hutter 2019) may use less memory for each trained weight:

optimizer.precision   weight   gradient   moments   bytes a weight
float32               4        4          8         16
8bit                  4        4          2         10
bfloat16              2        2          4         8
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from rlhf_cli.config.stage import Optimizer
from rlhf_cli.errors import ConfigError
from rlhf_cli.processes.distributed import World, collective
from rlhf_cli.processes.sharding import BLOCK, first_row, has_whole_blocks, like, local
from rlhf_cli.program import import_extra
from rlhf_cli.run.checkpoint import State, restored
from rlhf_cli.seeding import derived_seed
from rlhf_cli.training.bad_steps import LossScale


@dataclass
class Stepper:
    """A model's optimizer and learning-rate schedule: what happens between two backward passes."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float]  # the learning rate of a step, counted from 0
    max_grad_norm: float  # infinite if nothing is clipped
    scale: LossScale | None = None  # the scale of the gradients of a backward pass
    steps: int = 0  # steps of the schedule so far, skipped ones included

    def __post_init__(self) -> None:
        self._set_rate()

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
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
        """Free the optimizer's moments. No step may follow."""
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

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Take over what `state` returned. The learning rate follows this run's schedule from the restored step."""
        full_state = self.optimizer.state_dict()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        names: dict[int, dict[str, str]] = {}
        for name in tensors:
            number, _, key = name.partition(".")
            names.setdefault(int(number), {})[key] = name
        state = {number: restored_state(parameters[number], tensors, own) for number, own in names.items()}
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


def sharded_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm, [], of gradients of which some are sharded among the processes, and the others the same on all.

    All processes must call this. Rows may be in the CPU's memory; the sum of their squares goes to `device`.
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
    """
    peak = learning_rate if learning_rate is not None else config.learning_rate
    decays, stays = list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for name, p in model.named_parameters():
        if p.requires_grad:  # the biases of a mixture's experts are one matrix
            (decays if p.ndim >= 2 and not name.endswith("bias") else stays).append(p)
    groups = [{"params": decays, "weight_decay": config.weight_decay}, {"params": stays, "weight_decay": 0.0}]
    optimizer = new_adamw(groups, config, peak, seed)
    config = config.model_copy(update={"warmup_steps": config.warmup(total_steps)})
    total_steps = max(total_steps, config.warmup_steps + 1)
    # Clipping to an infinite norm multiplies every gradient by exactly 1.
    max_grad_norm = math.inf if config.max_grad_norm is None else config.max_grad_norm
    rate = partial(rate_at, config=config, total_steps=total_steps)
    return Stepper(model, optimizer, lambda step: peak * rate(step), max_grad_norm, scale)


def rate_at(step: int, *, config: Optimizer, total_steps: int) -> float:
    """The learning rate of `step` (from 0) as a fraction of its peak.

    During warm-up it is step / warmup_steps, so the first step has rate 0. After it, with
    progress = (step - warmup_steps) / (total_steps - warmup_steps), it is
    min_lr_ratio + (1 - min_lr_ratio) * left, where left is 1 - progress (linear), (1 + cos(pi * progress)) / 2
    (cosine) or 1 (constant). The minimum would be reached one step after the last.

    transformers' `get_scheduler` has these schedules too, and its import takes longer than a small model to train.
    torch's compute each rate from the one before, so resuming with another `total_steps` would not be exact.

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


def warmup_warning(warmup_steps: int, steps: int) -> str:
    """The warning for a warm-up that is at least as long as the run."""
    return (
        f"optimizer.warmup_steps is {warmup_steps} and the run has {steps} steps: the learning rate never reaches "
        "its peak. Lower optimizer.warmup_steps"
    )


# ---------------------------------------------------------------------------------------------------------------- AdamW


CHUNK = 1 << 24  # weights that `RoundedAdamW` computes with in float32 at the same time: 340 MB of temporary tensors

DRAWN = 1 << 18  # random numbers of `RoundedAdamW` from one seed. A process that holds a part of them draws them all.


def new_adamw(groups: list[dict[str, Any]], config: Optimizer, lr: float, seed: int) -> torch.optim.Optimizer:
    """AdamW as `optimizer.precision` says; raises ConfigError if 8bit was asked for without bitsandbytes."""
    match config.precision:
        case "float32":
            return torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps, fused=True)
        case "bfloat16":
            return RoundedAdamW(groups, lr=lr, betas=config.betas, eps=config.eps, seed=seed)
        case "8bit":
            import_extra("bitsandbytes", "qlora", "optimizer.precision: 8bit", ConfigError)
            from rlhf_cli.training.adamw_8bit import ShardedAdamW8bit

            optimizer: torch.optim.Optimizer = ShardedAdamW8bit(groups, lr=lr, betas=config.betas, eps=config.eps)
            return optimizer


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW whose bfloat16 weights and moments are rounded stochastically. Float32 weights get plain AdamW.

    A step is computed in float32. Near 1 the bfloat16 numbers are 2**-7 apart, so rounding to the nearest would undo
    every smaller step. Stochastic rounding keeps it on average (Gupta et al. 2015). The random numbers depend on the
    seed, step, parameter and place in it, so they are the same on all processes, sharded or not, and after a resume.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, seed: int
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.seed = seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        numbered = [(p, group) for group in self.param_groups for p in group["params"]]
        for number, (p, group) in enumerate(numbered):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            steps = int(state["step"])
            draw = partial(_noise, (self.seed, "stochastic rounding", steps, number), p.numel(), device=local(p).device)
            first = first_row(p) * math.prod(p.shape[1:])
            flat = [local(t).view(-1).split(CHUNK) for t in (p, state["exp_avg"], state["exp_avg_sq"])]
            for gradient, *chunk in zip(local(p.grad).reshape(-1).split(CHUNK), *flat, strict=True):
                _step(chunk, gradient.float(), group, steps, partial(draw, first=first))
                first += len(gradient)
            state["step"] += 1


def _noise(seed: tuple[Any, ...], total: int, which: int, count: int, *, first: int, device: torch.device) -> Tensor:
    """`count` random numbers below 2**16, int32, for a tensor of `total` numbers from number `first` on."""
    drawn = []
    for start in range(first - first % DRAWN, first + count, DRAWN):
        generator = torch.Generator(device).manual_seed(derived_seed(*seed, which, start))
        size = min(DRAWN, total - start)
        drawn.append(torch.randint(0, 1 << 16, (size,), dtype=torch.int32, device=device, generator=generator))
    return torch.cat(drawn)[first % DRAWN :][:count] if drawn else torch.empty(0, dtype=torch.int32, device=device)


def _step(
    chunk: list[Tensor], gradient: Tensor, group: dict[str, Any], steps: int, draw: Callable[[int, int], Tensor]
) -> None:
    """Step number `steps` of [n] weights and their two moments, in place. `draw` is `_noise` of one of the three."""
    weight, average, square = wide = [t.float() for t in chunk]
    step = torch.tensor(float(steps), device=weight.device)
    settings: dict[str, Any] = {"amsgrad": False, "maximize": False}
    settings |= {key: group[key] for key in ("lr", "weight_decay", "eps")}
    settings["beta1"], settings["beta2"] = group["betas"]
    adamw([weight], [gradient], [average], [square], [], [step], fused=True, **settings)
    for which, (target, exact) in enumerate(zip(chunk, wide, strict=True)):
        if target.dtype == torch.bfloat16:
            target.copy_(round_stochastically(exact, draw(which, len(exact))))


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """float32 -> bfloat16: to one of the two nearest numbers, at random, so that the mean of the result is x.

    With the neighbours a <= x <= b the result is b with probability (x - a) / (b - a): a bfloat16 number is the upper
    half of a float32 number, and a random number that is added to the lower half carries over with that probability.
    `noise` are random numbers below 2**16, int32, of the shape of x. They are overwritten.

    >>> x = torch.full((10_000,), 1.0 + 2**-9)  # a quarter of the way from 1 to 1 + 2**-7
    >>> noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    >>> rounded = round_stochastically(x, noise)
    >>> sorted(set(rounded.tolist())), round(rounded.float().sub(1).mean().item() * 2**9, 1)
    ([1.0, 1.0078125], 1.0)
    """
    bits = noise.add_(x.view(torch.int32)).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).bfloat16()


# ------------------------------------------------------------------------- what a checkpoint keeps of each weight
#
# Each tensor has a row for each row of the weight, so a checkpoint of several processes is that of one. In 8 bits a
# moment is a byte and, for each block of 256 numbers, a scale. Rows of a sharded weight may be on two processes, so it
# keeps float32 moments if its row length is not a multiple of 256.


SAME_FOR_ALL = ("step", "qmap1", "qmap2")
"""What is the same on every process: the number of steps, and the tables from a byte to its value."""


def saved_state(weight: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {key: value if isinstance(value, Tensor) else torch.tensor(value) for key, value in state.items()}
    if not isinstance(weight, DTensor):
        return found
    num_rows, num_blocks = len(local(weight)), math.prod(weight.shape[1:]) // BLOCK
    for key, value in found.items():
        if key not in SAME_FOR_ALL and not isinstance(value, DTensor):
            shape = (num_rows, num_blocks) if key.startswith("absmax") else local(weight).shape
            found[key] = like(weight, value.view(shape))
    return found


def restored_state(weight: Tensor, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor | int]:
    """What the optimizer keeps of a weight, from a checkpoint: `names` has the names there by the optimizer's own."""
    first, count = first_row(weight), len(local(weight)) if weight.ndim else 0
    found: dict[str, Tensor | int] = {}
    if "absmax1" in names and not has_whole_blocks(weight):  # its moments are float32 here
        for n in (1, 2):
            codes, scales = tensors[names[f"state{n}"]], tensors[names[f"absmax{n}"]].reshape(-1)
            numbers = tensors[names[f"qmap{n}"]][codes.long()]
            whole = (numbers.view(-1) * scales.repeat_interleave(BLOCK)[: numbers.numel()]).view(codes.shape)
            found[f"state{n}"] = whole[first : first + count].to(weight.device)
        return found | {"step": int(tensors[names["step"]])}
    for key, name in names.items():
        if key in SAME_FOR_ALL:
            value = tensors[name]
            found[key] = int(value) if value.dtype == torch.int64 else value  # 8-bit AdamW counts its steps in an int
        elif key.startswith("absmax"):
            scales = tensors[name]
            if isinstance(weight, DTensor):
                scales = scales.reshape(len(weight), -1)[first : first + count]
            found[key] = scales.reshape(-1)
        else:
            value = restored(tensors, name, weight)
            found[key] = local(value) if key in ("state1", "state2") else value
    return found


# ------------------------------------------------------------------------------ a moving average of the trained weights


def ema(average: Tensor, value: Tensor, *, decay: float) -> Tensor:
    """One step of an exponential moving average, as a new tensor: ``decay * average + (1 - decay) * value``.

    decay is the weight that is *kept*; TRL's ref_model_mixup_alpha is 1 - decay. Keep the average in float32: in
    bfloat16 a step with decay near 1 is smaller than the spacing of the numbers and changes nothing.

    >>> ema(torch.tensor([1.0]), torch.tensor([5.0]), decay=0.75)
    tensor([2.])
    """
    return decay * average + (1 - decay) * value


class WeightAverage:
    """The exponential moving average of a model's trained weights, on the CPU in float32, from the initial weights on.

    `torch.optim.swa_utils.AveragedModel` would copy and save the whole module, with LoRA also the frozen base model.
    """

    def __init__(self, model: torch.nn.Module, *, decay: float):
        self.model, self.decay = model, decay
        self.weights = {name: local(p.detach()).float().cpu().clone() for name, p in self._trained()}

    def update(self) -> None:
        for name, p in self._trained():
            self.weights[name] = ema(self.weights[name], local(p.detach()).float().cpu(), decay=self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside the block."""
        own = {name: local(p.detach()).clone() for name, p in self._trained()}
        self._set(self.weights)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, p in self._trained():
            local(p).copy_(weights[name])

    def state(self) -> State:
        return {name: like(p, self.weights[name].to(local(p).device)) for name, p in self._trained()}, {}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.weights = {name: local(restored(tensors, name, p)).float().cpu().clone() for name, p in self._trained()}

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
