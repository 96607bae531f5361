"""AdamW (Loshchilov and Hutter 2019) with less memory for each trained weight.

optimizer.precision   weight   gradient   moments   bytes a weight
float32               4        4          8         16
8bit                  4        4          2         10
bfloat16              2        2          4         8
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from rlhf_cli.config.stage import Optimizer
from rlhf_cli.errors import ConfigError
from rlhf_cli.processes.sharding import first_row, like, local
from rlhf_cli.program import import_extra
from rlhf_cli.run.checkpoint import restored
from rlhf_cli.seeding import derived_seed

CHUNK = 1 << 24
"""Weights that `RoundedAdamW` computes with in float32 at the same time: 340 MB of temporary tensors."""

DRAWN = 1 << 18
"""Random numbers of `RoundedAdamW` from one seed. A process that holds a part of them draws them all."""


def new_adamw(groups: list[dict[str, Any]], config: Optimizer, lr: float, seed: int) -> torch.optim.Optimizer:
    """AdamW as `optimizer.precision` says, over the groups of parameters.

    Raises ConfigError if 8bit was asked for and bitsandbytes is not installed.
    """
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
    every smaller step. Stochastic rounding keeps it on average (Gupta et al. 2015).

    The random numbers of a step depend on the seed, on the step, on the parameter and on the place in it. So processes
    with the same gradients keep the same weights, whether these are whole or sharded, and a resumed run computes the
    same bytes.
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
    """`count` random numbers below 2**16, int32, for the numbers of a tensor from number `first` on.

    They depend on where they are in the whole tensor of `total` numbers, and not on how it is sharded among processes.
    """
    drawn = []
    for start in range(first - first % DRAWN, first + count, DRAWN):
        generator = torch.Generator(device).manual_seed(derived_seed(*seed, which, start))
        size = min(DRAWN, total - start)
        drawn.append(torch.randint(0, 1 << 16, (size,), dtype=torch.int32, device=device, generator=generator))
    return torch.cat(drawn)[first % DRAWN :][:count] if drawn else torch.empty(0, dtype=torch.int32, device=device)


def _step(
    chunk: list[Tensor], gradient: Tensor, group: dict[str, Any], steps: int, draw: Callable[[int, int], Tensor]
) -> None:
    """One step of [n] weights and their two moments, in place. They have made `steps` steps before.

    `draw` gives the random numbers of one of the three (`_noise`).
    """
    weight, average, square = wide = [t.float() for t in chunk]
    beta1, beta2 = group["betas"]
    adamw(
        [weight],
        [gradient],
        [average],
        [square],
        [],
        [torch.tensor(float(steps), device=weight.device)],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for which, (target, exact) in enumerate(zip(chunk, wide, strict=True)):
        if target.dtype == torch.bfloat16:
            target.copy_(round_stochastically(exact, draw(which, len(exact))))


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """float32 -> bfloat16: to one of the two nearest numbers, at random, so that the mean of the result is x.

    With the neighbours a <= x <= b the result is b with probability (x - a) / (b - a). A bfloat16 number is not
    changed. A bfloat16 number is the upper half of a float32 number: a random number is added to the lower half, and
    carries over with just that probability.

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
# It is a tensor with a row for each row of the weight, so a checkpoint of several processes is that of one. In 8 bits
# a moment is a byte and, for each block of 256 numbers, a scale. Two processes may hold two neighbouring rows of a
# sharded weight, so a block must lie within one row. A sharded weight whose row length is not a multiple of 256 keeps
# its moments in float32.


BLOCK = 256
"""Numbers with one scale in the 8-bit AdamW of bitsandbytes."""
SAME_FOR_ALL = ("step", "qmap1", "qmap2")
"""What is the same on every process: the number of steps, and the tables from a byte to its value."""


def has_whole_blocks(weight: Tensor) -> bool:
    """Whether no block of 8-bit moments is in two rows that may be those of two processes."""
    return not isinstance(weight, DTensor) or math.prod(weight.shape[1:]) % BLOCK == 0


def saved_state(weight: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state of an optimizer for a weight, as tensors for a checkpoint."""
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
    """What the optimizer keeps of a weight, from a checkpoint.

    `names` are those in the checkpoint, by the optimizer's own. The 8-bit AdamW counts its steps in a Python integer.
    """
    first, count = first_row(weight), len(local(weight)) if weight.ndim else 0
    if "absmax1" in names and not has_whole_blocks(weight):
        step = {"step": int(tensors[names["step"]])}
        return step | {
            f"state{n}": _numbers(tensors, names, n)[first : first + count].to(weight.device) for n in (1, 2)
        }
    found: dict[str, Tensor | int] = {}
    for key, name in names.items():
        if key in SAME_FOR_ALL:
            value = tensors[name]
            found[key] = int(value) if value.dtype == torch.int64 else value
        elif key.startswith("absmax"):
            scales = tensors[name]
            if isinstance(weight, DTensor):
                scales = scales.reshape(len(weight), -1)[first : first + count]
            found[key] = scales.reshape(-1)
        else:
            value = restored(tensors, name, weight)
            found[key] = local(value) if key in ("state1", "state2") else value
    return found


def _numbers(tensors: Mapping[str, Tensor], names: Mapping[str, str], which: int) -> Tensor:
    """A moment of a whole weight in float32."""
    codes, scales = tensors[names[f"state{which}"]], tensors[names[f"absmax{which}"]].reshape(-1)
    numbers = tensors[names[f"qmap{which}"]][codes.long()]
    return (numbers.view(-1) * scales.repeat_interleave(BLOCK)[: numbers.numel()]).view(codes.shape)
