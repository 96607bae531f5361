"""Whether a run shards its models among the processes, and which."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from rlhf_cli.config.ppo import PPOConfig, PPOModelName
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.models.deferred import is_deferred
from rlhf_cli.models.load import prepare


def shards(config: Stage) -> bool:
    """Whether a run shards its models: `distributed.shard`, and more than one process."""
    return bool(config.distributed.shard) and dist.is_initialized() and dist.get_world_size() > 1


def to_shard(config: PPOConfig, name: PPOModelName) -> Stage | None:
    """The config if it shards this model among the processes, else None."""
    if not shards(config) or name in config.distributed.keep_whole:
        return None
    is_sampled = name == "ref_policy" and config.ref_policy is not None and config.ppo.uses_reference_scores
    return None if is_sampled and config.rollout.decoder != "sharded" else config


def shard_for(config: Stage, model: PreTrainedModel, device: torch.device) -> str | None:
    """`shard_model` as the config says; None if the run does not shard its models."""
    if not shards(config):
        return None
    from rlhf_cli.models.fsdp import shard_model

    note = None if is_deferred(model) else f"{type(model).__name__}: each process held all of it before it was sharded"
    is_hybrid = config.distributed.shard == "hybrid"
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) if is_hybrid else None
    assert isinstance(config, SFTConfig | RMConfig | PPOConfig)
    offloads_frozen = isinstance(config, PPOConfig) and "frozen" in config.offload
    offloads = config.distributed.offload or (offloads_frozen and not is_trained(model))
    narrow = config.optimizer.precision == "bfloat16"
    line = shard_model(model, device, config.precision, per_node=per_node, offloads=offloads, narrow=narrow)
    idle = f"distributed.offload: does nothing on this {device.type}, whose memory holds everything"
    has_one_memory = config.distributed.offload and device.type == "cpu"
    return "\n".join(filter(None, [note, line, idle if has_one_memory else None])) or None


def is_trained(module: nn.Module) -> bool:
    """Whether a weight of the module gets a gradient."""
    return any(weight.requires_grad for weight in module.parameters())


def prepare_for(config: Stage, model: PreTrainedModel, device: torch.device) -> str | None:
    """`prepare` and `shard_for`. Returns the lines of both."""
    lines = [prepare(model, device), shard_for(config, model, device)]
    return "\n".join(filter(None, lines)) or None
