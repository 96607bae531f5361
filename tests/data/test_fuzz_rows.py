"""Mutated rows: each is read and seen by every stage, or refused in one readable line that names the row."""

from __future__ import annotations

import copy
import json
import math
import time
from collections import Counter
from typing import Any, get_args

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_cli.config.data import DataSource, Format
from rlhf_cli.data.formats import ALL, FORMATS, Purpose, read_record, recognise
from rlhf_cli.data.records import Record, Row
from rlhf_cli.data.stage_rows import demonstration, pairs_of_labels, prompt, ranking, scored
from rlhf_cli.errors import DataError
from support.paths import TESTS

WHERE = "file.jsonl:48211"
FIXTURES = sorted((TESTS / "fixtures/formats").glob("*.jsonl"))
ROWS = [(path.stem, line) for path in FIXTURES for line in path.read_text(encoding="utf-8").splitlines()]
NAMES = sorted({name for format_ in FORMATS.values() for name in format_.columns} | {"gap", "a\nb", "\ud800", "", "x"})


def nested(depth: int) -> Any:
    value: Any = "bottom"
    for level in range(depth):
        value = [value] if level % 2 else {"role": value, "a": 1}
    return value


STRANGE: list[Any] = [
    None, 0, 1.5, True, [], {}, b"bytes", ("a",), {"a"}, object(), "1", " 2.5 ", "0x1f", "٣", "nan", math.nan, math.inf,
    10**400, 1e308, "", " ", "\n", [None], [[]], [{}], [""], "\u3000", "\ud800", "a\udfffb", ["\udc80"], "a\0b",
    "\x1b[31m", "a\u2028b\rc", "é" * 1_000_000, [None] * 100_000, nested(50), lambda: nested(5_000),
    [{"role": "user", "content": "\ud83d"}], [{"role": "tool", "content": "a"}], [{"from": "human", "value": ""}],
    [{"role": "x" * 10_000, "content": "a"}], {"role": "user", "content": "Hi."}, {"who": "a", "what": 3},
    [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "So."}], "\n\nHuman: a\n\nAssistant: b",
]  # fmt: skip


def places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Every (container, key) near the top of a row."""
    if depth > 4 or not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(min(len(value), 20)))
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key], depth + 1)]


def outcome(values: dict[str, Any], source: DataSource, purpose: Purpose) -> str:
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


def check_views(record: Record) -> None:
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


def test_mutated_rows_are_seen_or_refused_in_one_line() -> None:
    ends: Counter[str] = Counter()
    kinds = st.sampled_from(["replaced", "replaced", "removed", "added", "renamed", "swapped"])
    changes = st.lists(
        st.tuples(st.integers(0, 999), kinds, st.sampled_from(STRANGE), st.sampled_from(NAMES)), min_size=1, max_size=3
    )
    keys = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([*NAMES, "a.b.c", "info.post", "."]), max_size=2)
    weights = st.dictionaries(st.sampled_from(["honesty", "score", "x\ny"]), st.sampled_from([0.0, -2.5, 1e300]))

    @settings(max_examples=400, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(ROWS),
        changes,
        st.sampled_from([None, None, "auto", "auto"]) | st.sampled_from(get_args(Format)),
        st.sampled_from(ALL),
        st.just({}) | keys,
        st.just({}) | weights,
    )
    def read(fixture: Any, changed: Any, given_format: Any, purpose: Purpose, mapped: Any, weighed: Any) -> None:
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
                    holder[key], other[there] = copy.deepcopy(other[there]), "swapped"
            else:
                (values if kind == "added" else holder)[column if kind == "added" else key] = made
        extra = {"keys": mapped} if mapped else {"weights": weighed} if weighed else {}
        source = DataSource(path="file.jsonl", format=given_format or name, **extra)
        ends[outcome(values, source, purpose)] += 1

    read()
    assert min(ends[end] for end in ("recognise", "read", "seen")) >= 5, ends


def test_half_a_million_columns() -> None:
    values: dict[str, Any] = dict.fromkeys(map(str, range(500_000)))
    plain = DataSource(path="file.jsonl")
    for purpose in ALL:
        assert outcome(values, plain, purpose) == "recognise"
    values |= {"prompt": "a", "response": "b", "label": True}
    assert outcome(values, plain, "sft") == "seen"
    assert outcome(values, DataSource(path="file.jsonl", format="pandalm"), "sft") == "read"
