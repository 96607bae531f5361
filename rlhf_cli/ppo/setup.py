"""Everything that a PPO run loads and checks before training, and the models that it saves."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.data.batches import Budget, stream
from rlhf_cli.data.cache import Table, tokenise
from rlhf_cli.data.encode import Example, require_eos
from rlhf_cli.data.encoders import DemonstrationEncoder, PromptEncoder, PromptRow
from rlhf_cli.data.splits import HeldOutRows, held_out_rows
from rlhf_cli.data.stage_rows import ppo_rows, ptx_rows
from rlhf_cli.decoders.decoder import decoder_notes
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.adapter_files import BaseModel
from rlhf_cli.models.adapters import has_adapters
from rlhf_cli.models.cost import Work, peak_flops, work_of
from rlhf_cli.models.deferred import read_deferred
from rlhf_cli.models.forward import (
    autocast,
    check_positions,
    compute_dtype,
    is_packed,
    positions,
    vocabulary_rows,
)
from rlhf_cli.models.frozen import freeze, hold_frozen, is_held
from rlhf_cli.models.heads import scalar_heads, value_model_like
from rlhf_cli.models.load import (
    check_vocabulary,
    load_policy,
    load_tokenizer,
    load_value_model,
    new_value_model,
    prepare,
)
from rlhf_cli.models.lora import Backbone, add_adapters, copy_adapters, defers_base, has_adapters_of, prepare_base
from rlhf_cli.models.passes import fewest_tokens, set_up_passes
from rlhf_cli.models.save import base_of, round_weights, save, save_trained, saved_dtype
from rlhf_cli.models.shard import shard_for, shards, to_shard
from rlhf_cli.models.vocabulary import require_same_tokens, require_template_tokens
from rlhf_cli.processes.distributed import World, require_rows_for_all
from rlhf_cli.processes.sharding import is_sharded
from rlhf_cli.report.progress import epochs
from rlhf_cli.rewards.base import RewardSource
from rlhf_cli.rewards.models import RewardModel
from rlhf_cli.rewards.sources import check_rows, load_rewards
from rlhf_cli.rollout.rollout import WITH_WEIGHTS, Models, Sampler
from rlhf_cli.rollout.sampling import Sampling, generation_config, sampling_of
from rlhf_cli.run.artifacts import model_directory
from rlhf_cli.run.checkpoint_files import GRADES
from rlhf_cli.run.stage_run import StageRun
from rlhf_cli.training.optimizer import Stepper, WeightAverage, build_stepper, warmup_warning

if TYPE_CHECKING:
    from rlhf_cli.rollout.offload import Offload


@dataclass(frozen=True)
class Setup:
    """Everything that a run loads once. `RunState` holds what changes."""

    config: PPOConfig
    stage: StageRun
    tokenizer: PreTrainedTokenizerBase
    models: Models
    policy_base: BaseModel  # the origin of the policy's weights
    value_base: BaseModel | None  # the origin of a separate value model's weights
    rewards: Sequence[RewardSource]
    sampling: Sampling
    train: Table[PromptRow]
    held_out: HeldOutRows[PromptRow]
    ptx: Sequence[Example]  # rows of the language-model loss; empty without `ptx`
    policy_stepper: Stepper
    value_stepper: Stepper | None
    average: WeightAverage | None  # the moving average of the policy's weights
    budget: Budget  # the size of a microbatch, for scoring and for updates
    policy_work: Work
    value_work: Work | None  # operations of a separate value model
    compile_s: float  # seconds that `compile` took

    @property
    def world(self) -> World:
        return self.stage.world

    @property
    def adjacent(self) -> int:
        """See `adjacent_responses`."""
        return adjacent_responses(self.config, self.world.size)

    def prompts_of(self, iteration: int) -> list[PromptRow]:
        """The prompt of each response of an iteration, over all processes; the responses to a prompt are adjacent."""
        numbers = self.numbers_of(iteration)
        return [prompt for i in numbers for prompt in [self.train[i]] * self.config.rollout.samples_per_prompt]

    def numbers_of(self, iteration: int) -> list[int]:
        """The numbers of an iteration's prompts among the training prompts."""
        return stream(len(self.train), self.config.num_prompts, iteration, self.config.seed, "ppo prompts")

    @property
    def sampler_may_differ(self) -> bool:
        """The sampler's log-probabilities may differ from training's by more than float32 rounding (`Recent.add`)."""
        return compute_dtype(self.world.device, self.config.precision) != torch.float32

    @property
    def recomputes_logprobs(self) -> bool:
        """The training's forward pass recomputes the old log-probabilities."""
        choice = self.config.ppo.old_logprobs
        return self.sampler_may_differ if choice == "auto" else choice == "recomputed"


def adjacent_responses(config: PPOConfig, num_processes: int) -> int:
    """The number of adjacent responses of an iteration that stay on one process."""
    # All responses to a prompt, so that it is encoded once, if the prompts can be divided evenly.
    is_even = config.num_prompts % num_processes == 0
    return config.rollout.samples_per_prompt if is_even else 1


def load_setup(config: PPOConfig, stage: StageRun) -> Setup:
    """Load everything, and raise before training if anything cannot work."""
    world, ppo, display = stage.world, config.ppo, stage.display
    require_rows_for_all(world, ppo.minibatch_size, "ppo.minibatch_size")

    # Policy, rewards, value model, reference policy.
    base = base_of(config)
    path = base.path
    tokenizer = load_tokenizer(path, base.revision)
    samples_from_copy = to_shard(config, "policy") is not None and config.rollout.decoder != "sharded"
    if samples_from_copy and config.policy.lora is not None and config.policy.lora.quantize is not None:
        raise ConfigError(
            "policy.lora.quantize does not work with a policy that is sharded among the processes, whose copy samples. "
            "Remove it, or set rollout.decoder: sharded or distributed.keep_whole: [policy]"
        )
    deferred = to_shard(config, "policy") is not None or defers_base(config.policy.lora, config, world.device)
    policy = load_policy(path, base.revision, deferred=deferred)
    check_vocabulary(policy, tokenizer, path)
    require_eos(tokenizer, path)
    prepare_base(policy, config.policy.lora, "policy.lora", config, world.device)
    lora = config.policy.lora
    backbone = Backbone(policy, base, lora.quantize) if lora is not None else None  # other models may share its weights
    rewards, notes = load_rewards(
        config.named_rewards,
        config.artifacts,
        tokenizer,
        world.device,
        config.precision,
        keep_special=config.data.special_tokens == "keep",
        backbone=None if shards(config) else backbone,
        sharded_by=to_shard(config, "rewards"),
    )
    reward_models = [source for source in rewards if isinstance(source, RewardModel)]
    own_readers = [source for source in reward_models if source.reads_policy_tokens]
    for source in own_readers:
        require_template_tokens(config.data.prompt_template, tokenizer, source.tokenizer, source.name)
    for reward in rewards:
        reward.keep_in(stage.checkpoints_directory / GRADES, world.rank)
    value = choose_value_model(config, base, rewards, policy, world.device, backbone)
    if (value_path := config.value_model.path) is not None:
        require_same_tokens(tokenizer, load_tokenizer(value_path), value_path, "value_model.path")
    models = Models(policy, _load_ref_policy(config, tokenizer, world.device), value.model, value.head)
    lines: list[str | None] = [*notes, value.note, *_prepare(models, config, world.device, base, value)]
    sampler = Sampler(policy, world.device, config.precision) if samples_from_copy else None
    models = replace(models, sampler=sampler)
    for name, one in zip(WITH_WEIGHTS, models.with_weights, strict=True):
        if one is not None and to_shard(config, name) is not None:
            lines.append(shard_for(config, one, world.device))
    if sampler is not None:
        sampler.refresh()
    display.notes(*lines, kl_note(config))

    # Prompts, and the rows of the language-model loss, encoded as in the SFT stage.
    longest = positions(policy) - config.rollout.max_new_tokens
    rows = tokenise(PromptEncoder(tokenizer, ppo_rows(config)), longest=longest)
    display.about_rows(rows.lines, rows.warnings)
    train, held_out = rows.train, held_out_rows(rows, config.data, config.evaluation.num_prompts, config.seed)
    choice = "evaluation.best_metric" if config.evaluation.best_metric is not None else None
    display.notes(*held_out.notes("evaluation.num_prompts", choice))
    sides: Any = (train, held_out.validation, held_out.test)
    check_rows(rewards, ((p.row.where, p.row.columns) for p in chain(*sides)))
    ptx: Sequence[Example] = []
    if (ptx_spec := ptx_rows(config)) is not None:
        examples = tokenise(DemonstrationEncoder(tokenizer, ptx_spec), longest=positions(policy))
        display.about_rows(examples.lines, examples.warnings)
        ptx = examples.train

    # The longest sequence must fit every model. The sampler may be slow for it.
    lengths = [int(train.lengths("ids").max()), *(len(p.ids) for p in chain(*sides[1:]))]
    longest = max(lengths) + config.rollout.max_new_tokens
    for one in (*models.with_weights, *(source.model for source in own_readers)):
        if one is not None:
            check_positions(one, longest, "rollout.max_new_tokens")
    with autocast(world.device, config.precision):
        display.notes(*decoder_notes(models.samples, longest, config.rollout.decoder))

    # Microbatches, passes, optimizers.
    budget = _budget(config, stage, models, rewards)
    stage.speed.peak_flops = peak_flops(world.device, config.precision)
    trained = [model for model in (policy, value.model) if model is not None]  # after the budget of plain passes
    of_passes, compile_s = set_up_passes(trained, config, world.device)
    display.notes(*of_passes)
    policy_stepper, value_stepper = _steppers(models, config, stage)
    steppers = [stepper for stepper in (policy_stepper, value_stepper) if stepper is not None]
    models = replace(models, offload=_offload(config, models, reward_models, steppers, stage))
    return Setup(
        config=config,
        stage=stage,
        tokenizer=tokenizer,
        models=models,
        policy_base=base,
        value_base=value.base,
        rewards=rewards,
        sampling=sampling_of(config.rollout, policy, tokenizer),
        train=train,
        held_out=held_out,
        ptx=ptx,
        policy_stepper=policy_stepper,
        value_stepper=value_stepper,
        average=WeightAverage(policy, decay=ppo.ema_decay) if ppo.ema_decay is not None else None,
        budget=budget,
        policy_work=work_of(policy),
        value_work=work_of(value.model) if value.model is not None else None,
        compile_s=compile_s,
    )


def _load_ref_policy(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> PreTrainedModel | None:
    """The frozen reference, or None if it is the policy with its adapters switched off."""
    if config.ref_policy is None and config.policy.lora is not None:
        return None
    source, shards = config.ref_policy or config.policy, to_shard(config, "ref_policy") is not None
    path = model_directory(config.stage_model(source.path, "sft"))
    ref_policy = load_policy(path, source.revision, deferred=shards or is_held(device, config.precision))
    if config.ref_policy is not None:
        require_same_tokens(tokenizer, load_tokenizer(path, source.revision), path, "ref_policy.path")
        check_vocabulary(ref_policy, tokenizer, path)
    ref_policy.requires_grad_(False)
    if not shards:
        hold_frozen(ref_policy, device, config.precision, exact=False)
    return ref_policy


def _prepare(
    models: Models, config: PPOConfig, device: torch.device, policy_base: BaseModel, value: ValueStart
) -> list[str | None]:
    """Move the models to the device, freeze what is not trained, add adapters; returns notes for the user."""
    if value.model is not None:
        prepare_base(value.model, config.value_model.lora, "value_model.lora", config, device)
    notes = [prepare(model, device) for model in models.with_weights if model is not None]
    if value.head is not None:
        value.head.to(device)
    notes.append(freeze(models.policy, config.policy.freeze, "policy.freeze"))
    if value.model is not None:
        notes.append(freeze(value.model, config.value_model.freeze, "value_model.freeze"))
        if to_shard(config, "value_model") is None:
            of_policy = list(models.policy.parameters())
            hold_frozen(value.model, device, config.precision, exact=True, others=of_policy)
    notes.append(add_adapters(models.policy, config.policy.lora, policy_base, "policy.lora", config))
    if value.model is not None and value.base is not None:
        notes.append(add_adapters(value.model, config.value_model.lora, value.base, "value_model.lora", config))
        if value.adapters_of is not None:
            copy_adapters(value.adapters_of, value.model)
    return notes


def _budget(config: PPOConfig, stage: StageRun, models: Models, rewards: Sequence[RewardSource]) -> Budget:
    """The size of a microbatch: as configured, or what fits into memory beside all models."""
    named = {"policy": models.policy, "reference policy": models.ref_policy, "value model": models.value_model}
    reward_models = [
        (config.name_of_reward(named.key), source)
        for named, source in zip(config.named_rewards, rewards, strict=True)
        if isinstance(source, RewardModel)
    ]
    named |= {name: source.model for name, source in reward_models}
    loaded = {name: model for name, model in named.items() if model is not None}
    padded = not all(is_packed(model) for model in (models.policy, models.value_model) if model is not None)
    # With a value model each microbatch has two passes, enough for two threads: it is not cut further for them.
    parts = 1 if models.value_model is not None else 2
    parts = parts if stage.world.device.type == "cpu" else 0
    fewest = fewest_tokens(models.policy, stage.world.device, config.precision)
    budget = Budget(stage.microbatch_tokens(loaded), config.ppo.microbatch_size, padded, parts, fewest)
    for _, source in reward_models:
        source.budget = replace(budget, padded=not is_packed(source.model))
    return budget


def _offload(
    config: PPOConfig, models: Models, rewards: Sequence[RewardModel], steppers: Sequence[Stepper], stage: StageRun
) -> Offload | None:
    """The offloading that the config asks for. On a CPU everything stays where it is."""
    device = stage.world.device
    if not config.offload:
        return None
    if not leaves(device):
        stage.display.note(f"offload: does nothing on this {device.type}, whose memory holds everything")
        return None
    from rlhf_cli.rollout.offload import Offload

    scorers = [models.ref_policy, *(source.model for source in rewards)]
    trained = [model for model in (models.policy, models.value_model) if model is not None]
    whole = [model for model in scorers if model is not None and not is_sharded(model)]  # see `shard_for`
    return Offload(
        device,
        whole if "frozen" in config.offload else [],
        [stepper.optimizer for stepper in steppers] if "optimizer" in config.offload else [],
        shared=trained,
        update_needs_frozen=config.ppo.has_full_kl_loss,
    )


def leaves(device: torch.device) -> bool:
    """Tensors on this device can be moved to other memory."""
    return device.type != "cpu"


def _steppers(models: Models, config: PPOConfig, stage: StageRun) -> tuple[Stepper, Stepper | None]:
    """Optimizer and schedule of the policy, and of whatever predicts values."""
    ppo, optimizer, policy = config.ppo, config.optimizer, models.policy
    options: Any = {"seed": config.seed, "scale": stage.loss_scale}
    policy_steps = ppo.total_steps - sum(ppo.updates(i) for i in range(config.value_model.warmup_iterations))
    if optimizer.warmup_ratio is None and optimizer.warmup_steps >= policy_steps:
        stage.display.warn(warmup_warning(optimizer.warmup_steps, policy_steps))
    value = models.value_model if models.value_model is not None else models.value_head
    policy_stepper = build_stepper(policy, optimizer, policy_steps, **options)
    if value is None:
        return policy_stepper, None
    rate = config.value_model.learning_rate
    return policy_stepper, build_stepper(value, optimizer, ppo.total_steps, learning_rate=rate, **options)


# ------------------------------------------------------------ which value model the run trains, and where it starts


@dataclass(frozen=True)
class ValueStart:
    """The model that predicts values before the training, or the head on the policy's backbone, or neither."""

    model: PreTrainedModel | None = None
    head: torch.nn.Linear | None = None
    base: BaseModel | None = None  # the origin of the model's weights
    note: str | None = None  # a line for the user
    adapters_of: PreTrainedModel | None = None  # the reward model whose adapters the model starts from


def choose_value_model(
    config: PPOConfig,
    policy_base: BaseModel,
    rewards: Sequence[RewardSource],
    policy: PreTrainedModel,
    device: torch.device,
    backbone: Backbone | None,
) -> ValueStart:
    """The value model, or a value head on the policy's backbone.

    With `value_model.lora` it shares the frozen weights of `backbone` if it starts from the same model, or loads an
    equal copy if the run shards models; it starts from the adapters of a reward model there if they have the form of
    `value_model.lora`. Raises ConfigError for an `init` or a `path` that does not fit the policy or the rewards.
    """
    if not config.ppo.has_value_model:
        return ValueStart()
    init, path, lora = config.value_model.init, config.value_model.path, config.value_model.lora
    if init == "shared":
        return ValueStart(head=_shared_head(path, policy))
    deferred = to_shard(config, "value_model") is not None or defers_base(lora, config, device)
    if path is not None:
        model = load_value_model(path, deferred=deferred)
        if vocabulary_rows(model) < vocabulary_rows(policy):
            raise ConfigError(
                f"value_model.path: {path} embeds {vocabulary_rows(model)} tokens, the policy "
                f"{vocabulary_rows(policy)}. Use the value model of a run that started from this policy"
            )
        return ValueStart(model, base=BaseModel(path))
    reward_models = [
        (BaseModel(model_directory(config.stage_model(reward.path, "rm")), reward.revision), source.model)
        for (_, _, reward, _), source in zip(config.named_rewards, rewards, strict=True)
        if isinstance(reward, ModelReward) and isinstance(source, RewardModel) and source.reads_policy_tokens
    ]
    if init == "reward_model" and not reward_models:
        raise ConfigError(
            "value_model.init: found reward_model, but no reward is a model that reads the policy's tokens. "
            "Set it to policy"
        )
    # Policy and value model both train adapters, on weights of the same precision.
    if lora is None or config.policy.lora is None or lora.quantize != config.policy.lora.quantize:
        backbone = None
    base, adapters, notes = policy_base, None, []
    if init != "policy" and reward_models:
        base, reward_model = reward_models[0]
        # Sharded models share no weights: only the adapters of this one are read.
        adapted = backbone.reward_model(base.path) if backbone is not None and shards(config) else reward_model
        if backbone is not None and lora is not None and adapted is not None and has_adapters(adapted):
            if has_adapters_of(adapted, lora):
                base, adapters = backbone.base, adapted
            else:
                notes.append(
                    "the value model starts from the reward model, whose adapters have another form than "
                    "value_model.lora, so it has weights of its own. Give value_model.lora the keys of the reward "
                    "model's, or set value_model.init: policy"
                )
        if adapters is None:
            backbone = None
    elif init == "auto":
        notes.append("no reward model reads the policy's tokens: the value model starts from the policy")
    shared = backbone.classifier() if backbone is not None and not shards(config) else None
    if shared is not None:
        notes.append("the value model shares the policy's frozen weights")
    model = shared if shared is not None else new_value_model(base.path, base.revision, deferred=deferred)
    return ValueStart(model, base=base, note="\n".join(notes) or None, adapters_of=adapters)


def _shared_head(path: str | None, policy: PreTrainedModel) -> torch.nn.Linear:
    """A head on the policy's hidden states: zeros, or the head of the value model at `path`."""
    value_model_like(policy)  # raises now what saving would raise at the end
    head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, bias=False)
    torch.nn.init.zeros_(head.weight)
    if path is not None:
        value_model = load_value_model(path, deferred=True)
        (own,) = scalar_heads(value_model).values()
        read_deferred(own)
        weight = own.weight
        if weight.shape != head.weight.shape:
            raise ConfigError(
                f"value_model.path: {path} has hidden size {weight.shape[1]}, the policy {head.in_features}; init: "
                "shared needs the same backbone. Use the value model of a run that started from this policy"
            )
        head.weight.data.copy_(weight)
    return head


# ----------------------------------------------------------------------------------- what the run prints at its start


KL_NOTES = {
    ("reward", "k2"): "k2 in the reward is not the KL: its optimum is not ref_policy * exp(score / kl_coef). Use k1",
    ("reward", "k3"): "k3 in the reward has another gradient than the KL, and another optimum. Use k1",
    ("reward", "abs"): "the absolute log-ratio in the reward is not the KL: a token that became rarer than in "
    "ref_policy is charged too, and so becomes rarer still. Use k1",
    ("reward", "full"): "the full KL in the reward does not depend on the sampled token, so a token is charged only "
    "for the tokens after it. Use k1, or full in the loss",
    ("loss", "k3"): "k3 in the loss has the gradient of KL(ref_policy, policy)",
    ("loss", "abs"): "the absolute log-ratio in the loss has the gradient of twice the total variation, not of a KL",
    ("loss", "k2"): "k2 of single tokens in the loss charges no token for the KL of the tokens after it; "
    "k2_sequence does",
    ("loss", "full"): "the full KL of single tokens in the loss charges no token for the KL of the tokens after it; "
    "k2_sequence does",
}
"""The objective of each pair of kl_in and kl_estimator, if it is not the KL-regularised score."""


def kl_note(config: PPOConfig) -> str | None:
    """A note if the chosen KL optimises something other than the KL-regularised score."""
    ppo = config.ppo
    if ppo.kl_coef == 0:
        return None
    if ppo.kl_in == "loss" and (ppo.whitens_advantages or ppo.advantage_estimator == "grpo"):
        return (
            "ppo.kl_in: loss with advantages that are divided by their standard deviation: as it shrinks, the KL's "
            "weight shrinks to nothing. Set whiten_advantages: false (dr_grpo or rloo instead of grpo), or "
            "kl_in: reward (docs/kl.md)"
        )
    note = KL_NOTES.get((ppo.kl_in, ppo.kl_estimator_used))
    return f"ppo.kl_estimator: {note} (docs/kl.md)" if note else None


def plan(setup: Setup) -> list[tuple[str, str]]:
    """The batch arithmetic of the run, as (name, text) lines."""
    config, ppo, rollout = setup.config, setup.config.ppo, setup.config.rollout
    responses = ppo.num_iterations * ppo.rollout_batch_size
    passes = ppo.num_iterations * config.num_prompts / len(setup.train)
    per_step = f"{ppo.ppo_epochs} ppo_epochs x {ppo.rollout_batch_size // ppo.minibatch_size} minibatches"
    if ppo.num_rollouts_per_update > 1:
        per_step += f" x {ppo.num_rollouts_per_update} rollouts"
    micro = f", {ppo.microbatch_size} per microbatch" if ppo.microbatch_size else ""
    warmup, mean = config.optimizer.warmup(ppo.total_steps), setup.train.lengths("ids").mean()
    lines = [
        ("prompts", f"{len(setup.train):,} of {mean:.0f} tokens on average; {epochs(passes)}"),
        (
            "rollouts",
            f"{ppo.num_iterations:,} iterations x {config.num_prompts:,} prompts x {rollout.samples_per_prompt} "
            f"= {responses:,} responses of at most {rollout.max_new_tokens} tokens "
            f"(at most {responses * rollout.max_new_tokens:,} tokens)",
        ),
        (
            "minibatches",
            f"{per_step} of {ppo.minibatch_size} responses{micro} = {ppo.steps_per_iteration} optimizer steps per "
            "iteration",
        ),
        ("microbatches", f"at most {setup.budget.tokens:,} tokens (ppo.tokens_per_microbatch)"),
        ("steps", f"{ppo.total_steps:,} in total, the first {warmup} of them warm-up"),
    ]
    if config.limits:
        lines.append(("limits", ", ".join(f"{name} {limit} on average" for name, limit in config.limits.items())))
    if config.value_model.warmup_iterations:
        lines.append(("value warm-up", f"{config.value_model.warmup_iterations} iterations before the policy trains"))
    if config.ptx is not None:
        size = config.ptx.minibatch_size or ppo.minibatch_size
        steps = sum(ppo.updates(i) for i in range(config.value_model.warmup_iterations, ppo.num_iterations))
        passes = steps * size / len(setup.ptx)
        lines.append(("ptx", f"{size} rows per step = {epochs(passes)} over {len(setup.ptx):,} rows"))
    if setup.world.size > 1:
        lines.append(("processes", f"{setup.world.size}, which share each of these numbers"))
        models: dict[str, PreTrainedModel | None] = dict(zip(WITH_WEIGHTS, setup.models.with_weights, strict=True))
        models |= {source.name: source.model for source in setup.rewards if isinstance(source, RewardModel)}
        if sharded := [name for name, model in models.items() if model is not None and is_sharded(model)]:
            lines.append(("sharded", f"{', '.join(sharded)} (distributed.shard)"))
    return lines


def save_models(setup: Setup) -> None:
    """Write `model`, `value_model` if there are values, and `ema_model` if requested: plain Hugging Face folders.

    A value head gets a copy of the policy's backbone. All processes must call this.
    """
    models, config, directory = setup.models, setup.config, setup.stage.directory / "value_model"
    round_weights(models.policy, config, setup.policy_base)
    if models.value_model is not None:
        round_weights(models.value_model, config, setup.value_base)
    save_policy(setup, "model")
    if models.value_model is not None and setup.value_base is not None:
        if setup.world.takes_part(models.value_model):
            lora, base = config.value_model.lora, setup.value_base
            save_trained(models.value_model, setup.tokenizer, directory, config, lora, base)
    elif models.value_head is not None and setup.world.takes_part(models.policy):
        dtype = saved_dtype(config, setup.policy_base)
        save(models.policy, setup.tokenizer, directory, dtype, value_head=models.value_head)
    if setup.average is not None:
        with setup.average.applied():
            save_policy(setup, "ema_model")
    setup.world.barrier("the models to be saved")


def save_policy(setup: Setup, name: str) -> None:
    """Write the policy, with a generation config that samples as in training."""
    if not setup.world.takes_part(setup.models.policy):
        return
    policy, sampling, directory = setup.models.policy, setup.sampling, setup.stage.directory / name
    policy.generation_config = generation_config(sampling, policy.generation_config)
    if setup.world.is_main:
        shutil.rmtree(directory, ignore_errors=True)
    base, config = setup.policy_base, setup.config
    save_trained(policy, setup.tokenizer, directory, config, config.policy.lora, base)
