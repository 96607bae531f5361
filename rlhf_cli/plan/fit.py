"""The plan of a config file or of a folder of stages: what each stage needs, whether that fits, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_cli.config.by_stage import load_stage_config, stage_of
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import RMConfig, SFTConfig
from rlhf_cli.config.stage import STAGES, Stage
from rlhf_cli.errors import ConfigError, UserError
from rlhf_cli.models.cost import total_memory
from rlhf_cli.plan.adapter_errors import require_adapters
from rlhf_cli.plan.memory import Machine
from rlhf_cli.plan.origins import ModelOrigins
from rlhf_cli.plan.run_length import Length, length_of
from rlhf_cli.plan.stages import StagePlan, plan_stage


@dataclass(frozen=True)
class PlannedStage:
    """A stage's plan, and what to change if it does not fit."""

    plan: StagePlan
    length: Length
    fits: bool
    changes: list[Change]
    """Single changes; empty if the stage fits."""
    enough: Change | None
    """Changes that make it fit."""


def plan_of(
    path: Path,
    overrides: Sequence[str],
    stage: str | None,
    machine: Machine,
    room: float,
    tokens_per_s: float | None = None,
    num_rows: int | None = None,
) -> list[PlannedStage]:
    """The plan of each stage of a folder, or of the one stage of a file.

    `room`: bytes that a process may use. A folder's stages get their models from each other. So does a single file
    from the files beside it. `tokens_per_s`, `num_rows`: see `length_of`.
    """
    if path.is_dir():
        files = {name: path / f"{name}.yaml" for name in STAGES if (path / f"{name}.yaml").is_file()}
        if not files:
            raise ConfigError(f"{path}: has no sft.yaml, rm.yaml or ppo.yaml. Give a folder that has at least one")
        wanted = list(files)
    else:
        one = stage_of(path, stage)
        files = {one: path}
        earlier = STAGES[: STAGES.index(one)]
        files |= {name: path.parent / f"{name}.yaml" for name in earlier if (path.parent / f"{name}.yaml").is_file()}
        wanted = [one]
    chosen = {name: overrides_for(name, overrides, wanted) for name in files}
    configs = {name: load_stage_config(name, file, chosen[name]) for name, file in files.items()}
    if num_rows is not None and wanted == ["ppo"]:
        raise ConfigError("--rows: is for SFT and RM; the length of PPO is ppo.num_iterations. Remove it")
    lengths = {name: length_of(name, configs, tokens_per_s, num_rows) for name in wanted}
    return [_planned(name, files[name], chosen[name], configs, machine, room, lengths[name]) for name in wanted]


def overrides_for(stage: str, overrides: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The overrides of a stage, without their `STAGE:` prefix. One without a prefix is for all stages to be planned."""
    chosen = []
    for text in overrides:
        prefix, colon, rest = text.partition(":")
        if colon and prefix in STAGES:
            chosen += [rest] if prefix == stage else []
        elif stage in wanted:
            chosen.append(text)
    return chosen


def _planned(
    stage: str,
    file: Path,
    overrides: list[str],
    configs: dict[str, Stage],
    machine: Machine,
    room: float,
    length: Length,
) -> PlannedStage:
    def replan(more: list[str]) -> StagePlan:
        config = load_stage_config(stage, file, [*overrides, *more])
        return plan_stage(stage, config, ModelOrigins({**configs, stage: config}), machine)

    config = configs[stage]
    require_adapters(config, {name: one for name, one in configs.items() if name != stage}, here=False)
    plan = plan_stage(stage, config, ModelOrigins(configs), machine)
    fits = plan.peak.total <= room
    changes = [] if fits else single_changes(config, plan, machine, replan)
    enough = None if fits else enough_changes(changes, room, replan)
    return PlannedStage(plan, length, fits, changes, enough)


def machine_of(gpus: int | None, gpu_memory: float | None, processes: int | None, per_node: int) -> Machine:
    """The machine that the options describe, or this one."""
    if gpus is not None or gpu_memory is not None:
        if gpu_memory is None and not torch.cuda.is_available():
            raise ConfigError("--gpus: this machine has no GPU to take the memory from. Add --gpu-memory, such as 80GB")
        memory = gpu_memory if gpu_memory is not None else float(total_memory(torch.device("cuda")))
        return Machine("cuda", memory, gpus or 1, per_node, f"{gpus or 1} x {memory / 1e9:.0f} GB GPU")
    if torch.cuda.is_available():
        count = processes or 1
        return Machine("cuda", float(total_memory(torch.device("cuda"))), count, per_node, "this machine's GPU")
    count, total = processes or 1, float(total_memory(torch.device("cpu")))
    name = f"this machine's {total / 1e9:.1f} GB" + (f" for {count} processes" if count > 1 else "")
    return Machine("cpu", total / count, count, per_node, name)


# ------------------------------------------------------ what makes a stage need less memory, the cheapest change first


Plan = Callable[[list[str]], StagePlan]
"""The plan of the stage with further overrides. Raises UserError if the config refuses them."""


@dataclass(frozen=True)
class Change:
    """Overrides of the config, and the plan with them."""

    overrides: list[str]
    costs: str
    """What they cost."""
    plan: StagePlan
    """With them. If the config says `auto`, the microbatches take the memory that they free."""
    peak: float
    """Bytes at the tokens per microbatch of the plan before them: what they save."""


def single_changes(config: Stage, plan: StagePlan, machine: Machine, replan: Plan) -> list[Change]:
    """The changes that lower the peak by at least a hundredth at the same microbatches, each by itself."""
    changes = []
    same_tokens = f"{_section(config)}.tokens_per_microbatch={plan.tokens_per_microbatch}"
    for overrides, costs in _candidates(config, plan, machine):
        try:
            changed = replan(overrides)
            is_refilled = changed.tokens_per_microbatch > plan.tokens_per_microbatch
            peak = (replan([*overrides, same_tokens]) if is_refilled else changed).peak.total
        except UserError:
            continue  # the config refuses it beside what it has
        if peak < 0.99 * plan.peak.total:
            changes.append(Change(overrides, costs, changed, peak))
    return changes


def enough_changes(changes: list[Change], room: float, replan: Plan) -> Change | None:
    """The first of the changes that fits into `room` bytes by itself, or else the first few together.

    A change that does not lower the peak beside the earlier ones is left out. None if all together do not fit.
    """
    alone = next((change for change in changes if change.plan.peak.total <= room), None)
    chosen: list[str] = []
    best: StagePlan | None = None
    for change in changes:
        keys = {text.partition("=")[0] for text in change.overrides}
        beside = _beside([text for text in chosen if text.partition("=")[0] not in keys], change.overrides, replan)
        if beside is None or (best is not None and beside[1].peak.total >= 0.99 * best.peak.total):
            continue
        chosen, best = beside
        if best.peak.total <= room:
            break
    if best is None or best.peak.total > room:
        return alone
    if alone is not None and (set(alone.overrides) <= set(chosen) or changes.index(alone) <= len(chosen)):
        return alone
    return Change(chosen, "", best, best.peak.total)


def _beside(earlier: list[str], overrides: list[str], replan: Plan) -> tuple[list[str], StagePlan] | None:
    """Overrides beside earlier ones, and their plan. If the config refuses that, one of the earlier ones is dropped."""
    for dropped in [None, *reversed(earlier)]:
        texts = [*(text for text in earlier if text != dropped), *overrides]
        try:
            return texts, replan(texts)
        except UserError:
            continue
    return None


def _section(config: Stage) -> str:
    """The section with the microbatches."""
    return "ppo" if isinstance(config, PPOConfig) else "training"


def _candidates(config: Stage, plan: StagePlan, machine: Machine) -> list[tuple[list[str], str]]:
    """(overrides, what they cost), the cheapest first."""
    is_ppo, is_several = isinstance(config, PPOConfig), machine.processes > 1
    found: list[tuple[list[str], str]] = []
    for tokens in (plan.batch.tokens // 2, plan.batch.tokens // 8):
        if tokens >= 256:
            text = f"{_section(config)}.tokens_per_microbatch={tokens}"
            found.append(([text], "smaller passes; the same result"))
    found += _fewer_rows(config, machine)
    found.append((["gradient_checkpointing=true"], "a third more arithmetic"))
    shard = ["distributed.shard=true"] if is_several and plan.setting.sharded == 1 else []
    if shard and machine.processes > machine.per_node:
        found.append((["distributed.shard=hybrid"], "weights cross the links within a machine"))
    if shard:
        found.append((shard, "weights cross the network in each pass"))
    if is_ppo and is_several:
        found.append(([*shard, "rollout.decoder=sharded"], "all weights cross the network for each token"))
    found.append((["optimizer.precision=8bit"], "moments in 8 bits"))
    found.append((["optimizer.precision=bfloat16"], "weights and moments rounded to 16 bits"))
    if is_ppo:
        found.append((["offload=[optimizer, frozen]"], "copies between GPU and host in each iteration"))
    if is_several:
        found.append(([*shard, "distributed.offload=true"], "copies in each pass, AdamW steps on the CPU"))
    return [*found, *_adapters(config), _shorter(config)]


def _fewer_rows(config: Stage, machine: Machine) -> list[tuple[list[str], str]]:
    """Fewer responses that are sampled at the same time."""
    if isinstance(config, PPOConfig):
        key, num, most = "rollout", config.ppo.rollout_batch_size, config.rollout.max_live_rows
    elif isinstance(config, RMConfig):
        key, num, most = "evaluation", config.evaluation.num_normalization_samples, config.evaluation.max_live_rows
    else:
        return []
    rows = -(-num // machine.processes)
    live = min(rows, most or rows)
    return [([f"{key}.max_live_rows={live // n}"], "slower sampling") for n in (4, 16) if live // n]


def _adapters(config: Stage) -> list[tuple[list[str], str]]:
    assert isinstance(config, SFTConfig | RMConfig | PPOConfig)
    if isinstance(config, SFTConfig) and config.model.scratch is not None:
        return []
    if isinstance(config, PPOConfig):
        keys, lora = ["policy.lora", *["value_model.lora"] * config.ppo.has_value_model], config.policy.lora
    else:
        keys, lora = ["model.lora"], config.model.lora
    plain = [([f"{key}.r=16" for key in keys], "trains adapters only")] if lora is None else []
    return [*plain, ([f"{key}.quantize=nf4" for key in keys], "frozen weights in 4 bits")]


def _shorter(config: Stage) -> tuple[list[str], str]:
    if isinstance(config, PPOConfig):
        prompt, response = max(1, config.data.max_prompt_length // 2), max(1, config.rollout.max_new_tokens // 2)
        return [f"data.max_prompt_length={prompt}", f"rollout.max_new_tokens={response}"], "shorter texts"
    assert isinstance(config, SFTConfig | RMConfig)
    return [f"data.max_length={max(2, config.data.max_length // 2)}"], "drops longer rows"
