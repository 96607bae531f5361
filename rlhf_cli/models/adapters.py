"""LoRA adapters inside a model (Hu et al. 2021, arXiv 2106.09685), by the library peft.

They are injected in place, so the model keeps its class and runs like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_cli.config.models import Lora
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.deferred import change
from rlhf_cli.models.quantized import dequantize, places, quiet_bitsandbytes
from rlhf_cli.program import import_extra
from rlhf_cli.seeding import seeded
from rlhf_cli.tensor_ops import num_weights


def add_lora(model: PreTrainedModel, config: Lora, key: str, *, seed: int) -> str:
    """Freeze the model and add adapters to its linear layers. Returns a line for the user.

    The head of a sequence classifier is trained without adapters. Raises what `require_targets` raises.
    """
    peft = require_targets(model, config, key)
    heads = head_names(model)
    lora = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        use_rslora=config.rslora,
        use_dora=config.dora,
        target_modules=config.target_modules or "all-linear",
        exclude_modules=[name for name, _ in model.named_modules() if name.split(".")[0] in heads] or None,
        task_type="SEQ_CLS" if heads else "CAUSAL_LM",
    )
    with seeded(seed, f"lora {key}"):
        try:
            inject(model, lora)
        except ValueError as error:
            raise ConfigError(f"{key}.target_modules: {str(error).splitlines()[0]}") from None
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{key}: {trained:,} of {sum(map(num_weights, model.parameters())):,} weights are trained"


def import_peft(what: str, error: type[Exception]) -> Any:
    quiet_bitsandbytes()
    return import_extra("peft", "lora", what, error)


def require_targets(model: PreTrainedModel, config: Lora, key: str) -> Any:
    """The package peft. Raises ConfigError, naming the config `key`, without it or for a target that is not linear."""
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{key}: is not offered for an encoder-decoder ({type(model).__name__}). Remove the key")
    peft = import_peft(f"{key}:", ConfigError)
    heads = head_names(model)
    layers = {name: layer for name, layer in model.named_modules() if name.split(".")[0] not in heads}
    linear = {name: layer for name, layer in layers.items() if isinstance(layer, torch.nn.Linear | Conv1D)}
    table = model.get_input_embeddings().weight
    names = sorted({name.split(".")[-1] for name, layer in linear.items() if layer.weight is not table})
    for target in config.target_modules or ():
        matched = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not matched:
            problem = "which is no layer"
        elif not all(name in linear for name in matched):
            problem = "which is not a linear layer"
        elif any(linear[name].weight is table for name in matched):
            problem = "whose weight is also that of the embeddings"
        else:
            continue
        raise ConfigError(
            f"{key}.target_modules: found {target}, {problem} of this {type(model).__name__}. Name some of its linear "
            f"layers ({', '.join(names)}), or remove the key to adapt all of them"
        )
    return peft


def inject(model: PreTrainedModel, lora: Any) -> None:
    """Add the adapters of a peft.LoraConfig in place, and freeze all other weights except a classifier's head."""
    import peft

    # GPT-2's layers are transposed. Without this, peft detects it and warns.
    lora.fan_in_fan_out = any(isinstance(module, Conv1D) for module in model.modules())
    # peft gives an adapter the number format of its layer, and adapters are trained in float32.
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    held = [(p, p.dtype) for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    for parameter, _ in held:
        parameter.data = parameter.data.float()
    peft.inject_adapter_in_model(lora, model)
    for parameter, dtype in held:
        parameter.data = parameter.data.to(dtype)
    if is_tied and any(layer.get_base_layer() is head for _, _, layer in _adapted(model)):
        raise ValueError("a target shares its weight with the embeddings, and merging would change both")
    heads = head_names(model)
    for name, parameter in model.named_parameters():
        if name.split(".")[0] in heads:
            parameter.requires_grad_(True)


def head_names(model: PreTrainedModel) -> list[str]:
    """The modules outside the backbone of a sequence classifier, such as `score`; [] for a language model."""
    if model.get_output_embeddings() is not None:
        return []
    children = model.named_children()
    return [name for name, module in children if module is not model.base_model and list(module.parameters())]


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether LoRA adapters were added to this model and not merged."""
    return any(".lora_" in name for name, _ in model.named_parameters())


def lora_of(model: PreTrainedModel) -> Any:
    """The peft.LoraConfig of a model with adapters."""
    configs: Any = model.peft_config
    return configs["default"]


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Within this context the model computes as before `add_lora`."""
    layers = [layer for _, _, layer in _adapted(model)]
    assert layers, "a model without adapters cannot be its own reference"
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merge_in_place(model: torch.nn.Module) -> None:
    """Add the adapters to the weights of the model and remove them. Quantized weights are dequantized first: peft would
    round the sum to 4 bits again, which is up to 1.1 nats off."""
    dequantize(model)
    model.float()  # what `hold_frozen` rounded: a sum in bfloat16 would lose most of the adapters
    for parent, name, layer in _adapted(model):
        layer.merge()
        setattr(parent, name, layer.get_base_layer())
    vars(model).pop("peft_config", None)


@torch.no_grad()
def merge_when_read(model: torch.nn.Module) -> None:
    """`merge_in_place` for a model with deferred weights: a weight gets its adapter when it is read."""
    for parent, name, layer in _adapted(model):
        base = layer.get_base_layer()
        setattr(parent, name, base)
        # The copy has the adapter and no weight of the base.
        memo = {id(weight): torch.nn.Parameter(torch.empty(0)) for weight in base.parameters()}
        change(base.weight, partial(_with_adapter, copy.deepcopy(layer, memo)))
    vars(model).pop("peft_config", None)


@torch.no_grad()
def _with_adapter(layer: Any, weight: Tensor) -> Tensor:
    """A weight with the adapter of this layer added. The layer does not keep it."""
    base = layer.get_base_layer()
    base.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.merge()
    merged: Tensor = base.weight.data
    base.weight = torch.nn.Parameter(torch.empty(0))
    layer.merged_adapters.clear()
    return merged


def is_adapted(layer: torch.nn.Module) -> bool:
    return type(layer).__module__.startswith("peft.tuners.lora") and "base_layer" in dict(layer.named_children())


def _adapted(model: torch.nn.Module) -> list[tuple[Any, str, Any]]:
    """(parent, name, layer) of every layer with an adapter."""
    return [place for place in places(model) if is_adapted(place[2])]
