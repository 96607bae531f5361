"""The checks of `rlhf doctor` on an artifact directory: disk space, finished stages, unfinished runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

from rlhf_cli.artifacts import (
    MANIFEST,
    Manifest,
    model_directory,
    partial_directory,
    read_manifest,
    set_aside_directory,
    stage_directory,
)
from rlhf_cli.commands.doctor_text import Line, names, size
from rlhf_cli.config.ppo import PPOConfig
from rlhf_cli.config.stage import STAGES, Stage
from rlhf_cli.errors import ArtifactError, ConfigError
from rlhf_cli.files import digest_file
from rlhf_cli.training.checkpoint_files import checkpoints_directory, damage_of, list_checkpoints
from rlhf_cli.training.identity import what_changed
from rlhf_cli.training.launch import load_stage_config
from rlhf_cli.training.lock import lock_path, owner_of

NOT_SAFETENSORS = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npz", ".h5", ".msgpack", ".gguf"}
MODELS = ("model", "value_model", "ema_model", "best_model")

# ------------------------------------------------------------------------------------------ disk space


def disk(directory: Path | None) -> Line:
    """Compare the free space with what running a stage of `directory` again writes before it is published.

    That is ``models * (1 + 3 * (checkpoints.keep + 1))``: the saved models, and for each checkpoint (one more is being
    written) the weights and AdamW's two moments, all in float32. Adapters need less.
    """
    location = directory if directory is not None else Path.cwd()
    free = shutil.disk_usage(location).free
    text = f"{size(free)} free at {location}"
    if directory is not None and not os.access(directory, os.W_OK):
        return Line("warning", "disk", f"{text}, which is not writable: you can inspect it, but not run a stage")
    needs = {}
    for stage, built in _stage_directories(directory).items():
        config = _config_of(stage, built)
        models = sum(weight_bytes(built / name) for name in MODELS) or (_expected_bytes(config) if config else 0)
        if models:
            checkpoints = (config.checkpoints.keep if config is not None else 2) + 1
            needs[stage] = (models * (1 + 3 * checkpoints), f"{size(models)} x (1 + 3 x {checkpoints})")
    if not needs:
        return Line("ok", "disk", text)
    most = max(need for need, _ in needs.values())
    sums = ", ".join(f"{stage} {formula} = {size(need)}" for stage, (need, formula) in needs.items())
    text += (
        f"; running a stage again needs up to {size(most)} (its models, and for each checkpoint three times their "
        f"size: the weights and the two moments of AdamW). {sums}"
    )
    if free < most:
        return Line("problem", "disk", f"{text}. Free disk space, or lower checkpoints.keep")
    return Line("ok", "disk", text)


def _stage_directories(directory: Path | None) -> dict[str, Path]:
    """Each stage and its directory, finished or being built."""
    if directory is None:
        return {}
    if (directory / MANIFEST).exists():
        return {directory.resolve().name: directory}
    directories: dict[str, Path] = {}
    for stage in STAGES:
        for built in (stage_directory(directory, stage), partial_directory(directory, stage)):
            if built.is_dir():
                directories.setdefault(stage, built)
    return directories


def _config_of(stage: str, built: Path) -> Stage | None:
    """The config in a stage's directory; None if this version cannot read it."""
    if stage not in STAGES or not (built / "config.yaml").is_file():
        return None
    try:
        return load_stage_config(stage, built / "config.yaml")
    except ConfigError:
        return None


def _expected_bytes(config: Stage) -> int:
    """The bytes that an unfinished stage will save, from the models it starts from if they are local."""
    of_policy = [role for role in ("model", "policy") if role in config.inputs]
    policy = sum(weight_bytes(Path(model_directory(config.inputs[role][0]))) for role in of_policy)
    with_value_model = isinstance(config, PPOConfig) and config.ppo.has_value_model
    return 2 * policy if with_value_model else policy


def weight_bytes(directory: Path) -> int:
    """Bytes of a model directory's weights in float32, from the headers of its safetensors files; 0 without any."""
    numbers = 0
    for path in filter(Path.is_file, directory.glob("*.safetensors")):
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 100_000_000)))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            numbers += sum(math.prod(entry["shape"]) for entry in tensors)
    return 4 * numbers


# ---------------------------------------------------------------------------------------------- stages


def finished(directory: Path, stage: str) -> Iterator[Line]:
    """Check a finished stage: its manifest, the digest of every file, foreign files, and whether it is stale."""
    try:
        manifest = read_manifest(directory) if (directory / MANIFEST).is_file() else None
    except ArtifactError as error:
        yield Line("problem", stage, str(error))
        return
    if manifest is None:
        yield Line(
            "problem",
            stage,
            f"{directory}: has no {MANIFEST}, so it is not a finished stage. Remove it, or run the stage",
        )
        return
    if manifest.stage not in STAGES:
        yield Line(
            "problem", stage, f"{directory / MANIFEST}: names an unknown stage. Run the stage again with --restart"
        )
        return
    problems = list(files(directory, manifest.files, stage))
    yield from problems
    if not any(line.word == "problem" for line in problems):
        num_bytes = sum((directory / name).stat().st_size for name in manifest.files)
        text = (
            f"{len(manifest.files)} files, {size(num_bytes)}, all unchanged since they were written on "
            f"{manifest.finished[:10]}"
        )
        yield Line("ok", stage, text)
    yield inputs(directory, manifest)


def files(directory: Path, digests: Mapping[str, str], stage: str) -> Iterator[Line]:
    """Check the files of a directory against their digests. Names that lead outside it, and links, are not followed."""
    outside = [name for name in digests if not _stays_inside(name)]
    links = [name for name in digests if name not in outside and _has_link(directory, name)]
    missing, changed = [], []
    for name in digests:
        if name in outside or name in links:
            continue
        path = directory / name
        if not path.is_file():
            missing.append(name)
            continue
        try:
            if digest_file(path) != digests[name]:
                changed.append(name)
        except OSError as error:
            changed.append(f"{name} (cannot be read: {error.strerror})")
    there = [
        (Path(parent) / name).relative_to(directory).as_posix()
        for parent, folders, names in os.walk(directory)
        for name in [*names, *(n for n in folders if (Path(parent) / n).is_symlink())]
    ]
    extra = sorted(set(there) - set(digests) - {MANIFEST})
    kinds: list[tuple[Literal["warning", "problem"], list[str], str]] = [
        ("problem", outside, "its manifest names files outside the directory, which were not read"),
        ("problem", links, "files were replaced by links, which were not followed"),
        ("problem", missing, "missing"),
        ("problem", changed, "modified after they were written"),
        ("warning", extra, "not written by the stage"),
        ("warning", [n for n in there if Path(n).suffix.lower() in NOT_SAFETENSORS],
         "not safetensors: rlhf does not read them, and programs that do may run code in them"),
        ("warning", [n for n in there if Path(n).suffix == ".py"], "Python code, which rlhf does not run"),
    ]  # fmt: skip
    for word, found, what in kinds:
        if found:
            yield Line(word, stage, f"{directory}: {what}: {names(found)}")


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _has_link(directory: Path, name: str) -> bool:
    parts = PurePosixPath(name).parts
    return any(directory.joinpath(*parts[: n + 1]).is_symlink() for n in range(len(parts)))


def inputs(directory: Path, manifest: Manifest) -> Line:
    """Check whether the data and inputs of a stage are unchanged."""
    stage = manifest.stage
    config = _config_of(stage, directory)
    if config is None:
        return Line(
            "warning", stage, "this version of rlhf cannot read its config.yaml, so it is unknown whether it is stale"
        )
    try:
        words = what_changed(config, manifest.identity, directory.absolute().parent)
    except OSError as error:
        return Line("warning", stage, f"its data or inputs cannot be read ({error})")
    return Line("warning", stage, words) if words else Line("ok", stage, "its data and inputs are unchanged")


def unfinished(root: Path, stage: str) -> Iterator[Line]:
    """Check for a running process, an interrupted run and its checkpoints, and files left by a killed process."""
    directory, partial = checkpoints_directory(root, stage), partial_directory(root, stage)
    old, lock = set_aside_directory(root, stage), lock_path(root, stage)
    is_lock = lock.is_file() and not lock.is_symlink()
    owner = owner_of(root, stage) if is_lock else None
    if owner is not None:
        yield Line("ok", stage, f"running: {owner}")
    elif is_lock:
        yield Line("ok", stage, f"{lock}: left by a process that has ended; the next run uses it")
    elif lock.exists() or lock.is_symlink():
        yield Line("problem", stage, f"{lock}: is not a lock file of rlhf. Remove it")
    if directory.is_dir() and (partial.is_dir() or owner is not None):
        yield from _checkpoints(directory, stage, is_running=owner is not None)
    elif directory.is_dir():
        yield Line("warning", stage, f"{directory}: left by a finished run, no longer needed. Remove it")
    if owner is None and partial.is_dir() and not list_checkpoints(directory):
        yield Line(
            "warning",
            stage,
            f"{partial}: left by a run that was stopped before its first checkpoint; the next run starts over",
        )
    if old.is_dir() and stage_directory(root, stage).exists():
        yield Line("warning", stage, f"{old}: left by an interrupted publication; the next run removes it")
    elif old.is_dir():
        yield Line(
            "warning",
            stage,
            f"{old}: the finished stage, set aside by an interrupted publication; the next run restores it",
        )


def _checkpoints(directory: Path, stage: str, *, is_running: bool) -> Iterator[Line]:
    good, damaged = [], []
    for checkpoint in list_checkpoints(directory):
        wrong = _damage(checkpoint)
        if wrong is None:
            good.append(checkpoint.name)
        elif not is_running or checkpoint.exists():  # else the running process removed it meanwhile
            damaged.append(f"{checkpoint.name} ({wrong})")
    if good and not is_running:
        yield Line(
            "ok",
            stage,
            f"interrupted; the next run resumes from {good[-1]}, {len(good)} good checkpoints in {directory}",
        )
    elif good:
        yield Line("ok", stage, f"{len(good)} good checkpoints, the newest {good[-1]}")
    if damaged and good:
        yield Line("warning", stage, f"{directory}: damaged, not used: {names(damaged)}")
    elif damaged:
        text = f"{directory}: every checkpoint is damaged, the next run starts over: {names(damaged)}"
        yield Line("problem", stage, text)
    left = sorted(path.name for path in directory.glob(".*"))
    if left and not is_running:
        yield Line("warning", stage, f"{directory}: temporary files, not used: {names(left)}")


def _damage(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used, or None. Opens regular files only, and follows no link."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        return "not a folder"
    for path in sorted(checkpoint.iterdir()):
        if path.is_symlink() or not path.is_file():
            return f"{path.name} is not a regular file"
    try:
        return damage_of(checkpoint)
    except (TypeError, RecursionError):
        return f"its {MANIFEST} cannot be read"
