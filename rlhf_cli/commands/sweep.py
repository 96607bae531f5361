"""`rlhf sweep`: runs a pipeline with several settings and seeds, and compares the results."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer
from pydantic import Field

from rlhf_cli.commands.options import Quiet
from rlhf_cli.commands.pipeline import draw_report, load_stages, pipeline
from rlhf_cli.config.base import EXPANDED, LocalPath, Section
from rlhf_cli.config.by_stage import CONFIGS, AnyConfig, load_stage_config, stage_files
from rlhf_cli.config.explain import alternatives, child_kind
from rlhf_cli.config.loader import load_config
from rlhf_cli.errors import ArtifactError, ConfigError, Interrupted, RunError, UserError
from rlhf_cli.files import link
from rlhf_cli.printing import say
from rlhf_cli.program import command
from rlhf_cli.report.progress import Display
from rlhf_cli.run.artifacts import damage_of_models, differences, read_manifest_or_none, stage_directory
from rlhf_cli.run.checkpoint_files import last_step, unfinished_identity
from rlhf_cli.run.identity import identity

FIGURES = {"score": "ppo/score_mean", "gold": "ppo/gold", "KL": "ppo/kl"}
"""Columns of the last table, and the final metrics that they show."""
Key = Annotated[str, Field(min_length=1)]


class Sweep(Section):
    """A few settings of one pipeline, each run in a directory of its own."""

    base: LocalPath
    """The folder with the configs of the stages, for example configs/support."""
    artifacts: Annotated[str, Field(min_length=1), EXPANDED]
    """The directory of the sweep; each run gets a directory inside it, named after its values."""
    grid: Annotated[dict[Key, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)]
    """The values of each key; every combination is a run. A key applies to each stage that has it. `ppo:seed` is the
    seed of PPO only, so SFT and the reward model are shared."""
    set: dict[Key, Any] = Field(default_factory=dict)
    """Keys that have the same value in every run and another one in the folder's configs."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    setting: str
    """The name without the seeds."""
    root: Path
    overrides: list[str]
    configs: dict[str, AnyConfig] = field(default_factory=dict)


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
    settings = load_config(file, Sweep)
    folder, runs = Path(settings.base), members_of(settings, file)
    files = stage_files(folder)
    for run in runs:
        try:
            run.configs.update(load_stages(files, run.overrides))
        except UserError as error:
            raise type(error)(f"{run.name}: {error}") from None
    display = Display("sweep", quiet=quiet)
    sources: list[Path] = []
    with contextlib.suppress(ConfigError):  # the folder's file may need a key of the sweep
        sources.append(Path(load_stage_config(*next(iter(files.items()))).artifacts))
    if dry_run:
        display.table(f"{len(runs)} runs in {settings.artifacts}", ["run", *runs[0].configs], _plan_rows(runs, sources))
        return
    failures: dict[str, Exception] = {}
    for number, run in enumerate(runs, 1):
        try:
            _share(run, sources)
            if all(_is_current(config, stage) for stage, config in run.configs.items()):
                display.note(f"{number}/{len(runs)} {run.name}: finished")
            else:
                display.note(f"{number}/{len(runs)} {run.name}")
                pipeline(folder, run.overrides, quiet=quiet)
        except Interrupted as stop:
            raise Interrupted(f"{stop}. To resume the sweep: {command('sweep', str(file))}", stop.exit_code) from None
        except (UserError, RunError) as error:
            failures[run.name] = error
            say(f"sweep: {run.name}: error: {error}", error=True)
        sources.append(run.root)
    _show(runs, Path(settings.artifacts), display)
    if failures:
        names = ", ".join(failures)
        kind = RunError if any(isinstance(error, RunError) for error in failures.values()) else ConfigError
        raise kind(f"sweep: {len(failures)} of {len(runs)} runs failed: {names}. The same command runs them again")


def members_of(sweep: Sweep, path: Path) -> list[SweepRun]:
    """The runs of a sweep, in the order of the grid. Raises ConfigError for a key that no stage of the folder has."""
    folder = Path(sweep.base)
    stages = list(stage_files(folder, f"{path}: base: "))
    for section, keys in (("set", sweep.set), ("grid", sweep.grid)):
        for key in keys:
            if re.split("[.:]", key)[-1] == "artifacts":
                raise ConfigError(f"{path}: {section}: {key}: each run gets its own directory. Remove the key")
            if not _stages_with(key, stages):
                raise ConfigError(f"{path}: {section}: {key}: no config in {folder} can have this key")
    members: dict[str, SweepRun] = {}
    for combination in itertools.product(*sweep.grid.values()):
        values = dict(zip(sweep.grid, combination, strict=True))
        root = Path(sweep.artifacts) / _name(values)
        if root.name in members:
            raise ConfigError(f"{path}: grid: two runs would have the directory {root.name}. Remove the repeated value")
        overrides = [f"artifacts={json.dumps(str(root))}"]
        for key, value in (sweep.set | values).items():
            text = f"{key.rpartition(':')[2]}={json.dumps(value, ensure_ascii=False)}"
            overrides += [f"{stage}:{text}" for stage in _stages_with(key, stages)]
        setting = _name({key: value for key, value in values.items() if key.rpartition(":")[2] != "seed"}) or "all runs"
        members[root.name] = SweepRun(root.name, setting, root, overrides)
    return list(members.values())


def _stages_with(key: str, stages: Sequence[str]) -> list[str]:
    """The stages that a key applies to: the one in front of its colon, or all whose config can have it."""
    prefix, _, bare = key.rpartition(":")
    return [stage for stage in stages if prefix in ("", stage) and _has(CONFIGS[stage], bare)]


def _has(kind: Any, key: str) -> bool:
    """Whether a config can have this dotted key. Values that are checked later, such as an index, are accepted."""
    first, _, rest = key.partition(".")
    step = int(first) if first.isdecimal() else first
    children = [child for kind in alternatives(kind)[0] if (child := child_kind(kind, step)) is not None]
    return bool(children) and (not rest or any(_has(child, rest) for child in children))


def _name(values: dict[str, Any]) -> str:
    """The name of a run's directory: the last part of each key, or the complete key where two have the same.

    >>> _name({"ppo.kl_coef": 0.1, "ppo:seed": 1}), _name({"ppo:optimizer.eps": 1, "rm:optimizer.eps": 2})
    ('kl_coef=0.1_seed=1', 'ppo-optimizer.eps=1_rm-optimizer.eps=2')
    """
    last = [re.split("[.:]", key)[-1] for key in values]
    words = last if len(set(last)) == len(last) else list(values)
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values.values()]
    pairs = [f"{word}={text}" for word, text in zip(words, texts, strict=True)]
    return "_".join(re.sub(r"[^\w.+=-]+", "-", pair) for pair in pairs)


def _is_current(config: AnyConfig, stage: str, root: Path | None = None) -> bool:
    """Whether the stage, at `root` or where it belongs, is finished with what `config` gives, its models intact."""
    directory = stage_directory(root or config.artifacts, stage)
    manifest = read_manifest_or_none(directory)
    if manifest is None or differences(manifest.identity, identity(config)):
        return False
    return damage_of_models(directory, manifest) is None


def _share(run: SweepRun, sources: Sequence[Path]) -> None:
    """Link the finished stages of other runs that this run would compute again, up to the first it has to compute."""
    for stage, config in run.configs.items():
        if _is_current(config, stage):
            continue
        target = stage_directory(run.root, stage)
        source = next((other for other in sources if other != run.root and _is_current(config, stage, other)), None)
        if source is None or target.exists() or unfinished_identity(run.root, stage) is not None:
            return
        temporary = target.with_name(f".{target.name}.linking")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.copytree(stage_directory(source, stage), temporary, copy_function=link)
            temporary.rename(target)
        except OSError as error:
            raise ArtifactError(f"{run.root}: cannot be written ({error.strerror or error})") from None


def _plan_rows(runs: Sequence[SweepRun], sources: Sequence[Path]) -> list[list[str]]:
    """What would happen to each stage of each run."""
    rows, computed = [], set()
    for run in runs:
        cells, chain = [run.name], ""
        for stage, config in run.configs.items():
            chain += json.dumps(identity(config)["config"])
            step = last_step(config.artifacts, stage)
            if _is_current(config, stage):
                cells.append("finished")
            elif step is not None:
                cells.append(f"resumes at {step}")
            elif chain in computed or any(_is_current(config, stage, source) for source in sources):
                cells.append("shared")
            else:
                cells.append("runs")
            computed.add(chain)
        rows.append(cells)
    return rows


def _show(runs: Sequence[SweepRun], root: Path, display: Display) -> None:
    """A table of the settings, averaged over their seeds, and the report of all runs."""
    by_setting: dict[str, list[Mapping[str, float]]] = {}
    finished = []
    for run in runs:
        stage = list(run.configs)[-1]
        manifest = read_manifest_or_none(stage_directory(run.root, stage))
        if manifest is not None and _is_current(run.configs[stage], stage):
            by_setting.setdefault(run.setting, []).append(manifest.metrics)
            finished.append(run.root)
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
    draw_report(finished, root / "report.html", display)


def over_seeds(values: Sequence[float]) -> str:
    """The mean of one number per seed, with its 95 % interval by Student's t distribution; one seed has none.

    >>> over_seeds([1.0, 1.1, 1.2]), over_seeds([2.5])
    ('1.10 [0.85, 1.35]', '2.5')
    """
    from rlhf_cli.algorithms.statistics import student_quantile
    from rlhf_cli.report.figure import Figure

    n, mean = len(values), fmean(values)
    if n < 2:
        return str(Figure(mean))
    half = student_quantile(0.975, n - 1) * stdev(values) / n**0.5
    return str(Figure(mean, mean - half, mean + half, n))
