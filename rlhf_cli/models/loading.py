"""What transformers must not do while it loads a model: ask a conversion service, draw a progress bar, use dropout."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

SHOWS_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"


@contextlib.contextmanager
def no_conversion() -> Iterator[None]:
    """Keep transformers from asking the hub's conversion service to turn a pickle into safetensors.

    transformers reads this environment variable at each load.
    """
    name = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide transformers' bar "Loading weights", unless you set HF_HUB_DISABLE_PROGRESS_BARS to show it.

    transformers reads that variable only when it is imported. A script may import it before `set_up_process` sets the
    variable to 1, or never call that.
    """
    hides = logging.is_progress_bar_enabled() and os.environ.get(SHOWS_BARS) in (None, "1")
    if hides:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hides:
            logging.enable_progress_bar()


def set_dropout_off(model: PreTrainedModel) -> None:
    """Set every dropout probability to zero, so that train() and eval() compute the same.

    No stage uses dropout: PPO's ratio is then exactly 1 before the first step, and a run repeats to the last bit.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Other modules keep the probability as a number (attention_dropout, dropout, hidden_dropout, ...).
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(module, name, 0.0)
