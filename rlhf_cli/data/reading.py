"""The rows of a stage, each for training or held out: sources are read, mixed, split and deduplicated.

`rlhf_cli.data.splits` decides by the prompt (`Record.key`) which rows a stage uses, and how often.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.data.formats import Format, Purpose, read_record, recognise
from rlhf_cli.data.records import Record
from rlhf_cli.data.row_counts import DUPLICATE, Report
from rlhf_cli.data.row_sources import read_rows
from rlhf_cli.data.rows import BadRow, Row
from rlhf_cli.data.splits import in_part, in_share, is_held_out, num_copies
from rlhf_cli.errors import DataError


def records(
    data: Rows,
    purpose: Purpose,
    report: Report,
    *,
    prompt_words: int = 0,
    role: str = "data",
    only: str | None = None,
) -> Iterator[tuple[str, Record]]:
    """The rows of a stage with their side, "train", "validation" or "test", one by one as they are read.

    `only` limits them to one side. In a mixture, a source of weight 2 gives each training row twice, and one of
    weight 0.5 half of its rows, chosen by a hash. `role` names the data in messages. Raises DataError for a row that
    cannot be read, unless such rows are skipped, and if no row is left to train on or to hold out.
    """
    by_side = {"train": data.train, "validation": data.validation or [], "test": data.test or []}
    for source_side, sources in by_side.items():
        splits = source_side == "train" and data.test is None  # training rows may be held out
        if only not in (None, source_side) and not (splits and only == "test"):
            continue
        seen: set[bytes] = set()
        for source in sources:
            for record in _source_records(source, purpose, data, report, source_side, prompt_words):
                if not in_part(source.select, record.key) or not in_share(data, purpose, record.key):
                    continue
                side = "test" if splits and is_held_out(data, record.key) else source_side
                if only is not None and side != only:
                    continue
                if data.deduplicate:
                    # Equal rows have equal prompts, so they are on the same side.
                    digest = row_digest(record)
                    if digest in seen:
                        report.skip(side, DUPLICATE)
                        continue
                    seen.add(digest)
                for _ in range(1 if side != "train" else num_copies(source.weight, record.key)):
                    report.rows[source.path] += 1
                    report.rows[side] += 1
                    yield side, record
    _require_rows(data, report, role, only)


def _require_rows(data: Rows, report: Report, role: str, only: str | None) -> None:
    """Raise DataError if a side that was read has no rows."""
    if only in (None, "train") and not report.rows["train"]:
        paths = ", ".join(source.path for source in data.train)
        raise DataError(
            f"{role}.train: {paths}: no row is left to train on. Widen `select`, `split` or `weight`, or lower "
            f"test_fraction{_reasons(report)}"
        )
    for side, sources in (("validation", data.validation), ("test", data.test)):
        if only in (None, side) and sources is not None and not report.rows[side]:
            paths = ", ".join(source.path for source in sources)
            raise DataError(
                f"{role}.{side}: {paths}: no row is left to hold out. Widen `select` or `split`{_reasons(report)}"
            )


def first_format(source: DataSource, purpose: Purpose) -> Format:
    """The format of a source, from its first readable row; raises DataError if no format fits."""
    for row in read_rows(source):
        if isinstance(row, Row):
            return recognise(row, source, purpose)
    raise DataError(f"{source.path}: none of its rows can be read")


def _source_records(
    source: DataSource, purpose: Purpose, data: Rows, report: Report, side: str, prompt_words: int
) -> Iterator[Record]:
    format_: Format | None = None
    for row in read_rows(source):
        try:
            if isinstance(row, BadRow):
                raise DataError(f"{row.where}: {row.reason}")
            if format_ is None:
                format_ = recognise(row, source, purpose)
                report.kinds[source.path] = format_.name
            record = read_record(row, format_, source, prompt_words=prompt_words)
        except DataError as error:
            # If no format fits the first row, the file is the wrong one; skipping would drop every row.
            if format_ is None and isinstance(row, Row):
                raise
            report.bad_row(data, side, error)
            continue
        yield record


def row_digest(record: Record) -> bytes:
    """A hash of a row's prompt, answers and messages: equal rows are duplicates."""
    answers = [record.prompt, *(answer.text for answer in record.answers), *(m.content for m in record.messages)]
    return hashlib.sha256(json.dumps(answers).encode()).digest()[:16]


def _reasons(report: Report) -> str:
    """Why rows were skipped, to end a message that none is left."""
    reasons = [f"{number} rows: {reason}" for some in report.skipped.values() for reason, number in some.items()]
    return f" ({'; '.join(reasons + report.bad)})" if reasons else ""
