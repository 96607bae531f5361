"""Read one column of a row: text, messages, a prompt, an answer, a score.

Every function takes the row, so that its message starts with the row's place: `<where>: <what was found>, <the
rule>. <what to do>`. They raise DataError and nothing else, whatever the value is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_cli.config.data import DataSource
from rlhf_cli.data.records import Answer, Message, Record, kind_of, number, shown, shown_name, transcript, turns_of
from rlhf_cli.data.rows import Row
from rlhf_cli.errors import DataError
from rlhf_cli.printing import is_utf8

PROMPT_KEYS = ("prompt", "question", "user_input", "query")
RESPONSE_KEYS = ("response", "completion", "answer", "output")
ANSWERS_KEYS = ("answers", "responses")
CONVERSATION_KEYS = ("messages", "conversations")
CONTEXT_KEYS = ("context",)
"""The prompt of preference rows only: beside a single answer, `context` is often a passage that a question is about."""
LABEL_KEYS = ("label", "score")
SYSTEM_KEYS = ("system_content", "system", "system_prompt")
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


# ------------------------------------------------------------------------------------------------- which


def found_keys(values: Mapping[str, Any]) -> str:
    """The names of the first six columns, for a message.

    >>> found_keys({"a": 1, "b": 2})
    'a, b'
    """
    some: list[str] = []
    for name in values:
        if len(some) == 6 or sum(map(len, some)) > 40:
            return f"{', '.join(some)} and {len(values) - len(some):,} more"
        some.append(shown_name(name))
    return ", ".join(some) if some else "(none)"


def has(values: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Does the row have one of the columns?"""
    return any(name in values for name in names)


def first_key(row: Row, names: tuple[str, ...]) -> str:
    """The first of `names` that the row has; raises DataError if it has none."""
    for name in names:
        if name in row.values:
            return name
    needed = f"`{names[0]}`" if len(names) == 1 else f"one of {', '.join(names)}"
    raise DataError(
        f"{row.where}: found the keys {found_keys(row.values)}, every row needs {needed}. Fix the row, or map the "
        "column with `keys`"
    )


def column(row: Row, name: str) -> Any:
    """The value of a column that every row needs; raises DataError if it is missing."""
    return row.values[first_key(row, (name,))]


def mapped(row: Row, source: DataSource) -> Row:
    """The row with its columns renamed to our names, as `source.keys` says.

    A path is the full name of a column. If there is no such column, it is split at its dots: a name reaches into a
    mapping, a number from 0 into a list. A renamed column no longer has its old name. Raises DataError if the row lacks
    a named column.

    >>> row = Row({"q": "1+1=", "out": {"text": "2"}}, "file:1")
    >>> mapped(row, DataSource(path="file", keys={"prompt": "q", "response": "out.text"})).values
    {'out': {'text': '2'}, 'prompt': '1+1=', 'response': '2'}
    """
    if not source.keys:
        return row
    old = set(source.keys.values())
    values = {name: value for name, value in row.values.items() if name not in old}
    for ours, path in source.keys.items():
        values[ours] = at(row, path, f", which `keys` maps to `{shown_name(ours)}`")
    return Row(values, row.where)


def at(row: Row, path: str, why: str = "") -> Any:
    """The value at a path of names and numbers joined by dots; raises DataError, which ends with `why`, without one.

    >>> at(Row({"passages": [{"text": "a"}, {"text": "b"}]}, "file:1"), "passages.1.text")
    'b'
    """
    if path in row.values:
        return row.values[path]
    value: Any = row.values
    for name in path.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            raise DataError(f"{row.where}: found the keys {found_keys(row.values)}, but not `{shown_name(path)}`{why}")
    return value


# -------------------------------------------------------------------------------------------------- text


def text(row: Row, name: str, *, empty: bool = False) -> str:
    """A column that must be text; blank text is allowed only with `empty`."""
    return checked(column(row, name), f"`{name}`", row.where, empty=empty)


def optional_text(row: Row, name: str) -> str:
    """A text column; "" if it is missing, null, or NaN (which tables use for missing values)."""
    value = row.values.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return checked(value, f"`{name}`", row.where, empty=True)


def checked(value: Any, what: str, where: str, *, empty: bool = False) -> str:
    """A value that must be text without lone surrogates, and not blank unless `empty`; messages call it `what`."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} is {kind_of(value)}, it must be text")
    if not empty and not value.strip():
        raise DataError(f"{where}: {what} is empty, it must contain text. Remove the row")
    if not is_utf8(value):
        raise DataError(f"{where}: {what} contains a lone surrogate (half a character). Fix the row")
    return value


def sequence(value: Any, what: str, where: str) -> list[Any]:
    """A value that must be a list; messages call it `what`."""
    if not isinstance(value, list):
        raise DataError(f"{where}: {what} is {kind_of(value)}, it must be a list")
    return value


# ------------------------------------------------------------------------------------------ conversations


def messages(items: Any, name: str, where: str) -> tuple[Message, ...]:
    """A value that must be a list of messages; see `message`."""
    if not isinstance(items, list) or not items:
        raise DataError(
            f"{where}: `{name}` must be a non-empty list of messages with role and content (or from and value)"
        )
    return tuple(message(item, f"message {n} of `{name}`", where) for n, item in enumerate(items, 1))


def message(item: Any, what: str, where: str) -> Message:
    """One message: `role` and `content`, or ShareGPT's `from` and `value`.

    Raises DataError for other roles (tool, function, ...), which a dialogue of user and assistant cannot hold.
    """
    if isinstance(item, dict):
        role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
    else:
        role = content = None
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f"{where}: {what} needs a text `role` and a text `content` (or `from` and `value`)")
    if role not in ROLES:
        raise DataError(f"{where}: {what} has role {shown(role)}, it must be system, user or assistant (or human, gpt)")
    return Message(ROLES[role], checked(content, what, where, empty=True))


def system_message(row: Row) -> tuple[Message, ...] | None:
    """The system column as messages: empty if it is blank, None if there is no such column."""
    for name in SYSTEM_KEYS:
        if name in row.values:
            content = optional_text(row, name)
            return (Message("system", content),) if content.strip() else ()
    return None


def conversation(row: Row, name: str) -> tuple[Message, ...]:
    """The messages of a column, after the system column's message unless they start with a system message."""
    own_messages = messages(row.values[name], name, row.where)
    before = system_message(row) or ()
    return own_messages if own_messages[0].role == "system" else before + own_messages


# ------------------------------------------------------------------------------------- prompt and answers


Said = str | tuple[Message, ...]
"""A prompt: text, or the messages of a conversation."""


def prompt(row: Row, *, empty: bool = True, names: tuple[str, ...] = PROMPT_KEYS) -> Said:
    """The prompt of a row, from a column of `names`, or of `CONVERSATION_KEYS` if there is none.

    It is text, or a list of messages that does not end with the assistant. With a system column (RLHF_PPO's
    `system_content`, `system`, `system_prompt`), a text becomes the user's message after it.
    """
    name = first_key(row, names if has(row.values, names) else names + CONVERSATION_KEYS)
    if not isinstance(row.values[name], list):
        prompt_text, system = text(row, name, empty=empty), system_message(row)
        return prompt_text if system is None else (*system, Message("user", prompt_text))
    before = conversation(row, name)
    require_open(before, name, row)
    return before


def require_open(before: tuple[Message, ...], name: str, row: Row) -> None:
    """Raise DataError if a prompt's conversation ends with the assistant."""
    if before[-1].role == "assistant":
        raise DataError(f"{row.where}: `{name}` ends with the assistant's message, a prompt must end before the answer")


def answer(value: Any, name: str, row: Row) -> tuple[tuple[Message, ...] | None, str]:
    """(messages before the answer, the answer's content) of a text, a message, or a list that ends with the assistant.

    The first is None if the answer is plain text.
    """
    if isinstance(value, str):
        return None, checked(value, f"`{name}`", row.where)
    turns: tuple[Message, ...]
    if isinstance(value, dict):
        turns = (message(value, f"`{name}`", row.where),)
    elif isinstance(value, list):
        turns = messages(value, name, row.where)
    else:
        raise DataError(f"{row.where}: `{name}` is {kind_of(value)}, it must be text or messages")
    if turns[-1].role != "assistant" or not turns[-1].content.strip():
        raise DataError(f"{row.where}: the last message of `{name}` must be the assistant's and not empty")
    return turns[:-1], turns[-1].content


def answered(
    row: Row,
    said: Said | None,
    answers: list[tuple[tuple[Message, ...] | None, str]],
    scores: Sequence[float | None] = (),
    *,
    ranked: bool = False,
    undesirable: bool = False,
) -> Record:
    """The Record of a row's prompt (None if it has none) and its answers, each as `answer` reads it.

    If any of them is messages, the row is a conversation: the prompt is its transcript, and each answer's text is a
    space and its content. The messages before the answers in their own lists must be equal for all answers. They
    follow the prompt's messages, unless they begin with them or repeat their end. A prompt that is text becomes the
    user's message after them, unless it is already one of them.
    """
    starts = [turns for turns, _ in answers if turns is not None]
    contents = [content for _, content in answers]
    if starts or not isinstance(said, str):
        said = _before_answers(row, said, starts, len(answers))
        contents = [" " + content for content in contents]
    graded = tuple(map(Answer, contents, scores or [None] * len(contents)))
    return record(row, said, graded, ranked=ranked, undesirable=undesirable)


def _before_answers(
    row: Row, said: Said | None, starts: list[tuple[Message, ...]], num_answers: int
) -> tuple[Message, ...]:
    """The messages before the answers: those of the prompt and those in the lists of the answers."""
    turns = starts[0] if starts else ()
    if any(start != turns for start in starts) or (turns and len(starts) < num_answers):
        raise DataError(f"{row.where}: the messages before the answers differ, all must answer the same prompt")
    if isinstance(said, str):
        is_copy = said.strip() in {"", *(m.content.strip() for m in turns)}
        if not is_copy and any(m.role == "user" for m in turns):
            raise DataError(
                f"{row.where}: the prompt is not among the messages before the answers, it must be one of them. "
                "Remove the prompt or the messages"
            )
        turns = turns if is_copy else (*turns, Message("user", said))
    elif said and turns[: len(said)] != said:
        turns = said if turns and turns == said[-len(turns) :] else said + turns
    if not turns:
        raise DataError(f"{row.where}: the answers have no prompt; give it in a column or as messages before them")
    require_open(turns, "the messages before the answers", row)
    return turns


def record(
    row: Row, said: Said, answers: tuple[Answer, ...], *, ranked: bool = False, undesirable: bool = False
) -> Record:
    """The Record of a row with a prompt. Its key is the prompt's text, or its messages as JSON.

    A column `ended` says which answers are complete: true or false, or a list with one for each answer.
    """
    ended = row.values.get("ended")
    flags = [ended] if isinstance(ended, bool) else ended
    if isinstance(flags, list) and len(flags) == len(answers) and all(isinstance(flag, bool) for flag in flags):
        answers = tuple(replace(answer, ended=flag) for answer, flag in zip(answers, flags, strict=True))
    if isinstance(said, str):
        return Record(said, row.where, answers, said, ranked, undesirable, (), row.values)
    key = json.dumps(turns_of(said), sort_keys=True)
    return Record(transcript(said), row.where, answers, key, ranked, undesirable, said, row.values)


# ------------------------------------------------------------------------------------------------ numbers


def column_number(row: Row, name: str) -> float:
    """A column that must be a finite number."""
    return number(column(row, name), name, row.where)


def one_of(value: Any, name: str, allowed: tuple[int, ...], row: Row) -> int:
    """A value that must be one of a few integers."""
    found = number(value, name, row.where)
    if found not in allowed:
        raise DataError(
            f"{row.where}: `{shown_name(name)}` is {shown(value)}, it must be one of {', '.join(map(str, allowed))}"
        )
    return int(found)


def optional_number(value: Any, name: str, row: Row) -> float | None:
    """A score; None if it is null or blank. 0 is a score."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return number(value, name, row.where)


def weighted(grades: Mapping[str, Any], weights: Mapping[str, float], where: str, of: str = "") -> float:
    """The weighted sum of grades that must be numbers. Messages append `of` to the name of each.

    >>> weighted({"helpfulness": 3, "verbosity": "2"}, {"helpfulness": 1.0, "verbosity": -0.5}, "file:1")
    2.0
    """
    total = sum(weight * number(grades[name], name + of, where) for name, weight in weights.items())
    return number(total, f"the weighted score{of}", where)
