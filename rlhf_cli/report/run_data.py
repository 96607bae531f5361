"""The data of a report, read from the files of a run. Does not import torch."""

from __future__ import annotations

import contextlib
import json
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.files import digest_file, read_object, rows_of
from rlhf_cli.health.recap import Seen, findings_of
from rlhf_cli.run.artifacts import MANIFEST, Manifest, partial_directory, read_manifest_or_none, stage_directory
from rlhf_cli.run.state import unfinished_stages

COLORS = [f"var(--series-{i})" for i in range(1, 7)]
"""Colours of runs, defined in page.css for light and dark. A picture takes the light ones.

A page about one run has one meaning for each colour: the first is for what was trained, a stage's figures in training
and the PPO policy, the second for figures on held-out rows. GRAY is for what PPO is compared with: the SFT model,
best-of-n of it, a target.
"""
HELD_OUT = "held out"  # name of a series of held-out figures: few points, which are marked and never smoothed
SETTING = "setting"  # name of a series that is no measurement, such as a learning rate, and is never smoothed


@dataclass(frozen=True)
class Curve:
    """A chart of one or two metrics over the steps of a stage."""

    stage: str
    title: str
    metrics: dict[str, str]  # metric -> its name in the legend
    note: str
    is_share: bool = False
    target: str = ""  # the config key of the value that the metric is steered to


CURVES = (
    Curve("sft", "SFT loss", {"loss/sft": "training", "eval/loss": HELD_OUT}, "nats per target token"),
    Curve("sft", "SFT token accuracy", {"eval/token_accuracy": HELD_OUT}, "share of target tokens"),
    Curve("sft", "SFT gradient norm", {"sft/grad_norm": "training"}, "before clipping"),
    Curve("sft", "SFT learning rate", {"sft/learning_rate": SETTING}, "of the step"),
    Curve("rm", "RM loss", {"loss/rm": "training", "eval/loss": HELD_OUT}, "per pair or answer"),
    Curve("rm", "RM accuracy", {"rm/accuracy": "training", "eval/accuracy": HELD_OUT}, "chance is 0.5"),
    Curve("rm", "RM gradient norm", {"rm/grad_norm": "training"}, "before clipping"),
    Curve("rm", "RM learning rate", {"rm/learning_rate": SETTING}, "of the step"),
    Curve("ppo", "Score", {"objective/score": "training"}, "of the rewards, after normalization"),
    Curve("ppo", "Gold score on held-out prompts", {"eval:gold": HELD_OUT}, "the judge of evaluation.gold"),
    Curve("ppo", "KL to the SFT model", {"objective/kl": "training"}, "nats per reply", target="ppo.kl_target"),
    Curve("ppo", "KL coefficient", {"objective/kl_coef": SETTING}, "what a nat costs in score"),
    Curve("ppo", "Reply length", {"response/length": "training"}, "tokens"),
    Curve("ppo", "Entropy", {"policy/entropy": "training"}, "nats per token"),
    Curve("ppo", "Replies that ended", {"response/eos_fraction": "training"}, "share", is_share=True),
    Curve("ppo", "Diversity", {"response/distinct_2": "training"}, "share of different word pairs"),
    Curve("ppo", "Unfamiliar replies", {"response/unfamiliarity": "training"}, "1: as far as a single SFT reply"),
    Curve("ppo", "Clipped ratios", {"policy/clip_fraction": "training"}, "share of tokens"),
    Curve("ppo", "Explained variance", {"value/explained_variance": "training"}, "of the returns, by the value model"),
    Curve("ppo", "Gradient norm", {"policy/grad_norm": "training"}, "of the policy, before clipping"),
    Curve("ppo", "Learning rate", {"policy/learning_rate": SETTING}, "of the policy"),
)
_METRICS = dict.fromkeys(name for curve in CURVES for name in curve.metrics if ":" not in name)
METRICS = (*_METRICS, *(name.replace("eval/", "validation/") for name in _METRICS if name.startswith("eval/")))
"""Their metrics, of validation rows too. The others of a long run would only take time to read."""
MOST_POINTS = 600
"""Points of a curve. A longer one keeps the smallest and the largest value of each of half as many parts."""
MOST_SAMPLES = 1000
LONGEST_NAME = 10  # longest name of a run in the columns of a table on the terminal


@dataclass(frozen=True)
class StageData:
    """The files of one stage: of the finished one, or else of the unfinished one."""

    stage: str
    directory: Path
    metrics: dict[str, tuple[list[float], list[float]]]
    """Name -> (steps, values) of METRICS; values that are not finite are left out."""
    findings: list[Seen]
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    evaluation: dict[str, Any]
    """`<run>/eval/<stage>/evaluation.json` of `rlhf eval`; empty without it, or if it is older than the stage."""
    own_evaluation: dict[str, Any]  # `evaluation.json` of the stage itself; empty without it
    manifest: Manifest | None
    config: str


@dataclass(frozen=True)
class RunData:
    """The stages of a run that have files."""

    root: Path
    name: str
    stages: dict[str, StageData]
    color: str = COLORS[0]


def names_of(roots: Sequence[Path]) -> list[str]:
    """A short, different name for each directory: its last parts, as many as needed.

    >>> names_of([Path("a/x/run"), Path("a/y/run")])
    ['x/run', 'y/run']
    """
    parts = [root.resolve().parts for root in roots]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"{roots[0]}: is named twice. Name each directory once")


def short_names(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names for the columns of a table, and the lines of a legend: numbers where a name is too long, else the names.

    >>> short_names(["a", "b"])
    (['a', 'b'], [])
    >>> short_names(["kl_coef=0.05_seed=0", "kl_coef=0.1_seed=0"])
    (['1', '2'], ['1: kl_coef=0.05_seed=0', '2: kl_coef=0.1_seed=0'])
    """
    if max(map(len, names)) <= LONGEST_NAME:
        return list(names), []
    numbers = [str(number) for number in range(1, len(names) + 1)]
    return numbers, [f"{number}: {name}" for number, name in zip(numbers, names, strict=True)]


def read_run(root: Path, name: str) -> RunData:
    """The run at `root`. Raises ArtifactError if it has no stage with metrics."""
    if not root.is_dir():
        raise ArtifactError(f"{root}: no such directory. Give the `artifacts` directory of your configs")
    stages = {}
    for stage in STAGES:
        # The files of the finished stage, or else of the one that is being built.
        finished, partial = stage_directory(root, stage), partial_directory(root, stage)
        directory = finished if (finished / "metrics.jsonl").is_file() else partial
        if not (directory / "metrics.jsonl").is_file():
            continue
        config = directory / "config.yaml"
        stages[stage] = StageData(
            stage=stage,
            directory=directory,
            metrics=curves(rows_of(directory / "metrics.jsonl"), METRICS),
            findings=findings_of(directory),
            evaluations=evaluations_of(directory),
            samples=list(deque(rows_of(directory / "samples.jsonl"), MOST_SAMPLES)),
            evaluation=evaluation_of(root, stage, directory),
            own_evaluation=read_object(directory / "evaluation.json"),
            manifest=read_manifest_or_none(directory),
            config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        )
    if not stages:
        if (root / "metrics.jsonl").is_file():
            raise ArtifactError(f"{root}: is a stage. Give its run, {root.absolute().parent}")
        ended = "".join(f"; {text}" for state, text in unfinished_stages(root) if state.name == "failed")
        raise ArtifactError(f"{root}: no stage has metrics yet{ended}. `rlhf status {root}` shows what is there")
    return RunData(root, name, stages)


def evaluation_of(root: Path, stage: str, directory: Path) -> dict[str, Any]:
    """The file of `rlhf eval`; empty if the stage was trained again after it."""
    found = read_object(root / "eval" / stage / "evaluation.json")
    measured = found.get("manifest")
    if measured is None:
        return found
    manifest = directory / MANIFEST
    return found if manifest.is_file() and digest_file(manifest) == measured else {}


def meaning_of(manifest: Manifest | None, figure: str) -> str:
    """The origin of a score or a gold score: the rewards of PPO with their settings, or its judge."""
    identity = manifest.identity if manifest is not None else {}
    config = identity.get("config", {})
    if figure == "gold":
        return str((config.get("evaluation") or {}).get("gold"))
    inputs = {name: digest for name, digest in identity.get("inputs", {}).items() if name.startswith("rewards")}
    return json.dumps([config.get("rewards"), inputs], sort_keys=True, default=str)


def config_of(stage: StageData) -> dict[str, Any]:
    """The resolved config of a stage; empty if it cannot be read."""
    with contextlib.suppress(yaml.YAMLError):
        config = yaml.safe_load(stage.config)
        return config if isinstance(config, dict) else {}
    return {}


def measured(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of metrics, without those that were NaN or infinite: they are null there."""
    return [{name: value for name, value in row.items() if value is not None} for row in rows_of(path)]


def evaluations_of(directory: Path) -> list[dict[str, Any]]:
    """The figures on held-out prompts along a PPO run, from the policy before it on; empty without those on the way."""
    rows, own = measured(directory / "evaluations.jsonl"), read_object(directory / "evaluation.json")
    first = own.get("validation", own).get("sft")
    return [{"step": 0, **first}, *rows] if rows and rows[0].get("step") != 0 and first else rows


def curves(rows: Iterator[dict[str, Any]], names: Collection[str]) -> dict[str, tuple[list[float], list[float]]]:
    """These numbers of rows with a `step`, by name, thinned to MOST_POINTS each."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int | float):
            continue
        for name in names:
            value = row.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                steps, values = found.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return {name: thin(*curve) for name, curve in found.items()}


def thin(steps: Sequence[float], values: Sequence[float], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """At most `most` points of a curve, with the first, the last, and the extremes of every part.

    >>> thin([1, 2, 3, 4, 5, 6, 7, 8], [0, 9, 0, 0, 0, -9, 0, 1], 6)
    ([1, 2, 6, 8], [0, 9, -9, 1])
    """
    n = len(steps)
    if n <= most:
        return list(steps), list(values)
    parts = max(1, (most - 2) // 2)
    kept = {0, n - 1}
    for part in range(parts):
        rows = range(part * n // parts, (part + 1) * n // parts)
        kept |= {min(rows, key=values.__getitem__), max(rows, key=values.__getitem__)}
    order = sorted(kept)
    return [steps[i] for i in order], [values[i] for i in order]
