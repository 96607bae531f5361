"""Rows from files and from the hub, one after the other, each with the place that it came from.

    path -> files -> bytes (decompressed) -> rows            a file, a folder, a glob
    path -> `datasets` -> rows                               a dataset of the hub

Nothing is held but the row being read and a block of the file. A row that can't be read is a `BadRow` and the
rows behind it follow; what makes the rest of a file unreadable is a DataError.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from rlhf_cli.config.data import DataSource
from rlhf_cli.data_files import COMPRESSIONS, KINDS, ending, find_files, reason, shown_path
from rlhf_cli.errors import DataError
from rlhf_cli.hub import is_offline

if TYPE_CHECKING:
    import pyarrow

BLOCK = 2**20
"""Bytes read at once."""
MAX_ROW = 2**26
"""Longest line of a file or item of a JSON list, in bytes or characters: a file of one endless line, or the few
kilobytes of gzip that unpack into gigabytes, must not fill the memory."""
MAX_CELL = 2**24
"""Longest cell of a CSV file in characters: a quote that is never closed would take the whole rest of the file."""
MAX_DEPTH = 200
"""Deepest nesting of a JSON row; deeper ones would exhaust the stack of whoever copies or writes the row."""

# How files begin that are not what their name says.
SIGNATURES = {
    b"\x1f\x8b": "is gzip. Add .gz to its name",
    b"BZh91AY&SY": "is bzip2. Add .bz2 to its name",
    b"\xfd7zXZ\0": "is xz. Add .xz to its name",
    b"\x28\xb5\x2f\xfd": "is Zstandard. Add .zst to its name",
    b"PK\x03\x04": "is a zip archive or an Excel file. Unpack it, or save it as CSV",
    b"PAR1": "is Parquet. Let its name end in .parquet",
    b"ARROW1": "is Arrow. Let its name end in .arrow",
    codecs.BOM_UTF16_LE: "is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8",
}


@dataclass(frozen=True)
class Row:
    """One row's columns and where it stands, for messages: `file:line`, `file row n` or `dataset[split] row n`."""

    values: dict[str, Any]
    where: str


@dataclass(frozen=True)
class BadRow:
    """A row that can't be read and why, in one line: `f"{where}: {reason}"` is the whole message."""

    where: str
    reason: str


def read_rows(source: DataSource) -> Iterator[Row | BadRow]:
    """The rows of a source one by one, in order, the first `source.limit` of them, bad ones counted too.

    A file is known by its name's ending: .jsonl (.ndjson), .json (a list of objects), .csv, .tsv, .parquet, .arrow and
    .txt (each line a row with the one column `text`), each also behind .gz, .bz2, .xz or .zst. Lines and rows are
    counted from 1; blank lines count as lines but give no row. Cells of a CSV file stay text. Escaped lone surrogates,
    NaN and Infinity of a JSON file stay as they are.

    Raises DataError, once the first row is asked for or on the way, for what can't be read on: a file that is missing,
    cut off, not what its name says, a JSON list with a fault in it, a source without any row. Close the iterator, or
    let it go, to close the file.

    >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    ...     _ = file.write('{"prompt": "2 + 2 =", "response": " 4"}\\n{"prompt": }\\n')
    ...     file.flush()
    ...     row, bad = read_rows(DataSource(path=file.name))
    >>> row.values
    {'prompt': '2 + 2 =', 'response': ' 4'}
    >>> bad.where.endswith(".jsonl:2"), bad.reason
    (True, 'not JSON (Expecting value at column 12), every line holds one JSON object. Mend or remove the line')
    """
    rows = islice(_rows(source), source.limit)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{shown_path(source.path)}: no rows, at least one is needed. Is it the right file?")
    yield first
    yield from rows


def in_part(select: str | None, prompt: str) -> bool:
    """Whether a prompt belongs to the parts that `DataSource.select` names ("2/10": the third tenth).

    The part is a hash of the prompt's text, so equal prompts are always in the same part.
    """
    if select is None:
        return True
    number = int.from_bytes(hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[:8], "big")
    for part in select.split(","):
        k, n = map(int, part.split("/"))
        if n > 0 and number % n == k:
            return True
    return False


def hash_fraction(prompt: str) -> float:
    """A number in [0, 1) that depends on the prompt's text only, for the held-out split."""
    digest = hashlib.sha256(b"held out\0" + prompt.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


# ------------------------------------------------------------------------------------------- files


def _rows(source: DataSource) -> Iterator[Row | BadRow]:
    files = find_files(source.path)
    if not files:
        yield from _hub_rows(source)
    elif source.name or source.data_dir or source.revision or source.streaming:
        raise DataError(
            f"{shown_path(source.path)}: stands here, on this machine, where name, data_dir, revision and streaming "
            "say nothing. Leave them out, or give the path with its folder"
        )
    for path in files:
        yield from _file_rows(path)


def _file_rows(path: Path) -> Iterator[Row | BadRow]:
    name = shown_path(path)
    kind, compression = ending(path)
    if kind not in KINDS:
        raise DataError(
            f"{name}: not an ending that is known, {', '.join(KINDS)} (and {', '.join(COMPRESSIONS)} behind it) are. "
            "Rename the file after what it holds"
        )
    try:
        with io.BufferedReader(_open(path, compression), BLOCK) as file:
            if kind in (".parquet", ".arrow"):
                yield from _table_rows(name, kind, file, compression)
                return
            _check_beginning(name, file)
            if kind in (".csv", ".tsv"):
                yield from _csv_rows(name, file, "," if kind == ".csv" else "\t")
            elif kind == ".json":
                yield from _json_rows(name, file)
            else:
                yield from _line_rows(name, file, _text_values if kind == ".txt" else _json_values)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        told = f" as {compression}" if compression else ""
        raise DataError(
            f"{name}: can't be read{told} ({reason(error)}). Is it whole, and what its name says? "
            "Fetch or make it again"
        ) from None


def _open(path: Path, compression: str) -> Any:
    """A reader of the decompressed bytes; a BufferedReader around it gives lines far faster than it does itself."""
    if compression == ".gz":
        return gzip.GzipFile(path)
    if compression == ".bz2":
        return bz2.BZ2File(path)
    if compression == ".xz":
        return lzma.LZMAFile(path)
    if compression == ".zst":
        import pyarrow  # has Zstandard, which Python 3.11 has not

        return pyarrow.input_stream(path.open("rb"), compression="zstd")
    return path.open("rb", buffering=0)


def _check_beginning(name: str, file: io.BufferedReader) -> None:
    """Steps over a UTF-8 byte order mark; raises DataError for a file that is plainly not UTF-8 text."""
    beginning = file.peek(16)[:16]
    for signature, advice in SIGNATURES.items():
        if beginning.startswith(signature):
            raise DataError(f"{name}: {advice}")
    if len(beginning) >= 4 and b"\0\0" in (beginning[0:4:2], beginning[1:4:2]):
        raise DataError(f"{name}: every other byte is NUL, it may be UTF-16. Convert it: iconv -f UTF-16LE -t UTF-8")
    if beginning.startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))


# ------------------------------------------------------------------------------------- lines: JSONL, text


class _Fault(Exception):
    """What is wrong with one row."""


def _line_rows(
    name: str, file: io.BufferedReader, read_values: Callable[[str], dict[str, Any]]
) -> Iterator[Row | BadRow]:
    for number, line in enumerate(iter(partial(file.readline, MAX_ROW), b""), 1):
        where = f"{name}:{number}"
        if len(line) == MAX_ROW and not line.endswith(b"\n"):
            yield BadRow(where, f"a line of more than {MAX_ROW >> 20} MiB, no row is so long. Mend or remove the line")
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_ROW)
            continue
        if line.isspace():
            continue
        try:
            values = read_values(line.decode())
        except UnicodeDecodeError as error:
            yield BadRow(
                where,
                f"not UTF-8 (byte 0x{line[error.start]:02x} in place {error.start + 1} of the line), all text is. "
                "Convert the file, or mend or remove the line",
            )
        except _Fault as fault:
            advice = "Mend or remove the line"
            if line.startswith(b"[") and number == 1:
                advice = "If the file is one JSON list, rename it to .json"
            yield BadRow(where, f"{fault}. {advice}")
        else:
            yield Row(values, where)


def _text_values(line: str) -> dict[str, Any]:
    if "\0" in line:
        raise _Fault("a NUL byte, text has none")
    return {"text": line.removesuffix("\n").removesuffix("\r")}


_DECODER = json.JSONDecoder()
_CONTAINERS = {dict, list}


def _json_values(line: str) -> dict[str, Any]:
    line = line.strip(" \t\r\n")
    try:
        # What `decode` does, without its search for white space, which takes as long as the parsing.
        value, end = _DECODER.raw_decode(line)
        if end < len(line):
            raise json.JSONDecodeError("Extra data", line, end)
    except (ValueError, RecursionError) as error:
        raise _Fault(f"not JSON ({_json_fault(error)}), every line holds one JSON object") from None
    if type(value) is not dict or _is_deep(value, line, 0, len(line)):
        raise _Fault(_object_fault(value))
    return value


def _json_fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{_json_message(error)} at column {error.colno}"
    # The decoder's only other failures, without its advice to a programmer.
    return "nested too deep" if isinstance(error, RecursionError) else "a number of more than 4300 digits"


def _json_message(error: json.JSONDecodeError) -> str:
    """What was wrong, without the words that lead over to the place."""
    return error.msg.rstrip(": ").removesuffix(" at")


def _object_fault(value: Any) -> str:
    if isinstance(value, dict):
        return f"nested more than {MAX_DEPTH} deep, no row needs that"
    names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return f"a JSON {names.get(type(value), 'number')}, every row is an object with named columns"


def _is_deep(value: dict[str, Any], text: str, start: int, end: int) -> bool:
    """Whether an object, read from `text[start:end]`, is nested deeper than MAX_DEPTH. Most are seen not to be at once:
    nothing in them is nested, or too few brackets open.
    """
    if _CONTAINERS.isdisjoint(map(type, value.values())):
        return False
    if text.count("{", start, end) + text.count("[", start, end) <= MAX_DEPTH:
        return False
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        parts = [part for whole in level for part in (whole.values() if type(whole) is dict else whole)]
        level = [part for part in parts if type(part) in _CONTAINERS]
    return bool(level)


# ------------------------------------------------------------------------------------------ JSON lists


class _JsonText:
    """A JSON file's text, of which a window is in memory: what is read and not yet taken.

    Bytes that are not UTF-8 become lone surrogates (surrogateescape), so that only their own row is lost.
    """

    def __init__(self, file: BinaryIO):
        self._read = file.read
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self.window = ""
        self.at = 0
        self.lines = 0
        """Line ends before the window."""

    def grow(self) -> bool:
        """Forget what was taken and read as much again as is left, a block at least; False at the end.

        To double means that a long value is begun anew a few times only.
        """
        self.lines += self.window.count("\n", 0, self.at)
        self.window, self.at = self.window[self.at :], 0
        block = self._read(max(BLOCK, len(self.window)))
        more = self._decode(block, final=not block)
        self.window += more
        return bool(block or more)  # half a character comes out at the end only

    def line(self, at: int) -> int:
        return self.lines + self.window.count("\n", 0, at) + 1

    def next_sign(self) -> str:
        """The next character that is not white space, not yet taken; "" at the end."""
        while True:
            self.at = _SPACE.match(self.window, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.window):
                return self.window[self.at]
            if not self.grow():
                return ""

    def take_value(self) -> tuple[Any, int, int]:
        """The next value and where in the window it begins and ends. Raises _Fault where there is none."""
        self.next_sign()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.window, self.at)
            except json.JSONDecodeError as error:
                fault = f"{_json_message(error)} in line {self.line(error.pos)}"
                ends_there = error.msg.startswith("Unterminated") or not self.window[error.pos :].strip()
                # Only a fault at the window's end can be the window's own: a literal or an escape is cut in two.
                if not ends_there and error.pos < len(self.window) - 16:
                    raise _Fault(f"not JSON ({fault})") from None
                if len(self.window) - self.at > MAX_ROW:
                    raise _Fault(f"longer than {MAX_ROW >> 20} MiB, no row is so long ({fault})") from None
                if not self.grow():
                    found = "the file ends inside it" if ends_there else "not JSON"
                    raise _Fault(f"{found} ({fault})") from None
            except (ValueError, RecursionError) as error:
                raise _Fault(f"not JSON ({_json_fault(error)} in line {self.line(self.at)})") from None
            else:
                start = self.at
                if end > len(self.window) - 16 and not isinstance(value, dict):
                    if self.grow():
                        continue  # a number may go on, `1.` too
                    end, start = end - start, 0
                self.at = end
                return value, start, end


_SPACE = re.compile(r"[ \t\n\r]*")


def _json_rows(name: str, file: io.BufferedReader) -> Iterator[Row | BadRow]:
    text = _JsonText(file)
    number = 0
    sign = text.next_sign()
    if sign == "":
        return
    if sign != "[":
        raise DataError(f"{name}: {_no_list(text)}")
    text.at += 1
    if text.next_sign() == "]":
        text.at += 1
    else:
        while sign != "]":
            number += 1
            where = f"{name} row {number}"
            try:
                value, start, end = text.take_value()
            except _Fault as fault:
                raise DataError(f"{where}: {fault}. Mend it, the rows behind it can't be told from it") from None
            yield _list_row(where, value, text.window, start, end)
            sign = text.next_sign()
            if sign not in (",", "]"):
                found = f"{sign!r} in line {text.line(text.at)}" if sign else "the file's end"
                raise DataError(f"{where}: {found} behind it, a comma or the list's end belongs there. Mend the file")
            text.at += 1
    if text.next_sign():
        raise DataError(f"{name}: more text behind the list's end, line {text.line(text.at)}. Put all rows in one list")


def _list_row(where: str, value: Any, window: str, start: int, end: int) -> Row | BadRow:
    if type(value) is not dict or _is_deep(value, window, start, end):
        return BadRow(where, f"{_object_fault(value)}. Mend or remove it")
    if not _is_utf8(window[start:end]):
        return BadRow(where, "not UTF-8, all text is. Convert the file, or mend or remove the row")
    return Row(value, where)


def _no_list(text: _JsonText) -> str:
    """What a .json file holds that begins with something else than a list, and what to do."""
    try:
        value, _, _ = text.take_value()
    except _Fault as fault:
        return f"not a list of objects: {fault}. Mend it"
    if isinstance(value, dict):
        if text.next_sign():
            return "holds several JSON values, as .jsonl files do. Rename it to .jsonl"
        lists = [key for key, rows in islice(value.items(), 100) if isinstance(rows, list)]
        rows = f"take the list out of it, jq '.[{json.dumps(lists[0][:40])}]' does" if lists else "put [ ] around it"
        return f"holds one JSON object, a list of objects is needed. If it is the only row, {rows}"
    return f"holds {_object_fault(value).split(',')[0]}, a list of objects is needed"


# ------------------------------------------------------------------------------------------------- CSV


def _csv_rows(name: str, file: io.BufferedReader, delimiter: str) -> Iterator[Row | BadRow]:
    csv.field_size_limit(MAX_CELL)  # is 131072 otherwise, for the whole process
    # Strict, since a quote that is never closed would otherwise make one silent cell of the rest of the file.
    reader = csv.reader(_csv_lines(name, file), delimiter=delimiter, strict=True)
    try:
        header = next((cells for cells in reader if cells), None)
    except csv.Error as error:
        raise DataError(f"{name}: the header is not CSV ({reason(error)}). Mend the first line") from None
    if header is None:
        return
    _check_header(name, header)
    number = 0
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            number += 1
            yield BadRow(
                f"{name} row {number}",
                f"not CSV ({reason(error)}, up to line {reader.line_num}), a cell with quotes in it is quoted and they "
                "are doubled. Mend or remove the row",
            )
            continue
        if not cells:
            continue
        number += 1
        where = f"{name} row {number}"
        text = "".join(cells)
        if len(cells) != len(header):
            yield BadRow(
                where,
                f"has {len(cells)} cells, the header names {len(header)} columns, each row has as many cells as the "
                "header. Mend or remove the row",
            )
        elif not _is_utf8(text):
            yield BadRow(where, "not UTF-8, all text is. Convert the file, or mend or remove the row")
        elif "\0" in text:
            yield BadRow(where, "a NUL byte, text has none. Mend or remove the row")
        else:
            yield Row(dict(zip(header, cells, strict=True)), where)


def _csv_lines(name: str, file: io.BufferedReader) -> Iterator[str]:
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    for number, line in enumerate(iter(partial(text.readline, MAX_ROW), ""), 1):
        if len(line) == MAX_ROW:
            raise DataError(f"{name}:{number}: a line of more than {MAX_ROW >> 20} MiB, no row is so long. Mend it")
        yield line


def _check_header(name: str, header: list[str]) -> None:
    advice = "The first line names the columns, each once"
    if not _is_utf8("".join(header)) or any("\0" in column for column in header):
        raise DataError(f"{name}: the header is not UTF-8 text. Convert the file")
    empty = [number for number, column in enumerate(header, 1) if not column.strip()]
    if empty:
        if empty == [1]:
            advice = "If pandas wrote its index there, write with index=False"
        raise DataError(f"{name}: column {empty[0]} of {len(header)} has no name in the header. {advice}")
    column, times = Counter(header).most_common(1)[0]
    if times > 1:
        raise DataError(f"{name}: the header names column {_short(column)} {times} times. {advice}")


def _is_utf8(text: str) -> bool:
    """Whether text that was decoded with surrogateescape was UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------------- Parquet, Arrow


def _table_rows(name: str, kind: str, file: BinaryIO, compression: str) -> Iterator[Row | BadRow]:
    import pyarrow

    number = 0
    with tempfile.TemporaryFile() as unpacked:
        if compression:
            # Both are read from their end.
            shutil.copyfileobj(file, unpacked, BLOCK)
            unpacked.seek(0)
            file = cast(BinaryIO, unpacked)
        try:
            for batch in _parquet_batches(file) if kind == ".parquet" else _arrow_batches(file):
                column, times = Counter(batch.schema.names).most_common(1)[0] if batch.num_columns else ("", 0)
                if times > 1:
                    raise DataError(f"{name}: has {times} columns {_short(column)}, each name once. Rename them")
                for start in range(0, batch.num_rows, 1000):
                    for values in _python_rows(batch.slice(start, 1000)):
                        number += 1
                        where = f"{name} row {number}"
                        yield Row(values, where) if isinstance(values, dict) else BadRow(where, values)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            # MemoryError: a damaged file asks for any length.
            title = "Parquet" if kind == ".parquet" else "Arrow"
            raise DataError(f"{name}: not {title}, or damaged ({reason(error)}). Fetch or make it again") from None


def _parquet_batches(file: BinaryIO) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow.parquet

    # Piece by piece: by itself it would read a whole row group, which may be the whole file.
    parquet = pyarrow.parquet.ParquetFile(file, buffer_size=BLOCK, pre_buffer=False)
    yield from parquet.iter_batches(batch_size=1000)


def _arrow_batches(file: BinaryIO) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow.ipc

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file:
        reader = pyarrow.ipc.open_file(file)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        batches = iter(pyarrow.ipc.open_stream(file))  # what `datasets` writes
    for batch in batches:
        batch.validate(full=True)  # Arrow trusts its offsets: damaged ones read foreign memory
        yield batch


def _python_rows(batch: pyarrow.RecordBatch) -> list[dict[str, Any] | str]:
    """Each row as Python values, or why it can't be had (text that is not UTF-8, a date beyond Python's)."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            found = "not UTF-8" if isinstance(error, UnicodeDecodeError) else f"can't be read ({reason(error)})"
            return [f"{found}. Mend or remove the row"]
        return [values for number in range(batch.num_rows) for values in _python_rows(batch.slice(number, 1))]


# ------------------------------------------------------------------------------------------------- hub


def _hub_rows(source: DataSource) -> Iterator[Row]:
    import datasets

    # `pandas`, `csv` and so on name no dataset but a reader of files of any kind, pickles among them.
    if source.path.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{source.path}"):
        raise DataError(
            f"{source.path}: a reader of `datasets`, no dataset. Give the file or folder itself as the path"
        )
    datasets.disable_progress_bars()
    offline = is_offline()
    try:
        rows = datasets.load_dataset(
            source.path,
            source.name,
            data_dir=source.data_dir,
            split=source.split,
            revision=source.revision,
            streaming=source.streaming,
        )
    except Exception as error:
        advice = "Check the path, or its subset (name) and split"
        if offline:
            advice = "The hub cannot be reached. Check the connection, or give a local file"
        raise DataError(
            f"{shown_path(source.path)}: neither a file here nor a hub dataset that can be loaded "
            f"({type(error).__name__}: {reason(error)}). {advice}"
        ) from None
    number = 0
    try:
        for number, values in enumerate(rows, 1):
            yield Row(dict(values), f"{source.path}[{source.split}] row {number}")
    except Exception as error:
        raise DataError(
            f"{source.path}[{source.split}] row {number + 1}: the hub dataset can't be read on "
            f"({type(error).__name__}: {reason(error)}). Try again, or without streaming"
        ) from None


# --------------------------------------------------------------------------------------------- messages


def _short(text: str) -> str:
    return ascii(text[:40]) + ("..." if len(text) > 40 else "")
