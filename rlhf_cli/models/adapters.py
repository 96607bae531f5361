"""LoRA adapters inside a model (Hu et al. 2021, arXiv 2106.09685), by the library peft.

Adapters are injected in place, so the model keeps its class and runs like any other. When it is saved, they are merged
into plain weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_cli.config.models import Lora
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.heads import scalar_heads
from rlhf_cli.program import install_extra
from rlhf_cli.seeding import seeded


def add_lora(model: PreTrainedModel, config: Lora, key: str, *, seed: int) -> str:
    """Freeze the model and add adapters to its linear layers. Their initial contribution is zero.

    The heads of a sequence classifier stay trainable without adapters. Returns a line for the user. Raises ConfigError,
    naming the config `key`, if peft is not installed or no layer has one of the names.
    """
    try:
        import peft
    except ImportError:
        install = install_extra("lora", "peft")
        raise ConfigError(f"{key}: needs the package peft (extra lora). Install it: {install}") from None
    heads = {id(head) for head in scalar_heads(model)}
    lora = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=config.target_modules or "all-linear",
        # A head is trained without an adapter; "all-linear" would wrap it.
        exclude_modules=[name for name, module in model.named_modules() if id(module) in heads] or None,
        # GPT-2's layers are transposed. Without this, peft detects it and warns.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    with seeded(seed, f"lora {key}"):
        try:
            peft.inject_adapter_in_model(lora, model)
        except ValueError as error:
            raise ConfigError(f"{key}.target_modules: {str(error).splitlines()[0]}") from None
    for head in scalar_heads(model):
        head.requires_grad_(True)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{key}: {trained:,} of {sum(p.numel() for p in model.parameters()):,} weights are trained"


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Within this context the model computes as before `add_lora`."""
    layers = [layer for _, _, layer in _adapted(model)]
    assert layers, "a model without adapters cannot be its own reference"
    were_off = [layer.disable_adapters for layer in layers]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer, was_off in zip(layers, were_off, strict=True):
            layer.enable_adapters(not was_off)


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model with the adapters merged into plain weights; the model itself if it has none."""
    if not _adapted(model):
        return model
    plain = copy.deepcopy(model)
    for parent, name, layer in _adapted(plain):
        layer.merge()
        setattr(parent, name, layer.get_base_layer())
    return plain


def _adapted(model: PreTrainedModel) -> list[tuple[Any, str, Any]]:
    """(parent, name, layer) of every layer with an adapter."""
    found = []
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child).__module__.startswith("peft.tuners.lora") and "base_layer" in dict(child.named_children()):
                found.append((parent, name, child))
    return found
