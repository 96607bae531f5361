"""Rows of CSV and TSV files, and of Parquet and Arrow files."""

from __future__ import annotations

import csv
import io
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from rlhf_cli.data.paths import reason
from rlhf_cli.data.records import shown
from rlhf_cli.data.rows import BLOCK, MAX_ROW, BadRow, Row
from rlhf_cli.errors import DataError
from rlhf_cli.printing import is_utf8

if TYPE_CHECKING:
    import pyarrow

MAX_CELL = 2**24
"""Longest cell of a CSV file in characters. A quote that is never closed would otherwise consume the rest of the
file."""


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
                f"not CSV ({reason(error)}, up to line {reader.line_num}), a cell that contains quotes must be quoted "
                "and its quotes doubled. Fix or remove the row",
            )
            continue
        if cells:
            number += 1
            yield _csv_row(f"{name} row {number}", header, cells)


def _csv_row(where: str, header: list[str], cells: list[str]) -> Row | BadRow:
    text = "".join(cells)
    if len(cells) != len(header):
        return BadRow(
            where,
            f"has {len(cells)} cells, it must have one for each of the header's {len(header)} columns. Fix or remove "
            "the row",
        )
    if not is_utf8(text):
        return BadRow(where, "not UTF-8, all text must be. Convert the file, or fix or remove the row")
    if "\0" in text:
        return BadRow(where, "contains a NUL byte, text must not. Fix or remove the row")
    return Row(dict(zip(header, cells, strict=True)), where)


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
    if empty:
        if empty == [1]:
            advice = "If pandas wrote its index there, write the file with index=False"
        raise DataError(f"{name}: column {empty[0]} of {len(header)} has no name in the header. {advice}")
    column, times = Counter(header).most_common(1)[0]
    if times > 1:
        raise DataError(f"{name}: the header names column {shown(column)} {times} times. {advice}")


# ------------------------------------------------------------------------------------- Parquet, Arrow


def table_rows(name: str, kind: str, file: BinaryIO, compression: str) -> Iterator[Row | BadRow]:
    """The rows of a Parquet or Arrow file."""
    import pyarrow

    number = 0
    with tempfile.TemporaryFile() as unpacked:
        if compression:
            # Both types are read from their end, which a compressed stream cannot do.
            shutil.copyfileobj(file, unpacked, BLOCK)
            unpacked.seek(0)
            file = cast(BinaryIO, unpacked)
        try:
            for batch in _parquet_batches(file) if kind == ".parquet" else _arrow_batches(file):
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


def _parquet_batches(file: BinaryIO) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow.parquet

    # Without buffering, pyarrow would read a whole row group at once, which may be the whole file.
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
