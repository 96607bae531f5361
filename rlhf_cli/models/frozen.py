"""Weights that are not trained: which ones (`freeze`), and in which precision they are held."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_cli.config.models import Lora, Quantization
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.adapter_files import attach, own_generation_config, read_adapter
from rlhf_cli.models.deferred import is_deferred, read_deferred, take
from rlhf_cli.models.forward import compute_dtype
from rlhf_cli.models.heads import is_encoder, scalar_heads
from rlhf_cli.models.load import load_policy, stores_int8, take_facts, try_out
from rlhf_cli.models.quantized import quantize, quantize_int8, quantized_layers, use_inference_kernel
from rlhf_cli.processes.sharding import is_sharded


def frozen_policy(
    path: str,
    revision: str | None,
    device: torch.device,
    precision: str,
    quantization: Quantization | Literal["int8"] | None = None,
) -> PreTrainedModel:
    """A language model that is not trained, on the CPU: quantized, as in its files, or held as `hold_frozen` says."""
    if quantization is None and stores_int8(path, revision):
        quantization = "int8"
    adapter = read_adapter(path) if quantization is not None else None
    if adapter is not None and adapter.quantization == quantization and not adapter.is_classifier:
        # The adapters fit just these rounded weights. Merged, the sum would be rounded again.
        model = frozen_policy(adapter.base.path, adapter.base.revision, device, precision, quantization)
        attach(model, adapter, with_head=False)
        take_facts(model, adapter)
        model.generation_config = own_generation_config(path) or model.generation_config
        return model.requires_grad_(False)
    model = load_policy(path, revision, deferred=quantization is not None or is_held(device, precision), frozen=True)
    model.requires_grad_(False)
    if quantization is not None and model.config.is_encoder_decoder:
        raise ConfigError(f"--quantize: is not offered for an encoder-decoder ({type(model).__name__}). Remove it")
    if quantization == "int8":
        quantize_int8(model, device, "--quantize int8")
    elif quantization is not None:
        quantize(model, quantization, f"--quantize {quantization}")
        use_inference_kernel(model, device)
    hold_frozen(model, device, precision, exact=False)
    return model


class HeldEmbedding(nn.Embedding):
    """An embedding whose weight is held in 16 bits and whose output is float32."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).float()


def hold_base(model: PreTrainedModel, lora: Lora, key: str, device: torch.device, precision: str) -> None:
    """Freeze the weights that will be under adapters, and hold them in 4 bits or as `hold_frozen` does.

    Call it before the model moves to `device`: in float32 it may not fit there. Raises ConfigError, naming the config
    `key`, if the weights cannot be quantized.
    """
    model.requires_grad_(False)
    if lora.quantize is not None and not quantized_layers(model):
        quantize(model, lora.quantize, f"{key}.quantize")
    hold_frozen(model, device, precision, exact=True)


@torch.no_grad()
def hold_frozen(
    model: PreTrainedModel,
    device: torch.device,
    precision: str,
    *,
    exact: bool,
    constant: bool = True,
    others: Collection[Tensor] = (),
) -> None:
    """Keep frozen weights in the 16-bit format that the passes on `device` compute in, if they do. No result changes.

    Autocast rounds the weights of linear layers and of the head over the vocabulary before each product, so a pass
    gives the same bits. Embeddings are kept in 16 bits only if nothing is lost. Norms, scalar heads and encoders, whose
    passes run without autocast, stay in float32. Deferred weights are read one after the other.

    Args:
        exact: only weights that lose nothing, as in most published models: for a base whose merged weights are saved.
        constant: False for a copy whose weights will be replaced: its embeddings stay in float32.
        others: weights of other models that this one shares. They are not touched.

    Raises:
        ArtifactError: a deferred weight is not finite, or the model cannot compute.
    """
    was_deferred, dtype = is_deferred(model), compute_dtype(device, precision)
    if dtype != torch.float32 and not is_encoder(model):
        embeddings, special = _embeddings(model)
        tables = {id(module.weight) for module in embeddings}
        skipped = special | {id(weight) for weight in others} | (set() if constant else tables)
        for module in [*_linear_layers(model), *embeddings]:
            for weight in module.parameters(recurse=False):
                if weight.requires_grad or weight.dtype != torch.float32 or id(weight) in skipped:
                    continue
                given = take(weight)
                may_round = not exact and id(weight) not in tables
                weight.data = given.to(dtype) if may_round or _is_lossless(given, dtype) else given.float()
        give_float32(model)
    if was_deferred:
        read_deferred(model)  # the weights that stay in float32
        try_out(model, model.name_or_path or "")


def is_held(device: torch.device, precision: str) -> bool:
    """Whether `hold_frozen` changes anything: the passes compute in 16 bits."""
    return compute_dtype(device, precision) != torch.float32


def _is_lossless(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether the values are numbers of `dtype`, compared a part at a time, which needs little memory."""
    parts = () if values.dtype == dtype else values.split(1024)
    return all(torch.equal(part.to(dtype).float(), part.float()) for part in parts)


@torch.no_grad()
def hold_trained(model: PreTrainedModel) -> None:
    """Hold the trained matrices in bfloat16, for `optimizer.precision: bfloat16`.

    Norms, biases, scalar heads and adapters stay in float32. A sharded model holds them so already (`shard_model`).
    """
    if not is_sharded(model):
        for weight in trained_matrices(model):
            weight.data = weight.data.bfloat16()
        give_float32(model)


def trained_matrices(model: PreTrainedModel) -> list[nn.Parameter]:
    """The weights that `optimizer.precision: bfloat16` holds in bfloat16."""
    embeddings, special = _embeddings(model)
    weights = [p for module in [*_linear_layers(model), *embeddings] for p in module.parameters(recurse=False)]
    return [p for p in weights if p.requires_grad and p.ndim >= 2 and id(p) not in special]


def give_float32(model: PreTrainedModel) -> None:
    """Let the embeddings that are held in 16 bits return float32."""
    for module in _embeddings(model)[0]:
        if module.weight.dtype != torch.float32:
            module.__class__ = HeldEmbedding


@torch.no_grad()
def release(model: nn.Module) -> None:
    """Free the weights of a model. A sharded one keeps its share."""
    if not is_sharded(model):
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data = tensor.data.new_empty(0)


def _embeddings(model: PreTrainedModel) -> tuple[list[nn.Embedding], set[int]]:
    """The plain embeddings, and the ids of the weights of other classes, which may read their number format (Gemma)."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    plain = [module for module in modules if type(module) in (nn.Embedding, HeldEmbedding)]
    return plain, {id(module.weight) for module in modules if module not in plain}


def _linear_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The linear layers of the backbone, without adapters, and the head over the vocabulary."""
    for name, module in model.base_model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in name:
            yield module
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        yield head


# ---------------------------------------------------------------------------------------- which weights are not trained


RANGE = re.compile(r"(\d{1,5})-(\d{1,5})")
NUM_NAMES = 12
"""Names that a message lists at most."""


def freeze(model: PreTrainedModel, patterns: Sequence[str], key: str) -> str | None:
    """Exclude the weights that match a pattern from training; returns a line for the user, or None without patterns.

    A pattern (`matches`) may use `embeddings` for the input embeddings and `layers` for the stack of layers, whatever
    the family calls them. The scalar head of a classifier is always trained. Raises ConfigError, naming the config
    `key`, for a pattern or an end of a range that matches nothing, and if no weight is left to train.
    """
    if not patterns:
        return None
    weights = _weights(model)
    for pattern in patterns:
        for form in (RANGE.sub(r"\1", pattern), RANGE.sub(r"\2", pattern), pattern):
            if not any(matches(name, form) for name, _ in weights):
                text = f"{form!r} matches no weight of this {type(model).__name__}"
                raise ConfigError(f"{key}: {text}{_advice(form, [name for name, _ in weights])}")
    for name, weight in weights:
        if any(matches(name, pattern) for pattern in patterns):
            weight.requires_grad_(False)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if trained == 0:
        raise ConfigError(f"{key}: matches all {total:,} weights, so nothing would be trained. Remove a pattern")
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings().weight
    shared = head is not None and head.weight is embeddings and not embeddings.requires_grad
    also = " (the output head shares the embeddings, so it is frozen too)" if shared else ""
    return f"{key}: {trained:,} of {total:,} weights are trained{also}"


def matches(name: str, pattern: str) -> bool:
    """Whether a name contains the parts of the pattern, between dots, one after another.

    `*` in a part matches any text, and a part such as `0-3` the numbers 0 to 3.

    >>> name = "model.layers.2.mlp.up_proj.weight"
    >>> [matches(name, pattern) for pattern in ("layers.0-2", "layers.3", "mlp.*", "layer", "*_proj", "0-9")]
    [True, False, True, False, True, True]
    """
    parts, wanted = name.split("."), pattern.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(_is_part, parts[start:], wanted)) for start in starts)


def _is_part(part: str, wanted: str) -> bool:
    ends = RANGE.fullmatch(wanted)
    if ends is None:
        return fnmatchcase(part, wanted)
    return part.isdecimal() and int(ends[1]) <= int(part) <= int(ends[2])


def _weights(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """Every weight outside the scalar heads under all of its names, `embeddings` and `layers.<number>...` included."""
    heads = {id(weight) for head in scalar_heads(model).values() for weight in head.parameters()}
    named = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) not in heads]
    depth = model.config.get_text_config().num_hidden_layers
    for stack, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            prefix = f"{stack}."
            named += [(f"layers.{name.removeprefix(prefix)}", p) for name, p in named if name.startswith(prefix)]
            break
    return [*(("embeddings", p) for p in model.get_input_embeddings().parameters()), *named]


def _advice(form: str, names: Sequence[str]) -> str:
    """The end of a message: the pattern with each part replaced by the most similar one, or the names that exist."""
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    if re.fullmatch(r"layers\.\d+", form) and layers:
        return f"; its layers are 0 to {len(layers) - 1}"
    parts = list(dict.fromkeys(part for name in names for part in name.split(".") if not part.isdecimal()))
    close = ".".join(
        part if part in parts else next(iter(difflib.get_close_matches(part, parts, 1)), part)
        for part in form.split(".")
    )
    if any(matches(name, close) for name in names):
        return f"; did you mean {close}?"
    return f"; parts of its names are {', '.join(parts[:NUM_NAMES])}{', ...' if len(parts) > NUM_NAMES else ''}"
