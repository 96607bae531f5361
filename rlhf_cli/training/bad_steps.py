"""Steps whose loss or gradient is no number: how many there were, and the batches that they would have learnt from.

Such a step moves nothing: not the weights, not an optimizer, not an average. The schedule and the stream of data go
on as if it had, so the rate of a step depends on its number alone and a run is as long as it was planned.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_cli.errors import ArtifactError
from rlhf_cli.training.checkpoint import State


class BadSteps:
    """How many there were, in a row and in all; a part of what a run carries from step to step."""

    def __init__(self, most_in_a_row: int):
        self.most_in_a_row = most_in_a_row
        """So many in a row stop the run."""
        self.in_a_row = self.total = 0

    @property
    def are_too_many(self) -> bool:
        return self.in_a_row >= self.most_in_a_row

    def count(self, numbers: Mapping[str, float]) -> str | None:
        """Count a step by its loss and gradient; returns what is no number about it, or None where all is well.

        >>> steps = BadSteps(2)
        >>> steps.count({"loss": 0.5, "norm": math.inf}), steps.are_too_many
        ('norm is inf', False)
        >>> steps.count({"loss": 0.5, "norm": 1.0}), steps.in_a_row, steps.total
        (None, 0, 1)
        """
        wrong = ", ".join(f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value))
        self.in_a_row = self.in_a_row + 1 if wrong else 0
        self.total += bool(wrong)
        return wrong or None

    def state(self) -> State:
        return {}, {"in_a_row": self.in_a_row, "total": self.total}

    def restore(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.in_a_row, self.total = numbers["in_a_row"], numbers["total"]


def append_new(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append those rows to a .jsonl file that do not stand in it yet, and have the disk keep them.

    A run that goes on from a checkpoint does its last steps again and comes to the same rows. Half a row at the end,
    of a process that was killed, is cut off first. Raises ArtifactError where the file is a link.
    """
    lines = [json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass") + b"\n" for row in rows]
    if path.is_symlink():
        raise ArtifactError(f"{path}: is a link, and a run writes to what is there. Remove it")
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+b") as file:
        known, end = set(), 0
        for line in file:
            if line.endswith(b"\n"):
                known.add(line)
                end += len(line)
        file.truncate(end)
        file.seek(end)
        file.writelines(line for line in lines if line not in known)
        file.flush()
        os.fsync(file.fileno())
