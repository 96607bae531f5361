"""Matrix products of linear layers on a CPU: by oneDNN, if MKL is the slower of torch's two float32 libraries.

MKL runs its AVX2 code on processors that are not Intel's: 112 GFLOPS per core on an AMD EPYC with AVX-512, where oneDNN
reaches 240 (benchmarks/linear.py). Two thirds of a training step on a CPU are such products. The choice depends on the
maker of the processor and never on a measurement: a resumed run must choose the same, to the last digit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, List, Optional, Union  # noqa: UP035  (torch.jit.script)

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

TOLERANCE = 1e-5
"""Relative tolerance of the check at the first use."""
BFLOAT16_TOLERANCE = 1e-2
"""The same in bfloat16, whose numbers have 8 bits."""
ROWS = 64
"""Rows of x for which `fixed_weight` lets oneDNN choose the weight's memory order. Any other number works too."""
FEWEST_OUTPUTS = 8
"""Layers with fewer outputs, such as a scalar head, keep torch's product: its time does not matter."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, like torch.nn.functional.linear; by oneDNN if that is faster on this processor.

    Only float32 on a CPU, outside of autocast and torch.compile, uses oneDNN. First derivatives only. Any strides.

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


def fixed_weight(weight: Tensor) -> Tensor:
    """The weight of a linear layer in the memory order that `fixed_linear` reads. No gradients.

    oneDNN would reorder a weight in each call, which is a third of the time of few rows. MKL rounds a product with a
    transposed weight otherwise from 192 rows on.
    """
    weight = weight.detach().contiguous()
    fixes = {torch.float32: prefers_onednn, torch.bfloat16: multiplies_bfloat16}.get(weight.dtype)
    if weight.device.type == "cpu" and fixes is not None and fixes():
        ordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        return ordered
    return weight


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` with a weight of `fixed_weight`."""
    return _product(x, weight, bias) if weight.is_mkldnn else F.linear(x, weight, bias)


def rounded_up(rows: int) -> int:
    """The next of 1, 2, ..., 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ..., 128, 160, 192, and so on.

    oneDNN generates code for each new number of rows, in 0.3 to 0.6 ms; a product of 64 rows of a small model takes
    0.03 ms. In a large model extra rows cost more than the code. So few rows are not rounded, and at most 31 are added.

    >>> [rounded_up(n) for n in (1, 15, 17, 31, 33, 65, 1000)]
    [1, 15, 20, 32, 40, 80, 1024]
    """
    if rows <= 16:
        return rows
    return rows + -rows % min(32, 2 ** ((rows - 1).bit_length() - 3))


@functools.cache
def prefers_onednn() -> bool:
    """Whether oneDNN is the faster library on this processor and gives MKL's results in this release of torch."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or maker() in ("GenuineIntel", ""):
        return False
    # The answer is cached, so it must not depend on the caller's fake tensors, autocast or device.
    with unset_fake_temporarily(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        x, weight = (torch.arange(n, dtype=torch.float32).sin().view(-1, 7) for n in (35, 21))
        try:
            product, transposed = _product(x, weight, None), _product(x.t(), x.t(), None)
        except (AttributeError, RuntimeError):  # A private operation of torch, which another release may not have.
            return False
        return all(
            torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
            for ours, theirs in ((product, x @ weight.t()), (transposed, x.t() @ x))
        )


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies by a bfloat16 weight in its own memory order on this processor, with torch's result."""
    if not torch.backends.mkldnn.is_available():
        return False
    with unset_fake_temporarily(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        x, weight = (torch.arange(n).float().sin().view(-1, 32).bfloat16() for n in (96, 1024))
        try:
            product = _product(x, torch.ops.mkldnn._reorder_linear_weight(weight, ROWS), None)
        except (AttributeError, RuntimeError):
            return False
        return torch.allclose(product, x @ weight.t(), rtol=BFLOAT16_TOLERANCE, atol=BFLOAT16_TOLERANCE)


def maker() -> str:
    """`GenuineIntel`, `AuthenticAMD`, ...; empty if the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def use_fast_linear(model: nn.Module) -> str | None:
    """Let the model's linear layers compute by `linear`. Returns a line for the user if they keep their class."""
    if not prefers_onednn():
        return None
    modules = list(model.modules())
    linears = [m for m in modules if type(m) is nn.Linear and m.out_features >= FEWEST_OUTPUTS]
    convolutions = [m for m in modules if type(m) is Conv1D]
    lines = [swap_class(linears, FastLinear, _probe), swap_class(convolutions, FastConv1D, _probe)]
    return "\n".join(filter(None, lines)) or None


def _probe(layer: nn.Linear | Conv1D) -> Tensor:
    weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()
    x = torch.arange(3.0 * weight.shape[1], device=weight.device).sin().view(3, -1)  # [3, in]
    output: Tensor = layer(x.to(weight.dtype))
    return output


class FastLinear(nn.Linear):
    """torch's layer with the product above."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FastConv1D(Conv1D):
    """GPT-2's linear layer, whose weight is [in, out], with the product above."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` by oneDNN."""
    operation: Any = torch.ops.mkldnn._linear_pointwise
    # torch.jit.trace cannot record an empty list of numbers.
    is_traced = torch.jit.is_tracing()
    product: Tensor = _scripted_product()(x, weight, bias) if is_traced else operation(x, weight, bias, "none", [], "")
    return product


@functools.cache
def _scripted_product() -> Any:
    def product(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:  # noqa: UP045
        scalars: List[Optional[Union[int, float, complex]]] = []  # noqa: UP006, UP007, UP045
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", scalars, "")

    return torch.jit.script(product)


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """``a.T @ b`` of [n, i] and [n, j], a sum over tokens -> [i, j].

    oneDNN copies its first operand if that is transposed, so the narrower operand goes first. The result is contiguous:
    autograd keeps a gradient as it comes, and the optimizer reads it together with the weight.
    """
    # oneDNN's code for a second operand with gaps between its rows is 1,000 times as slow.
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
        rows = grad.reshape(-1, grad.shape[-1])  # [N, out]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t(), None) if needs_x else None,
            _transposed_product(rows, x.reshape(-1, x.shape[-1])) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


# ------------------------------------------------------------------------------- layers of another class in their place
#
# Names and weights stay as they are, so checkpoints and saved models do not change.


SWAP_TOLERANCE = 1e-4
"""Largest difference that counts as rounding, relative to the largest output."""


@torch.no_grad()
def swap_class(layers: Sequence[nn.Module], fast: type[nn.Module], probe: Callable[[Any], Tensor]) -> str | None:
    """Give the layers, all of one class, the class `fast`, unless `probe` of the first layer then gives another output.

    `probe` computes a layer's output for a fixed input. Returns a line for the user if the layers keep their class.
    """
    if not layers:
        return None
    first, plain = layers[0], type(layers[0])
    if not isinstance(next(first.parameters(), None), FakeTensor):  # Shapes without numbers cannot be compared.
        expected = probe(first)
        first.__class__ = fast
        gap = ((probe(first) - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
        if not gap <= SWAP_TOLERANCE:  # Also true of a NaN gap.
            first.__class__ = plain
            what = f"{fast.__qualname__} differs from it by {gap:.1e}"
            return f"{plain.__name__}: {what}; the layers stay as they are (slower)"
    for layer in layers:
        layer.__class__ = fast
    return None
