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

from rlhf_cli.artifacts import (
    digest_file,
    partial_directory,
    recover,
    set_aside_directory,
    stage_directory,
    sync,
)
from rlhf_cli.errors import ArtifactError

MANIFEST = "manifest.json"
RUN = "run.json"


def checkpoints_directory(root: str | Path, stage: str) -> Path:
    """Where `stage` of the run at `root` keeps its checkpoints until it is finished."""
    return Path(root) / f".{stage}.checkpoints"


def step_directory(place: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return place / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint was written after, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


# ------------------------------------------------------------------------------------------- writing


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
    """A folder to write a checkpoint's files into, which becomes the checkpoint when the block ends well.

    `place` must be there: one that was removed meanwhile is not made again.
    """
    target = step_directory(place, step)
    beside = place / f".{target.name}.writing"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        yield beside
        digests = {path.name: digest_file(path) for path in sorted(beside.iterdir())}
        for name in digests:
            sync(beside / name)
        write_text(beside / MANIFEST, _manifest_text(step, digests))
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        sync(place)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _manifest_text(step: int, digests: dict[str, str]) -> str:
    return json.dumps({"step": step, "files": digests}, indent=2) + "\n"


def remove(checkpoints: list[Path]) -> None:
    """Remove these checkpoints."""
    for path in checkpoints:
        # Out of its place first: what is removed halfway is no checkpoint.
        beside = path.with_name(f".{path.name}.removing")
        shutil.rmtree(beside, ignore_errors=True)
        path.rename(beside)
        shutil.rmtree(beside, ignore_errors=True)


def remove_old(place: Path, keep: int) -> None:
    """Remove all checkpoints but the last `keep`."""
    remove(found(place)[:-keep])


def remove_cut_off(place: Path) -> None:
    """Remove what a killed run was writing or removing."""
    for path in place.glob(".*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


# ------------------------------------------------------------------------------------------- reading


def refuse_links(root: str | Path, stage: str) -> None:
    """Raise ArtifactError where what a run writes to, cuts, renames or removes is a link: that would happen elsewhere.

    The root may be one, to a scratch disk say: what is renamed then all lies there.
    """
    for place in (stage_directory(root, stage), set_aside_directory(root, stage)):
        if place.is_symlink():
            raise ArtifactError(
                f"{place}: is a link, and a finished stage is renamed into its place. Remove it (`{root}` itself may "
                "be a link)"
            )
    for place in (partial_directory(root, stage), checkpoints_directory(root, stage)):
        inside = place.rglob("*") if place.is_dir() and not place.is_symlink() else ()
        for path in (place, *inside):
            if path.is_symlink():
                raise ArtifactError(f"{path}: is a link, and a run writes to and removes what is there. Remove it")


def found(place: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return sorted((path for path in place.glob("step-*") if path.name[5:].isdecimal()), key=step_of)


def what_is_wrong(checkpoint: Path) -> str | None:
    """Why a checkpoint can't be used, or None where every file is as it was written."""
    if checkpoint.is_symlink() or any(path.is_symlink() for path in checkpoint.iterdir()):
        return "it is a link, or has one in it"
    try:
        text = (checkpoint / MANIFEST).read_text(encoding="utf-8")
        files = dict(json.loads(text)["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"its {MANIFEST} can't be read"
    if not all(isinstance(name, str) and isinstance(digest, str) for name, digest in files.items()):
        return f"its {MANIFEST} is not as it was written"
    for name, digest in files.items():
        if Path(name).name != name:
            return f"its {MANIFEST} names a file outside of it"
        try:
            if digest_file(checkpoint / name) != digest:
                return f"{name} is not as it was written"
        except (OSError, ValueError):
            return f"{name} is missing"
    # The manifest has no digest of its own, but it can say one thing only.
    present = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
    if present != files.keys() or text != _manifest_text(step_of(checkpoint), files):
        return f"its {MANIFEST} is not as it was written"
    return None


def read_run(place: Path) -> dict[str, Any] | None:
    """The identity of the run whose checkpoints these are; None where there is none that can be read."""
    try:
        values = json.loads((place / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def to_go_on_with(root: str | Path, stage: str) -> list[Path]:
    """The checkpoints of an unfinished stage, the oldest first; those that a published one left behind are none."""
    return found(checkpoints_directory(root, stage)) if partial_directory(root, stage).is_dir() else []


def last_step(root: str | Path, stage: str) -> int | None:
    """The step of an unfinished stage's newest checkpoint, by its name."""
    paths = to_go_on_with(root, stage)
    return step_of(paths[-1]) if paths else None


def unfinished(root: str | Path, stage: str) -> dict[str, Any] | None:
    """The identity of the unfinished run that the next start would go on with; None where there is none."""
    return read_run(checkpoints_directory(root, stage)) if to_go_on_with(root, stage) else None


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
                # A link would have a file elsewhere emptied.
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                file = os.fdopen(os.open(self.path, flags, 0o644), "a+", encoding="utf-8")
            except OSError as error:
                raise ArtifactError(
                    f"{self.path.parent}: can't be written ({error.strerror or error}), the {self.stage} stage is "
                    "built here. Give another `artifacts`, or make room"
                ) from None
            if not self._locked(file):
                owner = _read_owner(file)
                file.close()
                raise ArtifactError(
                    f"{self.path.parent}: {owner or 'another process'} is writing its {self.stage} stage. Wait for it, "
                    "stop it, or give another `artifacts`"
                ) from None
            # Whoever had it before may have removed the file that was opened here: then it locks nothing.
            if _same_file(file, self.path):
                break
            file.close()
        self._file = file
        file.seek(0)
        file.truncate()
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": now}, file)
        file.flush()

    def is_held(self) -> bool:
        """Is it taken, and is the file that it is taken on still in its place?"""
        return self._file is not None and _same_file(self._file, self.path)

    def _locked(self, file: IO[str]) -> bool:
        # Again, as somebody who only looks (`owner_of`) has it for an instant.
        for left in (4, 3, 2, 1, 0):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                time.sleep(0.1 if left else 0)
        return False

    def release(self) -> None:
        """Give it back; no harm where it was not taken."""
        if self._file is not None:
            if self.is_held():
                self.path.unlink()
            self._file.close()
            self._file = None


def remove_left_behind(root: str | Path, stage: str) -> None:
    """Remove what a run that was published, and then killed, had yet to remove; nothing while somebody writes."""
    place, partial, lock = checkpoints_directory(root, stage), partial_directory(root, stage), Lock(root, stage)
    if partial.exists() or not (place.exists() or lock.path.exists()):
        return
    with contextlib.suppress(ArtifactError, OSError):
        lock.acquire()
        if not partial.exists():
            recover(root, stage)
            shutil.rmtree(place, ignore_errors=True)
    lock.release()


def owner_of(root: str | Path, stage: str) -> Owner | None:
    """Who is writing a stage now; None where nobody is (a lock that was left behind by a dead process is free)."""
    try:
        with (Path(root) / f".{stage}.lock").open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return _read_owner(file) or Owner(0, "unknown", "unknown")
            fcntl.flock(file, fcntl.LOCK_UN)
            return None
    except OSError:
        return None


def _same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _read_owner(file: IO[str]) -> Owner | None:
    try:
        file.seek(0)
        return Owner(**json.load(file))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
