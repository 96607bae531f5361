"""The config file of PPO: models, rollouts, extra losses, evaluation. Its `ppo` section is in `ppo_update`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rlhf_cli.algorithms.names import PtxMode, estimator_traits
from rlhf_cli.config.base import (
    EXPANDED,
    LocalPath,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    refuse_unread,
)
from rlhf_cli.config.data import DataSource, PromptData, Sources, numbered
from rlhf_cli.config.models import Lora, Model, Patterns, TrainedModel
from rlhf_cli.config.ppo_update import PPO
from rlhf_cli.config.require import FigureName, Requirement
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
    """What computes the logits while sampling. `paged` is fast for Llama-like models and GPT-2 in float32 on a CPU.
    `plain` runs the model's own forward, for any model. `auto` takes `paged` where it can and `plain` elsewhere.
    A decoder that differs from the model's own forward is refused before the first rollout. `sharded` is for a policy
    that is sharded and fits no process whole: all processes sample from the sharded policy in
    step, each its own responses. The others sample from a whole copy of such a policy."""

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
        refuse_unread(self, self.ppo.has_value_model, f"ppo.advantage_estimator: {estimator}", "value_model")
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
        if decoder == "paged" and self.precision not in ("auto", "float32"):
            yield f"rollout.decoder: paged needs float32, and precision is {self.precision}. Set it to auto or plain"
        if decoder == "sharded" and (not self.distributed.shard or "policy" in self.distributed.keep_whole):
            yield (
                "rollout.decoder: sharded samples from a sharded policy, and this one is whole. "
                "Set it to auto, or shard the policy"
            )
        if self.offload and self.device == "cpu":
            yield "offload does nothing with device: cpu, whose memory holds everything. Remove it"
        if self.offload and self.distributed.offload:
            yield "offload does nothing with distributed.offload, which moves all of it. Remove one of them"
        yield from self.rules_of(self.optimizer, "policy.lora" if self.policy.lora is not None else None)
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
        named = zip(reward_names(self.rewards), self.rewards, strict=True)
        return {name: reward.limit for name, reward in named if reward.limit is not None}

    @property
    def shapings(self) -> dict[str, tuple[float, Shaping]]:
        """The weight and the shaping of each source that is shaped, by the source's name."""
        named = zip(reward_names(self.rewards), self.rewards, strict=True)
        return {name: (reward.weight, reward.shaping) for name, reward in named if reward.shaping is not None}

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
