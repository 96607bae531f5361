"""The gate before PPO: held-out figures of earlier stages against the limits of `require`. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhf_cli.config.ppo import ENDS, PPOConfig, Requirement
from rlhf_cli.config.stage import Stage
from rlhf_cli.errors import ConfigError, RunError
from rlhf_cli.run.artifacts import read_manifest_or_none

SECTIONS = ("validation/", "eval/", "probe/")
"""The keys of a manifest's metrics that are held-out figures begin with one of these, figures of validation rows first:
what decides whether PPO starts is then not what the last figures are measured on."""


def check_requirements(config: Stage, *, is_finished: bool = False) -> list[str]:
    """Compare the manifests of the stages that `config` reads with its `require`; returns a line for each that holds.

    A figure of the reward model must hold for every reward model of `rewards`. With `is_finished` PPO is finished and
    would not run again.

    Raises ConfigError for a figure or an interval that no manifest has, RunError for a limit that is not met.
    """
    if not isinstance(config, PPOConfig):
        return []
    lines = []
    for name, requirement in config.require.items():
        stage, _, figure = name.partition("/")
        stages = _recorded_figures(config, stage)
        if not stages:
            raise ConfigError(f"require: {name}: this config reads no finished {stage} stage. Remove it")
        for path, figures in stages.items():
            lines.append(_check(name, requirement, figure, path, figures, is_finished=is_finished))
    return lines


def _recorded_figures(config: PPOConfig, stage: str) -> dict[str, Mapping[str, float]]:
    """The metrics of the manifests of the `stage` stages among the models that `config` reads, by directory."""
    found: dict[str, Mapping[str, float]] = {}
    for path, _ in config.inputs.values():
        directory = Path(path)
        directory = directory.parent if directory.name == "model" else directory
        manifest = read_manifest_or_none(directory)
        if manifest is not None and manifest.stage == stage:
            found[str(directory)] = manifest.metrics
    return found


def _check(
    name: str, requirement: Requirement, figure: str, path: str, figures: Mapping[str, float], *, is_finished: bool
) -> str:
    """A line that says that the figure is within its limits; raises as `check_requirements` does."""
    key = next((section + figure for section in ("validation/", "eval/", "") if section + figure in figures), None)
    stage = name.partition("/")[0]
    if key is None or not key.startswith(SECTIONS):
        known = _names(stage, figures)
        has = f"has {', '.join(known)}" if known else "has no held-out figures. Set its data.test and train it again"
        raise ConfigError(f"require: {name}: no such figure; {path} {has}")
    value, end = figures[key], requirement.interval
    if end in ENDS:
        if key + ENDS[end] not in figures:
            with_interval = [known for known in _names(stage, figures, interval=True) if known != name]
            others = f"; {' and '.join(with_interval)} {'has' if len(with_interval) == 1 else 'have'} one"
            raise ConfigError(
                f"require: {name}: {path} has no 95 % interval of it{others if with_interval else ''}. "
                "Set interval: mean"
            )
        value = figures[key + ENDS[end]]
    low, high = requirement.above, requirement.below
    limits = ([] if low is None else [f"above {low:g}"]) + ([] if high is None else [f"below {high:g}"])
    is_met = (low is None or value > low) and (high is None or value < high)
    interval = ""
    if key + "_low95" in figures and key + "_high95" in figures:
        interval = f" (95 % interval {figures[key + '_low95']:.3f} to {figures[key + '_high95']:.3f})"
    compared = {"mean": "it", "lower": "the lower end", "upper": "the upper end"}[end]
    measured = f"require: {name} of {path} is {figures[key]:.4g}{interval}"
    if not is_met:
        outcome = "The finished PPO stage stays as it is" if is_finished else "PPO was not started"
        raise RunError(
            f"{measured}, {compared} must be {' and '.join(limits)}. {outcome}. Improve the {stage} stage, or change "
            "`require`"
        )
    return f"{measured}, {compared} is {' and '.join(limits)}"


def _names(stage: str, figures: Mapping[str, float], *, interval: bool = False) -> list[str]:
    """The held-out figures of a manifest as `require` names them; with `interval`, those that have one."""
    ends = tuple(ENDS.values())
    found = [
        f"{stage}/{key.removeprefix('validation/').removeprefix('eval/')}"
        for key in figures
        if key.startswith(SECTIONS)
        and not key.endswith((*ends, "/num_rows"))
        and (not interval or all(key + end in figures for end in ends))
    ]
    return list(dict.fromkeys(found))
