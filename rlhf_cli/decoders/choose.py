"""Which decoder samples from a model: the one that `rollout.decoder` names, or the fastest that has been proved."""

from __future__ import annotations

from typing import assert_never

import torch
from transformers import PreTrainedModel

from rlhf_cli.config.ppo import DecoderName
from rlhf_cli.decoders.decoder import Decoder, UnsupportedError
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.seq2seq import is_seq2seq
from rlhf_cli.processes.sharding import device_of, is_sharded, join

OWN_FORWARD: tuple[DecoderName, ...] = ("plain", "sharded")
"""The names of the decoder that runs the model's own forward."""


def choose_decoder(model: PreTrainedModel, longest: int, name: DecoderName = "auto") -> Decoder:
    """The decoder for rows of at most `longest` tokens.

    ``auto`` takes the paged decoder if it supports the model, and the plain one otherwise. Raises ConfigError if a
    decoder that was asked for by name does not support the model.
    """
    try:
        return _decoder(model, longest, name)
    except UnsupportedError as reason:
        if name == "auto":
            return _decoder(model, longest, "plain")
        raise ConfigError(
            f"rollout.decoder: {name} cannot sample from this {type(model).__name__}: {reason}. Set it to auto or plain"
        ) from None


def decoder_notes(model: PreTrainedModel, longest: int, name: DecoderName = "auto") -> list[str]:
    """Lines for the user if sampling is slower than it could be; [] otherwise. `longest` is the longest text in tokens.

    Raises ConfigError as `choose_decoder` does.
    """
    notes = []
    if name == "auto":
        try:
            _decoder(model, longest, name)
        except UnsupportedError as reason:
            notes.append(f"{type(model).__name__}: {reason}; sampling uses the model's own forward (slower, as exact)")
    elif name not in OWN_FORWARD:
        choose_decoder(model, longest, name)
    if (notes or name in OWN_FORWARD) and not is_seq2seq(model):
        from rlhf_cli.decoders.plain import why_not_padded

        notes += filter(None, [why_not_padded(model)])
    return notes


def _decoder(model: PreTrainedModel, longest: int, name: DecoderName) -> Decoder:
    """The decoder of this name; `auto` tries the paged one. Raises UnsupportedError."""
    if is_sharded(model) and name not in OWN_FORWARD:
        raise UnsupportedError("its weights are sharded among the processes")
    if is_seq2seq(model):
        if name not in ("auto", *OWN_FORWARD):
            raise UnsupportedError("it is an encoder-decoder")
        from rlhf_cli.decoders.encoder_decoder import Seq2SeqDecoder, require_own_logits

        require_own_logits(model)
        return Seq2SeqDecoder(model)
    match name:
        case "auto" | "paged":
            from rlhf_cli.decoders.paged import paged_decoder

            return paged_decoder(model, longest)
        case "plain" | "sharded":
            from rlhf_cli.decoders.plain import PlainDecoder

            return PlainDecoder(model)
        case _:
            assert_never(name)


@torch.no_grad()
def join_sampling(model: PreTrainedModel) -> None:
    """Make the passes of a sharded model that other processes need until each has sampled its last token.

    All processes must call this after their own sampling, also one that has nothing to sample. With a whole model it
    does nothing.
    """
    if is_sharded(model):
        from rlhf_cli.decoders.plain import supported_layout

        supported_layout(model)  # a collective operation at the first use
        ids = torch.tensor([[0, 0]], device=device_of(model))
        join(model, lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1))
