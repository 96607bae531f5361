"""The models, the microbatches and the phases of SFT and RM, from their configs; and the plan of any stage."""

from __future__ import annotations

from rlhf_cli.config.data import Data
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import Stage
from rlhf_cli.plan.budget import auto_tokens
from rlhf_cli.plan.memory import (
    Batch,
    Held,
    Phase,
    Setting,
    forward_bytes,
    join,
    later_tokens,
    sampling_bytes,
    weight_bytes,
)
from rlhf_cli.plan.parts import Machine, StagePlan, at_rest, libraries, load, precision_of, save, training
from rlhf_cli.plan.ppo import FULL, plan_ppo, ppo_models, ppo_tokens
from rlhf_cli.plan.sources import Sources

PAIR = 1.5
"""Length of a preference pair in maximum lengths: both answers follow one prompt, which is computed once and is taken
to be half of each sequence."""


def plan_stage(stage: str, config: Stage, sources: Sources, machine: Machine) -> StagePlan:
    """The plan of one stage. Raises ConfigError or ArtifactError if a model cannot be found or built."""
    setting = setting_of(config, machine)
    if isinstance(config, PPOConfig):
        return plan_ppo(config, sources, machine, setting)
    assert isinstance(config, SFTConfig | RMConfig)
    return _supervised(stage, config, sources, machine, setting)


def planned_tokens(config: Stage, sources: Sources, machine: Machine) -> int:
    """The `tokens_per_microbatch` of a stage. `auto` is computed, and nothing else of the plan is."""
    setting = setting_of(config, machine)
    if isinstance(config, PPOConfig):
        return ppo_tokens(config, ppo_models(config, sources, setting), machine, setting)
    assert isinstance(config, SFTConfig | RMConfig)
    return _tokens(config, _model(config, sources, setting), machine, setting)


def setting_of(config: Stage, machine: Machine) -> Setting:
    """How a process of this machine computes the stage."""
    device = machine.device if config.device == "auto" else config.device
    is_auto = config.precision == "auto"
    half = device == "cuda" and machine.auto_is_half if is_auto else config.precision != "float32"
    shard = config.distributed.shard
    sharded = min(machine.processes, machine.per_node) if shard == "hybrid" else machine.processes if shard else 1
    assert isinstance(config, SFTConfig | RMConfig | PPOConfig)
    return Setting(
        device=device,
        processes=machine.processes,
        sharded=sharded,
        offloads=config.distributed.offload and device == "cuda",
        half=half,
        states=config.optimizer.precision,
        checkpointing=config.gradient_checkpointing,
        saves=config.checkpoints.every_steps is not None or config.checkpoints.every_minutes is not None,
    )


# -------------------------------------------------------------------------------------------- SFT and RM


def _supervised(
    stage: str, config: SFTConfig | RMConfig, sources: Sources, machine: Machine, setting: Setting
) -> StagePlan:
    model = _model(config, sources, setting)
    tokens = _tokens(config, model, machine, setting)
    sequences = PAIR if isinstance(config, RMConfig) and config.is_pairwise else 1.0
    batch = _rows_batch(
        config.data,
        sequences,
        config.training.minibatch_size,
        config.training.microbatch_size,
        tokens,
        setting,
        has_targets=isinstance(config, SFTConfig),
    )
    static = at_rest([model], setting)
    phases = [
        load([model], setting),
        *training([model], batch, setting, static),
        save([model], setting, static | {"optimizer": 0.0}),  # which is freed before
        Phase("evaluation", join(static, forward_bytes(model, batch, setting))),
    ]
    if isinstance(config, RMConfig) and config.evaluation.num_normalization_samples:
        phases.insert(0, _normalisation(config, sources, setting))
    return StagePlan(stage, [model], phases, batch, tokens, setting)


def _model(config: SFTConfig | RMConfig, sources: Sources, setting: Setting) -> Held:
    """The model that the stage trains."""
    is_rm = isinstance(config, RMConfig)
    shape = sources.shape(
        "reward model" if is_rm else "model",
        sources.rm(config) if isinstance(config, RMConfig) else sources.sft(config),
        is_classifier=is_rm,
        precision=precision_of(setting),
        lora=config.model.lora,
        frozen=config.model.freeze,
    )
    return Held(shape, "exact" if config.model.lora is not None else "float32")


def _tokens(config: SFTConfig | RMConfig, model: Held, machine: Machine, setting: Setting) -> int:
    """The `tokens_per_microbatch` of the stage."""
    given = config.training.tokens_per_microbatch
    if given != "auto":
        return given
    has_targets, static = isinstance(config, SFTConfig), at_rest([model], setting)

    def phases(tokens: int) -> list[Phase]:
        return training([model], Batch(tokens, tokens if has_targets else 0, FULL), setting, static)

    return auto_tokens(phases, machine, setting)


def _rows_batch(
    data: Data,
    sequences: float,
    minibatch: int,
    most_rows: int | None,
    tokens: int,
    setting: Setting,
    *,
    has_targets: bool,
) -> Batch:
    """The microbatches of rows of the maximum length, with every token a target. Shorter rows fill them as well."""
    longest = round(data.max_length * sequences)
    rows = -(-minibatch // setting.processes)
    size = min(max(tokens, longest), min(rows, most_rows or rows) * longest)
    later = later_tokens(size, rows * longest, longest)
    return Batch(size, size if has_targets else 0, -(-rows * longest // size), later)


def _normalisation(config: RMConfig, sources: Sources, setting: Setting) -> Phase:
    """The SFT model and its samples, before the reward model is loaded."""
    source = sources.of_stage("sft", config, "model.path") if config.model.path is None else sources.rm(config)
    shape = sources.shape("SFT model", source, is_classifier=False, precision=precision_of(setting), frozen=None)
    policy, evaluation = Held(shape, "rounded"), config.evaluation
    rows = -(-evaluation.num_normalization_samples // setting.processes)
    live = min(rows, evaluation.max_live_rows or rows)
    length = max(config.data.max_length, evaluation.max_new_tokens)
    weights = {"weights": weight_bytes(policy, setting)}
    return Phase("normalisation", join(libraries(setting), weights, sampling_bytes(policy, live, length, setting)))
