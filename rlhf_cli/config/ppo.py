"""The config file of PPO: its models, rollouts, extra losses and evaluation. `ppo_update` has its `ppo` section."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_cli.algorithms.names import PtxMode, estimator_traits
from rlhf_cli.config.base import NonNegativeInt, PositiveFloat, PositiveInt, Section
from rlhf_cli.config.data import DataSource, PromptData, Sources, numbered
from rlhf_cli.config.models import Lora, Model
from rlhf_cli.config.ppo_update import PPO
from rlhf_cli.config.rewards import FunctionReward, ModelReward, Reward, reward_names
from rlhf_cli.config.stage import Optimizer, Stage


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


class Ptx(Section):
    """Language-model loss on SFT or pretraining rows beside the policy's loss (InstructGPT's PPO-ptx), against
    forgetting; each optimizer step takes its own batch of rows."""

    train: Sources
    """Rows as in the SFT stage."""
    coef: PositiveFloat
    """Weight: InstructGPT's 27.8 for `additive`, ColossalChat's 0.9 for `convex`."""
    mode: PtxMode = "additive"
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
        if estimator_traits(estimator).compares_responses and n == 1:
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
