"""The artifact directory: the contract between the stages, and with other programs. Does not import torch.

    artifacts/<run>/<stage>/manifest.json   what was built and from what: see `Manifest`
                           /config.yaml     the resolved config; `rlhf <stage> --config` runs it again
                           /metrics.jsonl   one row per step
                           /samples.jsonl   prompts and responses
                           /model/          a plain Hugging Face model directory
                           /value_model/    ppo only

A stage is built in `.<stage>.partial` and renamed to `<stage>` at the end. So a directory that has a `manifest.json`
is complete, and a run that fails leaves the previous result intact.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from safetensors import SafetensorError

from rlhf_cli.config.base import REMOVED
from rlhf_cli.errors import ArtifactError, UserError
from rlhf_cli.files import digest_file, digest_once, read_text, stored_dtype
from rlhf_cli.run.lock import owner_of

MANIFEST = "manifest.json"
ADAPTER_CONFIG, MODEL_CONFIG = "adapter_config.json", "model_config.json"
"""Files of a directory of adapters: PEFT's config, and the config of the whole model."""
SLACK_S = 2.0
"""A file's time stamp may be this much later than the manifest's time, which has no fractions of a second."""


def _has_sections(identity: dict[str, Any]) -> dict[str, Any]:
    if not {"config", "data", "inputs"} <= identity.keys():
        raise ValueError("a section is missing")
    return identity


class Manifest(BaseModel, frozen=True, extra="forbid", strict=True):
    """The record of a finished stage. A stage is stale if its identity computed now would differ."""

    stage: str
    identity: Annotated[dict[str, dict[str, Any]], AfterValidator(_has_sections)]
    """`config` (every key that affects the result), and `data` and `inputs` (path -> digest)."""
    files: dict[str, str]
    """Relative path -> sha256 of every other file in the directory."""
    metrics: dict[str, float | Annotated[int, Field(gt=-(2**63), lt=2**63)]]  # JSON allows integers beyond floats
    """The final metrics on held-out data."""
    seed: int
    versions: dict[str, str]
    device: str
    num_processes: int
    seconds: float
    finished: str
    """UTC, ISO 8601."""
    dtypes: dict[str, str] = {}
    """Folder of a model -> the number format of its weights, such as `bfloat16`."""
    precision: str = ""
    """The number format of the passes. `precision: auto` chooses it."""
    contract: Literal[1] = 1
    """The version of this contract."""


def stage_directory(root: str | Path, stage: str) -> Path:
    return Path(root) / stage


def repeat_commands(directory: str | Path, stages: Iterable[str]) -> list[str]:
    """The commands that repeat the stages of a run, then measure and show the result.

    >>> for line in repeat_commands("mine", ["sft"]): print(line)
    rlhf sft --config mine/sft/config.yaml --set artifacts=artifacts/again
    rlhf eval artifacts/again
    rlhf report artifacts/again
    """
    out = "artifacts/again"
    trains = [f"rlhf {stage} --config {directory}/{stage}/config.yaml --set artifacts={out}" for stage in stages]
    return [*trains, f"rlhf eval {out}", f"rlhf report {out}"]


def partial_directory(root: str | Path, stage: str) -> Path:
    """Where `stage` is built until it is finished."""
    return Path(root) / f".{stage}.partial"


def set_aside_directory(root: str | Path, stage: str) -> Path:
    """Where the previous result is while the new one is renamed into its place."""
    return Path(root) / f".{stage}.old"


def read_manifest(directory: str | Path) -> Manifest | None:
    """The manifest of a finished stage; None if the directory has none. Raises ArtifactError if it cannot be read."""
    path = Path(directory) / MANIFEST
    try:
        return Manifest.model_validate_json(read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            wrong = error.errors()[0]
            reason = f"{'.'.join(map(str, wrong['loc'][:2]))}: {wrong['msg']}"
        raise ArtifactError(
            f"{path}: cannot be read by this version of rlhf ({reason}). Run the stage again with --restart"
        ) from None


def read_manifest_or_none(directory: str | Path) -> Manifest | None:
    """`read_manifest`, but None also for a manifest that cannot be read."""
    try:
        return read_manifest(directory)
    except ArtifactError:
        return None


# ------------------------------------------------------------------------------------------- digests


def fingerprint(path: str | None, revision: str | None = None) -> str:
    """A digest of the content of `path`, or of its manifest if it is a finished stage; "missing" for None.

    A path that is not on disk is taken as a hub id, which is identified by its name and revision.
    """
    if path is None:
        return "missing"
    local = Path(path)
    if local.is_file():
        return digest_once(local)
    if (local / MANIFEST).is_file():
        return digest_file(local / MANIFEST)
    if local.is_dir():
        digest = hashlib.sha256()
        for file in sorted(p for p in local.rglob("*") if p.is_file()):
            digest.update(f"{file.relative_to(local).as_posix()}\0{digest_once(file)}\n".encode())
        return digest.hexdigest()
    return f"hub:{path}@{revision or 'main'}"


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two nested mappings. Items of a list of mappings are numbered from 0.

    A key that this version removed has the value that every run has now (`REMOVED`).

    >>> differences({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]})
    ['a.1.b']
    >>> differences({"rollout": {"engine": "own", "max_staleness": 1}}, {"rollout": {}})
    ['rollout.max_staleness']
    """
    keys = []
    for key in sorted(old.keys() | new.keys(), key=str):
        always = REMOVED.get(f"{prefix}{key}".removeprefix("config."))
        a, b = _numbered(old.get(key)), _numbered(new.get(key, always))
        if isinstance(a, dict) and isinstance(b, dict):
            keys += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            keys.append(f"{prefix}{key}")
    return keys


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a nested config. Items of a list of mappings are numbered from 0.

    >>> flat({"a": {"b": 1}, "c": [2], "d": [{"e": 3}]})
    {'a.b': 1, 'c': [2], 'd.0.e': 3}
    """
    value = _numbered(value)
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for key, inner in value.items() for k, v in flat(inner, f"{prefix}.{key}" if prefix else key).items()}


def _numbered(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return value


# ------------------------------------------------------------------------------------------- writing


WHAT_HELPS = {
    errno.ENOSPC: "Free disk space",
    errno.EDQUOT: "Free disk space",
    errno.EFBIG: "Raise the limit of the size of a file (`ulimit -f unlimited`)",
}
"""By the error of a write. For any other, another folder may help."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise ArtifactError for an error of the system, which safetensors and tokenizers report by types of their own."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not (
            isinstance(error, OSError | SafetensorError) or "os error" in str(error)
        ):
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300]
        advice = next(
            (text for code, text in WHAT_HELPS.items() if os.strerror(code) in reason), "Choose another folder"
        )
        raise ArtifactError(f"{path}: cannot be written ({reason}). {advice}") from None


def share(directory: Path) -> None:
    """Let others read the files as the umask allows: safetensors writes for their owner only."""
    umask = os.umask(0)
    os.umask(umask)
    for path in filter(Path.is_file, directory.rglob("*")):
        with contextlib.suppress(OSError):  # of another user, or on a file system without modes
            path.chmod(0o666 & ~umask)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        sync(path)
    sync(directory)


def open_partial(root: str | Path, stage: str, *, keep: bool = False) -> Path:
    """Create the directory in which `stage` is built, empty unless `keep`. Raises ArtifactError if that fails."""
    recover(root, stage)
    partial = partial_directory(root, stage)
    try:
        if partial.exists() and not keep:
            shutil.rmtree(partial)
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"{partial}: cannot be written ({error.strerror or error}), and the stage is built here. "
            "Set another `artifacts`, or free disk space"
        ) from None
    return partial


def publish(root: str | Path, stage: str, **facts: Any) -> Manifest:
    """Write the manifest of the built stage, flush all files to disk, and rename the directory to its final name."""
    partial, final = partial_directory(root, stage), stage_directory(root, stage)
    share(partial)  # before the manifest: `damage_of_models` compares the times of changes
    files = {
        path.relative_to(partial).as_posix(): digest_file(path)
        for path in sorted(partial.rglob("*"))
        if path.is_file() and path != partial / MANIFEST
    }
    folders = sorted({path.parent for path in partial.rglob("*.safetensors")})
    dtypes = {path.relative_to(partial).as_posix(): stored_dtype(path) or "unknown" for path in folders}
    manifest = Manifest(stage=stage, files=files, dtypes=dtypes, **facts)
    text = json.dumps(manifest.model_dump(), indent=2, allow_nan=False) + "\n"
    (partial / MANIFEST).write_text(text, encoding="utf-8")
    sync_tree(partial)
    old = set_aside_directory(root, stage)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync(Path(root))  # before the previous result is removed
    shutil.rmtree(old, ignore_errors=True)
    return manifest


def recover(root: str | Path, stage: str) -> None:
    """Put the previous result back if a process was killed between the two renames of `publish`."""
    old, final = set_aside_directory(root, stage), stage_directory(root, stage)
    if old.is_dir() and not final.exists():
        old.rename(final)
    shutil.rmtree(old, ignore_errors=True)


# ------------------------------------------------------------------------------------------- reading


class MissingStageError(ArtifactError):
    """A stage that another one needs has not been run."""

    def __init__(self, root: str | Path, stage: str):
        self.root, self.stage = str(root), stage
        super().__init__(f"{root}: no finished '{stage}' stage")


def require_stage(root: str | Path, stage: str) -> Path:
    """The directory of a finished stage; raises MissingStageError if there is none."""
    if owner_of(root, stage) is None:  # else that process may be between the two renames of `publish`
        recover(root, stage)
    directory = stage_directory(root, stage)
    if read_manifest(directory) is None:
        raise MissingStageError(root, stage)
    return directory


class DamagedStageError(ArtifactError):
    """A model of a finished stage is not as the stage wrote it."""

    def __init__(self, directory: Path, stage: str, damage: str):
        self.root, self.stage = str(directory.parent), stage
        self.is_of_run = directory.name == stage
        super().__init__(
            f"{directory}: {damage}. Restore it, or rebuild the {stage} stage with --restart; to use it as it is, copy "
            "the folder elsewhere and give that path"
        )


def damage_of_models(directory: Path, manifest: Manifest, folder: str = "", *, thorough: bool = False) -> str | None:
    """Which file of the models in a finished stage is missing or modified; None if none is. Model cards may be edited.

    Unless `thorough`, only files with newer time stamps than the manifest are read. `folder` is one model, "" is all.
    """
    written = (directory / MANIFEST).stat().st_ctime_ns
    try:
        finished = datetime.fromisoformat(manifest.finished).timestamp() + SLACK_S
    except ValueError:  # of a manifest written by hand
        finished = 0.0
    for name, digest in manifest.files.items():
        first, *rest = PurePosixPath(name).parts
        if not rest or first != (folder or first) or name.endswith(".md"):
            continue
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        stat = path.stat()
        # The manifest's own time stamp may be younger than a change, if something touched it.
        may_differ = stat.st_ctime_ns >= written or stat.st_mtime > finished
        if (thorough or may_differ) and digest_once(path) != digest:
            return f"{name} was modified after the stage was finished"
    return None


def require_intact(path: str | Path, *, thorough: bool = False) -> None:
    """Raise DamagedStageError if a model of a finished stage was changed.

    `path` is the stage's directory, or the folder of one of its models or members. Other folders are not checked.
    """
    whole = Path(path)
    for directory, folder in ((whole, ""), (whole.parent, whole.name), (whole.parent.parent, whole.parent.name)):
        manifest = read_manifest_or_none(directory)
        if manifest is not None and (damage := damage_of_models(directory, manifest, folder, thorough=thorough)):
            raise DamagedStageError(directory, manifest.stage, damage)


def model_directory(path: str) -> str:
    """The model at `path`: `model/` inside it if it is a finished stage, else the path or hub id itself."""
    directory = Path(path)
    return str(directory / "model") if (directory / MANIFEST).is_file() else path


def is_adapter(path: str | Path) -> bool:
    """Whether a directory has adapters (PEFT's format) and no whole model."""
    return (Path(path) / ADAPTER_CONFIG).is_file() and not (Path(path) / "config.json").exists()


def reward_model_stage(path: str) -> str:
    """The `rm` stage of the run at `path` if that is finished, else the path or hub id itself."""
    return str(Path(path) / "rm") if (Path(path) / "rm" / MANIFEST).is_file() else path


# ------------------------------------------------------------------------- a folder that is complete or does not exist


def require_new(out: Path) -> None:
    """Raise ArtifactError if `out` exists."""
    if os.path.lexists(out):  # False in a folder that may not be entered
        raise ArtifactError(f"{out}: exists, and is not overwritten. Name another folder")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which is renamed to `out` at the end. If anything fails, nothing is left of it.

    Raises ArtifactError if `out` exists or cannot be written.
    """
    require_new(out)
    partial = out.with_name(f".{out.name}.partial")
    try:
        with writing(out):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            share(partial)
            sync_tree(partial)
            partial.rename(out)
            sync(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
