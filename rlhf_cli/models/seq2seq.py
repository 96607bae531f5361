"""Encoder-decoder language models (T5, BART): their forward passes, and value models on their backbone.

The encoder reads the prompt and EOS, as these models are pretrained. The decoder reads its start token and the
response. A batch has the form that decoders get, each response behind its prompt:

    row               5  6  7  8        prompt 5 6, response 7 8
    encoder           5  6  EOS
    decoder              S  7  8        the decoder's start token S takes the place of the prompt's last token

So the token at index j of the row is predicted at j - 1 here, too. There is one encoder output per row: prompts are not
shared, and the logits of a whole batch are in memory at once.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel

from rlhf_cli.errors import ArtifactError, ConfigError, DataError
from rlhf_cli.packing import PackedBatch, send
from rlhf_cli.tensor_ops import length_mask

if TYPE_CHECKING:
    from rlhf_cli.data.encode import Example


def is_seq2seq(model: PreTrainedModel) -> bool:
    """Whether the model has an encoder for the prompt and a decoder for the response."""
    return bool(model.config.is_encoder_decoder)


def is_seq2seq_config(config: PreTrainedConfig) -> bool:
    """Whether this is the config of an encoder-decoder language model. BART's decoder alone is none."""
    return bool(config.is_encoder_decoder) and type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING


def with_prompts(batch: PackedBatch, prompt_lengths: Sequence[int]) -> PackedBatch:
    """The batch with the length of each prompt, [B]. The sequences must not share prefixes."""
    return dataclasses.replace(batch, prompt_lengths=list(prompt_lengths))


def encoder_inputs(model: PreTrainedModel, prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The prompts, each with EOS, padded on the right, and the mask of real tokens: [B, P] int64 each."""
    eos = prompts[0].new_tensor([end_of_text(model)])
    ids = pad_sequence([torch.cat([prompt, eos]) for prompt in prompts], batch_first=True)
    lengths = torch.tensor([len(prompt) + 1 for prompt in prompts], device=ids.device)
    return ids, length_mask(lengths, ids.shape[1]).long()


def end_of_text(model: PreTrainedModel) -> int:
    eos = model.config.eos_token_id
    return int(eos[0] if isinstance(eos, list) else eos)


def start_of_response(model: PreTrainedModel) -> int:
    return int(model.config.decoder_start_token_id)


def check_tokens(model: PreTrainedModel, path: str) -> None:
    """Raise ArtifactError if an encoder-decoder's config does not say how a prompt ends or how a response starts."""
    for key in ("eos_token_id", "decoder_start_token_id"):
        if model.config.is_encoder_decoder and getattr(model.config, key, None) is None:
            raise ArtifactError(f"{path}: config.json has no {key}, which an encoder-decoder needs. Add it")


def hidden_at(model: PreTrainedModel, batch: PackedBatch, positions: Tensor) -> Tensor:
    """Last hidden states of the decoder at `positions` of the row: [n] -> [n, H]."""
    return _forward(model, batch)[1][_places(batch, positions)]


def logits_and_hidden_at(model: PreTrainedModel, batch: PackedBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """`logits_at` and `hidden_at` from one forward pass: ([n, V], [n, H])."""
    output, hidden = _forward(model, batch)
    places = _places(batch, positions)
    return output.logits[places], hidden[places]


def _forward(model: PreTrainedModel, batch: PackedBatch) -> tuple[Any, Tensor]:
    """The output of the model, and the decoder's last hidden states, [B, R + 1, H]."""
    assert batch.prompt_lengths is not None, "an encoder-decoder needs to know where each prompt ends"
    texts = batch.ids.split(batch.lengths)
    prompts = [text[:n] for text, n in zip(texts, batch.prompt_lengths, strict=True)]
    start = batch.ids.new_tensor([start_of_response(model)])
    read = [torch.cat([start, text[n:]]) for text, n in zip(texts, batch.prompt_lengths, strict=True)]
    ids, real_mask = encoder_inputs(model, prompts)
    decoder_ids = pad_sequence(read, batch_first=True)  # [B, R + 1]
    with last_hidden_state(model.get_decoder()) as captured:
        # The decoder is causal, so padding behind a response reaches none of its tokens.
        output = model(input_ids=ids, attention_mask=real_mask, decoder_input_ids=decoder_ids, use_cache=False)
    return output, captured[-1]


_capturing = threading.Lock()


@contextmanager
def last_hidden_state(module: Any) -> Iterator[list[Tensor]]:
    """A list to which each pass of `module` inside the block adds its last hidden state. One thread at a time."""
    captured: list[Tensor] = []
    with _capturing:
        handle = module.register_forward_hook(lambda _m, _inputs, output: captured.append(output.last_hidden_state))
        try:
            yield captured
        finally:
            handle.remove()


def _places(batch: PackedBatch, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The row and column in the decoder's padded batch of each index of the packed row: [n] int64 each."""
    assert batch.prompt_lengths is not None
    at = positions.cpu()
    row = torch.bucketize(at, torch.tensor(batch.lengths).cumsum(0), right=True)
    column = batch.position_ids.cpu()[at] - torch.tensor(batch.prompt_lengths)[row] + 1
    assert bool((column >= 0).all()), "the decoder has no state for a token inside a prompt"
    return send(row, positions.device), send(column, positions.device)


def require_one_answer(model: PreTrainedModel, examples: Iterable[Example], loss_on: str) -> None:
    """Raise DataError for a row with several answers, and ConfigError for `loss_on: all`, with an encoder-decoder."""
    if not is_seq2seq(model):
        return
    if loss_on == "all":
        raise ConfigError("data.loss_on: all, but the encoder's texts are no targets of the loss. Set it to completion")
    for example in examples:
        mask = example.loss_mask
        if not all(mask[mask.index(True) :]):
            raise DataError(
                f"{example.where}: has several answers, and an encoder-decoder learns one per row. Split the "
                "conversation into rows with one answer each"
            )


class TokenValues(PreTrainedModel):
    """An encoder-decoder backbone with a linear layer `score` on each hidden state of the decoder.

    transformers' own classifiers read one place of the whole text.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        setattr(self, self.base_model_prefix, AutoModel.from_config(config))
        self.score = torch.nn.Linear(config.hidden_size, 1, bias=False)
        self.post_init()

    def get_decoder(self) -> torch.nn.Module:
        decoder: torch.nn.Module = self.base_model.get_submodule("decoder")
        return decoder

    def forward(self, **inputs: Any) -> Any:
        return self.base_model(**inputs)


def value_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of value models on this backbone, such as T5TokenValues."""
    kind = type(config)
    return class_of_family(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[kind], kind, TokenValues, "TokenValues")


def class_of_family(
    language_model: Any, config: type[PreTrainedConfig], head: type, suffix: str
) -> type[PreTrainedModel]:
    """A new class `head` of the family of a language model: it derives from CodeGenPreTrainedModel, for example."""
    family = [parent for parent in language_model.__mro__ if issubclass(parent, PreTrainedModel)][-2]
    members = {"config_class": config, "base_model_prefix": family.base_model_prefix, "__module__": __name__}
    return type(f"{config.__name__.removesuffix('Config')}{suffix}", (head, family), members)
