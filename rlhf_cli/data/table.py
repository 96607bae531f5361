"""Rows on disk, one Arrow file per side. The files are memory-mapped: two million rows cost no more memory than two."""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints, overload

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

T = TypeVar("T")

TOKENS = {
    "list[int]": pa.list_(pa.int32()),
    "list[bool]": pa.list_(pa.bool_()),
    "list[list[int]]": pa.list_(pa.list_(pa.int32())),
    "float": pa.float64(),
}
"""Annotations of the fields that Arrow holds directly. Other fields are stored as JSON."""
BATCH = 1000
"""Rows of one record batch, held in memory while a table is written."""


class Table(Sequence[T], Generic[T]):
    """The rows of an Arrow file as instances of one dataclass, each made on access.

    Values without a JSON type (dates, decimals of a Parquet file) come back as text.
    """

    def __init__(self, path: Path, kind: type[T]):
        self._kind = kind
        with pa.memory_map(str(path)) as file:
            self._batches = pa.ipc.open_file(file).read_all().to_batches()
        self._starts = [0]
        for batch in self._batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
        self._adapters = _adapters(kind)

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._starts, at) - 1
        batch, row = self._batches[number], at - self._starts[number]
        values = {}
        for name, adapter in self._adapters.items():
            value = batch.column(name)[row].as_py()
            values[name] = value if adapter is None else adapter.validate_python(json.loads(value))
        return self._kind(**values)

    def __iter__(self) -> Iterator[T]:
        return (self[i] for i in range(len(self)))

    def lengths(self, name: str) -> np.ndarray:
        """The number of elements of each row's list `name`, [len] int64. Nothing else is read."""
        parts = [np.diff(_buffer(batch.column(name), np.int32, batch.num_rows + 1)) for batch in self._batches]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

    def present(self, name: str, values: Sequence[int]) -> set[int]:
        """Those of `values` that are in a row's list of integers `name`. Nothing else is read."""
        found: set[int] = set()
        for flat in (batch.column(name).values for batch in self._batches):
            found |= set(np.intersect1d(_buffer(flat, np.int32, len(flat)), np.asarray(values, np.int32)).tolist())
        return found

    def numbers(self, name: str) -> np.ndarray:
        """The number `name` of each row, [len] float64."""
        parts = [_buffer(batch.column(name), np.float64, batch.num_rows) for batch in self._batches]
        return np.concatenate([np.zeros(0), *parts])


class TableWriter(Generic[T]):
    """Writes instances of one dataclass to an Arrow file, a thousand at a time."""

    def __init__(self, path: Path, kind: type[T]):
        self._adapters = _adapters(kind)
        fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        self._schema = pa.schema([(name, TOKENS.get(type_, pa.large_string())) for name, type_ in fields.items()])
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
        self._rows: list[T] = []
        self.num_rows = 0

    def write(self, rows: Iterable[T]) -> None:
        """Add rows. They are on disk after `close`."""
        for row in rows:
            self._rows.append(row)
            self.num_rows += 1
            if len(self._rows) == BATCH:
                self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()
        self._file.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        columns = []
        for name, adapter in self._adapters.items():
            values = [getattr(row, name) for row in self._rows]
            if adapter is not None:
                # As ASCII: a lone surrogate in one of a row's other columns cannot be written as UTF-8.
                values = [json.dumps(adapter.dump_python(value), default=str) for value in values]
            columns.append(_column(values, self._schema.field(name).type))
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows = []


# Arrow's own `pa.array` and `to_numpy` import pandas, which takes longer than a small model's first steps. So columns
# are built from and read as their buffers: null flags (none here), the start of each list or text, then the values.


def _column(values: list, type_: pa.DataType) -> pa.Array:
    """The same as `pa.array(values, type_)`, for the types of a table and without nulls."""
    if pa.types.is_list(type_):
        starts = _memory(np.cumsum([0, *map(len, values)]), np.int32)
        flat = [item for row in values for item in row]
        return pa.ListArray.from_buffers(type_, len(values), [None, starts], children=[_column(flat, type_.value_type)])
    if pa.types.is_large_string(type_):
        texts = [value.encode() for value in values]
        starts = _memory(np.cumsum([0, *map(len, texts)]), np.int64)
        return pa.Array.from_buffers(type_, len(values), [None, starts, pa.py_buffer(b"".join(texts))])
    if pa.types.is_boolean(type_):
        flags = _memory(np.packbits(np.array(values, bool), bitorder="little"), np.uint8)
        return pa.Array.from_buffers(type_, len(values), [None, flags])
    return pa.Array.from_buffers(type_, len(values), [None, _memory(values, type_.to_pandas_dtype())])


def _memory(values: Any, type_: type[np.generic]) -> pa.Buffer:
    return pa.py_buffer(np.asarray(values, type_))


def _buffer(column: pa.Array, type_: type[np.generic], num: int) -> np.ndarray:
    """The starts of the lists in a column, or the numbers of a column."""
    assert column.offset == 0
    assert column.null_count == 0
    return np.frombuffer(column.buffers()[1], type_, num)


def _adapters(kind: type) -> dict[str, TypeAdapter[Any] | None]:
    """The JSON adapter of each field, or None for fields that Arrow holds directly."""
    types = get_type_hints(kind)
    return {
        field.name: None if str(field.type) in TOKENS else TypeAdapter(types[field.name])
        for field in dataclasses.fields(kind)
    }
