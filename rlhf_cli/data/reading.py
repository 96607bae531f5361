"""Which rows a stage reads, and on which side each stands: sources, mixtures, shares, the held-out part.

Everything goes by hashes of a row's prompt (`Record.key`), so rows with equal prompts are always on the same side, in
the same stage's share and in the same part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.data.formats import Format, Purpose, read_record, recognise
from rlhf_cli.data.records import Record
from rlhf_cli.data.report import DUPLICATE, Report
from rlhf_cli.data.sources import BadRow, Row, hash_fraction, in_part, read_rows
from rlhf_cli.errors import DataError

SHARES: dict[Purpose, int] = {"sft": 0, "rm pairs": 1, "rm scores": 1, "ppo": 2}
"""Which of `Rows.split`'s shares each purpose reads."""


def records(
    data: Rows,
    purpose: Purpose,
    report: Report,
    *,
    prompt_words: int = 0,
    role: str = "data",
    only: str | None = None,
) -> Iterator[tuple[str, Record]]:
    """Every row of a stage with its side, "train" or "test", or those of one side `only`, as they are read: nothing
    is held.

    A mixture's source of weight 2 gives its training rows twice, one of weight 0.5 the half of them that a hash
    picks. `role` is how messages call the data. Raises DataError for a row that can't be read (unless they are
    skipped), and where nothing is left to train on or to hold out.
    """
    for side, sources in (("train", data.train), ("test", data.test or [])):
        if only is not None and side != only and data.test is not None:
            continue
        seen: set[bytes] = set()
        for source in sources:
            for record in _source_records(source, purpose, data, report, side, prompt_words):
                if not in_part(source.select, record.key) or not _in_share(data, purpose, record.key):
                    continue
                held_out = data.test is None and hash_fraction(record.key) < data.test_fraction
                stands = "test" if held_out else side
                if only is not None and stands != only:
                    continue
                if data.deduplicate:
                    # Equal rows have equal prompts, so they are all on the same side.
                    digest = row_digest(record)
                    if digest in seen:
                        report.skip(stands, DUPLICATE)
                        continue
                    seen.add(digest)
                for _ in range(1 if stands == "test" else _copies(source.weight, record.key)):
                    report.rows[source.path] += 1
                    report.rows[stands] += 1
                    yield stands, record
    paths = ", ".join(source.path for source in data.train)
    if only != "test" and not report.rows["train"]:
        raise DataError(
            f"{role}.train: {paths}: no row is left to train on. Widen its `select`, `split` or `weight`, or lower "
            f"test_fraction{_why(report)}"
        )
    if only != "train" and data.test is not None and not report.rows["test"]:
        paths = ", ".join(source.path for source in data.test)
        raise DataError(
            f"{role}.test: {paths}: no row is left to hold out. Widen its `select` or `split`{_why(report)}"
        )


def first_format(source: DataSource, purpose: Purpose) -> Format:
    """What a source's rows are, by its first row that can be read; raises DataError where that is unclear."""
    for row in read_rows(source):
        if isinstance(row, Row):
            return recognise(row, source, purpose)
    raise DataError(f"{source.path}: no row can be read")


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
            # A first row that nobody recognises says that the file is another one, not that a row is broken.
            if format_ is None and isinstance(row, Row):
                raise
            report.bad_row(data, side, error)
            continue
        yield record


def _in_share(data: Rows, purpose: Purpose, key: str) -> bool:
    if data.split is None:
        return True
    number = int.from_bytes(_hash(b"share of a stage", key), "big") % sum(data.split)
    start = sum(data.split[: SHARES[purpose]])
    return start <= number < start + data.split[SHARES[purpose]]


def _copies(weight: float, key: str) -> int:
    """How often a row stands in an epoch: `weight` times, and the part of a time by a hash of its prompt."""
    whole, part = divmod(weight, 1)
    return int(whole) + (int.from_bytes(_hash(b"weight", key), "big") / 2**64 < part)


def _hash(purpose: bytes, key: str) -> bytes:
    return hashlib.sha256(purpose + b"\0" + key.encode("utf-8", "surrogatepass")).digest()[:8]


def row_digest(record: Record) -> bytes:
    """A hash of a row's prompt, answers and messages: equal rows are duplicates."""
    answers = [record.prompt, *(answer.text for answer in record.answers), *(m.content for m in record.messages)]
    return hashlib.sha256(json.dumps(answers).encode()).digest()[:16]


def _why(report: Report) -> str:
    """What was left out, for a message that nothing is left."""
    reasons = [f"{number} rows: {reason}" for some in report.skipped.values() for reason, number in some.items()]
    return f" ({'; '.join(reasons + report.bad)})" if reasons else ""
