"""Readers of rows that grade answers: pairs, rankings, scores, and labels of good and bad.

The columns are those of each published data set.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rlhf_cli.data.columns import (
    ANSWERS_KEYS,
    CONTEXT_KEYS,
    CONVERSATION_KEYS,
    PROMPT_KEYS,
    RESPONSE_KEYS,
    answer,
    at,
    checked,
    column_number,
    first_key,
    has,
    one_of,
    optional_number,
    optional_text,
    prompt,
    prompt_and_answers,
    record,
    sequence,
    system_message,
    text,
    weighted,
)
from rlhf_cli.data.formats_plain import instructed, read_messages
from rlhf_cli.data.records import ASSISTANT, Answer, Message, Record, kind_of, number, shown_name
from rlhf_cli.data.rows import Row
from rlhf_cli.errors import DataError

# -------------------------------------------------------------------------------------------------- pairs


def read_preference(row: Row) -> Record:
    """A prompt with a chosen and a rejected answer; each answer is text, a message or a conversation.

    The prompt is text, messages, ShareGPT's `conversations`, or the messages that both conversations share. It may be
    in a column `context`.
    """
    names = PROMPT_KEYS + CONTEXT_KEYS
    answers = [answer(row.values[first_key(row, (name,))], name, row) for name in ("chosen", "rejected")]
    prompt_text: str | None = None
    before: tuple[Message, ...] = ()
    whole = next((turns for turns, _ in answers if turns), ())
    if has(row.values, names) or (not whole and has(row.values, CONVERSATION_KEYS)):
        prompt_text, before = prompt(row, names=names)
    elif whole and whole[0].role != "system":
        before = system_message(row) or ()
    prompt_text, before, (chosen, rejected) = prompt_and_answers(row, prompt_text, before, answers)
    return record(row, prompt_text, before, (Answer(chosen), Answer(rejected)), ranked=True)


def read_hh(row: Row) -> Record:
    """HH-RLHF (Bai et al. 2022): two transcripts. The prompt is their common beginning up to its last "Assistant:"."""
    chosen, rejected = text(row, "chosen"), text(row, "rejected")
    cut = end_of_prompt(chosen, rejected)
    if cut == 0:
        raise DataError(
            f'{row.where}: chosen and rejected have no common beginning that ends in "Assistant:". '
            "Give the prompt in its own column"
        )
    # The published HH-RLHF has empty answers: they are worse answers, not faulty rows.
    answers = (Answer(chosen[cut:] or " "), Answer(rejected[cut:] or " "))
    return record(row, chosen[:cut], (), answers, ranked=True)


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
    a_is_better = one_of(row.values[first_key(row, ("labels",))], "labels", (0, 1), row) == 1
    return record(row, text(row, "history"), (), (first, second) if a_is_better else (second, first), ranked=True)


def read_summarize(row: Row) -> Record:
    """Comparisons of summaries (Stiennon et al. 2020): `choice` is the index of the better one, 0 or 1.

    The prompt has the format of the paper's models: a Reddit post with its title, or a news article.
    """
    info = row.values[first_key(row, ("info",))]
    if not isinstance(info, dict):
        raise DataError(f"{row.where}: `info` is {kind_of(info)}, it must be a mapping")
    summaries = sequence(row.values[first_key(row, ("summaries",))], "`summaries`", row.where)
    if len(summaries) != 2:
        raise DataError(f"{row.where}: `summaries` has {len(summaries)} items, it must have two")
    texts = [checked(_inner(item, "text"), f"`text` of summary {n}", row.where) for n, item in enumerate(summaries)]
    choice = one_of(row.values[first_key(row, ("choice",))], "choice", (0, 1), row)
    inside = Row(info, row.where)
    if optional_text(inside, "article").strip():
        prompt_text = f"Article:\n{info['article']}\n\nTL;DR:\n"
    else:
        subreddit, title = optional_text(inside, "subreddit"), optional_text(inside, "title")
        post = checked(info.get("post"), "`post` of `info`", row.where)
        prompt_text = f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    return record(row, prompt_text, (), (Answer(texts[choice]), Answer(texts[1 - choice])), ranked=True)


def read_webgpt(row: Row) -> Record:
    """WebGPT comparisons (Nakano et al. 2021): two answers with opposite scores; equal scores are a tie."""
    question = row.values[first_key(row, ("question",))]
    prompt_text = checked(
        _inner(question, "full_text") if isinstance(question, dict) else question, "`question`", row.where
    )
    answers = tuple(Answer(text(row, f"answer_{n}"), column_number(row, f"score_{n}")) for n in (0, 1))
    return record(row, prompt_text, (), answers)


def read_stackexchange(row: Row) -> Record:
    """Stack Exchange questions with two answers, `response_j` with more votes than `response_k`."""
    answers = (Answer(text(row, "response_j")), Answer(text(row, "response_k")))
    return record(row, text(row, "question"), (), answers, ranked=True)


def read_pandalm(row: Row) -> Record:
    """PandaLM (Wang et al. 2023): two responses and votes, 1 or 2 for the better one, 0 or "Tie" for neither.

    The votes are in `vote`, or in `annotator1`, `label_0` and so on. The majority decides. A majority for neither,
    or no majority, is a tie.
    """
    answers = (Answer(text(row, "response1")), Answer(text(row, "response2")))
    names = ["vote"] if "vote" in row.values else [n for n in row.values if re.fullmatch(r"annotator\d+|label_\d+", n)]
    if not names:
        first_key(row, ("vote", "annotator1", "label_0"))
    votes = Counter(_vote(row, name) for name in names).most_common()
    clear = votes[0][0] != 0 and (len(votes) == 1 or votes[0][1] > votes[1][1])
    if clear and votes[0][0] == 2:
        answers = answers[::-1]
    return record(row, instructed(row), (), answers, ranked=clear)


def _vote(row: Row, name: str) -> int:
    value = row.values[name]
    if isinstance(value, str) and value.strip().lower() == "tie":
        return 0
    return one_of(value, name, (0, 1, 2), row)


# ----------------------------------------------------------------------------------- grades and rankings


def read_ultrafeedback(row: Row, weights: Mapping[str, float]) -> Record:
    """UltraFeedback (Cui et al. 2023): completions with their `overall_score`, or the weighted sum of their ratings.

    A completion with a rating of "N/A" among those in `weights` has no score.
    """
    completions = sequence(row.values[first_key(row, ("completions",))], "`completions`", row.where)
    answers = []
    for n, item in enumerate(completions, 1):
        response = checked(_inner(item, "response"), f"`response` of completion {n}", row.where)
        if weights:
            score = _rated(item.get("annotations"), weights, n, row)
        elif "overall_score" in item:
            score = optional_number(item["overall_score"], f"overall_score of completion {n}", row)
        else:
            raise DataError(f"{row.where}: completion {n} has no `overall_score`. Give `weights` for its annotations")
        answers.append(Answer(response, score))
    return record(row, text(row, "instruction"), (), tuple(answers))


def _rated(annotations: Any, weights: Mapping[str, float], n: int, row: Row) -> float | None:
    total = 0.0
    for name, weight in weights.items():
        found = _inner(annotations, name)
        rating = found.get("Rating") if isinstance(found, dict) else found
        if rating == "N/A":
            return None
        total += weight * number(rating, f"{name} of completion {n}", row.where)
    return number(total, f"weighted score of completion {n}", row.where)


def read_helpsteer(row: Row, weights: Mapping[str, float]) -> Record:
    """HelpSteer (Wang et al. 2023): a response with five attributes from 0 to 4.

    The score is their weighted sum; by default it is `helpfulness`.
    """
    return _one_answer(row, weighted(row, weights or {"helpfulness": 1.0}))


def read_scored(row: Row, weights: Mapping[str, float]) -> Record:
    """A prompt with a response and its score (may be null), or with a list of responses and a list of scores.

    With `weights` the score is the weighted sum of those columns.
    """
    if has(row.values, ANSWERS_KEYS) and not has(row.values, RESPONSE_KEYS):
        return _several_answers(row, weights, with_scores=True)
    score = row.values[first_key(row, ("score",))] if not weights else weighted(row, weights)
    return _one_answer(row, optional_number(score, "score", row))


def read_ranking(row: Row, weights: Mapping[str, float]) -> Record:
    """A prompt with a list of at least two answers: best first, or in any order with a list of scores."""
    found = _several_answers(row, weights, with_scores=bool(weights) or "scores" in row.values)
    if len(found.answers) < 2:
        raise DataError(f"{row.where}: has {len(found.answers)} answers, a ranking needs at least two")
    return found


def read_kto(row: Row) -> Record:
    """KTO (Ethayarajh et al. 2024): an answer, or a conversation that ends with it, and a label.

    The label is true (1) for a good answer and false (0) for a bad one, which SFT must not imitate.
    """
    value = row.values[first_key(row, ("label",))]
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        good = value.strip().lower() == "true"
    else:
        good = value if isinstance(value, bool) else one_of(value, "label", (0, 1), row) == 1
    if has(row.values, RESPONSE_KEYS) or not has(row.values, CONVERSATION_KEYS):
        return _one_answer(row, float(good), undesirable=not good)
    whole = read_messages(row)
    if not whole.answers:
        raise DataError(f"{row.where}: the conversation ends with the user's message, the label needs an answer")
    answers = (Answer(whole.answers[0].text, float(good)),)
    return record(row, whole.prompt, whole.messages, answers, undesirable=not good)


def _one_answer(row: Row, score: float | None, *, undesirable: bool = False) -> Record:
    prompt_text, before = prompt(row)
    name = first_key(row, RESPONSE_KEYS)
    prompt_text, before, (response,) = prompt_and_answers(
        row, prompt_text, before, [answer(row.values[name], name, row)]
    )
    return record(row, prompt_text, before, (Answer(response, score),), undesirable=undesirable)


def _several_answers(row: Row, weights: Mapping[str, float], *, with_scores: bool) -> Record:
    name = first_key(row, ANSWERS_KEYS)
    items = sequence(row.values[name], f"`{name}`", row.where)
    answers = [answer(item, f"{name} {n}", row) for n, item in enumerate(items, 1)]
    prompt_text, before = prompt(row)
    prompt_text, before, texts = prompt_and_answers(row, prompt_text, before, answers)
    scores = _scores(row, weights, len(texts)) if with_scores else [None] * len(texts)
    return record(row, prompt_text, before, tuple(map(Answer, texts, scores)), ranked=not with_scores)


def _scores(row: Row, weights: Mapping[str, float], count: int) -> list[float | None]:
    """The scores of a list of answers: the column `scores`, or the weighted sums of columns of lists."""
    columns = {}
    for name in weights or ("scores",):
        columns[name] = sequence(at(row, name), f"`{shown_name(name)}`", row.where)
        if len(columns[name]) != count:
            raise DataError(
                f"{row.where}: `{shown_name(name)}` has {len(columns[name])} values, it must have one for each of "
                f"the {count} answers"
            )
    if not weights:
        return [optional_number(value, f"scores {n}", row) for n, value in enumerate(columns["scores"], 1)]
    return [
        number(
            sum(weight * number(columns[name][i], name, row.where) for name, weight in weights.items()),
            "the weighted score",
            row.where,
        )
        for i in range(count)
    ]


def _inner(value: Any, name: str) -> Any:
    """The value under a name in a mapping; None if there is none or the value is not a mapping."""
    return value.get(name) if isinstance(value, dict) else None
