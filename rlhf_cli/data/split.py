"""Which rows are trained on and which are held out."""

from __future__ import annotations

from rlhf_cli.config.schemas import Data, DataSource, PromptData
from rlhf_cli.data.formats import row_key
from rlhf_cli.data.sources import Row, hash_fraction, in_part, read_rows
from rlhf_cli.errors import DataError


def selected(source: DataSource) -> list[Row]:
    """The rows of the parts of a source that its `select` names; raises DataError where none is left."""
    rows = [row for row in read_rows(source) if in_part(source.select, row_key(row))]
    if not rows:
        raise DataError(f"{source.path}: no row is left. Widen its `select`")
    return rows


def read_split(data: Data | PromptData) -> tuple[list[Row], list[Row]]:
    """The training rows and the held-out rows.

    `select` keeps the parts of a source that it names. Without `test`, a share of the training rows is held
    out. Both go by hashes of the row's prompt (`row_key`), so rows with equal prompts are on the same side.
    Raises DataError where nothing is left to train on.
    """
    train = [row for row in read_rows(data.train) if in_part(data.train.select, row_key(row))]
    if data.test is not None:
        test = [row for row in read_rows(data.test) if in_part(data.test.select, row_key(row))]
        if not test:
            raise DataError(f"{data.test.path}: no row is left to hold out. Widen its `select`")
    else:
        sides = [hash_fraction(row_key(row)) < data.test_fraction for row in train]
        test = [row for row, held_out in zip(train, sides, strict=True) if held_out]
        train = [row for row, held_out in zip(train, sides, strict=True) if not held_out]
    if not train:
        raise DataError(f"{data.train.path}: no row is left to train on. Widen its `select` or lower test_fraction")
    return train, test
