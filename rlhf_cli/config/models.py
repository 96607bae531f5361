"""Where a model comes from, and which of its weights are trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_cli.config.base import LocalPath, PositiveInt, Section

Patterns = list[Annotated[str, Field(min_length=1)]]
"""Patterns of names of weights, as `rlhf_cli.models.frozen` reads them."""
Tokens = list[Annotated[str, Field(min_length=1)]]
"""Texts that each become one token."""


Quantization = Literal["nf4", "nf4_double"]


class TokenizerTraining(Section):
    """A byte-level BPE tokenizer trained on the stage's training rows."""

    vocab_size: Annotated[int, Field(ge=260)] = 4096
    """Number of tokens to learn. The 256 bytes and the special tokens are always included; a small corpus may give
    fewer than this."""
    split_digits: bool = True
    """Make each digit a separate token."""


class ScratchModel(Section):
    """A new model with random weights."""

    architecture: str = "llama"
    """The `model_type` in transformers: llama, gpt2, qwen2, gpt_neox, ..."""
    config: dict[str, Any] = {}
    """Keys of its transformers config. The vocabulary and the special tokens come from the tokenizer."""
    tokenizer: TokenizerTraining = TokenizerTraining()
    """How its tokenizer is trained."""


class Model(Section):
    """Where a model comes from."""

    path: LocalPath | None = None
    """A Hugging Face model directory or a hub id. Null uses the model of the previous stage of this run."""
    revision: str | None = None
    """The branch, tag or commit of a hub model."""


class Lora(Section):
    """Low-rank adapters on a frozen model (Hu et al. 2021). Needs the package peft. In PPO the reference policy is then
    the policy with its adapters switched off and takes no extra memory."""

    r: PositiveInt = 16
    """The rank of the adapters."""
    alpha: PositiveInt = 32
    """Scales the output of the adapters by alpha / r."""
    target_modules: list[str] | None = None
    """The linear layers that get an adapter, by the end of their names, for example [q_proj, v_proj]. Null adapts
    every linear layer of the backbone."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) instead, so that a higher rank does not shrink the updates (rsLoRA, Kalajdzievski
    2023)."""
    dora: bool = False
    """Also train the norm of each output row of the adapted weights (DoRA, Liu et al. 2024). Slower: every forward pass
    computes the norms of the adapted weights."""
    quantize: Quantization | None = None
    """Hold the frozen linear layers in 4 bits (QLoRA, Dettmers et al. 2023). Needs the package bitsandbytes. `nf4`:
    NormalFloat in blocks of 64 weights, 4.5 bits a weight. `nf4_double` quantizes the scales of the blocks, too: 4.13
    bits. Merged weights are the dequantized ones with the adapters added, as the training computed with them."""
    save: Literal["merged", "adapter"] = "merged"
    """What `model` in the artifact is. `merged`: plain weights with the adapters added, which any program reads, and
    the adapters in its folder `adapter`. `adapter`: the adapters only, in PEFT's format; whoever loads them also needs
    the base model at its recorded place. `rlhf merge` turns such a directory into plain weights."""


class TrainedModel(Model):
    """A model that the stage trains."""

    freeze: Patterns = []
    """Weights that are not trained, by parts of their names: [embeddings, layers.0-3, norm]. A pattern matches a weight
    whose name contains its parts; `embeddings` and `layers` work for every family. A pattern that matches nothing is
    an error."""
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights."""

    def rules(self) -> Iterator[str]:
        if self.lora is not None and self.freeze:
            yield "freeze does nothing with lora, which trains only the adapters. Remove one of them"
