"""What decides a stage's result, as digests: a finished stage with the same identity need not run again.

No torch here: `rlhf pipeline` and `rlhf status` ask this of every stage before anything is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rlhf_cli.artifacts import MANIFEST, MissingStageError, fingerprint, require_stage
from rlhf_cli.config.stage import STAGES, Stage
from rlhf_cli.data_files import data_fingerprint, find_files
from rlhf_cli.errors import ArtifactError, ConfigError, DataError

NOT_PART: dict[str, Any] = {
    "artifacts": True,
    "device": True,
    "checkpoints": True,
    "optimizer": {"max_bad_steps"},
}
"""Keys that say where and how safely a stage runs, and not what it computes: a run that comes to its end comes to the
same one, whatever these are."""
MAY_CHANGE = (
    "config.training.tokens_per_microbatch",
    "config.ppo.tokens_per_microbatch",
    "config.training.microbatch_size",
    "config.ppo.microbatch_size",
    "config.rollout.max_live_rows",
    "config.gradient_checkpointing",
    "config.compile",
    "config.training.num_steps",
    "config.training.num_epochs",
    "config.ppo.num_iterations",
    "config.evaluation.every_steps",
    "config.evaluation.every_iterations",
    "config.evaluation.num_samples",
    "config.evaluation.num_examples",
    "config.num_logged_samples",
    "config.warn_loss_above",
    "config.rewards.*.url",
    "config.rewards.*.api_key_env",
    "config.rewards.*.timeout_s",
    "config.rewards.*.retries",
    "config.rewards.*.backoff_s",
    "config.rewards.*.concurrency",
    "config.rewards.*.batch_size",
)
"""Keys that an unfinished run may go on with changed: how much is computed at a time (the same gradient, rounded
otherwise: what is lowered where memory ran out), how long it is, what it says of itself, and where the server of a
reward stands and how it is asked. (Where a schedule ends moves with the length.)"""


def may_change(key: str) -> bool:
    """May an unfinished run go on with another value of this dotted key?

    >>> may_change("config.rewards.0.url"), may_change("config.rewards.0.weight")
    (True, False)
    """
    return any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)


def identity(config: Stage) -> dict[str, Any]:
    """Config, data and inputs of a stage, the latter two by digest."""
    return {
        "config": config.model_dump(mode="json", exclude=NOT_PART),
        "data": {role: data_fingerprint(s.path, s.revision) for role, s in config.sources.items()},
        "inputs": {role: fingerprint(*where) for role, where in config.inputs.items()},
    }


def what_changed(config: Stage, made_from: Mapping[str, Any], root: str | Path) -> str:
    """What a finished stage at `root` was made from against what is there now, in words; "" where it is the same.

    `made_from` is the identity in its manifest. Relative paths are seen from where the run was started, if the root
    says where that was (`working_directory`), and the run's own stages in the root as it stands now: it does not
    matter from where one looks, nor whether all of it was moved. Else they are seen from here.
    """
    base = working_directory(config.artifacts, root) or Path.cwd()
    own = {f"{config.artifacts}/{stage}": str(Path(root) / stage) for stage in STAGES}
    changed, gone = [], []
    paths = [("data", role, source.path, source.revision) for role, source in config.sources.items()]
    paths += [("inputs", role, *where) for role, where in config.inputs.items()]
    for part, role, path, revision in paths:
        place = own.get(path, str(base / path))
        find = data_fingerprint if part == "data" else fingerprint
        is_here = Path(place).exists() or (part == "data" and data_fingerprint(place) != "missing")
        if find(place if is_here else path, revision) == made_from[part].get(role):
            continue
        name = f"{part.removesuffix('s')} {role}"
        if is_here:
            changed.append(name)
        else:
            gone.append(f"{name} ({path})")
    roles = {part: {role for other, role, _, _ in paths if other == part} for part in ("data", "inputs")}
    changed += [f"{part.removesuffix('s')} {role}" for part in roles for role in made_from[part].keys() - roles[part]]
    words = [f"stale: changed since: {', '.join(changed)}"] if changed else []
    if gone:
        words.append(f"not here, seen from {base}: {', '.join(gone)}")
    return "; ".join(words)


def working_directory(artifacts: str, root: str | Path) -> Path | None:
    """Where a run was started whose config says `artifacts` and that stands at `root`; None where they don't fit.

    >>> working_directory("artifacts/support", "/home/me/project/artifacts/support")
    PosixPath('/home/me/project')
    >>> working_directory("artifacts/support", "/backup/support") is None
    True
    """
    parts = Path(artifacts).parts
    place = Path(os.path.normpath(Path(root).absolute()))
    if Path(artifacts).is_absolute() or ".." in parts or place.parts[len(place.parts) - len(parts) :] != parts:
        return None
    return Path(*place.parts[: len(place.parts) - len(parts)])


def require_inputs(config: Stage) -> None:
    """Raise MissingStageError for the first stage of the run that this one stands on and that is not there."""
    for stage in config.needs:
        require_stage(config.artifacts, stage)


def require_files(config: Stage) -> None:
    """Raise for the first path of a config that can only mean a file here and is not there.

    A path that could be a hub id is left to whoever loads it. One that ends in a stage's name is taken for a
    finished stage that has yet to run.
    """
    for role, source in config.sources.items():
        try:
            find_files(source.path)
        except DataError as error:
            raise DataError(f"data.{role}: {error}") from None
    own = {f"{config.artifacts}/{stage}" for stage in STAGES}
    for role, (path, _) in config.inputs.items():
        place = Path(path)
        if place.is_dir() and path not in own:
            require_model_files(role, path)
        if place.exists() or path in own:
            continue
        if place.suffix == ".py":
            raise ConfigError(f"{role}: {path}: no such file (looked from {Path.cwd()})")
        if place.name in STAGES and len(place.parts) > 2:
            raise MissingStageError(place.parent, place.name)
        if is_local(path):
            raise ArtifactError(f"{role}: {path}: no such directory (looked from {Path.cwd()})")


def require_model_files(role: str, path: str) -> None:
    """Raise ArtifactError for a folder that is no finished stage and no model, before anybody reads through it."""
    place = Path(path)
    if place.resolve() == place.resolve().parent or not any(
        (place / name).is_file() for name in (MANIFEST, "config.json")
    ):
        raise ArtifactError(
            f"{role}: {path}: no config.json, so it is no Hugging Face model directory, and no finished stage"
        )


def is_local(path: str) -> bool:
    """Can this path only mean a place on this machine? A hub id is a name or owner/name."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1
