"""What reward sources score, the base class of all sources, and how missing scores are reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch

from rlhf_cli.config.rewards import Ensemble
from rlhf_cli.data.records import Message
from rlhf_cli.errors import RewardError

MAX_SHOWN = 200
"""Characters of a value that a message shows."""
LARGEST = torch.finfo(torch.float32).max


class Spoken(Protocol):
    """A response of a policy."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def ended(self) -> bool: ...


@dataclass(frozen=True)
class Samples:
    """Prompts and responses to score, as text and as the policy's tokens, with the prompts' rows."""

    prompts: list[str]
    """As the policy read them, including data.prompt_template."""
    responses: list[str]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    ended: list[bool]
    rows: list[dict[str, Any]]
    tokens: list[list[str]] | None = None
    """The text of each response token, for functions that score every token."""
    where: list[str] = field(default_factory=list)
    """`file:line` of each prompt's row; empty if unknown."""
    own_prompts: list[str] = field(default_factory=list)
    """The prompts as their rows have them; empty if equal to `prompts`."""
    messages: list[tuple[Message, ...]] = field(default_factory=list)
    """For rows that are conversations: all messages before the response. Empty if no row is a conversation."""


NOTHING = Samples([], [], [], [], [], [])
"""No response."""


@dataclass(frozen=True)
class Scores:
    """The scores of all sources for a batch."""

    total: torch.Tensor
    """[B] the weighted sum of all sources; a per-token source adds the sum over its tokens."""
    each: dict[str, torch.Tensor]
    """[B] for each source and each ensemble by name, before its weight. `<ensemble>_std` is the standard deviation of
    its members' scores of a response."""
    dense: list[list[float]] | None
    """One number per response token, already included in `total`; None without a per-token source."""
    errors: dict[str, int] = field(default_factory=dict)
    """For each source, the number of scores that failed and count as 0.0 (on_error: zero)."""
    cut: dict[str, int] = field(default_factory=dict)
    """For each reward model, the number of texts that were too long and were cut."""
    parts: tuple[str, ...] = ()
    """The names in `each` that are `RewardSource.parts`: `<source>_<part>`."""
    tokens: dict[str, int] = field(default_factory=dict)
    """For each judge on a server, the tokens that this batch cost."""
    features: torch.Tensor | None = None
    """[B, H] the `RewardSource.features` of all sources, side by side; None if no source has any."""
    optimised: torch.Tensor | None = None
    """[B] the total with the shaping of the sources (`shaping`), which PPO gets; None without shaping."""


@dataclass(kw_only=True)
class RewardSource:
    """Something that scores responses.

    When a score cannot be computed, `score` raises RewardError or, with on_error "zero", returns NaN for it, which
    `total_score` counts as 0.0.
    """

    kind: ClassVar[str] = "reward"
    name: str
    weight: float = 1.0
    per_token: bool = False
    """It rewards single tokens: `score_per_token` instead of `score`."""
    ensemble: Ensemble | None = None
    """The ensemble that it is a member of; its own `weight` then does not count."""
    on_error: Literal["stop", "zero"] = "stop"
    num_errors: int = 0
    """Failed scores so far."""
    first_error: str = ""
    features: torch.Tensor | None = None
    """[B, H] float32 on the CPU: the hidden states that the latest responses were scored from, NaN for a failed score.
    None for a source without."""
    part_names: tuple[str, ...] = ()
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """[B] float32 for each of `part_names`: what the latest scores consist of, NaN for a failed one."""
    num_tokens: int | None = None
    """Tokens that a judge on a server has read and written so far; None for other sources."""
    advice: str = "Fix it, or count such scores as 0.0 with on_error: zero"

    def score(self, samples: Samples) -> torch.Tensor:
        """[B] float32 on the CPU."""
        raise NotImplementedError

    def score_per_token(self, samples: Samples) -> list[list[float] | None]:
        """One number per token of each response; None for a row that failed."""
        raise NotImplementedError

    @property
    def reads_a_column(self) -> bool:
        """Whether it reads a column of the rows, which `check_row` looks for before training."""
        return False

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row of the data without the column."""

    def keep_in(self, folder: Path, process: int) -> None:
        """Keep in a folder of the run what must not be asked for again when it is resumed."""

    def fail(self, samples: Samples, rows: Sequence[int], problem: str, cause: BaseException | None = None) -> None:
        """Report that these rows have no score: raise RewardError or, with on_error "zero", count them."""
        source = f"{self.kind} {self.name}"
        if self.on_error == "stop":
            raise failure(source, samples, rows, f"{problem}. {self.advice}") from cause
        self.num_errors += len(rows)
        self.first_error = self.first_error or str(failure(source, samples, rows, problem))

    def report(self) -> str:
        """One line about the failed scores, or ""."""
        if not self.num_errors:
            return ""
        return f"{self.name}: {self.num_errors} scores failed and counted as 0.0. First failure: {self.first_error}"


def failure(source: str, samples: Samples, rows: Sequence[int], problem: str) -> RewardError:
    """The error for a source that has no scores for some rows of a batch.

    >>> samples = Samples(["a", "b"], ["c", "d"], [], [], [], [], where=["x.jsonl:7", "x.jsonl:9"])
    >>> print(failure("reward function f", samples, [1], "returned nan"))
    x.jsonl:9: reward function f, response 2: returned nan
    >>> print(failure("reward function f", samples, [0, 1], "raised ValueError"))
    x.jsonl:7 and 1 more row: reward function f, responses 1 to 2: raised ValueError
    """
    several = len(rows) > 1
    where = ""
    if samples.where:
        more = f" and {len(rows) - 1} more row{'s' if len(rows) > 2 else ''}" if several else ""
        where = f"{samples.where[rows[0]]}{more}: "
    numbers = f"responses {rows[0] + 1} to {rows[-1] + 1}" if several else f"response {rows[0] + 1}"
    return RewardError(f"{where}{source}, {numbers}: {problem}")


def shown(value: Any) -> str:
    """A value on one line of limited length; text is shown without quotes, an exception by its message.

    >>> shown("two\\nlines"), shown([1, None])
    ('two lines', '[1, None]')
    """
    text = " ".join((str(value) if isinstance(value, str | BaseException) else repr(value)).split())
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def finite(value: Any) -> float:
    """The value as a finite number within float32's range; raises ValueError for anything else, including text.

    >>> finite(True), finite(2)
    (1.0, 2.0)
    >>> finite("2")
    Traceback (most recent call last):
    ValueError: returned '2', it must be a finite number
    """
    try:
        result = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        result = math.nan
    if not abs(result) <= LARGEST:
        raise ValueError(f"returned {shown(repr(value))}, it must be a finite number")
    return result
