"""The artifact directory: the contract between the stages and with the world. No torch here.

    artifacts/<run>/<stage>/manifest.json   what was made, from what: see `Manifest`
                           /config.yaml     the resolved config; `rlhf <stage> --config` runs it again
                           /metrics.jsonl   one row a step
                           /samples.jsonl   what the model said
                           /model/          a plain Hugging Face directory
                           /value_model/    ppo only

A stage is built in `.<stage>.partial` beside its place and renamed into it, so a directory that has a
`manifest.json` is complete, and a run that fails leaves what stood before as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_cli.errors import ArtifactError

CONTRACT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a finished stage says of itself; a stage is stale when its identity would come out different."""

    stage: str
    identity: dict[str, Any]
    """`config` (every key and value that decides the result), `data` and `inputs` (path -> digest)."""
    files: dict[str, str]
    """Relative path -> sha256 of every other file of the directory."""
    metrics: dict[str, float]
    """The final held-out figures."""
    seed: int
    versions: dict[str, str]
    device: str
    num_processes: int
    seconds: float
    finished: str
    """UTC, ISO 8601."""
    contract: int = CONTRACT_VERSION


def stage_directory(root: str | Path, stage: str) -> Path:
    """Where `stage` of the run at `root` stands when it is finished."""
    return Path(root) / stage


def partial_directory(root: str | Path, stage: str) -> Path:
    """Where `stage` is built until it is finished."""
    return Path(root) / f".{stage}.partial"


def set_aside_directory(root: str | Path, stage: str) -> Path:
    """Where the finished stage stands while another one takes its place."""
    return Path(root) / f".{stage}.old"


def read_manifest(directory: str | Path) -> Manifest | None:
    """The manifest of a finished stage, or None where there is none.

    Raises ArtifactError for one that can't be read or that another contract version wrote.
    """
    path = Path(directory) / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: can't be read ({error}). Run the stage again with --restart") from None
    if not isinstance(values, dict) or values.get("contract") != CONTRACT_VERSION:
        found = values.get("contract") if isinstance(values, dict) else None
        raise ArtifactError(
            f"{path}: contract version {found}, this version reads {CONTRACT_VERSION}. "
            "Run the stage again with --restart"
        )
    try:
        manifest = Manifest(**values)
    except TypeError:
        raise ArtifactError(f"{path}: keys are missing or unknown. Run the stage again with --restart") from None
    wrong = _wrongly_typed(manifest)
    if wrong is not None:
        raise ArtifactError(f"{path}: {wrong} is not what rlhf writes. Run the stage again with --restart")
    return manifest


def _wrongly_typed(manifest: Manifest) -> str | None:
    """The first value of a manifest of another type than ours have; a file may say anything."""
    types: dict[str, type] = {
        "stage": str,
        "identity": dict,
        "files": dict,
        "metrics": dict,
        "seed": int,
        "versions": dict,
        "device": str,
        "num_processes": int,
        "finished": str,
    }
    for key, kind in types.items():
        if not isinstance(getattr(manifest, key), kind):
            return key
    for part in ("config", "data", "inputs"):
        if not isinstance(manifest.identity.get(part), dict):
            return f"identity.{part}"
    for name, digest in manifest.files.items():
        if not isinstance(digest, str):
            return f"files: {name}"
    for name, figure in {"seconds": manifest.seconds, **manifest.metrics}.items():
        # JSON has integers that no float can hold.
        if not isinstance(figure, float) and not (isinstance(figure, int) and abs(figure) < 2**63):
            return name
    return None


def read_manifest_or_none(directory: str | Path) -> Manifest | None:
    """`read_manifest`, with None also where there is one that can't be read."""
    try:
        return read_manifest(directory)
    except ArtifactError:
        return None


# ------------------------------------------------------------------------------------------- digests


def digest_file(path: str | Path) -> str:
    """sha256 of a file's bytes, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(path: str | None, revision: str | None = None) -> str:
    """A digest that changes when what stands at `path` changes; the missing give "missing".

    A finished stage gives its manifest's digest, a file or a folder that of its bytes, and anything that is
    not on disk counts as a name on the hub, which is known by its revision only.
    """
    if path is None:
        return "missing"
    place = Path(path)
    if place.is_file():
        return digest_file(place)
    if (place / MANIFEST).is_file():
        return digest_file(place / MANIFEST)
    if place.is_dir():
        whole = hashlib.sha256()
        for file in sorted(p for p in place.rglob("*") if p.is_file()):
            whole.update(f"{file.relative_to(place).as_posix()}\0{digest_file(file)}\n".encode())
        return whole.hexdigest()
    return f"hub:{path}@{revision or 'main'}"


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two nested mappings; an item of a list of mappings has its number.

    >>> differences({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]})
    ['a.1.b']
    """
    keys = []
    for key in sorted(old.keys() | new.keys(), key=str):
        a, b = _numbered(old.get(key)), _numbered(new.get(key))
        if isinstance(a, dict) and isinstance(b, dict):
            keys += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            keys.append(f"{prefix}{key}")
    return keys


def _numbered(value: Any) -> Any:
    """A list of mappings as a mapping of their numbers, anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return value


def why_run(root: str | Path, stage: str, identity: dict[str, Any]) -> str | None:
    """Why `stage` has to run: "" where it never ran, the keys that changed, or None where it is up to date."""
    manifest = read_manifest(stage_directory(root, stage))
    if manifest is None:
        return ""
    changed = differences(manifest.identity, json.loads(json.dumps(identity)))
    if not changed:
        return None
    return "changed: " + ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")


# ------------------------------------------------------------------------------------------- writing


def sync(path: Path) -> None:
    """Have the disk keep a file, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Have the disk keep a folder and everything in it."""
    for path in sorted(directory.rglob("*"), reverse=True):
        sync(path)
    sync(directory)


def open_partial(root: str | Path, stage: str, *, keep: bool = False) -> Path:
    """A directory to build `stage` in: an empty one, or with `keep` the one that stands there.

    Raises ArtifactError where it can't be made; the finished stage, if there is one, is not touched.
    """
    recover(root, stage)
    partial = partial_directory(root, stage)
    try:
        if partial.exists() and not keep:
            shutil.rmtree(partial)
        partial.mkdir(parents=True, exist_ok=True)
        (partial / ".probe").write_bytes(b"\0" * 4096)
        (partial / ".probe").unlink()
    except OSError as error:
        raise ArtifactError(
            f"{partial}: can't be written ({error.strerror or error}), the stage is built here. "
            "Give another `artifacts`, or make room"
        ) from None
    return partial


def publish(root: str | Path, stage: str, **facts: Any) -> Manifest:
    """Write the manifest of the built stage and rename it into its place; the old one stands until then.

    Everything is on the disk before the rename, and the rename before the old one goes.
    """
    partial, place = partial_directory(root, stage), stage_directory(root, stage)
    files = {
        path.relative_to(partial).as_posix(): digest_file(path)
        for path in sorted(partial.rglob("*"))
        if path.is_file() and path != partial / MANIFEST
    }
    manifest = Manifest(stage=stage, files=files, **facts)
    text = json.dumps(asdict(manifest), indent=2, allow_nan=False, default=str) + "\n"
    (partial / MANIFEST).write_text(text, encoding="utf-8")
    sync_tree(partial)
    old = set_aside_directory(root, stage)
    if place.exists():
        place.rename(old)
    partial.rename(place)
    sync(Path(root))
    shutil.rmtree(old, ignore_errors=True)
    return manifest


def recover(root: str | Path, stage: str) -> None:
    """Undo a publication that was cut off between its two renames."""
    old, place = set_aside_directory(root, stage), stage_directory(root, stage)
    if old.is_dir() and not place.exists():
        old.rename(place)
    elif old.is_dir():
        shutil.rmtree(old, ignore_errors=True)


# ------------------------------------------------------------------------------------------- reading


class MissingStageError(ArtifactError):
    """A stage that another one stands on has not been run."""

    def __init__(self, root: str | Path, stage: str):
        self.stage = stage
        super().__init__(f"{root}: no finished '{stage}' stage")


def require_stage(root: str | Path, stage: str) -> Path:
    """The directory of a finished stage; raises MissingStageError where there is none."""
    recover(root, stage)
    directory = stage_directory(root, stage)
    if read_manifest(directory) is None:
        raise MissingStageError(root, stage)
    return directory


def model_directory(path: str) -> str:
    """The model that `path` means: a finished stage's own `model/`, else the path or hub id as it is."""
    place = Path(path)
    return str(place / "model") if (place / MANIFEST).is_file() else path
