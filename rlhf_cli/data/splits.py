"""The rows that a stage uses: parts of a source, each stage's share, the held-out set, and a source's weight.

Hashes of a row's prompt decide all of these. Rows with equal prompts are always in the same part, in the same share and
on the same side of the split, whatever else the data holds. `Drawn` draws the held-out rows that are measured, by a
hash of the whole row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Generic, TypeVar

from rlhf_cli.config.data import DataSource, Rows
from rlhf_cli.data.encode import Example
from rlhf_cli.data.formats import Purpose
from rlhf_cli.data.paths import find_files
from rlhf_cli.data.records import Record
from rlhf_cli.printing import printable
from rlhf_cli.seeding import derived_seed

SIDES = ("train", "validation", "test")

T = TypeVar("T")

SHARES: dict[Purpose, int] = {"sft": 0, "rm pairs": 1, "rm scores": 1, "ppo": 2}
"""The share of `Rows.split` that each purpose reads."""


def in_part(select: str | None, prompt: str) -> bool:
    """Is a prompt in one of the parts that `DataSource.select` names? "2/10" is the third tenth."""
    if select is None:
        return True
    number = _number(b"", prompt)
    parts = (map(int, part.split("/")) for part in select.split(","))
    return any(number % n == k for k, n in parts)


def in_share(data: Rows, purpose: Purpose, prompt: str) -> bool:
    """Is a prompt in the share of the data that `Rows.split` gives to this purpose?"""
    if data.split is None:
        return True
    number = _number(b"share of a stage\0", prompt) % sum(data.split)
    start = sum(data.split[: SHARES[purpose]])
    return start <= number < start + data.split[SHARES[purpose]]


def is_held_out(data: Rows, prompt: str) -> bool:
    """Does a row of `data.train` belong to the held-out set? Always False if the data names test files."""
    return data.test is None and _fraction(b"held out\0", prompt) < data.test_fraction


def num_copies(weight: float, prompt: str) -> int:
    """How often a row occurs in an epoch: `weight` times. The hash decides about the fractional part."""
    integer, fraction = divmod(weight, 1)
    return int(integer) + (_fraction(b"weight\0", prompt) < fraction)


def _fraction(purpose: bytes, prompt: str) -> float:
    return _number(purpose, prompt) / 2**64


def _number(purpose: bytes, prompt: str) -> int:
    digest = hashlib.sha256(purpose + prompt.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


# ------------------------------------------------------------------------------------- rows that are measured


class Drawn(list[T]):
    """At most `most` of the held-out rows, drawn by a hash of their content and the seed, in the order of the data.

    The first rows of a file may be of one kind, so their figures would not be those of the file. Every figure on
    held-out rows is computed on rows that are drawn here. `str` counts them.

    >>> print(Drawn(["a", "b"], 2, seed=0)), print(Drawn(["a", "b", "c", "d"], 2, seed=0))
    2
    2 of 4
    (None, None)
    """

    def __init__(self, rows: Sequence[T], most: int, seed: int, sources: Sequence[DataSource] = ()):
        """`rows` are examples, or items with the Record that they come from; `sources` are where they come from."""
        self.total = len(rows)
        self.numbers = list(range(self.total))
        """The number of each row among all of them."""
        if self.total > most:
            hashes = [derived_seed(seed, f"held-out rows\0{_content(row)}") for row in rows]
            self.numbers = sorted(sorted(self.numbers, key=hashes.__getitem__)[:most])
        super().__init__(rows[i] for i in self.numbers)
        self.by_source: dict[str, list[int]] = {}
        """The numbers of the rows from each source; empty if there is one source only."""
        if len(sources) > 1:
            names = _source_names(sources)
            for i, item in enumerate(self):
                where = re.sub(r"(:| row )\d+$", "", getattr(item, "row", item).where)  # type: ignore[union-attr]
                self.by_source.setdefault(names.get(where, where), []).append(i)

    def __str__(self) -> str:
        return f"{len(self):,}" if len(self) == self.total else f"{len(self):,} of {self.total:,}"


@dataclass(frozen=True)
class HeldOutRows(Generic[T]):
    """The held-out rows of a stage."""

    validation: Drawn[T]
    """The rows of `data.validation`; empty without it."""
    test: Drawn[T]

    @property
    def watched(self) -> Drawn[T]:
        """The rows that are measured while the stage trains, and by which the best model is chosen."""
        return self.validation or self.test

    def notes(self, key: str, choice: str | None) -> list[str]:
        """Lines about the rows that `key` leaves out, and about test rows by which `choice` also chooses."""
        named = {"validation": self.validation, "test": self.test}
        lines = [
            f"data.{name}: {rows} rows are measured, drawn by a hash of their content and the seed ({key})"
            for name, rows in named.items()
            if len(rows) < rows.total
        ]
        if choice is not None and self.test and not self.validation:
            found = f"{choice} chooses by the test rows that the last figures are measured on"
            advice = "Set data.validation to choose by other rows"
            lines.append(f"{found}, so those of the chosen model are too good. {advice}")
        return lines


def held_out_rows(found: Any, data: Rows, most: int, seed: int) -> HeldOutRows[Any]:
    """The held-out rows of tokenised rows (or of any two sides) that a stage measures, at most `most` of each side."""
    return HeldOutRows(
        Drawn(found.validation, most, seed, data.validation or ()),
        Drawn(found.test, most, seed, data.test or data.train),
    )


def _content(item: Any) -> str:
    """The content of a row, without its place: its prompt, messages and answers, or the tokens of an example."""
    row = getattr(item, "row", item)
    if isinstance(row, Record):
        ranked = row.texts if row.ranked else None
        text, score = (row.response, row.answers[0].score) if row.answers and not row.ranked else (None, None)
        return repr([row.prompt, row.messages, ranked, text, score, None])
    return repr([None, None, None, None, None, row.ids] if isinstance(row, Example) else row)


def _source_names(sources: Sequence[DataSource]) -> dict[str, str]:
    """A short name of the source for what comes before a row's number in `where`: its file, or its hub dataset."""
    short = [PurePosixPath(source.path).name.partition(".")[0] or source.path for source in sources]
    found: dict[str, str] = {}
    for number, (source, name) in enumerate(zip(sources, short, strict=True)):
        unique = name if short.count(name) == 1 else f"{name}.{number}"
        files = [printable(str(file)) for file in find_files(source.path)]
        for where in files or [f"{source.path}[{source.split}]"]:
            found.setdefault(where, unique)
    return found
