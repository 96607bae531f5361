"""The config files of supervised fine-tuning and of the reward model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from rlhf_cli.algorithms.names import RewardModelLoss
from rlhf_cli.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from rlhf_cli.config.data import Data, DataSource, Source, numbered
from rlhf_cli.config.models import Model, ScratchModel
from rlhf_cli.config.stage import Optimizer, Stage, Training


def _needs_every_steps(keep_best: bool, every_steps: int | None) -> None:
    if keep_best and every_steps is None:
        raise ValueError("keep_best needs every_steps: with one evaluation there is nothing to choose from")


class SFTModel(Model):
    path: str | None = None
    """A Hugging Face model directory or a hub id to start from."""
    scratch: ScratchModel | None = None
    """Instead of `path`: build the model and its tokenizer here."""

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give exactly one of path (a pretrained model) and scratch (a new one)")
        return self


class SFTData(Data):
    prompt_words: NonNegativeInt = 0
    """For rows that are plain text: this many first words are the prompt, the rest is the response."""
    loss_on: Literal["completion", "all"] = "completion"
    """Which tokens are learnt: those of the completion (and EOS), or the prompt's too."""


class SFTEvaluation(Section):
    every_steps: PositiveInt | None = None
    """Optimizer steps between two evaluations; null evaluates at the end only."""
    keep_best: bool = False
    """Keep the model of the lowest held-out loss too, as `best_model`. Needs every_steps."""
    max_rows: PositiveInt = 1000
    """Held-out rows used at most."""
    num_samples: NonNegativeInt = 4
    """Held-out prompts that are completed at each evaluation, to be read."""
    max_new_tokens: PositiveInt = 64
    """Longest completion."""
    temperature: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _best(self) -> Self:
        _needs_every_steps(self.keep_best, self.every_steps)
        return self


class SFTConfig(Stage):
    """Supervised fine-tuning."""

    model: SFTModel
    data: SFTData
    training: Training
    optimizer: Optimizer
    evaluation: SFTEvaluation = SFTEvaluation()
    warn_loss_above: PositiveFloat | None = None
    """Warn when a step's loss is above this after the warm-up; null takes ln(vocabulary size), above which a
    model does worse than guessing every token alike."""

    @property
    def sources(self) -> dict[str, DataSource]:
        return numbered({"train": self.data.train, "test": self.data.test})

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        return {"model": (self.model.path, self.model.revision)} if self.model.path is not None else {}


class RMModel(Model):
    head_std: PositiveFloat | None = None
    """Standard deviation of the new head's weights; null takes 1/sqrt(hidden_size + 1)."""


class RMData(Data):
    margin_column: str | None = None
    """The column of a preference row that says by how much chosen is better (Llama 2); subtracted from the
    score difference in the pairwise losses."""
    probes: Source | None = None
    """Preference rows with a column `probe`: the accuracy is reported for each of its names."""


class RMEvaluation(Section):
    every_steps: PositiveInt | None = None
    """Optimizer steps between two evaluations; null evaluates at the end only."""
    keep_best: bool = False
    """Keep the model of the highest held-out accuracy (with loss: mse of the lowest error) too, as `best_model`.
    Needs every_steps."""
    max_rows: PositiveInt = 1000
    """Held-out rows used at most."""
    num_normalization_samples: NonNegativeInt = 192
    """Fresh samples of the SFT model whose scores give the mean and standard deviation that PPO normalises
    by; 0 leaves the score as it is."""
    max_new_tokens: PositiveInt = 64
    """Longest of those samples."""
    temperature: PositiveFloat = 1.0
    """Their sampling temperature; take PPO's."""
    prompt_words: NonNegativeInt = 0
    """For rows that are plain text: the samples start from this many first words; take PPO's."""

    @model_validator(mode="after")
    def _best(self) -> Self:
        _needs_every_steps(self.keep_best, self.every_steps)
        return self


class RMConfig(Stage):
    """Reward model."""

    model: RMModel = RMModel()
    data: RMData
    loss: RewardModelLoss = "logsigmoid"
    """Pairs: -log sigmoid of the score difference, or the same written as log(1 + exp). Scored rows: mse."""
    zero_mean_coef: NonNegativeFloat = 0.0
    """Weight of (chosen_score + rejected_score)^2, which keeps the scores around zero."""
    training: Training
    optimizer: Optimizer
    evaluation: RMEvaluation = RMEvaluation()

    @model_validator(mode="after")
    def _pairwise_only(self) -> Self:
        if self.loss == "mse" and self.zero_mean_coef:
            raise ValueError("zero_mean_coef belongs to the pairwise losses and does nothing with loss: mse")
        if self.loss == "mse" and self.data.margin_column:
            raise ValueError("data.margin_column belongs to the pairwise losses and does nothing with loss: mse")
        return self

    @property
    def sources(self) -> dict[str, DataSource]:
        return numbered({"train": self.data.train, "test": self.data.test, "probes": self.data.probes})

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        model = (self.stage_model(self.model.path, "sft"), self.model.revision)
        return {"model": model, "normalization policy": (f"{self.artifacts}/sft", None)}

    @property
    def needs(self) -> tuple[str, ...]:
        return ("sft",) if self.model.path is None else ()
