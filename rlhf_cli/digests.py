"""Digests of files. Does not import torch."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

SETTLED_NS = 2_000_000_000
"""A file that changed within the last two seconds may change again and keep its time stamps."""
_KNOWN: dict[tuple[int, ...], str] = {}


def digest_file(path: str | Path) -> str:
    """sha256 of a file's content, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_once(path: str | Path) -> str:
    """`digest_file`, which reads a file once per process as long as its size and time stamps stay the same."""
    stat = Path(path).stat()
    key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    digest = _KNOWN.get(key) or digest_file(path)
    if time.time_ns() - stat.st_ctime_ns > SETTLED_NS:
        _KNOWN[key] = digest
    return digest
