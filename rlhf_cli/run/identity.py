"""The identity of a stage: config, and digests of data and inputs. A finished stage of the same identity is skipped.

Does not import torch, because `rlhf pipeline` and `rlhf status` compute the identity of every stage first.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rlhf_cli.config.stage import STAGES, Stage
from rlhf_cli.data.paths import data_fingerprint, find_files
from rlhf_cli.errors import ArtifactError, ConfigError, DataError
from rlhf_cli.hub import is_local
from rlhf_cli.run.artifacts import ADAPTER_CONFIG, MANIFEST, MissingStageError, fingerprint, require_stage

OURS = ("rlhf_cli", "stages")
"""Packages that a reward file in a checkout of this repository has beside it; their version is in the manifest."""
NOT_IN_IDENTITY: dict[str, Any] = {
    **dict.fromkeys(("artifacts", "device", "checkpoints", "distributed", "threads", "offload"), True),
    **dict.fromkeys(("samples_every", "require", "trackers"), True),
    "optimizer": {"max_bad_steps"},
}
"""Keys that do not affect the result of a run that finishes: where it runs, when it stops, what it prints."""
MAY_CHANGE = (
    # The same gradient with different rounding. These are lowered after an out-of-memory error.
    *("*.tokens_per_microbatch", "*.microbatch_size", "*.max_live_rows"),
    *("rollout.decoder", "gradient_checkpointing", "compile"),
    # The length of the run. The end of the learning-rate schedule moves with it.
    *("training.num_steps", "training.num_epochs", "training.save_every", "ppo.num_iterations"),
    *(f"evaluation.{key}" for key in ("every_steps", "every_iterations", "num_samples", "num_examples")),
    *("num_logged_samples", "warn_loss_above"),
    # How to reach a reward server.
    *(f"rewards.*.{key}" for key in ("url", "api_key_env", "timeout_s", "retries", "backoff_s")),
    *("rewards.*.concurrency", "rewards.*.batch_size"),
)
"""Keys of a config that may differ when an unfinished run is resumed."""


def may_change(key: str) -> bool:
    """Whether an unfinished run can be resumed with a different value of this dotted key.

    >>> may_change("config.rewards.0.url"), may_change("config.rewards.0.weight")
    (True, False)
    """
    return any(fnmatchcase(key, f"config.{pattern}") for pattern in MAY_CHANGE)


def identity(config: Stage) -> dict[str, Any]:
    """The config of a stage, and the digests of its data and inputs, as JSON values."""
    values = {
        "config": config.model_dump(mode="json", exclude=NOT_IN_IDENTITY),
        "data": {role: data_fingerprint(s.path, s.revision) for role, s in config.sources.items()},
        "inputs": {role: fingerprint(*where) for role, where in inputs_of(config, Path()).items()},
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def inputs_of(config: Stage, base: Path) -> dict[str, tuple[str, str | None]]:
    """`config.inputs`, and the modules that files of the user's code, looked up in `base`, import from beside them."""
    inputs = dict(config.inputs)
    for role, (path, _) in config.inputs.items():
        if path.endswith(".py"):
            folder = Path(path).parent
            for file in imported_files(base / path):
                name = file.relative_to((base / path).parent)
                inputs[f"{role} import {name.as_posix()}"] = (str(folder / name), None)
    return inputs


def require_inputs(config: Stage) -> None:
    """Raise MissingStageError for the first stage that this one needs and that is not finished."""
    for stage in config.needs:
        require_stage(config.artifacts, stage)


def require_files(config: Stage) -> None:
    """Raise for the first path of a config that can only be a local file, and does not exist.

    A path that ends in the name of a stage may be the output of one that has not run yet.
    """
    for role, source in config.sources.items():
        try:
            find_files(source.path)
        except DataError as error:
            raise DataError(f"data.{role}: {error}") from None
    stages_of_run = {f"{config.artifacts}/{stage}" for stage in STAGES}
    for role, (path, _) in config.inputs.items():
        local, names = Path(path), (MANIFEST, "config.json", ADAPTER_CONFIG)
        if path in stages_of_run or local.is_file() or any((local / name).is_file() for name in names):
            continue
        if local.is_dir():  # found before the files of the folder are hashed
            raise ArtifactError(
                f"{role}: {path}: has no config.json, so it is neither a Hugging Face model directory nor a finished "
                "stage"
            )
        if local.suffix == ".py":
            raise ConfigError(f"{role}: {path}: no such file (looked in {Path.cwd()})")
        if local.name in STAGES and len(local.parts) > 2:
            raise MissingStageError(local.parent, local.name)
        if is_local(path):
            raise ArtifactError(f"{role}: {path}: no such directory (looked in {Path.cwd()}), and not a hub id")


# ------------------------------------------------------------------------------------------- the user's code


def imported_files(file: Path) -> list[Path]:
    """The files in the folder of `file` and below that its import statements reach, sorted."""
    known: set[Path] = set()
    waiting = [file]
    while waiting:
        for parts in _imports(waiting.pop(), file.parent):
            ends = range(1, len(parts) + 1) if parts[0] not in OURS else ()
            modules = [file.parent.joinpath(*parts[:end]) for end in ends]  # its packages and the module itself
            paths = [path for each in modules for path in (each / "__init__.py", each.with_name(f"{each.name}.py"))]
            new = {path for path in paths if path.is_file()} - known - {file}
            known |= new
            waiting += new
    return sorted(known)


def _imports(file: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """The modules that a file's import statements name, as parts of their dotted names."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # running the file gives the error
    package = file.parent.relative_to(root).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)
