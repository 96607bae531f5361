"""What a process that `rlhf <stage> --nproc` started tells the one that started it. Does not import torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOST = 87
"""The exit code of a process that ends because it lost the connection to another one."""
FAILURES = "RLHF_FAILURES_FILE"
"""The environment variable that names a file in which `--nproc` notes that a process has failed, and the others what
they waited for."""


def another_has_failed() -> bool:
    """Whether `--nproc`, if it started this process, has noted that another one failed."""
    return FAILURES in os.environ and Path(os.environ[FAILURES]).stat().st_size > 0


def note_wait(step: str, rank: int, what: str) -> bool:
    """Tell `--nproc` that process `rank` waited for `what` when another one ended.

    Returns False if something else started this process.
    """
    return _note({"step": step, "rank": rank, "what": what})


def note_hanging(ranks: Sequence[int]) -> None:
    """Tell `--nproc`, if it started this process, which processes hang, so that it kills them at once."""
    if ranks:
        _note({"hanging": list(ranks)})


def _note(row: dict[str, Any]) -> bool:
    """Write a row for `--nproc`; False if something else started this process."""
    if FAILURES in os.environ:
        with Path(os.environ[FAILURES]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return FAILURES in os.environ
