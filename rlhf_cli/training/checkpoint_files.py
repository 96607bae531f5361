"""Where an unfinished stage keeps what it needs to go on, and who may write there. No torch here.

    artifacts/<run>/.<stage>.checkpoints/run.json          the identity of the run that is under way
                                        /step-00000300/    state.safetensors, numbers.json, manifest.json
                   /.<stage>.partial/                      what the stage has built so far
                   /.<stage>.lock                          who writes

A checkpoint is written beside its place and renamed into it, with every file and folder on the disk first, so
that one that is there was complete. It is read only if each file still has the digest in its manifest.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlhf_cli.artifacts import digest_file
from rlhf_cli.errors import ArtifactError

MANIFEST = "manifest.json"
RUN = "run.json"


def checkpoints_directory(root: str | Path, stage: str) -> Path:
    """Where `stage` of the run at `root` keeps its checkpoints until it is finished."""
    return Path(root) / f".{stage}.checkpoints"


def step_directory(place: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return place / f"step-{step:08d}"


# ------------------------------------------------------------------------------------------- writing


def sync(path: Path) -> None:
    """Have the disk keep a file, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a small file beside its place, and rename it into it: it is there whole or not at all."""
    beside = path.with_name(f".{path.name}.writing")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    sync(path.parent)


@contextlib.contextmanager
def new_checkpoint(place: Path, step: int) -> Iterator[Path]:
    """A folder to write a checkpoint's files into, which becomes the checkpoint when the block ends well."""
    target = step_directory(place, step)
    beside = place / f".{target.name}.writing"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        files = sorted(path for path in beside.iterdir() if path.is_file())
        for path in files:
            sync(path)
        manifest = {"step": step, "files": {path.name: digest_file(path) for path in files}}
        write_text(beside / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        sync(place)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def remove_old(place: Path, keep: int) -> None:
    """Remove all checkpoints but the last `keep`."""
    for path in found(place)[:-keep]:
        # Out of its place first: what is removed halfway is no checkpoint.
        beside = path.with_name(f".{path.name}.removing")
        path.rename(beside)
        shutil.rmtree(beside, ignore_errors=True)


# ------------------------------------------------------------------------------------------- reading


def found(place: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return sorted(place.glob("step-*")) if place.is_dir() else []


def what_is_wrong(checkpoint: Path) -> str | None:
    """Why a checkpoint can't be used, or None where every file is as it was written."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"its {MANIFEST} can't be read"
    for name, digest in files.items():
        if Path(name).name != name:
            return f"its {MANIFEST} names a file outside of it"
        try:
            if digest_file(checkpoint / name) != digest:
                return f"{name} is not as it was written"
        except OSError:
            return f"{name} is missing"
    return None


def read_run(place: Path) -> dict[str, Any] | None:
    """The identity of the run whose checkpoints these are; None where there is none that can be read."""
    try:
        values = json.loads((place / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def last_step(root: str | Path, stage: str) -> int | None:
    """The step of an unfinished stage's newest checkpoint, by its name."""
    names = [path.name for path in found(checkpoints_directory(root, stage))]
    return int(names[-1].removeprefix("step-")) if names else None


# --------------------------------------------------------------------------------------------- lock


@dataclass(frozen=True)
class Owner:
    """Who writes a stage."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lock:
    """One writer a stage. The operating system frees it when its process ends, however that ends."""

    def __init__(self, root: str | Path, stage: str):
        self.path = Path(root) / f".{stage}.lock"
        self.stage = stage
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take the lock; raises ArtifactError that names who has it."""
        while True:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = self.path.open("a+", encoding="utf-8")
            except OSError as error:
                raise ArtifactError(
                    f"{self.path.parent}: can't be written ({error.strerror or error}), the {self.stage} stage is built "
                    "here. Give another `artifacts`, or make room"
                ) from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owner = _read_owner(file)
                file.close()
                raise ArtifactError(
                    f"{self.path.parent}: {owner or 'another process'} is writing its {self.stage} stage. Wait for it, "
                    "stop it, or give another `artifacts`"
                ) from None
            # Whoever had it before may have removed the file that was opened here: then it locks nothing.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == self.path.stat().st_ino:
                    break
            file.close()
        file.seek(0)
        file.truncate()
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": now}, file)
        file.flush()
        self._file = file

    def release(self) -> None:
        """Give it back; no harm where it was not taken."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def owner_of(root: str | Path, stage: str) -> Owner | None:
    """Who is writing a stage now; None where nobody is (a lock that was left behind by a dead process is free)."""
    try:
        with (Path(root) / f".{stage}.lock").open("r+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return _read_owner(file) or Owner(0, "unknown", "unknown")
            fcntl.flock(file, fcntl.LOCK_UN)
            return None
    except OSError:
        return None


def _read_owner(file: IO[str]) -> Owner | None:
    try:
        file.seek(0)
        return Owner(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None
