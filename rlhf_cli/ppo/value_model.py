"""Which value model a run trains, and where its weights start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.adapter_files import BaseModel
from rlhf_cli.models.adapters import has_adapters
from rlhf_cli.models.deferred import read_deferred
from rlhf_cli.models.forward import vocabulary_rows
from rlhf_cli.models.heads import scalar_heads, scalar_weight, value_model_like
from rlhf_cli.models.load import load_value_model, new_value_model
from rlhf_cli.models.lora import defers_base
from rlhf_cli.models.shard import shards, to_shard
from rlhf_cli.rewards.base import RewardSource
from rlhf_cli.rewards.models import RewardModel
from rlhf_cli.run.artifacts import model_directory

if TYPE_CHECKING:
    from rlhf_cli.models.lora import Backbone

SHARES = "the value model shares the policy's frozen weights"
OWN_WEIGHTS = (
    "the value model starts from the reward model, whose adapters have another form than value_model.lora, so it has "
    "weights of its own. Give value_model.lora the keys of the reward model's, or set value_model.init: policy"
)
NO_REWARD_MODEL = "no reward model reads the policy's tokens: the value model starts from the policy"


@dataclass(frozen=True)
class ValueStart:
    """What predicts values before the training: a model, or a head on the policy's backbone, or nothing."""

    model: PreTrainedModel | None = None
    head: torch.nn.Linear | None = None
    base: BaseModel | None = None
    """Where the weights of `model` come from."""
    note: str | None = None
    """A line for the user."""
    adapters_of: PreTrainedModel | None = None
    """The reward model from whose adapters those of `model` start."""


def choose_value_model(
    config: PPOConfig,
    policy_base: BaseModel,
    rewards: Sequence[RewardSource],
    policy: PreTrainedModel,
    device: torch.device,
    backbone: Backbone | None,
) -> ValueStart:
    """The value model, or a value head on the policy's backbone.

    With `value_model.lora` it shares the frozen weights of `backbone` if it starts from the same model, and starts from
    the adapters of a reward model on it if they have the form of `value_model.lora`. If the run shards models among
    processes, it loads an equal copy of its own.

    Raises ConfigError for an `init` or a `path` that does not fit the policy or the rewards.
    """
    if not config.ppo.has_value_model:
        return ValueStart()
    init, path, lora = config.value_model.init, config.value_model.path, config.value_model.lora
    if init == "shared":
        return ValueStart(head=_shared_head(path, policy))
    deferred = to_shard(config, "value_model") is not None or defers_base(lora, config, device)
    if path is not None:
        model = load_value_model(path, deferred=deferred)
        if vocabulary_rows(model) < vocabulary_rows(policy):
            raise ConfigError(
                f"value_model.path: {path} embeds {vocabulary_rows(model)} tokens, the policy "
                f"{vocabulary_rows(policy)}. Use the value model of a run that started from this policy"
            )
        return ValueStart(model, base=BaseModel(path))
    reward_models = [
        (BaseModel(model_directory(config.stage_model(reward.path, "rm")), reward.revision), source.model)
        for (_, _, reward, _), source in zip(config.named_rewards, rewards, strict=True)
        if isinstance(reward, ModelReward) and isinstance(source, RewardModel) and source.reads_policy_tokens
    ]
    if init == "reward_model" and not reward_models:
        raise ConfigError(
            "value_model.init: found reward_model, but no reward is a model that reads the policy's tokens. "
            "Set it to policy"
        )
    # Policy and value model both train adapters, on weights of the same precision.
    if lora is None or config.policy.lora is None or lora.quantize != config.policy.lora.quantize:
        backbone = None
    base, adapters, notes = policy_base, None, []
    if init != "policy" and reward_models:
        base, reward_model = reward_models[0]
        # Sharded models share no weights: only the adapters of this one are read.
        adapted = backbone.reward_model(base.path) if backbone is not None and shards(config) else reward_model
        if backbone is not None and lora is not None and adapted is not None and has_adapters(adapted):
            from rlhf_cli.models.lora import has_adapters_of

            if has_adapters_of(adapted, lora):
                base, adapters = backbone.base, adapted
            else:
                notes.append(OWN_WEIGHTS)
        if adapters is None:
            backbone = None
    elif init == "auto":
        notes.append(NO_REWARD_MODEL)
    shared = backbone.classifier() if backbone is not None and not shards(config) else None
    if shared is not None:
        notes.append(SHARES)
    model = shared if shared is not None else new_value_model(base.path, base.revision, deferred=deferred)
    return ValueStart(model, base=base, note="\n".join(notes) or None, adapters_of=adapters)


def _shared_head(path: str | None, policy: PreTrainedModel) -> torch.nn.Linear:
    """A head on the policy's hidden states: zeros, or the head of the value model at `path`."""
    value_model_like(policy)  # raises now what saving would raise at the end
    head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, bias=False)
    torch.nn.init.zeros_(head.weight)
    if path is not None:
        value_model = load_value_model(path, deferred=True)
        for layer in scalar_heads(value_model).values():
            read_deferred(layer)
        weight = scalar_weight(value_model)
        if weight.shape != head.weight.shape:
            raise ConfigError(
                f"value_model.path: {path} has hidden size {weight.shape[1]}, the policy {head.in_features}; init: "
                "shared needs the same backbone. Use the value model of a run that started from this policy"
            )
        head.weight.data.copy_(weight)
    return head
