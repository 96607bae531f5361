"""How long a sequence a model takes."""

from __future__ import annotations

import sys

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.errors import ConfigError


def check_positions(model: PreTrainedModel, longest: int, key: str) -> None:
    """Raise ConfigError where prompt and response together are longer than the model's positions."""
    check_length(longest, positions(model), key)


def positions(model: PreTrainedModel) -> int:
    """The longest sequence that a model is made for; a very large number where it does not say."""
    return getattr(model.config, "max_position_embeddings", None) or sys.maxsize


def check_length(longest: int, limit: int, key: str) -> None:
    """Raise ConfigError where sequences may be longer than a model takes."""
    if longest > limit:
        raise ConfigError(
            f"{key}: sequences may have {longest} tokens, prompt and response together, the model has {limit} "
            f"positions. Lower {key} or the longest prompt"
        )


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokens that a classifier takes at most: RoBERTa has 514 positions and takes 512 of them."""
    return min(positions(model), tokenizer.model_max_length or sys.maxsize)
