"""Frozen weights in the precision that the passes compute in."""

from __future__ import annotations

from collections.abc import Collection

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_cli.models.deferred import place_of
from rlhf_cli.models.forward import computes_in_bfloat16, is_packed
from rlhf_cli.models.heads import reads_last_token


@torch.no_grad()
def hold_frozen(model: PreTrainedModel, precision: str, *, exact: bool, others: Collection[torch.Tensor] = ()) -> None:
    """Keep the frozen linear layers of the backbone in bfloat16 if the passes compute in it. No result changes.

    Autocast rounds these weights before each product, so a pass gives the same bits. It does not round embeddings,
    norms and heads, which stay in float32. So does a model whose passes run without autocast (an encoder).

    Not for a model that is sampled from: the decoders are first compared with its forward pass in float32.

    Args:
        exact: only weights that were bfloat16 numbers, as in most published models: for a base model, whose merged
            weights are saved.
        others: weights of other models that this one shares. They are not touched.
    """
    device = next(model.parameters()).device
    is_encoder = model.get_output_embeddings() is None and not (reads_last_token(model) and is_packed(model))
    if is_encoder or not computes_in_bfloat16(device, precision):
        return
    skipped = {id(weight) for weight in others}
    for name, module in model.base_model.named_modules():
        if not isinstance(module, torch.nn.Linear | Conv1D) or ".lora_" in name:
            continue
        for weight in module.parameters(recurse=False):
            if weight.requires_grad or weight.dtype != torch.float32 or id(weight) in skipped or place_of(weight):
                continue
            rounded = weight.data.bfloat16()
            if not exact or torch.equal(rounded.float(), weight.data):
                weight.data = rounded
