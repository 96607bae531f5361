"""The `ppo` section: how each rollout becomes an update of the policy and the value model."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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
    score_normalization: ScoreNormalization = "none"
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
    kl_in: KLPlace = "reward"
    """Taken off each token's reward (Ziegler et al. 2019), or added to the loss; never both."""
    kl_estimator: KLEstimator | None = None
    """Null takes the one whose optimum is ref_policy * exp(score / kl_coef): k1 in the reward, k2_sequence in
    the loss. The others optimise something else: docs/ppo.md says what. `full` is exact over the vocabulary."""
    kl_controller: KLController = "fixed"
    """adaptive moves kl_coef until the KL of a response is `kl_target` (Ziegler et al. 2019, section 2.2)."""
    kl_target: PositiveFloat | None = None
    """Nats a response; needed with `kl_controller: adaptive` and only there."""
    kl_horizon: PositiveInt = 10_000
    """In how many responses kl_coef can change by about a fifth."""

    # ---- advantages
    advantage_estimator: AdvantageEstimator = "gae"
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
    objective: Objective = "clip"
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
    loss_aggregation: LossAggregation = "token"
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
        return estimator_traits(self.advantage_estimator).has_values

    @property
    def kl_estimator_used(self) -> KLEstimator:
        """The estimator that null stands for."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k2_sequence")

    @property
    def whitens_advantages(self) -> bool:
        """What null stands for."""
        if self.whiten_advantages is not None:
            return self.whiten_advantages
        if self.kl_in == "loss" and self.has_value_model:
            return False
        return estimator_traits(self.advantage_estimator).whitens

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
        refuse_unread(self, self.num_rollouts_per_update > 1, "num_rollouts_per_update: 1", "importance_ratio_cap")
        return self

    @model_validator(mode="after")
    def _score(self) -> Self:
        refuse_unread(
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
        refuse_unread(self, self.kl_controller == "adaptive", "kl_controller: fixed", "kl_target", "kl_horizon")
        return self

    @model_validator(mode="after")
    def _advantages(self) -> Self:
        chosen = f"advantage_estimator: {self.advantage_estimator}"
        refuse_unread(self, self.has_value_model, chosen, "vf_coef", "value_clip_range", "value_lambda")
        refuse_unread(self, self.advantage_estimator == "gae", chosen, "gae_lambda", "value_lambda")
        grouped = self.advantage_estimator in ("rloo", "grpo", "dr_grpo")
        refuse_unread(self, not grouped, chosen, "gamma", "whiten_rewards")
        if self.advantage_estimator == "reinforce_pp" and self.whiten_advantages is False:
            raise ValueError("reinforce_pp is reinforce with whitened advantages. Take reinforce, or remove the key")
        return self

    @model_validator(mode="after")
    def _objective(self) -> Self:
        chosen = f"objective: {self.objective}"
        refuse_unread(self, self.objective == "clip", chosen, "clip_range", "clip_range_high", "dual_clip")
        refuse_unread(self, self.objective == "penalty", chosen, "policy_kl_coef", "policy_kl_target")
        return self
