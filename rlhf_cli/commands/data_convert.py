"""`rlhf data convert`: rows of any format to our own columns (docs/data.md lists them), as JSON Lines or Parquet.

The input format decides the columns, so that all rows of a file have the same ones. A prompt that is a conversation
stays a list of messages.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from rlhf_cli.commands.data_check import rows_of_source
from rlhf_cli.commands.options import For, Quiet, Source, SourceOptions
from rlhf_cli.commands.output import json_line, new_file, prompt_column
from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.data.encode import Skipped
from rlhf_cli.data.formats import FORMATS, Purpose, read_record, recognise
from rlhf_cli.data.records import Record, Row, batched, shown_name, turns_of
from rlhf_cli.data.row_counts import Report
from rlhf_cli.data.stage_rows import StageRows, seen_rows
from rlhf_cli.errors import ConfigError, DataError
from rlhf_cli.report.progress import Display

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
RANKS = ("ranking", "scored", "ultrafeedback")
"""Formats whose rows may have more than two answers."""
BATCH = 1000
"""Rows of a Parquet file that are written together."""
OURS = ("prompt", "messages", "text", "response", "chosen", "rejected", "answers", "score", "label")


def data_convert(
    path: Source,
    for_: Annotated[For, typer.Option("--for", help="The stage to read for. rm-scores is rm with loss: mse or bce.")],
    out: Annotated[Path, typer.Option("--out", help="The .jsonl, .jsonl.gz or .parquet file to write.")],
    reading: SourceOptions,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", metavar="COLUMN", help="Copy a column unchanged. Repeatable.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Convert rows of any supported format into one file that a stage reads directly."""
    keep = keep or []
    part = rows_of_source(reading.source(path), for_, on_bad_row=reading.on_bad_row)
    source, purpose, lower = part.rows.train[0].path, part.purpose, out.name.lower()
    if not lower.endswith(ENDINGS):
        raise ConfigError(f"--out: {out}: must end in {', '.join(ENDINGS)}")
    if out.is_symlink() or out.exists():
        raise ConfigError(f"--out: {out}: already exists. Remove it, or give another name")
    if name := next((name for name in keep if name in OURS), None):
        raise ConfigError(f"--keep: {name}: is one of the columns that are written: {', '.join(OURS)}")
    display = Display("convert", quiet=quiet)
    report, number = Report(), 0
    first: list[Record] = []

    def rows() -> Iterator[tuple[str, dict[str, Any]]]:
        """(place, row) of each row to write."""
        nonlocal number
        for side, record in seen_rows(part, report):
            report.kept[side] += 1
            for row in written_rows(record, purpose, report.kinds[source]):
                for name in keep:
                    if name not in record.columns:
                        raise ConfigError(f"--keep: {name}: {record.where} lacks this column, every row must have it")
                    row[name] = record.columns[name]
                if not first:
                    _require_same(row, record, purpose, keep)
                    first.append(record)
                number += 1
                yield record.where, row

    with new_file(out) as file:
        if lower.endswith(".parquet"):
            _write_parquet(rows(), file)
        else:
            with gzip.GzipFile("", "wb", 6, file, mtime=0) if lower.endswith(".gz") else nullcontext(file) as lines:
                for _, row in rows():
                    lines.write(json_line(row))
        if not first:
            reasons = "; ".join(report.skipped.get("train", {})) or "none has what the stage needs"
            raise DataError(f"{source}: no row is left to write: {reasons}")
    display.notes(*report.lines(), f"{out}: {number:,} rows")
    # The columns whose values are not written. Rewards may need them.
    kept = {*keep}
    if purpose != "ppo":
        kept |= {*FORMATS[report.kinds[source]].columns, *(["ended"] if _says_ended(first[0]) else [])}
    if lost := [name for name, value in first[0].columns.items() if name not in kept and value != first[0].prompt]:
        more = ", ..." if len(lost) > 20 else ""
        names = ", ".join(shown_name(name) for name in lost[:20])
        display.note(f"columns not copied: {names}{more}. Copy one with --keep NAME")


def _require_same(row: dict[str, Any], seen: Record, purpose: Purpose, keep: Sequence[str]) -> None:
    """Raise ConfigError if a column of `keep` changes how the first row is read."""
    where, source = seen.where, DataSource(path="out.jsonl")
    problem = "the row would be read differently"
    try:
        written = Row(row, where)
        format_ = recognise(written, source, purpose)
        problem = f"the row would be read as {format_.name}, with another meaning"
        again = StageRows(Rows(train=[source]), purpose).view(read_record(written, format_, source), "test")
        if not isinstance(again, Skipped):
            answers = seen.answers[: len(again.answers)]  # of scored answers, one row holds only the first
            if again == replace(again, prompt=seen.prompt, messages=seen.messages, key=seen.key, answers=answers):
                return
    except DataError as error:
        problem = str(error)
    raise ConfigError(f"--keep: {where} with {', '.join(keep)}: {problem}. Remove the column that our formats use")


def written_rows(record: Record, purpose: Purpose, format: str) -> list[dict[str, Any]]:
    """A row of `format` in our own columns; scored answers give one row each.

    A plain text stays a text, which identifies the row. A column `ended` is kept for the answers that are written.
    """
    if format in ("text", "labelled"):
        return [{"text": record.key, **({"label": record.scores[0]} if record.scores else {})}]
    prompt: dict[str, Any] = {"prompt": prompt_column(record)}
    if purpose == "ppo":
        return [prompt]
    answers = [turns_of(row.turns[-1:]) if row.messages else row.response for row in record.each()]
    ended: list[Any] = [answer.ended for answer in record.answers]
    if purpose == "rm pairs":
        own = {"answers": answers} if format in RANKS else {"chosen": answers[0], "rejected": answers[1]}
        rows, ended = [prompt | own], [ended]
    elif purpose == "rm scores":
        pairs = zip(answers, record.scores, strict=True)
        rows = [prompt | {"response": answer, "score": score} for answer, score in pairs]
    elif format == "messages":
        rows = [{"messages": turns_of(record.turns)}]
    else:
        rows = [prompt | {"response": answers[0]}]
    return [row | {"ended": flag} for row, flag in zip(rows, ended, strict=True)] if _says_ended(record) else rows


def _says_ended(record: Record) -> bool:
    """Does a column `ended` say which answers are complete, and nothing else?"""
    ended = record.columns.get("ended")
    return isinstance(ended, bool) or (isinstance(ended, list) and all(isinstance(flag, bool) for flag in ended))


def _write_parquet(rows: Iterable[tuple[str, dict[str, Any]]], file: BinaryIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names: dict[str, None] = {}
    with ExitStack() as writers:
        writer: pq.ParquetWriter | None = None
        for batch in batched(rows, BATCH):
            names = names or dict.fromkeys(name for _, row in batch for name in row)
            for where, row in batch:
                if new := sorted(row.keys() - names):
                    rule = f"the first {BATCH} rows lack, and a Parquet file has the same columns from its start"
                    raise DataError(f"{where}: has the column {new[0]}, which {rule}. Write .jsonl")
            try:
                columns = {name: [row.get(name) for _, row in batch] for name in names}
                table = pa.Table.from_pydict(columns, writer and writer.schema)
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                places, reason = f"{batch[0][0]} to {batch[-1][0]}", " ".join(str(error).split())[:200]
                raise DataError(
                    f"{places}: a Parquet column cannot hold these values ({reason}). Write .jsonl"
                ) from None
            writer = writer or writers.enter_context(pq.ParquetWriter(file, table.schema))
            writer.write_table(table)
