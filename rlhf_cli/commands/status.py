"""`rlhf status`: the state of each stage in an artifact directory. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rlhf_cli.config.stage import STAGES
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.program import from_here
from rlhf_cli.report.progress import Display
from rlhf_cli.run.artifacts import MANIFEST, read_manifest, stage_directory
from rlhf_cli.run.checkpoint_files import last_step
from rlhf_cli.run.state import problems_of, state_of, unfinished_stages, unfinished_state

COLUMNS = ["stage", "state", "finished (UTC)", "seconds", "figures"]
SHOWN = {
    "sft": {"eval/loss": "loss", "eval/token_accuracy": "token accuracy"},
    "rm": {
        "eval/accuracy": "accuracy",
        "members/accuracy_mean": "of the mean",
        "eval/pearson": "pearson",
        "eval/mse": "mse",
    },
    "ppo": {"sft/score_mean": "score of SFT", "ppo/score_mean": "of PPO", "ppo/gold": "gold", "ppo/kl": "KL"},
}
"""The metrics of a finished stage that are shown, and their names on the screen."""
MAX_DEPTH = 3
"""Folders below the given one that are searched for runs."""


def status(
    directory: Annotated[Path, typer.Argument(help="A run's directory, for example artifacts/support.")],
) -> None:
    """Show which stages of a run are finished, out of date or unfinished."""
    if not directory.is_dir():
        raise ArtifactError(f"{directory}: no such directory. Give the `artifacts` directory of your configs")
    if (directory / MANIFEST).is_file():  # the directory of a stage
        directory = Path(from_here(directory.absolute().parent))
    display = Display("status", quiet=False)
    for run in [directory] if is_run(directory) else runs_in(directory) or [directory]:
        rows = [_row(run, stage) for stage in STAGES]
        used = [i for i in range(len(COLUMNS)) if any(row[i] for row in rows)]
        columns, rows = [COLUMNS[i] for i in used], [[row[i] for i in used] for row in rows]
        for state, text in unfinished_stages(run):
            if state.name == "failed":
                display.warn(f"{run}: {text}")
        display.table(str(run), columns, rows, text=("state", "figures"))


def is_run(directory: Path) -> bool:
    """Whether a directory has a stage: finished or being built."""
    return any(state_of(directory, stage).name != "not run" for stage in STAGES)


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
    """The row of a stage: finished, stale, running, failed, interrupted or not run."""
    try:
        manifest = read_manifest(stage_directory(root, stage))
    except ArtifactError as error:
        return [stage, f"broken: {error}", "", "", ""]
    state, details = "", ""
    if (unfinished := unfinished_state(root, stage)) is not None:
        state, step = unfinished.name, last_step(root, stage)
        of_total = f" of {unfinished.total}" if unfinished.total is not None else ""
        details = f"saved after step {step}{of_total}" if step is not None else "nothing saved"
        if unfinished.owner is not None:
            state += f", step {unfinished.step}{of_total}"
            details += f"{'' if step is not None else ' yet'}; {unfinished.owner}"
        else:
            details += "; the next run starts over" if step is None else "; run the same command to resume"
    if manifest is None:
        return [stage, state or "not run", "", "", details]
    try:
        words = problems_of(root, stage, manifest)
        finished = words if words.startswith(("stale", "damaged")) else "; ".join(filter(None, ("finished", words)))
    except ConfigError:
        finished = "finished by another version of rlhf (its config.yaml cannot be read)"
    except OSError as error:
        finished = f"finished; its data or inputs cannot be read ({error})"
    if state:
        finished += f"; a new run of it {'has' if state == 'failed' else 'is'} {state} ({details})"
    shown = SHOWN[stage].items()
    figures = ", ".join(f"{label} {manifest.metrics[key]:.3g}" for key, label in shown if key in manifest.metrics)
    return [stage, finished, manifest.finished[:16].replace("T", " "), f"{manifest.seconds:.0f}", figures]
