"""A whole copy of a sharded model on each process, from which it samples by itself.

The processes then don't wait for each other at every token. The weights are gathered one at a time, so that beside the
copy nothing is ever whole.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from rlhf_cli.models.load import prepare
from rlhf_cli.models.loading import set_dropout_off
from rlhf_cli.models.sharded_files import plain_weights
from rlhf_cli.sharding import plain_class


def whole_copy(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A plain copy of a sharded model in float32 and eval mode, with adapters merged. All processes must call this."""
    plain: Any = plain_class(model)
    with no_init_weights():
        made: PreTrainedModel = plain(copy.deepcopy(model.config))
    made.tie_weights()
    made.generation_config = copy.deepcopy(model.generation_config)
    made.requires_grad_(False).eval()
    set_dropout_off(made)
    torch.nn.Module.to(made, device)
    refresh(made, model)
    prepare(made, device)
    return made


@torch.no_grad()
def refresh(made: PreTrainedModel, model: PreTrainedModel) -> None:
    """Give a copy the weights that the sharded model has now. All processes must call this."""
    weights = {**dict(made.named_buffers()), **dict(made.named_parameters())}
    for name, (_, gather) in plain_weights(model).items():
        weights[name].copy_(gather())
