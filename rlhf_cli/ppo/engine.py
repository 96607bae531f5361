"""The rollout engine of a run (`rollout.engine`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import assert_never

import torch
from transformers import PreTrainedModel

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.data.encoders import PromptRow
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.forward import compute_dtype
from rlhf_cli.program import install_extra
from rlhf_cli.rollout.engine import PROBE_PROMPTS, Engine, SyncedEngine
from rlhf_cli.training.distributed import World
from rlhf_cli.training.health_rules import GAP_TOLERANCE


def require_engine(config: PPOConfig, world: World) -> None:
    """Raise ConfigError if the engine of the config cannot run here, before any model is loaded."""
    match config.rollout.engine:
        case "own":
            return
        case "vllm":
            if importlib.util.find_spec("vllm") is None:
                raise ConfigError(f"rollout.engine: vllm is not installed. Run: {install_extra('vllm', 'vllm')}")
        case _:
            assert_never(config.rollout.engine)
    problem = "needs a GPU, and there is none" if world.device.type != "cuda" else ""
    if world.size > 1:
        problem = f"runs with one process so far, and this run has {world.size}"
    if problem:
        raise ConfigError(f"rollout.engine: {config.rollout.engine} {problem}. Set it to own")


def load_engine(
    config: PPOConfig, world: World, policy: PreTrainedModel, prompts: Sequence[PromptRow], longest: int
) -> SyncedEngine | None:
    """The engine that samples for this policy, or None if it samples itself.

    prompts: the training prompts; the probe uses the first of them. longest: tokens of the longest text. Raises
    ConfigError for an encoder-decoder.
    """
    rollout = config.rollout
    if rollout.engine == "own":
        return None
    if policy.config.is_encoder_decoder:
        raise ConfigError(
            f"rollout.engine: {rollout.engine} samples from causal models only, and {type(policy).__name__} is an "
            "encoder-decoder. Set it to own"
        )
    dtype = compute_dtype(world.device, config.precision)
    return SyncedEngine(
        new_engine(config, policy, dtype, longest),
        [prompts[i] for i in range(min(PROBE_PROMPTS, len(prompts)))],
        max_new_tokens=rollout.max_new_tokens,
        precision=config.precision,
        tolerance=GAP_TOLERANCE["float32" if dtype == torch.float32 else "bfloat16"],
        max_staleness=rollout.max_staleness,
    )


def new_engine(config: PPOConfig, policy: PreTrainedModel, dtype: torch.dtype, longest: int) -> Engine:
    """The engine that the config names, for weights of this type."""
    from rlhf_cli.rollout.vllm_engine import VllmEngine

    rollout = config.rollout
    return VllmEngine(
        policy,
        dtype=dtype,
        longest=longest,
        memory=rollout.engine_memory,
        keeps_weights=rollout.max_staleness > 0,
    )
