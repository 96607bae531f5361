"""A lock that lets one process at a time build a stage. Does not import torch.

The library `filelock` takes the same kernel lock, but it has no read-only query for `rlhf status`, does not notice
that the lock file was removed from under a run, and leaves the file behind. What it would replace is the `flock` call.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rlhf_cli.errors import ArtifactError
from rlhf_cli.files import open_regular

HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EINTR)
"""The errors of `flock` for a lock that somebody holds. Others mean that the file system has no locks."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lock:
    """An exclusive lock on a stage. The operating system releases it when the process ends, for whatever reason."""

    def __init__(self, root: str | Path, stage: str):
        self.path = lock_path(root, stage)
        self.stage = stage
        self._file: IO[str] | None = None

    def acquire(self) -> str:
        """Take the lock, and return a warning for the user, or "". Raises ArtifactError if another process holds it.

        Some network file systems have no locks (Lustre without `-o flock`, NFS without a lock daemon). There the run
        goes on without one, unless the lock file names a process on this machine that is alive.
        """
        warning = ""
        while True:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # O_NOFOLLOW: a link would let us truncate a file elsewhere.
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
                file = os.fdopen(os.open(self.path, flags, 0o644), "a+", encoding="utf-8")
            except OSError as error:
                raise ArtifactError(
                    f"{self.path.parent}: cannot be written ({error.strerror or error}), and the {self.stage} stage is "
                    "built here. Set another `artifacts`, or free disk space"
                ) from None
            try:
                is_free = _try_lock(file)
            except OSError as error:
                is_free = not _is_alive(_read_owner(file))
                warning = (
                    f"{self.path.parent}: this file system has no locks ({error.strerror or error}), so nothing stops "
                    "a second run from writing here at the same time. Start one run at a time"
                )
            if not is_free:
                owner = _read_owner(file)
                file.close()
                raise ArtifactError(
                    f"{self.path.parent}: {owner or 'another process'} is writing its {self.stage} stage. Wait for it, "
                    "stop it, or set another `artifacts`"
                ) from None
            # The previous owner may have removed the file between open and flock. Then our lock is on no path: retry.
            if _same_file(file, self.path):
                break
            file.close()
        self._file = file
        file.seek(0)
        file.truncate()
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": now}, file)
        file.flush()
        # A child process of the user's code may live longer than a run that is killed.
        os.register_at_fork(after_in_child=file.close)
        return warning

    def is_held(self) -> bool:
        """Whether this object holds the lock, and the locked file is still at its path."""
        return self._file is not None and _same_file(self._file, self.path)

    def release(self) -> None:
        """Release the lock and remove its file, if it is held."""
        if self._file is not None:
            if self.is_held():
                self.path.unlink()
            self._file.close()
            self._file = None


def lock_path(root: str | Path, stage: str) -> Path:
    return Path(root) / f".{stage}.lock"


def owner_of(root: str | Path, stage: str) -> Owner | None:
    """The process that is building a stage, or None. Needs read access only. A file that a killed process left behind
    is not locked."""
    try:
        with io.TextIOWrapper(open_regular(lock_path(root, stage)), encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                owner = _read_owner(file)
                if error.errno not in HELD:
                    return owner if _is_alive(owner) else None
                return owner or Owner(0, "unknown", "unknown")
            fcntl.flock(file, fcntl.LOCK_UN)
            return None
    except OSError:
        return None


def _is_alive(owner: Owner | None) -> bool:
    """Whether the owner is another process of this machine that is running. Only asked where there are no locks."""
    if owner is None or owner.host != socket.gethostname() or owner.pid == os.getpid():
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it runs, and belongs to another user
        return True
    return True


def _try_lock(file: IO[str]) -> bool:
    """Whether the lock was free, and is taken now. Raises OSError if the file system has no locks."""
    # Several attempts, because `owner_of` in another process holds a shared lock for an instant.
    for pause in (0.1, 0.1, 0.1, 0.1, 0):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in HELD:
                raise
            time.sleep(pause)
    return False


def _same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (OSError, ValueError):  # a closed file
        return False


def _read_owner(file: IO[str]) -> Owner | None:
    try:
        file.seek(0)
        return Owner(**json.load(file))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
