"""The longest sequence that a model accepts."""

from __future__ import annotations

import sys

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.errors import ConfigError


def check_positions(model: PreTrainedModel, longest: int, key: str) -> None:
    """Raise ConfigError if prompt and response together can be longer than the model's positions."""
    check_length(longest, positions(model), key, _why(model))


def positions(model: PreTrainedModel) -> int:
    """The longest sequence that a model supports, in tokens; sys.maxsize if its config does not say.

    With `longrope` rotary embeddings (Phi-3's 128k) this is the length before stretching. If one sequence of a batch is
    longer than that, transformers rotates all of them differently, so a token would depend on the rest of its batch.
    `dynamic` rotary embeddings are stretched only beyond the model's positions.
    """
    most = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    return min([most, *_before_stretching(model)])


def _before_stretching(model: PreTrainedModel) -> list[int]:
    """The length before stretching of each `longrope` in the config, which may have one for each type of layer."""
    ropes = getattr(model.config, "rope_parameters", None) or {}
    each = [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    return [rope["original_max_position_embeddings"] for rope in each if rope.get("rope_type") == "longrope"]


def _why(model: PreTrainedModel) -> str:
    if not _before_stretching(model):
        return ""
    return " before its rotary embedding (longrope) changes with the longest sequence of a batch"


def check_length(longest: int, limit: int, key: str, why: str = "") -> None:
    """Raise ConfigError if sequences can be longer than `limit`, the model's positions."""
    if longest > limit:
        raise ConfigError(
            f"{key}: prompt and response together can have {longest} tokens, and the model has {limit} positions{why}. "
            f"Lower {key} or the longest prompt"
        )


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Maximum tokens of a classifier's input. RoBERTa has 514 positions and uses 512 of them."""
    return min(positions(model), tokenizer.model_max_length or sys.maxsize)
