"""The models, the microbatches and the phases of PPO, from its config."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.plan.budget import auto_tokens
from rlhf_cli.plan.memory import (
    Batch,
    Held,
    Phase,
    Setting,
    forward_bytes,
    fullest,
    join,
    later_tokens,
    moment_bytes,
    sampling_bytes,
    weight_bytes,
)
from rlhf_cli.plan.parts import Machine, StagePlan, libraries, load, precision_of, save, training
from rlhf_cli.plan.sources import Sources

FULL = 2
"""Microbatches of a step for `auto`: with more than one, all gradients exist beside the activations."""
COPIES_OF_WHOLE_DISTRIBUTIONS = 8.0
"""Tensors of the size of the logits if an entropy or a KL over the whole vocabulary has a gradient, too."""
COPIES_OF_FILTERED_LOGITS = 3.25
"""Tensors of the size of the logits if top-k and the like restrict them: filtered logits, their gradient, that of the
logits, and a mask of one byte."""


@dataclass(frozen=True)
class PPOModels:
    """The models of a PPO run."""

    policy: Held
    value: Held | None
    """The value model, if it is a model of its own."""
    frozen: list[Held]

    @property
    def trained(self) -> list[Held]:
        """The policy, and the value model if it is one of its own."""
        return [self.policy] if self.value is None else [self.policy, self.value]

    @property
    def all(self) -> list[Held]:
        """All models, the trained ones first."""
        return [*self.trained, *self.frozen]


def plan_ppo(config: PPOConfig, sources: Sources, machine: Machine, setting: Setting) -> StagePlan:
    models = ppo_models(config, sources, setting)
    tokens = ppo_tokens(config, models, machine, setting)
    prompt = _longest_prompt(config, models)
    batch = _ppo_batch(config, prompt, config.ppo.minibatch_size, tokens, setting)
    scored = _ppo_batch(config, prompt, config.ppo.rollout_batch_size, tokens, setting)
    rows = -(-config.ppo.rollout_batch_size // setting.processes)
    live = min(rows, config.rollout.max_live_rows or rows)
    # Of a sharded policy each process samples from a whole copy, unless the config says otherwise.
    copies = config.rollout.decoder != "sharded"
    sampler = replace(models.policy, whole=True) if copies else models.policy
    rollout = sampling_bytes(sampler, live, prompt + config.rollout.max_new_tokens, setting)
    static = _static(models, config, setting)
    phases = [
        load(models.all, setting, sampler=sampler, copied=copies and models.policy.among(setting) > 1),
        Phase("rollout", join(_without(static, config, setting, "rollout"), rollout)),
        *_passes(config, models, batch, scored, setting),
        save(models.trained, setting, static),
    ]
    return StagePlan("ppo", models.all, phases, batch, tokens, setting)


def ppo_tokens(config: PPOConfig, models: PPOModels, machine: Machine, setting: Setting) -> int:
    """The `tokens_per_microbatch` of the stage."""
    given = config.ppo.tokens_per_microbatch
    if given != "auto":
        return given
    mixed = _ppo_batch(config, _longest_prompt(config, models), config.ppo.minibatch_size, 1, setting)

    def phases(tokens: int) -> list[Phase]:
        targets = round(tokens * mixed.targets / mixed.tokens)
        batch = replace(mixed, tokens=tokens, targets=targets, num=FULL, later=None)
        return _passes(config, models, batch, batch, setting)

    return auto_tokens(phases, machine, setting)


def _passes(config: PPOConfig, models: PPOModels, batch: Batch, scored: Batch, setting: Setting) -> list[Phase]:
    """Scoring, of microbatches like `scored`, and the update, of those like `batch`."""
    static = _static(models, config, setting)
    scoring = fullest(forward_bytes(m, scored, setting) for m in models.all)
    update = _without(static, config, setting, "update")
    return [
        Phase("scoring", join(_without(static, config, setting, "scoring"), scoring)),
        *training(models.trained, batch, setting, update),
    ]


def ppo_models(config: PPOConfig, sources: Sources, setting: Setting) -> PPOModels:
    """The models of the stage, whose shapes `sources` gives."""
    precision, lora, keep_whole = precision_of(setting), config.policy.lora, config.distributed.keep_whole
    source = sources.policy(config)
    head = config.value_model.init == "shared" and config.ppo.has_value_model
    policy = Held(
        sources.shape(
            "policy",
            source,
            is_classifier=False,
            precision=precision,
            lora=lora,
            frozen=config.policy.freeze,
            key="policy",
        ),
        "exact" if lora is not None else "float32",
        whole="policy" in keep_whole,
    )
    frozen: list[Held] = []
    if lora is None or config.ref_policy is not None:
        shape = sources.shape(
            "reference policy", sources.ref_policy(config), is_classifier=False, precision=precision, frozen=None
        )
        frozen.append(Held(shape, "rounded", whole="ref_policy" in keep_whole))
    rewards = [(n, reward) for n, reward in enumerate(config.rewards) if isinstance(reward, ModelReward)]
    for number, reward in rewards:
        key = f"rewards[{number}].path"
        shape = sources.shape(
            name_of_reward(config, reward),
            sources.reward_model(config, reward, key),
            is_classifier=True,
            precision=precision,
            frozen=None,
            key=key,
        )
        shares = setting.sharded == 1 and sources.shares_backbone(config, reward)
        frozen.append(Held(shape, "rounded", shares, whole="rewards" in keep_whole))
    value = None
    if config.ppo.has_value_model and not head:
        from_reward = (
            config.value_model.init in ("auto", "reward_model") and rewards and config.value_model.path is None
        )
        value_lora = config.value_model.lora
        value_source = sources.reward_model(config, rewards[0][1], "rewards[0].path") if from_reward else source
        shape = sources.shape(
            "value model",
            value_source,
            is_classifier=True,
            precision=precision,
            lora=value_lora,
            frozen=config.value_model.freeze,
            key="value_model",
        )
        may_share = lora is not None and value_lora is not None and lora.quantize == value_lora.quantize
        may_share = may_share and setting.sharded == 1
        shares = may_share and (not from_reward or sources.shares_backbone(config, rewards[0][1]))
        value = Held(shape, "exact" if value_lora is not None else "float32", shares, "value_model" in keep_whole)
    return PPOModels(policy, value, frozen)


def name_of_reward(config: PPOConfig, reward: ModelReward) -> str:
    """What the plan calls a reward model: with its number if there are several."""
    numbers = [number for number, other in enumerate(config.rewards, 1) if isinstance(other, ModelReward)]
    number = next(number for number, other in enumerate(config.rewards, 1) if other is reward)
    return "reward model" if len(numbers) == 1 else f"reward model {number}"


def _longest_prompt(config: PPOConfig, models: PPOModels) -> int:
    return min(config.data.max_prompt_length, max(1, models.policy.shape.positions - config.rollout.max_new_tokens))


def _ppo_batch(config: PPOConfig, prompt: int, num_rows: int, tokens: int, setting: Setting) -> Batch:
    """The microbatches of `num_rows` prompts and responses that all have the maximum length.

    Equal prompts count once. A microbatch takes at most `tokens` tokens, but at least one row.
    """
    response = config.rollout.max_new_tokens
    rows = -(-num_rows // setting.processes)
    at_once = min(rows, config.ppo.microbatch_size or rows)
    adjacent = min(config.rollout.samples_per_prompt, at_once)
    total = -(-at_once // adjacent) * prompt + at_once * response
    size = min(max(tokens, prompt + response), total)
    copies = _copies_of_logits(config)
    is_plain = copies == Batch.logits_copies
    targets, num = round(size * at_once * response / total), -(-rows * total // (at_once * size))
    later = later_tokens(size, rows * total / at_once, prompt + response)
    return Batch(size, targets, num, later, copies, is_plain)


def _copies_of_logits(config: PPOConfig) -> float:
    rollout = config.rollout
    if config.ppo.entropy_coef != 0 or _has_full_kl(config):
        return COPIES_OF_WHOLE_DISTRIBUTIONS
    filters = (rollout.top_k, rollout.top_p, rollout.min_p, rollout.no_repeat_ngram_size)
    if any(value is not None for value in filters) or rollout.min_new_tokens:
        return COPIES_OF_FILTERED_LOGITS
    return Batch.logits_copies


def _has_full_kl(config: PPOConfig) -> bool:
    """Whether the update computes the KL over the whole vocabulary, with the reference policy."""
    return config.ppo.kl_in == "loss" and config.ppo.kl_estimator_used == "full"


def _static(models: PPOModels, config: PPOConfig, setting: Setting) -> dict[str, float]:
    """What a process holds between the passes."""
    on_cpu = setting.device == "cpu"
    average = config.ppo.ema_decay is not None and on_cpu
    is_copied = models.policy.among(setting) > 1 and config.rollout.decoder != "sharded"
    moved = models.frozen if "frozen" in config.offload and not on_cpu else []
    kept = models.trained if moved else models.all
    return join(
        libraries(setting),
        {
            "weights": sum(weight_bytes(model, setting) for model in kept),
            # A sharded one is never on the GPU whole.
            "frozen models": sum(weight_bytes(model, setting) for model in moved if model.among(setting) == 1),
            "rollout copy": models.policy.shape.weights * float(setting.number) if is_copied else 0.0,
            "optimizer": sum(moment_bytes(model, setting) for model in models.trained),
            "moving average": 4.0 * models.policy.shape.trained if average else 0.0,
        },
    )


def _without(static: dict[str, float], config: PPOConfig, setting: Setting, phase: str) -> dict[str, float]:
    """What stays on the GPU in a phase: `offload` moves the rest to the CPU. On a CPU it moves nothing."""
    away = set()
    if "optimizer" in config.offload and phase != "update" and setting.device != "cpu":
        away.add("optimizer")
    if phase != "scoring" and not (phase == "update" and _has_full_kl(config)):
        away.add("frozen models")  # 0 unless they are moved
    return {name: 0.0 if name in away else size for name, size in static.items()}
