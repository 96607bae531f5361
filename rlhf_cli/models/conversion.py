"""The number format in which a stage saves its model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rlhf_cli.errors import ArtifactError
from rlhf_cli.models.adapters import has_adapters
from rlhf_cli.models.forward import PRECISIONS
from rlhf_cli.models.heads import scalar_heads


def converted(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor] | None:
    """The model's state on the CPU in another number format; None if the model holds it already.

    Scalar heads are float32: 16 bits would round away the differences between scores. Weights that share memory share
    it in the result.
    """
    heads = head_layers(model)
    weights = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.is_floating_point()}
    wanted = {name: torch.float32 if name.rpartition(".")[0] in heads else dtype for name in weights}
    if all(weight.dtype == wanted[name] for name, weight in weights.items()):
        return None
    known: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = model.state_dict()
    for name, weight in weights.items():
        if id(weight) not in known:
            known[id(weight)] = weight.detach().to("cpu", wanted[name])
        state[name] = known[id(weight)]
    return state


@torch.no_grad()
def round_weights(model: PreTrainedModel, dtype: str) -> None:
    """Round the weights to the format in which they will be saved, so that all figures are those of the saved model.

    Does nothing to a model with adapters.
    """
    if has_adapters(model):
        return
    heads = head_layers(model)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0] not in heads and parameter.is_floating_point():
            parameter.copy_(parameter.to(PRECISIONS[dtype]))


def head_layers(model: PreTrainedModel) -> set[str]:
    """The names of the scalar heads."""
    if model.get_output_embeddings() is not None:
        return set()
    heads = set(scalar_heads(model))
    return {name for name, module in model.named_modules() if module in heads}


def add_to_json(path: Path, values: Mapping[str, float | str]) -> None:
    """Add keys to a JSON file that contains a mapping."""
    try:
        config = json.loads(path.read_text(encoding="utf-8")) | dict(values)
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written ({error.strerror or error})") from None
