"""What a config file may say: one frozen model per stage, shared sections first.

No torch here, so that a wrong key is answered at once. A derived number is a property and never a field;
every field is read by something (tests/test_config_schemas.py proves it).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

STAGES = ("sft", "rm", "ppo")

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _parts(select: str) -> str:
    for part in select.split(","):
        k, n = map(int, part.split("/"))
        if k >= n:
            raise ValueError(f"part {part} does not exist, the {n} parts are 0/{n} to {max(n - 1, 0)}/{n}")
    return select


class Section(BaseModel):
    """A mapping of the YAML file: unknown keys are refused and nothing changes after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


# ---------------------------------------------------------------------------------------------- data


class DataSource(Section):
    """Rows from a local file, a folder of files or a dataset of the hub. A plain string is its path."""

    path: Annotated[str, Field(min_length=1)]
    """A file (.jsonl, .json, .csv, .parquet; .gz too), a folder of such files, or a hub dataset's id."""
    name: str | None = None
    """The subset of a hub dataset."""
    data_dir: str | None = None
    """A folder inside a hub dataset, where it has several (HH-RLHF: helpful-base, harmless-base, ...)."""
    split: str = "train"
    """The split of a hub dataset."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    limit: PositiveInt | None = None
    """Read only the first rows (before `select` chooses among them)."""
    select: Annotated[str, Field(pattern=r"^\d+/\d+(,\d+/\d+)*$"), AfterValidator(_parts)] | None = None
    """Parts of the file by a hash of each row's prompt, "0/10" the first tenth, "1/10,2/10" two more: one
    file serves as train and test rows, or several stages, and no prompt stands in two parts."""


def _path_alone(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


Source = Annotated[DataSource, BeforeValidator(_path_alone, json_schema_input_type=str | DataSource)]


def _holds_prompt(template: str) -> str:
    if template != "chat" and template.count("{prompt}") != 1:
        raise ValueError("must be `chat` or hold {prompt} exactly once")
    return template


PromptTemplate = Annotated[str, AfterValidator(_holds_prompt)]


class Data(Section):
    """Where the rows come from and how they become text."""

    train: Source
    """The rows to learn from."""
    test: Source | None = None
    """The held-out rows. Without them `test_fraction` of the training rows is held out, by a hash of the
    prompt, so that a prompt never stands on both sides."""
    test_fraction: BelowOne = 0.05
    """The share of the training rows held out where `test` is not given; 0 holds out nothing."""
    prompt_template: PromptTemplate | None = None
    """How a prompt is written, with `{prompt}` in it; `chat` takes the tokenizer's chat template; null takes
    the prompt as it stands (and the chat template for rows of messages where the tokenizer has one)."""
    max_length: PositiveInt = 512
    """Longest sequence in tokens, EOS included. A longer row is dropped and counted, never cut, since a cut
    answer would teach that answers end anywhere."""


class SFTData(Data):
    prompt_words: NonNegativeInt = 0
    """For rows that are plain text: this many first words are the prompt, the rest is the response."""
    loss_on: Literal["completion", "all"] = "completion"
    """Which tokens are learnt: those of the completion (and EOS), or the prompt's too."""


class RMData(Data):
    margin_column: str | None = None
    """The column of a preference row that says by how much chosen is better (Llama 2); subtracted from the
    score difference in the pairwise losses."""
    probes: Source | None = None
    """Preference rows with a column `probe`: the accuracy is reported for each of its names."""


class PromptData(Section):
    train: Source
    """The prompts that rollouts start from."""
    test: Source | None = None
    """Held-out prompts of the evaluation. Without them `test_fraction` of the training prompts is held out."""
    test_fraction: BelowOne = 0.05
    """The share of the prompts held out where `test` is not given, by a hash of the prompt."""
    prompt_template: PromptTemplate | None = None
    """As in the SFT stage; use the same."""
    prompt_words: NonNegativeInt = 0
    """For rows that are plain text: this many first words are the prompt."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens; a longer one is dropped and counted."""


# -------------------------------------------------------------------------------------------- models


class TokenizerTraining(Section):
    """A byte-level BPE tokenizer trained on the stage's training rows."""

    vocab_size: Annotated[int, Field(ge=260)] = 4096
    """Tokens asked for: 256 bytes and the special tokens are always there; few texts may give fewer."""
    split_digits: bool = True
    """Each digit is a token of its own."""


class ScratchModel(Section):
    """A model that starts from random weights."""

    architecture: str = "llama"
    """`model_type` of transformers: llama, gpt2, qwen2, gpt_neox, ..."""
    config: dict[str, Any] = {}
    """Its transformers config; vocabulary and special tokens are filled in from the tokenizer."""
    tokenizer: TokenizerTraining = TokenizerTraining()


class Model(Section):
    """Where a model comes from."""

    path: str | None = None
    """A Hugging Face model directory or a hub id; null takes the model of the stage before."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""


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


class RMModel(Model):
    head_std: PositiveFloat | None = None
    """Standard deviation of the new head's weights; null takes 1/sqrt(hidden_size + 1)."""


class ValueModel(Model):
    init: Literal["auto", "reward_model", "policy"] = "auto"
    """Whose weights the value model starts from (its head starts at zero); auto takes the first reward model
    that reads the policy's tokens, and the policy where there is none."""
    learning_rate: PositiveFloat | None = None
    """Null takes the policy's."""


# ------------------------------------------------------------------------------------------ training


class Optimizer(Section):
    """AdamW (torch's fused one) with a warm-up and a schedule."""

    learning_rate: PositiveFloat
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """What follows the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up; the first step after a warm-up's begin has learning rate 0."""
    min_lr_ratio: BelowOne = 0.0
    """Where cosine and linear end, as a share of the peak."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """On matrices only; biases and norms are never decayed."""
    max_grad_norm: PositiveFloat = 1.0
    """The gradient's norm is clipped to this."""


class Training(Section):
    """How long, in what batches."""

    num_epochs: PositiveFloat | None = None
    """Passes over the training rows (give this or `num_steps`)."""
    num_steps: PositiveInt | None = None
    """Optimizer steps (give this or `num_epochs`)."""
    minibatch_size: PositiveInt = 16
    """Rows of one optimizer step, over all processes."""
    microbatch_size: PositiveInt | None = None
    """Rows of one backward pass of a process; less memory, the same gradient. Null takes all of its share of
    the minibatch."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.num_epochs is None) == (self.num_steps is None):
            raise ValueError("give exactly one of num_epochs and num_steps")
        return self

    def total_steps(self, num_rows: int) -> int:
        """Optimizer steps for this many training rows; at least one."""
        if self.num_steps is not None:
            return self.num_steps
        assert self.num_epochs is not None
        return max(1, round(self.num_epochs * num_rows / self.minibatch_size))


class Stage(Section):
    """What every stage's file says."""

    artifacts: Annotated[str, Field(min_length=1)]
    """Root of the run's artifact directory; the stage writes `<artifacts>/<stage>/`."""
    seed: int = 0
    """Every random draw is counted from this."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes a CUDA GPU where torch sees one, else the CPU."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the forward and backward passes; weights stay float32. auto takes bfloat16 on a GPU that
    has it and float32 elsewhere."""

    @property
    def sources(self) -> dict[str, DataSource]:
        """The data of the stage, by role."""
        raise TypeError(f"{type(self).__name__} is no stage")

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        """The models and the user's code that the stage reads, by role: (path or hub id, revision)."""
        raise TypeError(f"{type(self).__name__} is no stage")

    @property
    def needs(self) -> tuple[str, ...]:
        """Stages of the same run that must be finished before."""
        return ()

    def stage_model(self, path: str | None, stage: str) -> str:
        """`path`, or where the run's own `stage` stands."""
        return path if path is not None else f"{self.artifacts}/{stage}"


# -------------------------------------------------------------------------------------------- stages


class SFTEvaluation(Section):
    every_steps: PositiveInt | None = None
    """Optimizer steps between two evaluations; null evaluates at the end only."""
    max_rows: PositiveInt = 1000
    """Held-out rows used at most."""
    num_samples: NonNegativeInt = 4
    """Held-out prompts that are completed at each evaluation, to be read."""
    max_new_tokens: PositiveInt = 64
    """Longest completion."""
    temperature: PositiveFloat = 1.0


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
        return _given({"train": self.data.train, "test": self.data.test})

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        return {"model": (self.model.path, self.model.revision)} if self.model.path is not None else {}


class RMEvaluation(Section):
    every_steps: PositiveInt | None = None
    """Optimizer steps between two evaluations; null evaluates at the end only."""
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


class RMConfig(Stage):
    """Reward model."""

    model: RMModel = RMModel()
    data: RMData
    loss: Literal["logsigmoid", "logexp", "mse"] = "logsigmoid"
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
        return _given({"train": self.data.train, "test": self.data.test, "probes": self.data.probes})

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        model = (self.stage_model(self.model.path, "sft"), self.model.revision)
        return {"model": model, "normalization policy": (f"{self.artifacts}/sft", None)}

    @property
    def needs(self) -> tuple[str, ...]:
        return ("sft",) if self.model.path is None else ()


class ModelReward(Section):
    """A reward model: our `rm` artifact, or any sequence classifier with its own tokenizer."""

    type: Literal["reward_model"]
    path: str | None = None
    """A Hugging Face directory or hub id; null takes the run's own `rm` stage."""
    revision: str | None = None
    label: str | None = None
    """The label of a classifier with several whose logit is the score; needed there and only there."""
    normalize: bool = True
    """Subtract the mean and divide by the standard deviation stored in the model directory, if any."""
    weight: float = 1.0


class FunctionReward(Section):
    """A Python function of yours. It is run as code: name only a file that you trust."""

    type: Literal["function"]
    function: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")]
    """`path/to/file.py:name`, called with (prompts, responses, rows), each a list; returns a number a row."""
    weight: float = 1.0


Reward = Annotated[ModelReward | FunctionReward, Field(discriminator="type")]


class Rollout(Section):
    """How responses are sampled. There are no top-k and top-p filters: they would sample from another
    distribution than the one whose log-probabilities the ratio and the KL are made of."""

    max_new_tokens: PositiveInt = 64
    """Longest response, EOS included."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; every log-probability is taken at it too."""


class PPO(Section):
    """The update (Schulman et al. 2017; Ziegler et al. 2019)."""

    num_iterations: PositiveInt
    """Rollout and update, this many times."""
    rollout_batch_size: PositiveInt
    """Prompts, and so responses, of one iteration, over all processes."""
    minibatch_size: PositiveInt
    """Responses of one optimizer step, over all processes."""
    microbatch_size: PositiveInt | None = None
    """Responses of one forward and backward pass of a process; null takes all of its share of the minibatch."""
    ppo_epochs: PositiveInt = 1
    """Passes over each rollout."""
    kl_coef: NonNegativeFloat = 0.05
    """Weight of the KL to ref_policy, taken off each token's reward."""
    clip_range: PositiveFloat = 0.2
    """The ratio is clipped to 1 +- this."""
    value_clip_range: PositiveFloat | None = 0.2
    """A new value moves at most this far from the old one; null never clips."""
    vf_coef: PositiveFloat = 0.5
    """Weight of the value loss, which carries a factor 1/2 of its own."""
    gamma: Fraction = 1.0
    """Discount per token."""
    gae_lambda: Fraction = 0.95
    """Lambda of GAE."""
    whiten_advantages: bool = True
    """Advantages over the whole rollout get mean 0 and variance 1."""
    missing_eos_penalty: NonNegativeFloat = 1.0
    """Taken off the score of a response that did not end by itself."""
    score_clip: PositiveFloat | None = None
    """Scores are clipped to +- this, after normalisation."""

    @model_validator(mode="after")
    def _batches(self) -> Self:
        if self.rollout_batch_size % self.minibatch_size:
            raise ValueError(
                f"minibatch_size {self.minibatch_size} must divide rollout_batch_size "
                f"{self.rollout_batch_size}, or the last step would be smaller than the others"
            )
        return self

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of one iteration."""
        return self.ppo_epochs * (self.rollout_batch_size // self.minibatch_size)


class PPOEvaluation(Section):
    """SFT against PPO on held-out prompts, at the end."""

    num_prompts: PositiveInt = 256
    """Held-out prompts used at most."""
    num_examples: NonNegativeInt = 5
    """Prompts shown with both replies."""
    gold: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")] | None = None
    """`path/to/file.py:name`, a judge of your own that training never sees, called as a function reward is;
    returns a number a row, or a mapping of names to numbers."""


class PPOConfig(Stage):
    """PPO from a reward model."""

    policy: Model = Model()
    rewards: Annotated[list[Reward], Field(min_length=1)] = [ModelReward(type="reward_model")]
    """The score of a response is the weighted sum of these."""
    value_model: ValueModel = ValueModel()
    data: PromptData
    rollout: Rollout = Rollout()
    ppo: PPO
    optimizer: Optimizer
    evaluation: PPOEvaluation = PPOEvaluation()

    @property
    def sources(self) -> dict[str, DataSource]:
        return _given({"train": self.data.train, "test": self.data.test})

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        found = {"policy": (self.stage_model(self.policy.path, "sft"), self.policy.revision)}
        for number, reward in enumerate(self.rewards):
            if isinstance(reward, ModelReward):
                found[f"rewards.{number}"] = (self.stage_model(reward.path, "rm"), reward.revision)
            else:
                found[f"rewards.{number}"] = (reward.function.rpartition(":")[0], None)
        if self.evaluation.gold is not None:
            found["evaluation.gold"] = (self.evaluation.gold.rpartition(":")[0], None)
        return found

    @property
    def needs(self) -> tuple[str, ...]:
        own_rm = any(isinstance(reward, ModelReward) and reward.path is None for reward in self.rewards)
        return (("sft",) if self.policy.path is None else ()) + (("rm",) if own_rm else ())


def _given(sources: dict[str, DataSource | None]) -> dict[str, DataSource]:
    return {role: source for role, source in sources.items() if source is not None}


CONFIGS: dict[str, type[Stage]] = {"sft": SFTConfig, "rm": RMConfig, "ppo": PPOConfig}
