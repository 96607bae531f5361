"""Each format: what every stage reads from its fixture (by hand), real files, mapped keys, refusals, properties."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import math
import os
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_cli.config.data import DataSource, Format, Rows
from rlhf_cli.data.encode import Skipped
from rlhf_cli.data.formats import ALL, FORMATS, GRADES, end_of_prompt, first_words, read_record, recognise
from rlhf_cli.data.records import ASSISTANT, Answer, Message, Record, Row, transcript
from rlhf_cli.data.stage_rows import StageRows, demonstration, pairs_of_labels, prompt, ranking, scored
from rlhf_cli.errors import DataError
from support.paths import ROOT, TESTS

FIXTURES = TESTS / "fixtures" / "formats"
DATA = Path(os.environ.get("RLHF_REAL_DATA", str(ROOT.parent / "shared" / "data")))
SOURCE = DataSource(path="rows.jsonl")


def fixture(name):
    lines = (FIXTURES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Row(json.loads(line), f"{name}.jsonl:{n}") for n, line in enumerate(lines, 1)]


def source(**values):
    return DataSource(path="rows.jsonl", **values)


def read(values, name, given=SOURCE, *, prompt_words=0):
    return read_record(Row(values, "file:3"), FORMATS[name], given, prompt_words=prompt_words)


def seen(record):
    best, order, graded = demonstration(record), ranking(record), scored(record)
    return (
        record.prompt,
        best.response if best else None,
        order.texts if order else None,
        list(zip(graded.texts, graded.scores, strict=True)) if graded else [],
    )


# ------------------------------------------------------------------------------------- what stages see


KETTLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:"
)


def sees(prompt, answers=None, graded=()):
    """A row with one response, or with a ranking, whose best is the response."""
    if isinstance(answers, tuple):
        return prompt, answers[0], answers, list(graded)
    return prompt, answers, None, list(graded)


EXPECTED = {
    "prompt_response": [
        sees("What does a kettle do?", " It boils water."),
        sees("Is the shop open on Sunday?", "No, it opens on Monday."),
        sees("", "Once there was a fox."),
        sees("\n\nSystem: Answer in one word.\n\nHuman: Name a river.\n\nAssistant:", " Rhine"),
        sees("\n\nHuman: Say hello.\n\nAssistant:", " Hello."),
    ],
    "prompt": [
        sees("How do I descale a kettle?"),
        sees("\n\nSystem: You are a patient teacher.\n\nHuman: Name a lake.\n\nAssistant:"),
        sees("\n\nHuman: Name a sea.\n\nAssistant:"),
    ],
    "text": [sees("", " The rain fell , and the dog slept."), sees("", "Too short.")],
    "labelled": [
        sees("", "A warm and funny film.", [("A warm and funny film.", 1.0)]),
        sees("", "Two long dull hours.", [("Two long dull hours.", 0.0)]),
        sees("", "I would see it again.", [("I would see it again.", 1.0)]),
        sees("", "A slow film.", [("A slow film.", 0.25)]),
        sees("", "A slow film.", [("A slow film.", 1.0)]),
    ],
    "messages": [
        sees(
            "\n\nSystem: Be brief.\n\nHuman: Is it late?\n\nAssistant: Yes.\n\nHuman: How late?\n\nAssistant:", " Ten."
        ),
        sees("\n\nHuman: Can moss grow on stone?\n\nAssistant:", " It can."),
        sees("\n\nHuman: Which bird is that?\n\nAssistant:", " A wren."),
        sees("\n\nSystem: You know this house.\n\nHuman: Where is the key?\n\nAssistant:"),
    ],
    "alpaca": [
        sees(KETTLE.format("Name three colours."), "Red, green and blue."),
        sees(
            "Below is an instruction that describes a task, paired with an input that provides further context. Write "
            "a response that appropriately completes the request.\n\n### Instruction:\nPut the sentence into the past."
            "\n\n### Input:\nI walk {home}.\n\n### Response:",
            "I walked {home}.",
        ),
        sees(KETTLE.format("Count to three."), "One, two, three."),
    ],
    "instruction": [
        sees("Shorten the sentence.\n\nIt was a dark and very stormy night.", "The night was stormy."),
        sees("Name a tree.", "An oak."),
        sees("Name a flower."),
    ],
    "preference": [
        sees("Where do herons nest?", (" In tall trees.", " I don't care.")),
        sees("Same twice?", "Yes."),
        sees("\n\nHuman: Is tea hot?\n\nAssistant:", (" Mostly.", " Go away.")),
        sees("\n\nSystem: Be kind.\n\nHuman: I lost.\n\nAssistant:", (" I'm sorry.", " Of course.")),
        sees(
            "\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: A riddle?\n\nAssistant:",
            (" What has keys but no doors?", " No."),
        ),
        sees("\n\nHuman: Add one and two.\n\nAssistant:", (" Three.", " Four.")),
        # ColossalChat's `context`; a question beside it is the prompt.
        sees("1+1=", (" 2", " 3")),
        sees("\n\nHuman: 1+1?\n\nAssistant:", (" 2", " 3")),
        sees("1+1=", (" 2", " 3")),
    ],
    "hh": [
        # The answers share " Kno", which stays with the answers.
        sees("\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: A joke?\n\nAssistant:", (" Knock knock.", " Know none.")),
        sees("\n\nHuman: Still there?\n\nAssistant:", (" Yes.", " ")),
        sees("\n\nHuman: Bye.\n\nAssistant:", " Bye."),
    ],
    "shp": [
        sees(
            "How long do eggs keep?",
            ("About a month in the fridge.", "No idea."),
            [("About a month in the fridge.", 30.0), ("No idea.", 10.0)],
        ),
        sees(
            "How do I sharpen a knife?",
            ("Use a stone, twenty strokes a side.", "Buy a new one."),
            [("Use a stone, twenty strokes a side.", 8.0), ("Buy a new one.", 4.0)],
        ),
    ],
    "summarize": [
        sees(
            "SUBREDDIT: r/advice\n\nTITLE: Singing neighbour\n\n"
            "POST: My neighbour sings at night and I can't sleep.\n\nTL;DR:",
            (" My neighbour's singing keeps me awake.", " A song."),
        ),
        sees("Article:\nThe bridge was opened on Friday.\n\nTL;DR:\n", ("Bridge opened Friday.", "A bridge.")),
    ],
    "webgpt": [
        sees(
            "Why is the sea salty?",
            ("Rivers carry salt from the rocks.", "Fish."),
            [("Fish.", -0.5), ("Rivers carry salt from the rocks.", 0.5)],
        ),
        sees(
            "Why is snow white?",
            "It scatters all light.",
            graded=[("It scatters all light.", 0.0), ("It reflects light of every colour.", 0.0)],
        ),
    ],
    "stackexchange": [
        sees("How do I reverse a list?", ("Use reversed().", "Loop over it.")),
        sees("How do I exit the editor?", ("Type :q and press enter.", "Turn it off.")),
    ],
    "pandalm": [
        sees("Make it shorter.\n\nIt is raining very hard today.", ("It pours today.", "Rain.")),
        sees("Name a fruit.", ("A pear.", "Yes.")),
        sees("Name a nut.", "A walnut."),
        sees("Name a bean.", "A broad bean."),
        sees("Name a herb.", ("Thyme.", "Grass.")),
        sees("Name a spice.", "Clove."),
    ],
    "ultrafeedback": [
        # "Onward, gently." has the same score as "Go.", which comes first.
        sees(
            "Write a motto.",
            ("Slow and steady.", "Go."),
            [("Go.", 5.0), ("Slow and steady.", 8.5), ("Onward, gently.", 5.0)],
        ),
        sees("Name a tool.", "A saw.", [("A saw.", 7.0)]),
    ],
    "helpsteer": [
        sees("What is felt?", "Pressed wool.", [("Pressed wool.", 4.0)]),
        sees("What is felt?", "A feeling.", [("A feeling.", 0.0)]),
    ],
    "kto": [
        sees("\n\nHuman: May I park here?\n\nAssistant:", " Yes, until six.", [(" Yes, until six.", 1.0)]),
        sees("May I smoke here?", None, [("Find out.", 0.0)]),
        sees("\n\nHuman: Is it far?\n\nAssistant:", " Ten minutes.", [(" Ten minutes.", 1.0)]),
        sees("\n\nHuman: Is it near?\n\nAssistant:", None, [(" Who knows.", 0.0)]),
    ],
    "ranking": [
        sees("A word for happy?", ("Glad.", "Fine.", "Sad.")),
        sees("A word for cold?", ("Frosty.", "Warm.")),
        sees(
            "A word for wet?",
            ("Soaked.", "Damp.", "Dry."),
            [("Damp.", 2.0), ("Dry.", 0.0), ("Soaked.", 3.0), ("Moist.", 2.0)],
        ),
    ],
    "scored": [
        sees("How are you?", " Well, thank you.", [(" Well, thank you.", 2.5)]),
        sees("Do you sell rope?", "We do.", [("We do.", 0.0)]),
        sees("Do you sell nails?", "Perhaps."),
        sees("Do you sell wire?", ("By the metre.", "No."), [("By the metre.", 3.0), ("No.", 0.0)]),
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_each_stage_reads_from_a_format(name):
    rows = fixture(name)
    assert len(rows) == len(EXPECTED[name])
    for row, expected in zip(rows, EXPECTED[name], strict=True):
        record = read_record(row, FORMATS[name], SOURCE)
        assert seen(record) == expected, row.where
        assert record.columns is row.values, "rewards are given the row as it was"
        views = [demonstration(record), ranking(record), scored(record)]
        assert {view.where for view in views if view} <= {row.where}
        assert {view.prompt for view in views if view} <= {record.prompt}
        if record.key:
            assert (prompt(record).prompt, prompt(record).messages) == (record.prompt, record.messages)


def test_every_format_of_the_config_is_read_and_has_a_fixture():
    assert {*FORMATS, "auto"} == set(get_args(Format))
    assert set(EXPECTED) == set(FORMATS) == {path.stem for path in FIXTURES.iterdir()}


SPARE = {"input", "output", "score_A", "score_B", "annotator1", "annotator2", "annotator3", "correctness", *GRADES}
"""The columns that a row may lack."""
NEEDED = [
    (name, key)
    for name, format_ in FORMATS.items()
    for key in fixture(name)[0].values
    if key in format_.columns and key not in SPARE
]


@pytest.mark.parametrize(
    ("keys", "purpose", "expected"),
    [
        # Published sets that several formats would fit.
        ({"prompt": "a", "chosen": [], "rejected": [], "messages": [], "score_chosen": 1}, "sft", "preference"),
        ({"instruction": "a", "input": "", "output": "b", "text": "c"}, "sft", "alpaca"),
        ({"instruction": "a", "input": "", "output": "b", "prompt": "c"}, "sft", "alpaca"),
        ({"prompt": "a", "prompt_id": "b", "messages": []}, "sft", "messages"),
        ({"prompt": "a", "prompt_id": "b", "messages": []}, "ppo", "messages"),
        ({"user_input": "a", "completion": "b", "score": 1, "scores": [1, 1, 1]}, "rm scores", "scored"),
        ({"prompt": "a", "responses": ["b", "c"], "scores": [1, 2]}, "rm scores", "scored"),
        ({"prompt": "a", "responses": ["b", "c"], "scores": [1, 2]}, "rm pairs", "ranking"),
        ({"prompt": "a", "response": "b", "label": 3}, "sft", "prompt_response"),
        ({"prompt": "a", "response": "b", "label": "False"}, "sft", "kto"),
        ({"text": "a", "label": "positive"}, "sft", "text"),
        ({"text": "a", "score": 0.25}, "sft", "text"),
        ({"text": "a", "score": 0.25}, "rm pairs", "labelled"),
        ({"context": "a", "chosen": "b", "rejected": "c"}, "rm pairs", "preference"),
        ({"question": "a", "answers": {"text": ["b"]}}, "ppo", "prompt"),
        ({"text": "a", "prompt": "b"}, "ppo", "text"),
    ],
)
def test_the_format_of_an_ambiguous_row(keys, purpose, expected):
    assert recognise(Row(keys, "file:1"), SOURCE, purpose).name == expected


# --------------------------------------------------------------------------------- texts and conversations


def test_first_words_are_the_prompt_of_a_text():
    record = read({"text": " a slow  film , but good", "label": 1}, "labelled", prompt_words=3)
    assert seen(record) == (" a slow  film", " , but good", None, [(" , but good", 1.0)])
    assert record.key == " a slow  film , but good"
    # A text of no more words than that has none to spare.
    record = read({"text": "too short"}, "text", prompt_words=3)
    assert (record.prompt, record.answers) == ("", (Answer("too short"),))
    assert read({"text": "just this \n"}, "text", prompt_words=2).answers == (Answer("just this \n"),)


@given(st.text(), st.integers(0, 5))
def test_first_words_lose_nothing(text, count):
    start, rest = first_words(text, count)
    assert start + rest == text
    assert start.split() == text.split()[:count]
    assert first_words("a  ", 3) == ("a  ", "")


def test_the_keys_that_split_rows():
    """They decide which rows are held out, so they must not change."""
    assert read({"question": "Why?", "answer": "So."}, "prompt_response").key == "Why?"
    assert read({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, "preference").key == "Why?"
    assert read({"text": "one two three"}, "text", prompt_words=2).key == "one two three"
    shared = "\n\nHuman: Hi.\n\nAssistant:"
    assert read({"chosen": shared + " a", "rejected": shared + " b"}, "hh").key == shared
    turns = [{"role": "user", "content": "Hé?"}, {"role": "assistant", "content": "Yes."}]
    key = '[{"content": "H\\u00e9?", "role": "user"}]'
    assert read({"messages": turns}, "messages").key == key
    assert read({"messages": turns[:1]}, "messages").key == key
    assert read({"conversations": [{"value": "Hé?", "from": "human"}], "system": None}, "messages").key == key
    assert read({"prompt": turns[:1], "completion": turns[1:], "label": True}, "kto").key == key


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("messages", {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " "}]}),
        ("messages", {"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "Yes."}]}),
        ("prompt", {"prompt": "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: \n\nAssistant:"}),
        ("text", {"text": "one two three"}),
        ("prompt_response", {"prompt": "", "response": "a"}),
    ],
)
def test_ppo_refuses_a_row_that_asks_nothing(name, values):
    """Also one whose template hides it: the policy would be trained on answers to nothing."""
    spec = StageRows(Rows(train=[SOURCE], test_fraction=0), "ppo")
    with pytest.raises(DataError, match=f"^file:3: {'plain text has no' if name == 'text' else 'the'} prompt"):
        spec.view(read(values, name), "train")


def test_ppo_skips_a_text_without_more_words_than_its_prompt():
    spec = StageRows(Rows(train=[SOURCE], test_fraction=0), "ppo", prompt_words=2)
    seen = [spec.view(read({"text": text}, "text", prompt_words=2), "train") for text in ("one two", "one two three")]
    assert [type(row) for row in seen] == [Skipped, Record]


def test_a_conversation_keeps_its_turns():
    record = read_record(fixture("messages")[0], FORMATS["messages"], SOURCE)
    roles = [message.role for message in record.messages]
    assert roles == ["system", "user", "assistant", "user"]
    whole = demonstration(record)
    assert whole.turns == (*record.messages, Message("assistant", "Ten."))
    assert whole.prompt == transcript(record.messages)
    assert prompt(record).messages == record.messages
    beside = read({"messages": [{"role": "user", "content": "a"}], "completion": "b", "label": True}, "kto")
    assert (len(beside.messages), beside.answers) == (1, (Answer(" b", 1.0),)), "the column, not the last message"
    # An answer that begins with a blank itself keeps it.
    blank = read({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b"}]}, "messages")
    assert blank.answers == (Answer("  b"),)
    whole = demonstration(blank)
    assert whole.turns[-1].content == " b"


USER, ASKED = ({"role": "user", "content": text} for text in ("Hi", "How?"))
REPLY, OTHER = ({"role": "assistant", "content": text} for text in ("So.", "No."))
SYSTEM = {"role": "system", "content": "Be kind."}
FULL = {"role": None, "content": None, "from": "gpt", "value": "So."}
LONG = "u:Hi a:No. u:How?"


@pytest.mark.parametrize(
    ("values", "turns"),
    [
        # A prompt beside whole conversations is a copy of what they begin with ...
        ({"prompt": "How? ", "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]}, "u:How?"),
        ({"prompt": [ASKED], "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]}, "u:How?"),
        ({"prompt": [SYSTEM, ASKED], "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]}, "s:Be kind. u:How?"),
        (
            {"prompt": "How?", "system": "Be kind.", "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]},
            "s:Be kind. u:How?",
        ),
        ({"system": "Be kind.", "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]}, "s:Be kind. u:How?"),
        ({"prompt": [USER], "chosen": [USER, OTHER, ASKED, REPLY], "rejected": [USER, OTHER, ASKED, OTHER]}, LONG),
        ({"prompt": "", "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]}, "u:How?"),
        # ... or what they lack.
        ({"prompt": "How?", "chosen": [SYSTEM, REPLY], "rejected": [SYSTEM, OTHER]}, "s:Be kind. u:How?"),
        ({"prompt": "How?", "chosen": [REPLY], "rejected": [OTHER]}, "u:How?"),
        # A table's column of messages has all keys in each.
        ({"prompt": "How?", "chosen": [FULL], "rejected": [OTHER]}, "u:How?"),
        ({"prompt": "How?", "chosen": REPLY, "rejected": OTHER}, "u:How?"),
        ({"question": "How?", "system": "Be kind.", "chosen": "So.", "rejected": "No."}, "s:Be kind. u:How?"),
        ({"question": "How?", "system": "", "chosen": "So.", "rejected": "No."}, "u:How?"),
        ({"messages": [SYSTEM, ASKED], "chosen": "So.", "rejected": "No."}, "s:Be kind. u:How?"),
        ({"messages": [USER, REPLY], "chosen": [ASKED, REPLY], "rejected": [ASKED, OTHER]}, "u:How?"),
        ({"prompt": [USER, OTHER, ASKED], "chosen": [REPLY], "rejected": "No."}, LONG),
    ],
)
def test_prompts_of_conversations_that_are_compared(values, turns):
    assert recognise(Row(values, "file:1"), SOURCE, "rm pairs").name == "preference"
    record = read(values, "preference")
    assert " ".join(f"{m.role[0]}:{m.content}" for m in record.messages) == turns
    assert record.answers == (Answer(" So."), Answer(" No."))
    assert record.prompt == transcript(record.messages)


# ------------------------------------------------------------------------------------ scores and rankings


def test_weights_make_one_score_of_several_grades():
    record = read(fixture("helpsteer")[0].values, "helpsteer", source(weights={"helpfulness": 0.5, "verbosity": -1.5}))
    assert record.answers == (Answer("Pressed wool.", -1.0),)
    ratings = source(weights={"helpfulness": 1.0, "honesty": 0.5})
    record = read(fixture("ultrafeedback")[0].values, "ultrafeedback", ratings)
    # The second has no rating for honesty, and so no score.
    assert [answer.score for answer in record.answers] == [4.5, None, 5.5]
    assert seen(record)[1:3] == ("Onward, gently.", ("Onward, gently.", "Go."))
    row = {"prompt": "a", "response": "b", "clear": 2, "marks": {"true": "3"}}
    weighed = source(weights={"clear": 1.0, "marks.true": 2.0})
    assert recognise(Row(row, "file:1"), weighed, "rm scores").name == "scored"
    assert recognise(Row(row, "file:1"), weighed, "sft").name == "scored"
    assert read(row, "scored", weighed).scores == (8.0,)
    lists = {"prompt": "a", "responses": ["b", "c"], "clear": [0, 1], "kind": [5, 1]}
    weighed = source(weights={"clear": 3.0, "kind": 1.0})
    assert recognise(Row(lists, "file:1"), weighed, "rm pairs").name == "ranking"
    assert [answer.score for answer in read(lists, "ranking", weighed).answers] == [5.0, 4.0]


def test_the_margin_is_a_column_of_the_row():
    record = read_record(fixture("shp")[0], FORMATS["shp"], SOURCE)
    order = ranking(record, margin_column="score_ratio")
    assert order.margin == 3.0
    assert order.texts == ("About a month in the fridge.", "No idea.")
    assert ranking(record).margin == 0.0
    with pytest.raises(DataError, match=r"^shp.jsonl:1: `gap` is null, it must be a number"):
        ranking(record, margin_column="gap")
    spec = StageRows(Rows(train=[SOURCE]), "rm pairs", margin_column="gap")
    assert spec.view(record, "test").margin == 0.0, "held-out rows need none"
    with pytest.raises(DataError, match="`gap` is null"):
        spec.view(record, "train")
    assert spec.view(records_of([None]), "test") == Skipped("no answer is better than another")


def records_of(scores, texts=None):
    texts = texts or [f"answer {n}" for n in range(len(scores))]
    return Record("p", "file:1", tuple(map(Answer, texts, scores)))


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.none() | st.sampled_from([0.0, 1.0, 2.0])), max_size=6))
def test_a_ranking_tells_every_two_of_its_answers_apart(answers):
    record = records_of([score for _, score in answers], [text for text, _ in answers])
    best = {}
    for text, score in answers:
        if score is not None:
            best[text] = max(score, best.get(text, -math.inf))
    order = ranking(record)
    if len(set(best.values())) < 2:
        assert order is None
        return
    kept = [best[text] for text in order.texts]
    # One answer for each score that is the best of its text; strictly falling; the first of equals stays.
    assert kept == sorted(set(best.values()), reverse=True)
    for text in order.texts:
        equals = [t for t, score in answers if score == best[text] == best[t]]
        assert text == equals[0]


@given(st.lists(st.sampled_from("abcd"), max_size=6))
def test_a_ranked_row_keeps_the_best_place_of_a_text(texts):
    record = Record("p", "file:1", tuple(map(Answer, texts)), ranked=True)
    order = ranking(record)
    expected = tuple(dict.fromkeys(texts))
    assert (order.texts if order else ()) == (expected if len(expected) > 1 else ())


def test_a_score_of_zero_is_not_a_missing_score():
    assert scored(records_of([0.0, None, 0])) == records_of([0.0, 0], ["answer 0", "answer 2"])
    best = demonstration(records_of([-1.0, None, 0.0]))
    assert best == Record("p", "file:1", (Answer("answer 2"),))


@pytest.mark.parametrize("score", ["good", math.nan, "nan", math.inf, True, [1], 10**400, "9" * 400])
def test_invalid_scores_are_refused_and_missing_ones_are_none(score):
    with pytest.raises(DataError, match=r"^file:3: `score` is .{1,50}, it must be a number$"):
        read({"prompt": "a", "response": "b", "score": score}, "scored")
    for number in (2.5, " 2.5 ", Decimal("2.50")):
        assert read({"prompt": "a", "response": "b", "score": number}, "scored").scores == (2.5,)
    for missing in (None, "", " "):
        assert scored(read({"prompt": "a", "response": "b", "score": missing}, "scored")) is None


def test_pairing_of_labels_is_frozen():
    """Frozen values: the film-review task depends on the order of the draws."""
    scores = [float(i % 2) for i in range(9)]
    assert pairs_of_labels(scores, torch.Generator().manual_seed(0)) == [(1, 8), (3, 0), (5, 2), (7, 6)]
    # Higher is above the middle of the extremes, and the lower ones are used again when there are too few.
    assert pairs_of_labels([1, 5, 4, 3.5, 3], torch.Generator().manual_seed(1)) == [(1, 4), (2, 0), (3, 4)]
    for scores in ([1.0, 1.0], []):
        with pytest.raises(DataError, match="pairs need two different labels"):
            pairs_of_labels(scores, torch.Generator())


TURNS = st.lists(st.sampled_from([ASSISTANT, ASSISTANT[:-1], "\n\nHuman:", ":", " a", "b"]), max_size=6).map("".join)


@given(TURNS, TURNS, TURNS)
def test_transcripts_are_cut_as_by_comparing_characters(shared, one, two):
    common = 0
    for a, b in zip(shared + one, shared + two, strict=False):
        if a != b:
            break
        common += 1
    cut = (shared + one)[:common].rfind(ASSISTANT)
    assert end_of_prompt(shared + one, shared + two) == (cut + len(ASSISTANT) if cut >= 0 else 0)


# ------------------------------------------------------------------------------------------ the key map


@pytest.mark.parametrize("name", EXPECTED)
def test_mapped_columns_give_the_same_record(name):
    """Every column of a fixture under another name, some within mappings, gives the same record."""
    rows = fixture(name)
    read_columns = {key for row in rows for key in row.values if key in FORMATS[name].columns}
    for row in rows:
        columns = [key for key in row.values if key in read_columns]
        inside = {f"deep {key}": {"x": {"y": row.values[key]}} for key in columns[::2]}
        beside = {f"a.{key}": row.values[key] for key in columns[1::2]}
        keys = {key: f"deep {key}.x.y" for key in columns[::2]} | {key: f"a.{key}" for key in columns[1::2]}
        moved = Row(inside | beside, row.where)
        given = source(keys=keys, format=name)
        record = read_record(moved, FORMATS[name], given)
        plain = read_record(row, FORMATS[name], SOURCE)
        assert (record.prompt, record.answers, record.key, record.messages, record.ranked, record.undesirable) == (
            (plain.prompt, plain.answers, plain.key, plain.messages, plain.ranked, plain.undesirable)
        )
        assert record.columns is moved.values


def test_a_renamed_column_is_not_read_under_its_old_name():
    given = source(keys={"prompt": "instruction", "response": "output"})
    row = Row({"instruction": "Why?", "output": "So."}, "file:1")
    assert recognise(row, given, "sft").name == "prompt_response"
    # Dolly's columns in Alpaca's template.
    given = source(format="alpaca", keys={"input": "context", "output": "response"})
    row = Row({"instruction": "Who?", "context": "Ann came.", "response": "Ann."}, "file:1")
    assert seen(read_record(row, recognise(row, given, "sft"), given))[1] == "Ann."


@pytest.mark.parametrize(
    "path", ["reply", "out.reply", "out.text.b", "out.none.b", "out.list.b", "out.list.1", "out.list.-1", "prompt.", ""]
)
def test_a_mapped_column_that_is_missing_is_named(path):
    given = source(keys={"response": path})
    row = Row({"prompt": "a", "out": {"text": "b", "none": None, "list": ["b"]}}, "file:48211")
    message = rf"^file:48211: found the keys prompt, out, but not `{path}`, which `keys` maps to `response`$"
    for act in (lambda: recognise(row, given, "sft"), lambda: read_record(row, FORMATS["prompt_response"], given)):
        with pytest.raises(DataError, match=message):
            act()


# --------------------------------------------------------------------------------------------- refusals


def test_unknown_keys_are_refused():
    takes = {
        "sft": ["prompt + response", "messages", "chosen + rejected", "text"],
        "rm pairs": ["prompt + chosen + rejected", "chosen + rejected", "text + label", "prompt + answers"],
        "rm scores": ["prompt + response + score", "text + label", "response + helpfulness"],
        "ppo": ["prompt", "text", "messages"],
    }
    for purpose in ALL:
        with pytest.raises(DataError) as error:
            recognise(Row({"foo": 1, "bar": 2}, "file:1"), SOURCE, purpose)
        said = str(error.value)
        assert said.startswith(f"file:1: found the keys foo, bar, {purpose} needs rows with: ")
        listed = said.partition(": ")[2].partition(": ")[2].partition(". Rename")[0].split("; ")
        assert set(takes[purpose]) <= set(listed)
        assert len(listed) == len(set(listed))
        assert len(said) < 500
    # Dolly's `context` is a passage, and no prompt.
    for values, found in (
        ({}, r"\(none\)"),
        (dict.fromkeys(("instruction", "context", "response"), "a"), "instruction"),
    ):
        with pytest.raises(DataError, match=f"found the keys {found}"):
            recognise(Row(values, "file:1"), SOURCE, "sft")


@pytest.mark.parametrize(
    ("given", "purpose", "message"),
    [
        (source(format="hh"), "rm scores", "the format is hh, rm scores needs rows with"),
        (source(format="scored"), "rm pairs", "the format is scored, rm pairs needs rows with"),
        (source(format="ranking"), "rm scores", "the format is ranking, rm scores needs rows with"),
        (source(format="preference", weights={"a": 1}), "sft", "preference rows have no grades"),
        (source(weights={"a": 1}), "sft", r"sft with the columns of `weights` \(a\) needs rows with"),
        (source(keys={"respones": "response"}), "sft", "`keys` maps `respones`, which is not a column of the"),
    ],
)
def test_settings_that_do_not_apply_are_refused(given, purpose, message):
    row = Row({"prompt": "a", "question": "c", "response": "b", "answer": "d"}, "file:1")
    with pytest.raises(DataError, match=rf"^file:1: (found .*, )?{message}"):
        recognise(row, given, purpose)


def test_a_list_with_scores_serves_both_losses():
    row = Row({"prompt": "a", "responses": ["b", "c"], "scores": [1, 2]}, "file:1")
    for name in ("ranking", "scored"):
        for purpose in ALL:
            assert recognise(row, source(format=name), purpose).name == name
        record = read_record(row, FORMATS[name], SOURCE)
        assert seen(record) == ("a", "c", ("c", "b"), [("b", 1.0), ("c", 2.0)])


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize(("name", "key"), NEEDED)
def test_a_row_without_a_column_is_named(name, key):
    values = without(fixture(name)[0].values, key)
    with pytest.raises(DataError, match=r"^file:3: ") as error:
        read(values, name)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    if (name, key) != ("preference", "prompt"):
        assert "every row needs" in str(error.value) or "but not `" in str(error.value)


LONE = "half \ud800"
REFUSED = [
    ("prompt_response", {"prompt": "a", "response": LONE}, "`response` contains a lone surrogate (half a character)"),
    ("prompt_response", {"prompt": "a", "response": " "}, "`response` is empty"),
    ("prompt_response", {"prompt": "a", "response": 3}, "`response` is a number, it must be text or messages"),
    ("prompt_response", {"prompt": None, "response": "a"}, "`prompt` is null, it must be text"),
    ("prompt_response", {"prompt": [USER, REPLY], "response": "a"}, "`prompt` ends with the assistant's message"),
    ("prompt", {"prompt": "\n"}, "`prompt` is empty"),
    ("labelled", {"text": "a", "score": "good"}, "`score` is 'good', it must be a number"),
    ("messages", {"messages": []}, "`messages` must be a non-empty list of messages"),
    ("messages", {"messages": [{"role": "user"}]}, "message 1 of `messages` needs a text `role`"),
    ("messages", {"messages": [USER, {"role": "tool", "content": "a"}]}, "message 2 of `messages` has role 'tool'"),
    ("messages", {"messages": [USER, {"role": "assistant", "content": ""}]}, "must be the assistant's and not empty"),
    ("messages", {"messages": [SYSTEM]}, "the last message of `messages` must be"),
    ("messages", {"messages": [REPLY]}, "has no prompt, there must be a message before the assistant's"),
    ("messages", {"messages": [{"role": "user", "content": LONE}, REPLY]}, "message 1 of `messages` contains a lone"),
    ("messages", {"messages": [USER, ["a"]]}, "message 2 of `messages` needs"),
    ("alpaca", {"instruction": "a", "input": ["b"], "output": "c"}, "`input` is a list, it must be text"),
    ("preference", {"chosen": "a", "rejected": "b"}, "the answers have no prompt"),
    ("preference", {"prompt": "", "chosen": REPLY, "rejected": OTHER}, "the answers have no prompt"),
    ("kto", {"prompt": "a", "completion": {"role": "assistant", "content": " "}, "label": True}, "and not empty"),
    (
        "preference",
        {"prompt": "a", "chosen": [USER, REPLY], "rejected": [ASKED, OTHER]},
        "the messages before the answers differ",
    ),
    (
        "preference",
        {"prompt": "a", "chosen": [USER, REPLY], "rejected": "No."},
        "the messages before the answers differ",
    ),
    ("preference", {"prompt": "a", "chosen": [USER, REPLY], "rejected": [USER, OTHER]}, "the prompt is not among the"),
    ("preference", {"prompt": "a", "chosen": [USER], "rejected": [ASKED]}, "the last message of `chosen` must be"),
    ("preference", {"chosen": [USER, REPLY, OTHER], "rejected": [USER, REPLY, REPLY]}, "ends with the assistant's"),
    (
        "hh",
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: b"},
        "no common beginning",
    ),
    ("shp", {"history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": 2}, "`labels` is 2, it must be one of"),
    ("summarize", {"info": [], "summaries": [], "choice": 0}, "`info` is a list, it must be a mapping"),
    ("summarize", {"info": {"post": "a"}, "summaries": [1], "choice": 0}, "`summaries` has 1 items, it must have two"),
    ("summarize", {"info": {"post": "a"}, "summaries": [1, {"text": "b"}], "choice": 0}, "`text` of summary 0"),
    ("webgpt", {"question": {}, "answer_0": "a", "answer_1": "b"}, "`question` is null"),
    ("pandalm", {"instruction": "a", "response1": "b", "response2": "c", "vote": 3}, "`vote` is 3, it must be one of"),
    ("pandalm", {"instruction": "a", "response1": "b", "response2": "c"}, "every row needs one of vote, annotator1"),
    ("ultrafeedback", {"instruction": "a", "completions": [{"response": "b"}]}, "completion 1 has no `overall_score`"),
    ("ultrafeedback", {"instruction": "a", "completions": ["b"]}, "`response` of completion 1 is null"),
    ("kto", {"prompt": "a", "completion": "b", "label": "perhaps"}, "`label` is 'perhaps'"),
    ("kto", {"messages": [USER], "label": True}, "the label needs an answer"),
    ("ranking", {"prompt": "a", "answers": ["b"]}, "has 1 answers, a ranking needs at least two"),
    ("ranking", {"prompt": "a", "answers": ["b", ""]}, "`answers 2` is empty"),
    ("ranking", {"prompt": "a", "answers": ["b", "c"], "scores": [1]}, "`scores` has 1 values, it must have one for"),
]


@pytest.mark.parametrize(("name", "values", "message"), REFUSED)
def test_invalid_rows_are_refused(name, values, message):
    with pytest.raises(DataError) as error:
        read(values, name)
    assert str(error.value).startswith("file:3: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_blank_input_counts_as_missing():
    for blank in (" ", "\n", None, math.nan):
        assert read({"instruction": "Why?", "input": blank}, "instruction").prompt == "Why?"
        assert read({"instruction": "Why?", "input": blank}, "alpaca").prompt == KETTLE.format("Why?")


# ---------------------------------------------------------------------------------------- the real data


def real(path):
    file = DATA / path
    if not file.exists():
        pytest.skip(f"{file} is not here; RLHF_REAL_DATA names its folder")
    if path.endswith(".json"):
        values = json.loads(file.read_text(encoding="utf-8"))
    else:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            values = [json.loads(line) for line in lines]
    return [Row(value, f"{path} row {n}") for n, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("path", "purpose", "name", "counts"),
    [
        ("hh-rlhf/helpful-base-test.jsonl.gz", "rm pairs", "hh", (2354, 2352, 0)),
        ("pandalm/pairs.jsonl.gz", "rm pairs", "preference", (842, 842, 0)),
        ("mt-bench-scores/scored.jsonl.gz", "rm scores", "scored", (640, 0, 640)),
        ("mt-bench-scores/scored.jsonl.gz", "sft", "prompt_response", (640, 0, 0)),
        ("sentence-polarity/sentences.jsonl.gz", "rm scores", "labelled", (10662, 0, 10662)),
        ("sentence-polarity/sentences.jsonl.gz", "sft", "text", (10662, 0, 0)),
        ("gsm8k/test.jsonl.gz", "ppo", "prompt_response", (1319, 0, 0)),
        ("formats/alpaca_en_demo.json", "sft", "alpaca", (999, 0, 0)),
        ("formats/dpo_en_demo.json", "rm pairs", "preference", (300, 300, 0)),
    ],
)
def test_published_data(path, purpose, name, counts):
    """The format, and the number of rows that give a demonstration, a ranking and a score."""
    rows = real(path)
    format_ = recognise(rows[0], SOURCE, purpose)
    assert format_.name == name
    records = [read_record(row, format_, SOURCE) for row in rows]
    assert all(prompt(record).prompt == record.prompt for record in records)
    views = [demonstration, ranking, scored]
    assert tuple(sum(bool(view(record)) for record in records) for view in views) == counts


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        ({"q": "1+1=", "out": {"text": 3}}, "prompt_response", "`out.text` is a number, it must be text"),
        ({"q": None, "out": {"text": "a"}}, "prompt_response", "`q` is null, it must be text"),
        ({"q": "a", "out": {"text": "b"}}, "preference", "found the keys q, out, every row needs `rejected`"),
        ({"q": "a", "out": {"text": ["b", " "]}}, "ranking", "`out.text 2` is empty"),
    ],
)
def test_a_message_about_mapped_columns_names_those_of_the_file(values, name, message):
    answers = {"preference": "chosen", "ranking": "answers"}.get(name, "response")
    given = source(keys={"prompt": "q", answers: "out.text"})
    with pytest.raises(DataError, match=message):
        read(values, name, given)


# ----------------------------------------------------------------------------------------- mutated rows


WHERE = "file.jsonl:48211"
LINES = [(path.stem, line) for path in FIXTURES.iterdir() for line in path.read_text(encoding="utf-8").splitlines()]
NAMES = sorted({name for format_ in FORMATS.values() for name in format_.columns} | {"gap", "a\nb", "\ud800", "", "x"})


def nested(depth):
    value = "bottom"
    for level in range(depth):
        value = [value] if level % 2 else {"role": value, "a": 1}
    return value


STRANGE = [
    None, 0, 1.5, True, [], {}, b"bytes", ("a",), {"a"}, object(), "1", " 2.5 ", "0x1f", "٣", "nan", math.nan, math.inf,
    10**400, 1e308, "", " ", "\n", [None], [[]], [{}], [""], "\u3000", "\ud800", "a\udfffb", ["\udc80"], "a\0b",
    "\x1b[31m", "a\u2028b\rc", "é" * 1_000_000, [None] * 100_000, nested(50), lambda: nested(5_000),
    [{"role": "user", "content": "\ud83d"}], [{"role": "tool", "content": "a"}], [{"from": "human", "value": ""}],
    [{"role": "x" * 10_000, "content": "a"}], {"role": "user", "content": "Hi."}, {"who": "a", "what": 3},
    [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "So."}], "\n\nHuman: a\n\nAssistant: b",
]  # fmt: skip


def places(value, depth=0):
    """Every (container, key) near the top of a row."""
    if depth > 4 or not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(min(len(value), 20)))
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key], depth + 1)]


def outcome(values, source, purpose):
    """The result for a row: `seen`, or where it was refused. Raises AssertionError for anything else."""
    row, start, stage = Row(values, WHERE), time.process_time(), "recognise"
    try:
        format_ = recognise(row, source, purpose)
        stage = "read"
        record = read_record(row, format_, source, prompt_words=3)
        stage = "view"
        check_views(record)
        stage = "seen"
    except DataError as error:
        said = str(error)
        assert said.startswith(f"{WHERE}: "), said[:200]
        assert len(said) <= 500
        assert said.isprintable(), ascii(said)
    assert time.process_time() - start < 5
    return stage


def check_views(record):
    """Every text can be written, every score is a number, and each stage sees answers of the row."""
    "".join((record.prompt, record.key, *record.texts, *(message.content for message in record.messages))).encode()
    assert all(record.texts)
    assert all(map(math.isfinite, record.scores))
    assert not record.messages or record.messages[-1].role != "assistant"
    best, order, graded = demonstration(record), ranking(record), scored(record)
    assert (best is None) == (not record.answers or record.undesirable)
    assert order is None or best is None or order.response == best.response
    if graded is not None and len({*graded.scores}) > 1:
        pairs_of_labels(graded.scores, torch.Generator())
    if "gap" in record.columns:
        ranking(record, margin_column="gap")
    prompt(record)


def test_mutated_rows_are_seen_or_refused_in_one_line():
    ends = Counter()
    kinds = st.sampled_from(["replaced", "replaced", "removed", "added", "renamed", "swapped"])
    changes = st.lists(
        st.tuples(st.integers(0, 999), kinds, st.sampled_from(STRANGE), st.sampled_from(NAMES)), min_size=1, max_size=3
    )
    keys = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([*NAMES, "a.b.c", "info.post", "."]), max_size=2)
    weights = st.dictionaries(st.sampled_from(["honesty", "score", "x\ny"]), st.sampled_from([0.0, -2.5, 1e300]))

    @settings(max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(sorted(LINES)),
        changes,
        st.sampled_from([None, None, "auto", "auto"]) | st.sampled_from(get_args(Format)),
        st.sampled_from(ALL),
        st.just({}) | keys,
        st.just({}) | weights,
    )
    def read(fixture, changed, given_format, purpose, mapped, weighed):
        name, line = fixture
        values = json.loads(line)
        for at, kind, strange, column in changed:
            inside = places(values) or [(values, "x")]
            made = strange() if callable(strange) else copy.deepcopy(strange)
            holder, key = inside[at % len(inside)]
            if kind == "removed" and key in (holder if isinstance(holder, dict) else range(len(holder))):
                del holder[key]
            elif kind == "renamed" and isinstance(holder, dict):
                holder[column] = holder.pop(key, None)
            elif kind == "swapped":
                other, there = inside[(7 * at + 3) % len(inside)]
                if other is not values or there in values:
                    with contextlib.suppress(RecursionError):  # the deepest value cannot be copied
                        holder[key], other[there] = copy.deepcopy(other[there]), "swapped"
            else:
                (values if kind == "added" else holder)[column if kind == "added" else key] = made
        extra = {"keys": mapped} if mapped else {"weights": weighed} if weighed else {}
        source = DataSource(path="file.jsonl", format=given_format or name, **extra)
        ends[outcome(values, source, purpose)] += 1

    read()
    assert min(ends[end] for end in ("recognise", "read", "seen")) >= 5, ends


def test_half_a_million_columns():
    values = dict.fromkeys(map(str, range(500_000)))
    plain = DataSource(path="file.jsonl")
    for purpose in ALL:
        assert outcome(values, plain, purpose) == "recognise"
    values |= {"prompt": "a", "response": "b", "label": True}
    assert outcome(values, plain, "sft") == "seen"
    assert outcome(values, DataSource(path="file.jsonl", format="pandalm"), "sft") == "read"
