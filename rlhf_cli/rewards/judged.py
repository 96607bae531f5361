"""What is judged, what judges it, and how a score that can't be had is told of."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from rlhf_cli.data.records import Message
from rlhf_cli.errors import RewardError

SHOWN = 200
"""Characters of a value, or of what a server says, in a message."""
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Judged:
    """What is judged: prompts and responses as text and as the policy's tokens, and the prompts' rows."""

    prompts: list[str]
    """As the policy read them, data.prompt_template included."""
    responses: list[str]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    ended: list[bool]
    rows: list[dict[str, Any]]
    tokens: list[list[str]] | None = None
    """The text of each response token, for functions that score them one by one."""
    where: list[str] = field(default_factory=list)
    """`file:line` of each prompt's row; empty where nobody knows."""
    own_prompts: list[str] = field(default_factory=list)
    """The prompts as their rows have them; empty where they are `prompts`."""
    messages: list[tuple[Message, ...]] = field(default_factory=list)
    """Of rows that are conversations all that comes before the response; empty where no row is one."""


@dataclass(frozen=True)
class Scores:
    """What the sources say together."""

    total: torch.Tensor
    """[B] the weighted sum of everything; a dense reward counts with the sum of its tokens."""
    each: dict[str, torch.Tensor]
    """[B] of each source by name, before its weight."""
    dense: list[list[float]] | None
    """For each response a number a token, which is part of `total`; None without such a source."""
    errors: dict[str, int] = field(default_factory=dict)
    """Of each source, how many of these scores are 0.0 because it had none (on_error: zero)."""
    cut: dict[str, int] = field(default_factory=dict)
    """Of each reward model, how many of these texts were longer than it takes and were cut."""


@dataclass(kw_only=True)
class RewardSource:
    """Something that gives a number for each response.

    `score` raises RewardError for a number that it does not have or, with on_error "zero", gives nan for it, which
    `total_score` counts as 0.0.
    """

    kind: ClassVar[str] = "reward"
    name: str
    weight: float = 1.0
    on_error: Literal["stop", "zero"] = "stop"
    num_errors: int = 0
    """Scores so far that it did not have."""
    first_error: str = ""
    advice: str = "Mend it, or have such scores count as 0.0 with on_error: zero"

    def score(self, judged: Judged) -> torch.Tensor:
        """[B] float32 on the CPU."""
        raise NotImplementedError

    def fail(self, judged: Judged, rows: Sequence[int], what: str, cause: Exception | None = None) -> None:
        """It has no scores for these rows: raise RewardError or, with on_error "zero", count them."""
        source = f"{self.kind} {self.name}"
        if self.on_error == "stop":
            raise failure(source, judged, rows, f"{what}. {self.advice}") from cause
        self.num_errors += len(rows)
        self.first_error = self.first_error or str(failure(source, judged, rows, what))

    def report(self) -> str:
        """A line about what went wrong on the way, or ""."""
        if not self.num_errors:
            return ""
        return f"{self.name}: {self.num_errors} scores counted as 0.0, the first because of {self.first_error}"


def failure(source: str, judged: Judged, rows: Sequence[int], what: str) -> RewardError:
    """The error that a source has no scores for some rows of a batch.

    >>> judged = Judged(["a", "b"], ["c", "d"], [], [], [], [], where=["x.jsonl:7", "x.jsonl:9"])
    >>> print(failure("reward function f", judged, [1], "returned nan"))
    x.jsonl:9: reward function f, response 2: returned nan
    >>> print(failure("reward function f", judged, [0, 1], "raised ValueError"))
    x.jsonl:7 and 1 more rows: reward function f, responses 1 to 2: raised ValueError
    """
    several = len(rows) > 1
    where = ""
    if judged.where:
        where = f"{judged.where[rows[0]]}{f' and {len(rows) - 1} more rows' if several else ''}: "
    numbers = f"responses {rows[0] + 1} to {rows[-1] + 1}" if several else f"response {rows[0] + 1}"
    return RewardError(f"{where}{source}, {numbers}: {what}")


def shown(value: Any) -> str:
    """A value in one line of bounded length; text stands as it is.

    >>> shown("two\\nlines"), shown([1, None])
    ('two lines', '[1, None]')
    """
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def finite(value: Any) -> float:
    """A number that float32 can hold, or ValueError; text is no number.

    >>> finite(True), finite(2)
    (1.0, 2.0)
    >>> finite("2")
    Traceback (most recent call last):
    ValueError: returned '2', a finite number is needed
    """
    try:
        result = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        result = math.nan
    if not abs(result) <= LARGEST:
        raise ValueError(f"returned {shown(repr(value))}, a finite number is needed")
    return result


async def in_pieces(
    pieces: Sequence[Sequence[int]], ask: Callable[[Sequence[int]], Awaitable[None]], concurrency: int
) -> None:
    """Await `ask` of each piece, at most `concurrency` of them at once; the first that raises stops the others."""
    gate = asyncio.Semaphore(concurrency)

    async def one(piece: Sequence[int]) -> None:
        async with gate:
            await ask(piece)

    try:
        async with asyncio.TaskGroup() as group:
            for piece in pieces:
                group.create_task(one(piece))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
