"""LoRA in a stage: a base held in few bits under adapters, and one backbone in memory for several models.

Each of those has its own tree of modules, adapters and head, and all name the same frozen tensors. So every model stays
a plain model, and no adapter is switched on or off between two passes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NoReturn

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_cli.config.models import Lora, Quantization
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.models.adapter_files import BaseModel, attach, read_adapter
from rlhf_cli.models.adapters import add_lora, is_adapted, lora_of
from rlhf_cli.models.deferred import read_deferred
from rlhf_cli.models.frozen import hold_base, is_held
from rlhf_cli.models.heads import start_head, value_model_like
from rlhf_cli.models.load import take_facts
from rlhf_cli.models.quantized import quantize, quantized_layers
from rlhf_cli.models.shard import shards
from rlhf_cli.program import command
from rlhf_cli.run.artifacts import is_adapter


def prepare_base(model: PreTrainedModel, lora: Lora | None, key: str, config: Stage, device: torch.device) -> None:
    """`hold_base` as the config says, before the model moves to its device. Weights to be sharded stay as they are."""
    if lora is not None and not shards(config):
        hold_base(model, lora, key, device, config.precision)


def defers_base(lora: Lora | None, config: Stage, device: torch.device) -> bool:
    """Whether `prepare_base` reads the weights: it holds them in fewer bits."""
    return lora is not None and not shards(config) and (lora.quantize is not None or is_held(device, config.precision))


def add_adapters(model: PreTrainedModel, lora: Lora | None, base: BaseModel, key: str, config: Stage) -> str | None:
    """`add_lora`, or None without `lora`. Raises what `require_loadable` raises."""
    if lora is None:
        return None
    require_loadable(model, lora, base, key)
    if lora.quantize is not None and not quantized_layers(model):
        quantize(model, lora.quantize, f"{key}.quantize")
    if lora.dora:
        read_deferred(model)  # its norms are those of the weights
    return add_lora(model, lora, key, seed=config.seed)


def require_loadable(model: PreTrainedModel, lora: Lora, base: BaseModel, key: str) -> None:
    """Raise ConfigError, naming the config `key`, if nothing could load the adapters of `save: adapter`.

    The model, which needs no weights, is `base` as the stage changed it.
    """
    if lora.save == "adapter":
        if is_adapter(base.path):
            refuse_adapter_as_base(base.path, key)
        rows = AutoConfig.from_pretrained(base.path, revision=base.revision).get_text_config().vocab_size
        if rows != model.config.get_text_config().vocab_size:
            raise ConfigError(
                f"{key}.save: adapter: {base.path} has no padding token, so the model gets an embedding that its base "
                "lacks. Set save: merged"
            )


def refuse_adapter_as_base(path: str, key: str) -> NoReturn:
    """Raise ConfigError: adapters on the adapters at `path` cannot be saved alone."""
    raise ConfigError(
        f"{key}.save: adapter needs a base of plain weights, and {path} is an adapter itself. Merge it "
        f"({command('merge', path, f'{path}-merged')}) and start from the result, or set save: merged"
    )


@dataclass(frozen=True)
class Backbone:
    """A language model, after `hold_base`, whose frozen weights other models share."""

    model: PreTrainedModel
    base: BaseModel  # where its weights come from
    quantization: Quantization | None = None

    def classifier(self) -> PreTrainedModel | None:
        """A sequence classifier with one label and a head of zeros on this backbone; None if transformers has none."""
        try:
            model = value_model_like(self.model)
        except ArtifactError:
            return None
        backbone = self.model.base_model
        kept = [*backbone.parameters(), *backbone.buffers()]
        # What the memo has is not copied: the tensors stay the same objects, and the modules get the new config.
        memo = {id(tensor): tensor for tensor in kept} | {id(self.model.config): model.config}
        setattr(model, model.base_model_prefix, copy.deepcopy(backbone, memo))
        head = model.score
        assert isinstance(head, torch.nn.Linear)
        head.to_empty(device=kept[0].device)
        start_head(head)
        return model.eval()

    def reward_model(self, path: str) -> PreTrainedModel | None:
        """The reward model at `path`, frozen, if it is a directory of adapters on this backbone; else None."""
        adapter = read_adapter(path)
        if adapter is None or not adapter.head or adapter.num_labels != 1 or adapter.quantization != self.quantization:
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
        and {name for name, module in model.base_model.named_modules() if is_adapted(module)} == layers
    )


@torch.no_grad()
def copy_adapters(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy the values of `source`'s adapters into `target`'s."""
    values = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if ".lora_" in name:
            parameter.copy_(values[name])
