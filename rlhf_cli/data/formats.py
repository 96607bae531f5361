"""The formats of rows: the keys of a row or the config name its format, and a reader makes a Record of it.

To add a format, write its reader and its entry in `FORMATS` below, name it in `rlhf_cli.config.data.Format`, and show a
row of it in docs/data.md and tests/fixtures/formats.

The first row of a source decides its format. Every other row must fit it, so a file with two kinds of rows is reported
instead of being read in part. Readers raise DataError and nothing else, whatever a value is.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

from rlhf_cli.config.data import DataSource
from rlhf_cli.data.records import (
    ASSISTANT,
    Answer,
    Message,
    Record,
    Row,
    kind_of,
    number,
    shown,
    shown_name,
    transcript,
    turns_of,
)
from rlhf_cli.errors import DataError
from rlhf_cli.printing import is_utf8

Purpose = Literal["sft", "rm pairs", "rm scores", "ppo"]
Values = dict[str, Any]

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
    """The names of the first six columns, for a message."""
    some: list[str] = []
    for name in values:
        if len(some) == 6 or sum(map(len, some)) > 40:
            return f"{', '.join(some)} and {len(values) - len(some):,} more"
        some.append(shown_name(name))
    return ", ".join(some) if some else "(none)"


def has(values: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return any(name in values for name in names)


def first_key(row: Row, names: tuple[str, ...]) -> str:
    """The first of `names` that the row has; raises DataError if it has none."""
    for name in names:
        if name in row.values:
            return name
    needed = f"`{names[0]}`" if len(names) == 1 else f"one of {', '.join(names)}"
    advice = "Fix the row, or map the column with `keys`"
    raise row.error(f"found the keys {found_keys(row.values)}, every row needs {needed}. {advice}")


def column(row: Row, name: str) -> Any:
    return row.values[first_key(row, (name,))]


def mapped(row: Row, source: DataSource) -> Row:
    """The row with its columns renamed to our names, as `source.keys` says; none keeps its old name, too.

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
    """The column of this name, else the value at a path of names and numbers joined by dots; `why` ends the error.

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
            raise row.error(f"found the keys {found_keys(row.values)}, but not `{shown_name(path)}`{why}")
    return value


# -------------------------------------------------------------------------------------------------- text


def text(row: Row, name: str, *, empty: bool = False) -> str:
    """The text of a column, see `checked`."""
    return checked(column(row, name), f"`{name}`", row, empty=empty)


def optional_text(row: Row, name: str) -> str:
    """A text column; "" if it is missing, null, or NaN (which tables use for missing values)."""
    value = row.values.get(name)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return checked(value, f"`{name}`", row, empty=True)


def checked(value: Any, what: str, row: Row, *, empty: bool = False) -> str:
    """A value that must be text without lone surrogates, and not blank unless `empty`; messages call it `what`."""
    if not isinstance(value, str):
        raise row.error(f"{what} is {kind_of(value)}, it must be text")
    if not empty and not value.strip():
        raise row.error(f"{what} is empty, it must contain text. Remove the row")
    if not is_utf8(value):
        raise row.error(f"{what} contains a lone surrogate (half a character). Fix the row")
    return value


def sequence(value: Any, name: str, row: Row) -> list[Any]:
    if not isinstance(value, list):
        raise row.error(f"`{name}` is {kind_of(value)}, it must be a list")
    return value


# ------------------------------------------------------------------------------------------ conversations


def messages(items: Any, name: str, row: Row) -> tuple[Message, ...]:
    if not isinstance(items, list) or not items:
        raise row.error(f"`{name}` must be a non-empty list of messages with role and content (or from and value)")
    return tuple(message(item, f"message {n} of `{name}`", row) for n, item in enumerate(items, 1))


def message(item: Any, what: str, row: Row) -> Message:
    """One message: `role` and `content`, or ShareGPT's `from` and `value`.

    Raises DataError for other roles (tool, function, ...), which a dialogue of user and assistant cannot hold.
    """
    given = {key: value for key, value in item.items() if value is not None} if isinstance(item, dict) else {}
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise row.error(f"{what} needs a text `role` and a text `content` (or `from` and `value`)")
    if role not in ROLES:
        raise row.error(f"{what} has role {shown(role)}, it must be system, user or assistant (or human, gpt)")
    return Message(ROLES[role], checked(content, what, row, empty=True))


def system_message(row: Row) -> tuple[Message, ...] | None:
    """The system column as messages: empty if it is blank, None if there is no such column."""
    for name in SYSTEM_KEYS:
        if name in row.values:
            content = optional_text(row, name)
            return (Message("system", content),) if content.strip() else ()
    return None


def conversation(row: Row, name: str) -> tuple[Message, ...]:
    """The messages of a column, after the system column's message unless they start with a system message."""
    own_messages = messages(row.values[name], name, row)
    return own_messages if own_messages[0].role == "system" else (system_message(row) or ()) + own_messages


# ------------------------------------------------------------------------------------- prompt and answers


Turns = tuple[Message, ...]
Said = str | Turns
"""A prompt: text, or the messages of a conversation."""
Given = tuple[Turns | None, str]
"""An answer: the messages before it in its own list, None for plain text; and its content."""


def prompt(row: Row, *, empty: bool = True, names: tuple[str, ...] = PROMPT_KEYS) -> Said:
    """The prompt of a row, from a column of `names`, or of `CONVERSATION_KEYS` if there is none.

    It is text, or messages that do not end with the assistant's. A text behind a system column is the user's message.
    """
    name = first_key(row, names if has(row.values, names) else names + CONVERSATION_KEYS)
    if isinstance(row.values[name], list):
        return open_turns(conversation(row, name), f"`{name}`", row)
    prompt_text, system = text(row, name, empty=empty), system_message(row)
    return prompt_text if system is None else (*system, Message("user", prompt_text))


def open_turns(turns: Turns, what: str, row: Row) -> Turns:
    if turns[-1].role == "assistant":
        raise row.error(f"{what} ends with the assistant's message, a prompt must end before the answer")
    return turns


def answer(value: Any, name: str, row: Row) -> Given:
    """The answer in a text, a message, or a list of messages that ends with the assistant's."""
    if isinstance(value, str):
        return None, checked(value, f"`{name}`", row)
    if isinstance(value, dict):
        turns: Turns = (message(value, f"`{name}`", row),)
    elif isinstance(value, list):
        turns = messages(value, name, row)
    else:
        raise row.error(f"`{name}` is {kind_of(value)}, it must be text or messages")
    if turns[-1].role != "assistant" or not turns[-1].content.strip():
        raise row.error(f"the last message of `{name}` must be the assistant's and not empty")
    return turns[:-1], turns[-1].content


def answered(
    row: Row, said: Said | None, answers: list[Given], scores: Sequence[float | None] = (), *, ranked: bool = False
) -> Record:
    """The Record of a row's prompt (None if it has none) and its answers.

    If any of them is messages, the row is a conversation: the prompt is its transcript, and each answer's text is a
    space and its content. The messages before the answers in their own lists must be equal. They follow the prompt's
    messages, unless they begin with them or repeat their end. A prompt that is text becomes the user's message after
    them, unless it is one of them.
    """
    starts = [turns for turns, _ in answers if turns is not None]
    contents = [content for _, content in answers]
    if starts or not isinstance(said, str):
        said = _before_answers(row, said, starts, len(answers))
        contents = [" " + content for content in contents]
    return record(row, said, tuple(map(Answer, contents, scores or [None] * len(contents))), ranked=ranked)


def _before_answers(row: Row, said: Said | None, starts: list[Turns], num_answers: int) -> Turns:
    turns = starts[0] if starts else ()
    if any(start != turns for start in starts) or (turns and len(starts) < num_answers):
        raise row.error("the messages before the answers differ, all must answer the same prompt")
    if isinstance(said, str):
        is_copy = said.strip() in {"", *(m.content.strip() for m in turns)}
        if not is_copy and any(m.role == "user" for m in turns):
            found = "the prompt is not among the messages before the answers, it must be one of them"
            raise row.error(f"{found}. Remove the prompt or the messages")
        turns = turns if is_copy else (*turns, Message("user", said))
    elif said and turns[: len(said)] != said:
        turns = said if turns and turns == said[-len(turns) :] else said + turns
    if not turns:
        raise row.error("the answers have no prompt; give it in a column or as messages before them")
    return open_turns(turns, "the messages before the answers", row)


def record(row: Row, said: Said, answers: tuple[Answer, ...] = (), *, ranked: bool = False) -> Record:
    """The Record of a row with a prompt. Its key is the prompt's text, or its messages as JSON.

    A column `ended` says which answers are complete: true or false, or a list with one for each answer.
    """
    ended = row.values.get("ended")
    flags = [ended] if isinstance(ended, bool) else ended
    if isinstance(flags, list) and len(flags) == len(answers) and all(isinstance(flag, bool) for flag in flags):
        answers = tuple(replace(answer, ended=flag) for answer, flag in zip(answers, flags, strict=True))
    if isinstance(said, str):
        return Record(said, row.where, answers, said, ranked, columns=row.values)
    key = json.dumps(turns_of(said), sort_keys=True)
    return Record(transcript(said), row.where, answers, key, ranked, messages=said, columns=row.values)


# ------------------------------------------------------------------------------------------------ numbers


def one_of(value: Any, name: str, allowed: tuple[int, ...], row: Row) -> int:
    found = number(value, name, row.where)
    if found not in allowed:
        raise row.error(f"`{shown_name(name)}` is {shown(value)}, it must be one of {', '.join(map(str, allowed))}")
    return int(found)


def optional_number(value: Any, name: str, row: Row) -> float | None:
    """A score; None if it is null or blank. 0 is a score."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return number(value, name, row.where)


def weighted(grades: Mapping[str, Any], weights: Mapping[str, float], row: Row, of: str = "") -> float:
    """The weighted sum of grades that must be numbers. Messages append `of` to the name of each."""
    total = sum(weight * number(grades[name], name + of, row.where) for name, weight in weights.items())
    return number(total, f"the weighted score{of}", row.where)


# --------------------------------------------------------------------------------------- readers: one answer


def read_prompt_response(row: Row, score: float | None = None) -> Record:
    """A prompt and an answer; each is text or messages."""
    said, name = prompt(row), first_key(row, RESPONSE_KEYS)
    return answered(row, said, [answer(row.values[name], name, row)], [score])


def read_prompt(row: Row) -> Record:
    return record(row, prompt(row, empty=False))


def read_text(row: Row, prompt_words: int, *, labelled: bool = False) -> Record:
    """A text whose first words are the prompt; with `labelled`, the label or score is that of the whole text.

    The key is the whole text. A text of at most `prompt_words` words has no prompt.
    """
    full_text = text(row, "text")
    start, rest = first_words(full_text, prompt_words)
    if not rest.strip():
        start, rest = "", full_text
    name = first_key(row, LABEL_KEYS) if labelled else None
    score = None if name is None else number(row.values[name], name, row.where)
    return Record(start, row.where, (Answer(rest, score),), full_text, columns=row.values)


def first_words(text: str, count: int) -> tuple[str, str]:
    """The first `count` words with the white space before them, and the rest."""
    start = re.match(rf"(?:\s*\S*){{{count}}}", text)[0]  # type: ignore[index]  # matches the empty text too
    return start, text[len(start) :]


def read_messages(row: Row) -> Record:
    """A conversation: a last message of the assistant is the answer; a last message of the user ends a prompt."""
    name = first_key(row, CONVERSATION_KEYS)
    turns = conversation(row, name)
    before, last = turns[:-1], turns[-1]
    if last.role == "user":
        return record(row, turns)
    if last.role == "system" or not last.content.strip():
        raise row.error(f"the last message of `{name}` must be the assistant's and not empty, or the user's")
    if not before:
        raise row.error(f"`{name}` has no prompt, there must be a message before the assistant's")
    return record(row, before, (Answer(" " + last.content),))


def read_instruction(row: Row, *, template: bool) -> Record:
    """An instruction with an optional input, and its output; without a column `output` it is a prompt only.

    `template` writes the prompt of Stanford Alpaca (Taori et al. 2023), which the answer follows directly.
    """
    prompt_text = instructed(row)
    if template:
        context = optional_text(row, "input")
        paired = ", paired with an input that provides further context" if context.strip() else ""
        given = f"### Input:\n{context}\n\n" if context.strip() else ""
        prompt_text = (
            f"Below is an instruction that describes a task{paired}. Write a response that appropriately completes the "
            f"request.\n\n### Instruction:\n{row.values['instruction']}\n\n{given}### Response:"
        )
    answers = (Answer(text(row, "output")),) if "output" in row.values else ()
    return record(row, prompt_text, answers)


def instructed(row: Row) -> str:
    """An instruction; a blank line and the input follow if the row has one."""
    instruction, context = text(row, "instruction"), optional_text(row, "input")
    return f"{instruction}\n\n{context}" if context.strip() else instruction


# -------------------------------------------------------------------------------------------- readers: pairs


def read_preference(row: Row) -> Record:
    """A prompt with a chosen and a rejected answer; each answer is text, a message or a conversation.

    The prompt is text, messages, ShareGPT's `conversations`, or what both conversations share; maybe in `context`.
    """
    names = PROMPT_KEYS + CONTEXT_KEYS
    answers = [answer(column(row, name), name, row) for name in ("chosen", "rejected")]
    whole = next((turns for turns, _ in answers if turns), ())
    said: Said | None = None
    if has(row.values, names) or (not whole and has(row.values, CONVERSATION_KEYS)):
        said = prompt(row, names=names)
    elif whole and whole[0].role != "system":
        said = system_message(row)
    return answered(row, said, answers, ranked=True)


def read_hh(row: Row) -> Record:
    """HH-RLHF (Bai et al. 2022): two transcripts. The prompt is their common beginning up to its last "Assistant:"."""
    chosen, rejected = text(row, "chosen"), text(row, "rejected")
    cut = end_of_prompt(chosen, rejected)
    if cut == 0:
        found = 'chosen and rejected have no common beginning that ends in "Assistant:"'
        raise row.error(f"{found}. Give the prompt in its own column")
    # The published HH-RLHF has empty answers: they are worse answers, not faulty rows.
    answers = (Answer(chosen[cut:] or " "), Answer(rejected[cut:] or " "))
    return record(row, chosen[:cut], answers, ranked=True)


def end_of_prompt(chosen: str, rejected: str) -> int:
    """Where the answers begin in two transcripts: after the last "Assistant:" of their common beginning, else 0."""
    low, high = 0, min(len(chosen), len(rejected))
    while low < high:  # Bisection: comparing slices is much faster than comparing characters.
        middle = (low + high + 1) // 2
        if chosen[low:middle] == rejected[low:middle]:
            low = middle
        else:
            high = middle - 1
    cut = chosen[:low].rfind(ASSISTANT)
    return cut + len(ASSISTANT) if cut >= 0 else 0


def read_shp(row: Row) -> Record:
    """SHP (Ethayarajh et al. 2022): `labels` is 1 if A is preferred and 0 if B is. Votes, if given, are the scores."""
    first, second = (
        Answer(text(row, f"human_ref_{side}"), optional_number(row.values.get(f"score_{side}"), f"score_{side}", row))
        for side in "AB"
    )
    a_is_better = one_of(column(row, "labels"), "labels", (0, 1), row) == 1
    return record(row, text(row, "history"), (first, second) if a_is_better else (second, first), ranked=True)


def read_summarize(row: Row) -> Record:
    """Comparisons of summaries (Stiennon et al. 2020): `choice` is the index of the better one, 0 or 1.

    The prompt has the format of the paper's models: a Reddit post with its title, or a news article.
    """
    info = column(row, "info")
    if not isinstance(info, dict):
        raise row.error(f"`info` is {kind_of(info)}, it must be a mapping")
    summaries = sequence(column(row, "summaries"), "summaries", row)
    if len(summaries) != 2:
        raise row.error(f"`summaries` has {len(summaries)} items, it must have two")
    texts = [checked(_inner(item, "text"), f"`text` of summary {n}", row) for n, item in enumerate(summaries)]
    choice = one_of(column(row, "choice"), "choice", (0, 1), row)
    inside = Row(info, row.where)
    if optional_text(inside, "article").strip():
        prompt_text = f"Article:\n{info['article']}\n\nTL;DR:\n"
    else:
        subreddit, title = optional_text(inside, "subreddit"), optional_text(inside, "title")
        post = checked(info.get("post"), "`post` of `info`", row)
        prompt_text = f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    return record(row, prompt_text, (Answer(texts[choice]), Answer(texts[1 - choice])), ranked=True)


def read_webgpt(row: Row) -> Record:
    """WebGPT comparisons (Nakano et al. 2021): two answers with opposite scores; equal scores are a tie."""
    question = column(row, "question")
    prompt_text = checked(_inner(question, "full_text") if isinstance(question, dict) else question, "`question`", row)
    answers = tuple(
        Answer(text(row, f"answer_{n}"), number(column(row, f"score_{n}"), f"score_{n}", row.where)) for n in (0, 1)
    )
    return record(row, prompt_text, answers)


def read_stackexchange(row: Row) -> Record:
    """Stack Exchange questions with two answers, `response_j` with more votes than `response_k`."""
    answers = (Answer(text(row, "response_j")), Answer(text(row, "response_k")))
    return record(row, text(row, "question"), answers, ranked=True)


def read_pandalm(row: Row) -> Record:
    """PandaLM (Wang et al. 2023): two responses and votes, 1 or 2 for the better one, 0 or "Tie" for neither.

    The votes are in `vote`, or in `annotator1`, `label_0` and so on. Unless one response has the majority, it is a tie.
    """
    answers = (Answer(text(row, "response1")), Answer(text(row, "response2")))
    names = ["vote"] if "vote" in row.values else [n for n in row.values if re.fullmatch(r"annotator\d+|label_\d+", n)]
    if not names:
        first_key(row, ("vote", "annotator1", "label_0"))
    cells = {name: row.values[name] for name in names}
    votes = Counter(
        0 if isinstance(cell, str) and cell.strip().lower() == "tie" else one_of(cell, name, (0, 1, 2), row)
        for name, cell in cells.items()
    ).most_common()
    clear = votes[0][0] != 0 and (len(votes) == 1 or votes[0][1] > votes[1][1])
    if clear and votes[0][0] == 2:
        answers = answers[::-1]
    return record(row, instructed(row), answers, ranked=clear)


# ------------------------------------------------------------------------------ readers: grades and rankings


def read_ultrafeedback(row: Row, weights: Mapping[str, float]) -> Record:
    """UltraFeedback (Cui et al. 2023): completions with their `overall_score`, or the weighted sum of their ratings.

    A completion with a rating of "N/A" among those in `weights` has no score.
    """
    answers = []
    for n, item in enumerate(sequence(column(row, "completions"), "completions", row), 1):
        response = checked(_inner(item, "response"), f"`response` of completion {n}", row)
        if weights:
            ratings = {name: _inner(item.get("annotations"), name) for name in weights}
            grades = {name: one.get("Rating") if isinstance(one, dict) else one for name, one in ratings.items()}
            score = None if "N/A" in grades.values() else weighted(grades, weights, row, f" of completion {n}")
        elif "overall_score" in item:
            score = optional_number(item["overall_score"], f"overall_score of completion {n}", row)
        else:
            raise row.error(f"completion {n} has no `overall_score`. Give `weights` for its annotations")
        answers.append(Answer(response, score))
    return record(row, text(row, "instruction"), tuple(answers))


def read_helpsteer(row: Row, weights: Mapping[str, float]) -> Record:
    """HelpSteer (Wang et al. 2023): a response with five attributes from 0 to 4.

    The score is their weighted sum; by default it is `helpfulness`.
    """
    weights = weights or {"helpfulness": 1.0}
    return read_prompt_response(row, weighted({name: at(row, name) for name in weights}, weights, row))


def read_scored(row: Row, weights: Mapping[str, float]) -> Record:
    """A prompt with a response and its score (may be null), or with a list of responses and a list of scores.

    With `weights` the score is the weighted sum of those columns.
    """
    if has(row.values, ANSWERS_KEYS) and not has(row.values, RESPONSE_KEYS):
        return _several_answers(row, weights, with_scores=True)
    if weights:
        return read_helpsteer(row, weights)
    return read_prompt_response(row, optional_number(column(row, "score"), "score", row))


def read_ranking(row: Row, weights: Mapping[str, float]) -> Record:
    """A prompt with a list of at least two answers: best first, or in any order with a list of scores."""
    found = _several_answers(row, weights, with_scores=bool(weights) or "scores" in row.values)
    if len(found.answers) < 2:
        raise row.error(f"has {len(found.answers)} answers, a ranking needs at least two")
    return found


def read_kto(row: Row) -> Record:
    """KTO (Ethayarajh et al. 2024): an answer, or a conversation that ends with it, and a label.

    The label is true (1) for a good answer and false (0) for a bad one, which SFT must not imitate.
    """
    value = column(row, "label")
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        value = value.strip().lower() == "true"
    good = value if isinstance(value, bool) else one_of(value, "label", (0, 1), row) == 1
    is_chat = has(row.values, CONVERSATION_KEYS) and not has(row.values, RESPONSE_KEYS)
    whole = read_messages(row) if is_chat else read_prompt_response(row)
    if not whole.answers:
        raise row.error("the conversation ends with the user's message, the label needs an answer")
    return replace(whole, answers=(replace(whole.answers[0], score=float(good)),), undesirable=not good)


def _several_answers(row: Row, weights: Mapping[str, float], *, with_scores: bool) -> Record:
    name = first_key(row, ANSWERS_KEYS)
    items = sequence(row.values[name], name, row)
    answers = [answer(item, f"{name} {n}", row) for n, item in enumerate(items, 1)]
    scores = _scores(row, weights, len(answers)) if with_scores else []
    return answered(row, prompt(row), answers, scores, ranked=not with_scores)


def _scores(row: Row, weights: Mapping[str, float], count: int) -> list[float | None]:
    """The scores of a list of answers: the column `scores`, or the weighted sums of columns of lists."""
    columns = {name: sequence(at(row, name), shown_name(name), row) for name in weights or ("scores",)}
    for name, values in columns.items():
        if len(values) != count:
            rule = f"it must have one for each of the {count} answers"
            raise row.error(f"`{shown_name(name)}` has {len(values)} values, {rule}")
    if not weights:
        return [optional_number(value, f"scores {n}", row) for n, value in enumerate(columns["scores"], 1)]
    return [weighted({name: columns[name][i] for name in weights}, weights, row) for i in range(count)]


def _inner(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


# ------------------------------------------------------------------------------------------------ the formats

ALL: tuple[Purpose, ...] = ("sft", "rm pairs", "rm scores", "ppo")
WITHOUT_SCORES: tuple[Purpose, ...] = ("sft", "rm pairs", "ppo")
WITHOUT_PAIRS: tuple[Purpose, ...] = ("sft", "rm scores", "ppo")
TEXTS: tuple[Purpose, ...] = ("sft", "ppo")
PROMPTS = PROMPT_KEYS + SYSTEM_KEYS
CHATS = PROMPTS + CONVERSATION_KEYS
GRADES = ("coherence", "complexity", "verbosity")
VOTES = ("vote", "annotator1", "annotator2", "annotator3", "label_0", "label_1", "label_2")


@dataclass(frozen=True)
class Format:
    """One kind of row."""

    name: str
    keys: str
    """The columns that identify it, for messages."""
    purposes: tuple[Purpose, ...]
    """The stages that can learn from it; `rm pairs` is for pairwise losses, `rm scores` for mse."""
    needs: tuple[str | tuple[str, ...], ...]
    """The columns that its rows have, by our names; one of each tuple."""
    read: Callable[..., Record]
    """The Record of a row, and of the option below."""
    also: tuple[str, ...] = ()
    """Further columns that it may have. `keys` of the config may map all of them."""
    fits: Callable[[Values, DataSource], bool] = lambda _values, _source: True
    """What a row with these columns must fulfil besides."""
    option: Literal["weights", "prompt_words"] | None = None
    """What `read` takes too: the weights of its grades, or the number of words of a text that are its prompt."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*chain.from_iterable(map(_either, self.needs)), *self.also]))

    def is_of(self, values: Values, source: DataSource) -> bool:
        return all(has(values, _either(names)) for names in self.needs) and self.fits(values, source)


def _either(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (names,)


def _has_prompt(values: Values, _source: DataSource) -> bool:
    names = PROMPT_KEYS + CONTEXT_KEYS + CONVERSATION_KEYS
    return has(values, names) or not isinstance(values["chosen"], str)


def _has_labelled_answer(values: Values, _source: DataSource) -> bool:
    label = values["label"]
    is_truth = isinstance(label, bool) or (isinstance(label, str) and label[:9].strip().lower() in ("true", "false"))
    return is_truth and ((has(values, PROMPT_KEYS) and has(values, RESPONSE_KEYS)) or has(values, CONVERSATION_KEYS))


def _has_list(values: Values, _source: DataSource) -> bool:
    return any(isinstance(values.get(name), list) for name in ANSWERS_KEYS)


def _has_score(values: Values, source: DataSource) -> bool:
    is_list = _has_list(values, source)
    if not is_list and not has(values, RESPONSE_KEYS):
        return False
    if source.weights:
        return all(name in values or name.partition(".")[0] in values for name in source.weights)
    return "scores" in values if is_list and not has(values, RESPONSE_KEYS) else "score" in values


# In the order in which they are tried: formats with more columns come first. SFT and PPO do not use scores or labels:
# they read a scored row as `prompt_response` and a labelled text as `text`, whatever its label is.
FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format(
            "preference", "prompt + chosen + rejected", WITHOUT_SCORES, ("chosen", "rejected"), read_preference,
            also=(*CHATS, *CONTEXT_KEYS), fits=_has_prompt,
        ),
        Format("hh", "chosen + rejected", WITHOUT_SCORES, ("chosen", "rejected"), read_hh),
        Format(
            "shp", "history + human_ref_A + labels", ALL, ("history", "human_ref_A", "human_ref_B"), read_shp,
            also=("labels", "score_A", "score_B"),
        ),
        Format("summarize", "summaries + choice", WITHOUT_SCORES, ("info", "summaries", "choice"), read_summarize),
        Format(
            "webgpt", "answer_0 + answer_1", ALL, ("question", "answer_0", "answer_1"), read_webgpt,
            also=("score_0", "score_1"),
        ),
        Format(
            "stackexchange", "response_j + response_k", WITHOUT_SCORES, ("question", "response_j", "response_k"),
            read_stackexchange,
        ),
        Format(
            "pandalm", "response1 + response2", WITHOUT_SCORES, ("instruction", "response1", "response2"), read_pandalm,
            also=("input", *VOTES),
        ),
        Format(
            "ultrafeedback", "instruction + completions", ALL, ("instruction", "completions"), read_ultrafeedback,
            option="weights",
        ),
        Format(
            "helpsteer", "response + helpfulness", WITHOUT_PAIRS,
            (PROMPT_KEYS, RESPONSE_KEYS, "helpfulness", "correctness"), read_helpsteer,
            also=(*CHATS, *GRADES), option="weights",
        ),
        Format(
            "kto", "completion + label", WITHOUT_PAIRS, ("label",), read_kto,
            also=(*CHATS, *RESPONSE_KEYS), fits=_has_labelled_answer,
        ),
        Format(
            "ranking", "prompt + answers", WITHOUT_SCORES, (PROMPT_KEYS, ANSWERS_KEYS), read_ranking,
            also=(*CHATS, "scores"), fits=_has_list, option="weights",
        ),
        Format(
            "alpaca", "instruction + output", TEXTS, ("instruction", "output"),
            partial(read_instruction, template=True), also=("input",),
        ),
        Format(
            "instruction", "instruction + output", TEXTS, ("instruction", "output"),
            partial(read_instruction, template=False), also=("input",), fits=lambda _values, _source: False,
        ),
        Format(
            "prompt_response", "prompt + response", TEXTS, (PROMPT_KEYS, RESPONSE_KEYS), read_prompt_response,
            also=CHATS,
        ),
        Format(
            "scored", "prompt + response + score", WITHOUT_PAIRS, (PROMPT_KEYS,), read_scored,
            also=(*CHATS, *RESPONSE_KEYS, *ANSWERS_KEYS, "score", "scores"), fits=_has_score, option="weights",
        ),
        Format("messages", "messages", TEXTS, (CONVERSATION_KEYS,), read_messages, also=SYSTEM_KEYS),
        Format("text", "text", TEXTS, ("text",), read_text, option="prompt_words"),
        Format(
            "labelled", "text + label", ALL, ("text", LABEL_KEYS), partial(read_text, labelled=True),
            option="prompt_words",
        ),
        Format("prompt", "prompt", ("ppo",), (PROMPT_KEYS,), read_prompt, also=CHATS),
    )
}  # fmt: skip


def recognise(row: Row, source: DataSource, purpose: Purpose) -> Format:
    """The format of a source's rows: the one it names, else the first that fits this row's keys and the stage.

    Raises DataError without one, and if the source's `keys` or `weights` do not apply to it.

    >>> recognise(Row({"question": "1+1=", "answer": "2"}, "file:1"), DataSource(path="file"), "sft").name
    'prompt_response'
    """
    values = mapped(row, source).values
    if source.format == "auto":
        fitting = (f for f in FORMATS.values() if _suits(f, source, purpose) and f.is_of(values, source))
        found = next(fitting, None)
        if found is None:
            advice = "Rename them or map them with `keys`"
            raise row.error(f"found the keys {found_keys(values)}, {_takes(purpose, source)}. {advice}")
    else:
        found = FORMATS[source.format]
        # A list of responses with scores serves both losses, under either name.
        both = found.name in ("ranking", "scored") and _has_list(values, source) and _has_score(values, source)
        if purpose not in found.purposes and not both:
            raise row.error(f"the format is {found.name}, {_takes(purpose, source)}")
        if source.weights and found.option != "weights":
            raise row.error(f"{found.name} rows have no grades, so `weights` does not apply. Remove it")
    known = {*found.columns, *source.weights, *(name.partition(".")[0] for name in source.weights)}
    for ours in source.keys:
        if ours not in known:
            what = f"which is not a column of the format {found.name}. Its columns: {', '.join(found.columns)}"
            raise row.error(f"`keys` maps `{shown_name(ours)}`, {what}")
    return found


def read_record(row: Row, format: Format, source: DataSource, *, prompt_words: int = 0) -> Record:
    """The Record of a row; the first `prompt_words` words of a plain text are its prompt.

    Raises DataError for a row that does not fit the format.
    """
    options = {"weights": source.weights, "prompt_words": prompt_words}
    given = {format.option: options[format.option]} if format.option is not None else {}
    if not source.keys:
        return format.read(row, **given)
    ours = mapped(row, source)
    try:
        return replace(format.read(ours, **given), columns=row.values)
    except DataError as error:
        # In the names that the columns have in the file.
        message = str(error).replace(found_keys(ours.values), found_keys(row.values))
        renamed = re.sub(r"`(\w+)", lambda match: f"`{shown_name(source.keys.get(match[1], match[1]))}", message)
        raise DataError(renamed) from None


def _suits(format: Format, source: DataSource, purpose: Purpose) -> bool:
    return purpose in format.purposes and (format.option == "weights" or not source.weights)


def _takes(purpose: Purpose, source: DataSource) -> str:
    """The formats that a stage accepts, for a message: the shortest first, without longer forms of earlier ones."""
    listed: list[str] = []
    for format in FORMATS.values():
        columns = set(format.keys.split(" + "))
        if _suits(format, source, purpose) and not any(set(keys.split(" + ")) <= columns for keys in listed):
            listed.append(format.keys)
    with_weights = f" with the columns of `weights` ({found_keys(source.weights)})" if source.weights else ""
    return f"{purpose}{with_weights} needs rows with: {'; '.join(sorted(listed, key=len))}"
