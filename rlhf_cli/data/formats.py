"""The formats of rows: each is recognised by its keys, or named in the config, and read into a Record.

The first row of a source decides its format, and every other row must fit it. A file with two kinds of rows is
therefore reported instead of being read in part. docs/data.md shows a row of each format; `formats_plain` and
`formats_graded` read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhf_cli.config.data import DataSource
from rlhf_cli.data import formats_graded as graded
from rlhf_cli.data import formats_plain as plain
from rlhf_cli.data.columns import (
    ANSWERS_KEYS,
    CONTEXT_KEYS,
    CONVERSATION_KEYS,
    LABEL_KEYS,
    PROMPT_KEYS,
    RESPONSE_KEYS,
    SYSTEM_KEYS,
    found_keys,
    has,
    mapped,
)
from rlhf_cli.data.records import Record, shown_name
from rlhf_cli.data.rows import Row
from rlhf_cli.errors import DataError

Purpose = Literal["sft", "rm pairs", "rm scores", "ppo"]
Values = dict[str, Any]
ALL: tuple[Purpose, ...] = ("sft", "rm pairs", "rm scores", "ppo")
WITHOUT_SCORES: tuple[Purpose, ...] = ("sft", "rm pairs", "ppo")
WITHOUT_PAIRS: tuple[Purpose, ...] = ("sft", "rm scores", "ppo")


@dataclass(frozen=True)
class Format:
    """One kind of row."""

    name: str
    keys: str
    """The columns that identify it, for messages."""
    purposes: tuple[Purpose, ...]
    """The stages that can learn from it; `rm pairs` is for pairwise losses, `rm scores` for mse."""
    columns: tuple[str, ...]
    """All columns that it reads, by our names. `keys` of the config may map them."""
    fits: Callable[[Values, DataSource], bool]
    """Does a row have the keys of this format?"""
    read: Callable[[Row, DataSource, int], Record]
    """The Record of a row, its source, and the number of words of a plain text that are its prompt."""
    takes_weights: bool = False
    """Does it have grades that `weights` of the config can add up?"""


PROMPTS = PROMPT_KEYS + SYSTEM_KEYS
TURNS = CONVERSATION_KEYS + SYSTEM_KEYS
GRADES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
VOTES = ("vote", "annotator1", "annotator2", "annotator3", "label_0", "label_1", "label_2")

# In the order in which they are tried: formats with more columns come first. SFT and PPO do not use scores or labels:
# they read a scored row as `prompt_response` and a labelled text as `text`, whatever its label is.
_ALL_FORMATS = (
    Format(
        "preference",
        "prompt + chosen + rejected",
        WITHOUT_SCORES,
        ("chosen", "rejected", *PROMPTS, *CONTEXT_KEYS, *CONVERSATION_KEYS),
        lambda v, _: (
            "chosen" in v
            and "rejected" in v
            and (has(v, PROMPT_KEYS + CONTEXT_KEYS) or has(v, CONVERSATION_KEYS) or not isinstance(v["chosen"], str))
        ),
        lambda row, _source, _words: graded.read_preference(row),
    ),
    Format(
        "hh",
        "chosen + rejected",
        WITHOUT_SCORES,
        ("chosen", "rejected"),
        lambda v, _: "chosen" in v and "rejected" in v,
        lambda row, _source, _words: graded.read_hh(row),
    ),
    Format(
        "shp",
        "history + human_ref_A + labels",
        ALL,
        ("history", "human_ref_A", "human_ref_B", "labels", "score_A", "score_B"),
        lambda v, _: "history" in v and "human_ref_A" in v and "human_ref_B" in v,
        lambda row, _source, _words: graded.read_shp(row),
    ),
    Format(
        "summarize",
        "summaries + choice",
        WITHOUT_SCORES,
        ("info", "summaries", "choice"),
        lambda v, _: "info" in v and "summaries" in v and "choice" in v,
        lambda row, _source, _words: graded.read_summarize(row),
    ),
    Format(
        "webgpt",
        "answer_0 + answer_1",
        ALL,
        ("question", "answer_0", "answer_1", "score_0", "score_1"),
        lambda v, _: "question" in v and "answer_0" in v and "answer_1" in v,
        lambda row, _source, _words: graded.read_webgpt(row),
    ),
    Format(
        "stackexchange",
        "response_j + response_k",
        WITHOUT_SCORES,
        ("question", "response_j", "response_k"),
        lambda v, _: "question" in v and "response_j" in v and "response_k" in v,
        lambda row, _source, _words: graded.read_stackexchange(row),
    ),
    Format(
        "pandalm",
        "response1 + response2",
        WITHOUT_SCORES,
        ("instruction", "input", "response1", "response2", *VOTES),
        lambda v, _: "instruction" in v and "response1" in v and "response2" in v,
        lambda row, _source, _words: graded.read_pandalm(row),
    ),
    Format(
        "ultrafeedback",
        "instruction + completions",
        ALL,
        ("instruction", "completions"),
        lambda v, _: "instruction" in v and "completions" in v,
        lambda row, source, _words: graded.read_ultrafeedback(row, source.weights),
        takes_weights=True,
    ),
    Format(
        "helpsteer",
        "response + helpfulness",
        WITHOUT_PAIRS,
        (*PROMPTS, *CONVERSATION_KEYS, *RESPONSE_KEYS, *GRADES),
        lambda v, _: has(v, PROMPT_KEYS) and has(v, RESPONSE_KEYS) and "helpfulness" in v and "correctness" in v,
        lambda row, source, _words: graded.read_helpsteer(row, source.weights),
        takes_weights=True,
    ),
    Format(
        "kto",
        "completion + label",
        WITHOUT_PAIRS,
        (*PROMPTS, *CONVERSATION_KEYS, *RESPONSE_KEYS, "label"),
        lambda v, _: (
            _is_truth(v.get("label")) and ((has(v, PROMPT_KEYS) and has(v, RESPONSE_KEYS)) or has(v, CONVERSATION_KEYS))
        ),
        lambda row, _source, _words: graded.read_kto(row),
    ),
    Format(
        "ranking",
        "prompt + answers",
        WITHOUT_SCORES,
        (*PROMPTS, *CONVERSATION_KEYS, *ANSWERS_KEYS, "scores"),
        lambda v, _: has(v, PROMPT_KEYS) and _has_list(v),
        lambda row, source, _words: graded.read_ranking(row, source.weights),
        takes_weights=True,
    ),
    Format(
        "alpaca",
        "instruction + output",
        ("sft", "ppo"),
        ("instruction", "input", "output"),
        lambda v, _: "instruction" in v and "output" in v,
        lambda row, _source, _words: plain.read_instruction(row, template=True),
    ),
    Format(
        "instruction",
        "instruction + output",
        ("sft", "ppo"),
        ("instruction", "input", "output"),
        lambda _values, _source: False,
        lambda row, _source, _words: plain.read_instruction(row, template=False),
    ),
    Format(
        "prompt_response",
        "prompt + response",
        ("sft", "ppo"),
        (*PROMPTS, *CONVERSATION_KEYS, *RESPONSE_KEYS),
        lambda v, _: has(v, PROMPT_KEYS) and has(v, RESPONSE_KEYS),
        lambda row, _source, _words: plain.read_prompt_response(row),
    ),
    Format(
        "scored",
        "prompt + response + score",
        WITHOUT_PAIRS,
        (*PROMPTS, *CONVERSATION_KEYS, *RESPONSE_KEYS, *ANSWERS_KEYS, "score", "scores"),
        lambda v, source: has(v, PROMPT_KEYS) and (has(v, RESPONSE_KEYS) or _has_list(v)) and _has_score(v, source),
        lambda row, source, _words: graded.read_scored(row, source.weights),
        takes_weights=True,
    ),
    Format(
        "messages",
        "messages",
        ("sft", "ppo"),
        TURNS,
        lambda v, _: has(v, CONVERSATION_KEYS),
        lambda row, _source, _words: plain.read_messages(row),
    ),
    Format(
        "text",
        "text",
        ("sft", "ppo"),
        ("text",),
        lambda v, _: "text" in v,
        lambda row, _source, words: plain.read_text(row, words),
    ),
    Format(
        "labelled",
        "text + label",
        ALL,
        ("text", *LABEL_KEYS),
        lambda v, _: "text" in v and has(v, LABEL_KEYS),
        lambda row, _source, words: plain.read_text(row, words, labelled=True),
    ),
    Format(
        "prompt",
        "prompt",
        ("ppo",),
        (*PROMPTS, *CONVERSATION_KEYS),
        lambda v, _: has(v, PROMPT_KEYS),
        lambda row, _source, _words: plain.read_prompt(row),
    ),
)
FORMATS: dict[str, Format] = {format_.name: format_ for format_ in _ALL_FORMATS}


def recognise(row: Row, source: DataSource, purpose: Purpose) -> Format:
    """The format of a source's rows: the one it names, else the first that fits this row's keys and the stage.

    Raises DataError if there is none, and if the source's `keys` or `weights` do not apply to the format.

    >>> recognise(Row({"question": "1+1=", "answer": "2"}, "file:1"), DataSource(path="file"), "sft").name
    'prompt_response'
    """
    values = mapped(row, source).values
    if source.format == "auto":
        fitting = (f for f in FORMATS.values() if _suits(f, source, purpose) and f.fits(values, source))
        found = next(fitting, None)
        if found is None:
            raise DataError(
                f"{row.where}: found the keys {found_keys(values)}, {_takes(purpose, source)}. Rename them or map "
                "them with `keys`"
            )
    else:
        found = FORMATS[source.format]
        # A list of responses with scores serves both losses, under either name.
        both = found.name in ("ranking", "scored") and _has_list(values) and _has_score(values, source)
        if purpose not in found.purposes and not both:
            raise DataError(f"{row.where}: the format is {found.name}, {_takes(purpose, source)}")
        if source.weights and not found.takes_weights:
            raise DataError(f"{row.where}: {found.name} rows have no grades, so `weights` does not apply. Remove it")
    known = {*found.columns, *source.weights, *(name.partition(".")[0] for name in source.weights)}
    for ours in source.keys:
        if ours not in known:
            raise DataError(
                f"{row.where}: `keys` maps `{shown_name(ours)}`, which is not a column of the format {found.name}. Its "
                f"columns: {', '.join(found.columns)}"
            )
    return found


def read_record(row: Row, format: Format, source: DataSource, *, prompt_words: int = 0) -> Record:
    """The Record of a row; the first `prompt_words` words of a plain text are its prompt.

    Raises DataError for a row that does not fit the format.
    """
    if not source.keys:
        return format.read(row, source, prompt_words)
    ours = mapped(row, source)
    try:
        return replace(format.read(ours, source, prompt_words), columns=row.values)
    except DataError as error:
        raise DataError(_in_names_of_the_file(str(error), row, ours, source)) from None


def _in_names_of_the_file(message: str, row: Row, ours: Row, source: DataSource) -> str:
    """A message about a mapped row with the file's names of its columns.

    >>> source, row = DataSource(path="file", keys={"response": "out.text"}), Row({"out": {"text": ""}}, "file:1")
    >>> _in_names_of_the_file("file:1: `response` is empty", row, mapped(row, source), source)
    'file:1: `out.text` is empty'
    """
    message = message.replace(found_keys(ours.values), found_keys(row.values))
    return re.sub(r"`(\w+)`", lambda match: f"`{shown_name(source.keys.get(match[1], match[1]))}`", message)


def _suits(format: Format, source: DataSource, purpose: Purpose) -> bool:
    return purpose in format.purposes and (format.takes_weights or not source.weights)


def _takes(purpose: Purpose, source: DataSource) -> str:
    """The formats that a stage accepts, for a message: the shortest first, without longer forms of earlier ones."""
    listed: list[str] = []
    for format in FORMATS.values():
        columns = set(format.keys.split(" + "))
        if _suits(format, source, purpose) and not any(set(keys.split(" + ")) <= columns for keys in listed):
            listed.append(format.keys)
    with_weights = f" with the columns of `weights` ({found_keys(source.weights)})" if source.weights else ""
    return f"{purpose}{with_weights} needs rows with: {'; '.join(sorted(listed, key=len))}"


def _has_list(values: Values) -> bool:
    return any(isinstance(values.get(name), list) for name in ANSWERS_KEYS)


def _has_score(values: Values, source: DataSource) -> bool:
    if source.weights:
        return all(name in values or name.partition(".")[0] in values for name in source.weights)
    return "scores" in values if _has_list(values) and not has(values, RESPONSE_KEYS) else "score" in values


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value[:9].strip().lower() in ("true", "false"))
