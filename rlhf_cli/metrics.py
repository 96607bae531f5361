"""JSON Lines files of metrics and samples. Does not import torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

OF_THE_MACHINE = ("time/", "speed/", "memory/")
"""Prefixes of metrics that describe the machine: they differ between two runs of the same computation."""
LAST_BYTES = 1 << 16
"""Bytes at the end of a file in which its last row is looked for."""


def _finite(value: Any) -> Any:
    """`value`, or None for NaN and infinity, which JSON cannot represent."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class JsonLines:
    """Appends rows to a .jsonl file and flushes each row to the operating system."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = self.path.open("ab")
        present = self.path.read_bytes()
        self._size, self._digest = len(present), hashlib.sha256(present)

    def write(self, row: dict[str, Any]) -> dict[str, Any]:
        """Append one row; NaN and infinity become null. Returns what it wrote; raises OSError with the file's name."""
        clean = {key: _finite(value) for key, value in row.items()}
        line = (json.dumps(clean, ensure_ascii=False) + "\n").encode()
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self._size += len(line)
        self._digest.update(line)
        return clean

    def size(self) -> int:
        """Number of bytes written, those before this object included."""
        return self._size

    def digest(self) -> str:
        """sha256 of these bytes, in hex."""
        return self._digest.hexdigest()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Tail:
    """The rows of a JSONL file that is being written; `new` reads only what was added since the last call."""

    path: Path
    offset: int = 0
    identity: tuple[int, int] = (0, 0)

    def new(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether the file was replaced or cut, the new complete rows)."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                identity = (status.st_dev, status.st_ino)
                restarted = identity != self.identity or status.st_size < self.offset
                if restarted:
                    self.identity, self.offset = identity, 0
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return False, []
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return restarted, list(parsed(complete.splitlines()))


def last_row(path: Path) -> dict[str, Any] | None:
    """The last complete row of a JSONL file that may be growing; None if it has none. Reads only the end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LAST_BYTES))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return None
    complete = (line for line in reversed(lines) if line.endswith(b"\n"))
    return next(parsed(complete), None)


def parsed(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of lines; other lines are skipped.

    >>> list(parsed(["[" * 100_000, "1", "{", '{"step": 1}']))
    [{'step': 1}]
    """
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row
