"""The directory of a running stage, whose content belongs to the state that a checkpoint saves."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf_cli.files import JsonLines, digest_once
from rlhf_cli.run import artifacts
from rlhf_cli.run.checkpoint import State
from rlhf_cli.run.checkpoint_files import MEMBERS

NOTHING_WRITTEN: dict[str, Any] = {"sizes": {}, "folders": [], "seconds": 0.0}
"""The state before the first checkpoint."""
NOT_RESTORED = "checkpoints"
"""Rows about the checkpoints themselves: they are kept when a run is resumed."""


class StageFiles:
    """The .jsonl files of a stage and its running time.

    Only the first process writes (`writes`); the others save and restore nothing.
    """

    def __init__(self, directory: Path, *, writes: bool):
        self.directory, self.writes = directory, writes
        self.started = time.monotonic()
        self.latest: dict[str, float] = {}
        """The latest value of each metric beside the progress. A checkpoint stores the held-out ones."""
        self._rows: dict[str, JsonLines] = {}

    def rows(self, name: str) -> JsonLines:
        """The file <name>.jsonl, created if it does not exist."""
        if name not in self._rows:
            self._rows[name] = JsonLines(self.directory / f"{name}.jsonl")
        return self._rows[name]

    def paths(self) -> list[Path]:
        """The open files."""
        return [file.path for file in self._rows.values()]

    def seconds(self) -> float:
        """Seconds that the stage has run, those before an interruption included."""
        return round(time.monotonic() - self.started, 3)

    def close(self) -> None:
        for file in self._rows.values():
            file.close()

    def state(self) -> State:
        """Size and digest of each file of rows, the folders and the digests of their files, and the seconds so far."""
        if not self.writes:
            return {}, {}
        artifacts.sync_tree(self.directory)
        rows = {name: file for name, file in self._rows.items() if name != NOT_RESTORED}
        digests = {f"{name}.jsonl": file.digest() for name, file in rows.items()}
        folders = sorted(path for path in self.directory.iterdir() if path.is_dir())
        for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
            digests[path.relative_to(self.directory).as_posix()] = digest_once(path)
        return {}, {
            "sizes": {name: file.size() for name, file in rows.items()},
            "digests": digests,
            "folders": [folder.name for folder in folders],
            "seconds": self.seconds(),
            "held_out": {
                name: value for name, value in self.latest.items() if name.startswith(("eval/", "validation/"))
            },
        }

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Remove everything written after the checkpoint: rows, models, the manifest of an unfinished publication."""
        if not self.writes:
            return
        self.started -= numbers["seconds"]
        self.latest = dict(numbers.get("held_out", {}))  # absent from checkpoints of earlier versions
        files = {f"{name}.jsonl" for name in (NOT_RESTORED, *numbers["sizes"])}
        kept = {"config.yaml", MEMBERS, *files, *numbers["folders"]}
        for path in self.directory.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, size in numbers["sizes"].items():
            os.truncate(self.directory / f"{name}.jsonl", size)
            self._rows[name] = JsonLines(self.directory / f"{name}.jsonl")

    def mismatch(self, numbers: Mapping[str, Any]) -> str | None:
        """Why the directory does not have the rows and models of a checkpoint with these numbers; None if it has them.

        Checkpoints without digests, which earlier versions wrote, are accepted.
        """
        for name, size in numbers["sizes"].items():
            if Path(name).name != name:
                return f"it names a file outside the stage ({name})"
            path = self.directory / f"{name}.jsonl"
            present = path.stat().st_size if path.is_file() else 0
            if present < size:
                return f"{path.name} has {present} bytes, and had {size} when it was saved"
        for name, digest in numbers.get("digests", {}).items():
            path = self.directory / name
            if not path.is_file():
                return f"{name} is missing"
            size = numbers["sizes"].get(name.removesuffix(".jsonl"))
            with path.open("rb") as file:
                present_digest = digest_once(path) if size is None else hashlib.sha256(file.read(size)).hexdigest()
            if present_digest != digest:
                return f"{name} was modified after it was saved"
        return None
