"""How long a sequence a model takes."""

from __future__ import annotations

import sys

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.errors import ConfigError


def check_positions(model: PreTrainedModel, longest: int, key: str) -> None:
    """Raise ConfigError where prompt and response together are longer than the model's positions."""
    check_length(longest, positions(model), key, _why(model))


def positions(model: PreTrainedModel) -> int:
    """The longest sequence that a model is made for; a very large number where it does not say.

    With `longrope` rotary embeddings (Phi-3's 128k) it is the length before stretching: in a batch in which one
    sequence is longer transformers rotates all of them otherwise, so that a token would depend on what else is in the
    batch. `dynamic` ones are stretched beyond the model's positions only.
    """
    whole = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    return min([whole, *_before_stretching(model)])


def _before_stretching(model: PreTrainedModel) -> list[int]:
    """Up to where each `longrope` of a model is one function of the position: one, or one for each type of layer."""
    ropes = getattr(model.config, "rope_parameters", None) or {}
    kinds = [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    return [rope["original_max_position_embeddings"] for rope in kinds if rope.get("rope_type") == "longrope"]


def _why(model: PreTrainedModel) -> str:
    if not _before_stretching(model):
        return ""
    return " before its rotary embedding (longrope) changes with the longest sequence of a batch"


def check_length(longest: int, limit: int, key: str, why: str = "") -> None:
    """Raise ConfigError where sequences may be longer than a model takes."""
    if longest > limit:
        raise ConfigError(
            f"{key}: sequences may have {longest} tokens, prompt and response together, the model has {limit} "
            f"positions{why}. Lower {key} or the longest prompt"
        )


def longest_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokens that a classifier takes at most: RoBERTa has 514 positions and takes 512 of them."""
    return min(positions(model), tokenizer.model_max_length or sys.maxsize)
