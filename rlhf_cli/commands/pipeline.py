"""`rlhf pipeline`: the stages of a folder, in order, each only where it has to run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_cli.artifacts import read_manifest, stage_directory
from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ConfigError
from rlhf_cli.training.identity import require_files
from rlhf_cli.training.launch import Run, explained, load_stage_config, run_stage
from rlhf_cli.training.progress import Display


def run_pipeline(
    directory: Path,
    overrides: Sequence[str],
    load_stage: Callable[[str], Run],
    *,
    restart: bool = False,
    quiet: bool = False,
) -> None:
    """Run `sft.yaml`, `rm.yaml`, `ppo.yaml` of `directory`, those that are there.

    All configs are read, and the files that they name looked for, before the first stage starts. A stage that
    is finished and whose config, data and inputs are unchanged is skipped; one that runs gives the stages
    behind it a new input, so they run too.
    """
    configs = {stage: directory / f"{stage}.yaml" for stage in STAGES if (directory / f"{stage}.yaml").is_file()}
    if not configs:
        raise ConfigError(f"{directory}: no sft.yaml, rm.yaml or ppo.yaml in it, a folder of configs is needed")
    chosen = {stage: overrides_for(stage, overrides) for stage in configs}
    loaded = {stage: load_stage_config(stage, path, chosen[stage]) for stage, path in configs.items()}
    for stage, config in loaded.items():
        with explained(configs[stage], config.artifacts):
            require_files(config)
    roots = {config.artifacts for config in loaded.values()}
    if len(roots) > 1:
        raise ConfigError(f"{directory}: the stages have different `artifacts` ({', '.join(sorted(roots))}). Use one")
    root = roots.pop()
    ran = [
        stage
        for stage, path in configs.items()
        if run_stage(stage, _loader(load_stage, stage), path, chosen[stage], restart=restart, quiet=quiet)
    ]
    display = Display("pipeline", quiet=quiet)
    rows = []
    for stage in configs:
        manifest = read_manifest(stage_directory(root, stage))
        if manifest is not None:
            did = f"{manifest.seconds:.0f}" if stage in ran else "skipped"
            rows.append([stage, did, f"{stage_directory(root, stage)}/model"])
    if "ppo" in configs and "ppo" not in ran:
        evaluation = stage_directory(root, "ppo") / "evaluation.json"
        if evaluation.is_file():
            try:
                display.before_and_after(json.loads(evaluation.read_text(encoding="utf-8")))
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                display.warn(f"{evaluation}: is not as it was written, and can't be shown")
    display.table("Pipeline", ["stage", "seconds", "model"], rows)


def overrides_for(stage: str, overrides: Sequence[str]) -> list[str]:
    """The overrides that concern a stage, without their `STAGE:`."""
    chosen = []
    for text in overrides:
        head, colon, rest = text.partition(":")
        if colon and head.isalpha() and head not in STAGES:
            raise ConfigError(f"--set {text}: {head}: is no stage, the prefix is sft:, rm: or ppo:")
        if colon and head in STAGES:
            if head == stage:
                chosen.append(rest)
        else:
            chosen.append(text)
    return chosen


def _loader(load_stage: Callable[[str], Run], stage: str) -> Callable[[], Run]:
    return lambda: load_stage(stage)
