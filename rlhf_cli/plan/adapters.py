"""Mistakes about adapters, found from configs before a run reads rows, samples, or writes anything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import AutoConfig

from rlhf_cli.artifacts import model_directory
from rlhf_cli.config.models import Lora
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.hub import is_local
from rlhf_cli.models.adapter_files import BaseModel, import_peft, read_adapter
from rlhf_cli.models.adapters import require_targets
from rlhf_cli.models.load import ensure_pad_token, load_tokenizer
from rlhf_cli.models.lora import refuse_adapter_as_base, require_loadable
from rlhf_cli.models.quantized import require_quantizable
from rlhf_cli.plan.shapes import Source, built
from rlhf_cli.plan.sources import Sources, from_path


@dataclass(frozen=True)
class _Trained:
    """Adapters that a stage trains."""

    key: str
    lora: Lora
    base: BaseModel
    sources: list[Callable[[], Source]]
    """The model under them: one of these, if only the run can tell which."""
    is_classifier: bool


def require_adapters(config: Stage, stages: Mapping[str, Stage] | None = None, *, here: bool = True) -> None:
    """Raise the errors about adapters that the stage would raise after it has loaded models and rows.

    Models are built without weights. A model that cannot be found or built is left to the stage. Without adapters
    nothing is done.

    Args:
        config: of the stage.
        stages: configs of the run's stages that will have finished before this one, and need not have run yet.
        here: False for a plan: packages and the hub do not matter.

    Raises:
        ConfigError: adapters that cannot be trained or saved.
        ArtifactError: adapters that cannot be read, such as those of a reward model.
    """
    for trained in _trained(config, Sources(stages or {})):
        if here:
            _download_config(trained.base)
        errors = [_error(trained, source, here=here) for source in trained.sources]
        if all(errors):
            assert errors[0] is not None
            raise errors[0]
    for path, _ in config.inputs.values():
        adapter = read_adapter(model_directory(path))
        if adapter is not None and here:
            import_peft(adapter.path)


def _trained(config: Stage, sources: Sources) -> list[_Trained]:
    if isinstance(config, SFTConfig | RMConfig):
        return _of_model(config, sources)
    assert isinstance(config, PPOConfig)
    found, lora = [], config.policy.lora
    path = config.stage_model(config.policy.path, "sft")
    policy = BaseModel(model_directory(path), config.policy.revision)
    if lora is not None:
        found.append(_Trained("policy.lora", lora, policy, [lambda: sources.policy(config)], False))
    value = config.value_model
    if value.lora is not None and config.ppo.has_value_model:
        starts: list[Callable[[], Source]] = [lambda: sources.policy(config)]
        base = policy
        if (start := value.path) is not None:
            starts, base = [lambda: from_path(start, None, "value_model.path")], BaseModel(start)
        elif value.init != "policy":
            rewards = [reward for reward in config.rewards if isinstance(reward, ModelReward)]
            starts += [partial(sources.reward_model, config, reward, "rewards") for reward in rewards[:1]]
        found.append(_Trained("value_model.lora", value.lora, base, starts, True))
    return found


def _of_model(config: SFTConfig | RMConfig, sources: Sources) -> list[_Trained]:
    """The adapters of SFT or RM."""
    if config.model.lora is None:
        return []
    path = config.model.path if config.model.path is not None else f"{config.artifacts}/sft"
    base = BaseModel(model_directory(path), config.model.revision)
    find = (lambda: sources.rm(config)) if isinstance(config, RMConfig) else (lambda: sources.sft(config))
    return [_Trained("model.lora", config.model.lora, base, [find], isinstance(config, RMConfig))]


def _error(trained: _Trained, find: Callable[[], Source], *, here: bool) -> ConfigError | None:
    """What is wrong with the adapters on one of the models; None if nothing is, or if there is no such model."""
    key, lora = trained.key, trained.lora
    try:
        source = find()
        model = built(source.config, trained.is_classifier)
    except (ArtifactError, ConfigError):
        return None
    try:
        require_targets(model, lora, key)
        if lora.quantize is not None:
            require_quantizable(model, lora.quantize, f"{key}.quantize", here=here)
        if lora.save == "adapter" and source.has_adapters:
            refuse_adapter_as_base(trained.base.path, key)
        if lora.save == "adapter" and key == "model.lora" and Path(trained.base.path).is_dir():
            if trained.is_classifier:
                ensure_pad_token(model, load_tokenizer(trained.base.path))
            require_loadable(model, lora, trained.base, key)
    except ConfigError as error:
        return error
    return None


def _download_config(base: BaseModel) -> None:
    """Put the config.json of a hub model into the cache, where `Sources` looks for it."""
    if not is_local(base.path) and not Path(base.path).exists():
        with contextlib.suppress(Exception):  # the stage says what is wrong with its model
            AutoConfig.from_pretrained(base.path, revision=base.revision, trust_remote_code=False)
