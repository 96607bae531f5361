"""A run of finished stages, with their configs and models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.config.base import Section
from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.config.ppo import PPOConfig, Rollout
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import STAGES
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.cache import tokenise
from rlhf_cli.data.encode import Example
from rlhf_cli.data.encoders import DemonstrationEncoder
from rlhf_cli.data.splits import Drawn, held_out_rows
from rlhf_cli.data.stage_rows import sft_rows
from rlhf_cli.errors import ArtifactError
from rlhf_cli.models.forward import positions
from rlhf_cli.models.frozen import frozen_policy
from rlhf_cli.models.load import load_tokenizer, prepare
from rlhf_cli.plan.budget import forward_budget
from rlhf_cli.run.artifacts import stage_directory
from rlhf_cli.run.state import working_directory
from rlhf_cli.trained.locate import finished_stages

PATHS = {"path", "function", "gold"}  # keys whose values are files, folders, `file.py:function` or hub ids


@dataclass(frozen=True)
class Run:
    """The finished stages of a run's directory. A stage that is not finished has no config here."""

    root: Path
    device: torch.device
    seed: int  # the seed by which held-out rows, samples and intervals are drawn
    sft: SFTConfig | None
    rm: RMConfig | None
    ppo: PPOConfig | None

    @property
    def stages(self) -> list[str]:
        return [stage for stage in STAGES if getattr(self, stage) is not None]

    def model_path(self, stage: str) -> str:
        return str(stage_directory(self.root, stage) / "model")

    def rollout(self) -> Rollout:
        """How responses are drawn: as in PPO, or as the samples of SFT without it."""
        if self.ppo is not None:
            return self.ppo.rollout
        assert self.sft is not None
        return Rollout(temperature=self.sft.evaluation.temperature, max_new_tokens=self.sft.evaluation.max_new_tokens)

    def load(
        self, path: str, precision: str = "float32", revision: str | None = None
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A language model, on the device and held for passes in `precision`, and its tokenizer."""
        model, tokenizer = frozen_policy(path, revision, self.device, precision), load_tokenizer(path, revision)
        prepare(model, self.device)
        return model, tokenizer

    def budget(self, model: PreTrainedModel, precision: str) -> Budget:
        """How many tokens the model takes in one pass without gradients."""
        return forward_budget(model, self.device, precision)

    def demonstrations(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Drawn[Example]:
        """The held-out rows of the sft stage, encoded for a model; empty without that stage."""
        if self.sft is None:
            return Drawn([], 0, 0)
        found = tokenise(DemonstrationEncoder(tokenizer, sft_rows(self.sft)), longest=positions(model))
        return held_out_rows(found, self.sft.data, self.sft.evaluation.max_rows, self.seed).test


def _seen_from(base: Path, value: Any) -> Any:
    """A section of a config whose files are found wherever the command is called: relative paths begin at `base`."""
    if isinstance(value, list | tuple):
        return type(value)(_seen_from(base, item) for item in value)
    if isinstance(value, dict):
        return {key: _seen_from(base, item) for key, item in value.items()}
    if not isinstance(value, Section):
        return value
    found = {name: _seen_from(base, getattr(value, name)) for name in type(value).model_fields}
    for name in PATHS & found.keys():
        text = found[name]
        # Else it is a hub id.
        if text and (set(text) & set("*?[") or (base / text).exists() or (base / text.rpartition(":")[0]).is_file()):
            found[name] = str(base / text)
    return value.model_copy(update=found)


def open_run(root: Path, *, stage: str | None, device: torch.device, seed: int) -> Run:
    """The run at `root`. Raises ArtifactError if no stage is finished, or `stage` is not."""
    if not root.is_dir():
        raise ArtifactError(f"{root}: no such directory. Give the `artifacts` directory of your configs")
    configs = {}
    for name in finished_stages(root, stage):
        path = stage_directory(root, name) / "config.yaml"
        config = load_stage_config(name, path)
        base = working_directory(config.artifacts, root)
        config = config.model_copy(update={"artifacts": str(root)})  # the directory may have been moved since
        configs[name] = config if base is None else _seen_from(base, config)
    return Run(root, device, seed, configs.get("sft"), configs.get("rm"), configs.get("ppo"))  # type: ignore[arg-type]
