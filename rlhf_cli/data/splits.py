"""Which rows a stage uses: parts of a source, each stage's share, the held-out set, and a source's weight.

All of these are decided by hashes of a row's prompt. Rows with equal prompts are always in the same part, in the same
share and on the same side of the split, whatever else the data holds.
"""

from __future__ import annotations

import hashlib

from rlhf_cli.config.data import Rows
from rlhf_cli.data.formats import Purpose

SHARES: dict[Purpose, int] = {"sft": 0, "rm pairs": 1, "rm scores": 1, "ppo": 2}
"""The share of `Rows.split` that each purpose reads."""


def in_part(select: str | None, prompt: str) -> bool:
    """Is a prompt in one of the parts that `DataSource.select` names? "2/10" is the third tenth."""
    if select is None:
        return True
    number = _number(b"", prompt)
    for part in select.split(","):
        k, n = map(int, part.split("/"))
        if n > 0 and number % n == k:
            return True
    return False


def in_share(data: Rows, purpose: Purpose, prompt: str) -> bool:
    """Is a prompt in the share of the data that `Rows.split` gives to this purpose?"""
    if data.split is None:
        return True
    number = _number(b"share of a stage\0", prompt) % sum(data.split)
    start = sum(data.split[: SHARES[purpose]])
    return start <= number < start + data.split[SHARES[purpose]]


def is_held_out(data: Rows, prompt: str) -> bool:
    """Does a training row belong to the held-out set? Always False if the data names test files."""
    return data.test is None and _fraction(b"held out\0", prompt) < data.test_fraction


def num_copies(weight: float, prompt: str) -> int:
    """How often a row occurs in an epoch: `weight` times, where the hash decides about the fractional part."""
    integer, fraction = divmod(weight, 1)
    return int(integer) + (_fraction(b"weight\0", prompt) < fraction)


def _fraction(purpose: bytes, prompt: str) -> float:
    """A number in [0, 1) that depends on the purpose and the prompt only."""
    return _number(purpose, prompt) / 2**64


def _number(purpose: bytes, prompt: str) -> int:
    digest = hashlib.sha256(purpose + prompt.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")
