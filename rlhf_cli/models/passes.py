"""Options for the forward and backward passes of training: gradient checkpointing, torch.compile, precision."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.data.batches import Budget, part_tokens
from rlhf_cli.errors import ConfigError
from rlhf_cli.kernels import attention
from rlhf_cli.kernels.linear import maker, multiplies_bfloat16
from rlhf_cli.models.cost import Work, peak_flops, work_of
from rlhf_cli.models.deferred import blocks
from rlhf_cli.models.forward import autocast, compute_dtype, hidden_at, is_packed
from rlhf_cli.models.frozen import hold_trained
from rlhf_cli.models.heads import is_encoder
from rlhf_cli.packing import pack
from rlhf_cli.processes.sharding import is_sharded
from rlhf_cli.processes.threads import is_large

FASTER_WEIGHTS = 10_000_000
"""Weights from which bfloat16 takes at most two thirds of float32's time on a CPU with instructions for it, measured on
an Intel Xeon with AMX and an AMD EPYC with avx512_bf16 (benchmarks/COSTS.md)."""


@dataclass(frozen=True)
class Passes:
    """How one model's training passes are computed, and what they cost."""

    budget: Budget  # of one microbatch
    work: Work
    peak_flops: float
    lines: list[str]  # to tell the user
    compile_s: float  # seconds spent on compiling


def set_up_training(model: PreTrainedModel, config: SFTConfig | RMConfig, device: torch.device, tokens: int) -> Passes:
    """Set up the passes of a model that is trained alone, of at most `tokens` tokens in a microbatch."""
    parts = 2 if device.type == "cpu" else 0
    fewest = fewest_tokens(model, device, config.precision)
    budget = Budget(tokens, config.training.microbatch_size, not is_packed(model), parts, fewest)
    work = work_of(model)
    lines, compile_s = set_up_passes([model], config, device)
    return Passes(budget, work, peak_flops(device, config.precision), lines, compile_s)


def fewest_tokens(model: PreTrainedModel, device: torch.device, precision: str) -> int:
    """`part_tokens` of a model whose passes compute in `precision`."""
    is_half = compute_dtype(device, precision) != torch.float32
    return part_tokens(sum(weight.numel() for weight in model.parameters()), is_half=is_half)


def require_bfloat16(device: str, *, is_half: bool) -> None:
    """Raise ConfigError for `optimizer.precision: bfloat16` unless the passes are in 16 bits."""
    if not is_half:
        raise ConfigError(
            f"optimizer.precision: bfloat16 needs bfloat16 passes, and precision: auto is float32 on this {device}. "
            "Set precision: bfloat16"
        )


def set_up_passes(models: Sequence[PreTrainedModel], config: Stage, device: torch.device) -> tuple[list[str], float]:
    """Apply `gradient_checkpointing`, `compile` and both `precision` keys to the models that are trained.

    Returns lines for the user, and the seconds spent on compiling. Raises ConfigError if a model lacks an option.
    """
    lines, seconds = [], 0.0
    in_bfloat16 = compute_dtype(device, config.precision) == torch.bfloat16
    if config.optimizer.precision == "bfloat16":
        require_bfloat16(device.type, is_half=in_bfloat16)
        for model in models:
            hold_trained(model)
    if in_bfloat16 and not has_bfloat16(device):
        lines.append(
            f"precision: bfloat16 is slower than float32 on this {device.type}, which has no fast bfloat16 instructions"
        )
    decoder_only = [m for m in models if not (is_encoder(m) or m.config.is_encoder_decoder)]  # others gain nothing
    is_slow = config.precision == "auto" and device.type == "cpu" and is_large(*decoder_only, weights=FASTER_WEIGHTS)
    if is_slow and has_bfloat16(device):
        lines.append("precision: auto is float32 here. With precision: bfloat16 a step is faster on this CPU")
    for model in models:
        if config.gradient_checkpointing:
            recompute_layers(model)
        if config.compile:
            seconds += compile_passes(model, device, config.precision)
    if config.compile:
        lines.append(f"compile: {seconds:.0f} s for the passes of {len(models)} model{'s' if len(models) > 1 else ''}")
    return lines, seconds


def has_bfloat16(device: torch.device) -> bool:
    """Whether this processor or GPU has instructions for bfloat16 products that are faster than float32's."""
    if device.type == "cpu":
        has = torch.cpu.get_capabilities()
        # Intel's avx512_bf16 has half the rate of its float32 products (benchmarks/COSTS.md).
        return bool(has.get("amx_bf16") or has.get("bf16") or (has.get("avx512_bf16") and maker() != "GenuineIntel"))
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return True


def has_amx() -> bool:
    """Whether this CPU has Intel's instructions for products of bfloat16 matrices, and oneDNN computes right there."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16")) and multiplies_bfloat16()


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only the input of each layer, and recompute the rest in the backward pass (gradient checkpointing).

    A layer recomputes only inside `recomputing`: it would drop a cache of keys and values. Raises ConfigError for a
    family for which transformers does not implement this.
    """
    try:
        # transformers renamed the function in 5.23.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    except ValueError:
        raise ConfigError(
            f"gradient_checkpointing: transformers does not support it for a {type(model).__name__}. Remove the key, "
            "and lower the microbatch size instead"
        ) from None


@contextmanager
def recomputing(*models: PreTrainedModel | None) -> Iterator[None]:
    """Within this context the layers of `recompute_layers` are in training mode, so that they recompute."""
    modules = (module for model in models if model is not None for module in model.modules())
    layers = [m for m in modules if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    were_training = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, was_training in zip(layers, were_training, strict=True):
            layer.training = was_training


def compile_passes(model: PreTrainedModel, device: torch.device, precision: str) -> float:
    """Compile the backbone's passes with gradients; return the seconds that it took.

    Not compiled are sampling and scoring, whose shapes change with every token, attention, which is one call per
    sequence, and the exchange between the blocks of a sharded model. No module is wrapped, so weights keep their names.
    Raises ConfigError if torch.compile fails. All processes must call this for a sharded model.
    """
    for name in attention.PACKED:
        AttentionInterface.register(name, torch.compiler.disable(AttentionInterface()[name]))
    # All of transformers' layers share one wrapper. With torch's limit of 8 variants some passes were not compiled.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for module in blocks(model) if is_sharded(model) else [model.base_model]:
        _compile_forward(module)
    began = time.monotonic()
    try:
        batch = pack([[1, 2, 3, 4, 5], [2, 1, 0]], device)
        with torch.enable_grad(), autocast(device, precision):
            hidden = hidden_at(model, batch, torch.arange(len(batch.ids), device=device))
        hidden.float().sum().backward()
    except Exception as error:  # many types: no compiler, a missing library, a graph that cannot be traced
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
        raise ConfigError(
            f"compile: torch.compile fails for this {type(model).__name__} ({reason}). Install a C++ compiler (g++), "
            "and Triton for a GPU, or remove compile: true"
        ) from None
    finally:
        model.zero_grad(set_to_none=True)
    return time.monotonic() - began


def _compile_forward(module: Any) -> None:
    plain = module.forward
    compiled = torch.compile(plain, dynamic=True)

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs) if torch.is_grad_enabled() else plain(*args, **kwargs)

    module.forward = forward
