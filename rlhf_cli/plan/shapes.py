"""The shapes of models: the numbers that they hold, and the bytes that a token costs in a training pass.

A run takes them from its models (`shape_of_loaded`). A plan has no weights, and builds each model from its config.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_cli.config.models import Lora
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.deferred import BLOCK
from rlhf_cli.models.forward import is_packed, positions, vocabulary_rows
from rlhf_cli.models.frozen import freeze
from rlhf_cli.models.heads import offer_classifier
from rlhf_cli.models.load import reason_of, set_dropout_off
from rlhf_cli.plan.activations import activation_bytes, fake_activation_bytes
from rlhf_cli.tensor_ops import num_weights, weight_shape

SIDE_BY_SIDE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers whose weights a fast decoder copies, to compute them as one product."""
UNREAD = ("_name_or_path", "transformers_version", "dtype")
"""Keys of a config that do not change the model."""
_SHAPES: dict[Hashable, Shape] = {}
"""The shapes that this process has counted, by everything that decides them."""


@dataclass(frozen=True)
class Shape:
    """A model without its weights. Counts are numbers, unless they say bytes."""

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
    """Numbers of the largest weight of experts, which holds all experts of a layer; 0 without experts."""
    cache: int
    """Numbers of the keys and values of a token."""
    positions: int
    """The longest sequence that it reads, in tokens."""
    base: int
    """All numbers, without adapters."""
    trained: int
    """Numbers that get a gradient, adapters included."""
    frozen: int
    """Numbers that do not."""
    frozen_linear: int
    """Numbers of frozen linear layers, the head over the vocabulary included."""
    frozen_tables: int
    """Numbers of frozen embeddings that are not also the head."""
    quantizable: int
    """Numbers of the linear layers that NF4 can hold."""
    linear: int
    """Numbers of all linear layers and the head."""
    joined: int
    """Numbers of the layers in SIDE_BY_SIDE."""
    experts: int
    """Numbers of the experts, whose weights have three dimensions: they are in no linear layer, and stay in float32."""
    adapted_experts: int
    """Those with adapters, which peft adds to a copy of them in each pass."""
    is_packed: bool
    """Whether it runs on packed rows. A plan knows this only for a trained model."""
    kept: float
    """Bytes for each token that autograd keeps until the backward pass."""

    @property
    def weights(self) -> int:
        """All numbers, adapters included."""
        return self.trained + self.frozen

    @property
    def layer(self) -> int:
        """The numbers of one layer, about."""
        in_blocks = self.linear + self.experts - self.vocabulary * self.hidden * self.has_head
        return round(in_blocks / self.layers)

    @property
    def ends(self) -> int:
        """The numbers of the embeddings and the head."""
        return self.base - self.layer * self.layers


def shape_of(
    config: PreTrainedConfig,
    is_classifier: bool,
    precision: str,
    lora: Lora | None = None,
    frozen: Sequence[str] | None = (),
    key: str = "model",
    device: str = "cpu",
) -> Shape:
    """The shape of a model whose passes compute in a precision on a device. A classifier has one score, no head.

    `lora` are the adapters that are trained, and `frozen` are patterns of weights that are not trained; None trains
    nothing. Raises ConfigError, naming the config `key`, if transformers cannot build the model, or if a pattern or a
    target of `lora` matches nothing.
    """
    if config.is_encoder_decoder:
        raise ConfigError(f"{key}: is an encoder-decoder, and rlhf plan counts decoders and encoders only")
    text = json.dumps({k: v for k, v in config.to_dict().items() if k not in UNREAD}, sort_keys=True, default=str)
    # Quantized layers keep what plain ones keep. Fake tensors cannot be quantized.
    plain = None if lora is None else lora.model_copy(update={"quantize": None})
    names = None if frozen is None else tuple(frozen)
    known = (text, type(config), is_classifier, precision, repr(plain), names, key, device)
    if known in _SHAPES:
        return _SHAPES[known]

    def build(layers: int | None = None) -> PreTrainedModel:
        try:
            fresh = type(config).from_dict(json.loads(text))
        except Exception as error:
            raise ConfigError(f"{key}: transformers refuses this config ({reason_of(error)})") from None
        inner = fresh.get_text_config()
        if layers is not None:
            inner.num_hidden_layers = layers
            if getattr(inner, "layer_types", None):
                with contextlib.suppress(AttributeError):  # some families compute it from the number
                    inner.layer_types = inner.layer_types[:layers]
        return built(fresh, is_classifier, key)

    def shape(layers: int | None = None) -> Shape:
        model = build(layers)
        if frozen is None:
            model.requires_grad_(False)
        else:
            freeze(model, frozen, f"{key}.freeze")
        if plain is not None:
            add_lora(model, plain, f"{key}.lora", seed=0)
        return _shape_of(model, fake_activation_bytes(model, precision, device, key))

    whole, found = build(), None
    layers: int = whole.config.get_text_config().num_hidden_layers
    names_layers = lora is not None and any("." in target for target in lora.target_modules or ())
    if layers > 2 and not frozen and not names_layers:
        # If all layers are alike, each adds as much as the second one.
        of_one, of_two = astuple(shape(1)), astuple(shape(2))
        found = Shape(*(one + (layers - 1) * (two - one) for one, two in zip(of_one, of_two, strict=True)))
    _SHAPES[known] = found if found is not None and found.base == whole.num_parameters() else shape()
    return _SHAPES[known]


def shape_of_loaded(model: PreTrainedModel, precision: str) -> Shape:
    """The shape of a model in memory that is ready for training, before `gradient_checkpointing` and `compile`.

    A sharded model is counted whole, and all processes must call this.
    """
    return _shape_of(model, activation_bytes(model, precision))


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
    set_dropout_off(model)  # as of a loaded one: its masks would count
    return model


def _shape_of(model: PreTrainedModel, kept: float) -> Shape:
    """The shape of a model, of which autograd keeps `kept` bytes for each token."""
    inner, head = model.config.get_text_config(), model.get_output_embeddings()
    backbone = set(model.base_model.modules())
    layers: int = inner.num_hidden_layers
    heads = getattr(inner, "num_attention_heads", None) or 1
    head_dim = getattr(inner, "head_dim", None) or inner.hidden_size // heads
    weights = {name: weight for name, weight in model.named_parameters() if ".lora_" not in name}
    linear = {
        id(module.weight): (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in name
    }
    embeddings = {id(m.weight): m.weight for m in backbone if isinstance(m, nn.Embedding)}
    tables = [weight for key, weight in embeddings.items() if key not in linear]
    experts = [weight for weight in weights.values() if weight.ndim == 3]
    merged: list[Any] = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    adapted = [weight for weight in (module.get_param() for module in merged) if weight.ndim == 3]
    sizes = [weight_shape(weight) for weight in model.base_model.parameters() if id(weight) not in embeddings]
    widest = max((max(size) for size in sizes if len(size) == 2), default=inner.hidden_size)
    if experts:
        width = getattr(inner, "moe_intermediate_size", None) or getattr(inner, "intermediate_size", 0)
        widest = max(widest, (getattr(inner, "num_experts_per_tok", None) or 1) * max(width, inner.hidden_size))
    modules = [module for _, module in linear.values()]

    def numbers(weights: Iterable[torch.Tensor]) -> int:
        return sum(map(num_weights, weights))

    return Shape(
        layers=layers,
        hidden=inner.hidden_size,
        widest=widest,
        vocabulary=vocabulary_rows(model),
        has_head=head is not None,
        largest=max(map(num_weights, weights.values())),
        largest_expert=max(map(num_weights, experts), default=0),
        cache=2 * layers * (getattr(inner, "num_key_value_heads", None) or heads) * head_dim,
        positions=positions(model),
        base=numbers(weights.values()),
        trained=numbers(p for p in model.parameters() if p.requires_grad),
        frozen=numbers(p for p in model.parameters() if not p.requires_grad),
        frozen_linear=numbers(m.weight for m in modules if not m.weight.requires_grad and (m in backbone or m is head)),
        frozen_tables=numbers(weight for weight in tables if not weight.requires_grad),
        quantizable=numbers(
            m.weight for m in modules if isinstance(m, nn.Linear) and m in backbone and not m.in_features % BLOCK
        ),
        linear=numbers(m.weight for m in modules),
        joined=numbers(
            m.weight for name, m in linear.values() if name.removesuffix(".base_layer").endswith(SIDE_BY_SIDE)
        ),
        experts=numbers(experts),
        adapted_experts=numbers(adapted),
        is_packed=is_packed(model),
        kept=kept,
    )
