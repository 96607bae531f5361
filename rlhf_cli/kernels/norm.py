"""Root-mean-square normalisation in few passes over memory, for training on a CPU.

transformers writes RMSNorm as six operations, whose backward pass is a dozen more, each through memory: with a
hidden size of 128 or 512 that is 8 to 15 % of a training step. Here it is three passes forward and five back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

KINDS = {"LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
"""transformers' layers that compute `rms_norm`, by name, since to import their modules takes 0.1 s; Gemma's adds 1 to
its weight and is not among them."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019, eq. 4).

    Args:
        x: [..., H], float32 or float64.
        weight: [H].
        eps: added to the mean square, inside the root.

    Returns:
        [..., H]; gradients are given once (no second derivatives).

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)  # root mean square sqrt(12.5)
    tensor([[0.8485, 2.2627]])
    """
    normed: Tensor = _RMSNorm.apply(x, weight, eps)
    return normed


def use_fast_norm(model: nn.Module) -> None:
    """Let the model's RMSNorm layers compute by `rms_norm`: their class changes, names and weights stay as they are."""
    for module in model.modules():
        if type(module).__name__ in KINDS:
            module.__class__ = FastRMSNorm


class FastRMSNorm(nn.Module):
    """transformers' layer with our arithmetic where that is the faster, in float32 on a CPU, and its own elsewhere."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states
        is_plain = x.dtype == self.weight.dtype == torch.float32 and x.device.type == "cpu"
        if is_plain and not torch.compiler.is_compiling():
            return rms_norm(x, self.weight, self.variance_epsilon)
        wide = x.float()
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * unit.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        grad_weight = (grad * unit).reshape(-1, unit.shape[-1]).sum(0)
        grad_unit = grad * weight
        # What would only make x longer does not move unit.
        along = torch.linalg.vecdot(grad_unit, unit).unsqueeze(-1).div_(unit.shape[-1])
        return grad_unit.addcmul_(unit, along, value=-1).mul_(scale), grad_weight, None
