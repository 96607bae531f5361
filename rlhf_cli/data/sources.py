"""Rows from files and from the hub, each with the place that it came from."""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rlhf_cli.config.schemas import DataSource
from rlhf_cli.errors import DataError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz")


@dataclass(frozen=True)
class Row:
    """One row's columns and where it stands, for messages: `file:line` or `dataset[split] row n`."""

    values: dict[str, Any]
    where: str


def read_rows(source: DataSource) -> list[Row]:
    """Every row of a source, in order, at most `source.limit`.

    Raises DataError for a file that is missing, empty or can't be read, naming the line.
    """
    rows: list[Row] = []
    for row in _rows(source):
        rows.append(row)
        if source.limit is not None and len(rows) == source.limit:
            break
    if not rows:
        raise DataError(f"{source.path}: no rows, at least one is needed. Is it the right file?")
    return rows


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


def _rows(source: DataSource) -> Iterator[Row]:
    path = Path(source.path)
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES))
        if not files:
            raise DataError(f"{path}: a folder without a data file, one of {', '.join(SUFFIXES)} is needed")
        for file in files:
            yield from _file_rows(file)
    elif path.is_file():
        yield from _file_rows(path)
    elif source.path.endswith(SUFFIXES) or source.path.startswith((".", "/", "~")):
        raise DataError(
            f"{source.path}: no such file (looked from {Path.cwd()}). Give a path that exists or a hub dataset's id"
        )
    else:
        yield from _hub_rows(source)


def _file_rows(path: Path) -> Iterator[Row]:
    name = path.name.removesuffix(".gz")
    try:
        if name.endswith(".parquet"):
            yield from _parquet_rows(path)
            return
        opener = gzip.open if path.name.endswith(".gz") else open
        with opener(path, "rt", encoding="utf-8-sig", newline="" if name.endswith(".csv") else None) as file:
            if name.endswith(".csv"):
                yield from _csv_rows(path, file)
            elif name.endswith(".json"):
                yield from _json_rows(path, file)
            else:
                yield from _jsonl_rows(path, file)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start} of a block. Convert the file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: can't be read ({error})") from None


def _jsonl_rows(path: Path, file: TextIO) -> Iterator[Row]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}:{number}: not JSON ({error}), every line holds one JSON object. Mend or remove the line"
            ) from None
        yield _row(values, f"{path}:{number}")


def _json_rows(path: Path, file: TextIO) -> Iterator[Row]:
    text = file.read()
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            raise DataError(f"{path}: holds several JSON values, as .jsonl files do. Rename it to .jsonl") from None
        raise DataError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, list):
        raise DataError(f"{path}: holds a JSON {type(values).__name__}, a list of objects is needed")
    for number, item in enumerate(values, 1):
        yield _row(item, f"{path} row {number}")


def _csv_rows(path: Path, file: TextIO) -> Iterator[Row]:
    reader = csv.DictReader(file)
    try:
        for number, values in enumerate(reader, 1):
            if None in values or None in values.values():
                raise DataError(f"{path} row {number}: has not as many cells as the header. Mend or remove the row")
            yield Row({str(k): v for k, v in values.items()}, f"{path} row {number}")
    except csv.Error as error:
        raise DataError(f"{path}: not CSV ({error})") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield Row(values, f"{path} row {number}")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not Parquet ({error})") from None


def _hub_rows(source: DataSource) -> Iterator[Row]:
    import datasets

    # `pandas`, `csv` and so on name no dataset but a reader of files of any kind, pickles among them.
    if source.path.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{source.path}"):
        raise DataError(
            f"{source.path}: a reader of `datasets`, no dataset. Give the file or folder itself as the path"
        )
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(
            source.path, source.name, data_dir=source.data_dir, split=source.split, revision=source.revision
        )
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise DataError(
            f"{source.path}: neither a file here nor a hub dataset that can be loaded "
            f"({type(error).__name__}: {reason[0] if reason else 'no reason given'}). "
            "Check the path, or its subset (name) and split"
        ) from None
    for number, values in enumerate(rows, 1):
        yield Row(dict(values), f"{source.path}[{source.split}] row {number}")


def _row(values: Any, where: str) -> Row:
    if not isinstance(values, dict):
        raise DataError(f"{where}: a JSON {type(values).__name__}, every row is an object with named columns")
    return Row(values, where)
