"""Where a model comes from, and what of it is trained."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rlhf_cli.config.base import PositiveInt, Section


class TokenizerTraining(Section):
    """A byte-level BPE tokenizer trained on the stage's training rows."""

    vocab_size: Annotated[int, Field(ge=260)] = 4096
    """Tokens asked for: 256 bytes and the special tokens are always there; few texts may give fewer."""
    split_digits: bool = True
    """Each digit is a token of its own."""


class ScratchModel(Section):
    """A model that starts from random weights."""

    architecture: str = "llama"
    """`model_type` of transformers: llama, gpt2, qwen2, gpt_neox, ..."""
    config: dict[str, Any] = {}
    """Its transformers config; vocabulary and special tokens are filled in from the tokenizer."""
    tokenizer: TokenizerTraining = TokenizerTraining()


class Model(Section):
    """Where a model comes from."""

    path: str | None = None
    """A Hugging Face model directory or a hub id; null takes the model of the stage before."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""


class Lora(Section):
    """Low-rank adapters on a frozen model (Hu et al. 2021); needs the extra `lora`. ref_policy is then the
    policy with its adapters off and costs no memory of its own. What is saved is merged, a plain model."""

    r: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveInt = 32
    """The adapters' output is scaled by alpha / r."""
    target_modules: list[str] | None = None
    """Ends of the names of the linear layers that get one, [q_proj, v_proj] say; null takes all linear layers
    of the backbone."""
