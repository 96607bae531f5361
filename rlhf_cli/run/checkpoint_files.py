"""The files from which an unfinished stage is resumed, and its state. Does not import torch.

    artifacts/<run>/.<stage>.checkpoints/run.json          identity of the unfinished run
                                        /total.json        {"total": its number of steps}
                                        /normalization_samples.json   rm: samples of the SFT model
                                        /grades/0.jsonl    ppo: what judges answered process 0
                                        /tracker-wandb.json    id of the run there, and what was sent
                                        /members/1/    rm: the same of a member (rlhf rm --members)
                                        /step-00000300/    state.safetensors, numbers.json, manifest.json
                                                           (sharded: state-00001-of-00004.safetensors, ...)
                   /.<stage>.partial/                      what the stage has written so far
                                    /end.json              why it ended before it was finished
                   /.<stage>.end.<pid>                     the same, until it is complete
                   /.<stage>.lock                          the process that is building the stage

A checkpoint is written to a temporary folder, flushed to disk, and renamed. It is used only if each file still has the
digest in its manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_cli.errors import ArtifactError
from rlhf_cli.files import digest_file, read_object, read_text
from rlhf_cli.run.artifacts import MANIFEST, partial_directory, recover, set_aside_directory, stage_directory, sync
from rlhf_cli.run.lock import Lock

RUN = "run.json"
TOTAL = "total.json"
END = "end.json"
GRADES = "grades"
MEMBERS = "members"
"""The folder of the members of a reward model, in the stage's directory and in that of its checkpoints."""
LONGEST_LINE = 2000


def checkpoints_directory(root: str | Path, stage: str) -> Path:
    return Path(root) / f".{stage}.checkpoints"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


# ------------------------------------------------------------------------------------------- writing


def write_text(path: Path, text: str) -> None:
    """Write a small file atomically and flush it to disk."""
    temporary = path.with_name(f".{path.name}.writing")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync(path.parent)


@contextlib.contextmanager
def new_checkpoint(directory: Path, step: int, digests: Mapping[str, str] | None = None) -> Iterator[Path]:
    """A folder for a checkpoint's files, which becomes the checkpoint if the block ends without an exception.

    `digests` may name digests of its files. `directory` must exist: if it was removed, it is not created again.
    """
    target = directory / f"step-{step:08d}"
    temporary = directory / f".{target.name}.writing"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        names = sorted(path.name for path in temporary.iterdir())
        files = {name: (digests or {}).get(name) or digest_file(temporary / name) for name in names}
        for name in files:
            sync(temporary / name)
        write_text(temporary / MANIFEST, json.dumps({"step": step, "files": files}, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        sync(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove(checkpoints: Iterable[Path]) -> None:
    for path in checkpoints:
        # Renamed first: a checkpoint that is removed halfway must not look like one.
        temporary = path.with_name(f".{path.name}.removing")
        shutil.rmtree(temporary, ignore_errors=True)
        path.rename(temporary)
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(root: str | Path, stage: str) -> None:
    """Remove the checkpoints of a published stage whose process was killed, unless it is being built again."""
    directory, partial, lock = checkpoints_directory(root, stage), partial_directory(root, stage), Lock(root, stage)
    if partial.exists() or not (directory.exists() or lock.path.exists()):
        return
    with contextlib.suppress(ArtifactError, OSError):
        lock.acquire()
        if not partial.exists():
            recover(root, stage)
            shutil.rmtree(directory, ignore_errors=True)
    lock.release()


def keep_end(root: str | Path, stage: str, name: str, line: str) -> None:
    """Write, if possible, whether an unfinished stage has `failed` or was `interrupted`, and why."""
    # Not in the stage's folder: the first process may be flushing all files there while another one ends.
    temporary = Path(root) / f".{stage}.end.{os.getpid()}"
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps({"state": name, "line": line[:LONGEST_LINE]}) + "\n", encoding="utf-8")
        temporary.rename(partial_directory(root, stage) / END)
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------- reading


def refuse_links(root: str | Path, stage: str) -> None:
    """Raise ArtifactError for a link or mount point among the paths in `root` that a run writes, renames or removes."""
    built = (partial_directory(root, stage), checkpoints_directory(root, stage))
    inside = (path for directory in built if not directory.is_symlink() for path in directory.rglob("*"))
    for path in (stage_directory(root, stage), set_aside_directory(root, stage), *built, *inside):
        if path.is_symlink() or path.is_mount():
            kind = "symbolic link" if path.is_symlink() else "mount point"
            raise ArtifactError(
                f"{path}: is a {kind}, and a run writes, renames and removes this path. Remove the {kind} "
                f"(`{root}` itself may be one)"
            )


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first."""
    named = (path for path in directory.glob("step-*") if path.name[5:].isdecimal() and path.is_dir())
    return sorted(named, key=step_of)


def damage_of(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used; None if every file is as it was written."""
    try:
        manifest = json.loads(read_text(checkpoint / MANIFEST))
        step, files = manifest["step"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"its {MANIFEST} cannot be read"
    present = {path.name for path in checkpoint.iterdir() if path.is_file()} - {MANIFEST}
    if missing := files.keys() - present:
        return f"{min(missing)} is missing"
    if present != files.keys() or step != step_of(checkpoint):
        return f"its {MANIFEST} was modified"
    return next((f"{name} was modified" for name in files if digest_file(checkpoint / name) != files[name]), None)


def resumable_checkpoints(root: str | Path, stage: str) -> list[Path]:
    """The checkpoints of an unfinished stage, oldest first; those of a reward model's members come before `model`'s."""
    directory = checkpoints_directory(root, stage)
    if not partial_directory(root, stage).is_dir():  # leftovers of a published stage
        return []
    named = (path for path in directory.glob(f"{MEMBERS}/*") if path.name.isdecimal())
    members = sorted(named, key=lambda path: int(path.name))
    return [path for part in (*members, directory) for path in list_checkpoints(part)]


def last_step(root: str | Path, stage: str) -> int | None:
    """The step of an unfinished stage's newest checkpoint."""
    paths = resumable_checkpoints(root, stage)
    return step_of(paths[-1]) if paths else None


def last_step_in_words(root: str | Path, stage: str) -> str:
    """A sentence about the checkpoint that a failed run leaves."""
    step = last_step(root, stage)
    return "There is no earlier checkpoint." if step is None else f"The checkpoint of step {step} is intact."


def unfinished_identity(root: str | Path, stage: str) -> dict[str, Any] | None:
    """The identity of the unfinished run that the next start would resume; None without one that can be read."""
    return (resumable_checkpoints(root, stage) and read_object(checkpoints_directory(root, stage) / RUN)) or None
