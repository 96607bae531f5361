"""Load models and tokenizers from directories and from the hub.

Weights are read from safetensors only, and no code that comes with a model is run. An error about a directory is one
line.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

from rlhf_cli.errors import ArtifactError
from rlhf_cli.kernels.layers import use_fast_attention, use_fast_norm, use_short_layer
from rlhf_cli.kernels.linear import use_fast_linear
from rlhf_cli.models.check import (
    check_directory,
    check_weights,
    reason_of,
    refuse_classifier,
    refuse_endless,
    refuse_pickles,
    try_out,
)
from rlhf_cli.models.deferred import blocks, is_deferred, load_deferred, read_deferred
from rlhf_cli.models.forward import choose_attention, vocabulary_rows
from rlhf_cli.models.heads import offer_classifier, reads_last_token, require_scores_without_padding, scalar_heads
from rlhf_cli.models.seq2seq import check_tokens, is_seq2seq_config, value_class
from rlhf_cli.run.artifacts import is_adapter
from rlhf_cli.seeding import seeded

if TYPE_CHECKING:
    from rlhf_cli.models.adapter_files import AdapterDirectory

CLASSES: dict[Any, Any] = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForSeq2SeqLM: MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForSequenceClassification: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}
"""The class that each auto class builds from a config."""
FACTS = ("score_mean", "score_std", "target_mean", "target_std")
"""Keys that we add to a reward model's config.json: numbers to normalise its scores."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A folder without any of them has no tokenizer."""
ALIGNMENT = 64
"""Bytes; torch's memory on the CPU begins at multiples of it."""
CUTS = ("rlhf_max_length", "rlhf_truncation")
"""Keys that we add to a reward model's config.json: how long texts were cut during its training."""
LENGTH_CURVE = "length_curve"
"""The key that we add to a reward model's config.json: pairs [length, value], what a reply's length adds to a score."""


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub id; the base's for adapters without one, as PEFT writes them."""
    check_directory(path, revision, weights=False)
    if is_adapter(path) and not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        base = _adapter(path).base
        return load_tokenizer(base.path, base.revision)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
        longest, template = tokenizer.model_max_length, tokenizer.chat_template
        texts = list(template.values()) if isinstance(template, dict) else [template or ""]
        # tokenizer_config.json may contain anything, and transformers reads these values only when it needs them.
        if not _is_number(longest, above_zero=False):
            raise ValueError(f"model_max_length is {str(longest)[:80]!r}, not a number")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("chat_template is not a string")
        tokenizer("a")
    except Exception as error:
        raise ArtifactError(f"{path}: cannot load a tokenizer ({reason_of(error)})") from None
    return tokenizer


def load_policy(path: str, revision: str | None = None, *, deferred: bool = False) -> PreTrainedModel:
    """A decoder or an encoder-decoder in float32 with dropout off. Every weight must be in the file.

    With `deferred` its weights are read later, by `shard_model`.

    A classifier is refused: with tied embeddings its backbone would load as a language model that was never trained.
    """
    model, _ = _load(AutoModelForCausalLM, path, revision, deferred=deferred)
    if is_adapter(path):
        from rlhf_cli.models.adapter_files import own_generation_config

        model.generation_config = own_generation_config(path) or model.generation_config
    generation = model.generation_config
    ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    if not all(end is None or isinstance(end, int) for end in ends):
        raise ArtifactError(f"{path}: generation_config.json has eos_token_id: {str(ends)[:80]}, not numbers")
    with contextlib.suppress(ValueError):
        generation.validate(strict=True)
        return model
    # Saving the trained model would fail otherwise. Some released models set a temperature without do_sample.
    generation.do_sample = True
    try:
        generation.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ArtifactError(
            f"{path}: transformers refuses to save its generation_config.json ({reason}). Correct that file"
        ) from None
    return model


def load_reward_model(path: str, revision: str | None = None, *, deferred: bool = False) -> PreTrainedModel:
    """A trained sequence classifier. One whose head is not in the file is refused.

    transformers would fill a missing head with random numbers, and PPO would optimise for them. With `deferred` the
    weights are read later, by `shard_model`.
    """
    model, _ = _load(AutoModelForSequenceClassification, path, revision, deferred=deferred)
    for key in FACTS:
        value = getattr(model.config, key, None)
        if value is not None and not _is_number(value, above_zero=key.endswith("_std")):
            kind = "a number above 0" if key.endswith("_std") else "a number"
            raise ArtifactError(
                f"{path}: config.json has {key}: {str(value)[:80]!r}, not {kind}. Train the reward model again, or "
                "remove the key"
            )
    _length_curve_of(model, path)
    return model


def load_step_model(path: str, revision: str | None = None, *, deferred: bool = False) -> PreTrainedModel:
    """A trained token classifier, with its head. With `deferred` the weights are read later."""
    if is_adapter(path):
        raise ArtifactError(f"{path}: has adapters, and a model of steps must be whole. Merge them into its weights")
    model, _ = _load(AutoModelForTokenClassification, path, revision, deferred=deferred)
    if len(scalar_heads(model)) != 1:
        raise ArtifactError(f"{path}: the head of a {type(model).__name__} is not one linear layer. Use another model")
    return model


def _length_curve_of(model: PreTrainedModel, path: str) -> None:
    """Raise ArtifactError for a curve in the config that is none."""
    curve = getattr(model.config, LENGTH_CURVE, None)
    if curve is None:
        return
    is_list = isinstance(curve, list) and len(curve) > 0
    pairs = curve if is_list and all(isinstance(one, list) and len(one) == 2 for one in curve) else [[None]]
    is_valid = all(_is_number(x, above_zero=False) for pair in pairs for x in pair)
    if not is_valid or any(a[0] >= b[0] for a, b in itertools.pairwise(pairs)):
        raise ArtifactError(
            f"{path}: config.json has {LENGTH_CURVE}: {str(curve)[:80]}, not a list of [length, value] of increasing "
            "length. Train the reward model again, or remove the key"
        )


def _is_number(value: Any, *, above_zero: bool) -> bool:
    """Whether the value is a finite number in the range of a float."""
    try:
        return isinstance(value, int | float) and math.isfinite(value) and (value > 0 or not above_zero)
    except OverflowError:
        return False


def new_reward_model(
    path: str, revision: str | None, *, seed: int, head_std: float | None, deferred: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """A sequence classifier with one label on the weights at `path`, and the names of its new parameters.

    A head in the file is kept if it has one label. A new one is random, with the standard deviation
    1/sqrt(hidden_size + 1) (Stiennon et al. 2020) or `head_std`: the first scores are of order one, and their
    differences are near zero.
    """
    with seeded(seed, "reward head"):
        model, new = _load(
            AutoModelForSequenceClassification, path, revision, new_head=True, deferred=deferred, num_labels=1
        )
        for name, head in scalar_heads(model).items():
            if f"{name}.weight" not in new:
                continue
            std = head_std if head_std is not None else 1.0 / math.sqrt(head.in_features + 1)
            torch.nn.init.normal_(head.weight, std=std)
            if head.bias is not None:
                torch.nn.init.zeros_(head.bias)
    _forget_facts(model)
    return model, new


def new_value_model(path: str, revision: str | None, *, deferred: bool = False) -> PreTrainedModel:
    """The weights at `path` (a policy's or a reward model's) with a scalar head that starts at zero."""
    auto = AutoModelForSequenceClassification
    model, _ = _load(auto, path, revision, new_head=True, for_values=True, deferred=deferred, num_labels=1)
    if not reads_last_token(model):
        raise ArtifactError(
            f"{path}: a {type(model).__name__} does not give a value for each token. Set value_model.init: policy"
        )
    for head in scalar_heads(model).values():
        read_deferred(head)
        torch.nn.init.zeros_(head.weight)
        if head.bias is not None:
            torch.nn.init.zeros_(head.bias)
    _forget_facts(model)
    return model


def _forget_facts(model: PreTrainedModel) -> None:
    """Remove what a reward model's config says about its scores. It does not apply to values or after more training."""
    for key in (*FACTS, *CUTS, LENGTH_CURVE):
        vars(model.config).pop(key, None)


def load_value_model(path: str, *, deferred: bool = False) -> PreTrainedModel:
    """A saved value model, with its head. With `deferred` its other weights are read later."""
    model, _ = _load(AutoModelForSequenceClassification, path, None, for_values=True, deferred=deferred)
    if not reads_last_token(model) or model.config.num_labels != 1:
        raise ArtifactError(
            f"{path}: a {type(model).__name__} does not give a value for each token. Give the `value_model` directory "
            "of an earlier PPO run"
        )
    return model


def stores_int8(path: str, revision: str | None = None) -> bool:
    """Whether a model's files have integers of torchao, as `rlhf export --quantize int8` writes them."""
    check_directory(path, revision, weights=False)
    if is_adapter(path):
        return False
    try:
        return _is_torchao(AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False))
    except (OSError, ValueError):  # `load_policy` says what is wrong
        return False


def _is_torchao(config: PreTrainedConfig) -> bool:
    quantization = getattr(config, "quantization_config", None)
    return isinstance(quantization, dict) and quantization.get("quant_method") == "torchao"


def is_language_model(path: str, revision: str | None = None) -> bool:
    """Whether the model at `path` was saved as a language model."""
    if is_adapter(path):
        adapter = _adapter(path)
        return not adapter.is_classifier and is_language_model(adapter.base.path, adapter.base.revision)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise ArtifactError(f"{path}: cannot load a model ({reason_of(error)})") from None
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()}
    return any(name in names for name in config.architectures or ())


def prepare(model: PreTrainedModel, device: torch.device) -> str | None:
    """Move the model to the device and choose the fastest layers that compute the same.

    Returns lines for the user if anything stays slower, else None. Raises ArtifactError for a classifier whose score of
    a text depends on the other texts in its batch.
    """
    # torch gives the embedding of the padding token no gradient, and in many models that token is EOS too.
    embeddings: Any = model.get_input_embeddings()
    embeddings.padding_idx = None
    if is_deferred(model):
        read_deferred(blocks(model)[0])  # the fast layers are compared on real weights
        lines: list[str | None] = []  # `shard_model` chooses the attention
    else:
        torch.nn.Module.to(model, device)
        align(model)
        lines = [choose_attention(model)]
    if type(model).__name__.endswith("ForSequenceClassification") and not reads_last_token(model):
        require_scores_without_padding(model)
    lines += [use_fast_linear(model), use_fast_norm(model), use_fast_attention(model), use_short_layer(model)]
    return "\n".join(filter(None, lines)) or None


def align(model: torch.nn.Module) -> None:
    """Copy the weights on the CPU that do not begin where torch's own memory would.

    A file is mapped, so its header's length decides where its weights begin, and on some processors the last digit of
    MKL's product of one row depends on that. The results of a run must depend on the weights alone.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise ArtifactError if the tokenizer has ids for which the model has no embedding."""
    rows = vocabulary_rows(model)
    if len(tokenizer) > rows:
        raise ArtifactError(
            f"{path}: the tokenizer has {len(tokenizer)} tokens and the model embeds {rows}, so they belong to "
            "different models. Give a directory to which both were saved"
        )


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether both give the same ids for a text, so that one model can read the other's ids.

    `b` may have more special tokens than `a`, such as a padding token that its training added.
    """
    vocab_a, vocab_b = a.get_vocab(), b.get_vocab()
    if any(vocab_b.get(token) != i for token, i in vocab_a.items()) or a.eos_token_id != b.eos_token_id:
        return False
    probe = "The quick brown fox, 12 of 345;\n\nHuman: Hello there!\n\nAssistant: naive cafe"
    return a(probe)["input_ids"] == b(probe)["input_ids"]


def ensure_pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a sequence classifier a padding token that is not EOS.

    transformers finds the last real token of a padded row as the last that is not the padding token: with
    pad = EOS (GPT-2, Qwen base models, Llamas) it would read the score before EOS. A token of the tokenizer that is
    meant for padding is used (Llama 3's `<|finetune_right_pad_id|>`), else a new one.
    """
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        added = [token for token in tokenizer.get_added_vocab() if "pad" in token and token != tokenizer.eos_token]
        tokenizer.add_special_tokens({"pad_token": added[0] if added else "<pad>"})
        if len(tokenizer) > vocabulary_rows(model):
            read_deferred(model.get_input_embeddings())  # the new matrix has a copy of the old one
            with seeded(0, "padding token"):
                model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.pad_token_id = tokenizer.pad_token_id


def _load(
    auto: Any,
    path: str,
    revision: str | None,
    *,
    new_head: bool = False,
    for_values: bool = False,
    deferred: bool = False,
    **settings: Any,
) -> tuple[PreTrainedModel, list[str]]:
    """A model in float32 and eval mode, and the names of its parameters that are not in the file.

    With `new_head` these may be parameters outside the backbone. Raises ArtifactError for any other. With `for_values`
    the head is read at each token, and not once for the whole text. With `deferred` the weights of a decoder are
    deferred if that is possible.
    """
    check_directory(path, revision, weights=True)
    if is_adapter(path):
        return _load_adapted(auto, _adapter(path), new_head=new_head, deferred=deferred, **settings)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False, **settings)
        # A config may name a kernel from the hub as its attention, which is code.
        config._attn_implementation = None
        refuse_pickles(path, revision, config)
        refuse_endless(path, config.get_text_config())
        if auto is AutoModelForCausalLM:
            refuse_classifier(path, config)
            auto = AutoModelForSeq2SeqLM if is_seq2seq_config(config) else auto
        elif for_values and is_seq2seq_config(config):
            auto = value_class(config)
        else:
            offer_classifier(type(config))
        in_int8 = _is_torchao(config)
        if in_int8:
            del config.quantization_config
        with quiet_loading():
            later = None
            if deferred or in_int8:
                kind = CLASSES[auto][type(config)] if auto in CLASSES else auto
                later = load_deferred(kind, path, revision, config)
            if in_int8 and later is None:
                raise ArtifactError(
                    f"{path}: its weights are quantized, and this kind is not read here. Export the model again with "
                    "--dtype bfloat16 or --quantize int8"
                )
            model, info = later or auto.from_pretrained(
                path,
                config=config,
                revision=revision,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `check_weights` names them
            )
    except ArtifactError:
        raise
    except Exception as error:
        raise ArtifactError(f"{path}: cannot load a model ({reason_of(error)})") from None
    new = check_weights(model, info, path, new_head=new_head)
    set_dropout_off(model)
    if not deferred:
        read_deferred(model)
    if model.config.is_encoder_decoder:
        check_tokens(model, path)
    elif not is_deferred(model):
        try_out(model, path)
    model.eval()
    return model, new


def _adapter(path: str) -> AdapterDirectory:
    """What a directory of adapters says."""
    from rlhf_cli.models.adapter_files import read_adapter

    adapter = read_adapter(path)
    assert adapter is not None
    return adapter


def _load_adapted(
    auto: Any, adapter: AdapterDirectory, *, new_head: bool, deferred: bool, **settings: Any
) -> tuple[PreTrainedModel, list[str]]:
    """The base model with the adapters merged into its weights, and the names of its new parameters.

    With `deferred` a weight is merged when it is read, if the base can be deferred.
    A head in the adapters is kept if it has the number of labels that `settings` ask for.
    """
    from rlhf_cli.models.adapter_files import attach
    from rlhf_cli.models.adapters import merge_in_place, merge_when_read
    from rlhf_cli.models.quantized import quantize, round_when_read

    if auto is AutoModelForCausalLM and adapter.is_classifier:
        raise ArtifactError(
            f"{adapter.path}: has the adapters of a classifier (reward or value model), not of a language model"
        )
    keeps_head = auto is not AutoModelForCausalLM and adapter.num_labels == settings.get(
        "num_labels", adapter.num_labels
    )
    keeps_head = keeps_head and bool(adapter.head)
    if keeps_head:
        settings["num_labels"] = adapter.num_labels
    base, new_head = adapter.base, new_head or keeps_head
    model, new = _load(auto, base.path, base.revision, new_head=new_head, deferred=deferred, **settings)
    is_later = is_deferred(model)
    if adapter.quantization is not None:
        # The adapters were trained on rounded weights, and fit only those.
        (round_when_read if is_later else quantize)(model, adapter.quantization, adapter.path)
    read = attach(model, adapter, with_head=keeps_head)
    (merge_when_read if is_later else merge_in_place)(model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    take_facts(model, adapter)
    return model, [name for name in new if name not in read]


def take_facts(model: PreTrainedModel, adapter: AdapterDirectory) -> None:
    """Give the model's config what the adapters' training added to it."""
    facts = (*FACTS, *CUTS, LENGTH_CURVE, "pad_token_id")
    model.config.update({key: adapter.model_config[key] for key in facts if key in adapter.model_config})


# ------------------------------------------------------------------------------------------- as transformers loads


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers from asking the hub's conversion service for safetensors, and from drawing a bar.

    It reads the first variable at each load. Its bar "Loading weights" is drawn if you set HF_HUB_DISABLE_PROGRESS_BARS
    to show it, which it reads only when it is imported: a script may do that before `set_up_process`, or never call it.
    """
    name, before = "DISABLE_SAFETENSORS_CONVERSION", os.environ.get("DISABLE_SAFETENSORS_CONVERSION")
    os.environ[name] = "1"
    hides_bar = logging.is_progress_bar_enabled() and os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") in (None, "1")
    if hides_bar:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
        if hides_bar:
            logging.enable_progress_bar()


def set_dropout_off(model: PreTrainedModel) -> None:
    """Set every dropout probability to zero, so that train() and eval() compute the same.

    No stage uses dropout: PPO's ratio is then exactly 1 before the first step, and a run repeats to the last bit.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Other modules keep the probability as a number (attention_dropout, dropout, hidden_dropout, ...).
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(module, name, 0.0)
