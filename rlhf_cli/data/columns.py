"""What stands in one column of a row: text, messages, a prompt, an answer, a score.

Every function takes the row, so that what it refuses is said with the row's place: `<where>: <what was found>, <the
rule>. <what to do>`. They raise DataError and nothing else, whatever the value is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rlhf_cli.config.data import DataSource
from rlhf_cli.data.records import Answer, Message, Record, kind_of, number, shown, shown_name, transcript
from rlhf_cli.data.sources import Row
from rlhf_cli.errors import DataError

PROMPT_KEYS = ("prompt", "question", "user_input", "query")
RESPONSE_KEYS = ("response", "completion", "answer", "output")
ANSWERS_KEYS = ("answers", "responses")
CONVERSATION_KEYS = ("messages", "conversations")
SYSTEM_KEYS = ("system_content", "system", "system_prompt")
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


# ------------------------------------------------------------------------------------------------- which


def found_keys(values: Mapping[str, Any]) -> str:
    """The names of the columns as a message shows them: the first six at most.

    >>> found_keys({"a": 1, "b": 2})
    'a, b'
    """
    some: list[str] = []
    for name in values:
        if len(some) == 6 or sum(map(len, some)) > 40:
            return f"{', '.join(some)} and {len(values) - len(some):,} more"
        some.append(shown_name(name))
    return ", ".join(some) if some else "no keys at all"


def has(values: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Is one of the columns there?"""
    return any(name in values for name in names)


def first_key(row: Row, names: tuple[str, ...]) -> str:
    """The first of `names` that the row has; raises DataError where it has none."""
    for name in names:
        if name in row.values:
            return name
    needed = f"`{names[0]}`" if len(names) == 1 else f"one of {', '.join(names)}"
    raise DataError(
        f"{row.where}: found the keys {found_keys(row.values)}, {needed} is needed in every row. "
        "Mend the row, or map the column with `keys`"
    )


def mapped(row: Row, source: DataSource) -> Row:
    """The row with the file's columns under our names, as `source.keys` says.

    A path is a column's whole name, or else names with dots between them that go into mappings. A column that was
    renamed has its old name no longer. Raises DataError where a row lacks a column that is named.

    >>> row = Row({"q": "1+1=", "out": {"text": "2"}}, "file:1")
    >>> mapped(row, DataSource(path="file", keys={"prompt": "q", "response": "out.text"})).values
    {'out': {'text': '2'}, 'prompt': '1+1=', 'response': '2'}
    """
    if not source.keys:
        return row
    old = set(source.keys.values())
    values = {name: value for name, value in row.values.items() if name not in old}
    for ours, path in source.keys.items():
        values[ours] = at(row, path, f", and `keys` says that it is our `{shown_name(ours)}`")
    return Row(values, row.where)


def at(row: Row, path: str, why: str = "") -> Any:
    """What stands under a path of names with dots between them; raises DataError, with `why`, where nothing does."""
    if path in row.values:
        return row.values[path]
    value: Any = row.values
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise DataError(
                f"{row.where}: found the keys {found_keys(row.values)}, `{shown_name(path)}` is not there{why}"
            )
        value = value[name]
    return value


# -------------------------------------------------------------------------------------------------- text


def text(row: Row, name: str, *, empty: bool = False) -> str:
    """A column that must be text, and not blank unless `empty`."""
    if name not in row.values:
        first_key(row, (name,))
    return checked(row.values[name], f"`{name}`", row.where, empty=empty)


def optional_text(row: Row, name: str) -> str:
    """A column that may be missing, null, or NaN as tables write what is missing: then the empty text."""
    value = row.values.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return checked(value, f"`{name}`", row.where, empty=True)


def checked(value: Any, what: str, where: str, *, empty: bool = False) -> str:
    """A value that must be text without half characters, and not blank unless `empty`; `what` names it in messages."""
    if not isinstance(value, str):
        raise DataError(f"{where}: {what} is {kind_of(value)}, it must be text")
    if not empty and not value.strip():
        raise DataError(f"{where}: {what} is empty, there is nothing to learn from. Remove the row")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"{where}: {what} holds half a character (a lone surrogate). Mend the row") from None
    return value


def sequence(value: Any, what: str, where: str) -> list[Any]:
    """A value that must be a list; `what` names it in messages."""
    if not isinstance(value, list):
        raise DataError(f"{where}: {what} is {kind_of(value)}, it must be a list")
    return value


# ------------------------------------------------------------------------------------------ conversations


def messages(items: Any, name: str, where: str) -> tuple[Message, ...]:
    """A value that must be a list of messages; see `message`."""
    if not isinstance(items, list) or not items:
        raise DataError(
            f"{where}: `{name}` is not a list of messages with role and content (or from and value), it must be one "
            "and not empty"
        )
    return tuple(message(item, f"message {n} of `{name}`", where) for n, item in enumerate(items, 1))


def message(item: Any, what: str, where: str) -> Message:
    """One message: `role` and `content`, or ShareGPT's `from` and `value`; roles that have no part in a dialogue of
    user and assistant (tool, function, ...) are refused by name."""
    if isinstance(item, dict):
        role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
    else:
        role = content = None
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f"{where}: {what} needs a text `role` and a text `content` (or `from` and `value`)")
    if role not in ROLES:
        raise DataError(f"{where}: {what} has role {shown(role)}, not system, user or assistant (human, gpt)")
    return Message(ROLES[role], checked(content, what, where, empty=True))


def system_message(row: Row) -> tuple[Message, ...] | None:
    """What a column for the system says, as messages: none where it is blank; None where there is no such column."""
    for name in SYSTEM_KEYS:
        if name in row.values:
            said = optional_text(row, name)
            return (Message("system", said),) if said.strip() else ()
    return None


def conversation(row: Row, name: str) -> tuple[Message, ...]:
    """The messages of a column, behind what the column for the system says, unless they begin with that themselves."""
    own = messages(row.values[name], name, row.where)
    before = system_message(row) or ()
    return own if own[0].role == "system" else before + own


# ------------------------------------------------------------------------------------- prompt and answers


def prompt(row: Row, *, empty: bool = True) -> tuple[str, tuple[Message, ...]]:
    """The prompt of a row as text and, where it is a conversation, as the messages before the answer; then the text
    is their transcript.

    It stands in a column of `PROMPT_KEYS`, or of `CONVERSATION_KEYS` where there is none: text, or a list of messages
    that does not end with the assistant's. With a column for the system (RLHF_PPO's `system_content`, `system`,
    `system_prompt`) text is the user's message behind it.
    """
    name = first_key(row, PROMPT_KEYS if has(row.values, PROMPT_KEYS) else PROMPT_KEYS + CONVERSATION_KEYS)
    if not isinstance(row.values[name], list):
        said, system = text(row, name, empty=empty), system_message(row)
        if system is None:
            return said, ()
        before = (*system, Message("user", said))
    else:
        before = conversation(row, name)
        require_open(before, name, row)
    return transcript(before), before


def require_open(before: tuple[Message, ...], name: str, row: Row) -> None:
    """Raise DataError where a conversation that awaits an answer ends with one."""
    if before[-1].role == "assistant":
        raise DataError(f"{row.where}: `{name}` ends with the assistant's message, a prompt must end before its answer")


def answer(value: Any, name: str, row: Row) -> tuple[tuple[Message, ...] | None, str]:
    """An answer in any of its shapes: text, one message, or a list of messages of which the last is the assistant's.

    Returns what the list says before the answer, None where the answer is plain text, and the answer's content.
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


def joined(
    row: Row, said: str | None, before: tuple[Message, ...], answers: list[tuple[tuple[Message, ...] | None, str]]
) -> tuple[str, tuple[Message, ...], list[str]]:
    """A prompt (text and messages; None: the row has none) and its answers as (prompt, messages, answers' texts).

    Where any part is messages all is a conversation: the prompt is its transcript and an answer is a space and its
    content. What stands before the answers in their own lists must be the same for all; it goes behind the prompt's
    messages, unless it begins with them or repeats their end. A prompt that is text is the user's message behind
    it, unless it is already among them.
    """
    starts = [turns for turns, _ in answers if turns is not None]
    contents = [content for _, content in answers]
    if said is not None and not before and not starts:
        return said, (), contents
    own = starts[0] if starts else ()
    if any(turns != own for turns in starts) or (own and len(starts) < len(answers)):
        raise DataError(f"{row.where}: the answers' messages differ before the last one, they must answer the same")
    if before:
        if own[: len(before)] != before:
            own = before if own and own == before[-len(own) :] else before + own
    elif said is not None:
        is_copy = said.strip() in {"", *(m.content.strip() for m in own)}
        if not is_copy and any(m.role == "user" for m in own):
            raise DataError(
                f"{row.where}: the prompt is none of the messages before the answers, it must be one of them. Remove "
                "one of the two"
            )
        own = own if is_copy else (*own, Message("user", said))
    if not own:
        raise DataError(f"{row.where}: the answers have no prompt, neither a column nor messages before them")
    require_open(own, "the messages before the answers", row)
    return transcript(own), own, [" " + content for content in contents]


def record(
    row: Row,
    said: str,
    before: tuple[Message, ...],
    answers: tuple[Answer, ...],
    *,
    ranked: bool = False,
    undesirable: bool = False,
) -> Record:
    """The Record of a row that has a prompt; its key is the prompt's text, or its messages as JSON."""
    key = said
    if before:
        key = json.dumps([{"role": m.role, "content": m.content} for m in before], sort_keys=True)
    return Record(row.where, said, answers, key, ranked, undesirable, before, row.values)


# ------------------------------------------------------------------------------------------------ numbers


def column_number(row: Row, name: str) -> float:
    """A column that must be a finite number."""
    if name not in row.values:
        first_key(row, (name,))
    return number(row.values[name], name, row.where)


def one_of(value: Any, name: str, allowed: tuple[int, ...], row: Row) -> int:
    """A value that must be one of a few whole numbers."""
    found = number(value, name, row.where)
    if found not in allowed:
        raise DataError(
            f"{row.where}: `{shown_name(name)}` is {shown(value)}, it must be one of {', '.join(map(str, allowed))}"
        )
    return int(found)


def optional_number(value: Any, name: str, row: Row) -> float | None:
    """A score that may be null or blank, which is none; 0 is a score."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return number(value, name, row.where)


def weighted(row: Row, weights: Mapping[str, float]) -> float:
    """The weighted sum of columns that must be numbers, score = sum over attributes of weight * value.

    >>> weighted(Row({"helpfulness": 3, "verbosity": 2}, "file:1"), {"helpfulness": 1.0, "verbosity": -0.5})
    2.0
    """
    total = sum(weight * number(at(row, name), name, row.where) for name, weight in weights.items())
    return number(total, "the weighted score", row.where)
