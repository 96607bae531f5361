"""Tokenise the rows of a stage once, and keep the tokens in a cache on disk, one Arrow file per side.

The files are memory-mapped: two million rows cost no more memory than two.

A cache entry is a folder named by a hash of everything that decides its bytes: the data's bytes, every setting that
selects or cuts rows, the tokenizer and its chat template, and the code that reads and encodes. A change of any of these
makes a new entry. You may delete the cache at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints, overload

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_cli.config.data import DataSource
from rlhf_cli.data.encode import Skipped
from rlhf_cli.data.encoders import RowEncoder
from rlhf_cli.data.paths import data_fingerprint
from rlhf_cli.data.records import batched
from rlhf_cli.data.row_counts import Report
from rlhf_cli.data.splits import SIDES
from rlhf_cli.data.stage_rows import seen_rows
from rlhf_cli.errors import DataError
from rlhf_cli.files import cache_root, digest_file

T = TypeVar("T")

TOKENS = {
    "list[int]": pa.list_(pa.int32()),
    "list[bool]": pa.list_(pa.bool_()),
    "list[list[int]]": pa.list_(pa.list_(pa.int32())),
    "float": pa.float64(),
}
"""Annotations of the fields that Arrow holds directly. Other fields are stored as JSON."""
CHUNK = 1000
"""Rows encoded and written at a time: enough for the tokenizer to use every core."""
KEPT_DAYS = 30
"""An entry that was not used for this many days is deleted."""
FOLDER, MARKER = "rlhf-tokens", ".rlhf-token-cache"
"""The folder of the entries in the cache directory, and the empty file that says that rlhf made it. Nothing outside
such a folder is ever deleted, because the user may name a directory with other files in it."""
ENTRY = re.compile(r"[0-9a-f]{32}(\.lock|\.partial)?")
ENTRY_FILES = ("facts.json", *(f"{side}.arrow" for side in SIDES))


@dataclass(frozen=True)
class Tokenised(Generic[T]):
    """The token items of a stage's rows, and what the user should read about them."""

    train: Table[T]
    validation: Table[T]
    test: Table[T]
    lines: list[str]
    warnings: list[str]
    skipped_share: float
    """The share of the training items that are not used, but for duplicates."""


def tokenise(encoder: RowEncoder[T], *, longest: int | None = None) -> Tokenised[T]:
    """Encode the rows of a stage, or take them from the cache. The model takes at most `longest` tokens, for warnings.

    Raises DataError for rows that cannot be read, if no training row is left, or if the disk is full.
    """
    key = _key(encoder)
    with _entry(key) as entry:
        report, lines = _stored_report(entry), []
        if report is None:
            if entry.is_dir():
                lines.append(f"{entry}: the cached tokens are damaged, the rows are tokenised again")
            report = _build(entry, encoder, longest)
        os.utime(entry)
        train, validation, test = (Table(entry / f"{side}.arrow", encoder.kind) for side in SIDES)
    spec = encoder.stage_rows
    warnings = report.warnings(spec.role, spec.length_key, longest)
    skipped = report.skipped_share("train")
    return Tokenised(train, validation, test, [*lines, *report.lines(spec.role)], warnings, skipped)


def _build(entry: Path, encoder: RowEncoder[T], longest: int | None) -> Report:
    report = Report()
    partial = entry.with_name(f"{entry.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        _write_tables(partial, encoder, report, longest)
        digests = {side: digest_file(partial / f"{side}.arrow") for side in SIDES}
        facts = {"report": TypeAdapter(Report).dump_python(report), "digests": digests}
        (partial / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        shutil.rmtree(entry, ignore_errors=True)
        partial.rename(entry)
    except OSError as error:
        found = f"{entry.parent}: could not write the tokenised rows ({error.strerror or error})"
        advice = "Free disk space, or set the environment variable RLHF_CACHE to another folder"
        raise DataError(f"{found}. {advice}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def _write_tables(folder: Path, encoder: RowEncoder[T], report: Report, longest: int | None) -> None:
    """Write the items of each side as an Arrow file. Raises DataError if every row of a side was skipped."""
    spec = encoder.stage_rows
    writers = {side: TableWriter(folder / f"{side}.arrow", encoder.kind) for side in SIDES}
    chunks = batched(seen_rows(spec, report), CHUNK)
    by_side = ((side, [row for own, row in chunk if own == side]) for chunk in chunks for side in SIDES)
    for side, rows in by_side:
        items = []
        if not spec.keep_special:
            found = [token for row in rows if (token := encoder.special_token_in(row)) is not None]
            report.special.update({side: len(found)} if found else {})
            report.special_token = report.special_token or next(iter(found), "")
        for item in encoder.encode([replace(row, key="") for row in rows]):  # the prompt again, in most rows
            if isinstance(item, DataError):
                report.bad_row(spec.rows, side, item)
            elif isinstance(item, Skipped):
                report.skip(side, item.reason, item.needs)
            else:
                items.append(item)
        report.kept[side] += len(items)
        writers[side].write(items)
    for side, writer in writers.items():
        writer.close()
        if report.rows[side] and not writer.num_rows:
            raise report.nothing_left(spec.role, side, spec.length_key, longest)


@contextlib.contextmanager
def _entry(key: str) -> Iterator[Path]:
    """The folder of a cache entry, locked for this process.

    It is a temporary folder, deleted once the process has mapped the tables, if the cache is not ours or not writable,
    or if its file system has no locks.
    """
    root = cache_root() / FOLDER
    try:
        root.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in root.iterdir()}  # one listing: another process may be creating the folder
        if names and MARKER not in names:
            raise FileExistsError(f"{root}: holds files, but no {MARKER}")
        (root / MARKER).touch()
        lock = (root / f"{key}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="rlhf-tokens-") as folder:
            yield Path(folder) / key
        return
    with lock:
        _remove_old(root)
        yield root / key


def _stored_report(entry: Path) -> Report | None:
    """The report of a cache entry, or None if there is no entry or any token of it changed since it was written.

    Hashing costs about a second per gigabyte of tokens. A changed token would train another model unseen.
    """
    try:
        facts = json.loads((entry / "facts.json").read_text(encoding="utf-8"))
        report = TypeAdapter(Report).validate_python(facts["report"])
        digests = {side: digest_file(entry / f"{side}.arrow") for side in SIDES}
        return report if facts["digests"] == digests else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_old(root: Path) -> None:
    """Delete the entries in `root` that were not used for KEPT_DAYS, and no file that rlhf did not write."""
    too_old = time.time() - KEPT_DAYS * 86400
    for path in root.iterdir():
        with contextlib.suppress(OSError):
            if not ENTRY.fullmatch(path.name) or path.is_symlink() or path.stat().st_mtime >= too_old:
                continue
            if path.suffix == ".lock":
                path.unlink()
                continue
            for name in ENTRY_FILES:
                (path / name).unlink(missing_ok=True)
            path.rmdir()  # fails if the folder holds anything else


def _key(encoder: RowEncoder[T]) -> str:
    spec = encoder.stage_rows
    facts = {
        "data": [_digest_source(source) for sources in spec.rows.by_side.values() for source in sources],
        "rows": spec.rows.model_dump(mode="json"),
        "settings": {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "rows"},
        "reads last token": encoder.reads_last_token,
        "tokenizer": _digest_tokenizer(encoder.tokenizer),
        "code": _digest_code(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=asdict).encode()).hexdigest()[:32]


def _digest_source(source: DataSource) -> str:
    """The fingerprint of the data; for a hub dataset with the current commit of its branch, if the hub answers."""
    found = data_fingerprint(source.path, source.revision)
    if found.startswith("hub:"):
        import huggingface_hub

        with contextlib.suppress(Exception):
            info = huggingface_hub.HfApi().dataset_info(source.path, revision=source.revision, timeout=10)
            return f"{found} {info.sha}"
    return found


def _digest_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that decides a tokenizer's ids, without its last truncation and padding."""
    state: Any = tokenizer.init_kwargs | {"vocabulary": tokenizer.get_vocab()}
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    facts = [type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map, state]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _digest_code() -> str:
    """Hashes of this package's files, and the versions of the libraries."""
    files = map(digest_file, sorted(Path(__file__).parent.glob("*.py")))
    libraries = map(importlib.metadata.version, ("tokenizers", "transformers", "datasets", "pyarrow"))
    return " ".join([*files, *libraries])


# ------------------------------------------------------------------------------------------- rows on disk


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
        at = range(len(self))[index]
        number = bisect_right(self._starts, at) - 1
        batch, row = self._batches[number], at - self._starts[number]
        values = {}
        for name, adapter in self._adapters.items():
            value = batch.column(name)[row].as_py()
            values[name] = value if adapter is None else adapter.validate_python(json.loads(value))
        return self._kind(**values)

    def lengths(self, name: str) -> np.ndarray:
        """The number of elements of each row's list `name`, [len] int64. Nothing else is read."""
        parts = [np.diff(_buffer(batch.column(name), np.int32, batch.num_rows + 1)) for batch in self._batches]
        return np.concatenate([np.zeros(0, np.int64), *parts])

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
    """Writes instances of one dataclass to an Arrow file."""

    def __init__(self, path: Path, kind: type[T]):
        self._adapters = _adapters(kind)
        columns = [(field.name, TOKENS.get(str(field.type), pa.large_string())) for field in fields(kind)]  # type: ignore[arg-type]
        self._schema = pa.schema(columns)
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
        self.num_rows = 0

    def write(self, rows: Sequence[T]) -> None:
        """Add rows as one record batch. They are on disk after `close`."""
        if not rows:
            return
        self.num_rows += len(rows)
        columns = []
        for name, adapter in self._adapters.items():
            values = [getattr(row, name) for row in rows]
            if adapter is not None:
                # As ASCII: a lone surrogate in one of a row's other columns cannot be written as UTF-8.
                values = [json.dumps(adapter.dump_python(value), default=str) for value in values]
            columns.append(_column(values, self._schema.field(name).type))
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()
        self._file.close()


# Arrow's own `pa.array` and `to_numpy` import pandas, which takes longer than a small model's first steps. So columns
# are built from and read as their buffers: null flags (none here), the start of each list or text, then the values.


def _column(values: list, type_: pa.DataType) -> pa.Array:
    """`pa.array(values, type_)` for the types of a table, without nulls."""
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
    return {field.name: None if str(field.type) in TOKENS else TypeAdapter(types[field.name]) for field in fields(kind)}
