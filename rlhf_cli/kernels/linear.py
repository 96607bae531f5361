"""Products of linear layers on a CPU, by oneDNN where MKL is the slower of torch's two float32 libraries.

torch takes MKL for every float32 product, and MKL runs its AVX2 code on processors that are not Intel's: on an
AMD EPYC with AVX-512 112 GFLOPS a core, where oneDNN, which torch brings along too, reaches 240
(benchmarks/linear.py). Two thirds of a training step on a CPU are such products.

The choice is made from the processor's maker and never by a stopwatch: a run that goes on where it was stopped has
to choose as it did before, or its bytes would differ in the last digit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

TOLERANCE = 1e-5
"""Of the check at the first use, relative."""
ROWS = 64
"""For so many rows of x `fixed_linear` has oneDNN choose the order of the weight; any other number is right too."""
FEWEST_OUTPUTS = 8
"""A scalar head is a product of a matrix and a vector, which takes no time by either."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, as torch.nn.functional.linear; by oneDNN where that is the faster on this processor.

    Only float32 on a CPU, outside of autocast and torch.compile, is taken from torch; gradients are given once (no
    second derivatives).

    Args:
        x: [..., in].
        weight: [out, in], in any strides: a transposed view costs nothing.
        bias: [out] or None.

    Returns:
        [..., out].

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([0.5]))
    tensor([[11.5000]])
    """
    if (
        not torch.compiler.is_compiling()
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() > 0
        and prefers_onednn()
        and not torch.is_autocast_enabled("cpu")
    ):
        product: Tensor = _OneDNN.apply(x, weight, bias)
        return product
    return F.linear(x, weight, bias)


def fixed_linear(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """`linear` for a weight that is used many times and not trained meanwhile: no gradients.

    oneDNN orders a weight anew in each call, which is a third of the time where there are few rows. Here that is done
    once, in a copy; what is made of the weight later is not seen.
    """
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    if weight.dtype == torch.float32 and weight.device.type == "cpu" and prefers_onednn():
        ordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
        return lambda x: _product(x, ordered, bias)
    return lambda x: F.linear(x, weight, bias)


def rounded_up(rows: int) -> int:
    """The next of 1, 2, ..., 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ..., 128, 160, 192, and so on.

    For work that comes with any number of rows: oneDNN writes code for each new number, which takes 0.3 to 0.6 ms a
    product, where the product of 64 rows takes 0.03 in a small model. In a large one a row more costs more than the
    code, hence no rounding of few rows, and at most 31 rows more.

    >>> [rounded_up(n) for n in (1, 15, 17, 31, 33, 65, 1000)]
    [1, 15, 20, 32, 40, 80, 1024]
    """
    if rows <= 16:
        return rows
    return rows + -rows % min(32, 2 ** ((rows - 1).bit_length() - 3))


@functools.cache
def prefers_onednn() -> bool:
    """Is this a processor on which oneDNN is the faster, and does this torch's oneDNN give what MKL gives?"""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or _maker() in ("GenuineIntel", ""):
        return False
    x, weight = torch.arange(35.0).sin().view(5, 7), torch.arange(21.0).cos().view(3, 7)
    try:
        found, transposed = _product(x, weight, None), _product(x.t(), x.t(), None)
    except (AttributeError, RuntimeError):  # An operation of torch's own, which another release may not have.
        return False
    return all(
        torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
        for ours, theirs in ((found, x @ weight.t()), (transposed, x.t() @ x))
    )


def _maker() -> str:
    """`GenuineIntel`, `AuthenticAMD`, ...; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def use_fast_linear(model: nn.Module) -> None:
    """Let the model's linear layers compute by `linear`: their class changes, names and weights stay what they are."""
    if not prefers_onednn():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.out_features >= FEWEST_OUTPUTS:
            module.__class__ = FastLinear
        elif type(module) is Conv1D:
            module.__class__ = FastConv1D


class FastLinear(nn.Linear):
    """torch's layer with our product."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FastConv1D(Conv1D):
    """GPT-2's linear layer, whose weight is [in, out], with our product."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """``a.T @ b`` of [n, i] and [n, j], a sum over tokens.

    oneDNN copies its first operand where that is transposed, so the narrower one goes there, and the small result is
    turned back into rows: autograd keeps a gradient as it comes, and the optimizer reads it with the weight.
    """
    # For a second operand whose rows have gaps between them it would take its slow code, 1,000 times as slow.
    a, b = a.contiguous(), b.contiguous()
    if a.shape[1] <= b.shape[1]:
        return _product(a.t(), b.t(), None)
    return _product(b.t(), a.t(), None).t().contiguous()


class _OneDNN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t(), None) if needs_x else None,
            _transposed_product(rows, x.reshape(-1, x.shape[-1])) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )
