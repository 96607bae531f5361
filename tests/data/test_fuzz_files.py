"""Damaged files give rows, bad rows with a place and a reason, or one line of refusal; no other exception, no hang."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_cli.config.data import DataSource
from rlhf_cli.data.paths import SUFFIXES
from rlhf_cli.data.read import read_rows
from rlhf_cli.data.records import Row
from rlhf_cli.errors import DataError
from support.data_files import PACK, arrow_bytes, csv_bytes, parquet_bytes

ROWS: list[dict[str, Any]] = [
    {"prompt": f'quéstion "{i}",\n', "response": "ja 😀" * i, "n": i, "messages": [{"role": "user", "content": "x"}]}
    for i in range(12)
]
FLAT = [{key: str(value) for key, value in row.items()} for row in ROWS]
TABLE = pyarrow.Table.from_pylist(ROWS)
FILES: list[tuple[str, bytes]] = [
    (".jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()),
    (".json", json.dumps(ROWS, indent=1).encode()),
    (".csv", csv_bytes(FLAT)),
    (".txt", "".join(row["response"] + "\n" for row in ROWS).encode()),
    (".parquet", parquet_bytes(TABLE, "none", 5)),
    (".parquet", parquet_bytes(TABLE, rows=5)),
    (".arrow", arrow_bytes(TABLE, rows=5)),
    (".arrow", arrow_bytes(TABLE, pyarrow.ipc.new_file, 5)),
]
HARD = [
    b'"', b"\\", b"\\u", b"\\ud800", b"[", b"]", b"{", b"}", b",", b":", b"\n", b"\r", b"\t", b" ", b"\0", b"\xff",
    b"\xc3", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"NaN", b"1e999", b"tru", b"9" * 5000, b"[" * 10**5,
    b'{"a":' * 300, b'"x\ny"', b"\x1f\x8b", b"\xc2\xa0", b"\x1a", b"x" * 200_000, b"\n \n", b"",
]  # fmt: skip
"""Fragments that are hard for parsers."""
Damage = tuple[int, int, bytes]
"""A place, the number of bytes that go there, and those that come."""


def end_of(path: Path) -> str:
    """How reading a file ends; raises AssertionError for what no user should see."""
    kinds: set[str] = set()
    start = time.process_time()
    try:
        for row in itertools.islice(read_rows(DataSource(path=str(path))), 200_000):
            kinds.add("rows" if isinstance(row, Row) else "bad rows")
            place, said = row.where, "" if isinstance(row, Row) else row.reason
            assert place.startswith(str(path))
            assert isinstance(row, Row) or (place != str(path) and f"{place}{said}".isprintable() and len(said) < 500)
    except DataError as error:
        said = str(error)
        kinds.add("refused" if said.startswith(str(path)) and said.isprintable() and len(said) < 700 else said)
    assert time.process_time() - start < 5
    assert kinds
    return " and ".join(sorted(kinds))


def test_damaged_files_and_wrong_endings(tmp_path: Path) -> None:
    """Every file type with every compression, damaged before or after compression, now and then under another name."""
    ends: Counter[str] = Counter()
    damages = st.lists(
        st.tuples(st.integers(0, 10_000), st.sampled_from([0, 0, 1, 7, 10_000]), st.sampled_from(HARD) | st.binary()),
        max_size=4,
    )

    @settings(max_examples=500, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(FILES), st.sampled_from(sorted(PACK)), damages, st.booleans(), st.sampled_from(SUFFIXES))
    def read(file: tuple[str, bytes], compression: str, damaged: list[Damage], first: bool, other: str) -> None:
        content, name = file[1], file[0] + compression
        content = content if first else PACK[compression](content)
        for place, gone, come in damaged:
            at = place % (len(content) + 1)
            content = content[:at] + come + content[at + gone :]
        content = PACK[compression](content) if first else content
        path = tmp_path / f"a{name if damaged else other}"
        path.write_bytes(content)
        ends[end_of(path)] += 1

    read()
    assert {"rows", "bad rows", "bad rows and rows", "refused", "refused and rows"} <= ends.keys(), ends
