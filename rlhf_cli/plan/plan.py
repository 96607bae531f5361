"""The plan of a config file or of a folder of stages: what each stage needs, whether that fits, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_cli.config.by_stage import load_stage_config, stage_of
from rlhf_cli.config.stage import STAGES, Stage
from rlhf_cli.errors import ConfigError
from rlhf_cli.models.cost import total_memory
from rlhf_cli.plan.adapters import require_adapters
from rlhf_cli.plan.changes import Change, enough_changes, single_changes
from rlhf_cli.plan.length import Length, length_of
from rlhf_cli.plan.memory import Machine
from rlhf_cli.plan.sources import Sources
from rlhf_cli.plan.stages import StagePlan, plan_stage


@dataclass(frozen=True)
class Planned:
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
) -> list[Planned]:
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
) -> Planned:
    def replan(more: list[str]) -> StagePlan:
        config = load_stage_config(stage, file, [*overrides, *more])
        return plan_stage(stage, config, Sources({**configs, stage: config}), machine)

    config = configs[stage]
    require_adapters(config, {name: one for name, one in configs.items() if name != stage}, here=False)
    plan = plan_stage(stage, config, Sources(configs), machine)
    fits = plan.peak.total <= room
    changes = [] if fits else single_changes(config, plan, machine, replan)
    enough = None if fits else enough_changes(changes, room, replan)
    return Planned(plan, length, fits, changes, enough)


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
