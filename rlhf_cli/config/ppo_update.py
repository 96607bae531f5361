"""The `ppo` section: how each rollout becomes an update of the policy and the value model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rlhf_cli.algorithms.names import (
    AdvantageEstimator,
    KLController,
    KLEstimator,
    KLPlace,
    LossAggregation,
    Objective,
    ScoreNormalization,
    estimator_traits,
)
from rlhf_cli.config.base import (
    BelowOne,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    refuse_unread,
)


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
    the loss. The others optimise different objectives (docs/ppo.md). `full` is exact over the vocabulary."""
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
    """The log-probabilities in the denominator of the ratio: those stored while sampling, or those of another forward
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
        """Optimizer steps of the run."""
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
        refuse_unread(
            self,
            self.uses_reference_scores,
            f"score_normalization: {self.score_normalization}",
            "num_reference_samples",
        )
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
        refuse_unread(self, self.kl_controller == "adaptive", "kl_controller: fixed", "kl_target", "kl_horizon")
        chosen = f"advantage_estimator: {self.advantage_estimator}"
        refuse_unread(self, self.has_value_model, chosen, "vf_coef", "value_clip_range", "value_lambda")
        refuse_unread(self, self.advantage_estimator == "gae", chosen, "gae_lambda", "value_lambda")
        per_response = estimator_traits(self.advantage_estimator).per_response
        refuse_unread(self, not per_response, chosen, "gamma", "whiten_rewards")
        if self.advantage_estimator == "reinforce_pp" and self.whiten_advantages is False:
            yield "reinforce_pp always whitens advantages. Use reinforce, or remove whiten_advantages"
        chosen = f"objective: {self.objective}"
        refuse_unread(self, self.objective == "clip", chosen, "clip_range", "clip_range_high", "dual_clip")
        refuse_unread(self, self.objective == "penalty", chosen, "policy_kl_coef", "policy_kl_target")

    @property
    def uses_reference_scores(self) -> bool:
        """Whether scores are normalised by the scores of samples from ref_policy."""
        return self.score_normalization in ("reference", "reference_std")
