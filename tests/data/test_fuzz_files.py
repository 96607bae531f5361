"""Damaged files give rows, bad rows with a place and a reason, or one line of refusal; no other exception, no hang."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from rlhf_cli.config.data import DataSource
from rlhf_cli.data.paths import SUFFIXES
from rlhf_cli.data.row_sources import read_rows
from rlhf_cli.data.rows import BadRow, Row
from rlhf_cli.errors import DataError
from support.data_files import PACK, arrow_bytes, csv_bytes, parquet_bytes

ROWS: list[dict[str, Any]] = [
    {"prompt": f'quéstion "{i}",\n', "response": "ja 😀" * i, "n": i, "messages": [{"role": "user", "content": "x"}]}
    for i in range(12)
]
FLAT = [{key: str(value) for key, value in row.items()} for row in ROWS]
TABLE = pyarrow.Table.from_pylist(ROWS)
KINDS_OF_END = {"rows", "rows and bad rows", "bad rows", "refused", "refused after rows"}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


FILES: list[tuple[str, bytes]] = [
    (".jsonl", lines(ROWS)),
    (".ndjson", lines(FLAT)),
    (".json", json.dumps(ROWS, indent=1).encode()),
    (".json", json.dumps(ROWS, ensure_ascii=False).encode()),
    (".csv", csv_bytes(FLAT)),
    (".tsv", csv_bytes(FLAT, "\t")),
    (".txt", "".join(row["response"] + "\n" for row in ROWS).encode()),
    (".parquet", parquet_bytes(TABLE, "none", 5)),
    (".parquet", parquet_bytes(TABLE, rows=5)),
    (".arrow", arrow_bytes(TABLE, rows=5)),
    (".arrow", arrow_bytes(TABLE, pyarrow.ipc.new_file, 5)),
]


# ------------------------------------------------------------------------------------------ mutations


def put(content: bytes, rng: random.Random, piece: bytes) -> bytes:
    """Insert `piece` at a random position, or overwrite as many bytes."""
    at = rng.randrange(len(content) + 1)
    return content[:at] + piece + content[at + rng.choice([0, len(piece)]) :]


def flip(content: bytes, rng: random.Random) -> bytes:
    spoilt = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def recode(content: bytes, rng: random.Random) -> bytes:
    text = content.decode("utf-8", "replace")
    return text.encode(rng.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp037"]), "replace")


def repeat(content: bytes, rng: random.Random) -> bytes:
    start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return content[:end] + content[start:]


HARD = [
    b'{"a": "b"}', b'{"a": ', b'"', b"\\", b"\\u", b"d800", b"[", b"]", b"{", b"}", b",", b":", b"\n", b"\r", b"\t",
    b" ", b"\0", b"\xef\xbb\xbf", b"\xff", b"\xc3", b"\xe2\x80\xa8", b"NaN", b"-Infinity", b"1e999", b"tru", b"-",
    b"9" * 5000, b"[" * 2000, b"a,b\n", b'1,"2"\n', b'"x\ny"', b"''", b"\x1f\x8b", b"\xc2\xa0", b"\x0c", b"\x1a",
]  # fmt: skip
"""Fragments that are hard for parsers."""
MUTATIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut off": lambda content, rng: content[: rng.randrange(len(content))],
    "begun late": lambda content, rng: content[rng.randrange(len(content)) :],
    "bits flipped": flip,
    "a slice twice": repeat,
    "another encoding": recode,
    "NUL bytes": lambda content, rng: put(content, rng, b"\0" * rng.randint(1, 9)),
    "wrong bytes": lambda content, rng: put(content, rng, rng.randbytes(rng.randint(1, 9))),
    "half a character": lambda content, rng: put(content, rng, rng.choice([b"\xed\xa0\x80", b"\\ud800", b"\xf0\x9f"])),
    "deep": lambda content, rng: put(content, rng, rng.choice([b"[", b'{"a":', b'"', b"{"]) * rng.choice([300, 10**5])),
    "huge": lambda content, rng: put(content, rng, rng.choice([b"x", b"9", b'"', b"\n", b",", b" "]) * 200_000),
    "punctuation": lambda content, rng: put(
        content, rng, rng.choice([b'"', b",", b"\n", b"\r", b"}", b"]", b":", b"\t"])
    ),
    "fragments": lambda content, rng: (
        rng.choice([b"", b'[{"a": "b"}, ', b'{"a": "b"}\n', b"a,b\n1,2\n", content])
        + b"".join(rng.choices(HARD, k=rng.randint(1, 12)))
    ),
    "nothing": lambda *_: b"",
    "blank lines": lambda _, rng: b"\n \n\r\n" * rng.randint(1, 9),
    "one byte": lambda _, rng: rng.randbytes(1),
    "noise": lambda _, rng: rng.randbytes(rng.randint(1, 300)),
    "whole": lambda content, _: content,
}


# ------------------------------------------------------------------------------------------ one file


def is_one_line(message: str, path: Path) -> bool:
    rest = message.removeprefix(str(path))
    return rest != message and rest.isprintable() and 10 < len(rest) < 500


def end_of(path: Path) -> str:
    """How reading a file ends, one of KINDS_OF_END; raises AssertionError for anything else."""
    rows = bad = 0
    start = time.process_time()
    try:
        for row in itertools.islice(read_rows(DataSource(path=str(path))), 200_000):
            if isinstance(row, Row):
                rows += 1
                assert all(type(key) is str for key in row.values)
                assert row.where.startswith(str(path))
            else:
                assert isinstance(row, BadRow)
                bad += 1
                assert is_one_line(f"{row.where}: {row.reason}", path)
                assert row.where != str(path)
    except DataError as error:
        message = str(error)
        assert is_one_line(message, path)
        return "refused after rows" if rows + bad else "refused"
    finally:
        assert time.process_time() - start < 5
    assert rows + bad
    return "rows" if not bad else "rows and bad rows" if rows else "bad rows"


def write(folder: Path, ending: str, content: bytes) -> Path:
    path = folder / f"a{ending}"
    path.write_bytes(content)
    return path


# ---------------------------------------------------------------------------------------------- tests


def test_damaged_files(tmp_path: Path) -> None:
    """Every file type with every compression, damaged in every way before and after compression."""
    rng = random.Random(0)
    ends: Counter[str] = Counter()
    seen: dict[str, set[str]] = {name: set() for name in MUTATIONS}
    kinds = list(itertools.product(FILES, PACK))
    for number in range(1500):
        (kind, content), compression = kinds[number % len(kinds)]
        name = rng.choice(list(MUTATIONS))
        if rng.random() < 0.5:
            content = PACK[compression](MUTATIONS[name](content, rng))
        else:
            content = MUTATIONS[name](PACK[compression](content), rng)
        end = end_of(write(tmp_path, kind + compression, content))
        ends[end] += 1
        seen[name].add(end)
    assert set(ends) == KINDS_OF_END
    assert min(ends.values()) >= 15, ends
    assert seen["whole"] == {"rows"}
    assert seen["nothing"] == {"refused"}
    assert all("rows" in seen[name] for name in ("half a character", "punctuation", "bits flipped", "huge"))
    assert all("refused" in seen[name] for name in MUTATIONS.keys() - {"whole"})


@pytest.mark.parametrize(("kind", "content"), [file for file in FILES if file[0] in (".parquet", ".arrow")])
def test_binary_tables_cut_off_anywhere(tmp_path: Path, kind: str, content: bytes) -> None:
    ends = Counter(end_of(write(tmp_path, kind, content[:length])) for length in range(0, len(content), 41))
    # Arrow's stream may end between two messages.
    assert ends["refused"] + ends["refused after rows"] >= sum(ends.values()) - (3 if kind == ".arrow" else 0)


def test_wrong_endings(tmp_path: Path) -> None:
    """Every content with every ending."""
    ends: Counter[str] = Counter()
    packed = [pack(lines(ROWS)) for pack in PACK.values()] + [content for _, content in FILES]
    for ending, content in itertools.product(SUFFIXES, packed):
        ends[end_of(write(tmp_path, ending, content))] += 1
    assert sum(ends.values()) == len(SUFFIXES) * len(packed)
    assert ends["refused"] > 300
    assert ends["rows"] >= 20
