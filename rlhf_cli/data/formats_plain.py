"""Rows without grades: a prompt, a text, an instruction, a conversation, and at most one answer to it."""

from __future__ import annotations

import re

from rlhf_cli.data.columns import (
    CONVERSATION_KEYS,
    RESPONSE_KEYS,
    answer,
    column_number,
    conversation,
    first_key,
    joined,
    optional_text,
    prompt,
    record,
    text,
)
from rlhf_cli.data.records import Answer, Record, transcript
from rlhf_cli.data.sources import Row
from rlhf_cli.errors import DataError

BLANKS_AND_WORD = re.compile(r"\s*\S*")


def read_prompt_response(row: Row) -> Record:
    """A prompt and its answer, each text or messages."""
    said, before = prompt(row)
    name = first_key(row, RESPONSE_KEYS)
    said, before, (response,) = joined(row, said, before, [answer(row.values[name], name, row)])
    return record(row, said, before, (Answer(response),))


def read_prompt(row: Row) -> Record:
    """A prompt alone; a blank one is refused."""
    said, before = prompt(row, empty=False)
    return record(row, said, before, ())


def read_text(row: Row, prompt_words: int, *, labelled: bool = False) -> Record:
    """A text whose first words are the prompt, and with `labelled` its label as the score of the whole.

    The key is the whole text. A text of no more than `prompt_words` words has no prompt.
    """
    whole = text(row, "text")
    start, rest = first_words(whole, prompt_words)
    if not rest.strip():
        start, rest = "", whole
    score = column_number(row, "label") if labelled else None
    return Record(row.where, start, (Answer(rest, score),), whole, columns=row.values)


def first_words(text: str, count: int) -> tuple[str, str]:
    """The first `count` words with the blanks before them, and what follows.

    >>> first_words("a slow film, but good", 3)
    ('a slow film,', ' but good')
    """
    end = 0
    for _ in range(count):
        end = BLANKS_AND_WORD.match(text, end).end()  # type: ignore[union-attr]  # It matches nothing as well.
    return text[:end], text[end:]


def read_messages(row: Row) -> Record:
    """A conversation: if it ends with the assistant, that is the answer; if with the user, it is a prompt."""
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
        raise DataError(f"{row.where}: `{name}` has nothing before the assistant's message, a prompt is needed")
    return record(row, transcript(before), before, (Answer(" " + turns[-1].content),))


def read_instruction(row: Row, *, template: bool) -> Record:
    """An instruction with or without an input, and its output; without a column `output` it is a prompt alone.

    The prompt is written in Alpaca's `template`, or else as `instructed` does.
    """
    said = alpaca(text(row, "instruction"), optional_text(row, "input")) if template else instructed(row)
    answers = (Answer(text(row, "output")),) if "output" in row.values else ()
    return record(row, said, (), answers)


def alpaca(instruction: str, context: str) -> str:
    """An instruction, and its input if it is not blank, as Stanford Alpaca was trained (Taori et al. 2023).

    The answer follows the last colon at once.
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
    """An instruction, and a blank line and the input where the row has one that is not blank."""
    instruction, context = text(row, "instruction"), optional_text(row, "input")
    return f"{instruction}\n\n{context}" if context.strip() else instruction
