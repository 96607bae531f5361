"""Write a model as a plain Hugging Face directory: whole or sharded among processes, with adapters merged or apart."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from rlhf_cli.config.models import Lora
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import ArtifactError
from rlhf_cli.models.adapter_files import BaseModel, save_adapter
from rlhf_cli.models.adapters import has_adapters, merge_in_place
from rlhf_cli.models.forward import PRECISIONS
from rlhf_cli.models.heads import scalar_heads, value_model_like
from rlhf_cli.processes.sharding import LARGEST_FILE, is_first_process, is_sharded, plain_class, whole
from rlhf_cli.run.artifacts import MODEL_CONFIG, is_adapter, model_directory, writing
from rlhf_cli.tensor_ops import num_weights, weight_shape

PlainWeights = dict[str, tuple[torch.Size, Callable[[], Tensor]]]  # of each weight its shape, and a function to read it


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    dtype: str | None = None,
    *,
    max_shard_size: int | str = "50GB",
    value_head: nn.Linear | None = None,
) -> None:
    """Write safetensors, config, tokenizer and generation config. Adapters are merged into their layer's weight.

    The weights are written as the model holds them, or as `dtype`; then scalar heads are float32: 16 bits would round
    away the differences between scores. With `value_head`, which every process has whole, a sequence classifier is
    written that has the backbone of the model and this head.

    All processes must call this for a sharded model; the first one writes, and holds no more than one file of it.
    Raises ArtifactError, on every process, if a file cannot be written.
    """
    shards, problem = is_sharded(model), ""
    is_writer = not shards or is_first_process()

    def attempt(write: Callable[[], object]) -> None:
        nonlocal problem  # the other processes must be told before this one stops
        try:
            if is_writer and not problem:
                with writing(directory):
                    write()
        except ArtifactError as error:
            problem = str(error)

    weights = plain_weights(model)
    if value_head is not None:
        model, weights = _with_value_head(model, weights, value_head)
    dtypes = _dtypes(model, weights, dtype)
    shapes = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, (shape, _) in weights.items()}
    files = split_torch_state_dict_into_shards(shapes, max_shard_size=LARGEST_FILE if shards else max_shard_size)
    index = dict[str, str]()
    attempt(lambda: directory.mkdir(parents=True, exist_ok=True))
    for file, names in files.filename_to_tensors.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensor = weights[name][1]()  # on every process, since all send their rows
            if is_writer:
                tensors[name] = tensor.to("cpu", dtypes[name]).contiguous()
        # Some families have other names in files than in memory.
        tensors = revert_weight_conversion(model, tensors) if is_writer else tensors
        index |= dict.fromkeys(tensors, file)
        attempt(partial(save_file, tensors, directory / file, metadata={"format": "pt"}))
    if files.is_sharded:
        number = sum(num_weights(weight) for name, weight in model.named_parameters() if ".lora_" not in name)
        total = {"total_parameters": number, **files.metadata}
        path, text = directory / SAFE_WEIGHTS_INDEX_NAME, _json({"metadata": total, "weight_map": index})
        attempt(partial(path.write_text, text, encoding="utf-8"))
    attempt(partial(_write_configs, model, tokenizer, directory, dtype))
    if shards:
        problems = [problem]
        dist.broadcast_object_list(problems, src=0)
        problem = problems[0]
    if problem:
        raise ArtifactError(problem)


def plain_weights(model: PreTrainedModel) -> PlainWeights:
    """The weights as a model without adapters has them. All processes must call the functions for a sharded model."""
    found: PlainWeights = {}
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            continue
        plain_name = name.replace("base_layer.", "")  # experts have one layer of adapters for each of their weights
        read = partial(whole, weight.detach())
        if not weight.is_floating_point() or (plain_name != name and weight.ndim > 1):  # a bias has no adapter
            layer = name.partition(".base_layer.")[0] if plain_name != name else name.removesuffix(".weight")
            read = partial(_merged, model.get_submodule(layer), plain_name.removeprefix(f"{layer}."))
        found[plain_name] = weight_shape(weight), read
    kept = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in kept:
            found[name] = buffer.shape, partial(whole, buffer)
    return found


def _dtypes(model: PreTrainedModel, names: Mapping[str, object], dtype: str | None) -> dict[str, torch.dtype]:
    """The number format in which each weight is written. Buffers keep theirs; merged weights are float32."""
    held = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
    buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
    if dtype is not None:
        heads = scalar_heads(model)
        held = {name: torch.float32 if name.rpartition(".")[0] in heads else PRECISIONS[dtype] for name in names}
    return {name: buffers.get(name) or held.get(name, torch.float32) for name in names}


def _with_value_head(
    policy: PreTrainedModel, weights: PlainWeights, head: nn.Linear
) -> tuple[PreTrainedModel, PlainWeights]:
    """A sequence classifier without memory for its weights, and what `plain_weights` would give for it."""
    model = value_model_like(policy)
    before, after = (f"{one.base_model_prefix}." for one in (policy, model))
    found = {after + n.removeprefix(before): weight for n, weight in weights.items() if n.startswith(before)}
    (name,) = scalar_heads(model)
    return model, found | {f"{name}.{key}": (p.shape, partial(whole, p.detach())) for key, p in head.named_parameters()}


@torch.no_grad()
def _merged(layer: Any, name: str) -> Tensor:
    """The weight of a layer with this name, dequantized, and with its adapters added."""
    weights: dict[int, Any] = {}
    for weight in layer.parameters():  # the copy gets whole weights, which merging may change
        weights[id(weight)] = nn.Parameter(whole(weight).detach().clone(), requires_grad=False)
        vars(weights[id(weight)]).update(vars(weight))
    holder: Any = nn.ModuleDict({"layer": copy.deepcopy(layer, weights)})
    merge_in_place(holder)
    merged: Tensor = holder["layer"].get_parameter(name).detach().float()
    return merged


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _write_configs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path, dtype: str | None
) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = dtype or str(model.dtype).removeprefix("torch.")
    config.architectures = [plain_class(model).__name__]
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def save_facts(facts: dict[str, Any], directory: Path) -> None:
    """Add keys to the config.json of a saved model."""
    path = directory / (MODEL_CONFIG if is_adapter(directory) else "config.json")
    with writing(path):
        config = json.loads(path.read_text(encoding="utf-8")) | facts
        path.unlink()  # a checkpoint may have the file by another name
        path.write_text(_json(config), encoding="utf-8")


def base_of(config: Stage) -> BaseModel:
    """The model that the trained model of a stage starts from."""
    model = config.trained[1]
    return BaseModel(model_directory(config.stage_model(model.path, "sft")), model.revision)


def saved_dtype(config: Stage, base: BaseModel | None) -> str:
    """The number format in which a model that started from `base` is saved."""
    if config.save_dtype != "auto":
        return config.save_dtype
    is_new = isinstance(config, SFTConfig) and config.model.scratch is not None
    return "bfloat16" if base is not None and not is_new and base.dtype() == "bfloat16" else "float32"


def save_trained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    config: Stage,
    lora: Lora | None,
    base: BaseModel,
) -> None:
    """Write a trained model that started from `base`, as `lora.save` says."""
    if lora is None or lora.save == "merged":
        save(model, tokenizer, directory, saved_dtype(config, base))
        if lora is not None:
            save_adapter(model, directory / "adapter", base, lora.quantize)
        return
    save_adapter(model, directory, base, lora.quantize)
    if is_sharded(model) and not is_first_process():
        return
    with writing(directory):
        tokenizer.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)


@torch.no_grad()
def round_weights(model: PreTrainedModel, config: Stage, base: BaseModel | None) -> None:
    """Round the weights to the format in which they will be saved, so that all figures are those of the saved model."""
    if has_adapters(model):
        return
    heads, dtype = scalar_heads(model), PRECISIONS[saved_dtype(config, base)]
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] not in heads and parameter.is_floating_point():
            parameter.copy_(parameter.to(dtype))
