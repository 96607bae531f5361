"""The plan of a config file or of a folder of stages: what each stage needs, whether that fits, and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlhf_cli.config.by_stage import (
    AnyConfig,
    load_stage_config,
    overrides_for,
    require_stages,
    split_prefix,
    stage_files,
    stage_of,
)
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.sft_rm import SFTConfig
from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ConfigError, UserError
from rlhf_cli.models.cost import total_memory
from rlhf_cli.plan.adapter_errors import require_adapters
from rlhf_cli.plan.budget import FEWEST_TOKENS, machine_of_run
from rlhf_cli.plan.memory import Machine
from rlhf_cli.plan.origins import ModelOrigins
from rlhf_cli.plan.run_length import Length, length_of
from rlhf_cli.plan.stages import StagePlan, live_rows, plan_stage
from rlhf_cli.printing import size


@dataclass(frozen=True)
class Change:
    """Overrides of the config that lower the peak."""

    overrides: list[str]
    costs: str
    peak: float
    """Bytes with them, at the tokens per microbatch of the plan. With `auto` they may grow into what becomes free."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage's plan, and what to change if it does not fit."""

    plan: StagePlan
    length: Length
    fits: bool
    changes: list[Change]
    """Single changes; empty if the stage fits."""
    enough: tuple[list[str], StagePlan] | None
    """Overrides that make it fit, and the plan with them. None if it fits, or if none do."""


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
        if stage is not None:
            raise ConfigError(
                f"--stage: is for a file whose name does not tell. For one stage of {path}, give its file"
            )
        files = stage_files(path)
        wanted = list(files)
    else:
        one = stage_of(path, stage)
        files = {one: path}
        earlier = STAGES[: STAGES.index(one)]
        files |= {name: path.parent / f"{name}.yaml" for name in earlier if (path.parent / f"{name}.yaml").is_file()}
        wanted = [one]
    require_stages(overrides, files)
    # Overrides without a prefix are for the stages that are planned.
    prefixed = [text for text in overrides if split_prefix(text)[0] is not None]
    chosen = {name: overrides_for(name, overrides if name in wanted else prefixed) for name in files}
    configs = {name: load_stage_config(name, file, chosen[name]) for name, file in files.items()}
    if num_rows is not None and wanted == ["ppo"]:
        raise ConfigError("--rows: is for SFT and RM; the length of PPO is ppo.num_iterations. Remove it")
    lengths = {name: length_of(name, configs, tokens_per_s, num_rows) for name in wanted}
    return [_planned(name, files[name], chosen[name], configs, machine, room, lengths[name]) for name in wanted]


def _planned(
    stage: str,
    file: Path,
    overrides: list[str],
    configs: dict[str, AnyConfig],
    machine: Machine,
    room: float,
    length: Length,
) -> PlannedStage:
    def replan(more: Iterable[str]) -> StagePlan:
        config = load_stage_config(stage, file, [*overrides, *more])
        return plan_stage(stage, config, ModelOrigins({**configs, stage: config}), machine)

    def peak(more: Iterable[str]) -> float:
        """The peak with further overrides; infinite if the config refuses them."""
        try:
            return replan(more).peak.total
        except UserError:
            return math.inf

    config = configs[stage]
    require_adapters(config, configs, here=False)
    plan = plan_stage(stage, config, ModelOrigins(configs), machine)
    if plan.peak.total <= room:
        return PlannedStage(plan, length, True, [], None)
    same_tokens = f"{config.batches[0]}.tokens_per_microbatch={plan.tokens_per_microbatch}"
    found = [Change(texts, costs, peak([same_tokens, *texts])) for texts, costs in _candidates(config, plan, machine)]
    changes = [change for change in found if change.peak < 0.99 * plan.peak.total]
    texts = enough_changes(changes, room, peak)
    return PlannedStage(plan, length, False, changes, None if texts is None else (texts, replan(texts)))


def machine_of(gpus: int | None, gpu_memory: float | None, processes: int | None, per_node: int) -> Machine:
    """The machine that the options describe, or this one."""
    if gpus is not None or gpu_memory is not None:
        if processes is not None:
            raise ConfigError(
                f"--nproc: has no effect beside {'--gpu-memory' if gpus is None else '--gpus'}, which plans for one "
                "process per GPU. Remove one of them"
            )
        if gpu_memory is None and not torch.cuda.is_available():
            raise ConfigError("--gpus: this machine has no GPU to take the memory from. Add --gpu-memory, such as 80GB")
        memory = gpu_memory if gpu_memory is not None else float(total_memory(torch.device("cuda")))
        return Machine("cuda", memory, gpus or 1, per_node, f"{gpus or 1} x {memory / 1e9:.0f} GB GPU")
    device, count = torch.device("cuda" if torch.cuda.is_available() else "cpu"), processes or 1
    machine = machine_of_run(device, count)
    name = "this machine's GPU"
    if device.type == "cpu":
        name = f"this machine's {size(machine.memory * count)}" + (f" for {count} processes" if count > 1 else "")
    return replace(machine, per_node=per_node, name=name)


# ------------------------------------------------------ what makes a stage need less memory, the cheapest change first


def enough_changes(changes: list[Change], room: float, peak: Callable[[Iterable[str]], float]) -> list[str] | None:
    """Overrides with which the stage fits into `room` bytes. None if even all changes together are not enough.

    Changes are added, the cheapest first, until the stage fits. Then each that it fits without is removed.
    """
    chosen: dict[str, str] = {}
    lowest = math.inf
    for change in changes:
        added = {text.partition("=")[0]: text for text in change.overrides}
        # If the config refuses the change beside the others, one of them makes room for it.
        beside = [chosen | added, *(_without(chosen, key) | added for key in reversed(chosen))]
        texts, now = next(((one, now) for one in beside if (now := peak(one.values())) < math.inf), (chosen, math.inf))
        if now < 0.99 * lowest:
            chosen, lowest = texts, now
        if lowest <= room:
            break
    else:
        return None
    for key in list(chosen):
        fewer = _without(chosen, key)
        chosen = fewer if peak(fewer.values()) <= room else chosen
    return list(chosen.values())


def _without(texts: dict[str, str], key: str) -> dict[str, str]:
    return {name: text for name, text in texts.items() if name != key}


def _candidates(config: AnyConfig, plan: StagePlan, machine: Machine) -> Iterator[tuple[list[str], str]]:
    """(overrides, what they cost), the cheapest first."""
    is_several = machine.processes > 1
    for tokens in (plan.batch.tokens // 2, plan.batch.tokens // 8):
        if tokens >= FEWEST_TOKENS:
            yield [f"{config.batches[0]}.tokens_per_microbatch={tokens}"], "smaller passes; the same result"
    if not isinstance(config, SFTConfig):
        section = "rollout" if isinstance(config, PPOConfig) else "evaluation"
        live = live_rows(config, machine.processes)
        for rows in filter(None, (live // 4, live // 16)):
            yield [f"{section}.max_live_rows={rows}"], "slower sampling"
    yield ["gradient_checkpointing=true"], "a third more arithmetic"
    shard = ["distributed.shard=true"] if is_several and plan.setting.sharded == 1 else []
    if shard and machine.processes > machine.per_node:
        yield ["distributed.shard=hybrid"], "weights cross the links within a machine"
    if shard:
        yield shard, "weights cross the network in each pass"
    if isinstance(config, PPOConfig) and is_several:
        yield [*shard, "rollout.decoder=sharded"], "all weights cross the network for each token"
    yield ["optimizer.precision=8bit"], "moments in 8 bits"
    passes = [] if plan.setting.half else ["precision=bfloat16"]
    yield [*passes, "optimizer.precision=bfloat16"], "weights and moments rounded to 16 bits"
    if isinstance(config, PPOConfig):
        yield ["offload=[optimizer, frozen]"], "copies between GPU and host in each iteration"
    if is_several:
        yield [*shard, "distributed.offload=true"], "copies in each pass, AdamW steps on the CPU"
    if not isinstance(config, SFTConfig) or config.model.scratch is None:
        key, trained = config.trained
        keys = [key, "value_model"] if isinstance(config, PPOConfig) and config.ppo.has_value_model else [key]
        if trained.lora is None:
            yield [f"{key}.lora.r=16" for key in keys], "trains adapters only"
        yield [f"{key}.lora.quantize=nf4" for key in keys], "frozen weights in 4 bits"
    if isinstance(config, PPOConfig):
        prompt, response = config.data.max_prompt_length // 2, config.rollout.max_new_tokens // 2
        yield [f"data.max_prompt_length={prompt}", f"rollout.max_new_tokens={response}"], "shorter texts"
    else:
        yield [f"data.max_length={config.data.max_length // 2}"], "drops longer rows"
