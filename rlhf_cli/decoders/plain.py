"""Sampling through the model's own forward, with a cache of transformers: from any decoder, and from encoder-decoders.

Prompts are padded on the left. Some families do not support that: BART's decoder counts the padding, and RWKV takes
neither a mask nor a cache of transformers. `takes_padding` finds out. They read each whole text again for every token.

From a sharded model all processes sample together. Each announces its passes; one whose rows have ended, or that has
none, makes passes over two tokens until all have ended (`join_sampling`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from rlhf_cli.decoders.decoder import Decoder, exact_gap, once_per_model
from rlhf_cli.errors import ArtifactError
from rlhf_cli.kernels.layers import cache_name
from rlhf_cli.models.forward import tolerance_of
from rlhf_cli.models.seq2seq import encoder_inputs, start_of_response
from rlhf_cli.processes.sharding import announce, device_of
from rlhf_cli.processes.threads import is_out_of_memory


class PlainDecoder(Decoder):
    """Next-token logits of live rows, from the model's own forward. New rows enter once all have ended."""

    def __init__(self, model: PreTrainedModel, *, padded: bool | None = None):
        """padded: whether to pad prompts on the left and to use a cache; None asks `takes_padding`."""
        self.model = model
        self.padded = takes_padding(model) if padded is None else padded
        self.cache_name = cache_name(model)
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.is_mamba = getattr(model, "_is_stateful", False) and not takes_positions

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        device = device_of(self.model)
        if not self.padded:
            self.texts = [torch.tensor(prompt, device=device) for prompt in prompts]
            return self._read_texts()
        width = max(map(len, prompts))
        ids = torch.tensor([[*[0] * (width - len(prompt)), *prompt] for prompt in prompts], device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.real_mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()  # [B, width]
        # Padding has no position of its own: the first real token has position 0.
        self.position_ids = (self.real_mask.cumsum(1) - 1).clamp_min(0)
        self.cache = DynamicCache(config=self.model.config)
        return self._forward(ids)

    def step(self, ids: Tensor) -> Tensor:
        if not self.padded:
            self.texts = [torch.cat([text, new]) for text, new in zip(self.texts, ids.split(1), strict=True)]
            return self._read_texts()
        self.real_mask = torch.cat([self.real_mask, self.real_mask.new_ones(len(ids), 1)], dim=1)
        self.position_ids = self.position_ids[:, -1:] + 1
        return self._forward(ids[:, None])

    def keep(self, rows: Tensor) -> None:
        if not self.padded:
            self.texts = [self.texts[row] for row in rows.tolist()]
            return
        self.real_mask, self.position_ids = self.real_mask[rows], self.position_ids[rows]
        if len(rows) > 0:
            # Not batch_select_indices: the state of a recurrent layer does not have it.
            self.cache.reorder_cache(cast(torch.LongTensor, rows))

    def _read_texts(self) -> Tensor:
        """[B, V], by one pass for the texts of each length."""
        lengths = [len(text) for text in self.texts]
        logits: dict[int, Tensor] = {}
        for length in set(lengths):
            rows = [row for row, n in enumerate(lengths) if n == length]
            announce(self.model)
            ids = torch.stack([self.texts[row] for row in rows])
            output = self.model(input_ids=ids, use_cache=False, logits_to_keep=1)
            logits |= dict(zip(rows, output.logits[:, -1], strict=True))
        return torch.stack([logits[row] for row in range(len(lengths))])

    def _forward(self, ids: Tensor) -> Tensor:
        """The logits after the last of these tokens: [B, n] -> [B, V]."""
        announce(self.model)
        if self.is_mamba:  # its mask covers only the tokens of this call
            places = {"attention_mask": self.real_mask if ids.shape == self.real_mask.shape else None}
        else:
            places = {"attention_mask": self.real_mask, "position_ids": self.position_ids}
        cache = {self.cache_name: self.cache}
        output = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **places, **cache)
        logits: Tensor = output.logits[:, -1]
        return logits


@torch.no_grad()
@once_per_model
def takes_padding(model: PreTrainedModel) -> bool:
    """Whether padding on the left and a cache give the logits of one forward pass per sequence, to 1e-4 of their size.

    If the model is held in 16 bits, to 3e-2. Raises ArtifactError if whole texts of one length in one pass do not,
    either.
    """
    reason = ""
    for padded in (True, False):
        try:
            gap = _gap(model, padded=padded)
        except (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError, AssertionError) as error:
            if is_out_of_memory(error):
                raise
            reason = reason or f"it does not take the calls ({type(error).__name__}: {str(error)[:100]})"
            continue
        if gap <= tolerance_of(model):
            return padded
        reason = f"its logits for several texts differ from those for one text by {gap:.1e}"
    raise ArtifactError(
        f"{type(model).__name__}: {reason}, so it cannot be sampled from. Use a model of another family"
    )


def _gap(model: PreTrainedModel, *, padded: bool) -> float:
    return exact_gap(model, lambda _: PlainDecoder(model, padded=padded))


class Seq2SeqDecoder(Decoder):
    """Next-token logits of live rows: the encoder reads each prompt once. New rows enter once all have ended."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def admit(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        device = device_of(self.model)
        ids, self.real_mask = encoder_inputs(self.model, [torch.tensor(prompt, device=device) for prompt in prompts])
        self.states = self.model.get_encoder()(input_ids=ids, attention_mask=self.real_mask).last_hidden_state
        config = self.model.config
        self.cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        return self.step(torch.full((len(prompts),), start_of_response(self.model), device=device))

    def step(self, ids: Tensor) -> Tensor:
        output = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.states),
            attention_mask=self.real_mask,
            decoder_input_ids=ids[:, None],
            use_cache=True,
            **{cache_name(self.model): self.cache},
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def keep(self, rows: Tensor) -> None:
        self.states, self.real_mask = self.states[rows], self.real_mask[rows]
        if len(rows) > 0:
            self.cache.reorder_cache(cast(torch.LongTensor, rows))


@torch.no_grad()
@once_per_model
def require_own_logits(model: PreTrainedModel) -> None:
    """Raise ArtifactError if the decoder's logits differ from those of one forward pass per text."""
    gap = exact_gap(model, lambda _: Seq2SeqDecoder(model))
    if not gap <= tolerance_of(model):
        raise ArtifactError(
            f"{type(model).__name__}: its logits with a cache differ from those without one by {gap:.1e}, so it cannot "
            "be sampled from. Use a model of another family"
        )
