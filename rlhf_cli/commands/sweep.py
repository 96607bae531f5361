"""`rlhf sweep`: runs a pipeline with several settings and seeds, and compares the results."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.commands.options import Quiet
from rlhf_cli.commands.pipeline import overrides_for, pipeline, require_lora
from rlhf_cli.config.by_stage import CONFIGS, load_stage_config
from rlhf_cli.config.stage import Stage
from rlhf_cli.config.sweep import Member, load_sweep, members_of
from rlhf_cli.errors import ArtifactError, ConfigError, Interrupted, RunError, UserError
from rlhf_cli.printing import say
from rlhf_cli.program import command
from rlhf_cli.report.progress import Display
from rlhf_cli.run.artifacts import damage_of_models, differences, read_manifest_or_none, stage_directory
from rlhf_cli.run.checkpoint_files import last_step, unfinished_identity
from rlhf_cli.run.identity import identity, require_files
from rlhf_cli.run.launch import explained

FIGURES = {"score": "ppo/score_mean", "gold": "ppo/gold", "KL": "ppo/kl"}
"""Columns of the last table, and the final metrics that they show."""


@dataclass(frozen=True)
class Planned:
    """A run of a sweep with the checked configs of its stages."""

    member: Member
    configs: dict[str, Stage]


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The YAML file of the sweep (docs/evaluation.md).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and what each would do.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a folder's stages with several settings and seeds, and compare them."""
    # All configs are checked before the first run. A finished stage is linked into a run that would compute the same. A
    # run that fails is named at the end, and the others are run.
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("rlhf sweep: runs on one process. Use torchrun with the stages of one run instead")
    settings = load_sweep(file)
    folder = Path(settings.base)
    runs = [_plan(member, folder) for member in members_of(settings, file)]
    display = Display("sweep", quiet=quiet)
    sources = [Path(config.artifacts) for config in _configs(folder, []).values()][:1]
    if dry_run:
        display.table(f"{len(runs)} runs in {settings.artifacts}", ["run", *runs[0].configs], _plan_rows(runs, sources))
        return
    failures: dict[str, Exception] = {}
    for number, run in enumerate(runs, 1):
        root = run.member.root
        try:
            _share(run, sources)
            if all(_is_current(config, stage) for stage, config in run.configs.items()):
                display.note(f"{number}/{len(runs)} {run.member.name}: finished")
            else:
                display.note(f"{number}/{len(runs)} {run.member.name}")
                pipeline(folder, run.member.overrides, quiet=quiet)
        except Interrupted as stop:
            raise Interrupted(f"{stop}. To resume the sweep: {command('sweep', str(file))}", stop.exit_code) from None
        except (UserError, RunError) as error:
            failures[run.member.name] = error
            say(f"sweep: {run.member.name}: error: {error}", error=True)
        sources.append(root)
    _show(runs, Path(settings.artifacts), display)
    if failures:
        names = ", ".join(failures)
        kind = RunError if any(isinstance(error, RunError) for error in failures.values()) else ConfigError
        raise kind(f"sweep: {len(failures)} of {len(runs)} runs failed: {names}. The same command runs them again")


def _configs(folder: Path, overrides: Sequence[str]) -> dict[str, Stage]:
    files = {stage: folder / f"{stage}.yaml" for stage in CONFIGS}
    return {
        stage: load_stage_config(stage, file, overrides_for(stage, overrides))
        for stage, file in files.items()
        if file.is_file()
    }


def _plan(member: Member, folder: Path) -> Planned:
    """A run with its checked configs; the files that they name exist."""
    try:
        configs = _configs(folder, member.overrides)
        for stage, config in configs.items():
            with explained(folder / f"{stage}.yaml", config.artifacts, overrides_for(stage, member.overrides)):
                require_files(config)
            require_lora(stage, configs)
    except UserError as error:
        raise type(error)(f"{member.name}: {error}") from None
    return Planned(member, configs)


# ------------------------------------------------------------------------------------------- sharing


def _is_current(config: Stage, stage: str) -> bool:
    """Whether the stage is finished and would give the same result again."""
    return _is_result_of(Path(config.artifacts), stage, config)


def _is_result_of(root: Path, stage: str, config: Stage) -> bool:
    """Whether the finished stage at `root` has the identity of `config`, and its models are intact."""
    directory = stage_directory(root, stage)
    manifest = read_manifest_or_none(directory)
    if manifest is None or differences(manifest.identity, json.loads(json.dumps(identity(config)))):
        return False
    return damage_of_models(directory, manifest) is None


def _share(run: Planned, sources: Sequence[Path]) -> None:
    """Link the finished stages of other runs that this run would compute again, up to the first it has to compute."""
    for stage, config in run.configs.items():
        root = Path(config.artifacts)
        if _is_current(config, stage):
            continue
        if unfinished_identity(root, stage) is not None or stage_directory(root, stage).exists():
            return
        source = next((other for other in sources if other != root and _is_result_of(other, stage, config)), None)
        if source is None:
            return
        try:
            _link(stage_directory(source, stage), stage_directory(root, stage))
        except OSError as error:
            raise ArtifactError(f"{root}: cannot be written ({error.strerror or error})") from None


def _link(source: Path, target: Path) -> None:
    """Copy a finished stage by hard links, which take no space; a file system without them gets copies."""
    temporary = target.with_name(f".{target.name}.linking")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, temporary, copy_function=_link_file)
    temporary.rename(target)


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _plan_rows(runs: Sequence[Planned], sources: Sequence[Path]) -> list[list[str]]:
    """What would happen to each stage of each run."""
    rows, computed = [], set()
    for run in runs:
        cells, chain = [run.member.name], ""
        for stage, config in run.configs.items():
            chain += json.dumps(identity(config)["config"])
            step = last_step(config.artifacts, stage)
            if _is_current(config, stage):
                cells.append("finished")
            elif step is not None:
                cells.append(f"resumes at {step}")
            elif chain in computed or any(_is_result_of(source, stage, config) for source in sources):
                cells.append("shared")
            else:
                cells.append("runs")
            computed.add(chain)
        rows.append(cells)
    return rows


# ------------------------------------------------------------------------------------------- results


def _show(runs: Sequence[Planned], root: Path, display: Display) -> None:
    """A table of the settings, averaged over their seeds, and the report of all runs."""
    by_setting: dict[str, list[Mapping[str, float]]] = {}
    finished = []
    for run in runs:
        stage = list(run.configs)[-1]
        manifest = read_manifest_or_none(stage_directory(run.member.root, stage))
        if manifest is not None and _is_current(run.configs[stage], stage):
            by_setting.setdefault(run.member.setting, []).append(manifest.metrics)
            finished.append(run.member.root)
    if not by_setting:
        return
    every = [metrics for several in by_setting.values() for metrics in several]
    columns = {name: key for name, key in FIGURES.items() if all(key in metrics for metrics in every)}
    columns = columns or {key: key for key in every[0] if all(key in metrics for metrics in every)}
    rows = [
        [setting, str(len(several)), *(over_seeds([metrics[key] for metrics in several]) for key in columns.values())]
        for setting, several in by_setting.items()
    ]
    display.table("Mean over the seeds, with its 95 % interval", ["", "runs", *columns], rows)
    _draw(finished, root, display)


def over_seeds(values: Sequence[float]) -> str:
    """The mean of one number per seed, with its 95 % interval by Student's t distribution; one seed has none.

    >>> over_seeds([1.0, 1.1, 1.2]), over_seeds([2.5])
    ('1.10 [0.85, 1.35]', '2.5')
    """
    import torch

    from rlhf_cli.algorithms.bootstrap import student_quantile
    from rlhf_cli.report.figure import Figure

    n, numbers = len(values), torch.tensor(values, dtype=torch.float64)
    mean = numbers.mean().item()
    if n < 2:
        return str(Figure(mean))
    half = student_quantile(0.975, n - 1) * numbers.std().item() / n**0.5
    return str(Figure(mean, mean - half, mean + half, n))


def _draw(roots: Sequence[Path], root: Path, display: Display) -> None:
    """Write report.html about all runs, and frontier.png; without the extra `report` a line says how to get them."""
    from rlhf_cli.report.page import write_frontier, write_report

    try:
        write_report(roots, root / "report.html")
        display.note(f"report: {root / 'report.html'}")
        if write_frontier(roots, root / "frontier.png"):
            display.note(f"score and gold against KL: {root / 'frontier.png'}")
    except UserError as error:
        display.note(str(error))
