"""Samples to score, the base class of all reward sources, the sum of their scores, and reports of missing ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch

from rlhf_cli.algorithms.score_transforms import pessimistic_score
from rlhf_cli.config.rewards import Ensemble
from rlhf_cli.data.records import Message
from rlhf_cli.errors import RewardError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_cli.data.encoders import PromptRow

MAX_SHOWN = 200  # characters of a value that a message shows
LARGEST = torch.finfo(torch.float32).max


class Spoken(Protocol):
    @property
    def ids(self) -> list[int]: ...
    @property
    def ended(self) -> bool: ...


@dataclass(frozen=True)
class Samples:
    """Prompts and responses to score, as text and as the policy's tokens, with the prompts' rows."""

    prompts: list[str]  # as the policy read them, including data.prompt_template
    responses: list[str]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    ended: list[bool]
    rows: list[dict[str, Any]]
    tokens: list[list[str]] | None = None
    """The text of each response token, for functions that score every token."""
    where: list[str] = field(default_factory=list)  # `file:line` of each prompt's row; empty if unknown
    own_prompts: list[str] = field(default_factory=list)
    """The prompts as their rows have them; empty if equal to `prompts`."""
    messages: list[tuple[Message, ...]] = field(default_factory=list)
    """For rows that are conversations: all messages before the response. Empty if no row is a conversation."""


@dataclass(frozen=True)
class Scores:
    """The scores of all sources for a batch."""

    total: torch.Tensor
    """[B] the weighted sum of all sources; a per-token source adds the sum over its tokens."""
    each: dict[str, torch.Tensor]
    """[B] for each source and ensemble, before its weight. `<ensemble>_std` is the members' standard deviation."""
    dense: list[list[float]] | None
    """One number per response token, already included in `total`; None without a per-token source."""
    errors: dict[str, int] = field(default_factory=dict)
    """For each source, the number of scores that failed and count as 0.0 (on_error: zero)."""
    cut: dict[str, int] = field(default_factory=dict)
    """For each reward model, the number of texts that were too long and were cut."""
    parts: tuple[str, ...] = ()  # the names in `each` that are `RewardSource.parts`: `<source>_<part>`
    tokens: dict[str, int] = field(default_factory=dict)
    """For each judge on a server, the tokens that this batch cost."""
    features: torch.Tensor | None = None
    """[B, H] the `RewardSource.features` of all sources, side by side; None if no source has any."""
    optimised: torch.Tensor | None = None
    """[B] the total with the shaping of the sources (`shaping`), which PPO gets; None without shaping."""


@dataclass(kw_only=True)
class RewardSource:
    """Something that scores responses. A score that fails raises RewardError or, with on_error "zero", is NaN."""

    kind: ClassVar[str] = "reward"
    name: str
    weight: float = 1.0
    per_token: bool = False  # it rewards single tokens: `score_per_token` instead of `score`
    ensemble: Ensemble | None = None
    """The ensemble that it is a member of; its own `weight` then does not count."""
    on_error: Literal["stop", "zero"] = "stop"
    num_errors: int = 0  # failed scores so far
    first_error: str = ""
    features: torch.Tensor | None = None
    """[B, H] float32 on the CPU: the hidden states that the latest scores are read from, NaN for a failed one."""
    part_names: tuple[str, ...] = ()
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """[B] float32 for each of `part_names`: what the latest scores consist of, NaN for a failed one."""
    num_tokens: int | None = None
    """Tokens that a judge on a server has read and written so far; None for other sources."""
    num_cut: int | None = None  # texts that a reward model has cut so far; None for other sources
    advice: str = "Fix it, or count such scores as 0.0 with on_error: zero"

    def score(self, samples: Samples) -> torch.Tensor:
        """[B] float32 on the CPU."""
        raise NotImplementedError

    def score_per_token(self, samples: Samples) -> list[list[float] | None]:
        """One number per token of each response; None for a row that failed."""
        raise NotImplementedError

    @property
    def shares_passes(self) -> bool:
        """All processes must score together, also one without responses: a sharded model."""
        return False

    @property
    def column(self) -> str | None:
        """The column of the rows that it reads; `check_row` looks for it before training."""
        return None

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row of the data without what is read from the column."""
        if self.column not in row:
            raise ValueError(f"its row has no column {self.column!r}; it has {columns_of(row)}")

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


def joined(*lines: str) -> str:
    """The lines that are not empty, as one."""
    return "; ".join(filter(None, lines))


def samples_of(
    sources: Sequence[RewardSource],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    texts: list[str],
    responses: Sequence[Spoken],
) -> Samples:
    """The responses as the sources read them. Their tokens have texts only if a source scores every token."""
    dense = any(source.per_token for source in sources)
    return Samples(
        [p.text for p in prompts],
        texts,
        [p.ids for p in prompts],
        [r.ids for r in responses],
        [r.ended for r in responses],
        [p.row.columns for p in prompts],
        [[str(tokenizer.decode([i])) for i in r.ids] for r in responses] if dense else None,
        [p.row.where for p in prompts],
        [p.row.prompt for p in prompts],
        [p.row.messages for p in prompts],
    )


def total_score(sources: Sequence[RewardSource], samples: Samples) -> Scores:
    """The weighted sum of all sources' scores, an ensemble being one, and each source's own scores. Raises RewardError.

    A failed score (NaN, or None from a per-token source) counts as 0.0 and is counted in `errors`.
    """
    each: dict[str, torch.Tensor] = {}
    errors: dict[str, int] = {}
    cut: dict[str, int] = {}
    tokens: dict[str, int] = {}
    dense: list[list[float]] | None = None
    failed: RewardError | None = None
    # A source that fails on one process must not keep it from the passes of a sharded model: those come first, and
    # after a failure the other models score nothing.
    for source in sorted(sources, key=lambda s: not s.shares_passes):
        tokens_before, cut_before = source.num_tokens, source.num_cut
        try:
            found = source.score_per_token(samples) if source.per_token else source.score(samples)
        except RewardError as error:
            failed, samples = failed or error, Samples([], [], [], [], [], [])
        if failed is not None:
            continue
        if isinstance(found, list):
            errors[source.name] = sum(row is None for row in found)
            rows = [
                row if row is not None else [0.0] * len(ids)
                for row, ids in zip(found, samples.response_ids, strict=True)
            ]
            each[source.name] = torch.tensor([sum(row) for row in rows])
            old = dense or [[0.0] * len(row) for row in rows]
            dense = [
                [a + source.weight * b for a, b in zip(*pair, strict=True)] for pair in zip(old, rows, strict=True)
            ]
        else:
            errors[source.name] = int(found.isnan().sum())
            each[source.name] = torch.where(found.isnan(), 0.0, found)
            each |= {f"{source.name}_{part}": values.nan_to_num(0.0) for part, values in source.parts.items()}
        if source.num_cut is not None and cut_before is not None:
            cut[source.name] = source.num_cut - cut_before
        if source.num_tokens is not None and tokens_before is not None:
            tokens[source.name] = source.num_tokens - tokens_before
    if failed is not None:
        raise failed
    weighted = [source.weight * each[source.name] for source in sources if source.ensemble is None]
    for ensemble in dict.fromkeys(source.ensemble for source in sources if source.ensemble is not None):
        members = torch.stack([each[source.name] for source in sources if source.ensemble == ensemble])  # [K, B]
        each[ensemble.name] = pessimistic_score(members, ensemble.beta)
        each[f"{ensemble.name}_std"] = members.std(0)
        weighted.append(ensemble.weight * each[ensemble.name])
    total = torch.stack(weighted).sum(0)  # [B]
    features = [source.features for source in sources if source.features is not None]
    parts = tuple(f"{source.name}_{part}" for source in sources for part in source.part_names)
    return Scores(total, each, dense or None, errors, cut, parts, tokens, torch.cat(features, 1) if features else None)


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


def columns_of(row: Mapping[str, Any]) -> str:
    """The names of the columns of a row, for messages."""
    return shown(", ".join(map(str, row)) or "no columns")


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
