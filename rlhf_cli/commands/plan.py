"""`rlhf plan`: print what a run needs in memory and time before anything is loaded."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ByteSize, Field, TypeAdapter

from rlhf_cli.commands.options import ConfigFile, StageOfFile, StageOverrides
from rlhf_cli.errors import ConfigError
from rlhf_cli.printing import say, size
from rlhf_cli.report.progress import clock, epochs

if TYPE_CHECKING:
    from rlhf_cli.plan.fit import PlannedStage
    from rlhf_cli.plan.memory import Machine, Phase
    from rlhf_cli.plan.run_length import Length

WIDTH = 51
"""Columns for the parts of a phase, so that a line has at most 80."""
ROOM = 0.9
"""Share of the memory that a run may use. The rest is for CUDA and NCCL, for gaps between the allocator's blocks, and
for the error of this computation."""


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A stage's YAML file, or a folder of them.", show_default=False),
    ] = None,
    config: ConfigFile = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, metavar="N", help="Plan for N GPUs.")] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of each GPU, such as 80GB.")
    ] = None,
    per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, metavar="N", help="GPUs of a machine.")] = 8,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, metavar="N", help="Processes on this machine.")] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option("--tokens-per-s", min=0.001, help="Speed of all processes, for the hours.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, metavar="N", help="Training rows of SFT and RM. Default: counted.")
    ] = None,
    overrides: StageOverrides = None,
    stage: StageOfFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute memory, steps and hours of a run from its configs. No weights are loaded.

    Says for each phase what a process holds, whether it fits, and which changes make it fit.
    """
    path = file or config
    if path is None or (file is not None and config is not None):
        raise ConfigError("give one config: rlhf plan FILE, or rlhf plan --config FILE")
    memory = None if gpu_memory is None else size_of(gpu_memory)
    from rlhf_cli.plan.fit import machine_of, plan_of

    machine = machine_of(gpus, memory, nproc, per_node)
    planned = plan_of(path, overrides or [], stage, machine, ROOM * machine.memory, tokens_per_s, rows)
    if as_json:
        say(json.dumps({"machine": machine.name, "stages": [as_dict(one, machine) for one in planned]}, indent=2))
        return
    say("\n\n".join("\n".join(lines_of(one, machine)) for one in planned))


def size_of(text: str) -> float:
    """The bytes of a size with its unit.

    >>> size_of("80GB"), size_of("24 GiB")
    (80000000000.0, 25769803776.0)
    """
    try:
        if not re.fullmatch(r"[\d.]+\s*[A-Za-z]+", text):  # pydantic takes 80 for bytes and ignores what follows GB
            raise ValueError
        return float(TypeAdapter(Annotated[ByteSize, Field(gt=0)]).validate_python(text))
    except ValueError:
        raise ConfigError(f"--gpu-memory: found {text}, must be a size such as 80GB or 24GiB") from None


def lines_of(one: PlannedStage, machine: Machine) -> list[str]:
    plan, peak, batch = one.plan, one.plan.peak, one.plan.batch
    verdict = "fits" if one.fits else "does not fit"
    lines = [
        f"{plan.stage}: {size(peak.total)} in each process, in the phase {peak.name}; {verdict} in",
        f"{machine.name} (at most {ROOM:.0%} of {size(machine.memory)})",
        "",
        f"  {'model':<17}{'parameters':>16}{'trained':>16}{'weights':>9}{'grad':>9}{'AdamW':>9}",
    ]
    for model in plan.models:
        held = map(size, (model.weight_bytes, model.gradient_bytes, model.moment_bytes))
        counts = f"{model.shape.weights:>16,}{model.shape.trained:>16,}"
        lines.append(f"  {model.name:<17}{counts}{''.join(f'{text:>9}' for text in held)}")
    lines += ["", f"  {'phase':<17}{'':>8}  its largest parts"]
    lines += [f"  {phase.name:<17}{size(phase.total):>8}  {parts_of(phase)}" for phase in plan.phases]
    lines += [
        "",
        f"  a step: {batch.num} microbatch{'' if batch.num == 1 else 'es'} of {batch.tokens:,} tokens "
        f"(tokens_per_microbatch {plan.tokens_per_microbatch:,})",
        *length_lines(one.length),
    ]
    if away := offloaded(one):
        lines.append(f"  CPU memory: {size(away)} for each process (distributed.offload)")
    return lines if one.fits else lines + change_lines(one, machine)


def offloaded(one: PlannedStage) -> float:
    return sum(model.offloaded_bytes for model in one.plan.models)


def parts_of(phase: Phase) -> str:
    line = ""
    for name, num_bytes in sorted(phase.parts.items(), key=lambda part: -part[1]):
        part = f"{', ' if line else ''}{name} {size(num_bytes)}"
        if len(line) + len(part) > WIDTH or num_bytes < 0.01 * phase.total:
            break
        line += part
    return line


def length_lines(length: Length) -> list[str]:
    """Rows, steps and tokens, and time, for an 80-column terminal."""
    lines, rows = [], length.rows
    if rows is not None and rows.num is not None:
        passes = f"; {epochs(length.epochs)}" if length.epochs is not None else ""
        lines.append(f"rows: {rows.num:,}, {rows.basis}{passes}")
    if length.steps is None or length.tokens is None:
        assert rows is not None
        lines.append(f"rows: not known ({rows.basis}). Add --rows N for steps and time")
    else:
        tokens = f"at most {length.tokens:,} tokens (all rows full)"
        if not length.is_bound:
            tokens = f"about {length.tokens:,} tokens (by the rows' mean length)"
        each = f" for each of {length.members} members, one after the other" if length.members > 1 else ""
        lines.append(f"length: {length.steps:,} optimizer steps{each}, {tokens}")
        time = "add --tokens-per-s N, the speed of all processes together"
        if length.hours is not None:
            time = f"{'at most' if length.is_bound else 'about'} {clock(3600 * length.hours)}"
        lines.append(f"time: {time}")
    return [part for line in lines for part in wrap(line, 78, initial_indent="  ", subsequent_indent="    ")]


def change_lines(one: PlannedStage, machine: Machine) -> list[str]:
    room, tokens = ROOM * machine.memory, one.plan.tokens_per_microbatch
    lines = ["", f"  What lowers the peak, each by itself, with {tokens:,} tokens a microbatch"]
    lines.append(f"  ({size(room)} fit):")
    for change in one.changes:
        fits = " fits" if change.peak <= room else ""
        lines.append(f"  {size(change.peak):>10}{fits:<5}  {change.costs}")
        lines += [f"      --set {shlex.quote(text)}" for text in change.overrides]
    if one.enough is None:
        return [*lines, "  No combination of these fits. Use a smaller model, or more or larger GPUs."]
    texts, plan = one.enough
    needs = f"{size(plan.peak.total)} with tokens_per_microbatch {plan.tokens_per_microbatch:,}"
    return [*lines, "", f"  The cheapest that fits, {needs}:", *(f"    --set {shlex.quote(text)}" for text in texts)]


def as_dict(one: PlannedStage, machine: Machine) -> dict[str, Any]:
    plan, rows = one.plan, one.length.rows
    return {
        "stage": plan.stage,
        "device": plan.setting.device,
        "processes": plan.setting.processes,
        "memory_bytes": round(machine.memory),
        "peak_bytes": round(plan.peak.total),
        "peak_phase": plan.peak.name,
        "fits": one.fits,
        "offloaded_bytes": round(offloaded(one)),
        "models": [
            {
                "name": model.name,
                "parameters": model.shape.weights,
                "trained": model.shape.trained,
                "weight_bytes": round(model.weight_bytes),
                "gradient_bytes": round(model.gradient_bytes),
                "moment_bytes": round(model.moment_bytes),
            }
            for model in plan.models
        ],
        "phases": [
            {"name": phase.name, "bytes": round(phase.total), "parts": {k: round(v) for k, v in phase.parts.items()}}
            for phase in plan.phases
        ],
        "microbatch": {"tokens": plan.batch.tokens, "num_per_step": plan.batch.num},
        "tokens_per_microbatch": plan.tokens_per_microbatch,
        "steps": one.length.steps,
        "members": one.length.members,
        "tokens": one.length.tokens,
        "hours": one.length.hours,
        "tokens_are_at_most": one.length.is_bound,
        "rows": None if rows is None else rows.num,
        "rows_basis": None if rows is None else rows.basis,
        "changes": [
            {"set": change.overrides, "peak_bytes": round(change.peak), "costs": change.costs} for change in one.changes
        ],
        "enough": one.enough and one.enough[0],
    }
