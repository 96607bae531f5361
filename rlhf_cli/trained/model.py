"""A language model that was trained: where it is, how its prompts were written, how it draws, and what scores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf_cli.config.ppo import PPOConfig, Rollout
from rlhf_cli.config.rewards import OWN_REWARD_MODEL, ModelReward, NamedReward
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.data.encode import require_eos
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.files import rows_of
from rlhf_cli.models.adapter_files import read_adapter
from rlhf_cli.models.frozen import frozen_policy
from rlhf_cli.models.load import check_directory, check_vocabulary, load_tokenizer, prepare
from rlhf_cli.rewards.base import RewardSource
from rlhf_cli.rewards.sources import load_rewards
from rlhf_cli.rollout.speaker import PromptForm, Speaker, prompt_form
from rlhf_cli.run.artifacts import fingerprint, model_directory, stage_directory
from rlhf_cli.trained.locate import MODEL, StageModel, locate
from rlhf_cli.trained.run import Run, open_run

Quantize = Literal["nf4", "nf4_double", "int8"]
"""How `rlhf chat`, `generate` and `serve` hold the linear layers of a language model with --quantize."""
NEW_TOKENS = 256  # longest response of a model that belongs to no run, if the model has as many positions left
TEMPLATE_FILE = "chat_template.jinja"  # where transformers, vLLM and llama.cpp's converter look for a chat template
HEADING = "## How it is prompted"


@dataclass(frozen=True)
class TrainedLanguageModel:
    """A language model on disk, and the run that it belongs to."""

    name: str  # the stage, `base`, or the directory of a model that belongs to no run
    path: str  # a Hugging Face model directory or a hub id
    revision: str | None = None
    run: Run | None = None
    config: SFTConfig | PPOConfig | None = None  # the config of the stage whose prompts it gets; None outside of a run

    @property
    def template(self) -> str | None:
        return self.config.data.prompt_template if self.config is not None else None

    @property
    def precision(self) -> str:
        return self.config.precision if self.config is not None else "auto"

    def form(self, tokenizer: PreTrainedTokenizerBase) -> PromptForm:
        if self.run is None or self.config is None:
            return prompt_form(tokenizer, None, [])
        stage = "ppo" if isinstance(self.config, PPOConfig) else "sft"
        samples = rows_of(stage_directory(self.run.root, stage) / "samples.jsonl")
        logged = [row["prompt"] for row in samples if isinstance(row.get("prompt"), str)]
        return prompt_form(tokenizer, self.template, logged, keep_special=self.config.data.special_tokens == "keep")

    def speaker(
        self, device: torch.device, quantization: Quantize | None = None, rollout: Rollout | None = None
    ) -> Speaker:
        """The model on the device, prompted as in its run, which draws as `rollout` says, or else as in its run.

        Raises ConfigError for a model that cannot be quantized here, ArtifactError for a directory without a language
        model and for a tokenizer of another model or without EOS.
        """
        tokenizer = load_tokenizer(self.path, self.revision)
        require_eos(tokenizer, self.path)
        model = frozen_policy(self.path, self.revision, device, self.precision, quantization)
        check_vocabulary(model, tokenizer, self.path)
        prepare(model, device)
        form = self.form(tokenizer)
        return Speaker.of(rollout or self.rollout(), model, tokenizer, self.precision, form, self.name)

    def rollout(self) -> Rollout:
        """How responses are drawn: as in PPO, or as the samples of SFT without it.

        Outside of a run the temperature and the filters are those of generation_config.json, where it has them.
        """
        if self.run is not None:
            return self.run.rollout()
        check_directory(self.path, self.revision, weights=False)
        adapter = read_adapter(self.path)
        sources = [(self.path, self.revision)]
        if adapter is not None:
            sources.append((adapter.base.path, adapter.base.revision))
        config = GenerationConfig()
        for source, revision in sources:
            try:
                config = GenerationConfig.from_pretrained(source, revision=revision or "main")
                break
            except (OSError, ValueError):  # There is none. `load_policy` reports one that cannot be used.
                continue
        changes = {
            "temperature": config.temperature or 1.0,
            "top_k": config.top_k or None,
            "top_p": config.top_p if config.top_p and config.top_p < 1 else None,
            "min_p": config.min_p or None,
        }
        return Rollout(max_new_tokens=NEW_TOKENS).model_copy(update=changes)

    def rewards(self) -> RewardSet | None:
        """The rewards of the run's PPO stage, or else its reward model; None without both."""
        run = self.run
        if run is not None and run.ppo is not None:
            keep_special = run.ppo.data.special_tokens == "keep"
            return RewardSet(run.ppo.named_rewards, run.ppo.artifacts, keep_special=keep_special)
        if run is not None and run.rm is not None:
            return RewardSet([OWN_REWARD_MODEL], str(run.root))
        return None

    def compared(self, name: str) -> TrainedLanguageModel:
        """The `sft` stage of the same run, or `base`, the model that it started from, with the prompts of this one.

        Raises ConfigError without a run and for a base of random weights, ArtifactError without the stage.
        """
        if self.run is None:
            raise ConfigError(f"--compare: {self.name} is a model and not a run. Give a run's directory")
        if name != "base":
            return _of_run(self.run, locate(self.run.root, name))
        first = self.run.sft or self.run.ppo
        assert first is not None
        _, start = first.trained
        if start.path is None:
            raise ConfigError("--compare base: the run started from random weights. Give --compare sft")
        return TrainedLanguageModel(name, model_directory(start.path), start.revision, self.run, self.config)

    def digest(self) -> str:
        """A digest of the weights that `load` reads."""
        located = locate(self.path) if self.run is not None else None
        if located is None or located.folder != MODEL:
            return fingerprint(self.path, self.revision)
        return fingerprint(str(stage_directory(located.root, located.stage)))


def find_model(directory: str, stage: str | None = None) -> TrainedLanguageModel:
    """The language model in a directory. A run has several: that of `stage`, by default PPO's, or SFT's without one.

    Raises ArtifactError for a stage that is not finished or writes no text, ConfigError for a stage without a run.
    """
    located = locate(directory, stage)
    if located is not None:
        run = open_run(located.root, stage=None, device=torch.device("cpu"), seed=0)
        return _of_run(run, located)
    if stage is not None:
        raise ConfigError(f"--stage: {directory} is a model and not a run. Remove the option")
    return TrainedLanguageModel(directory, model_directory(directory))


def _of_run(run: Run, located: StageModel | None) -> TrainedLanguageModel:
    assert located is not None
    config = {"sft": run.sft, "ppo": run.ppo}.get(located.stage)
    if config is None:
        what = f"stage {located.stage} is a reward model, which writes no text"
        raise ArtifactError(f"{located.root}: {what}. Give --stage sft or ppo")
    return TrainedLanguageModel(located.name, located.path, None, run, config)


# ------------------------------------------------------------------------------- for those without the run


@dataclass(frozen=True)
class Prompting:
    sentence: str
    chat_template: str | None
    """A template that writes conversations as in training; None if the tokenizer's own does, or none can."""

    @property
    def section(self) -> str:
        text = f"{HEADING}\n\nPrompts: {self.sentence}."
        if self.chat_template is not None:
            text += f" The chat template in `{TEMPLATE_FILE}` writes the messages of a chat in this way."
        return text


def prompting_of(located: StageModel | None) -> Prompting | None:
    """How a language model of a run is prompted; None for other models."""
    if located is None or located.stage == "rm" or located.folder == "value_model":
        return None
    trained = find_model(located.path)
    tokenizer = load_tokenizer(trained.path, trained.revision)
    form = trained.form(tokenizer)
    sentence = form.sentence.removeprefix("no chat template; ")
    return Prompting(sentence, form.chat_template(tokenizer))


# -------------------------------------------------------------------------------------------- rewards


@dataclass(frozen=True)
class RewardSet:
    rewards: Sequence[NamedReward]
    root: str = ""  # the run's directory, where a reward model without a path is
    keep_special: bool = False

    def load(
        self, tokenizer: PreTrainedTokenizerBase, device: torch.device, precision: str
    ) -> tuple[list[RewardSource], list[str]]:
        """The sources for responses in the tokens of `tokenizer`, and notes for the user.

        Raises ConfigError for rewards that do not fit the tokenizer, ArtifactError for a reward model that is missing.
        """
        return load_rewards(self.rewards, self.root, tokenizer, device, precision, keep_special=self.keep_special)

    def settings(self) -> dict[str, Any]:
        """Everything that decides the scores, to compare with an earlier run."""
        rewards, digests = [], []
        for _, _, reward, ensemble in self.rewards:
            rewards.append(reward.model_dump(mode="json") | ({} if ensemble is None else {"ensemble": list(ensemble)}))
            if isinstance(reward, ModelReward):
                digests.append(fingerprint(reward.path or str(stage_directory(self.root, "rm"))))
        return {"rewards": rewards, "digests": digests}
