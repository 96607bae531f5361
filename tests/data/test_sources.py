"""Rows of files, folders, globs and the hub: rows, bad rows, and errors that end reading."""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from functools import partial
from pathlib import Path

import datasets
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_cli.config.data import DataSource
from rlhf_cli.data import read as read_module
from rlhf_cli.data.paths import COMPRESSIONS, KINDS, SUFFIXES, find_files, reason
from rlhf_cli.data.read import read_rows
from rlhf_cli.data.records import BadRow, Row
from rlhf_cli.errors import DataError

ROWS = [{"prompt": f"quéstion {i}\n", "response": f' "answer", {i}'} for i in range(10)]
GOOD = b'{"a": "b"}\n'
TABLE = pyarrow.Table.from_pylist(ROWS)


def zstd(content):
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def csv_bytes(rows, delimiter=","):
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def parquet_bytes(table, compression="snappy", rows=None):
    """A Parquet file with groups of `rows` rows."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, compression=compression, use_dictionary=False, row_group_size=rows)
    return file.getvalue()


def arrow_bytes(table, new=pyarrow.ipc.new_stream, rows=None):
    """An Arrow stream, or file, with batches of `rows` rows."""
    file = io.BytesIO()
    with new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return file.getvalue()


def file_bytes(kind):
    """ROWS as a file of that kind."""
    if kind == ".json":
        return json.dumps(ROWS, indent=1).encode()
    if kind in (".csv", ".tsv"):
        return csv_bytes(ROWS, "," if kind == ".csv" else "\t")
    if kind == ".parquet":
        return parquet_bytes(TABLE)
    if kind == ".arrow":
        return arrow_bytes(TABLE)
    if kind == ".txt":
        return "".join(f"{row['response']}\n" for row in ROWS).encode()
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def read(path, **settings):
    return list(read_rows(DataSource(path=str(path), **settings)))


def values(path, **settings):
    """Every row's values, or the reason for a bad row."""
    return [row.values if isinstance(row, Row) else row.reason for row in read(path, **settings)]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def refused(path, **settings):
    """The message of the DataError that reading raises."""
    with pytest.raises(DataError) as error:
        read(path, **settings)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 500 + len(str(path))
    return str(error.value)


# -------------------------------------------------------------------------------------- kinds of files


@pytest.mark.parametrize("compression", ["", *COMPRESSIONS])
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_type_gives_the_same_rows(tmp_path, kind, compression):
    path = write(tmp_path / f"a{kind}{compression}", PACK[compression](file_bytes(kind)))
    rows = read(path)
    expected = [{"text": row["response"]} for row in ROWS] if kind == ".txt" else ROWS
    assert [row.values for row in rows if isinstance(row, Row)] == expected
    by_line = kind in (".jsonl", ".ndjson", ".txt")
    assert [row.where for row in rows] == [f"{path}:{n}" if by_line else f"{path} row {n}" for n in range(1, 11)]


def test_endings_are_case_insensitive(tmp_path):
    assert values(write(tmp_path / "A.b.CSV.GZ", gzip.compress(b"a,b\n1,2\n"))) == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize("name", ["rows", "rows.py", "rows.jsonl.zip", "rows.gz", ".jsonl"])
def test_an_unknown_ending_is_refused(tmp_path, name):
    assert "unknown ending, it must be one of .jsonl," in refused(write(tmp_path / name, GOOD))


def test_arrow_files_with_random_access(tmp_path):
    content = arrow_bytes(TABLE, pyarrow.ipc.new_file)
    assert values(write(tmp_path / "a.arrow", content)) == ROWS
    assert values(write(tmp_path / "a.arrow.xz", lzma.compress(content))) == ROWS


def test_folders_saved_by_datasets_are_read(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert values(tmp_path / "saved") == ROWS


@pytest.mark.parametrize(("name", "pack"), [("a.parquet", parquet_bytes), ("a.arrow", arrow_bytes)])
def test_nested_columns_become_python(tmp_path, name, pack):
    row = {"messages": [{"role": "user", "content": "Hi"}], "scores": [1.5, None], "none": None, "of": {"a": {"b": 1}}}
    assert values(write(tmp_path / name, pack(pyarrow.Table.from_pylist([row])))) == [row]


def test_json_values_are_kept(tmp_path):
    """Lone surrogates, NUL, NaN and repeated keys are left to the code that knows the columns."""
    line = r'{"a": "\ud800", "b": "\u0000", "c": [NaN, -Infinity], "d": 1, "d": 2, "e": "\ud83d\ude00"}'
    for name, content in (("a.jsonl", line), ("a.json", f"[{line}]")):
        (row,) = values(write(tmp_path / name, content.encode()))
        assert (row["a"], row["b"], row["d"], row["e"]) == ("\ud800", "\0", 2, "😀")
        assert row["c"][0] != row["c"][0]
        assert row["c"][1] == float("-inf")


def test_line_endings_of_all_systems(tmp_path):
    rows = read(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\n \t\r\n  {"a": 2}  \n{"a": 3}'))
    found = [(row.where[-2:], row.values["a"]) for row in rows if isinstance(row, Row)]
    assert found == [(":1", 1), (":4", 2), (":5", 3)]
    lines = b"\xef\xbb\xbfa line\r\n\n  of text \x0c\nend\r"
    assert values(write(tmp_path / "a.txt", lines)) == [{"text": t} for t in ("a line", "  of text \x0c", "end")]
    for ending in (b"\n", b"\r\n", b"\r"):
        content = ending.join([b"\xef\xbb\xbfa,b", b"1,2", b"", b'"x' + ending + b'y",4', b""])
        both = [{"a": "1", "b": "2"}, {"a": f"x{ending.decode()}y", "b": "4"}]
        assert values(write(tmp_path / "a.csv", content)) == both
    assert values(write(tmp_path / "a.json", b'\xef\xbb\xbf \r\n[{"a": 1}]\r\n')) == [{"a": 1}]


# --------------------------------------------------------------------------------- folders and globs


def test_a_folder_is_read_file_by_file(tmp_path):
    write(tmp_path / "b.csv", b"a\n2\n")
    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "c.jsonl", b"")
    for name in ("README.md", ".hidden.jsonl", "sub/other.jsonl", "LICENSE.txt", "dataset_info.json", "folder.csv/x"):
        write(tmp_path / name, GOOD)
    assert [row.where for row in read(tmp_path)] == [f"{tmp_path / 'a.jsonl'}:1", f"{tmp_path / 'b.csv'} row 1"]


def test_a_folder_of_text(tmp_path):
    write(tmp_path / "b.txt", b"b\n")
    write(tmp_path / "a.txt.gz", gzip.compress(b"a\n"))
    assert values(tmp_path) == [{"text": "a"}, {"text": "b"}]


def test_a_folder_without_files_suggests_a_glob(tmp_path):
    write(tmp_path / "train" / "a.jsonl", GOOD)
    message = refused(tmp_path)
    assert "the folder has no data file. Its name must end in .jsonl," in message
    assert f"{tmp_path}/**/*.jsonl" in message


def test_globs(tmp_path, monkeypatch):
    for name in ("a1.jsonl", "a2.jsonl", "b.jsonl", "x/a3.jsonl", "x/y/a4.jsonl", ".git/a5.jsonl", "x/.a6.jsonl"):
        write(tmp_path / name, GOOD)
    (tmp_path / "x" / "around").symlink_to(tmp_path)

    def names(pattern):
        return [file.name.removesuffix(".jsonl") for file in find_files(pattern)]

    assert names(f"{tmp_path}/a*.jsonl") == ["a1", "a2"]
    assert names(f"{tmp_path}/a?.jsonl") == ["a1", "a2"]
    assert names(f"{tmp_path}/[b-z].jsonl") == ["b"]
    assert names(f"{tmp_path}/*/a*.jsonl") == ["a3"]
    assert names(f"{tmp_path}/**/*.jsonl") == ["a1", "a2", "b", "a3", "a4"]
    assert names(f"{tmp_path}/.git/*") == ["a5"]
    monkeypatch.chdir(tmp_path / "x")
    assert names("*.jsonl") == ["a3"]
    assert names("../a*.jsonl") == ["a1", "a2"]
    assert "no data file matches" in refused(f"{tmp_path}/z*.jsonl")
    assert "no data file matches" in refused(f"{tmp_path}/*/y")
    write(tmp_path / "x" / "[1].jsonl", GOOD)
    assert names("[1].jsonl") == ["[1]"]


def test_the_limit_counts_over_files_and_bad_rows_too(tmp_path):
    write(tmp_path / "a.jsonl", GOOD + b"oops\n" + GOOD)
    write(tmp_path / "b.jsonl", GOOD * 3)
    for limit in range(1, 7):
        assert len(read(tmp_path, limit=limit)) == limit
    assert [type(row) for row in read(tmp_path, limit=3)] == [Row, BadRow, Row]


def test_the_limit_reads_no_further(tmp_path):
    path = write(tmp_path / "a.json", b'[{"a": 1}, {"a": 2}, oops')
    assert values(path, limit=2) == [{"a": 1}, {"a": 2}]
    assert "row 3: not JSON" in refused(path, limit=3)


def test_files_are_opened_at_the_first_row_and_closed(tmp_path):
    rows = read_rows(DataSource(path=str(tmp_path / "a.jsonl.gz")))
    write(tmp_path / "a.jsonl.gz", gzip.compress(GOOD * 5))
    before = sorted(Path("/proc/self/fd").iterdir())
    assert isinstance(next(rows), Row)
    assert sorted(Path("/proc/self/fd").iterdir()) != before
    del rows
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_unprintable_names_are_escaped(tmp_path):
    for name in (b"two\nlines.jsonl", b"latin\xe9.jsonl"):
        write(tmp_path / os.fsdecode(name), GOOD)
    for row in read(tmp_path):
        assert row.where.isprintable()
        assert row.where.encode()
        assert "\\" in row.where


# ------------------------------------------------------------------------------------------ bad rows


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{'a': 1}", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
        (b'{"a": 1', "not JSON (Expecting ',' delimiter at column 8)"),
        (b'{"a": 1} {"a": 2}', "not JSON (Extra data at column 9)"),
        (b"oops", "not JSON (Expecting value at column 1)"),
        (b'{"a": "\x00"}', "not JSON (Invalid control character at column 8)"),
        (b"\0", "not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON (a number of more than 4300 digits)"),
        (b'{"a": ' + b"[" * 100_000, "not JSON (nested too deeply)"),
        (b"[" * 100_000 + b"]" * 100_000, "not JSON (nested too deeply)"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested more than 200 deep"),
        (b'{"a": ' + b'{"b":' * 200 + b"1" + b"}" * 201, "nested more than 200 deep"),
        (b"[1, 2]", "a JSON list, every row must be an object with named columns"),
        (b'"text"', "a JSON string, every"),
        (b"1.5", "a JSON number, every"),
        (b"NaN", "a JSON number, every"),
        (b"true", "a JSON boolean, every"),
        (b"null", "a JSON null, every"),
        (b'{"a": "\xff"}', "not UTF-8 (byte 0xff at position 8 of the line)"),
        ('{"a": "é"}'.encode("latin-1"), "not UTF-8 (byte 0xe9 at position 8 of the line)"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8 (byte 0xed"),  # half a character, as bytes
    ],
)
def test_a_bad_line_is_named_and_reading_continues(tmp_path, content, reason):
    path = write(tmp_path / "a.jsonl", GOOD + b"\n" + content + b"\n" + GOOD)
    first, bad, last = read(path)
    assert bad.where == f"{path}:3"
    assert bad.reason.startswith(reason)
    assert bad.reason.endswith(". Fix or remove the line") or "Convert the file, or fix" in bad.reason
    assert len(bad.reason) < 200
    assert isinstance(first, Row)
    assert isinstance(last, Row)
    assert last.where == f"{path}:4"


def test_the_deepest_allowed_nesting(tmp_path):
    deep = b'{"a": ' + b"[" * 199 + b"]" * 199 + b', "b": [[]]}\n'
    wide = b'{"a": [' + b",".join([b'{"b": [1]}'] * 500) + b"]}\n"
    text = b'{"a": {}, "b": "' + b"{[" * 500 + b'"}\n'
    assert all(isinstance(row, Row) for row in read(write(tmp_path / "a.jsonl", deep + wide + text)))
    listed = b"[" + b",".join([deep, wide, text, b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", b"{}"]) + b"]"
    rows = read(write(tmp_path / "a.json", listed))
    assert [type(row) for row in rows] == [Row, Row, Row, BadRow, Row]


def test_a_json_list_in_a_jsonl_file_is_recognised(tmp_path):
    for content in (b'[{"a": 1}]', b'[\n {"a": 1}\n]'):
        first = read(write(tmp_path / "a.jsonl", content))[0]
        assert first.reason.endswith("If the file is one JSON list, rename it to .json")


def test_invalid_bytes_in_a_list_lose_one_row(tmp_path):
    path = write(tmp_path / "a.json", b'[{"a": "\xc3\xa9"}, {"a": "\xe9"}, {"a": "\\udce9"}]')
    assert values(path) == [
        {"a": "é"},
        "not UTF-8, all text must be. Convert the file, or fix or remove the row",
        {"a": "\udce9"},  # written so, with a backslash: kept
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"1,2,3", "has 3 cells, it must have one for each of the header's 2 columns"),
        (b"1", "has 1 cells, it must have one for each of the header's 2 columns"),
        (b"1,\xff", "not UTF-8"),
        (b"1,\0", "contains a NUL byte"),
        (b'1,"a"b', "not CSV (',' expected after '\"', up to line 4)"),
    ],
)
def test_bad_rows_of_csv(tmp_path, content, reason):
    path = write(tmp_path / "a.csv", b"a,b\n1,2\n\n" + content + b"\n3,4\n")
    first, bad, last = read(path)
    assert bad.where == f"{path} row 2"
    assert bad.reason.startswith(reason)
    assert (first.where, last.where) == (f"{path} row 1", f"{path} row 3")


def test_an_unclosed_quote_is_reported(tmp_path):
    first, bad = read(write(tmp_path / "a.csv", b'a,b\n1,2\n3,"4\n5,6\n7,8\n'))
    assert isinstance(first, Row)
    assert bad.reason.startswith("not CSV (unexpected end of data, up to line 5)")


def test_bad_rows_of_text(tmp_path):
    rows = values(write(tmp_path / "a.txt", b"good text\n\xff\nn\0ul\nend"))
    shown = [row["text"] if isinstance(row, dict) else row[:14] for row in rows]
    assert shown == ["good text", "not UTF-8 (byt", "contains a NUL", "end"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_bad_rows_of_binary_tables(tmp_path, kind):
    """Invalid UTF-8, and a time outside Python's range."""
    cells = pyarrow.array([f"text {i}" for i in range(3000)])
    offsets, letters = cells.buffers()[1:]
    spoilt = bytearray(letters)
    spoilt[spoilt.index(b"text 1234")] = 0xFF
    text = pyarrow.StringArray.from_buffers(3000, pyarrow.py_buffer(offsets), pyarrow.py_buffer(bytes(spoilt)))
    times = pyarrow.array([2**62 if i == 2345 else 0 for i in range(3000)], pyarrow.timestamp("us"))
    table = pyarrow.table({"text": text, "time": times})
    path = write(tmp_path / f"a.{kind}", parquet_bytes(table) if kind == "parquet" else arrow_bytes(table))
    if kind == "arrow":
        # Arrow's own check of a batch refuses the string, and with it the file.
        assert "not Arrow, or damaged (" in refused(path)
        path = write(path, arrow_bytes(table.drop_columns("text")))
    rows = read(path)
    bad = {row.where: row.reason for row in rows if isinstance(row, BadRow)}
    assert len(rows) == 3000
    expected = {f"{path} row 1235": "not UTF-8. Fix or remove the row"} if kind == "parquet" else {}
    assert {where: bad[where] for where in expected} == expected
    assert set(bad) == {*expected, f"{path} row 2346"}
    assert "cannot be read (" in bad[f"{path} row 2346"]
    good = rows[0]
    assert isinstance(good, Row)
    assert good.values["time"] == datetime.datetime(1970, 1, 1)


# ---------------------------------------------------------------------------------------- whole files


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "has no rows, at least one is needed"),
        ("a.jsonl", b"\n \n\r\n", "no rows"),
        ("a.txt", b"\n\n", "no rows"),
        ("a.json", b" \n ", "no rows"),
        ("a.json", b" [ ] ", "no rows"),
        ("a.csv", b"", "no rows"),
        ("a.csv", b"a,b\n", "no rows"),
        ("a.jsonl.gz", b"", "no rows"),
        ("a.parquet", parquet_bytes(TABLE.slice(0, 0)), "no rows"),
        ("a.arrow", arrow_bytes(TABLE.slice(0, 0)), "no rows"),
        ("a.json", b'{"a": 1}', "contains one JSON object, it must be a list of objects. If it is the only row, put"),
        ("a.json", b'{"n": 1, "data": [{"a": 1}]}', "extract the list: jq '.[\"data\"]'"),
        ("a.json", b'{"a": 1}\n{"a": 2}', "contains several JSON values, as .jsonl files do. Rename it to .jsonl"),
        ("a.json", b'"text"', "contains a JSON string, it must be a list of objects"),
        ("a.json", b"17", "contains a JSON number, it must be a list of objects"),
        ("a.json", b"oops", "not a list of objects: not JSON (Expecting value in line 1). Fix it"),
        ("a.json", b'\n{"a": \n', "not a list of objects: the file ends inside it (Expecting value in line 3)"),
        ("a.json", b"[" * 100_000, "row 1: not JSON (nested too deeply in line 1)"),
        ("a.json", b'[{"a": 1},\n{"a": ', "row 2: the file ends inside it (Expecting value in line 2)"),
        ("a.json", b'[{"a": 1},\n{"a": "b', "row 2: the file ends inside it (Unterminated string starting in line 2)"),
        ("a.json", b'[{"a": 1},\n{"a" 2}]', "row 2: not JSON (Expecting ':' delimiter in line 2)"),
        ("a.json", b'[{"a": 1},\n{"a": 1,b}' + b" " * 99, "row 2: not JSON (Expecting property name enclosed in"),
        ("a.json", b'[{"a": 1},\n]', "row 2: not JSON (Expecting value in line 2)"),
        ("a.json", b'[{"a": 1}\n{"a": 2}]', "row 1: '{' in line 2 follows, it must be a comma or the end of the list"),
        ("a.json", b'[{"a": 1}', "row 1: the end of the file follows, it must be a comma or"),
        ("a.json", b"[1, 2", "row 2: the end of the file follows"),
        ("a.json", b'[{"a": 1}]\n[]', "text after the end of the list, line 2. Put all rows in one list"),
        ("a.json", b'[{"a": 1}]\xff', "text after the end"),
        ("a.json", b'[{"a": 1}]\xc3', "text after the end"),
        ("a.csv", b"a,b,a\n1,2,3\n", "the header names column 'a' 2 times. The first line must name each column"),
        ("a.csv", b"a,,c\n1,2,3\n", "column 2 of 3 has no name in the header. The first line must name each column"),
        ("a.csv", b",a\n0,1\n", "column 1 of 2 has no name in the header. If pandas wrote its index there"),
        ("a.csv", b'"a"b,c\n1,2\n', "the header is not CSV (',' expected after '\"'). Fix the first line"),
        ("a.tsv", b'"a"b\tc\n1\t2\n', "the header is not CSV (a tab expected after '\"'). Fix the first line"),
        ("a.csv", b"\xe9,b\n1,2\n", "the header is not UTF-8 text"),
        ("a.csv", b"a\0,b\n1,2\n", "the header is not UTF-8 text"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8"),
        ("a.csv", b"\xfe\xff" + "a,b".encode("utf-16-be"), "is UTF-16"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16-le"), "every other byte is NUL, it may be UTF-16"),
        ("a.txt", "text".encode("utf-16-be"), "every other byte is NUL, it may be UTF-16"),
        ("a.jsonl", '{"a": 1}'.encode("utf-32"), "is UTF-16"),  # its mark begins with UTF-16's
        ("a.jsonl", gzip.compress(GOOD), "is gzip. Add .gz to its name"),
        ("a.csv", bz2.compress(GOOD), "is bzip2. Add .bz2 to its name"),
        ("a.json", lzma.compress(GOOD), "is xz. Add .xz to its name"),
        ("a.txt", zstd(GOOD), "is Zstandard. Add .zst to its name"),
        ("a.csv", b"PK\x03\x04" + b"\0" * 30, "is a zip archive or an Excel file. Unpack it, or save it as CSV"),
        ("a.json", parquet_bytes(TABLE), "is Parquet. Rename it to .parquet"),
        ("a.jsonl", arrow_bytes(TABLE, pyarrow.ipc.new_file), "is Arrow. Rename it to .arrow"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(GOOD)), "is gzip"),
        ("a.jsonl.gz", b"not gzip", "cannot be read as .gz (Not a gzipped file (b'no'))"),
        ("a.jsonl.gz", gzip.compress(GOOD * 500)[:11] + b"\xff" * 40, "cannot be read as .gz (Error -3"),
        ("a.jsonl.bz2", GOOD, "cannot be read as .bz2 (Invalid data stream)"),
        ("a.jsonl.xz", GOOD, "cannot be read as .xz (Input format not supported by decoder)"),
        ("a.jsonl.zst", GOOD, "cannot be read as .zst (ZSTD decompress failed"),
        ("a.parquet.gz", parquet_bytes(TABLE), "cannot be read as .gz"),
        ("a.parquet", b"nothing", "not Parquet, or damaged (Parquet"),
        ("a.parquet", b"", "not Parquet, or damaged (Parquet file size is 0 bytes)"),
        ("a.parquet", parquet_bytes(TABLE)[:-20], "not Parquet, or damaged (Parquet magic bytes not found"),
        ("a.parquet.gz", gzip.compress(GOOD), "not Parquet, or damaged"),
        ("a.arrow", b"nothing", "not Arrow, or damaged"),
        ("a.arrow", b"", "not Arrow, or damaged"),
        ("a.arrow", arrow_bytes(TABLE)[:-200], "not Arrow, or damaged"),
        ("a.arrow", arrow_bytes(TABLE, pyarrow.ipc.new_file)[:-20], "not Arrow, or damaged"),
        ("a.parquet", parquet_bytes(pyarrow.table([[1], [2]], ["a", "a"])), "has 2 columns named 'a'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unreadable_file_is_one_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    assert message in refused(path)
    assert refused(path).startswith(f"{path}")


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".txt"])
def test_a_truncated_file_gives_its_rows_and_then_an_error(tmp_path, kind, compression):
    rows = [{"text": hashlib.shake_128(bytes([i % 256, i // 256])).hexdigest(128)} for i in range(5_000)]
    content = {
        ".jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        ".json": json.dumps(rows).encode(),
        ".csv": csv_bytes(rows),
        ".txt": "".join(row["text"] + "\n" for row in rows).encode(),
    }[kind]
    pack = partial(lzma.compress, preset=0) if compression == ".xz" else PACK[compression]
    path = write(tmp_path / f"a{kind}{compression}", pack(content)[:-9])
    got = []
    with pytest.raises(DataError, match=rf"{path}: cannot be read as \{compression} \(.*It may be truncated"):
        got.extend(read_rows(DataSource(path=str(path))))  # each row as it comes
    assert [row.values for row in got if isinstance(row, Row)] == rows[: len(got)]
    assert len(got) > 1_250


def test_missing_files_are_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (f"{tmp_path}/a.jsonl", "a.JSONL", "./a", "sub/a.csv.zst"):
        assert f"{path}: no such file (relative to {tmp_path})" in refused(path)
    assert f"{Path.home()}/a: no such file" in refused("~/a")
    assert find_files("org/name") == []
    (tmp_path / "broken.jsonl").symlink_to("nowhere")
    assert "no such file" in refused("broken.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "neither a file nor a folder" in refused("pipe.jsonl")
    (tmp_path / "round.jsonl").symlink_to("round.jsonl")
    assert "no such file" in refused("round.jsonl")
    assert "cannot be looked up (File name too long)" in refused("/" + "a" * 300 + ".jsonl")
    assert "cannot be looked up" in refused("/**a/*.jsonl") or sys.version_info >= (3, 13)


def test_files_without_permission_are_reported():
    """Runs as another user, because root may read everything."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        files = [write(Path(folder) / name, GOOD) for name in ("a.jsonl", "a.parquet", "a.jsonl.zst", "a.csv.gz")]
        closed = write(Path(folder) / "closed" / "a.jsonl", GOOD).parent
        for path in (*files, closed):
            path.chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            for path in files:
                assert "cannot be read" in refused(path)
                assert "Permission denied" in refused(path)
            assert "cannot be looked up (Permission denied)" in refused(closed)
            assert "cannot be looked up (Permission denied)" in refused(closed / "a.jsonl")
        finally:
            os.seteuid(user)
            closed.chmod(0o755)


@pytest.mark.parametrize("setting", [{"name": "x"}, {"data_dir": "x"}, {"revision": "x"}, {"streaming": True}])
def test_hub_settings_are_refused_for_a_file(tmp_path, setting):
    assert "name, data_dir, revision and streaming apply to hub datasets only" in refused(
        write(tmp_path / "a.jsonl", GOOD), **setting
    )


# ----------------------------------------------------------------------------------- whatever they hold


def test_reasons_of_other_libraries_are_one_short_line():
    assert reason(ValueError("one\ntwo \t three")) == "one two three"
    assert reason(OSError(13, "Permission denied", "/a/path")) == "Permission denied"
    assert reason(EOFError()) == "EOFError"
    assert reason(ValueError("x" * 1000)) == "x" * 200 + "..."
    assert reason(ValueError("nul \0 and \ud800")).isprintable()


def test_overlong_lines_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(read_module, "MAX_ROW", 1000)
    for length in (999, 1000, 1001, 1999, 2000, 2001, 4000):
        line = b'{"a": "' + b"x" * (length - 9) + b'"}'
        assert len(line) == length
        first, middle, last = read(write(tmp_path / "a.jsonl", GOOD + line + b"\n" + GOOD))
        assert isinstance(middle, Row if length < 1000 else BadRow), length
        assert (first.where[-2:], middle.where[-2:], last.where[-2:]) == (":1", ":2", ":3")
        assert isinstance(last, Row)
        assert [type(row) for row in read(write(tmp_path / "a.txt", line))] == [Row if length <= 999 else BadRow]
    assert "a.csv:3: longer than" in refused(write(tmp_path / "a.csv", b"a,b\n1,2\n" + b"x" * 1000))


def test_an_overlong_item_ends_the_list(tmp_path, monkeypatch):
    monkeypatch.setattr(read_module, "MAX_ROW", 5000)
    monkeypatch.setattr(read_module, "BLOCK", 100)
    path = write(tmp_path / "a.json", b'[{"a": 1}, {"a": "' + b"x" * 4000 + b'"}]')
    assert len(read(path)) == 2
    path = write(tmp_path / "a.json", b'[{"a": 1}, {"a": "' + b"x" * 40_000 + b'"}]')
    assert "row 2: longer than" in refused(path)


def test_an_overlong_cell_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(read_module, "MAX_CELL", 1000)
    path = write(tmp_path / "a.csv", b"a,b\n" + b'1,"2\n' + b"x,y\n" * 300 + b"3,4\n")
    rows = values(path)
    assert rows[0].startswith("not CSV (field larger than field limit (1000), up to line ")
    assert rows[-1] == {"a": "3", "b": "4"}
    monkeypatch.undo()
    # Twice what the csv module takes by itself.
    assert values(write(path, b"a\n" + b"x" * 262_144 + b"\n")) == [{"a": "x" * 262_144}]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


def oracle(text):
    """The rows of a .json file, None for a bad row; an empty result if the file is refused."""
    try:
        whole = json.loads(text)
    except ValueError:
        return None
    return [item if isinstance(item, dict) else None for item in whole] if isinstance(whole, list) and whole else None


def ours(path):
    try:
        return [row.values if isinstance(row, Row) else None for row in read(path)]
    except DataError:
        return None


def test_line_numbers_of_faults_count_from_the_start_of_the_file(tmp_path, monkeypatch):
    text = json.dumps(ROWS, indent=1, ensure_ascii=False).replace('": "quéstion 7', '" "')
    path = write(tmp_path / "a.json", text.encode())
    for block in (3, 20, 10_000):
        monkeypatch.setattr(read_module, "BLOCK", block)
        # "[", then four lines for each row before, "{", and the line itself.
        assert "row 8: not JSON (Expecting ':' delimiter in line 31)" in refused(path)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    items=st.lists(JSON_VALUES | st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=3), max_size=6),
    indent=st.none() | st.integers(0, 3),
    escape=st.booleans(),
    block=st.integers(1, 30),
    change=st.none() | st.tuples(st.integers(0, 300), st.integers(0, 3), st.sampled_from(list('[]{}",:0 e-.tnN\\\n'))),
)
def test_a_list_read_in_blocks_equals_json_loads(place, items, indent, escape, block, change):
    """For every block boundary and every kind of damage."""
    text = json.dumps(items, indent=indent, ensure_ascii=escape)
    if change is not None:
        at, length, put = change
        text = text[:at] + put + text[at + length :]
    path = write(place / "a.json", text.encode("utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_module, "BLOCK", block)
        assert ours(path) == oracle(text)


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.lists(CELLS, min_size=3), max_size=6))
def test_csv_rows_equal_those_of_the_csv_module(place, rows):
    file = io.StringIO(newline="")
    csv.writer(file).writerows([["a", "b", "c"], *rows, ["1", "2", "3"]])
    path = write(place / "a.csv", file.getvalue().encode())
    expected = [row if len(row) == 3 else None for row in [*rows, ["1", "2", "3"]]]
    assert [list(row.values.values()) if isinstance(row, Row) else None for row in read(path)] == expected


HARD = [
    b'"', b"\\", b"\\u", b"\\ud800", b"[", b"]", b"{", b"}", b",", b":", b"\n", b"\r", b"\t", b" ", b"\0", b"\xff",
    b"\xc3", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"NaN", b"1e999", b"tru", b"9" * 5000, b"[" * 10**5,
    b'{"a":' * 300, b'"x\ny"', b"\x1f\x8b", b"\xc2\xa0", b"\x1a", b"x" * 200_000, b"\n \n", b"",
]  # fmt: skip
"""Fragments that are hard for parsers."""


def end_of(path):
    """How reading a file ends: rows, bad rows, one line of refusal. No other exception, no hang."""
    kinds = set()
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


def test_damaged_files_and_wrong_endings(tmp_path):
    """Every file type with every compression, damaged before or after compression, now and then under another name."""
    ends = Counter()
    files = [(kind, file_bytes(kind)) for kind in KINDS]
    files += [(".parquet", parquet_bytes(TABLE, "none", 5)), (".arrow", arrow_bytes(TABLE, pyarrow.ipc.new_file, 5))]
    damages = st.lists(
        st.tuples(st.integers(0, 10_000), st.sampled_from([0, 0, 1, 7, 10_000]), st.sampled_from(HARD) | st.binary()),
        max_size=4,
    )

    @settings(max_examples=500, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(files), st.sampled_from(sorted(PACK)), damages, st.booleans(), st.sampled_from(SUFFIXES))
    def read(file, compression, damaged, first, other):
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


# -------------------------------------------------------------------------------------- memory, speed


@pytest.mark.parametrize("kind", ["jsonl", "json", "one line.json", "csv", "txt", "jsonl.gz", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    row = {"prompt": "a" * 300, "response": "b" * 700}
    lines = itertools.repeat(json.dumps(row), 10_000)
    content = {
        "jsonl": lambda: "".join(line + "\n" for line in lines).encode(),
        "json": lambda: ("[" + ",\n".join(lines) + "]").encode(),
        "one line.json": lambda: ("[" + ",".join(lines) + "]").encode(),
        "csv": lambda: csv_bytes([row] * 10_000),
        "txt": lambda: b"".join(line.encode() + b"\n" for line in lines),
        "jsonl.gz": lambda: gzip.compress("".join(line + "\n" for line in lines).encode(), 1),
        "parquet": lambda: parquet_bytes(pyarrow.Table.from_pylist([row] * 10_000), compression="none"),
    }[kind]()
    path = write(tmp_path / f"a.{kind}", content)
    assert kind == "jsonl.gz" or len(content) > 10_000_000
    del content
    tracemalloc.start()
    try:
        assert sum(isinstance(row, Row) for row in read_rows(DataSource(path=str(path)))) == 10_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000


# ------------------------------------------------------------------------------------------------ hub


def test_datasets_whole_and_streamed(tmp_path, monkeypatch):
    """The real `datasets`, which reads a folder as it reads a repository of the hub."""
    monkeypatch.setattr(read_module, "find_files", lambda _: [])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    load, asked = datasets.load_dataset, []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **more: asked.append(more) or load(*names, **more))
    write(tmp_path / "set/sub/train-1.jsonl", b'{"prompt": "a", "n": 1}\n{"prompt": "b", "n": 2}\n')
    write(tmp_path / "set/sub/train-2.jsonl", b'{"prompt": "c", "n": 3}\n')
    write(tmp_path / "set/sub/test.jsonl", b'{"prompt": "d", "n": 4}\n')
    write(tmp_path / "set/broken/train-1.jsonl", b'{"prompt": "a"}\n')
    write(tmp_path / "set/broken/train-2.jsonl", b'{"prompt": \n')
    name = f"{tmp_path}/set"
    a, b, c, d = ({"prompt": letter, "n": n} for n, letter in enumerate("abcd", 1))
    assert read(name, data_dir="sub", revision="v1") == [
        Row(row, f"{name}[train] row {n}") for n, row in enumerate((a, b, c), 1)
    ]
    assert read(name, data_dir="sub", split="test", streaming=True) == [Row(d, f"{name}[test] row 1")]
    assert values(name, data_dir="sub", streaming=True, limit=2) == [a, b]
    assert [(more["revision"], more["streaming"]) for more in asked] == [("v1", False), (None, True), (None, True)]
    unknown = "neither a local file nor a hub dataset that can be loaded"
    assert f"{name}: {unknown} (ValueError" in refused(name, data_dir="sub", split="nothing")
    assert f"org/nothing: {unknown} (" in refused("org/nothing")
    assert "csv: names a file reader of `datasets`, not a dataset" in refused("csv")
    rows = read_rows(DataSource(path=name, data_dir="broken", streaming=True))
    assert next(rows) == Row({"prompt": "a"}, f"{name}[train] row 1")
    with pytest.raises(DataError, match=r"\[train\] row 2: the hub dataset cannot be read further \("):
        next(rows)
