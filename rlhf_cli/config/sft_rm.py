"""The config files of the stages SFT (supervised fine-tuning) and RM (reward model)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from rlhf_cli.algorithms.names import PairwiseLoss, PointwiseLoss, RewardModelLoss
from rlhf_cli.config.base import (
    BelowHalf,
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from rlhf_cli.config.data import Data, DataSource, Source, numbered
from rlhf_cli.config.models import ScratchModel, Tokens, TrainedModel
from rlhf_cli.config.stage import Optimizer, Stage, Training


class StageEvaluation(Section):
    """Held-out figures while the stage trains and at its end."""

    every_steps: PositiveInt | None = None
    """Optimizer steps between two evaluations; null evaluates at the end only."""
    keep_best: bool = False
    """Also save the best model, as `best_model`: by the held-out loss of SFT, the accuracy of a reward model, or its
    squared error with `loss: mse`. Needs every_steps."""
    max_rows: PositiveInt = 1000
    """Maximum number of held-out rows to use, drawn by a hash of their content and the seed."""

    def rules(self) -> Iterator[str]:
        if self.keep_best and self.every_steps is None:
            yield "keep_best needs every_steps, because one evaluation leaves nothing to choose from"


class SFTModel(TrainedModel):
    """The model to train: a pretrained one (`path`) or a new one (`scratch`)."""

    path: LocalPath | None = None
    """The model to start from: a Hugging Face model directory or a hub id."""
    scratch: ScratchModel | None = None
    """Build a new model and its tokenizer instead of loading one from `path`."""
    add_tokens: Tokens = []
    """Tokens to add to the tokenizer, such as `<|im_end|>`. Each becomes one special token, and the embeddings grow by
    rows that start as the mean of the others. Write them in `data.prompt_template` or the chat
    template. The later stages of the run read the tokenizer of this one."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        if (self.path is None) == (self.scratch is None):
            yield "set exactly one of path (a pretrained model) and scratch (a new model)"
        if self.lora is not None and self.scratch is not None:
            yield "lora trains adapters on a pretrained model, so set path, or remove lora"
        if self.lora is not None and self.add_tokens:
            yield (
                "add_tokens does nothing with lora: the embeddings are frozen, so a new token would never be learned. "
                "Remove one of them"
            )


class SFTData(Data):
    """Where the demonstrations come from, and how they become text."""

    prompt_words: NonNegativeInt = 0
    """For rows of plain text: the prompt is this many words from the start, and the rest is the response."""
    loss_on: Literal["completion", "all"] = "completion"
    """Which tokens are learned: those of the completion and EOS, or those of the prompt as well."""


class SFTEvaluation(StageEvaluation):
    """Held-out loss and sample completions."""

    num_samples: NonNegativeInt = 4
    """Number of held-out prompts to complete at each evaluation, for you to read (samples.jsonl)."""
    max_new_tokens: PositiveInt = 64
    """Maximum length of such a completion in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of the completions."""


class SFTConfig(Stage):
    """Supervised fine-tuning."""

    model: SFTModel
    """The model to train."""
    data: SFTData
    """The demonstrations."""
    training: Training
    """The number of steps, and the batches."""
    optimizer: Optimizer
    """AdamW and its schedule."""
    evaluation: SFTEvaluation = SFTEvaluation()
    """Held-out loss and sample completions."""
    warn_loss_above: PositiveFloat | None = None
    """Warn if the loss of a step is above this after the warm-up. Null uses ln(vocabulary size): above it the model
    is worse than a uniform guess."""

    @property
    def sources(self) -> dict[str, DataSource]:
        return numbered(self.data.by_side)

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        return {"model": (self.model.path, self.model.revision)} if self.model.path is not None else {}


class RMModel(TrainedModel):
    """The model that becomes the reward model. A trained head with one label is kept."""

    head_std: PositiveFloat | None = None
    """Standard deviation of the weights of a new head. Null uses 1 / sqrt(hidden_size + 1). Refused for a model that
    keeps its trained head."""


class RMData(Data):
    """Where the preference pairs or scored rows come from, and how they become text."""

    margin_column: str | None = None
    """The column of a preference row that says by how much the chosen answer is better (Llama 2). The pairwise
    losses subtract it from the score difference."""
    probes: Source | None = None
    """Preference rows with a column `probe`, with any loss. The accuracy is reported for each value of that column."""


class RMEvaluation(StageEvaluation):
    """Held-out accuracy, and the statistics by which PPO normalises the score."""

    num_normalization_samples: NonNegativeInt = 192
    """Number of new samples from the SFT model whose scores give the mean and standard deviation by which PPO
    normalises. 0 leaves the score unnormalised."""
    max_new_tokens: PositiveInt = 64
    """Maximum length of those samples in tokens. Use PPO's `rollout.max_new_tokens`."""
    max_live_rows: PositiveInt | None = None
    """Maximum number of those samples to decode at the same time, which bounds the memory for their keys and values.
    null decodes all of them together. The samples are the same."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of those samples. Use PPO's `rollout.temperature`."""
    prompt_words: NonNegativeInt = 0
    """For rows of plain text: the samples start from this many words. Use PPO's `data.prompt_words`."""


class RMConfig(Stage):
    """Reward model."""

    model: RMModel = RMModel()
    """The model to start from."""
    members: PositiveInt | None = None
    """How many reward models to train on these rows, one after the other, for `rewards: - type: ensemble`. Each has
    an order of the rows of its own. `rm/model` is the first; the others are `rm/members/1`, `rm/members/2`, ....
    Null is 1."""
    member_models: list[LocalPath] = []
    """Models that the members after the first start from, in turn, such as SFT models of other seeds: members that
    start from one model make the same mistakes. Empty: all start from `model`."""
    data: RMData
    """The preference pairs or scored rows."""
    loss: RewardModelLoss = "logsigmoid"
    """For pairs, and all pairs of a ranking: -log sigmoid of the score difference (`logsigmoid`), or the same written
    as log(1 + exp) (`logexp`). For rankings as a whole: the best answer chosen from all, then the next from the rest
    (`plackett_luce`). For rows with a score: squared error (`mse`). For rows with a label from 0 (bad) to 1 (good),
    such as those of KTO: the logistic loss, so that sigmoid(score) is the probability of a good answer (`bce`)."""
    label_smoothing: BelowHalf | None = None
    """Train as if this share of the preferences were flipped, which keeps the scores from growing without limit."""
    flip_rate: BelowHalf | None = None
    """The known share of preferences that were flipped at random, such as 0.25. The loss then is, on average over
    the flips, the loss on the true preferences. It has no lower bound: train one or two epochs."""
    zero_mean_coef: NonNegativeFloat = 0.0
    """Weight of (chosen_score + rejected_score)^2, which keeps the scores around 0. It is the pairwise form of the
    penalty on the squared sum of a batch (Hong et al. 2025)."""
    length_correction: bool = False
    """Subtract from every score what the length of its reply predicts, by a regression on the held-out answers. It is
    kept in the model's config.json as `length_curve`, and PPO, `rlhf eval`, `rlhf rm score` and `rlhf rm serve` use
    it."""
    training: Training
    """The number of steps, and the batches."""
    optimizer: Optimizer
    """AdamW and its schedule."""
    evaluation: RMEvaluation = RMEvaluation()
    """Held-out accuracy and score normalisation."""

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        of_pairs, chosen = self.loss in get_args(PairwiseLoss), f"loss: {self.loss}, only with logsigmoid and logexp"
        self.refuse_unread(of_pairs, chosen, "label_smoothing", "flip_rate", "zero_mean_coef")
        if self.data.margin_column and not of_pairs:
            yield f"data.margin_column does nothing with {chosen}. Remove it"
        if self.length_correction and not self.is_pairwise:
            yield (
                f"length_correction is for scores that compare answers. With loss: {self.loss} a score predicts its "
                "row's, also where that depends on the length. Remove it"
            )
        if self.label_smoothing and self.flip_rate:
            yield "label_smoothing adds flips to the labels, flip_rate takes them out. Remove one of them"
        if len(self.member_models) > self.num_members - 1:
            yield (
                f"member_models names {len(self.member_models)} models, and {self.num_members - 1} of the members come "
                "after the first. Remove some, or raise members"
            )

    @property
    def num_members(self) -> int:
        return self.members or 1

    @property
    def is_pairwise(self) -> bool:
        """Whether the loss compares answers, rather than taking each by itself."""
        return self.loss not in get_args(PointwiseLoss)

    @property
    def sources(self) -> dict[str, DataSource]:
        probes = self.data.probes
        return numbered(self.data.by_side | {"probes": [] if probes is None else [probes]})

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        model = (self.stage_model(self.model.path, "sft"), self.model.revision)
        members = {f"member_models.{i}": (path, None) for i, path in enumerate(self.member_models)}
        return {"model": model, "normalization policy": (f"{self.artifacts}/sft", None), **members}

    @property
    def needs(self) -> tuple[str, ...]:
        return ("sft",) if self.model.path is None else ()
