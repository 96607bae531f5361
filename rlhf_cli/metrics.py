"""Rows of numbers and samples, one JSON object a line. No torch here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Self

OF_THE_MACHINE = ("time/", "speed/", "memory/")
"""Groups of metrics that say how a run went on its machine: they differ between two runs that computed the same."""


def _finite(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite is written as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class JsonLines:
    """Appends rows to a .jsonl file, each on the disk's side of our buffers once it is written."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; floats that are not finite become null. Raises OSError, which names the file."""
        clean = {key: _finite(value) for key, value in row.items()}
        try:
            self._file.write(json.dumps(clean, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def size(self) -> int:
        """Bytes written."""
        return self.path.stat().st_size

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
