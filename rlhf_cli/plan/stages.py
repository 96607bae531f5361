"""The models of a stage, its microbatches, and what each of its phases has in memory, from its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from rlhf_cli.config.by_stage import AnyConfig
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.data.batches import num_parts, part_tokens
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.passes import require_bfloat16
from rlhf_cli.plan.budget import BY_TOKENS, auto_tokens, machine_of_run
from rlhf_cli.plan.memory import Batch, Held, Machine, Phase, Setting, fullest, join
from rlhf_cli.plan.origins import ModelOrigins, settled_precision
from rlhf_cli.processes.distributed import World
from rlhf_cli.processes.microbatches import COPIES_BYTES
from rlhf_cli.processes.threads import num_threads

PAIR = 1.5
"""Length of a preference pair in maximum lengths: both answers follow one prompt, which is computed once and is taken
to be half of each sequence."""
FULL = 2
"""Microbatches of a step for `auto`: with more than one, all gradients exist beside the activations."""
COPIES_OF_WHOLE_DISTRIBUTIONS = 8.0
"""Tensors of the size of the logits if an entropy or a KL over the whole vocabulary has a gradient, too."""
COPIES_OF_FILTERED_LOGITS = 3.25
"""Tensors of the size of the logits if top-k and the like restrict them: filtered logits, their gradient, that of the
logits, and a mask of one byte."""


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
        return max(self.phases, key=lambda phase: phase.total)


def plan_stage(stage: str, config: AnyConfig, origins: ModelOrigins, machine: Machine) -> StagePlan:
    """The plan of one stage. Raises ConfigError or ArtifactError if a model cannot be found or built."""
    if machine.device == "cpu":
        config = config.model_copy(update={"precision": settled_precision(config, origins)})
    setting, training = setting_of(config, machine), config.batches[1]
    if setting.states == "bfloat16":
        require_bfloat16(setting.device, is_half=setting.half)
    models = models_of(config, origins, setting)
    tokens = planned_tokens(config, models, machine)
    batch = _batch(config, models, training.minibatch_size, tokens)
    scored = _batch(config, models, config.ppo.rollout_batch_size, tokens) if isinstance(config, PPOConfig) else batch
    phases = [
        *_sampling(config, models, origins),
        *_passes(config, models, batch, scored),
        Phase("save", join(_at_rest(config, models, "save"), {"file": max(m.file_bytes for m in _trained(models))})),
    ]
    phases = [Phase(phase.name, join(phase.parts, _other_threads(phase, models))) for phase in phases]
    return StagePlan(stage, models, phases, batch, tokens, setting)


def _other_threads(phase: Phase, models: list[Held]) -> dict[str, float]:
    """What a phase needs beyond one pass, where `threads` passes run at the same time (processes/threads.py).

    `tokens_per_microbatch: auto` does not count it: the result must not depend on the number of threads.
    """
    setting, trains = models[0].setting, phase.name in ("update", "checkpoint")
    if setting.threads == 1 or setting.device != "cpu" or setting.sharded > 1 or phase.name not in BY_TOKENS:
        return {}
    gradients = [model.gradient_bytes for model in _trained(models)] if trains else [0.0]
    most = int(COPIES_BYTES // max(1.0, sum(gradients)))
    at_once = min(setting.threads, most)
    if at_once <= 1:
        return {}
    return {"other threads": (at_once - 1) * phase.of_pass + min(setting.threads + 1, most) * max(gradients)}


def microbatch_tokens(config: AnyConfig, models: Mapping[str, PreTrainedModel], world: World) -> int:
    """Maximum tokens per microbatch of a run: as configured, or what `auto` chooses.

    `models` are by their names in the plan, each on the device and as `shape_of_loaded` wants it.
    """
    machine, origins = machine_of_run(world.device, world.size), ModelOrigins({}, models, config.precision)
    return planned_tokens(config, models_of(config, origins, setting_of(config, machine)), machine)


def planned_tokens(config: AnyConfig, models: list[Held], machine: Machine) -> int:
    """The `tokens_per_microbatch` of a stage. `auto` is computed."""
    _, training = config.batches
    if training.tokens_per_microbatch != "auto":
        return training.tokens_per_microbatch
    mixed = replace(_batch(config, models, training.minibatch_size, 1), num=FULL, later=None)

    def phases(tokens: int) -> list[Phase]:
        return _passes(config, models, mixed.of(tokens), mixed.of(tokens))

    return auto_tokens(phases, machine, models[0].setting)


def setting_of(config: AnyConfig, machine: Machine) -> Setting:
    """How a process of this machine computes the stage."""
    device = machine.device if config.device == "auto" else config.device
    if (device == "cuda") != (machine.device == "cuda"):
        raise ConfigError(
            f"device: {device}, but the plan is for {machine.name}. Set device: auto, or plan for another machine"
        )
    is_auto = config.precision == "auto"
    threads = config.threads or max(1, num_threads() // machine.processes)
    shard = config.distributed.shard
    if isinstance(config, PPOConfig):
        samples = config.rollout.decoder != "sharded"
    else:
        samples = isinstance(config, RMConfig) and config.evaluation.num_normalization_samples > 0 and not shard
    return Setting(
        device=device,
        processes=machine.processes,
        sharded=min(machine.processes, machine.per_node) if shard == "hybrid" else machine.processes if shard else 1,
        offloads=config.distributed.offload and device == "cuda",
        half=device == "cuda" and machine.auto_is_half if is_auto else config.precision != "float32",
        states=config.optimizer.precision,
        checkpointing=config.gradient_checkpointing,
        saves=config.checkpoints.every_steps is not None or config.checkpoints.every_minutes is not None,
        threads=threads if device == "cpu" else 1,
        samples=samples,
        keep_whole=tuple(config.distributed.keep_whole) if isinstance(config, PPOConfig) else (),
    )


def models_of(config: AnyConfig, origins: ModelOrigins, setting: Setting) -> list[Held]:
    """The models of a stage, the trained ones first, and of these the policy. `origins` gives their shapes."""
    start, (key, section) = origins.start(config), config.trained
    if not isinstance(config, PPOConfig):
        is_rm = isinstance(config, RMConfig)
        return [origins.held("reward model" if is_rm else "model", start, setting, is_rm, key, section)]

    def shares(reward: str | None) -> bool:
        """Whether a reward model, or (None) what starts as the policy, may share the policy's weights. Nothing shares
        in a sharded run."""
        return setting.sharded == 1 and (reward is None or origins.shares_backbone(config, reward))

    lora, value = config.policy.lora, config.value_model
    trained, frozen = [origins.held("policy", start, setting, False, key, section)], []
    if lora is None or config.ref_policy is not None:
        origin = start if config.ref_policy is None else origins.given(config.ref_policy, config, "ref_policy.path")
        frozen.append(origins.held("reference policy", origin, setting, False, "ref_policy"))
    for key, reward in config.reward_models.items():
        name, origin = config.name_of_reward(key), origins.reward_model(config, reward, key)
        frozen.append(origins.held(name, origin, setting, True, key, shares=shares(key)))
    if config.ppo.has_value_model and value.init != "shared":
        first = next(iter(config.reward_models), None) if value.init in ("auto", "reward_model") else None
        is_alike = lora is not None and value.lora is not None and lora.quantize == value.lora.quantize
        shared, origin = value.path is None and is_alike and shares(first), origins.value_model(config)
        trained.append(origins.held("value model", origin, setting, True, "value_model", value, shares=shared))
    return [*trained, *frozen]


def _batch(config: AnyConfig, models: list[Held], num_rows: int, tokens: int) -> Batch:
    """The microbatches of `num_rows` rows of the maximum length over all processes. Shorter rows fill them as well.

    A microbatch takes at most `tokens` tokens, but at least one row. In PPO equal prompts count once. In SFT every
    token is a target, in PPO every token of a response.
    """
    rows = -(-num_rows // models[0].setting.processes)
    at_once = min(rows, config.batches[1].microbatch_size or rows)
    if isinstance(config, PPOConfig):
        prompt, response = _longest_prompt(config, models), config.rollout.max_new_tokens
        together = min(config.rollout.samples_per_prompt, at_once)
        longest, targets = prompt + response, at_once * response
        total, copies = -(-at_once // together) * prompt + targets, _copies_of_logits(config)
    else:
        longest = round(config.data.max_length * (PAIR if isinstance(config, RMConfig) and config.is_pairwise else 1.0))
        total, copies = at_once * longest, Batch.logits_copies
        targets = total if isinstance(config, SFTConfig) else 0
    size = min(max(tokens, longest), total)
    first = models[0]
    if first.setting.device == "cpu" and first.shape.is_packed and at_once == rows:
        # The largest of the equal parts for the threads, of this minibatch or a smaller one.
        parts = 1 if isinstance(config, PPOConfig) and any(model.name == "value model" for model in models) else 2
        row, fewest = total / rows, part_tokens(first.shape.base, is_half=first.setting.half)
        size = min(size, round(row * max(-(-n // num_parts(n * row, parts, fewest)) for n in range(1, rows + 1))))
    num = -(-rows * total // (at_once * size))
    # The first microbatch may be almost one row short of its limit; that row goes into a later one.
    later = min(size, round(rows * total / at_once) - size + longest)
    return Batch(size, round(size * targets / total), num, later, copies)


def _longest_prompt(config: PPOConfig, models: list[Held]) -> int:
    most = models[0].shape.positions - config.rollout.max_new_tokens
    return min(config.data.max_prompt_length, max(1, most))


def _copies_of_logits(config: PPOConfig) -> float:
    rollout = config.rollout
    if config.ppo.entropy_coef != 0 or config.ppo.has_full_kl_loss:
        return COPIES_OF_WHOLE_DISTRIBUTIONS
    filters = (rollout.top_k, rollout.top_p, rollout.min_p, rollout.no_repeat_ngram_size)
    if any(value is not None for value in filters) or rollout.min_new_tokens:
        return COPIES_OF_FILTERED_LOGITS
    return Batch.logits_copies


def _at_rest(config: AnyConfig, models: list[Held], phase: str) -> dict[str, float]:
    """What a process holds between the passes of a phase, without what `offload` moves to the CPU for it."""
    policy, trained, on_cpu = models[0], _trained(models), models[0].setting.device == "cpu"
    weights, moments = sum(model.weight_bytes for model in models), sum(model.moment_bytes for model in trained)
    if not isinstance(config, PPOConfig):
        # SFT and RM free the moments before they save.
        return join(policy.setting.libraries, {"weights": weights, "optimizer": moments if phase != "save" else 0.0})
    offload = [] if on_cpu else config.offload
    moved = [model for model in models if not model.is_trained] if "frozen" in offload else []
    needs_moved = phase in ("scoring", "save") or (phase == "update" and config.ppo.has_full_kl_loss)
    needs_moments = phase in ("update", "save") or "optimizer" not in offload
    is_copied = policy.among > 1 and config.rollout.decoder != "sharded"
    parts = {
        "weights": weights - sum(model.weight_bytes for model in moved),
        # A sharded model is never on the GPU whole.
        "frozen models": sum(model.weight_bytes for model in moved if model.among == 1) if needs_moved else 0.0,
        "rollout copy": policy.shape.weights * float(policy.setting.number) if is_copied else 0.0,
        "optimizer": moments if needs_moments else 0.0,
        "moving average": 4.0 * policy.shape.trained / policy.among * (on_cpu and config.ppo.ema_decay is not None),
    }
    return join(policy.setting.libraries, parts)


def _trained(models: Sequence[Held]) -> list[Held]:
    return [model for model in models if model.is_trained]


def _sampling(config: AnyConfig, models: list[Held], origins: ModelOrigins) -> list[Phase]:
    """The rollout of PPO, and the samples of the SFT model that RM draws before it loads the reward model.

    If the policy of PPO is sharded, each process samples from a whole copy, unless the config says otherwise.
    """
    setting = models[0].setting
    if isinstance(config, PPOConfig):
        policy, copies = models[0], config.rollout.decoder != "sharded"
        sampler = replace(policy, whole=True) if copies else policy
        length = _longest_prompt(config, models) + config.rollout.max_new_tokens
        sampling = sampler.in_sampling(live_rows(config, setting.processes), length)
        if policy.among > 1 and setting.half and setting.device != "cpu":
            sampling.pop("rollout copy", None)  # the copy of a sharded policy is in 16 bits already (`_at_rest`)
        rollout = join(_at_rest(config, models, "rollout"), sampling)
        if copies and policy.among > 1:
            # Before the first rollout the copy is in float32, and compared with the policy. No optimizer exists yet.
            copy = {"weights": sum(m.weight_bytes for m in models), "rollout copy": 4.0 * policy.shape.weights}
            compared = join(setting.libraries, copy, fullest(model.copied_weights for model in models))
            rollout = fullest([rollout, compared])
        return [Phase("rollout", rollout)]
    if not isinstance(config, RMConfig) or not config.evaluation.num_normalization_samples:
        return []
    model = origins.held("SFT model", origins.start(config), setting, False, "model")
    length = max(config.data.max_length, config.evaluation.max_new_tokens)
    sampling = model.in_sampling(live_rows(config, setting.processes), length)
    return [Phase("normalisation", join(setting.libraries, {"weights": model.weight_bytes}, sampling))]


def live_rows(config: RMConfig | PPOConfig, processes: int) -> int:
    """Responses that a process samples at the same time."""
    if isinstance(config, PPOConfig):
        num, most = config.ppo.rollout_batch_size, config.rollout.max_live_rows
    else:
        num, most = config.evaluation.num_normalization_samples, config.evaluation.max_live_rows
    rows = -(-num // processes)
    return min(rows, most or rows)


def _passes(config: AnyConfig, models: list[Held], batch: Batch, scored: Batch) -> list[Phase]:
    """In PPO scoring, of microbatches like `scored`; then the update, of those like `batch`."""
    update = training_phases(_trained(models), batch, _at_rest(config, models, "update"))
    if not isinstance(config, PPOConfig):
        return update
    scoring = fullest(model.in_forward(scored) for model in models)
    return [Phase("scoring", join(_at_rest(config, models, "scoring"), scoring)), *update]


def training_phases(trained: Sequence[Held], batch: Batch, static: dict[str, float]) -> list[Phase]:
    """The passes and the step of an update, the sum of the gradients over the processes, and a checkpoint."""
    setting = trained[0].setting
    gradients = [model.gradient_bytes for model in trained]
    moments = []
    for number, model in enumerate(trained):
        # In a later microbatch all gradients exist; in the first one only the gradients of the models before this one.
        moments.append(join({"gradients": sum(gradients[:number])}, model.in_training(batch)))
        if batch.num > 1:
            moments.append(join({"gradients": sum(gradients)}, model.in_training(batch.after_first)))
        moments.append({"gradients": sum(gradients), "step": model.step_bytes})
    phases = [Phase("update", join(static, fullest(moments)))]
    if sums := max(model.communication_bytes for model in trained):
        phases.append(Phase("sum of gradients", join(static, {"gradients": sum(gradients), "communication": sums})))
    if setting.saves and setting.device == "cpu":
        copy = sum(model.gradient_bytes + model.moment_bytes for model in trained)
        phases.append(Phase("checkpoint", join(phases[0].parts, {"checkpoint": copy})))
    return phases
