"""Where the models of a run come from, found from configs alone: a directory, a hub id in the cache, or `scratch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from rlhf_cli.config.by_stage import AnyConfig
from rlhf_cli.config.models import Lora, Model, TrainedModel
from rlhf_cli.config.ppo import PPOConfig, ValueModel
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.hub import is_local, is_offline
from rlhf_cli.models.adapter_files import read_adapter
from rlhf_cli.models.heads import is_encoder
from rlhf_cli.models.load import reason_of, refuse_endless
from rlhf_cli.models.passes import FASTER_WEIGHTS, has_amx
from rlhf_cli.plan.memory import Held, Setting
from rlhf_cli.plan.shapes import built, shape_of, shape_of_loaded
from rlhf_cli.run.artifacts import model_directory


@dataclass(frozen=True)
class ModelOrigin:
    """Where a model comes from: its config, and the bytes of a number in its file."""

    config: PreTrainedConfig
    stored: int = 4
    has_adapters: bool = False
    """Whether adapters beside it are added to its weights when they are read."""


@dataclass(frozen=True)
class ModelOrigins:
    """The configs of a run's stages. A stage that is not among them has finished, or is not needed."""

    configs: Mapping[str, AnyConfig]
    models: Mapping[str, PreTrainedModel] = field(default_factory=dict)
    """The models of a run that are in memory, by the names that its plan gives them."""
    precision: str = "float32"
    """The precision of their passes, as in the config."""
    downloads: bool = False
    """Whether the config.json of a hub model that a stage trains is downloaded."""

    def held(
        self,
        name: str,
        origin: ModelOrigin,
        setting: Setting,
        is_classifier: bool,
        key: str,
        trained: TrainedModel | ValueModel | None = None,
        *,
        shares: bool = False,
    ) -> Held:
        """A model in memory. `trained` is its section of the config, or None for a model that is only read.

        `key` is the section that messages name. Raises ConfigError if the model cannot be built.
        """
        lora, frozen = (None, None) if trained is None else (trained.lora, trained.freeze)
        if name in self.models:
            shape = shape_of_loaded(self.models[name], self.precision)
        else:
            shape = shape_of(origin.config, is_classifier, setting.precision, lora, frozen, key, setting.device)
        is_whole, is_trained = key.partition(".")[0] in setting.keep_whole, trained is not None
        return Held(name, shape, setting, lora, is_trained, origin.stored, origin.has_adapters, shares, is_whole)

    def start(self, config: AnyConfig) -> ModelOrigin:
        """The model that a stage trains; in PPO the policy."""
        if isinstance(config, SFTConfig) and (scratch := config.model.scratch) is not None:
            # The vocabulary is the largest that its tokenizer may reach.
            rows = scratch.tokenizer.vocab_size + len(config.model.add_tokens)
            own = {**scratch.config, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": rows}
            try:
                return ModelOrigin(AutoConfig.for_model(scratch.architecture, **own))
            except Exception as error:
                raise ConfigError(f"model.scratch: cannot build this model ({reason_of(error)})") from None
        key, model = config.trained
        return self.given(model, config, f"{key}.path")

    def given(self, model: Model, config: AnyConfig, key: str) -> ModelOrigin:
        """The model that a section of the config names, or else the model of the run's SFT stage."""
        if model.path is not None:
            return from_path(model.path, model.revision, key, downloads=self.downloads)
        return self.of_stage("sft", config, key)

    def reward_model(self, config: PPOConfig, reward: ModelReward, key: str) -> ModelOrigin:
        if reward.path is None or _is_own(config, reward):
            return self.of_stage("rm", config, key)
        return from_path(reward.path, reward.revision, key)

    def value_model(self, config: PPOConfig) -> ModelOrigin:
        """The separate value model of PPO. With `init: auto` a run may start it as the policy instead."""
        value, rewards = config.value_model, config.reward_models
        if value.path is not None:
            return from_path(value.path, None, "value_model.path")
        if rewards and value.init in ("auto", "reward_model"):
            key, reward = next(iter(rewards.items()))
            return self.reward_model(config, reward, key)
        return self.start(config)

    def of_stage(self, stage: str, config: AnyConfig, key: str) -> ModelOrigin:
        """The model of the run's own `stage`: from its config, or else finished. Raises ConfigError without both."""
        planned = self.configs.get(stage)
        if isinstance(planned, SFTConfig | RMConfig):
            return replace(self.start(planned), has_adapters=_are_alone(planned.model.lora))
        directory = Path(config.artifacts) / stage
        if directory.is_dir():
            return from_path(str(directory), None, key)
        raise ConfigError(
            f"{key}: is the model of this run's {stage} stage, and there is neither a {stage}.yaml beside the config "
            f"nor a finished {directory}. Give the folder of all stages, or set {key}"
        )

    def shares_backbone(self, config: PPOConfig, key: str) -> bool:
        """Whether the reward model of this key is adapters on the policy's weights."""
        if self.models:
            weights = {id(weight) for weight in self.models["policy"].parameters()}
            return any(id(weight) in weights for weight in self.models[config.name_of_reward(key)].parameters())
        reward = config.reward_models[key]
        own = "the sft stage of this run" if "sft" in self.configs else None
        lora, path, rm = config.policy.lora, config.policy.path or own, self.configs.get("rm")
        if lora is None or path is None:
            return False
        if _is_own(config, reward) and isinstance(rm, RMConfig):
            adapters = rm.model.lora
            is_same = (rm.model.path or own) == path and adapters is not None and adapters.quantize == lora.quantize
            return is_same and _are_alone(adapters)
        adapter = read_adapter(model_directory(config.stage_model(reward.path, "rm")))
        if adapter is None or Path(adapter.base.path).resolve() != Path(path).resolve():
            return False
        return adapter.quantization == lora.quantize


def settled_precision(config: AnyConfig, origins: ModelOrigins) -> str:
    """`precision` of a run on this CPU. For `auto` it is bfloat16 if the CPU has AMX and the trained model is large."""
    if config.precision != "auto" or config.device not in ("auto", "cpu") or not has_amx():
        return config.precision
    try:
        start = origins.start(config).config
        refuse_endless("model", start.get_text_config())
        model = built(start, isinstance(config, RMConfig), "model")
    except (ConfigError, ArtifactError):
        return "auto"  # whatever reads the model says what is wrong; an encoder-decoder stays in float32
    return "bfloat16" if model.num_parameters() >= FASTER_WEIGHTS and not is_encoder(model) else "auto"


def _is_own(config: PPOConfig, reward: ModelReward) -> bool:
    """Whether it is the model of the run's own `rm` stage, or a member beside it."""
    return reward.path is None or reward.path.startswith(f"{config.artifacts}/rm/members/")


def _are_alone(lora: Lora | None) -> bool:
    return lora is not None and lora.save == "adapter"


def from_path(path: str, revision: str | None, key: str, *, downloads: bool = False) -> ModelOrigin:
    """The model of a directory, or of a hub id whose config.json is in the cache or is downloaded. Reads no weights."""
    directory = model_directory(path)
    if (adapter := read_adapter(directory)) is not None:
        base = from_path(adapter.base.path, adapter.base.revision, key, downloads=downloads)
        return replace(base, has_adapters=True)
    downloads = downloads and not Path(directory).is_dir() and not is_offline()
    try:
        config = AutoConfig.from_pretrained(
            directory, revision=revision, trust_remote_code=False, local_files_only=not downloads
        )
    except Exception as error:
        if Path(directory).is_dir():
            what = f": cannot read its config.json ({reason_of(error)})"
        elif is_local(path):
            what = ": no such directory. Run the stage or command that writes it, or give another path"
        else:
            download = f"hf download {path} config.json"
            what = f" is no directory, and its config.json is not in the hub's cache. Download it: {download}"
        raise ArtifactError(f"{key}: {path}{what}") from None
    return ModelOrigin(config, getattr(config.dtype, "itemsize", 4))
