"""Frozen linear layers of the backbone in 4 and in 8 bits. Embeddings, norms and heads stay as they are.

4 bits are NormalFloat by bitsandbytes, also under LoRA adapters (QLoRA, Dettmers et al. 2023): a weight is replaced by
the nearest of 16 values, times the largest weight of its block of 64.

8 bits are for models that only answer: each row of the weight has one scale, as in torchao's weight-only int8 (`rlhf
export --quantize int8`). For a few rows on a CPU torch has a product in bfloat16, which takes half the time.
"""

from __future__ import annotations

import functools
import logging
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_cli.config.models import Quantization
from rlhf_cli.errors import ConfigError
from rlhf_cli.kernels.linear import FastConv1D, FastLinear
from rlhf_cli.models.deferred import BLOCK, change, read_deferred, take_integers
from rlhf_cli.program import import_extra

WIDEST_ERROR = {"nf4": 0.16, "nf4_double": 0.3}
"""Largest error of a weight relative to its block's largest. Half of the widest gap between two of the 16 values is
0.152; `nf4_double` also rounds the scales, by up to 0.04 of a scale beside one that is 30 times as large."""
PART = 2**18
"""Weights that a CPU converts at a time. They stay in its cache."""
FEW_ROWS = 8
"""Most rows for which torch's product with 8-bit weights is the faster one on a CPU."""
INT8_BLOCK = 64
"""Inputs must be a multiple of it for that product: torch 2.13 reads beyond the end of rows of 40 or 770."""
KERNEL_BLOCK = 32
"""Outputs must be a multiple of it for bitsandbytes' own product on a CPU with AVX512-BF16."""


@torch.no_grad()
def quantize(model: PreTrainedModel, quantization: Quantization, key: str) -> None:
    """Replace the linear layers of the backbone by ones in 4 bits.

    Raises ConfigError, naming the config `key`, if bitsandbytes is missing or computes wrong weights here, or if no
    layer can be quantized.
    """
    layers = _quantizable(model, key)
    while layers:  # a layer that is done is freed
        parent, name, layer = layers.pop()
        setattr(parent, name, _quantized(layer, quantization, key))


def round_when_read(model: PreTrainedModel, quantization: Quantization, key: str) -> None:
    """Give the deferred weights the values that `quantize` would give them."""
    _bitsandbytes(key)
    for _, _, layer in _quantizable(model, key):
        change(layer.weight, partial(_rounded, quantization=quantization, key=key))


def require_quantizable(model: PreTrainedModel, quantization: Quantization, key: str, *, here: bool = True) -> None:
    """Raise what `quantize` would raise; without `here`, whatever is installed. The model needs no weights."""
    _quantizable(model, key)
    if here:
        # `nf4_double` needs blocks of similar size, as those of a model are.
        _rounded(torch.randn(BLOCK, BLOCK, generator=torch.Generator().manual_seed(0)), quantization, key)


@torch.no_grad()
def _rounded(values: Tensor, quantization: Quantization, key: str) -> Tensor:
    return _weight_of(_quantized(_linear(values, None), quantization, key))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)
    return layer


def _quantizable(model: PreTrainedModel, key: str) -> list[tuple[Any, str, nn.Linear]]:
    """(parent, name, layer) of every layer that can be quantized; raises ConfigError if there is none."""
    layers = [place for place in places(model.base_model, nn.Linear, FastLinear) if place[2].in_features % BLOCK == 0]
    if not layers:
        raise ConfigError(
            f"{key}: no layer of this {type(model).__name__} can be quantized, since none is a linear layer whose "
            f"inputs are a multiple of {BLOCK}. Remove it"
        )
    return layers


def _quantized(layer: nn.Linear, quantization: Quantization, key: str) -> nn.Module:
    read_deferred(layer)
    library = _bitsandbytes(key)
    # Under autocast the product is in bfloat16 all the same.
    quantized = _autocast_linear()(1, 1, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    quantized.in_features, quantized.out_features = layer.in_features, layer.out_features
    # Else a CPU with AVX512-BF16 repacks the weight in place outside of training: then layers below get no gradient,
    # and log-probabilities are off by 0.05.
    quantized.support_avx512bf16_for_cpu = False
    quantized.bias = layer.bias
    options = {"blocksize": BLOCK, "quant_type": "nf4", "compress_statistics": quantization == "nf4_double"}
    # A CPU rounds 30 million weights per second: minutes for 7 billion, at each start.
    device = torch.device("cuda") if torch.cuda.is_available() else layer.weight.device
    exact = layer.weight.detach().to(device)
    quantized.weight = library.nn.Params4bit(exact, requires_grad=False, module=quantized, **options).to(device)
    exact = exact.reshape(-1, BLOCK)
    error = (_weight_of(quantized).reshape(-1, BLOCK) - exact).abs().amax(1) / exact.abs().amax(1).clamp_min(1e-30)
    if not error.max() <= WIDEST_ERROR[quantization]:
        raise ConfigError(
            f"{key}: bitsandbytes {library.__version__} computes wrong weights on this {device.type} (an "
            f"error of {error.max():.2f}, at most {WIDEST_ERROR[quantization]} is possible). Remove it, or install "
            "another version"
        )
    quantized.weight = quantized.weight.to(layer.weight.device)
    return quantized.train(layer.training)


@functools.cache
def _autocast_linear() -> Any:
    """bitsandbytes' layer, whose result under autocast has the format of autocast, like that of a plain layer, and not
    that of its input: behind a norm activations would be float32, of twice the size."""
    from bitsandbytes import nn as layers

    class Linear4bit(layers.Linear4bit):
        def forward(self, x: Tensor) -> Tensor:
            device = x.device.type
            x = x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
            result: Tensor = super().forward(x)
            return result

    return Linear4bit


def use_inference_kernel(model: nn.Module, device: torch.device) -> None:
    """Let a model that is never trained compute with bitsandbytes' own product on a CPU with AVX512-BF16.

    It rounds the input to bfloat16, a tenth of the weights' own error, and takes half the time for one row. It repacks
    the weights at the first use, so they can no longer be merged.
    """
    if device.type == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16"):
        for _, _, layer in quantized_layers(model):
            if layer.out_features % KERNEL_BLOCK == 0:
                layer.support_avx512bf16_for_cpu, layer.compute_dtype = True, torch.bfloat16


@torch.no_grad()
def dequantize(model: nn.Module) -> None:
    """Replace quantized layers by plain ones with the weights that they computed with."""
    for parent, name, layer in quantized_layers(model):
        setattr(parent, name, _linear(_weight_of(layer), layer.bias).train(layer.training))


def _weight_of(layer: Any) -> Tensor:
    """The weight [out, in] that a quantized layer computes with."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight


@torch.no_grad()
def divisible(module: nn.Module) -> list[Any]:
    """Make the quantized weights of a module plain bytes, which can be sharded. Returns their layers.

    A layer keeps the scales of all blocks, an eighth of the bytes.
    """
    layers = [layer for _, _, layer in quantized_layers(module)]
    for layer in layers:
        layer.quant_state = layer.weight.quant_state
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tensor), requires_grad=False)
    return layers


def quiet_bitsandbytes() -> None:
    """Hide its warning of a kernel that it would fetch from the hub. Call it before an import of peft."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def _bitsandbytes(key: str) -> Any:
    quiet_bitsandbytes()
    return import_extra("bitsandbytes", "qlora", f"{key}:", ConfigError)


def quantized_layers(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """(parent, name, layer) of every layer of `_autocast_linear`."""
    return [place for place in places(model) if type(place[2]).__name__ == "Linear4bit"]


def places(model: nn.Module, *classes: type[nn.Module]) -> list[tuple[Any, str, Any]]:
    """(parent, name, module) of the modules of these classes, subclasses excluded; of all modules without classes."""
    every = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    return [place for place in every if not classes or type(place[2]) in classes]


# ------------------------------------------------------------------------------------------- 8 bits


class Int8Linear(nn.Module):
    """``x @ (weight * scale).T + bias``, weight [out, in] int8, scale [out, 1] float32."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, *, rounds: bool = False):
        """rounds: whether up to FEW_ROWS of input may be rounded to bfloat16. That needs a CPU."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.compute_dtype = torch.bfloat16 if rounds and self.in_features % INT8_BLOCK == 0 else None
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

    Deferred weights that are integers in their file stay so. Raises ConfigError, naming the option `key`, if the model
    has no linear layers.
    """
    layers = places(model.base_model, nn.Linear, FastLinear, Conv1D, FastConv1D)
    if not layers:
        raise ConfigError(f"{key}: this {type(model).__name__} has no linear layers. Remove the option")
    on_cpu = device.type == "cpu" and hasattr(torch, "_weight_int8pack_mm")
    while layers:  # a layer that is done is freed
        parent, name, layer = layers.pop()
        stored = take_integers(layer.weight)
        read_deferred(layer)
        setattr(parent, name, Int8Linear(*(stored or _integers(layer)), layer.bias, rounds=on_cpu))


def _integers(layer: Any) -> tuple[Tensor, Tensor]:
    weight: Tensor = layer.weight.detach().t() if isinstance(layer, Conv1D) else layer.weight.detach()
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scale).round().to(torch.int8).contiguous(), scale
