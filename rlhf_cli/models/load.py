"""Models and tokenizers from directories and from the hub, and back into the artifact directory.

Weights are read from safetensors only and no code that comes with a model is run. What is wrong with a
directory is said in one line.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file, find_adapter_config_file

from rlhf_cli.errors import ArtifactError
from rlhf_cli.hub import is_local, require_hub_model
from rlhf_cli.kernels.linear import use_fast_linear
from rlhf_cli.kernels.norm import use_fast_norm
from rlhf_cli.kernels.rotation import use_fast_attention
from rlhf_cli.models.dropout import set_dropout_off
from rlhf_cli.models.forward import choose_attention, vocabulary_rows
from rlhf_cli.seeding import seeded

MOST_LAYERS = 10_000
PADDING_TOLERANCE = 1e-4
FACTS = ("score_mean", "score_std", "target_mean", "target_std")
"""Numbers of ours that a reward model's config.json has."""
CUTS = ("rlhf_max_length", "rlhf_truncation")
"""And what it says of how long texts were cut in its training."""


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub id."""
    _check_directory(path, revision, weights=False)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
        longest, template = tokenizer.model_max_length, tokenizer.chat_template
        texts = list(template.values()) if isinstance(template, dict) else [template or ""]
        # tokenizer_config.json may say anything, and these are first read where they are needed.
        if not _is_number(longest, above_zero=False):
            raise ValueError(f"model_max_length is {str(longest)[:80]!r}, a number is needed")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("chat_template is no text")
        tokenizer("a")
    except Exception as error:
        raise ArtifactError(f"{path}: no tokenizer can be loaded ({_reason(error)})") from None
    return tokenizer


def load_policy(path: str, revision: str | None = None) -> PreTrainedModel:
    """A causal language model in float32, dropout off; every weight must be in the file."""
    model = _load(AutoModelForCausalLM, path, revision)
    generation = model.generation_config
    ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    if not all(end is None or isinstance(end, int) for end in ends):
        raise ArtifactError(f"{path}: generation_config.json says eos_token_id: {str(ends)[:80]}, numbers are needed")
    with contextlib.suppress(ValueError):
        generation.validate(strict=True)
        return model
    # It would be found out when what was trained is saved. Some released models say a temperature and no do_sample.
    generation.do_sample = True
    try:
        generation.validate(strict=True)
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ArtifactError(f"{path}: its generation_config.json could not be saved again ({reason})") from None
    return model


def load_reward_model(path: str, revision: str | None = None) -> PreTrainedModel:
    """A sequence classifier as it was trained; one whose head is not in the file is refused.

    A missing head would be filled with random numbers, and PPO would follow them.
    """
    model = _load(AutoModelForSequenceClassification, path, revision)
    for key in FACTS:
        value = getattr(model.config, key, None)
        if value is not None and not _is_number(value, above_zero=key.endswith("_std")):
            kind = "a number above 0" if key.endswith("_std") else "a number"
            raise ArtifactError(
                f"{path}: config.json says {key}: {str(value)[:80]!r}, {kind} is needed. Train the reward model again, "
                "or remove the key"
            )
    return model


def _is_number(value: Any, *, above_zero: bool) -> bool:
    """Is this a finite number that a float can hold?"""
    try:
        return isinstance(value, int | float) and math.isfinite(value) and (value > 0 or not above_zero)
    except OverflowError:
        return False


def new_reward_model(path: str, revision: str | None, *, seed: int, head_std: float | None) -> PreTrainedModel:
    """A sequence classifier with one label on the weights at `path`, its head drawn anew and small.

    The standard deviation is 1/sqrt(hidden_size + 1) (Stiennon et al. 2020), so that first scores are of
    order one and their differences are near zero.
    """
    with seeded(seed, "reward head"):
        model = _load(AutoModelForSequenceClassification, path, revision, new_head=True, num_labels=1)
        for head in scalar_heads(model):
            std = head_std if head_std is not None else 1.0 / math.sqrt(head.in_features + 1)
            torch.nn.init.normal_(head.weight, std=std)
            if head.bias is not None:
                torch.nn.init.zeros_(head.bias)
    return model


def new_value_model(path: str, revision: str | None) -> PreTrainedModel:
    """The weights at `path` (a policy's or a reward model's) with a scalar head that starts at zero."""
    model = _load(AutoModelForSequenceClassification, path, revision, new_head=True, num_labels=1)
    if not reads_last_token(model):
        raise ArtifactError(
            f"{path}: a {type(model).__name__} has no value for each token. Set value_model.init: policy"
        )
    for head in scalar_heads(model):
        torch.nn.init.zeros_(head.weight)
        if head.bias is not None:
            torch.nn.init.zeros_(head.bias)
    # It may come from a reward model, but its values are not scores to be normalised.
    for key in (*FACTS, *CUTS):
        vars(model.config).pop(key, None)
    return model


def load_value_model(path: str) -> PreTrainedModel:
    """A value model as it was saved, with its head."""
    model = _load(AutoModelForSequenceClassification, path, None)
    if not reads_last_token(model) or model.config.num_labels != 1:
        raise ArtifactError(f"{path}: a {type(model).__name__} has no value for each token. Give a `value_model`")
    return model


def check_shared_value_model(policy: PreTrainedModel) -> None:
    """Raise ArtifactError where `shared_value_model` would fail, which is called when all is trained."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        fits = reads_last_token(model) and model.base_model.state_dict().keys() == policy.base_model.state_dict().keys()
    except ValueError:
        fits = False
    if not fits:
        raise ArtifactError(
            f"value_model.init: shared: transformers has no sequence classifier on the backbone of a "
            f"{type(policy).__name__} to save the values as. Choose a ppo.advantage_estimator without values"
        )


def shared_value_model(policy: PreTrainedModel, head: torch.nn.Linear) -> PreTrainedModel:
    """A sequence classifier with a copy of the policy's backbone and this head on it, to be saved."""
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.base_model.load_state_dict(policy.base_model.state_dict())
    assert isinstance(model.score, torch.nn.Linear)
    model.score.load_state_dict(head.state_dict())
    return model


def scalar_weight(model: PreTrainedModel) -> torch.Tensor:
    """The weight [labels, H] of the head `score`."""
    assert isinstance(model.score, torch.nn.Linear)
    return model.score.weight


def scalar_heads(model: PreTrainedModel) -> list[torch.nn.Linear]:
    """The linear layers outside the backbone that end in the labels."""
    backbone = set(model.base_model.modules())
    return [
        module
        for module in model.modules()
        if module not in backbone
        and isinstance(module, torch.nn.Linear)
        and module.out_features == model.config.num_labels
    ]


def reads_last_token(model: PreTrainedModel) -> bool:
    """Is this a causal backbone with a linear `score` head, read at the last real token?

    transformers' decoders are (`LlamaForSequenceClassification` and its like); encoders pool in their own
    way and have no `score`.
    """
    return isinstance(getattr(model, "score", None), torch.nn.Linear)


def is_language_model(path: str, revision: str | None = None) -> bool:
    """Was the model at `path` saved as one that predicts the next token?"""
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(name in causal for name in config.architectures or ())


def prepare(model: PreTrainedModel, device: torch.device) -> str | None:
    """Move the model to the device and choose the fastest layers that compute the same.

    Returns lines for the user if anything stays slower, else None. Raises ArtifactError for a classifier whose score of
    a text depends on the other texts in its batch.
    """
    torch.nn.Module.to(model, device)
    lines = [choose_attention(model)]
    if type(model).__name__.endswith("ForSequenceClassification") and not reads_last_token(model):
        _require_no_padding_seen(model)
    lines += [use_fast_linear(model), use_fast_norm(model), use_fast_attention(model)]
    return "\n".join(filter(None, lines)) or None


@torch.no_grad()
def _require_no_padding_seen(model: PreTrainedModel) -> None:
    """Raise ArtifactError where padding behind a text changes its score, as it does XLNet's, which is read at the end.

    An encoder pools in a way of its own, and it is scored on padded batches (`sequence_scores`).
    """
    was_training = model.training
    model.eval()
    text = [(7 * i + 3) % vocabulary_rows(model) for i in range(5)]
    ids = torch.tensor([text + [model.config.pad_token_id or 0] * 4], device=model.device)
    mask = torch.tensor([[1] * 5 + [0] * 4], device=model.device)
    padded = model(input_ids=ids, attention_mask=mask).logits.float()
    alone = model(input_ids=ids[:, :5], attention_mask=mask[:, :5]).logits.float()
    model.train(was_training)
    gap = ((padded - alone).abs().max() / alone.abs().max().clamp_min(1.0)).item()
    if not gap <= PADDING_TOLERANCE:
        raise ArtifactError(
            f"{type(model).__name__}: padding behind a text changes its score, by {gap:.1e}, so it would hang on what "
            "else is scored with it. Give a reward model of another family"
        )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise ArtifactError where the tokenizer has ids that the model has no embedding for."""
    rows = vocabulary_rows(model)
    if len(tokenizer) > rows:
        raise ArtifactError(
            f"{path}: the tokenizer has {len(tokenizer)} tokens, the model embeds {rows}. "
            "They are not of one model: give the directory that both were saved to"
        )


def same_tokenizer(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Do equal texts give equal ids, so that ids may pass from one model to the other?

    `b` may have more special tokens than `a` (a padding token that its training added).
    """
    vocab_a, vocab_b = a.get_vocab(), b.get_vocab()
    if any(vocab_b.get(token) != i for token, i in vocab_a.items()) or a.eos_token_id != b.eos_token_id:
        return False
    probe = "The quick brown fox, 12 of 345;\n\nHuman: Hello there!\n\nAssistant: naive cafe"
    return a(probe)["input_ids"] == b(probe)["input_ids"]


def ensure_pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a sequence classifier a padding token that is not EOS.

    transformers finds the last real token of a padded row as the last that is not the padding token: with
    pad = EOS (GPT-2, Qwen base models, Llamas) it would read the score before EOS.
    """
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
        if len(tokenizer) > vocabulary_rows(model):
            with seeded(0, "padding token"):
                model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.pad_token_id = tokenizer.pad_token_id


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """A plain Hugging Face directory: safetensors, config, tokenizer, generation_config."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    except Exception as error:
        # safetensors and tokenizers write from Rust and tell of a full disk in errors of their own.
        if isinstance(error, OSError | SafetensorError) or "os error" in str(error):
            raise ArtifactError(f"{directory}: cannot be written ({_reason(error)}). Make room") from None
        raise
    finally:
        model.set_attn_implementation(implementation)


def save_facts(model: PreTrainedModel, facts: dict[str, float | str], directory: Path) -> None:
    """Add facts to the config of a saved model, as attributes that `from_pretrained` gives back."""
    path = directory / "config.json"
    for key, value in facts.items():
        setattr(model.config, key, value)
    try:
        config = json.loads(path.read_text(encoding="utf-8")) | facts
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written ({error.strerror or error})") from None


def _load(auto: Any, path: str, revision: str | None, *, new_head: bool = False, **settings: int) -> PreTrainedModel:
    _check_directory(path, revision, weights=True)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False, **settings)
        # Its own choice of attention could be a kernel of the hub, which is code.
        config._attn_implementation = None
        _refuse_endless(path, config.get_text_config())
        _refuse_pickles(path, revision, config)
        with _no_conversion():
            model, info = auto.from_pretrained(
                path,
                config=config,
                revision=revision,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=new_head,
            )
    except ArtifactError:
        raise
    except Exception as error:
        raise ArtifactError(f"{path}: no model can be loaded ({_reason(error)})") from None
    head = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
    missing = sorted(set(info["missing_keys"]) - (head if new_head else set()))
    wrong = sorted(str(key[0]) for key in info["mismatched_keys"] if not (new_head and key[0] in head))
    if missing:
        raise ArtifactError(
            f"{path}: {len(missing)} weights of {type(model).__name__} are not in the file "
            f"({', '.join(missing[:3])}), they would be random. Give a directory that was saved as this kind of model"
        )
    if wrong:
        raise ArtifactError(f"{path}: weights have other shapes than config.json says ({', '.join(wrong[:3])})")
    set_dropout_off(model)
    if not model.config.is_encoder_decoder:
        _try_out(model, path)
    model.eval()
    return model


@contextlib.contextmanager
def _no_conversion() -> Iterator[None]:
    """Keep transformers from asking the hub's conversion service to turn a pickle into safetensors.

    transformers reads this environment variable at each load.
    """
    name = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@torch.no_grad()
def _try_out(model: PreTrainedModel, path: str) -> None:
    """Raise ArtifactError where two tokens can't go through, as training would have them: config.json may say anything,
    and what it says of heads, layers or dropout is first read here."""
    try:
        model.train()(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    except Exception as error:
        raise ArtifactError(f"{path}: its config.json describes no model that computes ({_reason(error)})") from None


def _check_directory(path: str, revision: str | None, *, weights: bool) -> None:
    place = Path(path)
    if not place.exists():
        if is_local(path):
            raise ArtifactError(f"{path}: no such directory (looked in {Path.cwd()}), and not a hub id")
        require_hub_model(path, revision)
        return
    if not place.is_dir():
        raise ArtifactError(f"{path}: is a file, a Hugging Face model directory is needed")
    if not (place / "config.json").is_file():
        raise ArtifactError(f"{path}: no config.json, so it is no Hugging Face model directory")
    if weights and not any(place.glob("*.safetensors")):
        pickles = [p.name for p in place.glob("*.bin")]
        found = f"found {pickles[0]}, a pickle is never read" if pickles else "no weights"
        raise ArtifactError(f"{path}: {found}, *.safetensors is needed. Save it again with save_pretrained")


def _refuse_endless(path: str, config: PreTrainedConfig) -> None:
    """Raise ArtifactError for more layers or experts than any model has: they would be built one by one without end."""
    for key, value in config.to_dict().items():
        if isinstance(value, int) and value > MOST_LAYERS and ("layer" in key or "expert" in key):
            raise ArtifactError(f"{path}: config.json says {key}: {str(value)[:20]}, no model has so many")


def _refuse_pickles(path: str, revision: str | None, config: PreTrainedConfig) -> None:
    """Raise ArtifactError where a model's own files send transformers to a pickle, or out of its directory.

    `use_safetensors` holds for the usual names only: config.json may name any file as the weights, an index any
    file as a part of them, and an adapter's weights are read from a pickle where there is nothing else.
    """
    if find_adapter_config_file(path, revision=revision) is not None:
        raise ArtifactError(f"{path}: has the adapter_config.json of an adapter. Merge it into its model and save that")
    names = [getattr(config, "transformers_weights", None) or "model.safetensors"]
    with contextlib.suppress(OSError):
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
        names += json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"].values()
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ArtifactError(
                f"{path}: its files name {name!r} as weights, only *.safetensors beside config.json are read. "
                "Save it again with save_pretrained"
            )


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it asks for trust_remote_code, and no code that comes with a model is run here"
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
