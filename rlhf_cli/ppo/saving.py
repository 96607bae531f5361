"""The models that a PPO run publishes, as plain Hugging Face directories."""

from __future__ import annotations

import shutil

from rlhf_cli.models.save import round_weights, save, save_trained, saved_dtype
from rlhf_cli.ppo.setup import Setup
from rlhf_cli.rollout.sampling import generation_settings


def save_models(setup: Setup) -> None:
    """Write `model`, `value_model` if there are values, and `ema_model` if requested. All processes must call this."""
    models = setup.models
    round_weights(models.policy, saved_dtype(setup.config, setup.policy_base))
    if models.value_model is not None:
        round_weights(models.value_model, saved_dtype(setup.config, setup.value_base))
    save_policy(setup, "model")
    _save_value_model(setup)
    if setup.average is not None:
        with setup.average.applied():
            save_policy(setup, "ema_model")
    setup.world.barrier("the models to be saved")


def save_policy(setup: Setup, name: str) -> None:
    """Write the policy, with a generation config that samples as in training."""
    if not setup.world.takes_part(setup.models.policy):
        return
    policy, sampling, directory = setup.models.policy, setup.sampling, setup.stage.directory / name
    policy.generation_config.update(**generation_settings(sampling))
    if setup.world.is_main:
        shutil.rmtree(directory, ignore_errors=True)
    base, config = setup.policy_base, setup.config
    save_trained(policy, setup.tokenizer, directory, config.policy.lora, base, saved_dtype(config, base))


def _save_value_model(setup: Setup) -> None:
    """Write the value model as a sequence classifier; a value head gets a copy of the policy's backbone."""
    models, config, directory = setup.models, setup.config, setup.stage.directory / "value_model"
    if not setup.world.takes_part(models.value_model or models.policy):
        return
    base = setup.value_base if models.value_model is not None else setup.policy_base
    dtype = saved_dtype(config, base)
    if models.value_model is not None and base is not None:
        save_trained(models.value_model, setup.tokenizer, directory, config.value_model.lora, base, dtype)
    elif models.value_head is not None:
        save(models.policy, setup.tokenizer, directory, dtype, value_head=models.value_head)
