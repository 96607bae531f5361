"""The models, the microbatches and the phases of PPO, from its config."""

from __future__ import annotations

from dataclasses import replace

from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.models.cost import COPIES_OF_WHOLE_DISTRIBUTIONS, LOGITS_COPIES
from rlhf_cli.plan.memory import (
    Batch,
    Held,
    Phase,
    Setting,
    forward_bytes,
    join,
    moment_bytes,
    sampling_bytes,
    weight_bytes,
)
from rlhf_cli.plan.parts import Machine, StagePlan, auto_tokens, libraries, load, precision_of, save, training
from rlhf_cli.plan.shapes import shape_of
from rlhf_cli.plan.sources import Sources

COPIES_OF_FILTERED_LOGITS = 3.25
"""Tensors of the size of the logits if top-k and the like restrict them: filtered logits, their gradient, that of the
logits, and a mask of one byte."""


def plan_ppo(config: PPOConfig, sources: Sources, machine: Machine, setting: Setting) -> StagePlan:
    policy, value, frozen = _ppo_models(config, sources, setting)
    trained = [policy] if value is None else [policy, value]
    logits_copies = _copies_of_logits(config)
    tokens = config.ppo.tokens_per_microbatch
    if tokens == "auto":
        cap = COPIES_OF_WHOLE_DISTRIBUTIONS if logits_copies > COPIES_OF_FILTERED_LOGITS else LOGITS_COPIES
        tokens = auto_tokens([m.shape for m in trained], frozen, machine, setting, cap)
    prompt = min(config.data.max_prompt_length, max(1, policy.shape.positions - config.rollout.max_new_tokens))
    batch = _ppo_batch(config, prompt, tokens, logits_copies, setting)
    models = [*trained, *frozen]
    rows = -(-config.ppo.rollout_batch_size // setting.processes)
    live = min(rows, config.rollout.max_live_rows or rows)
    length = prompt + config.rollout.max_new_tokens
    static = _static(models, trained, config, setting)
    # Of a divided policy each process samples from a whole copy, unless the config says otherwise.
    copies = config.rollout.decoder != "sharded"
    rollout = sampling_bytes(replace(policy, whole=True) if copies else policy, live, length, setting)
    scoring = max((forward_bytes(m, batch, setting) for m in models), key=lambda parts: sum(parts.values()))
    phases = [
        load(models, setting, sampler=policy if copies else None),
        Phase("rollout", join(_without(static, config, "rollout"), rollout)),
        Phase("scoring", join(_without(static, config, "scoring"), scoring)),
        *training(trained, batch, setting, frozen=frozen, static=_without(static, config, "update")),
        save(models, setting, moments=sum(moment_bytes(m, setting) for m in trained)),
    ]
    return StagePlan("ppo", models, phases, batch, tokens, setting)


def _ppo_models(config: PPOConfig, sources: Sources, setting: Setting) -> tuple[Held, Held | None, list[Held]]:
    """The policy, the value model if it is a model of its own, and the frozen models."""
    precision, lora, keep_whole = precision_of(setting), config.policy.lora, config.distributed.keep_whole
    source = sources.policy(config)
    head = config.value_model.init == "shared" and config.ppo.has_value_model
    policy = Held(
        shape_of(
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
        shape = shape_of(
            "reference policy", sources.ref_policy(config), is_classifier=False, precision=precision, frozen=None
        )
        frozen.append(Held(shape, "rounded", whole="ref_policy" in keep_whole))
    rewards = [(n, reward) for n, reward in enumerate(config.rewards) if isinstance(reward, ModelReward)]
    for number, reward in rewards:
        key = f"rewards[{number}].path"
        shape = shape_of(
            "reward model" if len(rewards) == 1 else f"reward model {number + 1}",
            sources.reward_model(config, reward, key),
            is_classifier=True,
            precision=precision,
            frozen=None,
            key=key,
        )
        shares = setting.divided == 1 and sources.shares_backbone(config, reward)
        frozen.append(Held(shape, "rounded", shares, whole="rewards" in keep_whole))
    value = None
    if config.ppo.has_value_model and not head:
        from_reward = (
            config.value_model.init in ("auto", "reward_model") and rewards and config.value_model.path is None
        )
        value_lora = config.value_model.lora
        value_source = sources.reward_model(config, rewards[0][1], "rewards[0].path") if from_reward else source
        shape = shape_of(
            "value model",
            value_source,
            is_classifier=True,
            precision=precision,
            lora=value_lora,
            frozen=config.value_model.freeze,
            key="value_model",
        )
        may_share = lora is not None and value_lora is not None and lora.quantize == value_lora.quantize
        may_share = may_share and setting.divided == 1
        shares = may_share and (not from_reward or sources.shares_backbone(config, rewards[0][1]))
        value = Held(shape, "exact" if value_lora is not None else "float32", shares, "value_model" in keep_whole)
    return policy, value, frozen


def _ppo_batch(config: PPOConfig, prompt: int, tokens: int, copies: float, setting: Setting) -> Batch:
    """The microbatches of prompts and responses that all have the maximum length; equal prompts count once."""
    response = config.rollout.max_new_tokens
    rows = -(-config.ppo.minibatch_size // setting.processes)
    at_once = min(rows, config.ppo.microbatch_size or rows)
    together = min(config.rollout.samples_per_prompt, at_once)
    total = -(-at_once // together) * prompt + at_once * response
    size = min(max(tokens, prompt + response), total)
    is_plain = copies == Batch.logits_copies
    return Batch(size, round(size * at_once * response / total), -(-rows * total // (at_once * size)), copies, is_plain)


def _copies_of_logits(config: PPOConfig) -> float:
    rollout = config.rollout
    full_kl = config.ppo.kl_in == "loss" and config.ppo.kl_estimator_used == "full"
    if config.ppo.entropy_coef != 0 or full_kl:
        return COPIES_OF_WHOLE_DISTRIBUTIONS
    filters = (rollout.top_k, rollout.top_p, rollout.min_p, rollout.no_repeat_ngram_size)
    if any(value is not None for value in filters) or rollout.min_new_tokens:
        return COPIES_OF_FILTERED_LOGITS
    return Batch.logits_copies


def _static(models: list[Held], trained: list[Held], config: PPOConfig, setting: Setting) -> dict[str, float]:
    on_cpu = setting.device == "cpu"
    average = config.ppo.ema_decay is not None and on_cpu
    is_copied = models[0].among(setting) > 1 and config.rollout.decoder != "sharded"
    moved = [model for model in models if model not in trained] if "frozen" in config.offload else []
    return join(
        libraries(setting),
        {
            "weights": sum(weight_bytes(model, setting) for model in models if model not in moved),
            "frozen models": sum(weight_bytes(model, setting) for model in moved),
            "rollout copy": models[0].shape.weights * float(setting.number) if is_copied else 0.0,
            "optimizer": sum(moment_bytes(model, setting) for model in trained),
            "moving average": 4.0 * models[0].shape.trained if average else 0.0,
            # Measured: after a pass in bfloat16 on a CPU a copy of the weights stays with each model.
            "16-bit copies": sum(2 * m.shape.counts.linear for m in models[1:]) if on_cpu and setting.half else 0.0,
        },
    )


def _without(static: dict[str, float], config: PPOConfig, phase: str) -> dict[str, float]:
    """What stays on the GPU in a phase: `offload` moves the rest to the CPU."""
    away = set()
    if "optimizer" in config.offload and phase != "update":
        away.add("optimizer")
    if phase != "scoring":
        away.add("frozen models")  # 0 unless they are moved
    return {name: 0.0 if name in away else size for name, size in static.items()}
