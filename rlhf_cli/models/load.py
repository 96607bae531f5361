"""Load models and tokenizers from directories and from the hub.

Weights are read from safetensors only, and no code that comes with a model is run.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file, find_adapter_config_file

from rlhf_cli.errors import ArtifactError
from rlhf_cli.hub import is_local, require_hub_model
from rlhf_cli.kernels.layers import use_fast_attention, use_fast_norm, use_short_layer
from rlhf_cli.kernels.linear import use_fast_linear
from rlhf_cli.models.adapter_files import AdapterDirectory, attach, own_generation_config, read_adapter
from rlhf_cli.models.adapters import merge_in_place, merge_when_read
from rlhf_cli.models.deferred import blocks, is_deferred, is_finite, load_deferred, not_finite, place_of, read_deferred
from rlhf_cli.models.forward import autocast, choose_attention, held_precision, vocabulary_rows
from rlhf_cli.models.heads import (
    is_encoder,
    offer_classifier,
    reads_last_token,
    require_scores_without_padding,
    scalar_heads,
    start_head,
)
from rlhf_cli.models.quantized import quantize, round_when_read
from rlhf_cli.models.seq2seq import check_tokens, is_seq2seq_config, value_class
from rlhf_cli.run.artifacts import is_adapter, require_intact
from rlhf_cli.seeding import seeded

CLASSES: dict[Any, Any] = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForSeq2SeqLM: MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForSequenceClassification: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}
"""The class that each auto class builds from a config."""
FACTS = ("score_mean", "score_std", "target_mean", "target_std")
CUTS = ("rlhf_max_length", "rlhf_truncation")
LENGTH_CURVE = "length_curve"
"""Keys that we add to a reward model's config.json: numbers to normalise its scores, how long texts were cut during its
training, and pairs [length, value] of what a reply's length adds to a score."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A folder without any of them has no tokenizer."""
ALIGNMENT = 64
"""Bytes; torch's memory on the CPU begins at multiples of it."""
MOST_LAYERS = 10_000
"""Limit for the number of layers or experts in a config.json; no real model has as many."""


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub id; the base's for adapters without one, as PEFT writes them."""
    check_directory(path, revision, weights=False)
    adapter = None if any((Path(path) / name).is_file() for name in TOKENIZER_FILES) else read_adapter(path)
    if adapter is not None:
        return load_tokenizer(adapter.base.path, adapter.base.revision)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
        longest, template = tokenizer.model_max_length, tokenizer.chat_template
        texts = list(template.values()) if isinstance(template, dict) else [template or ""]
        # tokenizer_config.json may contain anything, and transformers reads these values only when it needs them.
        if not isinstance(longest, int | float):
            raise ValueError(f"model_max_length is {str(longest)[:80]!r}, not a number")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("chat_template is not a string")
        tokenizer("a")
    except Exception as error:
        raise ArtifactError(f"{path}: cannot load a tokenizer ({reason_of(error)})") from None
    return tokenizer


def load_policy(
    path: str, revision: str | None = None, *, deferred: bool = False, frozen: bool = False
) -> PreTrainedModel:
    """A decoder or an encoder-decoder in float32 with dropout off. Every weight must be in the file.

    With `deferred`, here and below, the weights are read later (deferred.py). With `frozen`, for a model that only
    answers, they may be in 4 or 8 bits in the file.
    """
    model, _ = _load(AutoModelForCausalLM, path, revision, deferred=deferred, frozen=frozen)
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
    """A trained sequence classifier, with its head: transformers would fill a missing one with random numbers."""
    model, _ = _load(AutoModelForSequenceClassification, path, revision, deferred=deferred)
    for key in (*FACTS, LENGTH_CURVE):
        value = getattr(model.config, key, None)
        rule = "a number above 0" if key.endswith("_std") else "a number"
        rule = "a list of [length, value] of increasing length" if key == LENGTH_CURVE else rule
        if value is not None and not _follows(value, rule):
            raise ArtifactError(
                f"{path}: config.json has {key}: {str(value)[:80]}, not {rule}. Train the reward model again, or "
                "remove the key"
            )
    return model


def _follows(value: Any, rule: str) -> bool:
    try:
        numbers = torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    if not numbers.isfinite().all():
        return False
    if rule.startswith("a list"):
        return numbers.ndim == 2 and numbers.shape[1] == 2 and bool((numbers[:, 0].diff() > 0).all())
    return numbers.ndim == 0 and (rule == "a number" or numbers.item() > 0)


def load_step_model(path: str, revision: str | None = None, *, deferred: bool = False) -> PreTrainedModel:
    """A trained token classifier, with its head."""
    if is_adapter(path):
        raise ArtifactError(f"{path}: has adapters, and a model of steps must be whole. Merge them into its weights")
    model, _ = _load(AutoModelForTokenClassification, path, revision, deferred=deferred)
    if len(scalar_heads(model)) != 1:
        raise ArtifactError(f"{path}: the head of a {type(model).__name__} is not one linear layer. Use another model")
    return model


def new_reward_model(
    path: str, revision: str | None, *, seed: int, head_std: float | None, deferred: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """A sequence classifier with one label on the weights at `path`, and the names of its new parameters.

    A head in the file is kept if it has one label. A new one is random, with the standard deviation `head_std`, or
    1/sqrt(hidden_size + 1) (Stiennon et al. 2020): the first scores are of order one, with small differences.
    """
    with seeded(seed, "reward head"):
        model, new = _load(AutoModelForSequenceClassification, path, revision, new_labels=1, deferred=deferred)
        for head in (head for name, head in scalar_heads(model).items() if f"{name}.weight" in new):
            start_head(head, head_std if head_std is not None else 1.0 / math.sqrt(head.in_features + 1))
    _forget_facts(model)
    return model, new


def new_value_model(path: str, revision: str | None, *, deferred: bool = False) -> PreTrainedModel:
    """The weights at `path` (a policy's or a reward model's) with a scalar head that starts at zero."""
    auto = AutoModelForSequenceClassification
    model, _ = _load(auto, path, revision, new_labels=1, for_values=True, deferred=deferred)
    if not reads_last_token(model):
        raise ArtifactError(
            f"{path}: a {type(model).__name__} does not give a value for each token. Set value_model.init: policy"
        )
    for head in scalar_heads(model).values():
        read_deferred(head)
        start_head(head)
    _forget_facts(model)
    return model


def _forget_facts(model: PreTrainedModel) -> None:
    """Remove what a reward model's config says about its scores: it is not true of values or after more training."""
    for key in (*FACTS, *CUTS, LENGTH_CURVE):
        vars(model.config).pop(key, None)


def load_value_model(path: str, *, deferred: bool = False) -> PreTrainedModel:
    """A saved value model, with its head."""
    model, _ = _load(AutoModelForSequenceClassification, path, None, for_values=True, deferred=deferred)
    if not reads_last_token(model) or model.config.num_labels != 1:
        what = f"{path}: a {type(model).__name__} does not give a value for each token"
        raise ArtifactError(f"{what}. Give the `value_model` directory of an earlier PPO run")
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
    check_directory(path, revision, weights=False)
    if (adapter := read_adapter(path)) is not None:
        return not adapter.is_classifier and is_language_model(adapter.base.path, adapter.base.revision)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    except Exception as error:
        raise ArtifactError(f"{path}: cannot load a model ({reason_of(error)})") from None
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()}
    return any(name in names for name in config.architectures or ())


def prepare(model: PreTrainedModel, device: torch.device) -> str | None:
    """Move the model to the device and choose the fastest layers that compute the same.

    Returns lines for the user about what stays slower. Raises what `require_scores_without_padding` raises.
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

    In a mapped file the length of the header decides where weights begin. On some processors the last digit of MKL's
    product of one row depends on that.
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
    """Whether both give the same ids for a text. `b` may have more special tokens, such as a new padding token."""
    vocab_a, vocab_b = a.get_vocab(), b.get_vocab()
    if any(vocab_b.get(token) != i for token, i in vocab_a.items()) or a.eos_token_id != b.eos_token_id:
        return False
    probe = "The quick brown fox, 12 of 345;\n\nHuman: Hello there!\n\nAssistant: naive cafe"
    return a(probe)["input_ids"] == b(probe)["input_ids"]


def ensure_pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a sequence classifier a padding token: transformers reads the score at the last token that is not padding.

    It must not be EOS. Llama 3's tokenizer has one that is meant for padding; others get a new one.
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
    new_labels: int | None = None,
    for_values: bool = False,
    deferred: bool = False,
    frozen: bool = False,
) -> tuple[PreTrainedModel, list[str]]:
    """A model in float32 and eval mode, and the names of its parameters that are not in the file.

    With `new_labels` the head has so many, and may be new. Raises ArtifactError for other parameters. With `for_values`
    the head is read at each token. Weights are deferred only if that is possible.
    """
    check_directory(path, revision, weights=True)
    if (adapter := read_adapter(path)) is not None:
        return _load_adapted(auto, adapter, new_labels, deferred=deferred)
    try:
        labels = {} if new_labels is None else {"num_labels": new_labels}
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False, **labels)
        # A config may name a kernel from the hub as its attention, which is code.
        config._attn_implementation = None
        _refuse_pickles(path, revision, config)
        refuse_endless(path, config.get_text_config())
        if auto is AutoModelForCausalLM:
            _refuse_classifier(path, config)
            auto = AutoModelForSeq2SeqLM if is_seq2seq_config(config) else auto
        elif for_values and is_seq2seq_config(config):
            auto = value_class(config)
        else:
            offer_classifier(type(config))
        later, in_int8 = None, _is_torchao(config)
        if in_int8:
            del config.quantization_config
        if deferred or in_int8:
            kind = CLASSES[auto][type(config)] if auto in CLASSES else auto
            later = load_deferred(kind, path, revision, config)
            if later is not None and is_encoder(later[0]):
                later = None  # its passes are compared before it is sharded
        if in_int8 and later is None:
            raise ArtifactError(
                f"{path}: its weights are quantized, and this kind is not read here. Export the model again with "
                "--dtype bfloat16 or --quantize int8"
            )
        # Else transformers asks the hub's conversion service for safetensors. It reads the variable at each load.
        os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
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
    if not frozen and getattr(model.config, "quantization_config", None) is not None:
        raise ArtifactError(
            f"{path}: its weights are quantized, so they cannot be trained, merged or exported. Give the model in 16 "
            "or 32 bits (`lora.quantize: nf4` holds it in 4)"
        )
    new = check_weights(model, info, path, new_head=new_labels is not None)
    set_dropout_off(model)
    if not deferred:
        read_deferred(model)
    check_tokens(model, path)
    if not is_deferred(model):
        try_out(model, path)
    model.eval()
    return model, new


def _load_adapted(
    auto: Any, adapter: AdapterDirectory, new_labels: int | None, *, deferred: bool
) -> tuple[PreTrainedModel, list[str]]:
    """The base model with the adapters merged into its weights, and the names of its new parameters.

    With `deferred` a weight is merged when it is read. A head in the adapters is kept unless `new_labels` are others.
    """
    if auto is AutoModelForCausalLM and adapter.is_classifier:
        raise ArtifactError(
            f"{adapter.path}: has the adapters of a classifier (reward or value model), not of a language model"
        )
    num_labels = adapter.num_labels
    keeps_head = bool(adapter.head) and new_labels in (None, num_labels)
    new_labels = num_labels if keeps_head else new_labels
    model, new = _load(auto, adapter.base.path, adapter.base.revision, new_labels=new_labels, deferred=deferred)
    is_later = is_deferred(model)
    if adapter.quantization is not None:
        # The adapters were trained on rounded weights, and fit only those.
        (round_when_read if is_later else quantize)(model, adapter.quantization, adapter.path)
    read = attach(model, adapter, with_head=keeps_head)
    (merge_when_read if is_later else merge_in_place)(model)
    model.requires_grad_(True)
    take_facts(model, adapter)
    return model, [name for name in new if name not in read]


def take_facts(model: PreTrainedModel, adapter: AdapterDirectory) -> None:
    """Give the model's config what the adapters' training added to it."""
    facts = (*FACTS, *CUTS, LENGTH_CURVE, "pad_token_id")
    model.config.update({key: adapter.model_config[key] for key in facts if key in adapter.model_config})


def set_dropout_off(model: PreTrainedModel) -> None:
    """Set every dropout probability to zero, so that train() and eval() compute the same.

    No stage uses dropout: PPO's ratio is then exactly 1 before the first step, and a run repeats to the last bit.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Other modules keep the probability as a number (attention_dropout, hidden_dropout, ...).
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(module, name, 0.0)


def check_directory(path: str, revision: str | None, *, weights: bool) -> None:
    """Raise ArtifactError if this is no model directory and no model on the hub, or with `weights` has none."""
    directory = Path(path)
    if not directory.exists():
        if is_local(path):
            raise ArtifactError(f"{path}: no such directory (looked in {Path.cwd()}), and not a hub id")
        require_hub_model(path, revision)
        return
    require_intact(path, thorough=weights)
    if not directory.is_dir():
        raise ArtifactError(f"{path}: is a file. Give a Hugging Face model directory")
    if is_adapter(directory):
        return  # `read_adapter` checks the rest
    if not (directory / "config.json").is_file():
        raise ArtifactError(f"{path}: has no config.json, so it is not a Hugging Face model directory")
    if weights and not any(directory.glob("*.safetensors")):
        pickles = [p.name for p in directory.glob("*.bin")]
        reason = f"{pickles[0]} is a pickle, and a pickle is never read" if pickles else "has no weights"
        raise ArtifactError(f"{path}: {reason}. Save the model again with save_pretrained, as *.safetensors")


def refuse_endless(path: str, config: PreTrainedConfig) -> None:
    """Raise ArtifactError for more layers or experts than any model has: building them would not end."""
    for key, value in config.to_dict().items():
        if isinstance(value, int) and value > MOST_LAYERS and ("layer" in key or "expert" in key):
            raise ArtifactError(f"{path}: config.json has {key}: {str(value)[:20]}, more than any model")


def _refuse_classifier(path: str, config: PreTrainedConfig) -> None:
    """Raise ArtifactError if the model was saved as a sequence classifier."""
    for name in config.architectures or ():
        if str(name).endswith("ForSequenceClassification"):
            raise ArtifactError(
                f"{path}: is a {name} (reward model, value model or classifier), not a language model. Give a "
                "language model, for example a finished sft stage. To score a file with it, run rlhf rm score"
            )


def _refuse_pickles(path: str, revision: str | None, config: PreTrainedConfig) -> None:
    """Raise ArtifactError if a model's files lead transformers to a pickle, or outside of the model's directory.

    `use_safetensors` covers only the usual names. config.json or an index may name any file as weights, and
    transformers reads an adapter's weights from a pickle if there is no other file.
    """
    if find_adapter_config_file(path, revision=revision) is not None:
        raise ArtifactError(
            f"{path}: has an adapter (adapter_config.json) beside a whole model, or is an adapter on the hub. Give a "
            "directory with only one of them; download an adapter first"
        )
    names = [getattr(config, "transformers_weights", None) or "model.safetensors"]
    with contextlib.suppress(OSError):
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
        names += json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"].values()
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ArtifactError(
                f"{path}: its files name {name!r} as weights, and only *.safetensors beside config.json are read. Save "
                "the model again with save_pretrained"
            )


def reason_of(error: Exception) -> str:
    """The first line of an error of transformers, with the next one if it ends with a colon, or its type."""
    if "trust_remote_code" in str(error):
        return "it asks for trust_remote_code, and code that comes with a model is never run"
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:300] if lines else type(error).__name__


def check_weights(model: PreTrainedModel, info: Mapping[str, Any], path: str, *, new_head: bool) -> list[str]:
    """Raise ArtifactError for weights that are missing, differ from config.json in shape or number, or are not finite.

    `info` is transformers' report of the loading. With `new_head` weights outside of the backbone may be missing or
    have another shape. Returns their names.
    """
    prefix = f"{model.base_model_prefix}."
    head = {name for name, _ in model.named_parameters() if not name.startswith(prefix)} if new_head else set()
    new = head & (set(info["missing_keys"]) | {str(name) for name, _, _ in info["mismatched_keys"]})
    if missing := sorted(set(info["missing_keys"]) - head):
        raise ArtifactError(
            f"{path}: {len(missing)} weights of {type(model).__name__} are not in the file ({', '.join(missing[:3])}), "
            "and would be random. Give a directory that was saved as this kind of model"
        )
    if wrong := sorted((n, list(given), list(needed)) for n, given, needed in info["mismatched_keys"] if n not in head):
        name, given, needed = wrong[0]
        more = f" (and {len(wrong) - 1} more weights)" if len(wrong) > 1 else ""
        raise ArtifactError(
            f"{path}: weight {name} has shape {given} in the file, and config.json says {needed}{more}. Give a "
            "directory whose weights and config.json were saved together"
        )
    # The weights of an extra layer have the names of layer 0's, with another number.
    own = {name.removeprefix(prefix) for name, _ in model.named_parameters()}
    for name in sorted(info["unexpected_keys"]):
        if re.sub(r"\.\d+\.", ".0.", name, count=1).removeprefix(prefix) in own:
            raise ArtifactError(
                f"{path}: weight {name} is of a layer that config.json does not have. Give a directory whose weights "
                "and config.json were saved together"
            )
    for name, weight in model.named_parameters():
        if name not in new and place_of(weight) is None and not is_finite(weight):
            bad = weight.numel() - int(weight.isfinite().sum())
            raise not_finite(f"{path}: weight {name} contains NaN or inf ({bad:,} of {weight.numel():,} values)")
    return sorted(new)


@torch.no_grad()
def try_out(model: PreTrainedModel, path: str) -> None:
    """Raise ArtifactError if a forward pass of two tokens in training mode fails: config.json may contain anything.

    The tokens of an encoder-decoder are checked by `check_tokens`.
    """
    if model.config.is_encoder_decoder:
        return
    try:
        with autocast(torch.device("cpu"), held_precision(model) or "float32"):
            model.train()(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    except Exception as error:
        raise ArtifactError(f"{path}: a model with its config.json cannot compute ({reason_of(error)})") from None
    model.eval()
