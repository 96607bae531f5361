"""The state of a stage, and whether a finished one may be used as it is. Does not import torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.config.stage import STAGES, Stage
from rlhf_cli.data.paths import data_fingerprint
from rlhf_cli.files import last_row, read_object
from rlhf_cli.health.recap import unit_of
from rlhf_cli.run.artifacts import (
    MANIFEST,
    DamagedStageError,
    Manifest,
    damage_of_models,
    fingerprint,
    partial_directory,
    require_intact,
    stage_directory,
)
from rlhf_cli.run.checkpoint_files import END, TOTAL, checkpoints_directory
from rlhf_cli.run.identity import inputs_of
from rlhf_cli.run.lock import Owner, owner_of


@dataclass(frozen=True)
class StageState:
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
        """
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


def unfinished_state(root: str | Path, stage: str) -> StageState | None:
    """The state of the unfinished run of a stage; None if there is none."""
    partial, owner = partial_directory(root, stage), owner_of(root, stage)
    if owner is None and not partial.is_dir():
        return None
    step = (last_row(partial / "metrics.jsonl") or {}).get("step", 0)
    total = read_object(checkpoints_directory(root, stage) / TOTAL).get("total")  # None before it trains
    end = read_object(partial / END) if owner is None else {}
    name = "running" if owner is not None else "failed" if end.get("state") == "failed" else "interrupted"
    return StageState(name, step, total, end.get("line", ""), owner)


def state_of(root: str | Path, stage: str) -> StageState:
    """The state of a stage. An unfinished run counts even if an earlier one is finished."""
    if (unfinished := unfinished_state(root, stage)) is not None:
        return unfinished
    return StageState("finished") if (stage_directory(root, stage) / MANIFEST).is_file() else NOT_RUN


def unfinished_stages(root: str | Path) -> list[tuple[StageState, str]]:
    """The stages of a run that are not finished, each with a sentence about it.

    While one runs, those that have not run are left out: they may follow it.
    """
    states = {stage: state_of(root, stage) for stage in STAGES}
    is_running = any(state.name == "running" for state in states.values())
    return [
        (state, f"{'a new run of ' if stage_directory(root, stage).is_dir() else ''}{stage}: {state.words(stage)}")
        for stage, state in states.items()
        if state.name != "finished" and not (is_running and state.name == "not run")
    ]


# ------------------------------------- a finished stage: its models are as it wrote them, its data and inputs unchanged


def what_changed(config: Stage, recorded: Mapping[str, Any], root: str | Path) -> str:
    """How the data and inputs of the finished stage at `root` differ from those in its manifest; "" if they do not.

    `recorded` is the manifest's identity. The run may have been moved: relative paths start from the directory in which
    it was started, if that is known, and its own stages are looked up in `root`.
    """
    base = working_directory(config.artifacts, root) or Path.cwd()
    stages_of_run = {f"{config.artifacts}/{stage}": str(Path(root) / stage) for stage in STAGES}
    changed, missing = [], []
    used = {("data", role): (source.path, source.revision) for role, source in config.sources.items()}
    used |= {("inputs", role): place for role, place in inputs_of(config, base).items()}
    for (section, role), (path, revision) in used.items():
        local = stages_of_run.get(path, str(base / path))
        digest_of = data_fingerprint if section == "data" else fingerprint
        exists = Path(local).exists() or (section == "data" and data_fingerprint(local) != "missing")
        same = digest_of(local if exists else path, revision) == recorded[section].get(role)
        with contextlib.suppress(DamagedStageError):
            if section == "inputs":
                require_intact(local)
            if same:
                continue
        name = f"{section.removesuffix('s')} {role}"
        if exists:
            changed.append(name)
        else:
            missing.append(f"{name} ({path})")
    all_recorded = [(section, role) for section in ("data", "inputs") for role in recorded[section]]
    changed += [f"{section.removesuffix('s')} {role}" for section, role in all_recorded if (section, role) not in used]
    words = [f"stale, changed since: {', '.join(changed)}"] if changed else []
    if missing:
        words.append(f"not found from {base}: {', '.join(missing)}")
    return "; ".join(words)


def problems_of(root: str | Path, stage: str, manifest: Manifest) -> str:
    """Why the finished stage at `root` should not be used as it is; "" if it can be.

    Raises ConfigError or OSError if its config.yaml or data cannot be read.
    """
    directory = stage_directory(root, stage)
    damage = damage_of_models(directory, manifest)
    config = load_stage_config(stage, directory / "config.yaml")
    words = what_changed(config, manifest.identity, root)
    return "; ".join(filter(None, (f"damaged: {damage}" if damage else "", words)))


def working_directory(artifacts: str, root: str | Path) -> Path | None:
    """The directory in which a run was started, from its `artifacts` and its current `root`; None if they do not match.

    >>> working_directory("artifacts/support", "/home/me/project/artifacts/support")
    PosixPath('/home/me/project')
    >>> working_directory("artifacts/support", "/backup/support") is None
    True
    """
    parts = Path(artifacts).parts
    absolute = Path(os.path.normpath(Path(root).absolute()))
    num_above = len(absolute.parts) - len(parts)
    if Path(artifacts).is_absolute() or ".." in parts or absolute.parts[num_above:] != parts:
        return None
    return Path(*absolute.parts[:num_above])
