"""A line of `rlhf doctor`, and how it writes sizes and lists of names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

NAMES_SHOWN = 5


@dataclass(frozen=True)
class Line:
    """One result of a check: how bad it is, its subject, and what was found."""

    word: Literal["ok", "warning", "problem"]
    what: str
    text: str


def names(items: Sequence[str]) -> str:
    """The first NAMES_SHOWN items, and the number of the others."""
    more = f" and {len(items) - NAMES_SHOWN} more" if len(items) > NAMES_SHOWN else ""
    return ", ".join(items[:NAMES_SHOWN]) + more


def size(count: float) -> str:
    """Bytes in decimal units.

    >>> size(999), size(20_600_000)
    ('999 B', '20.6 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
