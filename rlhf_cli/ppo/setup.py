"""Everything that PPO needs, loaded and checked before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.artifacts import model_directory
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.data.batches import Budget
from rlhf_cli.data.encode import Example, require_eos
from rlhf_cli.data.encoders import DemonstrationEncoder, PromptEncoder, PromptRow
from rlhf_cli.data.table import Table
from rlhf_cli.data.tokens import tokenise
from rlhf_cli.data.views import ppo_rows, ptx_rows
from rlhf_cli.decoders.plain import why_not_padded
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.adapters import add_lora
from rlhf_cli.models.cost import (
    COPIES_OF_WHOLE_DISTRIBUTIONS,
    LOGITS_COPIES,
    Work,
    peak_flops,
    token_budget,
    work_of,
)
from rlhf_cli.models.forward import autocast, computes_in_bfloat16, is_packed, vocabulary_rows
from rlhf_cli.models.limits import check_positions
from rlhf_cli.models.load import (
    check_shared_value_model,
    check_vocabulary,
    load_policy,
    load_tokenizer,
    load_value_model,
    new_value_model,
    prepare,
    scalar_weight,
)
from rlhf_cli.models.passes import set_up_passes
from rlhf_cli.rewards.base import RewardSource
from rlhf_cli.rewards.models import RewardModel
from rlhf_cli.rewards.score import ScoreScale
from rlhf_cli.rewards.sources import check_rows, load_rewards
from rlhf_cli.rollout.distribution import Sampling
from rlhf_cli.rollout.sampling import stop_ids, why_not_fast
from rlhf_cli.rollout.scoring import Models
from rlhf_cli.training.distributed import World
from rlhf_cli.training.ema import WeightAverage
from rlhf_cli.training.health import RATIO_TOLERANCE, Health
from rlhf_cli.training.optimizer import Stepper, build_stepper, warmup_warning
from rlhf_cli.training.stage_run import StageRun


@dataclass
class Learner:
    """What learns, what it learns from, and the few numbers that a run carries from step to step."""

    config: PPOConfig
    stage: StageRun
    tokenizer: PreTrainedTokenizerBase
    models: Models
    rewards: Sequence[RewardSource]
    sampling: Sampling
    train: Sequence[PromptRow]
    test: Sequence[PromptRow]
    ptx: Sequence[Example]
    policy_stepper: Stepper
    value_stepper: Stepper | None
    average: WeightAverage | None
    scale: ScoreScale
    kl_coef: float
    policy_kl_coef: float
    """PPO-penalty's coefficient."""
    budget: Budget
    """What is computed at a time, of an update and of scoring."""
    policy_work: Work
    value_work: Work | None = None
    """Of a value model of its own."""
    mean_prompt_length: float = math.nan
    """Of the training prompts, in tokens."""
    compile_s: float = 0.0
    """Seconds that `compile` took."""

    @property
    def world(self) -> World:
        return self.stage.world

    @property
    def together(self) -> int:
        """Responses of an iteration that stay on one process: those of a prompt, which is then encoded once there.

        Not where some processes would have a prompt more than others.
        """
        in_step = self.config.num_prompts % self.world.size == 0
        return self.config.rollout.samples_per_prompt if in_step else 1

    @property
    def recomputes_logprobs(self) -> bool:
        """Are the old log-probabilities computed again by the training's forward pass?"""
        if self.config.ppo.old_logprobs == "auto":
            return computes_in_bfloat16(self.world.device, self.config.precision)
        return self.config.ppo.old_logprobs == "recomputed"


def load_learner(config: PPOConfig, stage: StageRun) -> Learner:
    """Load everything, and refuse what cannot work before anything is trained."""
    world, display, ppo = stage.world, stage.display, config.ppo
    path = model_directory(config.stage_model(config.policy.path, "sft"))
    tokenizer = load_tokenizer(path, config.policy.revision)
    policy = load_policy(path, config.policy.revision)
    check_vocabulary(policy, tokenizer, path)
    require_eos(tokenizer, path)
    rewards, lines = load_rewards(config.rewards, config.artifacts, tokenizer, world.device, config.precision)
    value_model, value_head, note = _value_model(config, path, rewards, policy)
    ref_policy = None
    if config.ref_policy is not None:
        ref_path = model_directory(config.stage_model(config.ref_policy.path, "sft"))
        ref_policy = load_policy(ref_path, config.ref_policy.revision)
        check_vocabulary(ref_policy, tokenizer, ref_path)
    elif config.policy.lora is None:
        ref_policy = load_policy(path, config.policy.revision)
    notes = [*lines, note]
    for model in (policy, ref_policy, value_model):
        if model is not None:
            notes.append(prepare(model, world.device))
    if value_head is not None:
        value_head.to(world.device)
    if ref_policy is not None:
        ref_policy.requires_grad_(False)
    if config.policy.lora is not None:
        notes.append(add_lora(policy, config.policy.lora, "policy.lora", seed=config.seed))
    if config.value_model.lora is not None and value_model is not None:
        notes.append(add_lora(value_model, config.value_model.lora, "value_model.lora", seed=config.seed))
    for line in dict.fromkeys([*notes, _kl_note(config)]):
        if line:
            display.note(line)

    train, test = _prompts(config, tokenizer, stage)
    check_rows(rewards, ((p.row.where, p.row.columns) for side in (train, test) for p in side))
    lengths = np.concatenate([train.lengths("ids"), test.lengths("ids")])
    longest = int(lengths.max()) + config.rollout.max_new_tokens
    readers = [source.model for source in rewards if isinstance(source, RewardModel) and source.reads_policy_tokens]
    for model in (policy, ref_policy, value_model, *readers):
        if model is not None:
            check_positions(model, longest, "rollout.max_new_tokens")
    with autocast(world.device, config.precision):
        if line := why_not_fast(policy, longest):
            display.note(line)
            if line := why_not_padded(policy):
                display.note(line)

    judges = [source for source in rewards if isinstance(source, RewardModel)]
    budget = _budget(config, stage, [policy, value_model], [ref_policy, *(source.model for source in judges)])
    for source in judges:
        source.budget = replace(budget, padded=not is_packed(source.model))
    stage.speed.peak_flops = peak_flops(world.device, config.precision)
    # After what the budget counts: that is the plain passes.
    trained = [model for model in (policy, value_model) if model is not None]
    lines, compile_s = set_up_passes(trained, config, world.device)
    for line in lines:
        display.note(line)

    warmup = sum(ppo.updates(i) for i in range(config.value_model.warmup_iterations))
    policy_steps = ppo.total_steps - warmup
    value: torch.nn.Module | None = value_model if value_model is not None else value_head
    if config.optimizer.warmup_steps >= policy_steps:
        display.warn(warmup_warning(config.optimizer.warmup_steps, policy_steps))
    rate = config.value_model.learning_rate
    return Learner(
        config=config,
        stage=stage,
        tokenizer=tokenizer,
        models=Models(policy, ref_policy, value_model, value_head),
        rewards=rewards,
        sampling=_sampling(config, policy, tokenizer),
        train=train,
        test=test[: config.evaluation.num_prompts],
        ptx=_ptx_rows(config, tokenizer, stage),
        policy_stepper=build_stepper(policy, config.optimizer, policy_steps),
        value_stepper=build_stepper(value, config.optimizer, ppo.total_steps, learning_rate=rate) if value else None,
        average=WeightAverage(policy, decay=ppo.ema_decay) if ppo.ema_decay is not None else None,
        mean_prompt_length=float(train.lengths("ids").mean()),
        scale=ScoreScale(ppo),
        kl_coef=ppo.kl_coef,
        policy_kl_coef=ppo.policy_kl_coef,
        budget=budget,
        policy_work=work_of(policy),
        value_work=work_of(value_model) if value_model is not None else None,
        compile_s=compile_s,
    )


def _budget(
    config: PPOConfig,
    stage: StageRun,
    trained: Sequence[PreTrainedModel | None],
    frozen: Sequence[PreTrainedModel | None],
) -> Budget:
    """What is computed at a time: as given, or what fits beside all models."""
    world, given = stage.world, config.ppo.tokens_per_microbatch
    learning = [model for model in trained if model is not None]
    beside = [model for model in frozen if model is not None]
    if config.ppo.ema_decay is not None and world.device.type == "cpu":
        beside.append(learning[0])  # The average of its weights is kept on the CPU.
    full_kl = config.ppo.kl_in == "loss" and config.ppo.kl_estimator_used == "full"
    learns_distributions = config.ppo.entropy_coef != 0 or full_kl
    stage.tokens_per_microbatch = (
        token_budget(
            learning,
            beside,
            world.device,
            config.precision,
            world.size,
            checkpointing=config.gradient_checkpointing,
            logits_copies=COPIES_OF_WHOLE_DISTRIBUTIONS if learns_distributions else LOGITS_COPIES,
        )
        if given == "auto"
        else given
    )
    padded = not all(is_packed(model) for model in learning)
    return Budget(stage.tokens_per_microbatch, config.ppo.microbatch_size, padded=padded)


def _sampling(config: PPOConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How responses are drawn; raises ConfigError for a stop token that is no token."""
    rollout, vocabulary = config.rollout, tokenizer.get_vocab()
    for token in rollout.stop_tokens:
        if token not in vocabulary:
            raise ConfigError(
                f"rollout.stop_tokens: {token!r} is no single token of the tokenizer. Give it under "
                "rollout.stop_strings"
            )
    return Sampling(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        min_new_tokens=rollout.min_new_tokens,
        stop=frozenset(stop_ids(policy, tokenizer) | {vocabulary[token] for token in rollout.stop_tokens}),
        stop_strings=tuple(rollout.stop_strings),
    )


def _value_model(
    config: PPOConfig, policy_path: str, rewards: Sequence[RewardSource], policy: PreTrainedModel
) -> tuple[PreTrainedModel | None, torch.nn.Linear | None, str | None]:
    """(value model, or a head on the policy's backbone, and a line about it if the user should know)."""
    if not config.ppo.has_value_model:
        return None, None, None
    init, path = config.value_model.init, config.value_model.path
    if init == "shared":
        check_shared_value_model(policy)
        head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, bias=False)
        torch.nn.init.zeros_(head.weight)
        if path is not None:
            weight = scalar_weight(load_value_model(path))
            if weight.shape != head.weight.shape:
                raise ConfigError(
                    f"value_model.path: {path} has hidden size {weight.shape[1]}, the policy {head.in_features}: with "
                    "init: shared they are of one backbone. Give the value model of a run from this policy"
                )
            head.weight.data.copy_(weight)
        return None, head, None
    if path is not None:
        model = load_value_model(path)
        if vocabulary_rows(model) < vocabulary_rows(policy):
            raise ConfigError(
                f"value_model.path: {path} embeds {vocabulary_rows(model)} tokens, the policy "
                f"{vocabulary_rows(policy)}. Give the value model of a run from this policy"
            )
        return model, None, None
    own = [
        (model_directory(config.stage_model(reward.path, "rm")), reward.revision)
        for reward, source in zip(config.rewards, rewards, strict=True)
        if isinstance(reward, ModelReward) and isinstance(source, RewardModel) and source.reads_policy_tokens
    ]
    if init == "reward_model" and not own:
        raise ConfigError(
            "value_model.init: reward_model, but no reward is a model that reads the policy's tokens. Set it to policy"
        )
    if own and init != "policy":
        return new_value_model(*own[0]), None, None
    note = "no reward model reads the policy's tokens: the value model starts from the policy"
    return new_value_model(policy_path, config.policy.revision), None, note if init == "auto" else None


KL_NOTES = {
    ("reward", "k2"): "k2 in the reward is no KL: its optimum is not ref_policy * exp(score / kl_coef). Take k1",
    ("reward", "k3"): "k3 in the reward has another gradient than the KL's, and another optimum. Take k1",
    ("reward", "abs"): "the absolute log-ratio in the reward is no KL: a token that became rarer than in ref_policy "
    "is charged too, and so pushed further out. Take k1",
    ("reward", "full"): "the full KL in the reward does not depend on the token drawn, so a token is charged only "
    "for the tokens after it. Take k1, or full in the loss",
    ("loss", "k3"): "k3 in the loss has the gradient of KL(ref_policy, policy)",
    ("loss", "abs"): "the absolute log-ratio in the loss has the gradient of twice the total variation, and no KL's",
    ("loss", "k2"): "k2 of single tokens in the loss charges no token for the KL of the tokens after it; "
    "k2_sequence does",
    ("loss", "full"): "the full KL of single tokens in the loss charges no token for the KL of the tokens after it; "
    "k2_sequence does",
}


def _kl_note(config: PPOConfig) -> str | None:
    """What a KL that was chosen really optimises, where that is not what one would think."""
    if config.ppo.kl_coef == 0:
        return None
    ppo = config.ppo
    if ppo.kl_in == "loss" and (ppo.whitens_advantages or ppo.advantage_estimator == "grpo"):
        return (
            "ppo.kl_in: loss beside advantages that are divided by their standard deviation: as that shrinks, so does "
            "the KL's weight, down to nothing. Set whiten_advantages: false (dr_grpo or rloo instead of grpo), or take "
            "kl_in: reward (docs/ppo.md)"
        )
    note = KL_NOTES.get((ppo.kl_in, ppo.kl_estimator_used))
    return f"ppo.kl_estimator: {note} (docs/ppo.md)" if note else None


def _ptx_rows(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, stage: StageRun) -> Sequence[Example]:
    """The rows of the language-model loss, as the SFT stage would read them."""
    spec = ptx_rows(config)
    if spec is None:
        return []
    found = tokenise(DemonstrationEncoder(tokenizer, spec))
    stage.display.about_rows(found.lines, found.warnings)
    return found.train


def new_health(learner: Learner) -> Health:
    """What watches the run, told what this one's numbers ought to be."""
    config = learner.config
    precision = "bfloat16" if computes_in_bfloat16(learner.world.device, config.precision) else "float32"
    return Health(
        kl_in_reward=config.ppo.kl_in == "reward",
        has_value_model=config.ppo.has_value_model,
        starts_at_reference=config.ref_policy is None,
        max_new_tokens=config.rollout.max_new_tokens,
        ratio_tolerance=RATIO_TOLERANCE[precision],
    )


def plan(learner: Learner) -> list[tuple[str, str]]:
    """The batch arithmetic of the run, line by line."""
    config, ppo, rollout = learner.config, learner.config.ppo, learner.config.rollout
    responses = ppo.num_iterations * ppo.rollout_batch_size
    epochs = ppo.num_iterations * config.num_prompts / len(learner.train)
    prompt_tokens = learner.mean_prompt_length
    per_step = f"{ppo.ppo_epochs} ppo_epochs x {ppo.rollout_batch_size // ppo.minibatch_size} minibatches"
    if ppo.num_rollouts_per_update > 1:
        per_step += f" x {ppo.num_rollouts_per_update} rollouts"
    micro = f", {ppo.microbatch_size} at a time" if ppo.microbatch_size else ""
    lines = [
        ("prompts", f"{len(learner.train):,} of {prompt_tokens:.0f} tokens on average; {epochs:.2f} epochs"),
        (
            "rollouts",
            f"{ppo.num_iterations:,} iterations x {config.num_prompts:,} prompts x {rollout.samples_per_prompt} "
            f"= {responses:,} responses of at most {rollout.max_new_tokens} tokens "
            f"(at most {responses * rollout.max_new_tokens:,} tokens)",
        ),
        (
            "minibatches",
            f"{per_step} of {ppo.minibatch_size} responses{micro} = {ppo.steps_per_iteration} optimizer steps an "
            "iteration",
        ),
        ("at a time", f"at most {learner.budget.tokens:,} tokens (ppo.tokens_per_microbatch)"),
        ("steps", f"{ppo.total_steps:,} in all, the first {config.optimizer.warmup_steps} of warm-up"),
    ]
    if config.value_model.warmup_iterations:
        lines.append(("value warm-up", f"{config.value_model.warmup_iterations} iterations before the policy moves"))
    if config.ptx is not None:
        size = config.ptx.minibatch_size or ppo.minibatch_size
        steps = sum(ppo.updates(i) for i in range(config.value_model.warmup_iterations, ppo.num_iterations))
        lines.append(
            (
                "ptx",
                f"{size} rows a step = {steps * size / len(learner.ptx):.2f} epochs over {len(learner.ptx):,} rows",
            )
        )
    if learner.world.size > 1:
        lines.append(("processes", f"{learner.world.size}, which share each of these numbers"))
    return lines


def _prompts(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, stage: StageRun
) -> tuple[Table[PromptRow], Table[PromptRow]]:
    """The training prompts and the held-out ones."""
    found = tokenise(PromptEncoder(tokenizer, ppo_rows(config)))
    stage.display.about_rows(found.lines, found.warnings)
    return found.train, found.test
