"""The models, the microbatches and the phases of each stage, from its config."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_cli.config.data import Data
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.rewards import ModelReward
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.models.cost import (
    COPIES_OF_WHOLE_DISTRIBUTIONS,
    LOGITS_COPIES,
    budget_within,
)
from rlhf_cli.plan.memory import (
    LIBRARIES,
    Batch,
    Held,
    Phase,
    Setting,
    communication_bytes,
    forward_bytes,
    gradient_bytes,
    join,
    moment_bytes,
    pass_bytes,
    sampling_bytes,
    weight_bytes,
)
from rlhf_cli.plan.shapes import Shape, shape_of
from rlhf_cli.plan.sources import Sources

COPIES_OF_FILTERED_LOGITS = 3.25
"""Tensors of the size of the logits if top-k and the like restrict them: filtered logits, their gradient, that of the
logits, and a mask of one byte."""


@dataclass(frozen=True)
class Machine:
    """What each process has."""

    device: str
    """cpu or cuda."""
    memory: float
    """Bytes for one process."""
    processes: int = 1
    per_node: int = 8
    """Processes of one machine, for `distributed.shard: hybrid`."""
    name: str = "this machine"


@dataclass(frozen=True)
class StagePlan:
    """The models of a stage and its phases in their order."""

    stage: str
    models: list[Held]
    phases: list[Phase]
    batch: Batch
    tokens_per_microbatch: int
    setting: Setting

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


def plan_stage(stage: str, config: Stage, sources: Sources, machine: Machine) -> StagePlan:
    """The plan of one stage. Raises ConfigError or ArtifactError if a model cannot be found or built."""
    setting = setting_of(config, machine)
    if isinstance(config, PPOConfig):
        return _ppo(config, sources, machine, setting)
    assert isinstance(config, SFTConfig | RMConfig)
    return _supervised(stage, config, sources, machine, setting)


def setting_of(config: Stage, machine: Machine) -> Setting:
    """How a process of this machine computes the stage."""
    device = machine.device if config.device == "auto" else config.device
    half = config.precision == "bfloat16" or (config.precision == "auto" and device == "cuda")
    shard = config.distributed.shard
    divided = min(machine.processes, machine.per_node) if shard == "hybrid" else machine.processes if shard else 1
    assert isinstance(config, SFTConfig | RMConfig | PPOConfig)
    return Setting(
        device=device,
        processes=machine.processes,
        divided=divided,
        half=half,
        states=getattr(config.optimizer, "precision", "float32"),
        checkpointing=config.gradient_checkpointing,
        saves=config.checkpoints.every_steps is not None or config.checkpoints.every_minutes is not None,
    )


# -------------------------------------------------------------------------------------------- SFT and RM


def _supervised(
    stage: str, config: SFTConfig | RMConfig, sources: Sources, machine: Machine, setting: Setting
) -> StagePlan:
    is_rm = isinstance(config, RMConfig)
    source = sources.rm(config) if isinstance(config, RMConfig) else sources.sft(config)
    shape = shape_of(
        "reward model" if is_rm else "model",
        source,
        is_classifier=is_rm,
        precision=_precision(setting),
        lora=config.model.lora,
        frozen=config.model.freeze,
    )
    model = Held(shape, "exact" if config.model.lora is not None else "float32")
    tokens = config.training.tokens_per_microbatch
    if tokens == "auto":
        tokens = auto_tokens([shape], [], machine, setting, LOGITS_COPIES)
    sequences = 2 if isinstance(config, RMConfig) and config.is_pairwise else 1
    batch = _rows_batch(
        config.data,
        sequences,
        config.training.minibatch_size,
        config.training.microbatch_size,
        tokens,
        setting,
        has_targets=not is_rm,
    )
    phases = [_load([model], setting), *_training([model], batch, setting), _save([model], setting)]
    if isinstance(config, RMConfig) and config.evaluation.num_normalization_samples:
        phases.append(_normalisation(config, model, sources, setting))
    return StagePlan(stage, [model], phases, batch, tokens, setting)


def _rows_batch(
    data: Data,
    sequences: int,
    minibatch: int,
    most_rows: int | None,
    tokens: int,
    setting: Setting,
    *,
    has_targets: bool,
) -> Batch:
    """The microbatches of rows of the maximum length, with every token a target. Shorter rows fill them as well."""
    longest = data.max_length * sequences
    rows = -(-minibatch // setting.processes)
    size = min(max(tokens, longest), min(rows, most_rows or rows) * longest)
    return Batch(size, size if has_targets else 0, -(-rows * longest // size))


def _normalisation(config: RMConfig, model: Held, sources: Sources, setting: Setting) -> Phase:
    """The SFT model beside the reward model, and its samples."""
    source = sources.of_stage("sft", config, "model.path") if config.model.path is None else sources.rm(config)
    shape = shape_of("SFT model", source, is_classifier=False, precision=_precision(setting), frozen=None)
    policy = Held(shape)
    rows = -(-config.evaluation.num_normalization_samples // (1 if setting.divided > 1 else setting.processes))
    length = max(config.data.max_length, config.evaluation.max_new_tokens)
    return Phase(
        "normalisation",
        join(
            _libraries(setting),
            {"weights": weight_bytes(model, setting) + weight_bytes(policy, setting)},
            sampling_bytes(policy, rows, length, setting, copies=False),
        ),
    )


# ----------------------------------------------------------------------------------------------------- PPO


def _ppo(config: PPOConfig, sources: Sources, machine: Machine, setting: Setting) -> StagePlan:
    policy, value, frozen = _ppo_models(config, sources, setting)
    trained = [policy] if value is None else [policy, value]
    copies = _copies_of_logits(config)
    tokens = config.ppo.tokens_per_microbatch
    if tokens == "auto":
        cap = COPIES_OF_WHOLE_DISTRIBUTIONS if copies > COPIES_OF_FILTERED_LOGITS else LOGITS_COPIES
        tokens = auto_tokens([m.shape for m in trained], frozen, machine, setting, cap)
    prompt = min(config.data.max_prompt_length, max(1, policy.shape.positions - config.rollout.max_new_tokens))
    batch = _ppo_batch(config, prompt, tokens, copies, setting)
    models = [*trained, *frozen]
    rows = -(-config.ppo.rollout_batch_size // setting.processes)
    live = min(rows, config.rollout.max_live_rows or rows)
    length = prompt + config.rollout.max_new_tokens
    static = _static(models, trained, config, setting)
    rollout = sampling_bytes(policy, live, length, setting)
    scoring = max((forward_bytes(m, batch, setting) for m in models), key=lambda parts: sum(parts.values()))
    phases = [
        _load(models, setting),
        Phase("rollout", join(_without(static, config, "rollout"), rollout)),
        Phase("scoring", join(_without(static, config, "scoring"), scoring)),
        *_training(trained, batch, setting, frozen=frozen, static=_without(static, config, "update")),
        _save(models, setting, moments=sum(moment_bytes(m.shape, setting) for m in trained)),
    ]
    return StagePlan("ppo", models, phases, batch, tokens, setting)


def _ppo_models(config: PPOConfig, sources: Sources, setting: Setting) -> tuple[Held, Held | None, list[Held]]:
    """The policy, the value model if it is a model of its own, and the frozen models."""
    precision, lora = _precision(setting), config.policy.lora
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
    )
    frozen: list[Held] = []
    if lora is None or config.ref_policy is not None:
        shape = shape_of(
            "reference policy", sources.ref_policy(config), is_classifier=False, precision=precision, frozen=None
        )
        frozen.append(Held(shape, "rounded"))
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
        frozen.append(Held(shape, "rounded", shares=sources.shares_backbone(config, reward)))
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
        shares = may_share and (not from_reward or sources.shares_backbone(config, rewards[0][1]))
        value = Held(shape, "exact" if value_lora is not None else "float32", shares=shares)
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
    return join(
        _libraries(setting),
        {
            "weights": sum(weight_bytes(model, setting) for model in models),
            "optimizer": sum(moment_bytes(model.shape, setting) for model in trained),
            "moving average": 4.0 * models[0].shape.trained if average else 0.0,
            # Measured: after a pass in bfloat16 on a CPU a copy of the weights stays with each model.
            "16-bit copies": sum(2 * m.shape.counts.linear for m in models[1:]) if on_cpu and setting.half else 0.0,
        },
    )


def _without(static: dict[str, float], config: PPOConfig, phase: str) -> dict[str, float]:
    """What stays on the GPU in a phase; `offload` moves the optimizer to the CPU outside of updates."""
    offload = getattr(config, "offload", [])
    return {
        name: 0.0 if name == "optimizer" and "optimizer" in offload and phase != "update" else size
        for name, size in static.items()
    }


# ------------------------------------------------------------------------------------------- common phases


def _precision(setting: Setting) -> str:
    return "bfloat16" if setting.half else "float32"


def _libraries(setting: Setting) -> dict[str, float]:
    return {"libraries": LIBRARIES[_precision(setting)]} if setting.device == "cpu" else {}


def _load(models: list[Held], setting: Setting) -> Phase:
    """Each model is read in float32 beside those before it. On a GPU they are read on the host."""
    held, most = 0.0, 0.0
    for model in models:
        if not model.shares:
            reads = model.shape.counts.base * 4 / setting.divided if setting.device == "cpu" else 0.0
            most = max(most, held + max(reads, weight_bytes(model, setting)))
        held += weight_bytes(model, setting)
    return Phase("load", join(_libraries(setting), {"weights": max(most, held)}))


def _training(
    trained: list[Held],
    batch: Batch,
    setting: Setting,
    *,
    frozen: list[Held] | None = None,
    static: dict[str, float] | None = None,
) -> list[Phase]:
    """The passes of an update, the sum of the gradients over the processes, and a checkpoint."""
    static = static or join(
        _libraries(setting),
        {
            "weights": sum(weight_bytes(m, setting) for m in [*trained, *(frozen or [])]),
            "optimizer": sum(moment_bytes(m.shape, setting) for m in trained),
        },
    )
    gradients = [gradient_bytes(model.shape, setting) for model in trained]
    moments = []
    for number, model in enumerate(trained):
        # In a later microbatch all gradients exist. In a single one only those of the models before this one do.
        before = sum(gradients) if batch.num > 1 else sum(gradients[:number])
        moments.append(join(static, {"gradients": before}, pass_bytes(model, batch, setting)))
    moments.append(join(static, {"gradients": sum(gradients)}))
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    phases = [Phase("update", fullest)]
    flat = max(communication_bytes(model.shape, setting) for model in trained)
    if flat:
        phases.append(Phase("sum of gradients", join(static, {"gradients": sum(gradients), "communication": flat})))
    if setting.saves and setting.device == "cpu":
        copy = sum(gradient_bytes(model.shape, setting) + moment_bytes(model.shape, setting) for model in trained)
        phases.append(Phase("checkpoint", join(fullest, {"checkpoint": copy})))
    return phases


def _save(models: list[Held], setting: Setting, *, moments: float = 0.0) -> Phase:
    """The weights in float32 for the file; of a model with adapters, merged ones."""
    held = sum(weight_bytes(model, setting) for model in models)
    if setting.device != "cpu":
        return Phase("save", join({"weights": held, "optimizer": moments}))
    copy = max(
        model.shape.counts.base * 4 * (2 if model.shape.lora is not None else 1)
        for model in models
        if model.shape.trained
    )
    return Phase("save", join(_libraries(setting), {"weights": held, "optimizer": moments, "file": copy}))


def auto_tokens(
    trained: list[Shape], frozen: list[Held], machine: Machine, setting: Setting, logits_copies: int
) -> int:
    """What `tokens_per_microbatch: auto` chooses (`rlhf_cli.models.cost.token_budget`)."""
    static = sum(weight_bytes(model, setting) for model in frozen)
    for shape in trained:
        held = Held(shape, "exact" if shape.lora is not None else "float32")
        static += weight_bytes(held, setting) + gradient_bytes(shape, setting) + moment_bytes(shape, setting)
    a_token = max(_token_bytes(shape, setting) for shape in trained)
    vocabulary = max((shape.vocabulary for shape in trained if shape.has_head), default=0)
    return budget_within(machine.memory, static, a_token + logits_copies * 4 * vocabulary, setting.device)


def _token_bytes(shape: Shape, setting: Setting) -> float:
    kept = shape.counts.kept
    if setting.checkpointing:
        kept = kept / shape.layers + 4 * shape.layers * shape.hidden
    return max(kept, 16 * shape.hidden)
