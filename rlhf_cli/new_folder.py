"""A folder that is complete or does not exist."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlhf_cli.artifacts import sync, sync_tree
from rlhf_cli.errors import ArtifactError


def require_new(out: Path) -> None:
    """Raise ArtifactError if `out` exists."""
    if out.exists() or out.is_symlink():
        raise ArtifactError(f"{out}: exists, and is not overwritten. Name another folder")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which is renamed to `out` at the end. If anything fails, nothing is left of it.

    It is `.<name>.partial` beside `out` until then. Raises ArtifactError if `out` exists or cannot be written.
    """
    require_new(out)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        _allow_reading(partial)
        sync_tree(partial)
        partial.rename(out)
        sync(out.parent)
    except OSError as error:
        raise ArtifactError(f"{out}: cannot be written ({error.strerror or error}). Free disk space") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _allow_reading(folder: Path) -> None:
    """Give every file the permissions of a new one. safetensors lets nobody but the owner read its files."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)
