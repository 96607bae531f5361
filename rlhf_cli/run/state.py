"""Where a stage is: finished, running, failed, interrupted or not run. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_cli.config.stage import STAGES
from rlhf_cli.files import last_row, read_object
from rlhf_cli.health.recap import unit_of
from rlhf_cli.run.artifacts import partial_directory, stage_directory
from rlhf_cli.run.checkpoint_files import END, TOTAL, checkpoints_directory
from rlhf_cli.run.lock import Owner, owner_of


@dataclass(frozen=True)
class StageState:
    """Where a stage is."""

    name: str
    """finished, running, failed, interrupted or not run."""
    step: int = 0
    """The last step in its metrics."""
    total: int | None = None
    line: str = ""
    """The line with which a run ended that failed or was interrupted; empty if its process was killed."""
    owner: Owner | None = None
    """The process of a running stage."""

    def words(self, stage: str) -> str:
        """The state in words.

        >>> StageState("failed", 12, 134, "NaN").words("ppo"), StageState("interrupted").words("sft")
        ('failed after iteration 12 of 134: NaN', 'interrupted before step 1: its process was killed')
        """
        return f"{self.place(stage)}: {self.why}" if self.why else self.place(stage)

    @property
    def why(self) -> str:
        """Why a stage ended that is not finished."""
        return self.line or ("its process was killed" if self.name in ("failed", "interrupted") else "")

    def place(self, stage: str) -> str:
        """The state without `why`."""
        of_total = f" of {self.total}" if self.total is not None else ""
        place = f"after {unit_of(stage)} {self.step}{of_total}" if self.step else f"before {unit_of(stage)} 1"
        return f"{self.name} {place}" if self.name in ("running", "failed", "interrupted") else self.name


NOT_RUN = StageState("not run")


def total_steps(root: str | Path, stage: str) -> int | None:
    """The number of steps of an unfinished stage; None if it has not started to train."""
    total = read_object(checkpoints_directory(root, stage) / TOTAL).get("total")
    return total if isinstance(total, int) else None


def unfinished_state(root: str | Path, stage: str) -> StageState | None:
    """The state of the unfinished run of a stage; None if there is none."""
    partial, owner = partial_directory(root, stage), owner_of(root, stage)
    if owner is None and not partial.is_dir():
        return None
    row = last_row(partial / "metrics.jsonl") or {}
    step = row["step"] if isinstance(row.get("step"), int) else 0
    end = read_object(partial / END) if owner is None else {}
    name = "running" if owner is not None else "failed" if end.get("state") == "failed" else "interrupted"
    return StageState(name, step, total_steps(root, stage), str(end.get("line", "")), owner)


def state_of(root: str | Path, stage: str) -> StageState:
    """The state of a stage. That of an unfinished run counts even if an earlier one is finished."""
    if (unfinished := unfinished_state(root, stage)) is not None:
        return unfinished
    return StageState("finished") if stage_directory(root, stage).is_dir() else NOT_RUN


def unfinished_stages(root: str | Path) -> list[tuple[StageState, str]]:
    """The stages of a run that are not finished, each with a sentence about it.

    A stage that has not run is left out while another stage of the run is at work, which may be followed by it.
    """
    states = {stage: state_of(root, stage) for stage in STAGES}
    is_running = any(state.name == "running" for state in states.values())
    return [
        (state, f"{'a new run of ' if stage_directory(root, stage).is_dir() else ''}{stage}: {state.words(stage)}")
        for stage, state in states.items()
        if state.name != "finished" and not (is_running and state.name == "not run")
    ]
