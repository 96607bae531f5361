"""Adapters of a stage from its config, and how the trained model is written: plain weights or adapters."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.artifacts import is_adapter, model_directory
from rlhf_cli.config.models import Lora
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.models.adapter_files import BaseModel, save_adapter
from rlhf_cli.models.adapters import add_lora, merged
from rlhf_cli.models.conversion import round_weights
from rlhf_cli.models.deferred import read_deferred
from rlhf_cli.models.frozen import hold_base, is_held
from rlhf_cli.models.load import save
from rlhf_cli.models.nf4 import quantize, quantized_layers
from rlhf_cli.models.shard import divides
from rlhf_cli.program import command
from rlhf_cli.sharding import is_first_process, is_sharded


def prepare_base(model: PreTrainedModel, lora: Lora | None, key: str, config: Stage, device: torch.device) -> None:
    """`hold_base` as the config says, before the model moves to its device.

    Weights that will be divided among processes are left as they are.
    """
    if lora is None or divides(config):
        return
    hold_base(model, lora, key, device, config.precision)


def defers_base(lora: Lora | None, config: Stage, device: torch.device) -> bool:
    """Whether `prepare_base` reads the weights that will be under adapters, because it holds them in fewer bits."""
    return lora is not None and not divides(config) and (lora.quantize is not None or is_held(device, config.precision))


def train_adapters(model: PreTrainedModel, config: SFTConfig | RMConfig) -> str | None:
    """Add the adapters of `model.lora`; returns a line for the user, or None without that key."""
    return add_adapters(model, config.model.lora, _base_of(config), "model.lora", config)


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


def save_of_stage(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path, config: SFTConfig | RMConfig
) -> None:
    """`save_trained` for the model of an SFT or RM stage."""
    save_trained(model, tokenizer, directory, config.model.lora, _base_of(config), _dtype_of_stage(config))


def round_as_saved(model: PreTrainedModel, config: SFTConfig | RMConfig) -> None:
    """`round_weights` for the model of an SFT or RM stage."""
    round_weights(model, _dtype_of_stage(config))


def _dtype_of_stage(config: SFTConfig | RMConfig) -> str:
    if isinstance(config, SFTConfig) and config.model.scratch is not None:
        return saved_dtype(config, None)
    return saved_dtype(config, _base_of(config))


def saved_dtype(config: Stage, base: BaseModel | None) -> str:
    """The number format in which a model is saved that started from `base`, or from random weights without it."""
    if config.save_dtype != "auto":
        return config.save_dtype
    return "bfloat16" if base is not None and base.dtype() == "bfloat16" else "float32"


def save_trained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    lora: Lora | None,
    base: BaseModel,
    dtype: str,
) -> None:
    """Write a trained model as `lora.save` says. Without `lora` it is a plain Hugging Face directory.

    Plain weights are written as `dtype`, and adapters as float32.
    """
    if lora is None or lora.save == "merged":
        save(model if is_sharded(model) else merged(model), tokenizer, directory, dtype)
        if lora is not None:
            save_adapter(model, directory / "adapter", base, lora.quantize)
        return
    save_adapter(model, directory, base, lora.quantize)
    if is_sharded(model) and not is_first_process():
        return
    try:
        tokenizer.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
    except OSError as error:
        raise ArtifactError(f"{directory}: cannot be written ({error.strerror or error}). Make room") from None


def _base_of(config: SFTConfig | RMConfig) -> BaseModel:
    path = config.model.path if config.model.path is not None else f"{config.artifacts}/sft"
    return BaseModel(model_directory(path), config.model.revision)
