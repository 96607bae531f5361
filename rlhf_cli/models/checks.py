"""Checks of a model that was just loaded: every weight is in the file, has its shape, and is finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_cli.errors import ArtifactError
from rlhf_cli.models.deferred import place_of
from rlhf_cli.models.refusals import reason_of


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
        # A sum is fast, and finite only if all values are.
        if name not in new and place_of(weight) is None and not weight.sum().isfinite() and not weight.isfinite().all():
            bad = weight.numel() - int(weight.isfinite().sum())
            raise ArtifactError(
                f"{path}: weight {name} contains NaN or inf ({bad:,} of {weight.numel():,} values), so no training "
                "step can be computed from it. Give a model whose weights are finite"
            )
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
