"""Rows, formats, splits and the order of batches."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from rlhf_cli.config.schemas import Data, DataSource
from rlhf_cli.data import formats
from rlhf_cli.data.batches import chunks, stream
from rlhf_cli.data.sources import Row, in_part, read_rows
from rlhf_cli.data.split import read_split
from rlhf_cli.errors import DataError

ROWS = [{"prompt": f"question {i}", "response": f" answer {i}"} for i in range(10)]


def rows_of(*values: dict[str, Any]) -> list[Row]:
    return [Row(value, f"file:{i}") for i, value in enumerate(values, 1)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".json"):
        text = json.dumps(rows)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    elif path.name.endswith(".csv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(text, encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------ sources


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz"])
def test_every_file_type_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = read_rows(DataSource(path=str(write(tmp_path / name, ROWS))))
    assert [row.values for row in rows] == ROWS
    assert all(str(tmp_path / name) in row.where for row in rows)


def test_a_folder_is_read_file_by_file_and_limit_stops(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ROWS[5:])
    write(tmp_path / "a.jsonl", ROWS[:5])
    assert [row.values for row in read_rows(DataSource(path=str(tmp_path)))] == ROWS
    assert len(read_rows(DataSource(path=str(tmp_path), limit=3))) == 3


def test_the_line_of_a_row_counts_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n\n\n{"prompt": "c", "response": "d"}\n')
    assert [row.where for row in read_rows(DataSource(path=str(path)))] == [f"{path}:1", f"{path}:4"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"a": 1}', "a list of objects is needed"),
        ("a.json", b'{"a": 1}\n{"a": 2}', "Rename it to .jsonl"),
        ("a.jsonl", b'\xff\xfe{"a": 1}', "not UTF-8"),
        ("a.jsonl.gz", b"not gzip", "can't be read"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 500)[:60], "can't be read"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 500)[:30] + b"\xff" * 40, "can't be read"),
        ("a.csv", b"a,b\n1,2,3\n", "not as many cells"),
        ("a.parquet", b"nothing", "not Parquet"),
        ("a.jsonl", b"[" * 100_000, "not JSON"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_rows(DataSource(path=str(tmp_path / name)))
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------ formats


def test_hh_transcripts_are_split_at_the_last_assistant_of_what_they_share() -> None:
    prompt = "\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: A joke?\n\nAssistant:"
    row = {"chosen": prompt + " Knock knock.", "rejected": prompt + " Know none."}
    (pair,), kind = formats.preferences(rows_of(row), generator=torch.Generator())
    assert kind == "transcript pair"
    # The answers share " Kno", which stays with the answers.
    assert (pair.prompt, pair.chosen, pair.rejected) == (prompt, " Knock knock.", " Know none.")
    (demonstration,), _ = formats.demonstrations(rows_of(row))
    assert (demonstration.prompt, demonstration.response) == (prompt, " Knock knock.")
    (only,), _ = formats.prompts(rows_of(row))
    assert only.prompt == prompt


def test_transcripts_without_a_common_prompt_are_refused() -> None:
    row = {"chosen": "\n\nHuman: A\n\nAssistant: x", "rejected": "\n\nHuman: B\n\nAssistant: y"}
    with pytest.raises(DataError, match="no common beginning"):
        formats.preferences(rows_of(row), generator=torch.Generator())


def test_a_pair_of_equal_answers_is_no_preference() -> None:
    equal, good = ({"prompt": "a", "chosen": "b", "rejected": x} for x in ("b", "c"))
    pairs, _ = formats.preferences(rows_of(equal, good), generator=torch.Generator())
    assert [pair.rejected for pair in pairs] == ["c"]
    with pytest.raises(DataError, match="the same text in all 2 rows"):
        formats.preferences(rows_of(equal, equal), generator=torch.Generator())
    assert len(formats.demonstrations(rows_of(equal, good))[0]) == 2


def test_messages_keep_their_turns() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "See you"},
    ]
    (row,), kind = formats.demonstrations(rows_of({"messages": messages}))
    assert kind == "conversation"
    assert [m.role for m in row.messages] == [m["role"] for m in messages]
    assert row.prompt.endswith("\n\nHuman: Bye\n\nAssistant:")
    assert row.response == " See you"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "not a list"),
        ([{"role": "user"}], "message 1 needs"),
        ([{"role": "robot", "content": "a"}], "has role 'robot'"),
        ([{"role": "user", "content": "a"}], "must be the assistant's"),
    ],
)
def test_broken_messages(messages: list[dict[str, str]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        formats.demonstrations(rows_of({"messages": messages}))


def test_text_rows_give_their_first_words_as_the_prompt() -> None:
    (row,), _ = formats.demonstrations(rows_of({"text": " a slow  film , but good"}), prompt_words=3)
    assert (row.prompt, row.response) == (" a slow  film", " , but good")
    assert row.prompt + row.response == " a slow  film , but good"
    # A text of no more words than that has none to spare.
    (row,), _ = formats.demonstrations(rows_of({"text": "too short"}), prompt_words=3)
    assert (row.prompt, row.response) == ("", "too short")


def test_labels_become_pairs_and_scores() -> None:
    labelled = rows_of(*({"text": f"text {i}", "label": i % 2} for i in range(9)))
    pairs, kind = formats.preferences(labelled, generator=torch.Generator().manual_seed(0))
    assert kind == "labelled"
    assert [pair.chosen for pair in pairs] == [f"text {i}" for i in (1, 3, 5, 7)]
    assert {pair.rejected for pair in pairs} < {f"text {i}" for i in (0, 2, 4, 6, 8)}
    assert len({pair.rejected for pair in pairs}) == 4
    scores, _ = formats.scored(labelled)
    assert [row.score for row in scores] == [i % 2 for i in range(9)]
    with pytest.raises(DataError, match="pairs need two different"):
        formats.preferences(rows_of({"text": "a", "label": 1}), generator=torch.Generator())


def test_a_score_of_zero_is_a_score() -> None:
    rows, _ = formats.scored(rows_of({"prompt": "a", "response": "b", "score": 0.0}))
    assert rows[0].score == 0.0


@pytest.mark.parametrize("score", [None, "good", float("nan"), True, [1]])
def test_what_is_no_score(score: object) -> None:
    with pytest.raises(DataError, match="it must be a number"):
        formats.scored(rows_of({"prompt": "a", "response": "b", "score": score}))


def test_the_margin_column() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "how_much": 1.5}
    (pair,), _ = formats.preferences(rows_of(row), margin_column="how_much", generator=torch.Generator())
    assert pair.margin == 1.5
    with pytest.raises(DataError, match="`gap` is None"):
        formats.preferences(rows_of(row), margin_column="gap", generator=torch.Generator())


def test_half_a_character_is_refused() -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        formats.demonstrations(rows_of({"prompt": "a", "response": "\ud800"}))


# -------------------------------------------------------------------------------------------- split


def test_equal_prompts_are_on_one_side(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i % 50}", "response": f"r{i}"} for i in range(500)]
    path = str(write(tmp_path / "a.jsonl", rows))
    train, test = read_split(Data(train=path, test_fraction=0.2))
    assert len(train) + len(test) == 500
    assert 40 <= len(test) <= 180
    assert not {row.values["prompt"] for row in train} & {row.values["prompt"] for row in test}


def test_select_cuts_a_file_into_parts_without_loss(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "response": "r"} for i in range(200)]))
    parts = [
        [row for row in read_rows(DataSource(path=path)) if in_part(f"{k}/4", row.values["prompt"])] for k in range(4)
    ]
    assert sum(map(len, parts)) == 200
    assert all(30 <= len(part) <= 70 for part in parts)
    data = Data.model_validate({"train": {"path": path, "select": "0/4,1/4"}, "test": {"path": path, "select": "3/4"}})
    train, test = read_split(data)
    assert len(train) == len(parts[0]) + len(parts[1])
    assert len(test) == len(parts[3])


# ------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize(("rows", "batch"), [(10, 3), (7, 7), (5, 8), (12, 4)])
def test_every_row_once_an_epoch(rows: int, batch: int) -> None:
    epochs = 4
    order = [i for step in range(-(-rows * epochs // batch)) for i in stream(rows, batch, step, 0, "x")]
    for epoch in range(epochs):
        assert sorted(order[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert order[:rows] != order[rows : 2 * rows] or rows == 1


def test_the_order_depends_on_seed_and_purpose_alone() -> None:
    assert stream(50, 8, 3, 0, "a") == stream(50, 8, 3, 0, "a")
    assert stream(50, 8, 3, 0, "a") != stream(50, 8, 3, 1, "a")
    assert stream(50, 8, 3, 0, "a") != stream(50, 8, 3, 0, "b")


def test_chunks() -> None:
    assert [list(part) for part in chunks([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4], [5]]
    assert [list(part) for part in chunks([1, 2, 3], None)] == [[1, 2, 3]]
    assert list(chunks([], 2)) == []
