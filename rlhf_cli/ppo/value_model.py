"""Which value model a run trains, and where its weights start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch
from transformers import PreTrainedModel

from rlhf_cli.artifacts import model_directory
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.forward import vocabulary_rows
from rlhf_cli.models.heads import check_shared_value_model, scalar_weight
from rlhf_cli.models.load import load_value_model, new_value_model
from rlhf_cli.rewards.base import RewardSource
from rlhf_cli.rewards.models import RewardModel

NO_REWARD_MODEL = "no reward model reads the policy's tokens: the value model starts from the policy"


def choose_value_model(
    config: PPOConfig, policy_path: str, rewards: Sequence[RewardSource], policy: PreTrainedModel
) -> tuple[PreTrainedModel | None, torch.nn.Linear | None, str | None]:
    """(value model, value head on the policy's backbone, note for the user): at most one of the first two.

    Raises ConfigError for an `init` or a `path` that does not fit the policy or the rewards.
    """
    if not config.ppo.has_value_model:
        return None, None, None
    init, path = config.value_model.init, config.value_model.path
    if init == "shared":
        return None, _shared_head(path, policy), None
    if path is not None:
        return _value_model_from(path, policy), None, None
    reward_models = [
        (model_directory(config.stage_model(reward.path, "rm")), reward.revision)
        for reward, source in zip(config.rewards, rewards, strict=True)
        if isinstance(reward, ModelReward) and isinstance(source, RewardModel) and source.reads_policy_tokens
    ]
    match init:
        case "reward_model":
            if not reward_models:
                raise ConfigError(
                    "value_model.init: found reward_model, but no reward is a model that reads the policy's tokens. "
                    "Set it to policy"
                )
            return new_value_model(*reward_models[0]), None, None
        case "auto":
            if reward_models:
                return new_value_model(*reward_models[0]), None, None
            return new_value_model(policy_path, config.policy.revision), None, NO_REWARD_MODEL
        case "policy":
            return new_value_model(policy_path, config.policy.revision), None, None
        case _:
            assert_never(init)


def _shared_head(path: str | None, policy: PreTrainedModel) -> torch.nn.Linear:
    """A head on the policy's hidden states: zeros, or the head of the value model at `path`."""
    check_shared_value_model(policy)
    head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, bias=False)
    torch.nn.init.zeros_(head.weight)
    if path is not None:
        weight = scalar_weight(load_value_model(path))
        if weight.shape != head.weight.shape:
            raise ConfigError(
                f"value_model.path: {path} has hidden size {weight.shape[1]}, the policy {head.in_features}; init: "
                "shared needs the same backbone. Use the value model of a run that started from this policy"
            )
        head.weight.data.copy_(weight)
    return head


def _value_model_from(path: str, policy: PreTrainedModel) -> PreTrainedModel:
    """The value model at `path`, checked against the policy's vocabulary."""
    model = load_value_model(path)
    if vocabulary_rows(model) < vocabulary_rows(policy):
        raise ConfigError(
            f"value_model.path: {path} embeds {vocabulary_rows(model)} tokens, the policy {vocabulary_rows(policy)}. "
            "Use the value model of a run that started from this policy"
        )
    return model
