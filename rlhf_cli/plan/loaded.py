"""The plan of a run whose models are in memory: how many tokens its microbatches take."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.models.cost import total_memory
from rlhf_cli.models.forward import compute_dtype
from rlhf_cli.plan.budget import auto_tokens
from rlhf_cli.plan.memory import Batch, Held, Machine, Phase, Setting
from rlhf_cli.plan.origins import ModelOrigins
from rlhf_cli.plan.shapes import shape_of_loaded
from rlhf_cli.plan.stages import planned_tokens
from rlhf_cli.processes.distributed import World


def microbatch_tokens(config: Stage, models: Mapping[str, PreTrainedModel], world: World) -> int:
    """Maximum tokens per microbatch of a run: as configured, or what `auto` chooses.

    `models` are by their names in the plan, each on the device and as `shape_of_loaded` wants it.
    """
    assert isinstance(config, SFTConfig | RMConfig | PPOConfig)
    origins = ModelOrigins({}, models, config.precision)
    return planned_tokens(config, origins, machine_of_run(world.device, world.size))


def machine_of_run(device: torch.device, num_processes: int) -> Machine:
    """What each process of a run has."""
    return Machine(
        device.type,
        total_memory(device) / (1 if device.type == "cuda" else num_processes),
        num_processes,
        int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)),
        auto_is_half=compute_dtype(device, "auto") != torch.float32,
    )


def forward_tokens(model: PreTrainedModel, device: torch.device, precision: str) -> int:
    """Maximum tokens per pass without gradients of a model that is alone in memory."""
    setting = Setting(device.type, half=compute_dtype(device, precision) != torch.float32)
    held = Held("model", shape_of_loaded(model, precision), setting)

    def phases(tokens: int) -> list[Phase]:
        batch = Batch(tokens, tokens, 1)
        return [Phase("scoring", {"weights": held.weight_bytes} | held.in_forward(batch))]

    return auto_tokens(phases, machine_of_run(device, 1), setting)
