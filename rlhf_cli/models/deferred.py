"""Deferred weights: a model is built without memory for them, and each is read from its file when it is needed.

Models that are sharded, or held in few bits, would not fit into memory in float32. A deferred weight is one NaN,
repeated by a stride of 0, so that code which reads it too early fails visibly. Adapters are added when it is read
(`change`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rlhf_cli.errors import ArtifactError

DTYPES = {"F64", "F32", "F16", "BF16"}
"""The number formats of weights that can be deferred, as safetensors names them."""
BLOCK = 64
"""Weights in 4 bits that share a scale. Layers whose rows are not a multiple of it stay as they are: bitsandbytes
0.50.2 dequantizes them on a CPU with the scales of other blocks."""
INTEGERS, SCALES, ZERO_POINTS = "._weight_qdata", "._weight_scale", "._weight_zero_point"
"""torchao's 8-bit tensors, behind their layer's name. Our zero points are 0."""


@dataclass(frozen=True)
class StoredWeight:
    """Where a deferred weight is."""

    file: str
    name: str
    scale: StoredWeight | None = None  # of its rows, if the file has 8-bit integers: torchao's format of `rlhf export`
    changes: tuple[Callable[[Tensor], Tensor], ...] = ()  # turn the tensor of the file, in float32, into the weight

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        """`count` rows from `first` on, as float32. Only these are read, unless the weight is changed."""
        return self.as_stored(first, count).float()

    def as_stored(self, first: int = 0, count: int | None = None) -> Tensor:
        """The same rows in the number format of the file; integers and a changed weight as float32."""
        end = None if count is None else first + count
        if self.changes:
            values = replace(self, changes=()).read()
            for function in self.changes:
                values = function(values)
            return values[first:end]
        with safe_open(self.file, framework="pt") as file:
            rows = file.get_slice(self.name)
            if count == 0:
                return torch.empty(0, *rows.get_shape()[1:])
            tensor: Tensor = rows[first:end]
        return tensor if self.scale is None else tensor.float() * self.scale.read(first, count)


_places: Any = WeakTensorKeyDictionary()
"""The place of each deferred weight."""


def place_of(weight: Tensor) -> StoredWeight | None:
    place: StoredWeight | None = _places.get(weight)
    return place


def is_deferred(model: nn.Module) -> bool:
    """Whether a weight of the model is not in memory yet."""
    return any(weight in _places for weight in model.parameters())


@torch.no_grad()
def read_deferred(module: nn.Module) -> None:
    """Read the deferred weights of a module. Raises ArtifactError for one that is not finite."""
    for weight in module.parameters():
        if place_of(weight) is not None:
            weight.data = take(weight).float()


def take(weight: Tensor) -> Tensor:
    """The values of a weight. If it is deferred, assign them to it; raises ArtifactError if they are not finite."""
    place: StoredWeight | None = _places.pop(weight, None)
    if place is None:
        return weight.data
    values = place.as_stored()
    if not is_finite(values):
        raise not_finite(f"{place.file}: weight {place.name} contains NaN or inf")
    return values


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite. A sum is fast, and finite only if all values are."""
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())


def not_finite(found: str) -> ArtifactError:
    """The error for a weight that is not finite."""
    return ArtifactError(f"{found}, so no training step can be computed from it. Give a model whose weights are finite")


def take_integers(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """`take` for a weight that is stored as integers: [out, in] int8 and the scales of its rows; None for others."""
    place = place_of(weight)
    if place is None or place.scale is None or place.changes:
        return None
    del _places[weight]
    weight.data = weight.new_empty(0)
    return replace(place, scale=None).as_stored(), place.scale.read()


def change(weight: Tensor, function: Callable[[Tensor], Tensor]) -> None:
    """Let a deferred weight be `function` of what it would have been, in float32."""
    place: StoredWeight = _places[weight]
    _places[weight] = replace(place, changes=(*place.changes, function))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of the model: the members of its outermost lists of modules, each once."""
    found: dict[int, nn.Module] = {}
    for child in model.children():
        members = list(child) if isinstance(child, nn.ModuleList) else blocks(child)
        found |= {id(member): member for member in members}
    return list(found.values())


def load_deferred(
    kind: Any, path: str, revision: str | None, config: PreTrainedConfig
) -> tuple[PreTrainedModel, dict[str, Any]] | None:
    """A model of the class `kind` whose weights are deferred, and transformers' report of the loading.

    None if the files have other tensors than the model's weights, such as several that transformers joins.
    """
    places = _places_in(path, revision)
    if places is None:
        return None
    given = {name: torch.full((), math.nan).expand(shape) for name, (_, shape) in places.items()}
    found = {tensor.untyped_storage().data_ptr(): places[name][0] for name, tensor in given.items()}
    model, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(given),
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    if head is not None and config.get_text_config().tie_word_embeddings and not is_tied:
        return None
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        place = found.get(tensor.untyped_storage().data_ptr())
        if place is not None and isinstance(tensor, nn.Parameter):
            _places[tensor] = place
        elif place is not None:
            tensor.data = place.read()
        elif name not in info["missing_keys"] and not torch.isfinite(tensor).all():
            return None
    model.name_or_path = path
    with contextlib.suppress(OSError):  # a model may have none
        model.generation_config = GenerationConfig.from_pretrained(path, revision=revision or "main")
    return model, info


def _places_in(path: str, revision: str | None) -> dict[str, tuple[StoredWeight, list[int]]] | None:
    """The place and the shape of each tensor in the files of a model; None if one has another number format."""
    options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    names = [SAFE_WEIGHTS_NAME]
    if cached_file(path, SAFE_WEIGHTS_NAME, **options) is None:
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **options)
        if index is None:
            return None
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    files = [cached_file(path, name, revision=revision) or name for name in names]
    places = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                rows = opened.get_slice(name)
                if not rows.get_shape() or rows.get_dtype() not in {*DTYPES, "I8"}:
                    return None
                places[name] = (StoredWeight(file, name), rows.get_shape())
                if rows.get_dtype() == "I8" and not name.endswith((INTEGERS, ZERO_POINTS)):
                    return None
                if name.endswith(ZERO_POINTS) and opened.get_tensor(name).any():
                    return None
    for name in [name for name in places if name.endswith(INTEGERS)]:
        layer = name.removesuffix(INTEGERS)
        place, shape = places.pop(name)
        scale, _ = places.pop(layer + SCALES)
        places.pop(layer + ZERO_POINTS, None)
        places[f"{layer}.weight"] = (replace(place, scale=scale), shape)
    return places or None
