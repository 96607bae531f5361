"""What a config file may say: one frozen model per stage, shared sections first.

No torch here, so that a wrong key is answered at once. A derived number is a property and never a field;
every field is read by something (tests/test_config_schemas.py proves it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

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


Format = Literal[
    "auto",
    "prompt_response",
    "prompt",
    "text",
    "labelled",
    "messages",
    "alpaca",
    "instruction",
    "preference",
    "hh",
    "shp",
    "summarize",
    "webgpt",
    "stackexchange",
    "pandalm",
    "ultrafeedback",
    "helpsteer",
    "kto",
    "ranking",
    "scored",
]


class DataSource(Section):
    """Rows from local files or a dataset of the hub. A plain string is its path. docs/data.md shows every format
    with a row of it."""

    path: Annotated[str, Field(min_length=1)]
    """A file (JSON, JSONL, CSV, TSV, Parquet, plain text; compressed too), a folder of such files, a glob, or a hub
    dataset's id."""
    format: Format = "auto"
    """What the rows are; auto goes by the keys of the first one and says what it took them for."""
    keys: dict[str, str] = {}
    """Which column of the file is meant by each of ours, `{prompt: question, response: output.text}`; a dot goes
    into a mapping."""
    weights: dict[str, float] = {}
    """For rows with several grades (HelpSteer, UltraFeedback): the weight of each in the score."""
    name: str | None = None
    """The subset of a hub dataset."""
    data_dir: str | None = None
    """A folder inside a hub dataset, where it has several (HH-RLHF: helpful-base, harmless-base, ...)."""
    split: str = "train"
    """The split of a hub dataset."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""
    streaming: bool = False
    """Read a hub dataset row by row and never hold it on disk whole; give a `limit` with a large one."""
    limit: PositiveInt | None = None
    """Read only the first rows (before `select` chooses among them)."""
    select: Annotated[str, Field(pattern=r"^\d+/\d+(,\d+/\d+)*$"), AfterValidator(_parts)] | None = None
    """Parts of the file by a hash of each row's prompt, "0/10" the first tenth, "1/10,2/10" two more: one
    file serves as train and test rows, or several stages, and no prompt stands in two parts."""
    weight: PositiveFloat = 1.0
    """How often an epoch goes through these rows: 2 twice, 0.5 through the half of them that a hash of the prompt
    picks. Training rows only."""


def _path_alone(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else [value]


Source = Annotated[DataSource, BeforeValidator(_path_alone, json_schema_input_type=str | DataSource)]
Sources = Annotated[
    list[Source],
    Field(min_length=1),
    BeforeValidator(_as_list, json_schema_input_type=str | DataSource | list[str | DataSource]),
]


def _holds_prompt(template: str) -> str:
    if template != "chat" and template.count("{prompt}") != 1:
        raise ValueError("must be `chat` or hold {prompt} exactly once")
    return template


PromptTemplate = Annotated[str, AfterValidator(_holds_prompt)]


class Rows(Section):
    """Where the rows of a stage come from, and which of them are taken."""

    train: Sources
    """The rows to learn from: a path, a mapping, or a list of them, which is a mixture."""
    test: Sources | None = None
    """The held-out rows. Without them `test_fraction` of the training rows is held out."""
    test_fraction: BelowOne = 0.05
    """The share of the training rows held out where `test` is not given, by a hash of the prompt, so that a prompt
    never stands on both sides; 0 holds out nothing."""
    split: Annotated[list[NonNegativeInt], Field(min_length=3, max_length=3)] | None = None
    """Shares of SFT, RM and PPO in one dataset, [2, 4, 4] say: each prompt belongs to one of the three, by its hash.
    Give the same in every stage's file."""
    deduplicate: bool = False
    """Leave out a row whose prompt and answers have come before."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that can't be read stops the run, or is left out and counted."""

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.split is not None and not sum(self.split):
            raise ValueError("split: all three shares are 0, at least one must not be")
        return self


class Data(Rows):
    """Where the rows come from and how they become text."""

    prompt_template: PromptTemplate | None = None
    """How a prompt is written, with `{prompt}` in it; `chat` takes the tokenizer's chat template; null takes
    the prompt as it stands (and the chat template for rows of messages where the tokenizer has one)."""
    max_length: PositiveInt = 512
    """Longest sequence in tokens, EOS included."""
    truncation: Literal["drop", "left", "right"] = "drop"
    """What happens to a longer row. `drop` leaves it out: a cut answer would teach that answers end anywhere.
    `left` cuts the beginning of its prompt, `right` the end of its answer, and with it EOS. All are counted."""
    min_response_length: NonNegativeInt = 0
    """Shortest response in tokens, EOS included; rows with a shorter one are dropped and counted."""


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


class PromptData(Rows):
    """Where the prompts come from."""

    prompt_template: PromptTemplate | None = None
    """As in the SFT stage; use the same."""
    prompt_words: NonNegativeInt = 0
    """For rows that are plain text: this many first words are the prompt."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens."""
    truncation: Literal["drop", "left", "right"] = "drop"
    """What happens to a longer prompt: it is left out, or loses its beginning or its end. All are counted."""


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


class Lora(Section):
    """Low-rank adapters on a frozen model (Hu et al. 2021); needs the extra `lora`. ref_policy is then the
    policy with its adapters off and costs no memory of its own. What is saved is merged, a plain model."""

    r: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveInt = 32
    """The adapters' output is scaled by alpha / r."""
    target_modules: list[str] | None = None
    """Ends of the names of the linear layers that get one, [q_proj, v_proj] say; null takes all linear layers
    of the backbone."""


class PolicyModel(Model):
    path: str | None = None
    """A Hugging Face model directory or a hub id; null takes the run's own `sft` stage. An earlier run's
    `ppo` directory goes on training from there: give `ref_policy.path` then, or the KL starts from there too."""
    lora: Lora | None = None
    """Train adapters instead of all weights."""


class ValueModel(Section):
    init: Literal["auto", "reward_model", "policy", "shared"] = "auto"
    """Whose weights the value model starts from, its head at zero: `reward_model` and `policy` are models of
    their own; `shared` is a head on the policy's own backbone, one forward pass for both and half the memory,
    but two losses pull at one set of weights. auto takes the first reward model that reads the policy's
    tokens, and the policy where there is none."""
    path: str | None = None
    """The `value_model` directory of an earlier PPO run instead, with its head; `init` may be `shared`."""
    lora: Lora | None = None
    """Adapters instead of all weights, for a value model of its own."""
    learning_rate: PositiveFloat | None = None
    """Null takes the policy's."""
    warmup_iterations: NonNegativeInt = 0
    """Iterations at the start in which only the value model learns: a fresh one gives wrong advantages, and
    those can undo the SFT (VC-PPO, Yuan et al. 2025)."""


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
    max_bad_steps: PositiveInt = 1
    """So many steps in a row whose loss or gradient is no number stop the run; of fewer each is left out: nothing is
    stepped, the schedule and the data go on, and its batch is in `<artifacts>/<stage>.failed_batch.jsonl`."""


class Training(Section):
    """How long, in what batches."""

    num_epochs: PositiveFloat | None = None
    """Passes over the training rows (give this or `num_steps`)."""
    num_steps: PositiveInt | None = None
    """Optimizer steps (give this or `num_epochs`)."""
    minibatch_size: PositiveInt = 16
    """Rows of one optimizer step, over all processes."""
    tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Tokens of one backward pass of a process, at most, except for a row that is longer by itself; less memory, the
    same gradient. auto goes by the model and the device's memory (docs/speed.md)."""
    microbatch_size: PositiveInt | None = None
    """Rows of one backward pass of a process, at most; null goes by the tokens alone."""

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


class Checkpoints(Section):
    """What a run saves on its way, so that the same command goes on after whatever stopped it. None of it
    changes the result."""

    every_steps: PositiveInt | None = None
    """Save after every so many steps (PPO: iterations); null goes by the clock alone."""
    every_minutes: PositiveFloat | None = 10.0
    """Save when so long has passed since the last time; null goes by the steps alone."""
    keep: PositiveInt = 2
    """How many of the last ones stay; an older one is used where a newer one is damaged."""


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
    gradient_checkpointing: bool = False
    """Keep of each layer its input only, and compute the rest again in the backward pass: the same gradient with
    less memory, and a third more arithmetic."""
    compile: bool = False
    """Compile the training passes by torch.compile, for a GPU: seconds to minutes at the start, and on a CPU slower
    steps. Needs a C++ compiler."""
    checkpoints: Checkpoints = Checkpoints()

    @model_validator(mode="after")
    def _passes(self) -> Self:
        if self.compile and self.gradient_checkpointing:
            raise ValueError("compile and gradient_checkpointing can't be had at once: attention is not compiled")
        return self

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


def _needs_every_steps(keep_best: bool, every_steps: int | None) -> None:
    if keep_best and every_steps is None:
        raise ValueError("keep_best needs every_steps: with one evaluation there is nothing to choose from")


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
        return numbered({"train": self.data.train, "test": self.data.test, "probes": self.data.probes})

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        model = (self.stage_model(self.model.path, "sft"), self.model.revision)
        return {"model": model, "normalization policy": (f"{self.artifacts}/sft", None)}

    @property
    def needs(self) -> tuple[str, ...]:
        return ("sft",) if self.model.path is None else ()


class AnyReward(Section):
    """What every source of rewards says. docs/rewards.md has an example of each."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")] | None = None
    """Its name in metrics and messages; null takes its type (a function's own name), numbered where there are
    several sources."""
    weight: float = 1.0
    on_error: Literal["stop", "zero"] = "stop"
    """What a score that can't be had does (an exception, a time-out, a value that is no finite number): it stops the
    run, or is 0.0 and counted."""


def _holds_response(template: str) -> str:
    if template != "chat" and (template.count("{response}") != 1 or template.count("{prompt}") > 1):
        raise ValueError("must be `chat` or hold {prompt} and {response} once each")
    return template


class ModelReward(AnyReward):
    """A reward model: our `rm` artifact, or any sequence classifier with its own tokenizer."""

    type: Literal["reward_model"]
    path: str | None = None
    """A Hugging Face directory or hub id; null takes the run's own `rm` stage."""
    revision: str | None = None
    label: str | None = None
    """The label of a classifier with several whose output is the score; needed there and only there."""
    output: Literal["logit", "probability"] = "logit"
    """A classifier's logit, or its probability (softmax over the labels, sigmoid of a single one): that lies
    between 0 and 1 and flattens where the classifier is sure."""
    reads: Literal["prompt_and_response", "response"] = "prompt_and_response"
    """What the model is given."""
    template: Annotated[str, AfterValidator(_holds_response)] | None = None
    """How the text is written for this model, with `{prompt}` (the row's own, without data.prompt_template) and
    `{response}` in it; `chat` takes the chat template of its tokenizer. Null gives what the policy read and wrote,
    one behind the other, as the very same tokens where the tokenizers are the same."""
    normalize: bool = True
    """Subtract the mean and divide by the standard deviation stored in the model directory, if any."""

    @model_validator(mode="after")
    def _scale(self) -> Self:
        if self.output == "probability" and self.path is None:
            raise ValueError("output: probability is for a classifier; the run's own rm stage gives a score, no class")
        if self.template is not None:
            holds = self.template == "chat" or "{prompt}" in self.template
            if holds != (self.reads == "prompt_and_response"):
                has = "has a place for the prompt" if holds else "has no {prompt}"
                raise ValueError(f"template {has}, and reads is {self.reads}. Change one of them")
        return self


class FunctionReward(AnyReward):
    """A Python function of yours. It is run as code: name only a file that you trust."""

    type: Literal["function"]
    function: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")]
    """`path/to/file.py:name`, called with (prompts, responses, rows), each a list; returns a number a row. It may be
    an `async def`."""
    per_token: bool = False
    """The function returns a list of numbers a row instead, one for each of `row["tokens"]`: each stands at its
    own token (a dense reward), and only the rest of the score at the last."""
    batch_size: PositiveInt | None = None
    """Rows of one call; null gives all of them at once."""
    concurrency: PositiveInt | None = None
    """Calls of an async function that are under way at once, at most; null takes 8."""
    timeout_s: PositiveFloat | None = None
    """Seconds that one call of an async function may take; null waits. A plain function can't be stopped."""

    @model_validator(mode="after")
    def _pieces(self) -> Self:
        if self.concurrency is not None and self.batch_size is None:
            raise ValueError("concurrency does nothing without batch_size: there is one call. Give batch_size")
        return self


def _is_endpoint(url: str) -> str:
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        wrong = True
    if wrong or not url.isprintable() or " " in url:
        raise ValueError("must be http://host:port/path or https://...")
    if parts.username is not None or parts.password is not None:
        raise ValueError("holds a user or a password, which would stand in logs and artifacts. Take api_key_env")
    return url


class HTTPReward(AnyReward):
    """An endpoint that scores texts, `rlhf rm serve` or another of OpenRLHF's shape."""

    type: Literal["http"]
    url: Annotated[str, AfterValidator(_is_endpoint)]
    """Where the texts are posted to, `http://127.0.0.1:5000/get_reward` say."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """The name of the environment variable that holds the token, sent as `Authorization: Bearer ...`."""
    label_column: str | None = None
    """The column of the row that is sent as its label; null sends empty ones."""
    batch_size: PositiveInt = 64
    """Texts of one request."""
    concurrency: PositiveInt = 4
    """Requests that are under way at once, at most."""
    timeout_s: PositiveFloat = 60.0
    """Seconds that one request may take, from connecting to the last byte of the answer."""
    retries: NonNegativeInt = 5
    """How often a request is sent again that got no answer, 408, 429 or an error of the server's (5xx)."""
    backoff_s: PositiveFloat = 1.0
    """Seconds before it is sent again, doubled each time; longer where the server says so (Retry-After)."""


class LengthReward(AnyReward):
    """0 within a range of lengths, and outside minus the distance to it."""

    type: Literal["length"]
    unit: Literal["tokens", "words", "characters"] = "tokens"
    """What is counted: the policy's tokens (EOS included), words between blanks, or characters."""
    target: NonNegativeInt | None = None
    """The one length that costs nothing."""
    min: NonNegativeInt | None = None
    """The shortest length that costs nothing."""
    max: NonNegativeInt | None = None
    """The longest length that costs nothing."""

    @property
    def bounds(self) -> tuple[int, int | None]:
        """The lengths that cost nothing, from and to; None is without an end."""
        return (self.target, self.target) if self.target is not None else (self.min or 0, self.max)

    @model_validator(mode="after")
    def _one_range(self) -> Self:
        ranged = self.min is not None or self.max is not None
        if (self.target is not None) == ranged:
            raise ValueError("give target, or min and max or one of them")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


def _compiles(pattern: str) -> str:
    import regex

    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is no regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]


class RegexReward(AnyReward):
    """1 for a response in which a regular expression is found, else 0."""

    type: Literal["regex"]
    pattern: Pattern
    """As of Python's `re`; `(?i)` at its start ignores case, `(?s)` lets a dot be a line's end."""
    full: bool = False
    """The whole response must fit, not a part of it."""
    timeout_s: PositiveFloat = 1.0
    """Seconds that one response may take: some patterns need years for some texts, `(a|aa)+$` say."""


class AnswerReward(AnyReward):
    """1 for a response whose answer is the row's own, else 0."""

    type: Literal["answer_match"]
    column: str
    """The column that holds the truth: as it stands, or what follows its last `####` (GSM8K)."""
    mode: Literal["numeric", "exact"] = "numeric"
    """numeric compares numbers ($1,200.00 is 1200, 1/2 is 0.5); exact compares text, blanks at the ends aside."""
    pattern: Pattern | None = None
    """What finds the answer in the response: the first group of its last match, or all of that. Null takes what
    follows the last `####`; without one the last number, or, with `exact`, all of the response."""
    timeout_s: PositiveFloat = 1.0
    """Seconds that `pattern` may take for one response."""


class RepetitionReward(AnyReward):
    """Minus the share of n-grams that have come before in the same response: 0 without a repetition, towards -1."""

    type: Literal["repetition"]
    n: PositiveInt = 3
    """How many words or tokens make an n-gram."""
    unit: Literal["words", "tokens"] = "words"
    """What the n-grams are of."""


class JSONReward(AnyReward):
    """1 for a response that is valid JSON and nothing else, else 0."""

    type: Literal["json"]
    required: list[str] = []
    """Keys that the object must have, at its top level."""


RuleReward = LengthReward | RegexReward | AnswerReward | RepetitionReward | JSONReward
Reward = Annotated[ModelReward | FunctionReward | HTTPReward | RuleReward, Field(discriminator="type")]


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    """What each source is called in metrics and messages."""
    several = len(rewards) > 1
    names = []
    for number, reward in enumerate(rewards):
        kind = reward.function.rpartition(":")[2] if isinstance(reward, FunctionReward) else reward.type
        names.append(reward.name or (f"{kind}_{number}" if several else kind))
    return names


class Rollout(Section):
    """How responses are sampled. top_k, top_p, min_p and min_new_tokens restrict what may be drawn; the rollout
    remembers what was allowed, and ratio, KL and entropy are those of the restricted distributions (of the
    policy and of ref_policy alike), so that a filter is part of the policy and no hidden difference."""

    samples_per_prompt: PositiveInt = 1
    """Responses to each prompt; `rloo`, `grpo`, `dr_grpo` and `reinforce_pp_baseline` compare them."""
    max_new_tokens: PositiveInt = 64
    """Longest response, EOS included."""
    min_new_tokens: NonNegativeInt = 0
    """Shortest response, EOS included: nothing can end it before."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; every log-probability is taken at it too."""
    top_k: Annotated[int, Field(ge=2)] | None = None
    """Only the k likeliest tokens can be drawn; 1 would leave nothing to choose and so nothing to learn."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Only the likeliest tokens that together reach this probability."""
    min_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Only tokens of at least this share of the likeliest one's probability."""
    stop_tokens: list[str] = []
    """Further tokens that end a response beside EOS, each a single token of the tokenizer: `<|im_end|>`, say."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a response, whatever tokens they are made of. What is shown, and what a function or a reward
    model with its own tokenizer reads, ends before them; one that reads the policy's tokens reads them all."""
    max_live_rows: PositiveInt | None = None
    """Responses that a process draws at a time; where some have ended, prompts that wait take their place. It bounds
    the memory of their keys and values and changes no response. null draws all at once, which is the fastest."""

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}")
        return self


WITH_VALUES = ("gae", "monte_carlo")
GROUPED = ("rloo", "grpo", "dr_grpo", "reinforce_pp_baseline")


class PPO(Section):
    """The update (Schulman et al. 2017; Ziegler et al. 2019). docs/ppo.md says what each choice does, which
    evidence the defaults stand on and which test proves it."""

    # ---- how much
    num_iterations: PositiveInt
    """Rollout and update, this many times."""
    rollout_batch_size: PositiveInt
    """Responses of one iteration, over all processes: its prompts times `rollout.samples_per_prompt`."""
    minibatch_size: PositiveInt
    """Responses of one optimizer step, over all processes."""
    tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Tokens of one forward and backward pass of a process, prompts and responses, at most, except for a row that is
    longer by itself. auto goes by the models and the device's memory (docs/speed.md)."""
    microbatch_size: PositiveInt | None = None
    """Responses of one such pass, at most; null goes by the tokens alone."""
    ppo_epochs: PositiveInt = 1
    """Passes over each rollout. 1 is safest for language models; up to 4 where sampling is the dear part."""
    num_rollouts_per_update: PositiveInt = 1
    """Rollouts that an update learns from: the newest and the ones before it, kept in CPU memory. More than 1
    reuses dear samples; the old ones' advantages are weighted by their truncated importance."""
    importance_ratio_cap: PositiveFloat = 2.0
    """Truncation of that weight, policy now to policy that sampled (decoupled PPO, Hilton et al. 2021)."""

    # ---- the score
    score_normalization: Literal["none", "running", "reference"] = "none"
    """Beside each reward model's own stored statistics: `running` subtracts the mean and divides by the
    standard deviation of all scores so far (the effective kl_coef then drifts with it), `reference` by those
    of ref_policy's own samples, taken once at the start."""
    num_reference_samples: Annotated[int, Field(ge=2)] = 256
    """How many for `score_normalization: reference`."""
    score_clip: PositiveFloat | None = None
    """Scores are clipped to +- this, after normalisation: one freak score then can't dominate a batch."""
    missing_eos_penalty: NonNegativeFloat = 1.0
    """Taken off the score of a response that did not end by itself, which keeps length bounded."""
    length_penalty: NonNegativeFloat = 0.0
    """Taken off the score per token of the response."""
    overlong_buffer: NonNegativeInt = 0
    """In the last so many tokens before max_new_tokens the score falls linearly by up to `overlong_penalty`
    (DAPO): a softer missing_eos_penalty."""
    overlong_penalty: NonNegativeFloat = 0.0
    """The most that is taken off."""

    # ---- the distance to ref_policy
    kl_coef: NonNegativeFloat = 0.05
    """Weight of the KL to ref_policy, the one thing that holds the policy to what the reward model knows."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Taken off each token's reward (Ziegler et al. 2019), or added to the loss; never both."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full", "k2_sequence"] | None = None
    """Null takes the one whose optimum is ref_policy * exp(score / kl_coef): k1 in the reward, k2_sequence in
    the loss. The others optimise something else: docs/ppo.md says what. `full` is exact over the vocabulary."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive moves kl_coef until the KL of a response is `kl_target` (Ziegler et al. 2019, section 2.2)."""
    kl_target: PositiveFloat | None = None
    """Nats a response; needed with `kl_controller: adaptive` and only there."""
    kl_horizon: PositiveInt = 10_000
    """In how many responses kl_coef can change by about a fifth."""

    # ---- advantages
    advantage_estimator: Literal[
        "gae", "monte_carlo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "rloo", "grpo", "dr_grpo"
    ] = "gae"
    """gae and monte_carlo (returns less values) learn a value model. The others build none: reinforce is the
    reward to go as it is, reinforce_pp whitens it, reinforce_pp_baseline takes the prompt's mean score off
    first; rloo, grpo (divided by the group's standard deviation) and dr_grpo compare a prompt's responses."""
    gamma: Fraction = 1.0
    """Discount per token; 1 since a response ends, and below 1 the EOS reward fades over long ones."""
    gae_lambda: Fraction = 0.95
    """Lambda of GAE."""
    value_lambda: Fraction | None = None
    """Lambda of the returns that the value model learns; null takes gae_lambda, 1 is Monte-Carlo."""
    whiten_rewards: bool = False
    """Divide the token rewards by their standard deviation over the rollout, the mean kept."""
    whiten_advantages: bool | None = None
    """Advantages over the whole rollout get mean 0 and variance 1; null does so for gae, monte_carlo,
    reinforce_pp and reinforce_pp_baseline. Not for gae and monte_carlo with a KL in the loss: advantages that
    shrink with the policy's spread make it ever weaker."""

    # ---- the policy's loss
    objective: Literal["clip", "penalty"] = "clip"
    """The clipped ratio, or PPO-penalty: the ratio as it is, less policy_kl_coef * KL(old, new)."""
    clip_range: PositiveFloat = 0.2
    """The ratio is clipped to 1 +- this."""
    clip_range_high: PositiveFloat | None = None
    """Another range upwards (clip-higher, DAPO: 0.28 keeps rare tokens alive); null takes clip_range."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """The loss of a token with a negative advantage stops growing at this many times it (Ye et al. 2020: 3)."""
    old_logprobs: Literal["auto", "sampled", "recomputed"] = "auto"
    """What the ratio starts from: the log-probabilities that were captured while sampling, or those of another
    forward pass by the training's own code, which makes the ratio before the first step 1 to the last bit. auto
    captures them in float32, where the two differ by some 1e-5 nats, and computes them again in bfloat16."""
    policy_kl_coef: PositiveFloat = 1.0
    """Where PPO-penalty's coefficient starts."""
    policy_kl_target: PositiveFloat | None = None
    """It doubles above 1.5 times this KL(old, new) a token, and halves below 1/1.5 of it; null keeps it."""
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens of the minibatch; over each response first, so that long ones don't weigh more; or
    the sum divided by max_new_tokens (Dr. GRPO)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus (a cost where it is below 0). Full entropy over the vocabulary."""
    max_approx_kl: PositiveFloat | None = None
    """The update ends early, before the step, when KL(old, new) a token is above this (TRL: 0.15)."""
    max_ratio: PositiveFloat | None = 10.0
    """A minibatch whose mean ratio is above this is skipped: its samples are no longer the policy's."""

    # ---- the value model's loss
    vf_coef: PositiveFloat = 0.5
    """Weight of the value loss, which carries a factor 1/2 of its own."""
    value_clip_range: PositiveFloat | None = 0.2
    """A new value moves at most this far from the old one; null never clips."""

    # ---- what is kept
    ema_decay: BelowOne | None = None
    """Keep a moving average of the policy's weights, this share of it kept at each optimizer step (0.992), and
    save it as `ema_model`."""

    @property
    def has_value_model(self) -> bool:
        """Does this advantage estimator learn values?"""
        return self.advantage_estimator in WITH_VALUES

    @property
    def kl_estimator_used(self) -> Literal["k1", "k2", "k3", "abs", "full", "k2_sequence"]:
        """The estimator that null stands for."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k2_sequence")

    @property
    def whitens_advantages(self) -> bool:
        """What null stands for."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        if self.kl_in == "loss" and self.has_value_model:
            return False
        return self.has_value_model or self.advantage_estimator.startswith("reinforce_pp")

    def updates(self, iteration: int) -> int:
        """Optimizer steps of iteration `iteration` (from 0): early ones have fewer rollouts to learn from."""
        rollouts = min(iteration + 1, self.num_rollouts_per_update)
        return self.ppo_epochs * rollouts * (self.rollout_batch_size // self.minibatch_size)

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of one iteration, once there are `num_rollouts_per_update` rollouts."""
        return self.updates(self.num_rollouts_per_update - 1)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return sum(self.updates(i) for i in range(self.num_iterations))

    @model_validator(mode="after")
    def _batches(self) -> Self:
        if self.rollout_batch_size % self.minibatch_size:
            raise ValueError(
                f"minibatch_size {self.minibatch_size} must divide rollout_batch_size "
                f"{self.rollout_batch_size}, or the last step would be smaller than the others"
            )
        if self.max_approx_kl is not None and self.steps_per_iteration == 1:
            raise ValueError(
                "max_approx_kl can never end an update of one step, whose KL is 0. Raise ppo_epochs, lower "
                "minibatch_size or remove it"
            )
        _unread(self, self.num_rollouts_per_update > 1, "num_rollouts_per_update: 1", "importance_ratio_cap")
        return self

    @model_validator(mode="after")
    def _score(self) -> Self:
        _unread(
            self,
            self.score_normalization == "reference",
            f"score_normalization: {self.score_normalization}",
            "num_reference_samples",
        )
        if bool(self.overlong_buffer) != bool(self.overlong_penalty):
            raise ValueError("overlong_buffer and overlong_penalty do something only together; give both or none")
        return self

    @model_validator(mode="after")
    def _kl(self) -> Self:
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator: k1 in the loss has a gradient of 0 on average, so nothing would hold the policy. "
                "Take k2_sequence, or kl_in: reward"
            )
        if self.kl_in == "reward" and self.kl_estimator == "k2_sequence":
            raise ValueError(
                "kl_estimator: k2_sequence is a loss and no reward of a token. Set kl_in: loss, or take k1"
            )
        if self.kl_controller == "adaptive":
            if self.kl_target is None:
                raise ValueError("kl_controller: adaptive needs kl_target, in nats a response")
            if self.kl_coef == 0:
                raise ValueError(
                    "kl_controller: adaptive multiplies kl_coef, and 0 stays 0. Give a kl_coef to start from"
                )
        _unread(self, self.kl_controller == "adaptive", "kl_controller: fixed", "kl_target", "kl_horizon")
        return self

    @model_validator(mode="after")
    def _advantages(self) -> Self:
        chosen = f"advantage_estimator: {self.advantage_estimator}"
        _unread(self, self.has_value_model, chosen, "vf_coef", "value_clip_range", "value_lambda")
        _unread(self, self.advantage_estimator == "gae", chosen, "gae_lambda", "value_lambda")
        grouped = self.advantage_estimator in ("rloo", "grpo", "dr_grpo")
        _unread(self, not grouped, chosen, "gamma", "whiten_rewards")
        if self.advantage_estimator == "reinforce_pp" and self.whiten_advantages is False:
            raise ValueError("reinforce_pp is reinforce with whitened advantages. Take reinforce, or remove the key")
        return self

    @model_validator(mode="after")
    def _objective(self) -> Self:
        chosen = f"objective: {self.objective}"
        _unread(self, self.objective == "clip", chosen, "clip_range", "clip_range_high", "dual_clip")
        _unread(self, self.objective == "penalty", chosen, "policy_kl_coef", "policy_kl_target")
        return self


class Ptx(Section):
    """Language-model loss on SFT or pretraining rows beside the policy's loss (InstructGPT's PPO-ptx), against
    forgetting; each optimizer step takes its own batch of rows."""

    train: Sources
    """Rows as in the SFT stage."""
    coef: PositiveFloat
    """Weight: InstructGPT's 27.8 for `additive`, ColossalChat's 0.9 for `convex`."""
    mode: Literal["additive", "convex"] = "additive"
    """policy + coef * lm, or (1 - coef) * policy + coef * lm."""
    minibatch_size: PositiveInt | None = None
    """Rows of one optimizer step, over all processes; null takes ppo.minibatch_size."""
    loss_on: Literal["completion", "all"] = "completion"
    """As in the SFT stage."""
    prompt_words: NonNegativeInt = 0
    """As in the SFT stage."""
    max_length: PositiveInt = 512
    """Longest row in tokens; a longer one is dropped and counted."""

    @model_validator(mode="after")
    def _convex(self) -> Self:
        if self.mode == "convex" and self.coef >= 1:
            raise ValueError(f"mode: convex gives the policy's loss the weight 1 - coef, and coef is {self.coef:g}")
        return self


class PPOEvaluation(Section):
    """SFT against PPO on held-out prompts, at the end, and on the way where asked for."""

    every_iterations: PositiveInt | None = None
    """Evaluate on the way too, every so many iterations (evaluations.jsonl); null only at the end. The health
    line then sees over-optimisation: a score that rises while the judge's falls."""
    best_metric: str | None = None
    """Keep the policy with the highest value of this figure as `best_model`: score_mean, or a number of your
    judge (gold); -kl for the lowest. Needs every_iterations."""

    num_prompts: PositiveInt = 256
    """Held-out prompts used at most."""
    num_examples: NonNegativeInt = 5
    """Prompts shown with both replies."""
    gold: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$")] | None = None
    """`path/to/file.py:name`, a judge of your own that training never sees, called as a function reward is;
    returns a number a row, or a mapping of names to numbers."""

    @model_validator(mode="after")
    def _best(self) -> Self:
        if self.best_metric is not None and self.every_iterations is None:
            raise ValueError("best_metric needs every_iterations: with one evaluation there is nothing to choose from")
        return self


class PPOConfig(Stage):
    """PPO from a reward model."""

    policy: PolicyModel = PolicyModel()
    ref_policy: Model | None = None
    """What the KL is measured to; null takes the policy as it is at the start."""
    rewards: Annotated[list[Reward], Field(min_length=1)] = [ModelReward(type="reward_model")]
    """The score of a response is the weighted sum of these."""
    value_model: ValueModel = ValueModel()
    data: PromptData
    rollout: Rollout = Rollout()
    ppo: PPO
    ptx: Ptx | None = None
    """Language-model loss beside PPO's; null has none."""
    optimizer: Optimizer
    num_logged_samples: NonNegativeInt = 1
    """Responses of each iteration that samples.jsonl keeps, with score and KL."""
    evaluation: PPOEvaluation = PPOEvaluation()

    @property
    def num_prompts(self) -> int:
        """Prompts of one iteration, over all processes."""
        return self.ppo.rollout_batch_size // self.rollout.samples_per_prompt

    @model_validator(mode="after")
    def _groups(self) -> Self:
        n, estimator = self.rollout.samples_per_prompt, self.ppo.advantage_estimator
        if self.ppo.rollout_batch_size % n:
            raise ValueError(
                f"rollout.samples_per_prompt {n} must divide ppo.rollout_batch_size {self.ppo.rollout_batch_size}, "
                "which counts responses"
            )
        if estimator in GROUPED and n == 1:
            raise ValueError(
                f"ppo.advantage_estimator: {estimator} compares a prompt's responses, and with "
                "rollout.samples_per_prompt: 1 every advantage would be 0. Sample at least 2"
            )
        if self.ppo.overlong_buffer > self.rollout.max_new_tokens:
            raise ValueError(
                f"ppo.overlong_buffer {self.ppo.overlong_buffer} is above rollout.max_new_tokens "
                f"{self.rollout.max_new_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _reward_names(self) -> Self:
        # Each stands in the metrics, and beside it how many of its scores failed and how many texts were cut.
        metrics = [name + what for name in reward_names(self.rewards) for what in ("", "_errors", "_cut")]
        twice = next((name for name in metrics if metrics.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"rewards: {twice} would be the name of two figures. Give each source a name of its own")
        return self

    @model_validator(mode="after")
    def _values(self) -> Self:
        value = self.value_model
        if not self.ppo.has_value_model and value != ValueModel():
            raise ValueError(
                f"value_model does nothing with ppo.advantage_estimator: {self.ppo.advantage_estimator}, which builds "
                "none. Remove it, or take gae or monte_carlo"
            )
        if value.path is not None and value.init not in ("auto", "shared"):
            raise ValueError(f"value_model.path gives the weights, so init: {value.init} does nothing. Remove one")
        if value.init == "shared" and value.lora is not None:
            raise ValueError("value_model.lora does nothing with init: shared, whose backbone is the policy's")
        if value.warmup_iterations >= self.ppo.num_iterations:
            raise ValueError(
                f"value_model.warmup_iterations {value.warmup_iterations} leaves the policy no iteration of "
                f"{self.ppo.num_iterations}"
            )
        return self

    @property
    def sources(self) -> dict[str, DataSource]:
        ptx = self.ptx.train if self.ptx is not None else None
        return numbered({"train": self.data.train, "test": self.data.test, "ptx": ptx})

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        found = {"policy": (self.stage_model(self.policy.path, "sft"), self.policy.revision)}
        if self.ref_policy is not None:
            found["ref_policy"] = (self.stage_model(self.ref_policy.path, "sft"), self.ref_policy.revision)
        if self.value_model.path is not None:
            found["value_model"] = (self.value_model.path, None)
        for number, reward in enumerate(self.rewards):
            if isinstance(reward, ModelReward):
                found[f"rewards.{number}"] = (self.stage_model(reward.path, "rm"), reward.revision)
            elif isinstance(reward, FunctionReward):
                found[f"rewards.{number}"] = (reward.function.rpartition(":")[0], None)
        if self.evaluation.gold is not None:
            found["evaluation.gold"] = (self.evaluation.gold.rpartition(":")[0], None)
        return found

    @property
    def needs(self) -> tuple[str, ...]:
        own_rm = any(isinstance(reward, ModelReward) and reward.path is None for reward in self.rewards)
        own_sft = self.policy.path is None or (self.ref_policy is not None and self.ref_policy.path is None)
        return (("sft",) if own_sft else ()) + (("rm",) if own_rm else ())


def _unread(section: Section, is_read: bool, chosen: str, *names: str) -> None:
    """Refuse keys that were changed from their defaults while the choice made means that nothing reads them."""
    if is_read:
        return
    for name in names:
        if getattr(section, name) != type(section).model_fields[name].default:
            raise ValueError(f"{name} does nothing with {chosen}. Remove it, or choose otherwise")


def numbered(sources: dict[str, DataSource | list[DataSource] | None]) -> dict[str, DataSource]:
    """Sources by role; of a mixture each by its number: train.0, train.1."""
    found: dict[str, DataSource] = {}
    for role, given in sources.items():
        several = given if isinstance(given, list) else [] if given is None else [given]
        for number, source in enumerate(several):
            found[role if len(several) == 1 else f"{role}.{number}"] = source
    return found


CONFIGS: dict[str, type[Stage]] = {"sft": SFTConfig, "rm": RMConfig, "ppo": PPOConfig}
