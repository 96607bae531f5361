"""Whether a finished stage may be used as it is: its models are as it wrote them, its data and inputs unchanged."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_cli.config.by_stage import load_stage_config
from rlhf_cli.config.stage import STAGES, Stage
from rlhf_cli.data.paths import data_fingerprint
from rlhf_cli.run.artifacts import (
    DamagedStageError,
    Manifest,
    damage_of_models,
    fingerprint,
    require_intact,
    stage_directory,
)
from rlhf_cli.run.identity import inputs_of


def what_changed(config: Stage, recorded: Mapping[str, Any], root: str | Path) -> str:
    """How the data and inputs of the finished stage at `root` differ from the current ones; "" if they are the same.

    `recorded` is the identity in the stage's manifest. Relative paths are resolved from the directory in which the run
    was started (`working_directory`), or from the current directory if that is unknown. The run's own stages are looked
    up in `root`. So the result does not depend on the current directory, and the whole run may have been moved.
    """
    base = working_directory(config.artifacts, root) or Path.cwd()
    stages_of_run = {f"{config.artifacts}/{stage}": str(Path(root) / stage) for stage in STAGES}
    changed, missing = [], []
    used = [("data", role, source.path, source.revision) for role, source in config.sources.items()]
    used += [("inputs", role, *path) for role, path in inputs_of(config, base).items()]
    for section, role, path, revision in used:
        local = stages_of_run.get(path, str(base / path))
        digest_of = data_fingerprint if section == "data" else fingerprint
        exists = Path(local).exists() or (section == "data" and data_fingerprint(local) != "missing")
        same = digest_of(local if exists else path, revision) == recorded[section].get(role)
        if same and not (section == "inputs" and _is_damaged(local)):
            continue
        name = f"{section.removesuffix('s')} {role}"
        if exists:
            changed.append(name)
        else:
            missing.append(f"{name} ({path})")
    roles = {section: {role for other, role, _, _ in used if other == section} for section in ("data", "inputs")}
    changed += [
        f"{section.removesuffix('s')} {role}" for section in roles for role in recorded[section].keys() - roles[section]
    ]
    words = [f"stale, changed since: {', '.join(changed)}"] if changed else []
    if missing:
        words.append(f"not found from {base}: {', '.join(missing)}")
    return "; ".join(words)


def _is_damaged(path: str) -> bool:
    try:
        require_intact(path)
    except DamagedStageError:
        return True
    return False


def problems_of(root: str | Path, stage: str, manifest: Manifest) -> str:
    """Why the finished stage at `root` should not be used as it is: damaged models, changed data; "" if it can be.

    Raises ConfigError if this version cannot read its config.yaml, and OSError if its data cannot be read.
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
