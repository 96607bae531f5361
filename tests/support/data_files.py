"""The bytes of data files of every kind, and their compressions."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
from collections.abc import Callable
from typing import Any

import pyarrow.parquet


def zstd(content: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def csv_bytes(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def parquet_bytes(table: pyarrow.Table, compression: str = "snappy", rows: int | None = None) -> bytes:
    """A Parquet file with groups of `rows` rows."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, compression=compression, use_dictionary=False, row_group_size=rows)
    return file.getvalue()


def arrow_bytes(
    table: pyarrow.Table, new: Callable[..., Any] = pyarrow.ipc.new_stream, rows: int | None = None
) -> bytes:
    """An Arrow stream, or file, with batches of `rows` rows."""
    file = io.BytesIO()
    with new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return file.getvalue()
