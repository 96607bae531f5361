"""Answers that were cut before their end: `ended: false` of `rlhf data generate`. No EOS follows them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_cli.cli import app
from rlhf_cli.commands.data_score import _Comparison
from rlhf_cli.config.data import Rows
from rlhf_cli.data.answers import answer_encoder
from rlhf_cli.data.encode import RowText
from rlhf_cli.data.formats import Purpose
from rlhf_cli.data.records import Answer, Message, Record
from rlhf_cli.data.stage_rows import StageRows
from support.rewards import CHAT
from support.tiny import read_jsonl, seen_of, training_examples, write_jsonl

ROWS: list[tuple[dict[str, Any], Purpose, list[bool]]] = [
    ({"prompt": "a", "response": " b", "ended": False}, "sft", [False]),
    ({"prompt": "a", "response": " b", "ended": True}, "sft", [True]),
    ({"prompt": "a", "response": " b"}, "sft", [True]),
    (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "ended": False},
        "sft",
        [False],
    ),
    ({"prompt": "a", "chosen": " b", "rejected": " c", "ended": [True, False]}, "rm pairs", [True, False]),
    # The better answer comes first, with its own flag.
    ({"prompt": "a", "responses": [" b", " c"], "scores": [0, 1], "ended": [True, False]}, "rm pairs", [False, True]),
    ({"prompt": "a", "responses": [" b", " c"], "scores": [0, 1], "ended": [True, False]}, "rm scores", [True, False]),
    # A column with another meaning.
    ({"prompt": "a", "response": " b", "ended": "2020"}, "sft", [True]),
    ({"prompt": "a", "chosen": " b", "rejected": " c", "ended": [False]}, "rm pairs", [True, True]),
]


@pytest.mark.parametrize(("values", "purpose", "ended"), ROWS)
def test_a_row_says_which_of_its_answers_ended(values: dict[str, Any], purpose: Purpose, ended: list[bool]) -> None:
    assert [answer.ended for answer in seen_of(values, purpose).answers] == ended


@pytest.mark.parametrize("learn_all", [False, True])
def test_sft_learns_no_end_behind_a_cut_answer(tokenizer: Any, learn_all: bool) -> None:
    rows = [
        Record("please help", "row", (Answer(" we will"),)),
        Record("please help", "row", (Answer(" we will", ended=False),)),
    ]
    whole, cut = training_examples(tokenizer, rows, None, learn_all=learn_all)
    assert whole.ids == [*cut.ids, tokenizer.eos_token_id]
    assert whole.loss_mask == [*cut.loss_mask, True]


def test_no_token_predicts_the_first_one(tokenizer: Any) -> None:
    (example,) = training_examples(tokenizer, [Record("please help", "row", (Answer(" we will"),))], learn_all=True)
    assert example.loss_mask == [False] + [True] * (len(example.ids) - 1)


@pytest.mark.parametrize("template", [CHAT, CHAT.replace("m['content']", "(m['content'] | trim)")])
def test_a_cut_turn_of_a_conversation_ends_with_its_text(tokenizer: Any, template: str) -> None:
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = template
    turns = [("user", "please"), ("assistant", "we will"), ("user", "today"), ("assistant", "the lamp is")]
    messages = tuple(Message(*turn) for turn in turns)
    rows = [
        Record("", "row", (Answer(" the lamp is", ended=ended),), messages=messages[:-1]) for ended in (True, False)
    ]
    (whole, whole_mask), (cut, cut_mask) = RowText(chat).answer_ids(rows)
    assert whole == [*cut, chat.eos_token_id]
    assert whole_mask == [*cut_mask, True]
    assert cut.count(chat.eos_token_id) == 3, "those of the turns before"


@pytest.mark.parametrize("reads_last_token", [True, False])
def test_a_reward_model_reads_a_cut_answer_without_eos(tokenizer: Any, reads_last_token: bool) -> None:
    """As PPO scores it. An encoder model reads whole texts without EOS anyway."""
    seen = seen_of({"prompt": "a", "chosen": " b", "rejected": " c", "ended": [True, False]}, "rm pairs")
    rows = StageRows(Rows.model_validate({"train": "x"}), "rm pairs")
    encoder = answer_encoder(tokenizer, rows, reads_last_token=reads_last_token)
    (item,) = encoder.encode([seen])
    chosen, rejected = item.answers
    eos = tokenizer.eos_token_id
    assert (chosen[-1] == eos, rejected[-1] == eos) == (reads_last_token, False)


def rlhf(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("row", "for_", "written"),
    [
        ({"prompt": "a", "response": " b", "ended": False}, "sft", [False]),
        ({"prompt": "a", "responses": [" b", " c"], "scores": [0, 1], "ended": [True, False]}, "sft", [False]),
        ({"prompt": "a", "responses": [" b", " c"], "scores": [0, 1], "ended": [True, False]}, "rm", [[False, True]]),
        (
            {"prompt": "a", "responses": [" b", " c"], "scores": [0, 1], "ended": [True, False]},
            "rm-scores",
            [True, False],
        ),
        ({"prompt": "a", "response": " b", "ended": "2020"}, "sft", [None]),
    ],
)
def test_convert_keeps_which_answers_ended(tmp_path: Path, row: dict[str, Any], for_: str, written: list[Any]) -> None:
    path, out = write_jsonl(tmp_path / "rows.jsonl", [row]), tmp_path / "out.jsonl"
    output = rlhf("convert", path, "--for", for_, "--out", out)
    assert [line.get("ended") for line in read_jsonl(out)] == written
    assert ("columns not copied: ended" in output) == (written == [None])


def test_a_comparison_by_a_judge_puts_the_flags_in_the_order_of_the_answers() -> None:
    columns = {"prompt": "a", "responses": [" b", " c"], "scores": [None, None], "ended": [True, False]}
    record = Record("a", "file:1", (Answer(" b"), Answer(" c", ended=False)), "a", columns=columns)
    row = _Comparison("{prompt}{a}{b}", "drop", "judge").outcome(record, ["second", "first"])
    assert isinstance(row, dict), row
    assert (row["chosen"], row["rejected"], row["ended"]) == (" c", " b", [False, True])
    assert "ended_before" not in json.dumps(row)
