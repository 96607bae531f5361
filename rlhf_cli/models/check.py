"""What is refused about a model: its directory before the weights are read, and then each weight, in one line each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file, find_adapter_config_file

from rlhf_cli.errors import ArtifactError
from rlhf_cli.files import largest_dimension
from rlhf_cli.hub import is_local, require_hub_model
from rlhf_cli.models.deferred import is_finite, not_finite, place_of
from rlhf_cli.run.artifacts import is_adapter, require_intact

MOST_LAYERS = 10_000
"""Limit for the number of layers or experts in a config.json; no real model has as many."""


def check_directory(path: str, revision: str | None, *, weights: bool) -> None:
    """Raise ArtifactError if this is no model directory and no model on the hub, or with `weights` has none."""
    directory = Path(path)
    if not directory.exists():
        if is_local(path):
            raise ArtifactError(f"{path}: no such directory (looked in {Path.cwd()}), and not a hub id")
        require_hub_model(path, revision)
        return
    require_intact(path, thorough=weights)
    if not directory.is_dir():
        raise ArtifactError(f"{path}: is a file. Give a Hugging Face model directory")
    if is_adapter(directory):
        return  # `read_adapter` checks the rest
    if not (directory / "config.json").is_file():
        raise ArtifactError(f"{path}: has no config.json, so it is not a Hugging Face model directory")
    if weights and not any(directory.glob("*.safetensors")):
        pickles = [p.name for p in directory.glob("*.bin")]
        reason = f"{pickles[0]} is a pickle, and a pickle is never read" if pickles else "has no weights"
        raise ArtifactError(f"{path}: {reason}. Save the model again with save_pretrained, as *.safetensors")


def refuse_endless(path: str, config: PreTrainedConfig) -> None:
    """Raise ArtifactError for more layers or experts than any model has, and for layers wider than every stored weight.

    Building them would not end.
    """
    for key, value in config.to_dict().items():
        if isinstance(value, int) and value > MOST_LAYERS and ("layer" in key or "expert" in key):
            raise ArtifactError(f"{path}: config.json has {key}: {str(value)[:20]}, more than any model")
    width = getattr(config, "hidden_size", None)
    widest = largest_dimension(path)
    if isinstance(width, int) and widest is not None and width > widest:
        rule = f"and the largest size of a stored weight is {widest}. Restore its config.json"
        raise ArtifactError(f"{path}: config.json has a hidden size of {str(width)[:20]}, {rule}")


def refuse_classifier(path: str, config: PreTrainedConfig) -> None:
    """Raise ArtifactError if the model was saved as a sequence classifier."""
    for name in config.architectures or ():
        if str(name).endswith("ForSequenceClassification"):
            raise ArtifactError(
                f"{path}: is a {name} (reward model, value model or classifier), not a language model. Give a "
                "language model, for example a finished sft stage. To score a file with it, run rlhf rm score"
            )


def refuse_pickles(path: str, revision: str | None, config: PreTrainedConfig) -> None:
    """Raise ArtifactError if a model's files lead transformers to a pickle, or outside of the model's directory.

    `use_safetensors` covers only the usual file names. config.json may name any file as the weights, an index may name
    any file as a part of them, and an adapter's weights are read from a pickle if there is no other file.
    """
    if find_adapter_config_file(path, revision=revision) is not None:
        raise ArtifactError(
            f"{path}: has an adapter (adapter_config.json) beside a whole model, or is an adapter on the hub. Give a "
            "directory with only one of them; download an adapter first"
        )
    names = [getattr(config, "transformers_weights", None) or "model.safetensors"]
    with contextlib.suppress(OSError):
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
        names += json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"].values()
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ArtifactError(
                f"{path}: its files name {name!r} as weights, and only *.safetensors beside config.json are read. Save "
                "the model again with save_pretrained"
            )


def reason_of(error: Exception) -> str:
    """The first line of an error of transformers, or its type."""
    if "trust_remote_code" in str(error):
        return "it asks for trust_remote_code, and code that comes with a model is never run"
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


# ------------------------------------------------------------------------------------------- once it is loaded


def check_weights(model: PreTrainedModel, info: Mapping[str, Any], path: str, *, new_head: bool) -> list[str]:
    """Raise ArtifactError for weights that are missing, have another shape than config.json says, or are not finite.

    `info` is transformers' report of the loading. With `new_head` weights outside of the backbone may be missing or
    have another shape. Returns their names: transformers initialized them.
    """
    prefix = f"{model.base_model_prefix}."
    head = {name for name, _ in model.named_parameters() if not name.startswith(prefix)} if new_head else set()
    new = head & (set(info["missing_keys"]) | {str(name) for name, _, _ in info["mismatched_keys"]})
    missing = sorted(set(info["missing_keys"]) - head)
    if missing:
        raise ArtifactError(
            f"{path}: {len(missing)} weights of {type(model).__name__} are not in the file ({', '.join(missing[:3])}), "
            "and would be random. Give a directory that was saved as this kind of model"
        )
    wrong = sorted((name, list(given), list(needed)) for name, given, needed in info["mismatched_keys"])
    wrong = [entry for entry in wrong if entry[0] not in head]
    if wrong:
        name, given, needed = wrong[0]
        more = f" (and {len(wrong) - 1} more weights)" if len(wrong) > 1 else ""
        raise ArtifactError(
            f"{path}: weight {name} has shape {given} in the file, and config.json says {needed}{more}. Give a "
            "directory whose weights and config.json were saved together"
        )
    for name, weight in model.named_parameters():
        if name not in new and place_of(weight) is None and not is_finite(weight):
            bad = weight.numel() - int(weight.isfinite().sum())
            raise not_finite(f"{path}: weight {name} contains NaN or inf ({bad:,} of {weight.numel():,} values)")
    return sorted(new)


@torch.no_grad()
def try_out(model: PreTrainedModel, path: str) -> None:
    """Raise ArtifactError if a forward pass of two tokens in training mode fails.

    config.json may contain anything, and values for heads, layers or dropout are first used here.
    """
    try:
        model.train()(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    except Exception as error:
        raise ArtifactError(f"{path}: a model with its config.json cannot compute ({reason_of(error)})") from None
