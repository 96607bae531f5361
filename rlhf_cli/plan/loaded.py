"""The plan of a run whose models are in memory: how many tokens its microbatches take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.models.cost import total_memory
from rlhf_cli.models.forward import compute_dtype
from rlhf_cli.plan.budget import auto_tokens
from rlhf_cli.plan.memory import Batch, Held, Phase, Setting, forward_bytes, weight_bytes
from rlhf_cli.plan.parts import Machine
from rlhf_cli.plan.ppo import name_of_reward
from rlhf_cli.plan.shapes import Shape, Source, shape_of_loaded
from rlhf_cli.plan.sources import Sources
from rlhf_cli.plan.stages import planned_tokens
from rlhf_cli.processes.distributed import World


@dataclass(frozen=True)
class Loaded(Sources):
    """The models of a run, by the names that its plan gives them."""

    models: Mapping[str, PreTrainedModel] = field(default_factory=dict)
    precision: str = "float32"
    """Of the passes, as in the config."""

    def shape(self, name: str, source: Source, **options: Any) -> Shape:
        """The shape of the model in memory; `source` only tells the number format of its file."""
        lora, stored, is_merged = options.get("lora"), source.stored, source.has_adapters
        model = self.models[name]
        return shape_of_loaded(name, model, self.precision, stored=stored, lora=lora, is_merged=is_merged)

    def shares_backbone(self, config: PPOConfig, reward: ModelReward) -> bool:
        """Whether the reward model shares weights with the policy."""
        weights = {id(weight) for weight in self.models["policy"].parameters()}
        model = self.models[name_of_reward(config, reward)]
        return any(id(weight) in weights for weight in model.parameters())


def microbatch_tokens(config: Stage, models: Mapping[str, PreTrainedModel], world: World) -> int:
    """Maximum tokens per microbatch of a run: as configured, or what `auto` chooses.

    Args:
        config: of the stage.
        models: by their names in the plan, each on the device, ready for training, before `gradient_checkpointing` and
            `compile`.
        world: the processes. On a CPU they share the memory.
    """
    assert isinstance(config, SFTConfig | RMConfig | PPOConfig)
    given = config.ppo.tokens_per_microbatch if isinstance(config, PPOConfig) else config.training.tokens_per_microbatch
    if given != "auto":
        return given
    return planned_tokens(config, Loaded({}, models, config.precision), machine_of_run(world.device, world.size))


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
    half = compute_dtype(device, precision) != torch.float32
    setting = Setting(device.type, half=half)
    held = Held(shape_of_loaded("model", model, precision))

    def phases(tokens: int) -> list[Phase]:
        batch = Batch(tokens, tokens, 1)
        weights = {"weights": weight_bytes(held, setting)}
        return [Phase("scoring", weights | forward_bytes(held, batch, setting))]

    return auto_tokens(phases, machine_of_run(device, 1), setting)
