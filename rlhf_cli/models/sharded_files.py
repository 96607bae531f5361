"""Write a sharded model as a plain Hugging Face directory. No process ever holds more than one file of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
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

from rlhf_cli.errors import ArtifactError
from rlhf_cli.models.adapters import adapted_layers, merge_in_place
from rlhf_cli.models.conversion import head_layers
from rlhf_cli.models.forward import PRECISIONS
from rlhf_cli.models.heads import value_model_like
from rlhf_cli.models.nf4 import quantized_shape
from rlhf_cli.sharding import plain_class, whole
from rlhf_cli.tensor_ops import num_weights

LARGEST_FILE = 2_000_000_000
"""The most bytes of weights in one file. The first process holds this much while it writes."""


def save_sharded(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    dtype: str = "float32",
    *,
    value_head: nn.Linear | None = None,
) -> None:
    """Write a sharded model, with adapters merged into its weights. All processes must call this; the first one writes.

    The weights are written as `dtype`, and scalar heads as float32. With `value_head`, which every process has whole, a
    sequence classifier is written that has the backbone of the model and this head.

    Raises ArtifactError on every process if a file cannot be written.
    """
    is_first = dist.get_rank() == 0
    weights = plain_weights(model)
    if value_head is not None:
        model, weights = _with_value_head(model, weights, value_head)
    heads = head_layers(model)
    dtypes = {n: torch.float32 if n.rpartition(".")[0] in heads else PRECISIONS[dtype] for n in weights}
    shapes = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, (shape, _) in weights.items()}
    files = split_torch_state_dict_into_shards(shapes, max_shard_size=LARGEST_FILE)
    problem, index = "", dict[str, str]()
    for file, names in files.filename_to_tensors.items():
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensor = weights[name][1]().cpu()  # on every process, since all send their rows
            if is_first:
                tensors[name] = tensor.to(dtypes[name]).contiguous()
        if is_first and not problem:
            # Some families have other names in files than in memory.
            tensors = revert_weight_conversion(model, tensors)
            index |= dict.fromkeys(tensors, file)
            problem = _attempt(partial(_write, tensors, directory, file))
    if is_first and not problem and files.is_sharded:
        total = {"total_parameters": sum(map(num_weights, model.parameters())), **files.metadata}
        problem = _attempt(partial(_write_index, {"metadata": total, "weight_map": index}, directory))
    if is_first and not problem:
        problem = _attempt(partial(_write_configs, model, tokenizer, directory, dtype))
    problems = [problem]
    dist.broadcast_object_list(problems, src=0)
    if problems[0]:
        raise ArtifactError(f"{directory}: cannot be written ({problems[0]}). Make room")


def plain_weights(model: PreTrainedModel) -> dict[str, tuple[torch.Size, Callable[[], Tensor]]]:
    """The shape of each weight as a model without adapters has it, and a function that gathers it on every process.

    Weights with several names have one entry, under the first of them, as in the files of transformers.
    """
    found: dict[str, tuple[torch.Size, Callable[[], Tensor]]] = {}
    adapted = adapted_layers(model)
    for name, weight in model.named_parameters():
        layer = name.removesuffix(".base_layer.weight")
        shape = quantized_shape(weight)
        if layer in adapted:
            found[f"{layer}.weight"] = shape, partial(_merged, model.get_submodule(layer))
        elif not weight.is_floating_point():
            found[name] = shape, partial(_merged, model.get_submodule(name.removesuffix(".weight")))
        elif ".lora_" not in name:
            found[name.replace(".base_layer.", ".")] = shape, partial(_gathered, weight)
    kept = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in kept:
            found[name] = buffer.shape, partial(_gathered, buffer)
    return found


def _with_value_head(
    policy: PreTrainedModel, weights: dict[str, tuple[torch.Size, Callable[[], Tensor]]], head: nn.Linear
) -> tuple[PreTrainedModel, dict[str, tuple[torch.Size, Callable[[], Tensor]]]]:
    """A sequence classifier without memory for its weights, and what `plain_weights` would give for it."""
    with torch.device("meta"):
        model = value_model_like(policy)
    before, after = (f"{one.base_model_prefix}." for one in (policy, model))
    found = {after + n.removeprefix(before): weight for n, weight in weights.items() if n.startswith(before)}
    (name,) = head_layers(model)
    return model, found | {f"{name}.{key}": (p.shape, partial(_gathered, p)) for key, p in head.named_parameters()}


def _gathered(weight: Tensor) -> Tensor:
    return whole(weight.detach()).float()


@torch.no_grad()
def _merged(layer: Any) -> Tensor:
    """The weight of a layer, dequantized, and with its adapters added."""
    # The copy gets whole weights in the place of the sharded ones. They are cloned: `whole` returns an undivided weight
    # itself, and merging writes into it.
    weights: dict[int, Any] = {}
    for weight in layer.parameters():
        weights[id(weight)] = nn.Parameter(whole(weight).detach().clone(), requires_grad=False)
        vars(weights[id(weight)]).update(vars(weight))
    holder: Any = nn.ModuleDict({"layer": copy.deepcopy(layer, weights)})
    merge_in_place(holder)
    merged: Tensor = holder["layer"].weight.detach().float()
    return merged


def _write(tensors: dict[str, Tensor], directory: Path, file: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / file, metadata={"format": "pt"})


def _write_index(index: dict[str, Any], directory: Path) -> None:
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def _write_configs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path, dtype: str) -> None:
    """Everything but the weights, as transformers writes it."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [plain_class(model).__name__]
    config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _attempt(write: Callable[[], None]) -> str:
    """Why writing fails, "" if it does not. The other processes must be told before this one stops."""
    try:
        write()
    except Exception as error:  # safetensors and tokenizers write from Rust and raise errors of their own.
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""
