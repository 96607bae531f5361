"""The config file of PPO: the update, the gate before it, models, rollouts, extra losses, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlhf_cli.algorithms.names import (
    AdvantageEstimator,
    KLController,
    KLEstimator,
    KLPlace,
    LossAggregation,
    Objective,
    PtxMode,
    ScoreNormalization,
    estimator_traits,
)
from rlhf_cli.config.base import (
    EXPANDED,
    BelowOne,
    Fraction,
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from rlhf_cli.config.data import DataSource, PromptData, Sources, numbered
from rlhf_cli.config.models import Lora, Model, Patterns, TrainedModel
from rlhf_cli.config.rewards import (
    FunctionReward,
    Limit,
    ModelReward,
    NamedReward,
    Reward,
    RubricReward,
    Shaping,
    named_rewards,
    reward_names,
)
from rlhf_cli.config.stage import Distributed, Optimizer, Stage
from rlhf_cli.printing import did_you_mean


class PPO(Section):
    """The update (Schulman et al. 2017; Ziegler et al. 2019). docs/ppo.md explains each option and the evidence for
    its default."""

    # ---- batches
    num_iterations: PositiveInt
    """Number of iterations, each a rollout and an update."""
    rollout_batch_size: PositiveInt
    """Responses per iteration, over all processes: prompts times `rollout.samples_per_prompt`."""
    minibatch_size: PositiveInt
    """Responses per optimizer step, over all processes."""
    tokens_per_microbatch: PositiveInt | Literal["auto"] = "auto"
    """Maximum tokens (prompts and responses) per forward and backward pass of a process; a single longer row is
    still one pass. `auto` chooses by the models and the memory of the device (docs/speed.md)."""
    microbatch_size: PositiveInt | None = None
    """Maximum responses per forward and backward pass. Null limits only the tokens."""
    ppo_epochs: PositiveInt = 1
    """Passes over each rollout. 1 is safest for language models; use up to 4 where sampling dominates the cost."""
    num_rollouts_per_update: PositiveInt = 1
    """Number of recent rollouts that an update learns from, kept in CPU memory. More than 1 reuses samples; the
    advantages of older ones are weighted by their truncated importance ratio."""
    importance_ratio_cap: PositiveFloat = 2.0
    """Maximum of the ratio of the policy before the update to the one that sampled, by which advantages are weighted
    (truncated importance sampling, Ionides 2008). Of older rollouts (decoupled PPO, Hilton et al. 2021), and of all
    rollouts in bfloat16, where sampling and training round differently (Yao et al. 2025)."""

    # ---- the score
    score_normalization: ScoreNormalization = "none"
    """How scores are normalised, in addition to the statistics that a reward model stores. `running` subtracts the
    mean and divides by the standard deviation of all scores so far, so the effective kl_coef drifts. `reference`
    uses the statistics of samples from the reference policy, computed once at the start. `running_std` and
    `reference_std` divide by the same standard deviation and subtract nothing: 0 stays 0."""
    num_reference_samples: Annotated[int, Field(ge=2)] = 256
    """Number of samples for `score_normalization: reference` and `reference_std`."""
    score_clip: PositiveFloat | None = None
    """Clip scores to +- this after normalisation, so that one outlier cannot dominate a batch."""
    missing_eos_penalty: NonNegativeFloat = 1.0
    """Subtracted from the score of a response that does not end by itself. Keeps the length bounded."""
    length_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score for each token of the response."""
    overlong_buffer: NonNegativeInt = 0
    """Over this many tokens before max_new_tokens, the score falls linearly by up to `overlong_penalty` (DAPO). A
    softer form of missing_eos_penalty."""
    overlong_penalty: NonNegativeFloat = 0.0
    """The maximum that `overlong_buffer` subtracts."""

    # ---- the distance to ref_policy
    kl_coef: NonNegativeFloat = 0.05
    """Weight of the KL to the reference policy. It keeps the policy close to the texts on which the reward model was
    trained."""
    kl_in: KLPlace = "reward"
    """Subtract the KL from the reward of each token (Ziegler et al. 2019), or add it to the loss."""
    kl_estimator: KLEstimator | None = None
    """Null uses the estimator whose optimum is ref_policy * exp(score / kl_coef): k1 in the reward, k2_sequence in
    the loss. The others optimise different objectives (docs/kl.md). `full` is exact over the vocabulary."""
    kl_controller: KLController = "fixed"
    """`adaptive` changes kl_coef until the KL per response is `kl_target` (Ziegler et al. 2019, section 2.2). It waits
    while the value model warms up."""
    kl_target: PositiveFloat | None = None
    """Target KL in nats per response. Required with `kl_controller: adaptive`, and only there."""
    kl_horizon: PositiveInt = 10_000
    """In this many responses kl_coef changes by a factor of at most about 1.2."""

    # ---- advantages
    advantage_estimator: AdvantageEstimator = "gae"
    """`gae` and `monte_carlo` (returns minus values) train a value model; the others have none. `reinforce` is the
    reward-to-go, `reinforce_pp` whitens it, and `reinforce_pp_baseline` first subtracts the mean score of the
    prompt. `rloo`, `grpo` (divided by the standard deviation of the group) and `dr_grpo` compare the responses to a
    prompt."""
    gamma: Fraction = 1.0
    """Discount per token. 1 because a response ends; below 1 the reward at EOS fades over long responses."""
    gae_lambda: Fraction = 0.95
    """The lambda of GAE."""
    value_lambda: Fraction | None = None
    """The lambda of the returns that the value model learns. Null uses gae_lambda; 1 gives Monte Carlo returns."""
    whiten_rewards: bool = False
    """Divide the token rewards by their standard deviation over the rollout. The mean is kept."""
    whiten_advantages: bool | None = None
    """Scale the advantages of a rollout to mean 0 and variance 1. Null does so for gae, monte_carlo, reinforce_pp and
    reinforce_pp_baseline, except for gae and monte_carlo with the KL in the loss: dividing by a standard deviation
    that shrinks with the policy's variety makes the KL ever weaker."""

    # ---- the policy loss
    objective: Objective = "clip"
    """`clip`: the clipped ratio. `penalty`: the plain ratio minus policy_kl_coef * KL(old, new) (PPO-penalty)."""
    clip_range: PositiveFloat = 0.2
    """Clip the ratio to 1 +- this."""
    clip_range_high: PositiveFloat | None = None
    """A different range above 1 (clip-higher, DAPO: 0.28 preserves rare tokens). Null uses clip_range."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """For a token with a negative advantage, limit the ratio in the loss to this (Ye et al. 2020: 3)."""
    old_logprobs: Literal["auto", "sampled", "recomputed"] = "auto"
    """The log-probabilities in the denominator of the ratio: stored while sampling, or computed by another forward
    pass with the training code, for which the ratio before the first step is exactly 1. `auto` uses the stored ones
    in float32, where the two differ by about 1e-5 nats, and recomputes them in bfloat16. Where they are recomputed in
    bfloat16, the advantages are weighted by their ratio to the stored ones, at most `importance_ratio_cap`."""
    policy_kl_coef: PositiveFloat = 1.0
    """The initial coefficient of PPO-penalty."""
    policy_kl_target: PositiveFloat | None = None
    """The coefficient doubles if KL(old, new) per token is above 1.5 times this, and halves below 1/1.5 of it. It
    waits while the value model warms up. Null keeps it fixed."""
    loss_aggregation: LossAggregation = "token"
    """`token`: the mean over all tokens of the minibatch. `sequence`: the mean over each response first, so that long
    ones do not weigh more. `constant`: the sum divided by max_new_tokens (Dr. GRPO)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, or of a penalty if negative. The entropy is over the full vocabulary."""
    max_approx_kl: PositiveFloat | None = None
    """End the update early, before the step, if KL(old, new) per token is above this (TRL: 0.15)."""
    max_ratio: PositiveFloat | None = 10.0
    """Skip a minibatch whose mean ratio is above this, because its samples no longer represent the policy."""

    # ---- the value loss
    vf_coef: PositiveFloat = 0.5
    """Weight of the value loss, which already contains a factor of 1/2."""
    value_clip_range: PositiveFloat | None = 0.2
    """Maximum distance of a new value from the old one. Null does not clip."""

    # ---- averaging
    ema_decay: BelowOne | None = None
    """Keep an exponential moving average of the policy's weights with this decay per optimizer step (for example
    0.992), and save it as `ema_model`."""

    @property
    def has_value_model(self) -> bool:
        """Whether this advantage estimator trains a value model."""
        return estimator_traits(self.advantage_estimator).has_values

    @property
    def kl_estimator_used(self) -> KLEstimator:
        """`kl_estimator`, with null replaced by the estimator that it stands for."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k2_sequence")

    @property
    def has_full_kl_loss(self) -> bool:
        """Whether each update computes the KL over the whole vocabulary."""
        return self.kl_in == "loss" and self.kl_estimator_used == "full"

    @property
    def whitens_advantages(self) -> bool:
        """`whiten_advantages`, with null replaced by the value that it stands for."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        if self.kl_in == "loss" and self.has_value_model:
            return False
        return estimator_traits(self.advantage_estimator).whitens

    def updates(self, iteration: int) -> int:
        """Optimizer steps of iteration `iteration`, from 0. Early iterations have fewer rollouts to learn from."""
        rollouts = min(iteration + 1, self.num_rollouts_per_update)
        return self.ppo_epochs * rollouts * (self.rollout_batch_size // self.minibatch_size)

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps per iteration, once there are `num_rollouts_per_update` rollouts."""
        return self.updates(self.num_rollouts_per_update - 1)

    @property
    def total_steps(self) -> int:
        return sum(self.updates(i) for i in range(self.num_iterations))

    def rules(self) -> Iterator[str]:
        if self.rollout_batch_size % self.minibatch_size:
            yield (
                f"minibatch_size {self.minibatch_size} must divide rollout_batch_size "
                f"{self.rollout_batch_size}, or the last step would be smaller than the others"
            )
        if self.max_approx_kl is not None and self.steps_per_iteration == 1:
            yield (
                "max_approx_kl can never end an update of one step, because its KL is 0. Raise ppo_epochs, lower "
                "minibatch_size, or remove max_approx_kl"
            )
        chosen = f"score_normalization: {self.score_normalization}"
        self.refuse_unread(self.uses_reference_scores, chosen, "num_reference_samples")
        if bool(self.overlong_buffer) != bool(self.overlong_penalty):
            yield "overlong_buffer and overlong_penalty work only together. Set both or neither"
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            yield (
                "kl_estimator: k1 in the loss has a gradient of 0 on average and would not hold the policy. "
                "Use k2_sequence, or kl_in: reward"
            )
        if self.kl_in == "reward" and self.kl_estimator == "k2_sequence":
            yield "kl_estimator: k2_sequence is a loss, not a reward of a token. Set kl_in: loss, or use k1"
        if self.kl_controller == "adaptive":
            if self.kl_target is None:
                yield "kl_controller: adaptive needs kl_target, in nats per response"
            if self.kl_coef == 0:
                yield (
                    "kl_controller: adaptive multiplies kl_coef, and 0 stays 0. Set kl_coef to a value above 0, or "
                    "kl_controller: fixed, kl_target: null and kl_horizon: 10000"
                )
        self.refuse_unread(self.kl_controller == "adaptive", "kl_controller: fixed", "kl_target", "kl_horizon")
        chosen = f"advantage_estimator: {self.advantage_estimator}"
        self.refuse_unread(self.has_value_model, chosen, "vf_coef", "value_clip_range", "value_lambda")
        self.refuse_unread(self.advantage_estimator == "gae", chosen, "gae_lambda", "value_lambda")
        per_response = estimator_traits(self.advantage_estimator).per_response
        self.refuse_unread(not per_response, chosen, "gamma", "whiten_rewards")
        if self.advantage_estimator == "reinforce_pp" and self.whiten_advantages is False:
            yield "reinforce_pp always whitens advantages. Use reinforce, or remove whiten_advantages"
        chosen = f"objective: {self.objective}"
        self.refuse_unread(self.objective == "clip", chosen, "clip_range", "clip_range_high", "dual_clip")
        self.refuse_unread(self.objective == "penalty", chosen, "policy_kl_coef", "policy_kl_target")

    @property
    def uses_reference_scores(self) -> bool:
        """Whether scores are normalised by the scores of samples from ref_policy."""
        return self.score_normalization in ("reference", "reference_std")


# ---------------------------------------------------------------------------- the figures that earlier stages must have

FIGURES = {
    "sft": ("loss", "perplexity", "token_accuracy"),
    "rm": (
        *("accuracy", "loss", "margin", "gold_accuracy", "length_baseline", "shorter_baseline", "pair_accuracy"),
        *("mse", "target_variance", "pearson", "spearman"),
        *("base_rate", "brier", "brier_baseline", "calibration_error", "num_rows"),
    ),
}
"""The held-out figures of the manifests, without `eval/`. A reward model has the figures of its loss, and `probe/NAME`.
With several sources of held-out rows, a source has `loss/NAME`, `accuracy/NAME` or `mse/NAME`."""
ENDS = {"lower": "_low95", "upper": "_high95"}
"""What a manifest appends to the name of a figure for each end of its 95 % interval."""


def _figure_name(name: str) -> str:
    stage, _, figure = name.partition("/")
    if stage not in FIGURES or not figure:
        raise ValueError("must be sft/ or rm/ and the name of a held-out figure, for example rm/accuracy")
    known, short = FIGURES[stage], figure.removeprefix("eval/").removesuffix(ENDS["lower"]).removesuffix(ENDS["upper"])
    if short.partition("/")[0] not in known and not (stage == "rm" and figure.startswith("probe/")):
        raise ValueError(f"no such figure; {stage} has {', '.join(known)}{did_you_mean(short, known)}")
    return name


FigureName = Annotated[str, AfterValidator(_figure_name)]


class Requirement(Section):
    """A limit for one held-out figure of an earlier stage."""

    above: float | None = None
    """The figure must be above this."""
    below: float | None = None
    """The figure must be below this."""
    interval: Literal["lower", "mean", "upper"] = "mean"
    """What is compared: the figure itself, or the lower or upper end of its 95 % interval. `lower` with `above` asks
    for evidence: too few held-out rows fail it too."""

    def rules(self) -> Iterator[str]:
        if self.above is None and self.below is None:
            yield "has no limit. Set above, below or both"
        if self.above is not None and self.below is not None and self.above >= self.below:
            yield f"no figure is above {self.above:g} and below {self.below:g}"


DecoderName = Literal["auto", "paged", "plain", "sharded"]

PPOModelName = Literal["policy", "ref_policy", "value_model", "rewards"]


class PPODistributed(Distributed):
    """Several processes of one run. No key here changes the result."""

    keep_whole: list[PPOModelName] = []
    """Models that stay whole although `shard` is set. A process computes with a whole model without waiting for the
    others, and needs the memory for all of it."""


class PolicyModel(TrainedModel):
    """The model to train."""

    path: LocalPath | None = None
    """A Hugging Face model directory or a hub id. Null uses the run's own `sft` stage. The `ppo` directory of an
    earlier run continues its training; then also set `ref_policy.path`, or the KL is measured from there."""


class ValueModel(Section):
    """The model that predicts the return of each token (gae and monte_carlo only)."""

    init: Literal["auto", "reward_model", "policy", "shared"] = "auto"
    """The weights that the value model starts from; its head starts at zero. `reward_model` and `policy` copy that
    model. `shared` puts a head on the policy's own backbone: one forward pass for both and half the memory, but two
    losses change the same weights. `auto` uses the first reward model that reads the policy's tokens, or the policy
    if there is none."""
    path: LocalPath | None = None
    """The `value_model` directory of an earlier PPO run, including its head. `init` may then be `shared`."""
    lora: Lora | None = None
    """Train low-rank adapters instead of all weights. Not with `init: shared`."""
    freeze: Patterns = []
    """Weights of the backbone that are not trained, as `policy.freeze`. Not with `init: shared`."""
    learning_rate: PositiveFloat | None = None
    """The peak learning rate of the value model. Null uses the policy's."""
    warmup_iterations: NonNegativeInt = 0
    """Iterations at the start in which only the value model learns. An untrained value model gives wrong
    advantages, which can undo the SFT (VC-PPO, Yuan et al. 2025)."""


class Rollout(Section):
    """How responses are sampled. top_k, top_p, min_p, no_repeat_ngram_size and min_new_tokens restrict which tokens
    can be drawn. The rollout stores which tokens were allowed, and ratio, KL and entropy use the restricted
    distributions of the policy and of the reference policy. So a filter is part of the policy, not a hidden
    difference."""

    samples_per_prompt: PositiveInt = 1
    """Responses per prompt. `rloo`, `grpo`, `dr_grpo` and `reinforce_pp_baseline` compare them and need at least
    2."""
    max_new_tokens: PositiveInt = 64
    """Maximum length of a response in tokens, including EOS."""
    min_new_tokens: NonNegativeInt = 0
    """Minimum length of a response in tokens, including EOS. No token can end it earlier."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. Every log-probability is computed at this temperature too."""
    top_k: Annotated[int, Field(ge=2)] | None = None
    """Draw only from the k most likely tokens. 1 would leave no choice, and so nothing to learn."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling: draw from the smallest set of tokens whose probability reaches this."""
    min_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Draw only tokens with at least this fraction of the most likely token's probability."""
    no_repeat_ngram_size: Annotated[int, Field(ge=2)] | None = None
    """Never draw a token that would repeat a sequence of this many tokens, counted over the prompt and the
    response. 1 would forbid every token of the prompt."""
    stop_tokens: list[str] = []
    """Tokens that end a response in addition to EOS, for example `<|im_end|>`. Each must be a single token of the
    tokenizer."""
    stop_strings: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a response, however they are tokenized. Printed text, functions, and reward models with their
    own tokenizer get the response up to the stop string. A reward model that reads the policy's tokens gets all of
    them."""
    max_live_rows: PositiveInt | None = None
    """Maximum number of responses that a process samples at a time; a finished one makes room for the next prompt.
    Limits the memory of the keys and values and does not change any response. Null samples all at the same time,
    which is fastest."""
    decoder: DecoderName = "auto"
    """What computes the logits while sampling. `paged` is fast for Llama-like models and GPT-2 on a CPU.
    `plain` runs the model's own forward, for any model. `auto` takes `paged` where it can, on a GPU CUDA graphs of the
    same families, and `plain` elsewhere. A decoder that differs from the model's own forward is refused before the
    first rollout. `sharded` is for a policy that is sharded and fits no process whole: all processes sample from the
    sharded policy in step, each its own responses. The others sample from a whole copy of such a policy."""

    def rules(self) -> Iterator[str]:
        if self.min_new_tokens > self.max_new_tokens:
            yield f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}"


class Ptx(Section):
    """A language-model loss on SFT or pretraining rows, added to the policy loss (InstructGPT's PPO-ptx) to reduce
    forgetting. Each optimizer step uses its own batch of rows."""

    train: Sources
    """The rows, as in the SFT stage."""
    coef: PositiveFloat
    """The weight of this loss. InstructGPT uses 27.8 with `additive`, ColossalChat 0.9 with `convex`."""
    mode: PtxMode = "additive"
    """`additive`: policy + coef * lm. `convex`: (1 - coef) * policy + coef * lm."""
    minibatch_size: PositiveInt | None = None
    """Rows per optimizer step, over all processes. Null uses ppo.minibatch_size."""
    loss_on: Literal["completion", "all"] = "completion"
    """Which tokens are learned, as in the SFT stage."""
    prompt_words: NonNegativeInt = 0
    """For rows of plain text: the length of the prompt in words, as in the SFT stage."""
    max_length: PositiveInt = 512
    """Maximum length of a row in tokens. A longer row is dropped and counted."""

    def rules(self) -> Iterator[str]:
        if self.mode == "convex" and self.coef >= 1:
            yield f"mode: convex gives the policy's loss the weight 1 - coef, and coef is {self.coef:g}"


class PPOEvaluation(Section):
    """SFT compared with PPO on held-out prompts: at the end and, if set, during training."""

    every_iterations: PositiveInt | None = None
    """Also evaluate every this many iterations (evaluations.jsonl). Null evaluates at the end only. With it, the
    health checks can detect over-optimisation: a score that rises while the judge's score falls."""
    best_metric: str | None = None
    """Save the policy with the highest value of this metric as `best_model`: score_mean, or a number that your judge
    (gold) returns. A minus sign takes the lowest: -kl. Needs every_iterations."""
    num_prompts: PositiveInt = 256
    """Maximum number of held-out prompts to use, drawn by a hash of their content and the seed."""
    num_examples: NonNegativeInt = 5
    """Number of prompts to show with both replies."""
    gold: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$"), EXPANDED] | None = None
    """`path/to/file.py:name`: a judge of your own that training never sees. It is called like a function reward and
    returns one number per row, or a mapping of names to numbers."""

    def rules(self) -> Iterator[str]:
        if self.best_metric is not None and self.every_iterations is None:
            yield "best_metric needs every_iterations, because one evaluation leaves nothing to choose from"


class PPOConfig(Stage):
    """PPO from a reward model."""

    policy: PolicyModel = PolicyModel()
    """The model to train."""
    ref_policy: Model | None = None
    """The frozen model that the KL is measured to. Null uses the policy as it is at the start."""
    rewards: Annotated[list[Reward], Field(min_length=1)] = [ModelReward(type="reward_model")]
    """The score of a response is the weighted sum of these."""
    value_model: ValueModel = ValueModel()
    """The model that predicts returns."""
    data: PromptData
    """The prompts."""
    rollout: Rollout = Rollout()
    """How responses are sampled."""
    ppo: PPO
    """How each rollout becomes an update."""
    ptx: Ptx | None = None
    """A language-model loss added to PPO's. Null adds none."""
    optimizer: Optimizer
    """AdamW and its schedule."""
    offload: list[Literal["optimizer", "frozen"]] = []
    """What waits in the CPU's memory while it is not used: `optimizer` is the moments of AdamW outside of the update,
    `frozen` is ref_policy and the reward models outside of scoring. The result is the same to the last bit. Each
    iteration moves them once in each direction. A sharded frozen model stays on the CPU, and
    each block is copied for its passes. For a GPU only."""
    num_logged_samples: NonNegativeInt = 1
    """Number of responses per iteration to write to samples.jsonl, with score and KL."""
    samples_every: PositiveInt | None = None
    """Print the first response of every so many iterations, with its score and KL. Null prints none until the end."""
    evaluation: PPOEvaluation = PPOEvaluation()
    """SFT compared with PPO on held-out prompts."""
    distributed: PPODistributed = PPODistributed()
    """How the processes of a run work together (`--nproc`, `torchrun`)."""
    require: dict[FigureName, Requirement] = {}
    """Held-out figures of the earlier stages and their limits: `rm/accuracy: {above: 0.6, interval: lower}`. PPO does
    not start unless all hold. A name is `sft/` or `rm/` and a figure that the stage prints, without `eval/`:
    `sft/loss`, `rm/accuracy`, `rm/probe/rude`."""

    @property
    def num_prompts(self) -> int:
        """Prompts per iteration, over all processes."""
        return self.ppo.rollout_batch_size // self.rollout.samples_per_prompt

    def rules(self) -> Iterator[str]:
        yield from super().rules()
        n, estimator = self.rollout.samples_per_prompt, self.ppo.advantage_estimator
        self.refuse_unread(self.ppo.has_value_model, f"ppo.advantage_estimator: {estimator}", "value_model")
        if self.ppo.rollout_batch_size % n:
            yield (
                f"rollout.samples_per_prompt {n} must divide ppo.rollout_batch_size {self.ppo.rollout_batch_size}, "
                "which counts responses"
            )
        if estimator_traits(estimator).compares_responses and n == 1:
            yield (
                f"ppo.advantage_estimator: {estimator} compares the responses to a prompt; with "
                "rollout.samples_per_prompt: 1 every advantage would be 0. Set it to at least 2"
            )
        if self.ppo.overlong_buffer > self.rollout.max_new_tokens:
            yield (
                f"ppo.overlong_buffer {self.ppo.overlong_buffer} is above rollout.max_new_tokens "
                f"{self.rollout.max_new_tokens}"
            )
        decoder = self.rollout.decoder
        if decoder == "paged" and self.device not in ("auto", "cpu"):
            yield f"rollout.decoder: paged needs a CPU, and device is {self.device}. Set it to auto or plain"
        if decoder == "paged" and self.precision == "float16":
            yield "rollout.decoder: paged does not compute in float16. Set it to auto or plain"
        if decoder == "sharded" and (not self.distributed.shard or "policy" in self.distributed.keep_whole):
            yield (
                "rollout.decoder: sharded samples from a sharded policy, and this one is whole. "
                "Set it to auto, or shard the policy"
            )
        if self.offload and self.device == "cpu":
            yield "offload does nothing with device: cpu, whose memory holds everything. Remove it"
        if self.offload and self.distributed.offload:
            yield "offload does nothing with distributed.offload, which moves all of it. Remove one of them"
        is_float32 = self.precision == "float32" or (self.precision == "auto" and self.device == "cpu")
        is_read = self.ppo.num_rollouts_per_update > 1 or not is_float32
        if not is_read and self.ppo.importance_ratio_cap != PPO.model_fields["importance_ratio_cap"].default:
            yield (
                "ppo.importance_ratio_cap does nothing with num_rollouts_per_update: 1 in float32. Remove it, or "
                "choose another option"
            )
        # The metrics of a source: its score, the number of failed scores, and the number of truncated texts.
        sources = self.named_rewards
        metrics = [source.name + what for source in sources for what in ("", "_errors", "_cut")]
        metrics += [name + what for name in {s.ensemble.name for s in sources if s.ensemble} for what in ("", "_std")]
        for name, reward in ((s.name, s.reward) for s in sources if isinstance(s.reward, RubricReward)):
            metrics += [f"{name}_tokens", *(f"{name}_{criterion.name}" for criterion in reward.criteria)]
        metrics += [f"{name}_shaped" for name in self.shapings]
        twice = next((name for name in metrics if metrics.count(name) > 1), None)
        if twice is not None:
            yield f"rewards: {twice} would name two metrics. Give each source a different `name`"
        if len(self.limits) == len(self.rewards):
            yield "rewards: every source has a limit, so there is no score to raise. Add one without"
        if self.shapings and self.ppo.uses_reference_scores:
            yield (
                f"ppo.score_normalization: {self.ppo.score_normalization} measures scores before their shaping. "
                "Remove it, or the shaping"
            )
        value = self.value_model
        if value.path is not None and value.init not in ("auto", "shared"):
            yield f"value_model.path gives the weights, so init: {value.init} does nothing. Remove one of them"
        if value.init == "shared" and value.lora is not None:
            yield "value_model.lora does nothing with init: shared; the backbone is the policy's. Set policy.lora"
        if value.init == "shared" and value.freeze:
            yield "value_model.freeze does nothing with init: shared; the backbone is the policy's. Set policy.freeze"
        if value.lora is not None and value.freeze:
            yield (
                "value_model.freeze does nothing with value_model.lora, which trains only the adapters and the head. "
                "Remove one of them"
            )
        if value.warmup_iterations >= self.ppo.num_iterations:
            yield (
                f"value_model.warmup_iterations {value.warmup_iterations} leaves no iteration to train the policy; "
                f"must be below ppo.num_iterations {self.ppo.num_iterations}"
            )

    @property
    def named_rewards(self) -> list[NamedReward]:
        """All sources of rewards, members of ensembles too."""
        return named_rewards(self.rewards, self.artifacts, self.ppo.kl_coef)

    @property
    def limits(self) -> dict[str, Limit]:
        """The limit of each source that has one, by the source's name."""
        return {name: one.limit for name, one in self._by_name().items() if one.limit is not None}

    @property
    def shapings(self) -> dict[str, tuple[float, Shaping]]:
        """The weight and the shaping of each source that is shaped, by the source's name."""
        return {name: (one.weight, one.shaping) for name, one in self._by_name().items() if one.shaping is not None}

    def _by_name(self) -> dict[str, Reward]:
        return dict(zip(reward_names(self.rewards), self.rewards, strict=True))

    @property
    def reward_models(self) -> dict[str, ModelReward]:
        """Every reward model by its key, members of ensembles too."""
        return {source.key: source.reward for source in self.named_rewards if isinstance(source.reward, ModelReward)}

    def name_of_reward(self, key: str) -> str:
        """What the plan calls a reward model: with its number if there are several."""
        number = next(number for number, source in enumerate(self.named_rewards, 1) if source.key == key)
        return "reward model" if len(self.reward_models) == 1 else f"reward model {number}"

    @property
    def sources(self) -> dict[str, DataSource]:
        return numbered(self.data.by_side | {"ptx": [] if self.ptx is None else self.ptx.train})

    @property
    def inputs(self) -> dict[str, tuple[str, str | None]]:
        found = {"policy": (self.stage_model(self.policy.path, "sft"), self.policy.revision)}
        if self.ref_policy is not None:
            found["ref_policy"] = (self.stage_model(self.ref_policy.path, "sft"), self.ref_policy.revision)
        if self.value_model.path is not None:
            found["value_model"] = (self.value_model.path, None)
        for key, _, reward, _ in self.named_rewards:
            if isinstance(reward, ModelReward):
                found[key] = (self.stage_model(reward.path, "rm"), reward.revision)
            elif isinstance(reward, FunctionReward):
                found[key] = (reward.function.rpartition(":")[0], None)
        if self.evaluation.gold is not None:
            found["evaluation.gold"] = (self.evaluation.gold.rpartition(":")[0], None)
        return found

    @property
    def needs(self) -> tuple[str, ...]:
        own_rm = any(reward.path is None for reward in self.reward_models.values())
        own_sft = self.policy.path is None or (self.ref_policy is not None and self.ref_policy.path is None)
        return (("sft",) if own_sft else ()) + (("rm",) if own_rm else ())
