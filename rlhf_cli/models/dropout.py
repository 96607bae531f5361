"""No dropout in any stage: the ratio is 1 before the first step, and a run repeats to the last bit."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def set_dropout_off(model: PreTrainedModel) -> None:
    """Every dropout probability to zero, so that train() and eval() compute the same."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Others keep the probability as a number (attention_dropout, dropout, hidden_dropout, ...).
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(module, name, 0.0)
