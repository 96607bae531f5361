"""`rlhf status`: the state of each stage in an artifact directory. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from rlhf_cli.artifacts import MANIFEST, Manifest, partial_directory, read_manifest, stage_directory
from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.training.checkpoint_files import checkpoints_directory, last_step
from rlhf_cli.training.identity import problems_of
from rlhf_cli.training.lock import owner_of
from rlhf_cli.training.progress import Display

SHOWN = {
    "sft": ("eval/loss", "eval/token_accuracy"),
    "rm": ("eval/accuracy", "eval/pearson", "eval/mse"),
    "ppo": ("sft/score_mean", "ppo/score_mean", "ppo/gold", "ppo/kl"),
}
"""The metrics of a finished stage that are shown."""
MAX_DEPTH = 3
"""Folders below the given one that are searched for runs."""


def show_status(root: Path) -> None:
    """Print a table of the stages of the run at `root`, or of every run inside `root` if it is not a run itself."""
    if not root.is_dir():
        raise ArtifactError(f"{root}: no such directory. Give the `artifacts` directory of your configs")
    display = Display("status", quiet=False)
    for run in [root] if is_run(root) else runs_in(root) or [root]:
        rows = [_row(run, stage) for stage in STAGES]
        display.table(str(run), ["stage", "state", "finished (UTC)", "seconds", "figures"], rows)


def is_run(directory: Path) -> bool:
    """Whether a directory has a stage: finished, being built or with checkpoints."""
    return any(
        (stage_directory(directory, stage) / MANIFEST).exists()
        or partial_directory(directory, stage).is_dir()
        or checkpoints_directory(directory, stage).is_dir()
        for stage in STAGES
    )


def runs_in(directory: Path) -> list[Path]:
    """The runs at most MAX_DEPTH folders below a directory, sorted. Hidden folders are not searched."""
    runs = []
    for parent, folders, _ in os.walk(directory):
        depth = len(Path(parent).relative_to(directory).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < MAX_DEPTH else []
        if depth and is_run(Path(parent)):
            runs.append(Path(parent))
            folders.clear()
    return sorted(runs)


def _row(root: Path, stage: str) -> list[str]:
    """The row of a stage: finished, stale, running, interrupted or not run."""
    try:
        manifest = read_manifest(stage_directory(root, stage))
    except ArtifactError as error:
        return [stage, f"broken: {error}", "", "", ""]
    unfinished = _unfinished_state(root, stage)
    if manifest is None:
        return [stage, unfinished or "not run", "", "", ""]
    state = _finished_state(root, stage, manifest) + (f"; a new run of it is {unfinished}" if unfinished else "")
    known = [key for key in SHOWN[stage] if key in manifest.metrics]
    figures = ", ".join(f"{key.removeprefix('eval/')} {manifest.metrics[key]:.4g}" for key in known)
    return [stage, state, manifest.finished[:16].replace("T", " "), f"{manifest.seconds:.0f}", figures]


def _unfinished_state(root: Path, stage: str) -> str | None:
    """The state of an unfinished run of a stage; None if there is none."""
    step, owner = last_step(root, stage), owner_of(root, stage)
    saved = f"saved after step {step}" if step is not None else "nothing saved yet"
    if owner is not None:
        return f"running ({owner}; {saved})"
    if step is not None:
        return f"interrupted ({saved}; run the same command to resume)"
    if partial_directory(root, stage).is_dir():
        return "interrupted (nothing saved; the next run starts over)"
    return None


def _finished_state(root: Path, stage: str, manifest: Manifest) -> str:
    try:
        words = problems_of(root, stage, manifest)
    except ConfigError:
        return "finished by another version of rlhf (its config.yaml cannot be read)"
    except OSError as error:
        return f"finished; its data or inputs cannot be read ({error})"
    return words if words.startswith(("stale", "damaged")) else "; ".join(filter(None, ("finished", words)))
