"""New models and tokenizers: random weights, and a byte-level BPE trained on the run's texts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rlhf_cli.config.models import ScratchModel, TokenizerTraining
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.load import reason_of, set_dropout_off
from rlhf_cli.seeding import seeded

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}


def train_tokenizer(texts: Iterable[str], config: TokenizerTraining) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `texts`. Ids 0, 1, 2 are <pad>, <bos>, <eos>, and it can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if config.split_digits
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    bos = SPECIAL_TOKENS["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, list(SPECIAL_TOKENS.values()).index(bos))]
    )
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=config.vocab_size,
            special_tokens=list(SPECIAL_TOKENS.values()),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # Without `unk_token` the tokenizer classes of some families add a token for it.
    special = {"unk_token": SPECIAL_TOKENS["pad_token"], **SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def new_model(config: ScratchModel, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A causal language model with random weights and the tokenizer's vocabulary.

    Raises ConfigError for an architecture or a setting that transformers does not have.
    """
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    kind = config.architecture
    try:
        known = AutoConfig.for_model(kind).to_dict()
    except (ValueError, KeyError):
        raise ConfigError(f"model.scratch.architecture: transformers has no model type {kind!r}") from None
    if unknown := sorted(config.config.keys() - known.keys()):
        raise ConfigError(f"model.scratch.config: {kind} has no setting {', '.join(unknown)}")
    try:
        model_config = AutoConfig.for_model(kind, **config.config | special | {"vocab_size": len(tokenizer)})
        with seeded(seed, "model init"):
            model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
        with torch.no_grad():  # Some settings that contradict each other fail only in a forward pass.
            model.eval()(torch.tensor([[0, 1, 2]]))
    except Exception as error:  # transformers raises many types for settings that it cannot build
        raise ConfigError(f"model.scratch: cannot build this model ({reason_of(error)})") from None
    set_dropout_off(model)
    model.generation_config.update(**special)
    return model
