"""LoRA in a stage: its base is held in few bits, and gets adapters that can be saved as the config says."""

from __future__ import annotations

from typing import NoReturn

import torch
from transformers import AutoConfig, PreTrainedModel

from rlhf_cli.config.models import Lora
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.deferred import read_deferred
from rlhf_cli.models.frozen import hold_base, is_held
from rlhf_cli.models.origin import BaseModel
from rlhf_cli.models.shard import shards
from rlhf_cli.program import command
from rlhf_cli.run.artifacts import is_adapter


def prepare_base(model: PreTrainedModel, lora: Lora | None, key: str, config: Stage, device: torch.device) -> None:
    """`hold_base` as the config says, before the model moves to its device.

    Weights that will be sharded among processes are left as they are.
    """
    if lora is None or shards(config):
        return
    hold_base(model, lora, key, device, config.precision)


def defers_base(lora: Lora | None, config: Stage, device: torch.device) -> bool:
    """Whether `prepare_base` reads the weights that will be under adapters, because it holds them in fewer bits."""
    return lora is not None and not shards(config) and (lora.quantize is not None or is_held(device, config.precision))


def add_adapters(model: PreTrainedModel, lora: Lora | None, base: BaseModel, key: str, config: Stage) -> str | None:
    """`add_lora`, or None without `lora`. Raises what `require_loadable` raises."""
    if lora is None:
        return None
    from rlhf_cli.models.adapters import add_lora
    from rlhf_cli.models.quantized import quantize, quantized_layers

    require_loadable(model, lora, base, key)
    if lora.quantize is not None and not quantized_layers(model):
        quantize(model, lora.quantize, f"{key}.quantize")
    if lora.dora:
        read_deferred(model)  # its norms are those of the weights
    return add_lora(model, lora, key, seed=config.seed)


def require_loadable(model: PreTrainedModel, lora: Lora, base: BaseModel, key: str) -> None:
    """Raise ConfigError, naming the config `key`, if `save: adapter` would leave adapters that nothing can load.

    The model is `base` as the stage changed it. It needs no weights.
    """
    if lora.save == "adapter" and is_adapter(base.path):
        refuse_adapter_as_base(base.path, key)
    if lora.save == "adapter":
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
