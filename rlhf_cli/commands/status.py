"""`rlhf status`: what an artifact root holds, without importing torch."""

from __future__ import annotations

from pathlib import Path

from rlhf_cli.artifacts import Manifest, partial_directory, read_manifest, stage_directory
from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.training.checkpoint_files import last_step, owner_of
from rlhf_cli.training.identity import what_changed
from rlhf_cli.training.launch import load_stage_config
from rlhf_cli.training.progress import Display

SHOWN = {
    "sft": ("eval/loss", "eval/token_accuracy"),
    "rm": ("eval/accuracy", "eval/pearson", "eval/mse"),
    "ppo": ("sft/score_mean", "ppo/score_mean", "ppo/gold", "ppo/kl"),
}


def show_status(root: Path) -> None:
    """A row a stage: finished, stale (made from something that has changed since), running, interrupted at a
    step, or not run."""
    if not root.is_dir():
        raise ArtifactError(f"{root}: no such artifact root. Give the `artifacts` of the configs")
    rows = []
    for stage in STAGES:
        try:
            manifest = read_manifest(stage_directory(root, stage))
        except ArtifactError as error:
            rows.append([stage, f"broken: {error}", "", "", ""])
            continue
        under_way = _under_way(root, stage)
        if manifest is None:
            rows.append([stage, under_way or "not run", "", "", ""])
            continue
        state = _state(root, stage, manifest) + (f"; a new run of it {under_way}" if under_way else "")
        known = [key for key in SHOWN[stage] if key in manifest.metrics]
        figures = [f"{key.removeprefix('eval/')} {manifest.metrics[key]:.4g}" for key in known]
        rows.append(
            [stage, state, manifest.finished[:16].replace("T", " "), f"{manifest.seconds:.0f}", ", ".join(figures)]
        )
    if all(row[1] == "not run" for row in rows):
        runs = sorted(path.parent.parent for path in root.glob("*/*/manifest.json"))
        if runs:
            raise ArtifactError(f"{root}: no run, but runs are in it: {', '.join(map(str, dict.fromkeys(runs)))}")
    Display("status", quiet=False).table(str(root), ["stage", "state", "finished (UTC)", "seconds", "figures"], rows)


def _under_way(root: Path, stage: str) -> str | None:
    """What an unfinished run is doing; None where there is none."""
    step, owner = last_step(root, stage), owner_of(root, stage)
    saved = f"saved after step {step}" if step is not None else "nothing saved yet"
    if owner is not None:
        return f"running ({owner}; {saved})"
    if step is not None:
        return f"interrupted ({saved}; the same command goes on)"
    return "interrupted (nothing saved: it begins anew)" if partial_directory(root, stage).is_dir() else None


def _state(root: Path, stage: str, manifest: Manifest) -> str:
    try:
        config = load_stage_config(stage, stage_directory(root, stage) / "config.yaml")
    except ConfigError:
        return "finished by another version (its config.yaml can't be read)"
    try:
        words = what_changed(config, manifest.identity, root)
    except OSError as error:
        return f"finished; what it was made from can't be read ({error})"
    return words if words.startswith("stale") else "; ".join(filter(None, ("finished", words)))
