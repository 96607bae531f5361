"""Write a trained model for other programs: in another number format, in shards, quantized, or as adapters alone."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    TorchAoConfig,
)

from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.models.adapter_files import WEIGHTS, read_adapter
from rlhf_cli.models.adapters import head_names, merge_in_place
from rlhf_cli.models.deferred import is_deferred, take
from rlhf_cli.models.forward import PRECISIONS
from rlhf_cli.models.heads import offer_classifier, scalar_heads
from rlhf_cli.models.load import (
    check_directory,
    check_weights,
    is_language_model,
    load_policy,
    load_reward_model,
    load_tokenizer,
    reason_of,
    set_dropout_off,
    try_out,
)
from rlhf_cli.models.save import save
from rlhf_cli.models.seq2seq import is_seq2seq, is_seq2seq_config
from rlhf_cli.program import install_extra
from rlhf_cli.run.artifacts import ADAPTER_CONFIG, is_adapter, model_directory

Dtype = Literal["bfloat16", "float16", "float32"]
INT4_GROUP = 128
"""Weights that share a scale in torchao's int4."""


@torch.no_grad()
def load_model(path: str, dtype: Dtype, *, heads_in_float32: bool = False) -> PreTrainedModel:
    """A language model or a sequence classifier, whichever was saved, as `dtype` and with its adapters merged.

    If the weights can be deferred, one is read, gets its adapter in float32 and is converted before the next.
    """
    check_directory(path, None, weights=True)
    load = load_policy if is_language_model(path) else load_reward_model
    model = load(path, deferred=True)
    was_deferred = is_deferred(model)
    heads = scalar_heads(model) if heads_in_float32 else {}
    for name, weight in model.named_parameters():
        weight.data = take(weight).to(torch.float32 if name.rpartition(".")[0] in heads else PRECISIONS[dtype])
    if was_deferred and dtype != "float16":  # a CPU may lack operations in float16
        try_out(model, path)
    return model.eval()


def dtype_of(path: str, revision: str | None = None) -> Dtype | None:
    """The number format that a model's config.json names; the base's for adapters. None if it is unknown."""
    path = model_directory(path)
    while (adapter := read_adapter(path)) is not None:
        path, revision = adapter.base.path, adapter.base.revision
    try:
        check_directory(path, revision, weights=False)
        dtype = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False).dtype
    except (ArtifactError, OSError, ValueError):
        return None
    return next((name for name in get_args(Dtype) if dtype is getattr(torch, name)), None)


def write_model(path: str, folder: Path, dtype: Dtype, max_shard_size: str) -> int:
    """Write the model at `path` in this number format, and its tokenizer; returns its number of parameters.

    Adapters are merged in float32. Raises ConfigError if a weight is too large for float16.
    """
    model = load_model(path, dtype)
    torch.nn.Module.to(model, PRECISIONS[dtype])  # buffers, too
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ConfigError(f"--dtype: weight {name} of {path} is too large for {dtype}. Give bfloat16 or float32")
    save(model, load_tokenizer(path), folder, max_shard_size=max_shard_size)
    return model.num_parameters()


def require_torchao(kind: Literal["int8", "int4"]) -> None:
    """Raise ConfigError if torchao cannot quantize to this format here."""
    if importlib.util.find_spec("torchao") is None:
        install = install_extra("torchao", "torchao")
        raise ConfigError(f"--quantize {kind}: needs the package torchao (extra torchao). Install it: {install}")
    if kind == "int4" and not (torch.cuda.is_available() and importlib.util.find_spec("mslk")):
        raise ConfigError(
            "--quantize int4: torchao's kernels for it need a CUDA GPU and the package mslk. Give --quantize int8, or "
            "--format gguf --quantize q4_k_m"
        )


def write_quantized(path: str, folder: Path, dtype: Dtype, kind: Literal["int8", "int4"], max_shard_size: str) -> int:
    """`write_model` with the linear layers as integers of torchao. Raises ConfigError if none can be quantized."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    config: Any = Int8WeightOnlyConfig() if kind == "int8" else Int4WeightOnlyConfig(group_size=INT4_GROUP)
    with tempfile.TemporaryDirectory(dir=folder) as plain:
        number = write_model(path, Path(plain), dtype, "50GB")
        config_of_model, heads = AutoConfig.from_pretrained(plain, trust_remote_code=False), None
        auto: Any = AutoModelForSeq2SeqLM if is_seq2seq_config(config_of_model) else AutoModelForCausalLM
        if not is_language_model(plain):
            offer_classifier(type(config_of_model))
            auto = AutoModelForSequenceClassification
            with torch.device("meta"):
                heads = head_names(auto.from_config(config_of_model))
        try:
            settings = TorchAoConfig(config, modules_to_not_convert=heads)
            model = auto.from_pretrained(plain, quantization_config=settings, use_safetensors=True)
        except (RuntimeError, ImportError, AssertionError) as error:
            raise ConfigError(f"--quantize {kind}: torchao cannot quantize this model ({reason_of(error)})") from None
        if not _quantized(model):
            raise ConfigError(
                f"--quantize {kind}: torchao quantizes nn.Linear layers, and this {type(model).__name__} has none. "
                "Give --format gguf"
            )
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        load_tokenizer(plain).save_pretrained(folder)
    return number


def _quantized(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """(layer, name of the parameter) of every weight that is an integer tensor of torchao."""
    return [
        (module, name)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False)
        if type(weight).__module__.startswith("torchao.") or type(weight.data).__module__.startswith("torchao.")
    ]


def adapter_directory(path: str) -> str:
    """The adapters of a model that was trained with them: its own directory, or `adapter/` inside it."""
    if is_adapter(path):
        return path
    if not Path(path).is_dir():
        raise ArtifactError(f"{path}: no such directory. Give a run, one of its stages or a model directory")
    inner = Path(path) / "adapter"
    if not (inner / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"--format adapter: {path} was trained without LoRA, so it has no adapters")
    return str(inner)


def write_adapter(path: str, folder: Path, dtype: Dtype | None, final: Path) -> int:
    """Copy the adapters of a model, as `dtype` if given, to a folder that will be at `final`; returns their weights."""
    source, tokenizer = adapter_directory(path), load_tokenizer(path)
    adapter = read_adapter(source)
    assert adapter is not None
    with contextlib.suppress(OSError, ValueError):  # without the base there is nothing to compare
        config = AutoConfig.from_pretrained(adapter.base.path, revision=adapter.base.revision, trust_remote_code=False)
        if len(tokenizer) > config.get_text_config().vocab_size:
            what = f"{path} has a padding token that its base lacks, and adapters have no embeddings"
            raise ConfigError(f"--format adapter: {what}. Export the whole model, without the option")
    adapter.write_about(folder, final)
    tensors = load_file(Path(source) / WEIGHTS)
    if dtype is not None:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    generation = Path(path) / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, folder / generation.name)
    return sum(tensor.numel() for tensor in tensors.values())


def load_exported(folder: Path, original: PreTrainedModel, *, gguf_file: str | None = None) -> PreTrainedModel:
    """An exported model in float32 as transformers alone reads it. Raises ArtifactError if it cannot."""
    writes: Any = AutoModelForSeq2SeqLM if is_seq2seq(original) else AutoModelForCausalLM
    auto = writes if original.can_generate() else AutoModelForSequenceClassification
    settings: dict[str, Any] = {}
    if gguf_file is not None:  # Its own config of a GGUF file lacks some keys, such as GPT-2's number of positions.
        settings = {"gguf_file": gguf_file, "config": copy.deepcopy(original.config), "dtype": torch.float32}
    if is_adapter(folder) and not original.can_generate():
        settings["num_labels"] = original.config.num_labels
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # A GGUF file has a bar of its own.
            model, info = auto.from_pretrained(
                folder, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **settings
            )
    except Exception as error:
        raise ArtifactError(f"{folder.name}: transformers cannot load it ({reason_of(error)})") from None
    for module, name in _quantized(model):
        weight: Any = getattr(module, name)
        setattr(module, name, torch.nn.Parameter(weight.dequantize().float(), requires_grad=False))
    if getattr(model, "hf_quantizer", None) is not None:
        model.hf_quantizer.remove_quantization_config(model)  # transformers casts no quantized model
    if not is_adapter(folder):
        check_weights(model, info, str(folder), new_head=False)
    merge_in_place(model)
    set_dropout_off(model)
    return model.float().eval()
