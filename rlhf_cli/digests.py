"""Digests of files. Does not import torch."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

SETTLED_NS = 2_000_000_000
"""A file that changed within the last two seconds may change again and keep its time stamps."""
KNOWN_FILE = "RLHF_KNOWN_DIGESTS"
"""The environment variable that names the file in which `--nproc` gives its processes the digests that it computed."""
_KNOWN: dict[str, str] = {}


def digest_file(path: str | Path) -> str:
    """sha256 of a file's content, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_once(path: str | Path) -> str:
    """`digest_file`, which reads a file once per process as long as its size and time stamps stay the same."""
    stat = Path(path).stat()
    # Without the device's number, which differs between the machines that mount a file system.
    key = f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
    digest = _KNOWN.get(key) or digest_file(path)
    if time.time_ns() - stat.st_ctime_ns > SETTLED_NS:
        _KNOWN[key] = digest
    return digest


def known_digests() -> str:
    """The digests that `digest_once` has computed in this process, as text for `learn_digests` in another one."""
    return json.dumps(_KNOWN)


def learn_digests(text: str) -> None:
    """Take over digests that another process of the run has computed, so that this one need not read the files."""
    _KNOWN.update(json.loads(text))
