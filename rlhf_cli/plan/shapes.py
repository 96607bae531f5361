"""The shapes of models: the numbers that they hold, and the bytes that a token costs in a training pass.

A run takes them from its models (`shape_of_loaded`). A plan has no weights, and builds each model from its config: one
of one layer and one of two, and the other layers add the same again. A model whose layers differ is built whole.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_cli.config.models import Lora
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.check import reason_of
from rlhf_cli.models.deferred import BLOCK
from rlhf_cli.models.forward import positions, vocabulary_rows
from rlhf_cli.models.freeze import freeze
from rlhf_cli.models.heads import offer_classifier
from rlhf_cli.plan.activations import activation_bytes, fake_activation_bytes
from rlhf_cli.tensor_ops import num_weights, weight_shape

SIDE_BY_SIDE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers whose weights the paged decoder copies, to compute them as one product."""
UNREAD = ("_name_or_path", "transformers_version", "dtype")
"""Keys of a config that do not change the model."""


@dataclass(frozen=True)
class Counts:
    """What a model holds and keeps; a layer adds its share to each."""

    base: float
    """Numbers, adapters excluded."""
    trained: float
    """Numbers that get a gradient, adapters included."""
    frozen: float
    """Numbers that do not."""
    frozen_linear: float
    """Numbers of frozen linear layers, the head over the vocabulary included."""
    frozen_tables: float
    """Numbers of frozen embeddings that are not also the head."""
    quantizable: float
    """Numbers of the linear layers that NF4 can hold."""
    linear: float
    """Numbers of all linear layers and the head."""
    joined: float
    """Numbers of the layers in SIDE_BY_SIDE."""
    experts: float
    """Numbers of the experts, whose weights have three dimensions: they are in no linear layer, and stay in float32."""
    adapted_experts: float
    """Those with adapters, which peft adds to a copy of them in each pass."""
    kept: float
    """Bytes for each token that autograd keeps until the backward pass."""

    def plus(self, other: Counts, times: int) -> Counts:
        """These, and `times` the others."""
        return Counts(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Shape:
    """A model without its weights."""

    counts: Counts
    layers: int
    hidden: int
    widest: int
    """Numbers for each token in the widest tensor of a layer: those of a feed-forward, or of its experts together."""
    vocabulary: int
    """Rows of the embedding."""
    has_head: bool
    """Whether it is a language model, with a head over the vocabulary."""
    largest: int
    """Numbers of the largest weight."""
    largest_expert: int
    """Numbers of the largest weight of experts, which has those of all experts of a layer; 0 without experts."""
    cache: int
    """Numbers of the keys and values of a token."""
    positions: int
    """The longest sequence that it reads, in tokens."""

    @property
    def weights(self) -> int:
        """All numbers, adapters included."""
        return round(self.counts.trained + self.counts.frozen)

    @property
    def trained(self) -> int:
        """The numbers that get a gradient."""
        return round(self.counts.trained)

    @property
    def layer(self) -> int:
        """The numbers of one layer, about."""
        in_blocks = self.counts.linear + self.counts.experts - self.vocabulary * self.hidden * self.has_head
        return round(in_blocks / self.layers)

    @property
    def ends(self) -> int:
        """The numbers of the embeddings and the head."""
        return round(self.counts.base) - self.layer * self.layers


def shape_of(
    config: PreTrainedConfig,
    is_classifier: bool,
    precision: str,
    lora: Lora | None = None,
    frozen: Sequence[str] | None = (),
    key: str = "model",
) -> Shape:
    """The shape of a model whose passes compute in a precision. A classifier has one score instead of a head.

    `lora` are the adapters that are trained, and `frozen` are patterns of weights that are not trained; None trains
    nothing. Raises ConfigError, naming the config `key`, if transformers cannot build the model, or if a pattern or a
    target of `lora` matches nothing.
    """
    if config.is_encoder_decoder:
        raise ConfigError(f"{key}: is an encoder-decoder, and rlhf plan counts decoders and encoders only")
    # Quantized layers keep what plain ones keep. Fake tensors cannot be quantized.
    plain = None if lora is None else lora.model_copy(update={"quantize": None}).model_dump_json()
    text = json.dumps({k: v for k, v in config.to_dict().items() if k not in UNREAD}, sort_keys=True, default=str)
    patterns = None if frozen is None else tuple(frozen)
    return _shape(text, type(config), is_classifier, precision, plain, patterns, key)  # type: ignore[arg-type]


def shape_of_loaded(model: PreTrainedModel, precision: str) -> Shape:
    """The shape of a model in memory that is ready for training, before `gradient_checkpointing` and `compile`.

    A trained model makes two short passes (`activation_bytes`). A sharded model is counted whole; all processes must
    call this.
    """
    return _with_counts(model, _counts(model, activation_bytes(model, precision)))


@functools.lru_cache(maxsize=256)
def _shape(
    text: str,
    kind: type[PreTrainedConfig],
    is_classifier: bool,
    precision: str,
    lora_text: str | None,
    frozen: tuple[str, ...] | None,
    key: str,
) -> Shape:
    lora = None if lora_text is None else Lora.model_validate_json(lora_text)

    def config(layers: int | None = None) -> PreTrainedConfig:
        try:
            read = kind.from_dict(json.loads(text))
        except Exception as error:
            raise ConfigError(f"{key}: transformers refuses this config ({reason_of(error)})") from None
        inner = read.get_text_config()
        if layers is not None:
            inner.num_hidden_layers = layers
            if getattr(inner, "layer_types", None):
                with contextlib.suppress(AttributeError):  # some families compute it from the number
                    inner.layer_types = inner.layer_types[:layers]
        return read

    def counts(layers: int) -> Counts:
        model = built(config(layers), is_classifier, key)
        if frozen is None:
            model.requires_grad_(False)
        else:
            freeze(model, frozen, f"{key}.freeze")
        if lora is not None:
            from rlhf_cli.models.adapters import add_lora

            add_lora(model, lora, f"{key}.lora", seed=0)
        return _counts(model, fake_activation_bytes(model, precision, key))

    whole = built(config(), is_classifier, key)
    layers: int = whole.config.get_text_config().num_hidden_layers
    found = None
    names_layers = lora is not None and any("." in target for target in lora.target_modules or ())
    if layers > 2 and not frozen and not names_layers:
        one = counts(1)
        found = one.plus(counts(2).plus(one, -1), layers - 1)
    if found is None or round(found.base) != whole.num_parameters():
        found = counts(layers)
    return _with_counts(whole, found)


def _with_counts(model: PreTrainedModel, counts: Counts) -> Shape:
    """The shape of a model whose counts are known. Its adapters are not looked at."""
    inner = model.config.get_text_config()
    layers: int = inner.num_hidden_layers
    heads = getattr(inner, "num_attention_heads", None) or 1
    head_dim = getattr(inner, "head_dim", None) or inner.hidden_size // heads
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    sizes = [
        weight_shape(p)
        for name, p in model.base_model.named_parameters()
        if id(p) not in tables and ".lora_" not in name
    ]
    widest = max((max(size) for size in sizes if len(size) == 2), default=inner.hidden_size)
    experts = _experts(model)
    if experts:
        width = getattr(inner, "moe_intermediate_size", None) or getattr(inner, "intermediate_size", 0)
        widest = max(widest, (getattr(inner, "num_experts_per_tok", None) or 1) * max(width, inner.hidden_size))
    return Shape(
        counts=counts,
        layers=layers,
        hidden=inner.hidden_size,
        widest=widest,
        vocabulary=vocabulary_rows(model),
        has_head=model.get_output_embeddings() is not None,
        largest=max(num_weights(p) for name, p in model.named_parameters() if ".lora_" not in name),
        largest_expert=max(map(num_weights, experts), default=0),
        cache=2 * layers * (getattr(inner, "num_key_value_heads", None) or heads) * head_dim,
        positions=positions(model),
    )


def built(config: PreTrainedConfig, is_classifier: bool, key: str) -> PreTrainedModel:
    """A new model on the meta device. Raises ConfigError, naming the config `key`, if transformers cannot build it."""
    if is_classifier:
        offer_classifier(type(config))
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise ConfigError(f"{key}: transformers cannot build this {config.model_type} ({reason_of(error)})") from None
    return model


def _counts(model: PreTrainedModel, kept: float) -> Counts:
    """The counts of a model, of which autograd keeps `kept` bytes for each token."""
    trained = sum(num_weights(p) for p in model.parameters() if p.requires_grad)
    head = model.get_output_embeddings()
    linear = {
        id(module.weight): (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in name
    }
    backbone = set(model.base_model.modules())
    tables = {id(m.weight): m.weight for m in backbone if isinstance(m, nn.Embedding) and id(m.weight) not in linear}

    def size(modules: list[nn.Linear | Conv1D]) -> int:
        return sum(num_weights(module.weight) for module in modules)

    layers = [module for _, module in linear.values()]
    return Counts(
        base=sum(num_weights(p) for name, p in model.named_parameters() if ".lora_" not in name),
        trained=trained,
        frozen=sum(num_weights(p) for p in model.parameters() if not p.requires_grad),
        frozen_linear=size([m for m in layers if not m.weight.requires_grad and (m in backbone or m is head)]),
        frozen_tables=sum(w.numel() for w in tables.values() if not w.requires_grad),
        quantizable=size(
            [m for m in layers if isinstance(m, nn.Linear) and m in backbone and not m.in_features % BLOCK]
        ),
        linear=size(layers),
        joined=size([m for name, m in linear.values() if name.removesuffix(".base_layer").endswith(SIDE_BY_SIDE)]),
        experts=sum(map(num_weights, _experts(model))),
        adapted_experts=sum(map(num_weights, _adapted_experts(model))),
        kept=kept,
    )


def _adapted_experts(model: PreTrainedModel) -> list[torch.Tensor]:
    """The weights of experts with adapters, which are in no linear layer. A pass adds the adapters to a copy."""
    modules: list[Any] = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    return [weight for weight in (module.get_param() for module in modules) if weight.ndim == 3]


def _experts(model: PreTrainedModel) -> list[nn.Parameter]:
    """The weights that hold all experts of a layer together: [experts, out, in]."""
    return [weight for weight in model.base_model.parameters() if weight.ndim == 3]
