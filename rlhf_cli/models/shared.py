"""One backbone in memory for several models: each has its own adapters and head, all share the frozen weights.

A model is a tree of modules that name tensors. Sharing copies the tree and not the tensors. So every model stays a
plain model, and no adapter is switched on or off between two passes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_cli.config.models import Lora, Quantization
from rlhf_cli.errors import ArtifactError
from rlhf_cli.models.adapter_files import attach, read_adapter
from rlhf_cli.models.adapters import adapted_layers, lora_of
from rlhf_cli.models.heads import value_model_like
from rlhf_cli.models.load import take_facts
from rlhf_cli.models.origin import BaseModel


@dataclass(frozen=True)
class Backbone:
    """A language model, after `hold_base`, whose weights other models share. Its weights must stay frozen."""

    model: PreTrainedModel
    base: BaseModel
    """Where its weights come from."""
    quantization: Quantization | None = None
    """How they are quantized."""

    def classifier(self) -> PreTrainedModel | None:
        """A sequence classifier with one label on this backbone, whose head is zero.

        None if transformers has none with the same backbone.
        """
        try:
            model = value_model_like(self.model)
        except ArtifactError:
            return None
        # What the memo has is not copied: the tensors stay the same objects, and the modules get the new config.
        backbone = self.model.base_model
        kept = [*backbone.parameters(), *backbone.buffers()]
        memo = {id(tensor): tensor for tensor in kept} | {id(self.model.config): model.config}
        setattr(model, model.base_model_prefix, copy.deepcopy(backbone, memo))
        head = model.score
        assert isinstance(head, torch.nn.Linear)
        head.to_empty(device=kept[0].device)
        torch.nn.init.zeros_(head.weight)
        if head.bias is not None:
            torch.nn.init.zeros_(head.bias)
        return model.eval()

    def reward_model(self, path: str) -> PreTrainedModel | None:
        """The reward model at `path`, frozen, if it is a directory of adapters on this backbone; else None."""
        adapter = read_adapter(path)
        if adapter is None or not adapter.head or adapter.num_labels != 1:
            return None
        if adapter.quantization != self.quantization:
            return None
        if adapter.base.digest() != self.base.digest() or (model := self.classifier()) is None:
            return None
        attach(model, adapter, with_head=True)
        take_facts(model, adapter)
        return model.requires_grad_(False)


def has_adapters_of(model: PreTrainedModel, lora: Lora) -> bool:
    """Whether the adapters of a model are those that `lora` would add, so that their weights fit."""
    ours = lora_of(model)
    layers = {
        name.removesuffix(".base_layer")
        for name, module in model.base_model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and ".lora_" not in name
    }
    if lora.target_modules is not None:
        layers = {name for name in layers if name.split(".")[-1] in lora.target_modules}
    return (
        (ours.r, ours.lora_alpha, ours.use_rslora, ours.use_dora) == (lora.r, lora.alpha, lora.rslora, lora.dora)
        and not (ours.rank_pattern or ours.alpha_pattern)
        and adapted_layers(model.base_model) == layers
    )


@torch.no_grad()
def copy_adapters(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy the values of `source`'s adapters into `target`'s."""
    values = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if ".lora_" in name:
            parameter.copy_(values[name])
