"""The types of a row: a Record in any format, and what each stage sees of it.

`rlhf_cli.data.formats` reads a row into a Record: a prompt and its answers. `rlhf_cli.data.views` turns a Record into a
Demonstration (SFT), a Ranking or Scored answers (RM), or a Prompt (PPO).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_cli.errors import DataError

ASSISTANT = "\n\nAssistant:"
SPEAKERS = {"system": "System", "user": "Human", "assistant": "Assistant"}


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
    """A row: a prompt and any number of answers to it."""

    where: str
    """`file:line` or `file row n`, for messages."""
    prompt: str
    """Empty if the row has none (plain text)."""
    answers: tuple[Answer, ...]
    """Empty for a prompt alone."""
    key: str
    """The text that splits hash: the prompt, or the whole text if there is no prompt."""
    ranked: bool = False
    """The answers are in order, best first."""
    undesirable: bool = False
    """The row marks its answer as a bad one (KTO). SFT must not imitate it."""
    messages: tuple[Message, ...] = ()
    """Every turn of a conversation before the answer. `prompt` is then its `transcript`, and each answer's text is a
    space and the assistant's words."""
    columns: dict[str, Any] = field(default_factory=dict)
    """All columns of the row in its file."""


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to learn, or a conversation. SFT learns every assistant turn of it."""

    prompt: str
    response: str
    where: str
    messages: tuple[Message, ...] = ()
    """Every turn of a conversation, the answer last."""
    ended: bool = True
    """See `Answer.ended`."""


@dataclass(frozen=True)
class Ranking:
    """At least two different answers to one prompt, best first."""

    prompt: str
    answers: tuple[str, ...]
    where: str
    margin: float = 0.0
    """How much better the first answer is than the last, in the data's own unit (Touvron et al. 2023)."""
    columns: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    """Every turn of a conversation before the answers."""
    cut: tuple[str, ...] = ()
    """The answers that have not `Answer.ended`."""

    @property
    def chosen(self) -> str:
        return self.answers[0]

    @property
    def rejected(self) -> str:
        return self.answers[-1]


@dataclass(frozen=True)
class Scored:
    """A response and its score. 0.0 is a score."""

    prompt: str
    response: str
    score: float
    where: str
    messages: tuple[Message, ...] = ()
    """Every turn of a conversation before the response."""
    ended: bool = True
    """See `Answer.ended`."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the columns of its row, which reward functions receive too."""

    prompt: str
    where: str
    columns: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    """Every turn of a conversation before its last answer."""


# -------------------------------------------------------------------------------------------- helpers


def transcript(messages: Sequence[Message]) -> str:
    r"""A conversation as plain text in the style of HH-RLHF. It ends where the assistant's answer begins.

    >>> transcript([Message("user", "Hi")])
    '\n\nHuman: Hi\n\nAssistant:'
    """
    return "".join(f"\n\n{SPEAKERS[m.role]}: {m.content}" for m in messages) + ASSISTANT


def number(value: Any, name: str, where: str) -> float:
    """A column's value as a finite number. Numeric text is accepted, true and false are not.

    Raises DataError with the row and the column.
    """
    try:
        read = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
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


def shown_name(name: object) -> str:
    """A column's name for a message: printable and at most 40 characters long."""
    text = str(name)
    text = text if len(text) <= 40 else text[:37] + "..."
    return text if text.isprintable() else repr(text)[1:-1]
