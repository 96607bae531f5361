"""Models without weights: the numbers that they hold, and the bytes that a token costs in a training pass.

A model is built from its config as fake tensors (`FakeTensorMode`). They have shapes and a device but no storage, and
torch runs the same operations on them as on real ones, autocast included. So what autograd keeps is counted on the very
layers that will run. Models of one and of two layers are built, and the other layers add the same again. A model whose
layers differ is built whole.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_cli.config.models import Lora
from rlhf_cli.errors import ConfigError
from rlhf_cli.kernels import attention
from rlhf_cli.kernels.linear import use_fast_linear
from rlhf_cli.kernels.norm import use_fast_norm
from rlhf_cli.kernels.rotation import use_fast_attention
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.cost import kept_bytes
from rlhf_cli.models.forward import autocast, hidden_at, vocabulary_rows
from rlhf_cli.models.freeze import freeze
from rlhf_cli.models.heads import offer_classifier
from rlhf_cli.models.limits import positions
from rlhf_cli.models.nf4 import BLOCK
from rlhf_cli.models.refusals import reason_of
from rlhf_cli.packing import pack
from rlhf_cli.tensor_ops import num_weights

ROW = 16
"""Tokens of each sequence in the pass whose memory is counted."""
SIDE_BY_SIDE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Layers whose weights the paged decoder copies, to compute them as one product."""
UNREAD = ("_name_or_path", "transformers_version", "dtype")
"""Keys of a config that do not change the model."""
KEY = "model"
"""The config key in messages, until `shape_of` replaces it."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Source:
    """Where a model comes from: its config, and the bytes of a number in its file."""

    config: PreTrainedConfig
    stored: int = 4


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
    kept: float
    """Bytes for each token that autograd keeps until the backward pass."""

    def plus(self, other: Counts, times: int) -> Counts:
        """These, and `times` the others."""
        return Counts(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Shape:
    """A model of a run without its weights."""

    name: str
    """What the run calls it: policy, value model, ..."""
    counts: Counts
    layers: int
    hidden: int
    widest: int
    """Numbers for each token in the widest tensor of a layer: those of a feed-forward."""
    vocabulary: int
    """Rows of the embedding."""
    has_head: bool
    """Whether it is a language model, with a head over the vocabulary."""
    largest: int
    """Numbers of the largest weight."""
    cache: int
    """Numbers of the keys and values of a token."""
    stored: int
    """Bytes of a number in its file."""
    positions: int
    """The longest sequence that it reads, in tokens."""
    lora: Lora | None = None

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
        return round((self.counts.linear - self.vocabulary * self.hidden * self.has_head) / self.layers)

    @property
    def ends(self) -> int:
        """The numbers of the embeddings and the head."""
        return round(self.counts.base) - self.layer * self.layers


def shape_of(
    name: str,
    source: Source,
    *,
    is_classifier: bool,
    precision: str,
    lora: Lora | None = None,
    frozen: Sequence[str] | None = (),
    key: str = "model",
) -> Shape:
    """The shape of a model.

    Args:
        name: what the run calls it.
        source: its config.
        is_classifier: with one scalar score instead of a head over the vocabulary.
        precision: of the passes, float32 or bfloat16.
        lora: the adapters that are trained, or None.
        frozen: patterns of weights that are not trained. None: nothing is trained.
        key: the config key that messages name.

    Raises:
        ConfigError: transformers cannot build the model, or a pattern or a target of `lora` matches nothing.
    """
    # Quantized layers keep what plain ones keep. Fake tensors cannot be quantized.
    plain = None if lora is None else lora.model_copy(update={"quantize": None}).model_dump_json()
    settings = {name: value for name, value in source.config.to_dict().items() if name not in UNREAD}
    text = json.dumps(settings, sort_keys=True, default=str)
    patterns = None if frozen is None else tuple(frozen)
    try:
        kind = type(source.config)
        shape = _shape(text, kind, is_classifier, precision, plain, patterns)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{key}{str(error).removeprefix(KEY)}") from None
    return replace(shape, name=name, stored=source.stored, lora=lora)


@functools.lru_cache(maxsize=256)
def _shape(
    text: str,
    kind: type[PreTrainedConfig],
    is_classifier: bool,
    precision: str,
    lora_text: str | None,
    frozen: tuple[str, ...] | None,
) -> Shape:
    lora = None if lora_text is None else Lora.model_validate_json(lora_text)

    def config(layers: int | None = None) -> PreTrainedConfig:
        try:
            read = kind.from_dict(json.loads(text))
        except Exception as error:
            raise ConfigError(f"{KEY}: transformers refuses this config ({reason_of(error)})") from None
        inner = read.get_text_config()
        if layers is not None:
            inner.num_hidden_layers = layers
            if getattr(inner, "layer_types", None):
                inner.layer_types = inner.layer_types[:layers]
        return read

    def counts(layers: int) -> Counts:
        return _counts(_built(config(layers), is_classifier), precision, lora, frozen)

    whole = _built(config(), is_classifier)
    inner = whole.config.get_text_config()
    layers: int = inner.num_hidden_layers
    found = None
    if layers > 2 and not frozen:
        one = counts(1)
        found = one.plus(counts(2).plus(one, -1), layers - 1)
    if found is None or round(found.base) != whole.num_parameters():
        found = counts(layers)
    heads = getattr(inner, "num_attention_heads", None) or 1
    head_dim = getattr(inner, "head_dim", None) or inner.hidden_size // heads
    tables = {id(p) for m in whole.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices = [p for p in whole.base_model.parameters() if p.ndim == 2 and id(p) not in tables]
    return Shape(
        name="",
        counts=found,
        layers=layers,
        hidden=inner.hidden_size,
        widest=max((max(p.shape) for p in matrices), default=inner.hidden_size),
        vocabulary=vocabulary_rows(whole),
        has_head=whole.get_output_embeddings() is not None,
        largest=max(p.numel() for p in whole.parameters()),
        cache=2 * layers * (getattr(inner, "num_key_value_heads", None) or heads) * head_dim,
        stored=4,
        positions=positions(whole),
    )


def _built(config: PreTrainedConfig, is_classifier: bool) -> PreTrainedModel:
    """A new model on the meta device. Raises ConfigError if transformers cannot build it."""
    if is_classifier:
        offer_classifier(type(config))
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    except Exception as error:
        raise ConfigError(f"{KEY}: transformers cannot build this {config.model_type} ({reason_of(error)})") from None
    return model


def _counts(model: PreTrainedModel, precision: str, lora: Lora | None, frozen: Sequence[str] | None) -> Counts:
    """The counts of a model on the meta device. Its layers become those that the stages use."""
    base = model.num_parameters()
    if frozen is None:
        model.requires_grad_(False)
    else:
        freeze(model, frozen, f"{KEY}.freeze")
    if lora is not None:
        add_lora(model, lora, f"{KEY}.lora", seed=0)
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
        return sum(module.weight.numel() for module in modules)

    layers = [module for _, module in linear.values()]
    return Counts(
        base=base,
        trained=trained,
        frozen=sum(num_weights(p) for p in model.parameters() if not p.requires_grad),
        frozen_linear=size([m for m in layers if not m.weight.requires_grad and (m in backbone or m is head)]),
        frozen_tables=sum(w.numel() for w in tables.values() if not w.requires_grad),
        quantizable=size(
            [m for m in layers if isinstance(m, nn.Linear) and m in backbone and not m.in_features % BLOCK]
        ),
        linear=size(layers),
        joined=size([m for name, m in linear.values() if name.removesuffix(".base_layer").endswith(SIDE_BY_SIDE)]),
        kept=_kept(model, precision),
    )


def _make_fake(model: PreTrainedModel) -> None:
    """Turn the weights and buffers of a model on the meta device into fake tensors on the CPU."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None and id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    is_weight = isinstance(old, nn.Parameter)
                    made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if is_weight else new
                if old is not None:
                    tensors[name] = made[id(old)]  # type: ignore[assignment]


def _kept(model: PreTrainedModel, precision: str) -> float:
    """Bytes for each token that autograd keeps in the backbone: those of eight rows minus those of four."""
    if not any(p.requires_grad for p in model.parameters()):
        return 0.0
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(model)
        for use in (use_fast_linear, use_fast_norm, use_fast_attention):
            use(model)
        try:
            model.set_attn_implementation(attention.EACH)
            is_packed = model.config._attn_implementation == attention.EACH
        except (TypeError, ValueError):
            is_packed = False

        def kept(rows: int) -> int:
            batch = pack([[1] * ROW] * rows)

            def compute() -> object:
                with autocast(CPU, precision):
                    if is_packed:
                        return hidden_at(model, batch, torch.arange(len(batch.ids)))
                    return model.base_model(input_ids=batch.ids.view(rows, ROW))

            return kept_bytes(compute)

        return (kept(8) - kept(4)) / (4 * ROW)
