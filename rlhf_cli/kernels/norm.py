"""Root-mean-square normalisation in few passes over memory, for training on a CPU.

transformers computes RMSNorm as six operations, and its backward pass as a dozen more, each of which reads and writes
memory. For a hidden size of 128 or 512 that is 8 to 15 % of a training step. Here it is three passes forward and five
backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_cli.kernels.swap import swap_class

KINDS = {"LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
"""transformers' layers that compute `rms_norm`. They are listed by name, because importing their modules takes 0.1 s.
Gemma's adds 1 to its weight and is not in the list."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension (Zhang and Sennrich 2019, eq. 4).

    Args:
        x: [..., H], float32 or float64.
        weight: [H].
        eps: added to the mean square, inside the root.

    Returns:
        [..., H]. First derivatives only.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)  # root mean square sqrt(12.5)
    tensor([[0.8485, 2.2627]])
    """
    normed: Tensor = _RMSNorm.apply(x, weight, eps)
    return normed


def use_fast_norm(model: nn.Module) -> str | None:
    """Let the model's RMSNorm layers compute by `rms_norm`. Returns a line for the user if they keep their class."""
    layers = [module for module in model.modules() if type(module).__name__ in KINDS]
    return swap_class(layers, FastRMSNorm, _probe)


def _probe(layer: Any) -> Tensor:
    x = torch.arange(3.0 * len(layer.weight), device=layer.weight.device).sin().view(3, -1)  # [3, H]
    output: Tensor = layer(x.to(layer.weight.dtype))
    return output


class FastRMSNorm(nn.Module):
    """transformers' layer: `rms_norm` in float32 on a CPU, where that is faster, and its own formula elsewhere."""

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
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()  # [..., 1]
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        grad_weight = (grad * unit).reshape(-1, unit.shape[-1]).sum(0)  # [H]
        grad_unit = grad * weight
        # Remove the component along unit: changing the length of x does not change unit.
        along = torch.linalg.vecdot(grad_unit, unit).unsqueeze(-1).div_(unit.shape[-1])  # [..., 1]
        return grad_unit.addcmul_(unit, along, value=-1).mul_(scale), grad_weight, None
