"""Linear layers with 8-bit weights, for models that only answer: each row of the weight has one scale.

The format is torchao's weight-only int8, in which `rlhf export --quantize int8` writes. A product needs no package: one
part of the weight at a time is converted to the input's format, which holds every 8-bit integer exactly. On a CPU torch
has a product of a few rows of bfloat16 with 8-bit weights, which takes half the time of one in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_cli.errors import ConfigError
from rlhf_cli.kernels.linear import FastConv1D, FastLinear
from rlhf_cli.models.deferred import read_deferred, take_integers

PART = 2**18
"""Weights that a CPU converts at a time. They stay in its cache."""
FEW_ROWS = 8
"""Most rows for which torch's product with 8-bit weights is the faster one on a CPU."""
BLOCK = 64
"""Inputs must be a multiple of it for that product: torch 2.13 reads beyond the end of rows of 40 or 770."""


class Int8Linear(nn.Module):
    """``x @ (weight * scale).T + bias``, weight [out, in] int8, scale [out, 1] float32."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, *, rounds: bool = False):
        """rounds: whether at most FEW_ROWS of input may be rounded to bfloat16. That needs a CPU."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.compute_dtype = torch.bfloat16 if rounds and self.in_features % BLOCK == 0 else None
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale.flatten().float(), requires_grad=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if self.compute_dtype is not None and x.numel() <= FEW_ROWS * self.in_features:
            rows, ones = x.reshape(-1, self.in_features).to(self.compute_dtype), self.scale.new_ones(self.out_features)
            product = torch._weight_int8pack_mm(rows, self.weight, ones.to(rows)).view(*x.shape[:-1], -1)
        else:
            count = max(1, PART // self.in_features) if device == "cpu" else self.out_features
            product = torch.cat([F.linear(x, part.to(dtype)) for part in self.weight.split(count)], -1)
        product = product * self.scale
        return (product if self.bias is None else product + self.bias).to(dtype)


@torch.no_grad()
def quantize_int8(model: PreTrainedModel, device: torch.device, key: str) -> None:
    """Replace the linear layers of the backbone by ones with 8-bit weights, which will compute on `device`.

    A layer whose weights are deferred and already integers in their file keeps those. Raises ConfigError, naming the
    option `key`, if the model has no linear layers.
    """
    layers = [
        (parent, name, child)
        for parent in model.base_model.modules()
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, FastLinear, Conv1D, FastConv1D)
    ]
    if not layers:
        raise ConfigError(f"{key}: this {type(model).__name__} has no linear layers. Remove the option")
    on_cpu = device.type == "cpu" and hasattr(torch, "_weight_int8pack_mm")
    while layers:  # a layer that is done is freed
        parent, name, layer = layers.pop()
        setattr(parent, name, Int8Linear(*_integers(layer), layer.bias, rounds=on_cpu))  # type: ignore[arg-type]


def _integers(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """The weight of a linear layer as integers [out, in], and their scales [out, 1]."""
    stored = take_integers(layer.weight)  # type: ignore[arg-type]
    read_deferred(layer)
    if stored is not None:
        return stored
    weight: Tensor = layer.weight.detach().t() if isinstance(layer, Conv1D) else layer.weight.detach()  # type: ignore[operator]
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scale).round().to(torch.int8).contiguous(), scale
