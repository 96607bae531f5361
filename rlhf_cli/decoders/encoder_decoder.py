"""The decoder of encoder-decoder models (T5, BART): the encoder reads each prompt once, the decoder keeps a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from rlhf_cli.decoders.decoder import Decoder, gap_to_forward, once_per_model
from rlhf_cli.decoders.plain import LEAVES_BELOW
from rlhf_cli.errors import ArtifactError
from rlhf_cli.kernels.layers import cache_name
from rlhf_cli.models.forward import TOLERANCE, logits_at
from rlhf_cli.models.seq2seq import encoder_inputs, start_of_response, with_prompts
from rlhf_cli.packing import pack, response_positions
from rlhf_cli.processes.sharding import device_of


class Seq2SeqDecoder:
    """Next-token logits of live rows of an encoder-decoder. See `Decoder` for its methods."""

    admits_beside_others = False
    """All rows have read the same number of decoder tokens, so new rows enter once all have ended."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Add a row for each prompt when there are no live rows; return the logits [prompts, V]."""
        device = device_of(self.model)
        ids, self.real_mask = encoder_inputs(self.model, [torch.tensor(prompt, device=device) for prompt in prompts])
        self.states = self.model.get_encoder()(input_ids=ids, attention_mask=self.real_mask).last_hidden_state
        config = self.model.config
        self.cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        return self.step(torch.full((len(prompts),), start_of_response(self.model), device=device))

    def step(self, ids: Tensor) -> Tensor:
        """Append one token to each row, ids [B]; return the logits of the next tokens [B, V]."""
        output = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.states),
            attention_mask=self.real_mask,
            decoder_input_ids=ids[:, None],
            use_cache=True,
            **{cache_name(self.model): self.cache},
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def apart(self, rows: int) -> list[Decoder]:  # noqa: ARG002
        return [self]

    def leave(self, rows: int, unfinished: int) -> bool:
        """Leaving costs a copy of the cache; staying costs a wasted row in every step."""
        return unfinished <= LEAVES_BELOW * rows

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self.states, self.real_mask = self.states[rows], self.real_mask[rows]
        if len(rows) > 0:
            self.cache.reorder_cache(cast(torch.LongTensor, rows))


@torch.no_grad()
def require_own_logits(model: PreTrainedModel) -> None:
    """Raise ArtifactError if the decoder's logits differ from those of one forward pass per text."""
    if not (gap := _gap(model)) <= TOLERANCE:
        raise ArtifactError(
            f"{type(model).__name__}: its logits with a cache differ from those without one by {gap:.1e}, so it cannot "
            "be sampled from. Use a model of another family"
        )


@once_per_model
def _gap(model: PreTrainedModel) -> float:
    """`gap_to_forward` in float32."""

    def own(model: PreTrainedModel, text: list[int], prompt_length: int) -> Tensor:
        batch = with_prompts(pack([text], device_of(model)), [prompt_length])
        return logits_at(model, batch, response_positions(batch, [prompt_length]))

    with torch.autocast(device_of(model).type, enabled=False):
        return gap_to_forward(model, lambda _: Seq2SeqDecoder(model), own=own)
