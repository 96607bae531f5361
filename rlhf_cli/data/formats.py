"""What rows mean: each kind of row, recognised by its keys, becomes one of four typed examples.

The kind is decided once from the first row and every other row must have the same keys, so that a file with
two kinds in it is reported and not half read.

| keys | kind | stages |
|---|---|---|
| prompt, response (or completion, answer) | demonstration | sft; ppo takes the prompt |
| messages: role, content | conversation | sft; ppo takes what comes before the last answer |
| prompt, chosen, rejected | preference | rm; sft learns chosen; ppo takes the prompt |
| chosen, rejected: whole "Human: ... Assistant: ..." transcripts | transcript pair | the same |
| prompt, response, score | scored | rm with loss: mse |
| text, label | labelled | rm: score = label, or pairs of a higher and a lower label |
| text | text | sft; ppo takes the first `prompt_words` words |
| prompt | prompt | ppo |
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_cli.data.sources import Row
from rlhf_cli.errors import DataError

PROMPT_KEYS = ("prompt", "question", "user_input")
RESPONSE_KEYS = ("response", "completion", "answer")
ASSISTANT = "\n\nAssistant:"


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Demonstration:
    """A prompt and the response to learn, or a conversation whose assistant turns are learnt."""

    prompt: str
    response: str
    where: str
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Preference:
    """Two responses to one prompt, the better one first."""

    prompt: str
    chosen: str
    rejected: str
    where: str
    margin: float = 0.0
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """A response and its score; 0.0 is a score."""

    prompt: str
    response: str
    score: float
    where: str


@dataclass(frozen=True)
class Prompt:
    """A prompt and the row that it came from, which rewards are given too."""

    prompt: str
    where: str
    columns: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    """Of a conversation, all that comes before its last answer."""


# ----------------------------------------------------------------------------------------- each stage


def demonstrations(rows: list[Row], *, prompt_words: int = 0) -> tuple[list[Demonstration], str]:
    """Rows for SFT, and the name of their kind."""
    kind = _kind(rows[0], "sft")
    read: Callable[[Row], Demonstration] = {
        "demonstration": _demonstration,
        "scored": _demonstration,
        "conversation": _conversation,
        "preference": lambda row: _as_demonstration(_preference(row, None)),
        "transcript pair": lambda row: _as_demonstration(_transcripts(row, None)),
        "labelled": lambda row: _text(row, prompt_words),
        "text": lambda row: _text(row, prompt_words),
    }[kind]
    return [read(row) for row in rows], kind


def preferences(
    rows: list[Row], *, margin_column: str | None = None, generator: torch.Generator
) -> tuple[list[Preference], str]:
    """Rows for the pairwise losses, and the name of their kind.

    A row whose two answers are the same text holds no preference and is left out (HH-RLHF has some); the
    caller says how many.

    Labelled texts are paired at random: each text of a higher label with one of a lower label, in the order
    that `generator` draws.
    """
    kind = _kind(rows[0], "rm pairs")
    if kind == "labelled":
        return _pairs_of_labels(rows, generator), kind
    read = _preference if kind == "preference" else _transcripts
    pairs = [read(row, margin_column) for row in rows]
    different = [pair for pair in pairs if pair.chosen != pair.rejected]
    if not different:
        raise DataError(f"{rows[0].where}: chosen and rejected are the same text in all {len(rows)} rows from here on")
    return different, kind


def scored(rows: list[Row]) -> tuple[list[Scored], str]:
    """Rows for loss: mse, and the name of their kind."""
    kind = _kind(rows[0], "rm scores")
    if kind == "labelled":
        texts = [(_text(row, 0), _number(row, "label")) for row in rows]
        return [Scored(t.prompt, t.response, label, t.where) for t, label in texts], kind
    return [
        Scored(d.prompt, d.response, _number(row, "score"), row.where) for row in rows for d in (_demonstration(row),)
    ], kind


def prompts(rows: list[Row], *, prompt_words: int = 0) -> tuple[list[Prompt], str]:
    """Rows for PPO, and the name of their kind."""
    kind = _kind(rows[0], "ppo")
    read: dict[str, Callable[[Row], str]] = {
        "demonstration": lambda row: _string(row, _first_key(row, PROMPT_KEYS)),
        "scored": lambda row: _string(row, _first_key(row, PROMPT_KEYS)),
        "prompt": lambda row: _string(row, _first_key(row, PROMPT_KEYS)),
        "preference": lambda row: _string(row, _first_key(row, PROMPT_KEYS)),
        "transcript pair": lambda row: _transcripts(row, None).prompt,
        "labelled": lambda row: _text(row, prompt_words).prompt,
        "text": lambda row: _text(row, prompt_words).prompt,
    }
    if kind == "conversation":
        conversations = [_conversation(row) for row in rows]
        return [
            Prompt(c.prompt, c.where, row.values, c.messages[:-1]) for c, row in zip(conversations, rows, strict=True)
        ], kind
    return [Prompt(read[kind](row), row.where, row.values) for row in rows], kind


def row_key(row: Row) -> str:
    """What a row is told apart by when rows are split: its prompt, or its text where it has no prompt.

    Rows that are broken give any key; whoever reads them says what is wrong.
    """
    values = row.values
    for name in PROMPT_KEYS:
        if isinstance(values.get(name), str):
            return str(values[name])
    if isinstance(values.get("chosen"), str) and isinstance(values.get("rejected"), str):
        return values["chosen"][: _end_of_prompt(values["chosen"], values["rejected"])]
    if isinstance(values.get("messages"), list):
        return json.dumps(values["messages"][:-1], sort_keys=True, default=str)
    return str(values.get("text", ""))


# ------------------------------------------------------------------------------------------ each kind

STAGE_KINDS = {
    "sft": ("demonstration", "conversation", "preference", "transcript pair", "scored", "labelled", "text"),
    "rm pairs": ("preference", "transcript pair", "labelled"),
    "rm scores": ("scored", "labelled"),
    "ppo": (
        "demonstration",
        "conversation",
        "preference",
        "transcript pair",
        "scored",
        "labelled",
        "text",
        "prompt",
    ),
}
KIND_KEYS = {
    "demonstration": "prompt + response",
    "conversation": "messages",
    "preference": "prompt + chosen + rejected",
    "transcript pair": "chosen + rejected",
    "scored": "prompt + response + score",
    "labelled": "text + label",
    "text": "text",
    "prompt": "prompt",
}


def _kind(row: Row, stage: str) -> str:
    keys = row.values.keys()
    prompt, response = any(k in keys for k in PROMPT_KEYS), any(k in keys for k in RESPONSE_KEYS)
    candidates = {
        "preference": prompt and {"chosen", "rejected"} <= keys,
        "transcript pair": {"chosen", "rejected"} <= keys and not prompt,
        "scored": prompt and response and "score" in keys,
        "demonstration": prompt and response,
        "conversation": "messages" in keys,
        "labelled": {"text", "label"} <= keys,
        "text": "text" in keys,
        "prompt": prompt,
    }
    for kind, fits in candidates.items():
        if fits and kind in STAGE_KINDS[stage]:
            return kind
    wanted = "; ".join(KIND_KEYS[kind] for kind in STAGE_KINDS[stage])
    found = ", ".join(map(str, keys)) or "no keys at all"
    raise DataError(f"{row.where}: found the keys {found}, {stage} takes rows of: {wanted}. Rename the keys")


def _first_key(row: Row, names: tuple[str, ...]) -> str:
    for name in names:
        if name in row.values:
            return name
    found = ", ".join(map(str, row.values)) or "no keys at all"
    raise DataError(f"{row.where}: found the keys {found}, one of {', '.join(names)} is needed as in the first row")


def _string(row: Row, key: str, *, empty: bool = False) -> str:
    if key not in row.values:
        found = ", ".join(map(str, row.values)) or "no keys at all"
        raise DataError(f"{row.where}: found the keys {found}, `{key}` is needed as in the first row")
    value = row.values[key]
    if not isinstance(value, str):
        raise DataError(f"{row.where}: `{key}` is a {type(value).__name__}, it must be text")
    if not value.strip() and not empty:
        raise DataError(f"{row.where}: `{key}` is empty, there is nothing to learn from. Remove the row")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{row.where}: `{key}` holds half a character (a lone surrogate). Mend the row") from None
    return value


def _number(row: Row, key: str) -> float:
    value = row.values.get(key)
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{row.where}: `{key}` is {value!r}, it must be a number")
    return number


def _demonstration(row: Row) -> Demonstration:
    prompt = _string(row, _first_key(row, PROMPT_KEYS), empty=True)
    return Demonstration(prompt, _string(row, _first_key(row, RESPONSE_KEYS)), row.where)


def _conversation(row: Row) -> Demonstration:
    items = row.values.get("messages")
    if not isinstance(items, list) or not items:
        raise DataError(f"{row.where}: `messages` is not a list of messages with role and content")
    messages = []
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict) or not all(isinstance(item.get(k), str) for k in ("role", "content")):
            raise DataError(f"{row.where}: message {number} needs a text `role` and a text `content`")
        if item["role"] not in ("system", "user", "assistant"):
            raise DataError(f"{row.where}: message {number} has role {item['role']!r}, not system, user or assistant")
        messages.append(Message(item["role"], item["content"]))
    if messages[-1].role != "assistant" or not messages[-1].content.strip():
        raise DataError(f"{row.where}: the last message must be the assistant's and not empty")
    return Demonstration(transcript(messages[:-1]), " " + messages[-1].content, row.where, tuple(messages))


def transcript(messages: list[Message]) -> str:
    """A conversation as plain text in the style of HH-RLHF, ending where the assistant answers."""
    names = {"system": "System", "user": "Human", "assistant": "Assistant"}
    return "".join(f"\n\n{names[m.role]}: {m.content}" for m in messages) + ASSISTANT


def _as_demonstration(pair: Preference) -> Demonstration:
    return Demonstration(pair.prompt, pair.chosen, pair.where)


def _preference(row: Row, margin_column: str | None) -> Preference:
    prompt = _string(row, _first_key(row, PROMPT_KEYS), empty=True)
    chosen, rejected = _string(row, "chosen"), _string(row, "rejected")
    margin = _number(row, margin_column) if margin_column else 0.0
    return Preference(prompt, chosen, rejected, row.where, margin, row.values)


def _transcripts(row: Row, margin_column: str | None) -> Preference:
    """HH-RLHF: the prompt is the common beginning, up to and with its last "Assistant:"."""
    chosen, rejected = _string(row, "chosen"), _string(row, "rejected")
    cut = _end_of_prompt(chosen, rejected)
    if cut == 0:
        raise DataError(
            f'{row.where}: chosen and rejected have no common beginning that ends in "Assistant:". '
            "Give the prompt in a column of its own"
        )
    prompt, a, b = chosen[:cut], chosen[cut:], rejected[cut:]
    # An answer of no words happens in HH-RLHF as published: it is a worse answer, not a broken row.
    margin = _number(row, margin_column) if margin_column else 0.0
    return Preference(prompt, a or " ", b or " ", row.where, margin, row.values)


def _end_of_prompt(chosen: str, rejected: str) -> int:
    """Where the answers begin in two transcripts: behind the last "Assistant:" of what they share, else 0."""
    common = 0
    for a, b in zip(chosen, rejected, strict=False):
        if a != b:
            break
        common += 1
    cut = chosen[:common].rfind(ASSISTANT)
    return cut + len(ASSISTANT) if cut >= 0 else 0


def _text(row: Row, prompt_words: int) -> Demonstration:
    text = _string(row, "text")
    prompt, rest = first_words(text, prompt_words)
    return Demonstration(prompt, rest, row.where) if rest.strip() else Demonstration("", text, row.where)


def first_words(text: str, count: int) -> tuple[str, str]:
    """The first `count` words with the blanks before them, and what follows.

    >>> first_words("a slow film, but good", 3)
    ('a slow film,', ' but good')
    """
    end = 0
    for _ in range(count):
        while end < len(text) and text[end].isspace():
            end += 1
        while end < len(text) and not text[end].isspace():
            end += 1
    return text[:end], text[end:]


def _pairs_of_labels(rows: list[Row], generator: torch.Generator) -> list[Preference]:
    labels = [_number(row, "label") for row in rows]
    middle = (min(labels) + max(labels)) / 2
    high = [i for i, label in enumerate(labels) if label > middle]
    low = [i for i, label in enumerate(labels) if label <= middle]
    if not high or not low:
        raise DataError(f"{rows[0].where}: every label is {labels[0]}, pairs need two different ones")
    order = torch.randperm(len(low), generator=generator).tolist()
    return [
        # No shared prompt: each text is its own, and is judged whole.
        Preference("", _string(rows[i], "text"), _string(rows[j], "text"), rows[i].where)
        for n, i in enumerate(high)
        for j in (low[order[n % len(low)]],)
    ]
