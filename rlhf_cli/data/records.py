"""A Row as its file has it, and a Record: a row of any format, and what a stage sees of it.

`rlhf_cli.data.formats` reads a Row into a Record, and `rlhf_cli.data.stage_rows` leaves what a stage uses of it: the
best answer (SFT), different answers from best to worst or answers with scores (RM), or the prompt (PPO).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from rlhf_cli.errors import DataError

T = TypeVar("T")
ASSISTANT = "\n\nAssistant:"
SPEAKERS = {"system": "System", "user": "Human", "assistant": "Assistant"}


@dataclass(frozen=True)
class Row:
    """A row's columns and its place for messages: `file:line`, `file row n` or `dataset[split] row n`."""

    values: dict[str, Any]
    where: str

    def error(self, message: str) -> DataError:
        """The error of a bad row: `<where>: <what was found>, <the rule>. <what to do>`."""
        return DataError(f"{self.where}: {message}")


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read, and why on one line: `f"{where}: {reason}"` is the complete message."""

    where: str
    reason: str


@dataclass(frozen=True)
class Message:
    """One turn of a conversation. `role` is system, user or assistant."""

    role: str
    content: str


def turns_of(messages: Iterable[Message]) -> list[dict[str, str]]:
    """Messages as rows and requests hold them."""
    return [{"role": message.role, "content": message.content} for message in messages]


@dataclass(frozen=True)
class Answer:
    """One answer to a prompt, and its score if the row gives one. 0.0 is a score."""

    text: str
    score: float | None = None
    ended: bool = True
    """False for an answer that was cut before its end, as `data generate` marks it: no EOS follows it."""


@dataclass(frozen=True)
class Record:
    """A row: a prompt and any number of answers to it. `StageRows.view` leaves the answers that a stage uses."""

    prompt: str
    """Empty if the row has none (plain text). For a conversation, the `transcript` of `messages`."""
    where: str
    """`file:line` or `file row n`, for messages."""
    answers: tuple[Answer, ...] = ()
    """Empty for a prompt alone."""
    key: str = ""
    """The text that splits hash: the prompt, or the whole text if there is no prompt."""
    ranked: bool = False
    """The answers are in order, best first."""
    undesirable: bool = False
    """The row marks its answer as a bad one (KTO). SFT must not imitate it."""
    messages: tuple[Message, ...] = ()
    """Every turn of a conversation before the answers. Each answer's text is a space and the assistant's words."""
    columns: dict[str, Any] = field(default_factory=dict)
    """All columns of the row in its file, which reward functions receive too."""
    margin: float = 0.0
    """How much better the first answer is than the last, in the data's own unit (Touvron et al. 2023)."""

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(answer.text for answer in self.answers)

    @property
    def scores(self) -> tuple[float, ...]:
        """The scores of the answers that have one."""
        return tuple(answer.score for answer in self.answers if answer.score is not None)

    @property
    def response(self) -> str:
        """The text of the first answer, or of the only one."""
        return self.answers[0].text

    @property
    def turns(self) -> tuple[Message, ...]:
        """The whole conversation with the first answer; empty for other rows."""
        return (*self.messages, Message("assistant", self.response.removeprefix(" "))) if self.messages else ()

    def each(self) -> list[Record]:
        """The row once with each of its answers alone."""
        return [replace(self, answers=(answer,)) for answer in self.answers]


def batched(things: Iterable[T], size: int | None) -> Iterator[list[T]]:
    """Lists of `size` things, or one of all if size is None; the last one may be shorter.

    >>> list(batched([1, 2, 3, 4, 5], 2)), list(batched("abc", None)), list(batched([], 2))
    ([[1, 2], [3, 4], [5]], [['a', 'b', 'c']], [])
    """
    things = iter(things)
    while batch := list(islice(things, size)):
        yield batch


def transcript(messages: Sequence[Message]) -> str:
    r"""A conversation as plain text in the style of HH-RLHF. It ends where the assistant's answer begins.

    >>> transcript([Message("user", "Hi")])
    '\n\nHuman: Hi\n\nAssistant:'
    """
    return "".join(f"\n\n{SPEAKERS[m.role]}: {m.content}" for m in messages) + ASSISTANT


def number(value: Any, name: str, where: str) -> float:
    """A column's value as a finite number. Numeric text and decimals of a table are accepted, true and false are not.

    Raises DataError with the row and the column.
    """
    try:
        read = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        read = math.nan
    if not math.isfinite(read):
        raise DataError(f"{where}: `{shown_name(name)}` is {shown(value)}, it must be a number")
    return read


def shown(value: Any) -> str:
    """A value for a message: short and on one line.

    >>> shown("a" * 1000), shown([1, 2]), shown(2.5)
    ("'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...'", 'a list', '2.5')
    """
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "...")
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**20):
        return repr(value)
    return kind_of(value)


def kind_of(value: Any) -> str:
    """The type of a value, in JSON's terms.

    >>> kind_of(None), kind_of(1), kind_of({})
    ('null', 'a number', 'a mapping')
    """
    if value is None:
        return "null"
    words = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
    return words.get(type(value), f"a {type(value).__name__}")


PLACEHOLDER = re.compile(r"\{(\w+)\}")


def fill(template: str, **values: str) -> str:
    """The template with each `{name}` replaced by its value, in one pass: braces within a value are left alone.

    >>> fill("{prompt} -> {response} {x}", prompt="{response}?", response="yes")
    '{response}? -> yes {x}'
    """
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


def shown_name(name: object) -> str:
    """A column's name for a message: printable and at most 40 characters long."""
    text = str(name)
    text = text if len(text) <= 40 else text[:37] + "..."
    return text if text.isprintable() else repr(text)[1:-1]
