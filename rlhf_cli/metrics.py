"""Rows of numbers and samples, one JSON object a line. No torch here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Self


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
        """Append one row; floats that are not finite become null."""
        clean = {key: _finite(value) for key, value in row.items()}
        self._file.write(json.dumps(clean, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Means:
    """Running means of metrics whose values add up: each `add` is one optimizer step."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._sums[key] = self._sums.get(key, 0.0) + float(value)
            self._counts[key] = self._counts.get(key, 0) + 1

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        means = {key: self._sums[key] / self._counts[key] for key in self._sums}
        self._sums, self._counts = {}, {}
        return means
