"""Rows from files and from the hub, one by one, each with its place for messages; and the rows as records.

Only the current row and a block of the file are in memory. A row that cannot be read is a `BadRow`, and reading
continues after it. A fault that makes the rest of a file unreadable raises DataError.

JSON lists are read through a window. Not by ijson: it replaces lone surrogates by "?", refuses NaN, and numbers beyond
64 bits as floats; one byte that is not UTF-8 costs it all later rows; its errors have no line; one item may fill the
memory.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
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
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from rlhf_cli.config.data import DataSource
from rlhf_cli.data.formats import Format, Purpose, read_record, recognise
from rlhf_cli.data.paths import COMPRESSIONS, KINDS, ending, find_files, reason
from rlhf_cli.data.records import BadRow, Record, Row, shown
from rlhf_cli.errors import DataError
from rlhf_cli.hub import is_offline
from rlhf_cli.printing import is_utf8, printable

if TYPE_CHECKING:
    import pyarrow

BLOCK = 2**20
"""Bytes per read."""
MAX_ROW = 2**26
"""Longest line, or item of a JSON list, in bytes or characters. An endless line, or a few kilobytes of gzip that unpack
into gigabytes, must not fill the memory."""
MAX_DEPTH = 200
"""Deepest nesting of a JSON row. Deeper ones would overflow the stack of code that copies or writes the row."""
MAX_CELL = 2**24
"""Longest cell of a CSV file in characters. A quote that is never closed would otherwise consume the rest of the
file."""
NOT_UTF8 = "not UTF-8, all text must be. Convert the file, or fix or remove the row"
DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
# The first bytes of files whose name claims another type.
SIGNATURES = {
    b"\x1f\x8b": "is gzip. Add .gz to its name",
    b"BZh91AY&SY": "is bzip2. Add .bz2 to its name",
    b"\xfd7zXZ\0": "is xz. Add .xz to its name",
    b"\x28\xb5\x2f\xfd": "is Zstandard. Add .zst to its name",
    b"PK\x03\x04": "is a zip archive or an Excel file. Unpack it, or save it as CSV",
    b"PAR1": "is Parquet. Rename it to .parquet",
    b"ARROW1": "is Arrow. Rename it to .arrow",
    codecs.BOM_UTF16_LE: "is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8",
}


def read_rows(source: DataSource) -> Iterator[Row | BadRow]:
    """The first `source.limit` rows of a source in order, including bad ones.

    The ending of a file's name decides its type (paths.py); each line of a .txt file is a row with the column `text`.
    Lines and rows are counted from 1; blank lines count as lines but give no row. Cells of a CSV file stay text.
    Escaped lone surrogates, NaN and Infinity of a JSON file are kept.

    Raises DataError, at the first row or later, for a file that is missing, truncated or not what its name says, for
    a JSON list with a fault in it, and for a source without rows. Dropping the iterator closes the file.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    ...     _ = file.write('{"prompt": "2 + 2 =", "response": " 4"}\\n{"prompt": }\\n')
    ...     file.flush()
    ...     row, bad = read_rows(DataSource(path=file.name))
    >>> row.values
    {'prompt': '2 + 2 =', 'response': ' 4'}
    >>> bad.where.endswith(".jsonl:2"), bad.reason
    (True, 'not JSON (Expecting value at column 12), every line must hold one JSON object. Fix or remove the line')
    """
    rows = islice(_rows(source), source.limit)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{printable(source.path)}: has no rows, at least one is needed. Is it the right file?")
    yield first
    yield from rows


def read_records(
    source: DataSource, purpose: Purpose, kinds: dict[str, str] | None = None, *, prompt_words: int = 0
) -> Iterator[Record | DataError]:
    """The rows of a source as records, and the error of each row that cannot be read.

    The first `prompt_words` words of a plain text are its prompt. `kinds` gets the name of the source's format.
    Raises DataError if no format fits the first readable row: the file is the wrong one.
    """
    format_: Format | None = None
    for row in read_rows(source):
        if isinstance(row, BadRow):
            yield DataError(f"{row.where}: {row.reason}")
            continue
        if format_ is None:
            format_ = recognise(row, source, purpose)
            if kinds is not None:
                kinds[source.path] = format_.name
        try:
            record = read_record(row, format_, source, prompt_words=prompt_words)
        except DataError as error:
            yield error
        else:
            yield record


# ------------------------------------------------------------------------------------------- files


def _rows(source: DataSource) -> Iterator[Row | BadRow]:
    files = find_files(source.path)
    if not files:
        yield from _hub_rows(source)
    elif source.name or source.data_dir or source.revision or source.streaming:
        rule = "name, data_dir, revision and streaming apply to hub datasets only. Remove them"
        raise DataError(f"{printable(source.path)}: is a local path; {rule}")
    for path in files:
        yield from _file_rows(path)


def _file_rows(path: Path) -> Iterator[Row | BadRow]:
    name = printable(str(path))
    kind, compression = ending(path)
    if kind not in KINDS:
        rule = f"it must be one of {', '.join(KINDS)} (and may be followed by {', '.join(COMPRESSIONS)})"
        raise DataError(f"{name}: unknown ending, {rule}. Rename the file")
    try:
        with io.BufferedReader(_open(path, compression), BLOCK) as file:
            if kind in (".parquet", ".arrow"):
                yield from table_rows(name, kind, file, compression)
                return
            _check_beginning(name, file)
            if kind in (".csv", ".tsv"):
                yield from csv_rows(name, file, "," if kind == ".csv" else "\t")
            elif kind == ".json":
                yield from json_rows(name, file)
            else:
                yield from _line_rows(name, file, _text_values if kind == ".txt" else _json_values)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        found = f"cannot be read{f' as {compression}' if compression else ''} ({reason(error)})"
        advice = "It may be truncated or of another type: download or write it again"
        raise DataError(f"{name}: {found}. {advice}") from None


def _open(path: Path, compression: str) -> Any:
    """A reader of the decompressed bytes. A BufferedReader around it splits lines much faster than it does itself."""
    # Not fsspec's compression="infer": it reads a path with "::" in it as a URL, and needs another package for .zst.
    if compression == ".zst":
        import pyarrow  # decompresses Zstandard, which Python has from 3.14 on

        return pyarrow.input_stream(path.open("rb"), compression="zstd")
    readers: dict[str, Any] = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}
    return readers[compression](path) if compression else path.open("rb", buffering=0)


def _check_beginning(name: str, file: io.BufferedReader) -> None:
    """Skip a UTF-8 byte order mark; raise DataError for a file that is clearly not UTF-8 text."""
    beginning = file.peek(16)[:16]
    for signature, advice in SIGNATURES.items():
        if beginning.startswith(signature):
            raise DataError(f"{name}: {advice}")
    if len(beginning) >= 4 and b"\0\0" in (beginning[0:4:2], beginning[1:4:2]):
        raise DataError(f"{name}: every other byte is NUL, it may be UTF-16. Convert it: iconv -f UTF-16LE -t UTF-8")
    if beginning.startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))


# ------------------------------------------------------------------------------------- lines: JSONL, text


def _line_rows(
    name: str, file: io.BufferedReader, read_values: Callable[[str], dict[str, Any]]
) -> Iterator[Row | BadRow]:
    for number, line in enumerate(iter(partial(file.readline, MAX_ROW), b""), 1):
        where = f"{name}:{number}"
        if len(line) == MAX_ROW and not line.endswith(b"\n"):
            yield BadRow(where, f"longer than {MAX_ROW >> 20} MiB, the limit for a line. Fix or remove the line")
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_ROW)
            continue
        if line.isspace():
            continue
        try:
            values = read_values(line.decode())
        except UnicodeDecodeError as error:
            found = f"not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1} of the line)"
            yield BadRow(where, f"{found}, all text must be. Convert the file, or fix or remove the line")
        except Fault as fault:
            advice = "Fix or remove the line"
            if line.startswith(b"[") and number == 1:
                advice = "If the file is one JSON list, rename it to .json"
            yield BadRow(where, f"{fault}. {advice}")
        else:
            yield Row(values, where)


def _text_values(line: str) -> dict[str, Any]:
    if "\0" in line:
        raise Fault("contains a NUL byte, text must not")
    return {"text": line.removesuffix("\n").removesuffix("\r")}


def _json_values(line: str) -> dict[str, Any]:
    line = line.strip(" \t\r\n")
    try:
        # `decode` without its search for white space, which takes as long as the parsing.
        value, end = DECODER.raw_decode(line)
        if end < len(line):
            raise json.JSONDecodeError("Extra data", line, end)
    except (ValueError, RecursionError) as error:
        column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise Fault(f"not JSON ({json_fault(error)}{column}), every line must hold one JSON object") from None
    if type(value) is not dict or is_deep(value, line, 0, len(line)):
        raise Fault(object_fault(value))
    return value


# ----------------------------------------------------------------------------------------------- JSON


class Fault(Exception):
    """What is wrong with one row."""


def json_fault(error: Exception) -> str:
    """The message of a JSON decoder's exception in our words, without the position."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg.rstrip(": ").removesuffix(" at")
    # The decoder's only other failures, without its advice to programmers.
    return "nested too deeply" if isinstance(error, RecursionError) else "a number of more than 4300 digits"


def object_fault(value: Any) -> str:
    """Why a JSON value cannot be a row."""
    if isinstance(value, dict):
        return f"nested more than {MAX_DEPTH} deep, the limit for a row"
    names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return f"a JSON {names.get(type(value), 'number')}, every row must be an object with named columns"


def is_deep(value: dict[str, Any], text: str, start: int, end: int) -> bool:
    """Is an object that was read from `text[start:end]` nested deeper than MAX_DEPTH?"""
    if text.count("{", start, end) + text.count("[", start, end) <= MAX_DEPTH:
        return False  # most rows have too few brackets
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = [child for item in level for child in (item.values() if type(item) is dict else item)]
        level = [child for child in children if type(child) in (dict, list)]
    return bool(level)


class _JsonText:
    """The text of a JSON file, with a window in memory: the part that was read but not yet consumed.

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
        """Drop the consumed part and read at least a block; False at the end of the file."""
        self.lines += self.window.count("\n", 0, self.at)
        self.window, self.at = self.window[self.at :], 0
        # The window doubles, so that the decoder restarts a long value only a few times.
        block = self._read(max(BLOCK, len(self.window)))
        more = self._decode(block, final=not block)
        self.window += more
        return bool(block or more)  # at the end an incomplete character may still come out

    def line(self, at: int) -> int:
        """The line number of a position in the window."""
        return self.lines + self.window.count("\n", 0, at) + 1

    def next_sign(self) -> str:
        """The next character that is not white space, without consuming it; "" at the end."""
        while True:
            self.at = _SPACE.match(self.window, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.window):
                return self.window[self.at]
            if not self.grow():
                return ""

    def take_value(self) -> tuple[Any, int, int]:
        """Consume the next value; returns it with its start and end in the window. Raises Fault."""
        self.next_sign()
        while True:
            try:
                value, end = DECODER.raw_decode(self.window, self.at)
            except json.JSONDecodeError as error:
                at_end = error.msg.startswith("Unterminated") or not self.window[error.pos :].strip()
                # A literal or an escape that the window cuts in two fails a few characters before its end.
                may_go_on = at_end or error.pos >= len(self.window) - 16
                is_long = len(self.window) - self.at > MAX_ROW
                fault = f"{json_fault(error)} in line {self.line(error.pos)}"
                if may_go_on and is_long:
                    raise Fault(f"longer than {MAX_ROW >> 20} MiB, the limit for a row ({fault})") from None
                if not may_go_on or not self.grow():
                    raise Fault(f"{'the file ends inside it' if at_end else 'not JSON'} ({fault})") from None
            except (ValueError, RecursionError) as error:
                raise Fault(f"not JSON ({json_fault(error)} in line {self.line(self.at)})") from None
            else:
                start = self.at
                if end > len(self.window) - 16 and not isinstance(value, dict):
                    if self.grow():
                        continue  # a number may continue, and so may `1.`
                    end, start = end - start, 0
                self.at = end
                return value, start, end


def json_rows(name: str, file: io.BufferedReader) -> Iterator[Row | BadRow]:
    """The objects of a JSON list; raises DataError for a fault after which rows cannot be told apart."""
    text = _JsonText(file)
    number = 0
    sign = text.next_sign()
    if sign == "":
        return
    if sign != "[":
        raise DataError(f"{name}: {_not_a_list(text)}")
    text.at += 1
    if (sign := text.next_sign()) == "]":
        text.at += 1
    while sign != "]":
        number += 1
        where = f"{name} row {number}"
        try:
            value, start, end = text.take_value()
        except Fault as fault:
            raise DataError(f"{where}: {fault}. Fix it: the rows after it cannot be separated from it") from None
        if type(value) is not dict or is_deep(value, text.window, start, end):
            yield BadRow(where, f"{object_fault(value)}. Fix or remove it")
        elif not is_utf8(text.window[start:end]):
            yield BadRow(where, NOT_UTF8)
        else:
            yield Row(value, where)
        sign = text.next_sign()
        if sign not in (",", "]"):
            found = f"{sign!r} in line {text.line(text.at)}" if sign else "the end of the file"
            raise DataError(f"{where}: {found} follows, it must be a comma or the end of the list. Fix the file")
        text.at += 1
    if text.next_sign():
        raise DataError(f"{name}: text after the end of the list, line {text.line(text.at)}. Put all rows in one list")


def _not_a_list(text: _JsonText) -> str:
    """What a .json file contains that does not begin with a list, and what to do."""
    try:
        value, _, _ = text.take_value()
    except Fault as fault:
        return f"not a list of objects: {fault}. Fix it"
    if isinstance(value, dict):
        if text.next_sign():
            return "contains several JSON values, as .jsonl files do. Rename it to .jsonl"
        lists = [key for key, rows in islice(value.items(), 100) if isinstance(rows, list)]
        rows = f"extract the list: jq '.[{json.dumps(lists[0][:40])}]'" if lists else "put [ ] around it"
        return f"contains one JSON object, it must be a list of objects. If it is the only row, {rows}"
    return f"contains {object_fault(value).split(',')[0]}, it must be a list of objects"


# ------------------------------------------------------------------------------------------------- CSV


def csv_rows(name: str, file: io.BufferedReader, delimiter: str) -> Iterator[Row | BadRow]:
    """The rows below the header; cells stay text."""
    csv.field_size_limit(MAX_CELL)  # the default is 131072; the limit holds for the whole process
    # Strict: without it, a quote that is never closed makes one cell of the rest of the file, without an error.
    reader = csv.reader(_csv_lines(name, file), delimiter=delimiter, strict=True)
    try:
        header = next((cells for cells in reader if cells), None)
    except csv.Error as error:
        raise DataError(f"{name}: the header is not CSV ({reason(error)}). Fix the first line") from None
    if header is None:
        return
    _check_header(name, header)
    number = 1
    while True:
        where = f"{name} row {number}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            rule = "a cell that contains quotes must be quoted and its quotes doubled. Fix or remove the row"
            yield BadRow(where, f"not CSV ({reason(error)}, up to line {reader.line_num}), {rule}")
        else:
            if not cells:
                continue
            text = "".join(cells)
            if len(cells) != len(header):
                rule = f"it must have one for each of the header's {len(header)} columns. Fix or remove the row"
                yield BadRow(where, f"has {len(cells)} cells, {rule}")
            elif not is_utf8(text):
                yield BadRow(where, NOT_UTF8)
            elif "\0" in text:
                yield BadRow(where, "contains a NUL byte, text must not. Fix or remove the row")
            else:
                yield Row(dict(zip(header, cells, strict=True)), where)
        number += 1


def _csv_lines(name: str, file: io.BufferedReader) -> Iterator[str]:
    text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="")
    for number, line in enumerate(iter(partial(text.readline, MAX_ROW), ""), 1):
        if len(line) == MAX_ROW:
            raise DataError(f"{name}:{number}: longer than {MAX_ROW >> 20} MiB, the limit for a line. Fix it")
        yield line


def _check_header(name: str, header: list[str]) -> None:
    advice = "The first line must name each column, without repeating a name"
    if not is_utf8("".join(header)) or any("\0" in column for column in header):
        raise DataError(f"{name}: the header is not UTF-8 text. Convert the file")
    empty = [number for number, column in enumerate(header, 1) if not column.strip()]
    if empty == [1]:
        advice = "If pandas wrote its index there, write the file with index=False"
    if empty:
        raise DataError(f"{name}: column {empty[0]} of {len(header)} has no name in the header. {advice}")
    column, times = Counter(header).most_common(1)[0]
    if times > 1:
        raise DataError(f"{name}: the header names column {shown(column)} {times} times. {advice}")


# ------------------------------------------------------------------------------------- Parquet, Arrow


def table_rows(name: str, kind: str, file: BinaryIO, compression: str) -> Iterator[Row | BadRow]:
    import pyarrow.parquet

    number = 0
    with tempfile.TemporaryFile() as unpacked:
        if compression:
            # Both types are read from their end, which a compressed stream cannot do.
            shutil.copyfileobj(file, unpacked, BLOCK)
            unpacked.seek(0)
            file = cast(BinaryIO, unpacked)
        try:
            if kind == ".parquet":
                # Without buffering, pyarrow would read a whole row group at once, which may be the whole file.
                parquet = pyarrow.parquet.ParquetFile(file, buffer_size=BLOCK, pre_buffer=False)
                batches = parquet.iter_batches(batch_size=1000)
            else:
                batches = _arrow_batches(file)
            for batch in batches:
                column, times = Counter(batch.schema.names).most_common(1)[0] if batch.num_columns else ("", 0)
                if times > 1:
                    raise DataError(f"{name}: has {times} columns named {shown(column)}. Rename them")
                for start in range(0, batch.num_rows, 1000):
                    for values in _python_rows(batch.slice(start, 1000)):
                        number += 1
                        where = f"{name} row {number}"
                        yield Row(values, where) if isinstance(values, dict) else BadRow(where, values)
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            # MemoryError: a damaged file may ask for any length.
            title = "Parquet" if kind == ".parquet" else "Arrow"
            raise DataError(f"{name}: not {title}, or damaged ({reason(error)}). Download or write it again") from None


def _arrow_batches(file: BinaryIO) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow.ipc

    head = file.read(6)
    file.seek(0)
    if head == b"ARROW1":
        reader = pyarrow.ipc.open_file(file)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        batches = iter(pyarrow.ipc.open_stream(file))  # `datasets` writes this kind
    for batch in batches:
        batch.validate(full=True)  # Arrow trusts its offsets: damaged ones would read foreign memory
        yield batch


def _python_rows(batch: pyarrow.RecordBatch) -> list[dict[str, Any] | str]:
    """Each row as Python values, or why it cannot be read (text that is not UTF-8, a date beyond Python's range)."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            found = "not UTF-8" if isinstance(error, UnicodeDecodeError) else f"cannot be read ({reason(error)})"
            return [f"{found}. Fix or remove the row"]
        return [values for number in range(batch.num_rows) for values in _python_rows(batch.slice(number, 1))]


# ------------------------------------------------------------------------------------------------- hub


def _hub_rows(source: DataSource) -> Iterator[Row]:
    import datasets

    # `pandas`, `csv` and others are not datasets but readers of files of any kind, including pickles.
    if source.path.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{source.path}"):
        found = "names a file reader of `datasets`, not a dataset"
        raise DataError(f"{source.path}: {found}. Give the path of the file or folder")
    datasets.disable_progress_bars()
    advice = "Check the path, or its subset (name) and split"
    if is_offline():
        advice = "The hub cannot be reached. Check the connection, or give a local file"
    settings = source.model_dump(include={"data_dir", "split", "revision", "streaming"})
    try:
        rows = datasets.load_dataset(source.path, source.name, **settings)
    except Exception as error:
        found = f"neither a local file nor a hub dataset that can be loaded ({type(error).__name__}: {reason(error)})"
        raise DataError(f"{printable(source.path)}: {found}. {advice}") from None
    number, where = 0, f"{source.path}[{source.split}] row"
    try:
        for number, values in enumerate(rows, 1):
            yield Row(dict(values), f"{where} {number}")
    except Exception as error:
        found = f"the hub dataset cannot be read further ({type(error).__name__}: {reason(error)})"
        raise DataError(f"{where} {number + 1}: {found}. Try again, or set streaming: false") from None
