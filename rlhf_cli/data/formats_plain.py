"""Readers of rows without grades: a prompt, text, instruction or conversation with at most one answer."""

from __future__ import annotations

import re

from rlhf_cli.data.columns import (
    CONVERSATION_KEYS,
    LABEL_KEYS,
    RESPONSE_KEYS,
    answer,
    column_number,
    conversation,
    first_key,
    optional_text,
    prompt,
    prompt_and_answers,
    record,
    text,
)
from rlhf_cli.data.records import Answer, Record, transcript
from rlhf_cli.data.rows import Row
from rlhf_cli.errors import DataError

BLANKS_AND_WORD = re.compile(r"\s*\S*")


def read_prompt_response(row: Row) -> Record:
    """A prompt and an answer; each is text or messages."""
    prompt_text, before = prompt(row)
    name = first_key(row, RESPONSE_KEYS)
    prompt_text, before, (response,) = prompt_and_answers(
        row, prompt_text, before, [answer(row.values[name], name, row)]
    )
    return record(row, prompt_text, before, (Answer(response),))


def read_prompt(row: Row) -> Record:
    """A prompt without an answer; it must not be blank."""
    prompt_text, before = prompt(row, empty=False)
    return record(row, prompt_text, before, ())


def read_text(row: Row, prompt_words: int, *, labelled: bool = False) -> Record:
    """A text whose first words are the prompt; with `labelled`, the label or score is that of the whole text.

    The key is the whole text. A text of at most `prompt_words` words has no prompt.
    """
    full_text = text(row, "text")
    start, rest = first_words(full_text, prompt_words)
    if not rest.strip():
        start, rest = "", full_text
    score = column_number(row, first_key(row, LABEL_KEYS)) if labelled else None
    return Record(row.where, start, (Answer(rest, score),), full_text, columns=row.values)


def first_words(text: str, count: int) -> tuple[str, str]:
    """The first `count` words with the white space before them, and the rest.

    >>> first_words("a slow film, but good", 3)
    ('a slow film,', ' but good')
    """
    end = 0
    for _ in range(count):
        end = BLANKS_AND_WORD.match(text, end).end()  # type: ignore[union-attr]  # matches the empty text too
    return text[:end], text[end:]


def read_messages(row: Row) -> Record:
    """A conversation: a last message of the assistant is the answer; a last message of the user ends a prompt."""
    name = first_key(row, CONVERSATION_KEYS)
    turns = conversation(row, name)
    if turns[-1].role == "user":
        return record(row, transcript(turns), turns, ())
    if turns[-1].role == "system" or not turns[-1].content.strip():
        raise DataError(
            f"{row.where}: the last message of `{name}` must be the assistant's and not empty, or the user's"
        )
    before = turns[:-1]
    if not before:
        raise DataError(f"{row.where}: `{name}` has no prompt, there must be a message before the assistant's")
    return record(row, transcript(before), before, (Answer(" " + turns[-1].content),))


def read_instruction(row: Row, *, template: bool) -> Record:
    """An instruction with an optional input, and its output; without a column `output` it is a prompt only.

    The prompt uses Alpaca's `template`, or the format of `instructed`.
    """
    prompt_text = alpaca(text(row, "instruction"), optional_text(row, "input")) if template else instructed(row)
    answers = (Answer(text(row, "output")),) if "output" in row.values else ()
    return record(row, prompt_text, (), answers)


def alpaca(instruction: str, context: str) -> str:
    """The prompt of Stanford Alpaca (Taori et al. 2023), with an input if it is not blank.

    The answer follows the last colon directly.
    """
    if context.strip():
        return (
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            f"### Instruction:\n{instruction}\n\n### Input:\n{context}\n\n### Response:"
        )
    return (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{instruction}\n\n### Response:"
    )


def instructed(row: Row) -> str:
    """An instruction; a blank line and the input follow if the row has one."""
    instruction, context = text(row, "instruction"), optional_text(row, "input")
    return f"{instruction}\n\n{context}" if context.strip() else instruction
