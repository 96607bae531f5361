"""Mutated rows: each is read and seen by every stage, or refused in one readable line that names the row.

    PYTHONPATH=.:tests python tests/data/test_fuzz_rows.py NUMBER     run the case with this number and print its result

A case depends on its number only, so that a failing one can be run alone.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections import Counter
from typing import Any, get_args

import pytest
import torch

from rlhf_cli.config.data import DataSource, Format
from rlhf_cli.data.formats import ALL, FORMATS, Purpose, read_record, recognise
from rlhf_cli.data.records import Record
from rlhf_cli.data.rows import Row
from rlhf_cli.data.views import demonstration, pairs_of_labels, prompt, ranking, scored
from rlhf_cli.errors import DataError
from support.paths import TESTS

FIXTURES = TESTS / "fixtures" / "formats"
WHERE = "file.jsonl:48211"
CASES = 8_000
LONGEST_LINE = 500
SECONDS = 5.0
NAMES = sorted({name for format_ in FORMATS.values() for name in format_.columns} | {"scores", "gap", "weird"})


# Replacement values. Each case builds its own, because it may change them.
STRANGE: dict[str, Any] = {
    "null": lambda _: None,
    "wrong type": lambda draw: draw.choice([0, 1.5, True, False, [], {}, b"bytes", ("a",), {"a"}, object()]),
    "number as text": lambda draw: draw.choice(["1", " 2.5 ", "1e3", "0x1f", "1_0", "٣", "-0", "1,5", "yes", "nan"]),
    "not finite": lambda draw: draw.choice([math.nan, math.inf, -math.inf, 10**400, -(10**5000), 1e308]),
    "empty": lambda draw: draw.choice(["", " ", "\n", [], {}, [None], [[]], [{}], [""], "\u3000"]),
    "lone surrogate": lambda draw: draw.choice(
        ["\ud800", "a\udfffb", ["\udc80"], [{"role": "user", "content": "\ud83d"}]]
    ),
    "NUL": lambda draw: draw.choice(["\0", "a\0b", ["\0", "b"], "\x1b[31m", "a\u2028b\rc"]),
    "huge text": lambda draw: draw.choice("ab \u00e9\n\ud801") * draw.choice([10_000, 1_000_000]),
    "huge list": lambda draw: [draw.choice([None, 1, "a", {}, []])] * 100_000,
    "deep": lambda draw: nested(draw.choice([50, 5_000]), draw.choice(["list", "mapping", "both"])),
    "messages": lambda draw: [some_message(draw) for _ in range(draw.randrange(4))],
    "one message": lambda draw: some_message(draw),
    "another column": lambda _: "\n\nHuman: a\n\nAssistant: b",
}


MUTATIONS = (*STRANGE, "removed", "added", "many columns", "swapped", "renamed")


def nested(depth: int, kind: str) -> Any:
    value: Any = "bottom"
    for level in range(depth):
        is_list = kind == "list" or (kind == "both" and level % 2)
        value = [value] if is_list else {"role": value, "a": 1}
    return value


def some_message(draw: random.Random) -> Any:
    roles = ["user", "assistant", "system", "human", "gpt"] * 4
    roles += ["tool", "function", "", "\ud800", None, 3, "x" * 10_000, "a\nb"]  # type: ignore[list-item]
    texts: list[Any] = ["Hi.", "", " ", None, 3, "\ud800", ["part"], "é" * 1000]
    names = draw.choice(
        [("role", "content"), ("from", "value"), ("from", "content"), ("role", "value"), ("who", "what")]
    )
    return dict(zip(names, (draw.choice(roles), draw.choice(["Hi."] * 12 + texts)), strict=True))


ROWS = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in FIXTURES.glob("*.jsonl")}


def case(number: int) -> tuple[dict[str, Any], DataSource, Purpose, list[str]]:
    """A row, its source, the stage that reads it, and the mutation."""
    draw = random.Random(f"row {number}")
    name = draw.choice(sorted(ROWS))
    values = json.loads(draw.choice(ROWS[name]))
    done = [draw.choice(MUTATIONS) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
    for kind in done:
        mutate(values, kind, draw)
    formats = ["auto"] * 4 + [name] * 4 + [draw.choice(get_args(Format))]
    settings: dict[str, Any] = {"format": draw.choice(formats)}
    if draw.random() < 0.1:
        paths = [*values, *(f"{column}.a" for column in list(values)[:9]), "info.post", "a.b.c", "", "."]
        settings["keys"] = {draw.choice([*NAMES, "typo"]): draw.choice(paths) for _ in range(draw.choice([1, 2]))}
    if draw.random() < 0.1:
        grades = ["helpfulness", "honesty", "scores", "score", "label", "info.post", "x\ny", "no" * 1000]
        weights = [0.0, 1.0, -2.5, 1e300, math.inf]
        settings["weights"] = {draw.choice(grades): draw.choice(weights) for _ in range(draw.choice([1, 2]))}
    purpose = draw.choice([*FORMATS[name].purposes * 2, *ALL])
    return values, DataSource(path="file.jsonl", **settings), purpose, done


def places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Every (container, key) near the top of a row."""
    if depth > 4 or not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(min(len(value), 20)))
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key], depth + 1)]


def mutate(values: dict[str, Any], kind: str, draw: random.Random) -> None:
    found = places(values)
    if not found or kind in ("added", "many columns"):
        names = [draw.choice([*NAMES, "a\nb", "\ud800", "x" * 5000, "", "annotator9", "label_" + "1" * 2000])]
        if kind == "many columns":
            names = [f"column {n}" for n in range(1000)]
        for name in names:
            values[name] = STRANGE[draw.choice(list(STRANGE))](draw) if len(names) == 1 else None
        return
    # A column of the row itself as often as something inside of one.
    top = [(values, key) for key in values]
    holder, key = draw.choice(draw.choice([top or found, found]))
    if kind == "removed":
        del holder[key]
    elif kind == "swapped":
        other, there = draw.choice(found)
        holder[key], other[there] = other[there], holder[key]
    elif kind == "renamed" and isinstance(holder, dict):
        holder[draw.choice([*NAMES, key.upper(), key + " "])] = holder.pop(key)
    elif kind in STRANGE:
        holder[key] = STRANGE[kind](draw)


# ----------------------------------------------------------------------------------------------- the check


def outcome(values: dict[str, Any], source: DataSource, purpose: Purpose) -> str:
    """The result for a row: `seen`, or where it was refused. Raises AssertionError for anything else."""
    row = Row(values, WHERE)
    start = time.process_time()
    stage = "recognise"
    try:
        format_ = recognise(row, source, purpose)
        stage = "read"
        record = read_record(row, format_, source, prompt_words=3)
        check_record(record, values)
        stage = "view"
        check_views(record)
        stage = "seen"
    except DataError as error:
        check_message(str(error))
    assert time.process_time() - start < SECONDS
    return stage


def check_message(said: str) -> None:
    assert said.startswith(f"{WHERE}: "), said[:200]
    assert len(said) <= LONGEST_LINE, len(said)
    assert said.isprintable(), ascii(said)


def check_record(record: Record, values: dict[str, Any]) -> None:
    assert record.where == WHERE
    assert record.columns is values
    for text in (record.prompt, record.key, *(a.text for a in record.answers), *(m.content for m in record.messages)):
        text.encode("utf-8")
    assert all(answer.text for answer in record.answers)
    assert all(answer.score is None or math.isfinite(answer.score) for answer in record.answers)
    assert {message.role for message in record.messages} <= {"system", "user", "assistant"}
    assert not record.messages or record.messages[-1].role != "assistant"


def check_views(record: Record) -> None:
    best, order, graded = demonstration(record), ranking(record), scored(record)
    texts = {answer.text for answer in record.answers}
    assert best is None or best.response in texts
    assert (best is None) == (not record.answers or record.undesirable)
    if order is not None:
        assert len(order.answers) == len(set(order.answers)) >= 2
        assert set(order.answers) <= texts
        assert best is None or order.chosen == best.response or record.undesirable
    assert all(row.response in texts and math.isfinite(row.score) for row in graded)
    if len(graded) > 1 and len({row.score for row in graded}) > 1:
        pairs_of_labels([row.score for row in graded], torch.Generator())
    if "gap" in record.columns:
        ranking(record, margin_column="gap")
    prompt(record)


# ------------------------------------------------------------------------------------------------- the tests


def test_mutated_rows_are_seen_or_refused_in_one_line() -> None:
    kinds: Counter[tuple[str, str]] = Counter()
    formats: Counter[str] = Counter()
    for number in range(CASES):
        values, source, purpose, done = case(number)
        try:
            result = outcome(values, source, purpose)
        except Exception as error:
            pytest.fail(f"case {number} ({', '.join(done)}): {type(error).__name__}: {ascii(error)[:500]}")
        kinds.update((kind, result) for kind in set(done))
        if result == "seen":
            formats[recognise(Row(values, WHERE), source, purpose).name] += 1
    assert set(formats) == set(FORMATS), "no format is so strict that every mutation of it is refused"
    for kind in MUTATIONS:
        assert kinds[kind, "seen"], kind
        assert kinds[kind, "read"] + kinds[kind, "recognise"], kind
    for stage in ("recognise", "read", "view", "seen"):
        assert sum(count for (_, result), count in kinds.items() if result == stage) >= 5, stage


def test_half_a_million_columns() -> None:
    values: dict[str, Any] = dict.fromkeys(map(str, range(500_000)))
    plain = DataSource(path="file.jsonl")
    for purpose in ALL:
        assert outcome(values, plain, purpose) == "recognise"
    values |= {"prompt": "a", "response": "b", "label": True}
    assert outcome(values, plain, "sft") == "seen"
    assert outcome(values, DataSource(path="file.jsonl", keys={"question": "prompt"}), "sft") == "seen"
    assert outcome(values, DataSource(path="file.jsonl", format="pandalm"), "sft") == "read"


if __name__ == "__main__":
    row, where_from, stage_, mutations = case(int(sys.argv[1]))
    print(mutations, stage_, where_from.model_dump(exclude_defaults=True), ascii(row)[:2000], sep="\n")
    print(outcome(row, where_from, stage_))
