"""One row as every stage understands it, whatever its format was: a prompt and its answers.

`rlhf_cli.data.formats` reads a row into a Record; the functions here are what each stage sees of it:
a Demonstration (SFT), a Ranking or Scored rows (RM), a Prompt (PPO).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_cli.errors import DataError

ASSISTANT = "\n\nAssistant:"
SPEAKERS = {"system": "System", "user": "Human", "assistant": "Assistant"}


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Answer:
    """One answer to a prompt, and its score where the row gives one; 0.0 is a score."""

    text: str
    score: float | None = None


@dataclass(frozen=True)
class Record:
    """A row: a prompt, and no, one or several answers to it."""

    where: str
    """`file:line` or `file row n`, for messages."""
    prompt: str
    """Empty where the row has none (plain text)."""
    answers: tuple[Answer, ...]
    """May be empty (a prompt alone)."""
    key: str
    """What rows are told apart by when they are split: the prompt, or the text where there is no prompt."""
    ranked: bool = False
    """The answers stand best first."""
    undesirable: bool = False
    """The row says that its answer is a bad one (KTO), not to be imitated."""
    messages: tuple[Message, ...] = ()
    """Of a conversation: everything before the answer. `prompt` is then its `transcript`, and each answer's text
    is a space and what the assistant says."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The row as it was in its file."""


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to learn, or a conversation whose assistant turns are learnt."""

    prompt: str
    response: str
    where: str
    messages: tuple[Message, ...] = ()
    """Of a conversation: all of it, the answer last."""


@dataclass(frozen=True)
class Ranking:
    """Answers to one prompt, best first, all different, at least two."""

    prompt: str
    answers: tuple[str, ...]
    where: str
    margin: float = 0.0
    """How much better the first is than the last, in the data's own unit (the margin of Touvron et al. 2023)."""
    columns: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    """Of a conversation: all that comes before the answers."""

    @property
    def chosen(self) -> str:
        return self.answers[0]

    @property
    def rejected(self) -> str:
        return self.answers[-1]


@dataclass(frozen=True)
class Scored:
    """A response and its score; 0.0 is a score."""

    prompt: str
    response: str
    score: float
    where: str
    messages: tuple[Message, ...] = ()
    """Of a conversation: all that comes before the response."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and the row that it came from, which rewards are given too."""

    prompt: str
    where: str
    columns: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    """Of a conversation: all that comes before its last answer."""


# ------------------------------------------------------------------------------- what each stage sees


def demonstration(record: Record) -> Demonstration | None:
    """What SFT learns of a row: the best answer.

    Ranked answers: the first. Scored answers: the one of the highest score, the first of several. Else the first
    answer. None where there is no answer, or the row calls its answer a bad one.

    >>> demonstration(Record("file:1", "1+1=", (Answer("3", 0.0), Answer("2", 1.0)), "1+1=")).response
    '2'
    """
    if not record.answers or record.undesirable:
        return None
    answer = record.answers[0]
    if not record.ranked and len(record.answers) > 1:
        answer = max(record.answers, key=lambda a: -math.inf if a.score is None else a.score)
    messages = record.messages
    if messages:
        messages = (*messages, Message("assistant", answer.text.removeprefix(" ")))
    return Demonstration(record.prompt, answer.text, record.where, messages)


def ranking(record: Record, *, margin_column: str | None = None) -> Ranking | None:
    """The answers of a row from best to worst, all different, or None where no two can be told apart.

    Ranked answers keep their order; others are sorted by score, and those without a score are left out.
    The same text twice keeps its best place. Of answers with the same score only the first in the row stays, for
    between them nothing is preferred: two answers of equal score are no preference at all.

    `margin_column` names the row's column that says how much better the best answer is.
    Raises DataError where that is not a number.

    >>> ranking(Record("file:1", "1+1=", (Answer("3", 0.0), Answer("2", 1.0), Answer("4", 0.0)), "1+1=")).answers
    ('2', '3')
    """
    answers = record.answers
    if not record.ranked:
        with_scores = [(answer.score, answer) for answer in answers if answer.score is not None]
        answers = tuple(answer for _, answer in sorted(with_scores, key=lambda item: -item[0]))
    texts: list[str] = []
    seen: set[str] = set()
    score = None
    for answer in answers:
        tied = not record.ranked and answer.score == score
        if answer.text not in seen and not tied:
            texts.append(answer.text)
            score = answer.score
        seen.add(answer.text)
    if len(texts) < 2:
        return None
    margin = number(record.columns.get(margin_column), margin_column, record.where) if margin_column else 0.0
    return Ranking(record.prompt, tuple(texts), record.where, margin, record.columns, record.messages)


def scored(record: Record) -> list[Scored]:
    """Each answer of a row that has a score."""
    return [
        Scored(record.prompt, answer.text, answer.score, record.where, record.messages)
        for answer in record.answers
        if answer.score is not None
    ]


def prompt(record: Record) -> Prompt:
    """What PPO answers; raises DataError for a prompt of nothing but blanks.

    The empty prompt of a plain text is one to write anything after, and is taken.
    """
    if not record.key.strip():
        raise DataError(f"{record.where}: the prompt is empty, there is nothing to answer. Remove the row")
    return Prompt(record.prompt, record.where, record.columns, record.messages)


# ------------------------------------------------------------------------------------------- beside them


def transcript(messages: Sequence[Message]) -> str:
    r"""A conversation as plain text in the style of HH-RLHF, ending where the assistant answers.

    >>> transcript([Message("user", "Hi")])
    '\n\nHuman: Hi\n\nAssistant:'
    """
    return "".join(f"\n\n{SPEAKERS[m.role]}: {m.content}" for m in messages) + ASSISTANT


def pairs_of_labels(scores: Sequence[float], generator: torch.Generator) -> list[tuple[int, int]]:
    """Pairs (index of a higher score, index of a lower one) out of rows that have a score each.

    Higher is what lies above the middle of the smallest and the largest score. Each higher row stands in one pair,
    in order; the lower ones come in the order that `generator` draws, again from its beginning when they are used
    up. The rows of a pair share no prompt: each is judged whole.
    Raises DataError where all scores are equal, or there are none.

    >>> pairs_of_labels([0.0, 1.0, 1.0], torch.Generator().manual_seed(0))
    [(1, 0), (2, 0)]
    """
    middle = (min(scores, default=0.0) + max(scores, default=0.0)) / 2
    high = [i for i, score in enumerate(scores) if score > middle]
    low = [i for i, score in enumerate(scores) if score <= middle]
    if not high or not low:
        found = f"every label is {scores[0]}" if scores else "no labels"
        raise DataError(f"{found}, pairs need two different ones")
    order = torch.randperm(len(low), generator=generator).tolist()
    return [(i, low[order[n % len(low)]]) for n, i in enumerate(high)]


def number(value: Any, name: str, where: str) -> float:
    """A column's value as a finite number; text that reads as one is one, true and false are none.

    Raises DataError naming the row and the column.
    """
    try:
        read = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        read = math.nan
    if not math.isfinite(read):
        raise DataError(f"{where}: `{shown_name(name)}` is {shown(value)}, it must be a number")
    return read


def shown(value: Any) -> str:
    """A value as a message shows it: on one line, short, whatever it is.

    >>> shown("a" * 1000), shown([1, 2]), shown(2.5)
    ("'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...'", 'a list', '2.5')
    """
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "...")
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**20):
        return repr(value)
    return kind_of(value)


def kind_of(value: Any) -> str:
    """What a value is, in the words of JSON.

    >>> kind_of(None), kind_of(1), kind_of({})
    ('null', 'a number', 'a mapping')
    """
    if value is None:
        return "null"
    words = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
    return words.get(type(value), f"a {type(value).__name__}")


def shown_name(name: object) -> str:
    """A column's name as a message shows it: printable and at most 40 characters long."""
    text = str(name)
    text = text if len(text) <= 40 else text[:37] + "..."
    return text if text.isprintable() else repr(text)[1:-1]
