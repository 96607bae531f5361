"""Counts of the rows of a stage: how many were read, kept and skipped, and why."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from rlhf_cli.config.data import Rows
from rlhf_cli.errors import DataError

MANY_SKIPPED = 0.1
"""Above this share of skipped or otherwise remarkable rows a stage warns."""
ENOUGH = 0.95
"""The advice is the length limit that keeps this share of the rows."""
DUPLICATE = "the same prompt and answers came before"
"""The reason for a row that `data.deduplicate` skips. You asked for it, so it never causes a warning."""


@dataclass
class Report:
    """Counts of rows by side ("train", "validation" or "test")."""

    kinds: dict[str, str] = field(default_factory=dict)
    """The format of each source's rows."""
    rows: Counter[str] = field(default_factory=Counter)
    """Rows read from each source, and under the name of each side those of that side."""
    kept: Counter[str] = field(default_factory=Counter)
    """Items that the stage uses on each side. A row of several scored answers is one item per answer."""
    skipped: dict[str, Counter[str]] = field(default_factory=dict)
    """For each side the number of skipped items by reason."""
    needs: dict[str, Counter[int]] = field(default_factory=dict)
    """For each side the smallest length limit that each item skipped for its length would need."""
    bad: list[str] = field(default_factory=list)
    """The first rows that cannot be read: where and why."""
    special: Counter[str] = field(default_factory=Counter)
    """Rows of each side with a special token in their own text that is encoded as plain text."""
    special_token: str = ""
    """The first such token."""

    def skip(self, side: str, reason: str, needs: int | None = None) -> None:
        """Count a skipped item. `needs` is the smallest length limit that would keep it, if one would."""
        self.skipped.setdefault(side, Counter())[reason] += 1
        if needs is not None:
            self.needs.setdefault(side, Counter())[needs] += 1

    def bad_row(self, data: Rows, side: str, error: DataError) -> None:
        """Count a row that cannot be read. Raises `error` instead if `data.on_bad_row` is error."""
        if data.on_bad_row == "error":
            raise error
        self.skip(side, "can't be read")
        if len(self.bad) < 3:
            self.bad.append(str(error))

    def total(self, side: str) -> int:
        """Items of a side, kept or skipped."""
        return self.kept[side] + sum(self.skipped.get(side, {}).values())

    def skipped_share(self, side: str) -> float:
        """The share of a side's items that were skipped, but for duplicates that you asked to skip."""
        reasons = self.skipped.get(side, Counter())
        return (reasons.total() - reasons[DUPLICATE]) / max(self.total(side), 1)

    def lines(self, role: str = "data") -> list[str]:
        """Lines for the user: the format of each source, and the skipped rows of each side by reason."""
        beside = "" if role == "data" else f" ({role})"
        found = [f"{path}: {self.rows[path]:,} rows of {kind}{beside}" for path, kind in self.kinds.items()]
        for side, reasons in self.skipped.items():
            total = self.total(side)
            found += [f"{role}.{side}: {n:,} of {total:,} rows skipped: {reason}" for reason, n in reasons.items()]
        found += [f"{role}.{side}: {n:,} rows {self._marked()}" for side, n in self.special.items()]
        return [*found, *(f"skipped: {line}" for line in self.bad)]

    def _marked(self) -> str:
        return f"have special tokens in their text ({self.special_token}), which are encoded as plain text"

    def warnings(self, role: str, length_key: str, longest: int | None = None) -> list[str]:
        """A warning for each side of which more than a tenth was skipped, or has special tokens."""
        found = [self.warning(side, f"{role}.{side}", length_key, longest) for side in self.skipped]
        advice = "If the rows are written in a chat template already, set data.special_tokens: keep"
        for side, number in self.special.items():
            if number > MANY_SKIPPED * self.kept[side]:
                found.append(f"{role}.{side}: {number:,} of {self.kept[side]:,} rows {self._marked()}. {advice}")
        return [line for line in found if line is not None]

    def warning(self, side: str, name: str, length_key: str, longest: int | None = None) -> str | None:
        """A warning if a side lost more than a tenth of its rows, with the length limit that keeps 95 %."""
        total, reasons = self.total(side), self.skipped.get(side, Counter())
        skipped = reasons.total() - reasons[DUPLICATE]
        if skipped <= MANY_SKIPPED * total:
            return None
        return (
            f"{name}: {skipped:,} of {total:,} rows ({100 * skipped / total:.0f} %) are skipped, "
            f"{self.kept[side]:,} are used.{self.advice(side, length_key, longest)}"
        )

    def advice(self, side: str, length_key: str, longest: int | None) -> str:
        """The smallest length limit that keeps 95 % of the items but those skipped for other reasons; "" if all fit.

        >>> report = Report(kept=Counter(train=10), needs={"train": Counter({30: 8, 50: 2})})
        >>> report.advice("train", "data.max_length", None)
        ' data.max_length: 50 would keep 95 %'
        """
        needs, kept = self.needs.get(side, Counter()), self.kept[side]
        if not needs:
            return ""
        missing = math.ceil(ENOUGH * (kept + needs.total())) - kept
        length = sorted(needs.elements())[max(missing, 1) - 1]
        text = f" {length_key}: {length} would keep {100 * ENOUGH:.0f} %"
        if longest is not None and length > longest:
            text += f", but the model takes at most {longest} tokens: shorten the rows, or cut them (data.truncation)"
        return text

    def nothing_left(self, role: str, side: str, length_key: str, longest: int | None) -> DataError:
        """The error for a side whose rows were all skipped."""
        reasons = [f"{n:,} {reason}" for reason, n in self.skipped.get(side, {}).items()]
        because = "; ".join(reasons + self.bad) or "no row fits the stage"
        found = f"none of {self.rows[side]:,} rows can be used: {because}"
        return DataError(f"{role}.{side}: {found}.{self.advice(side, length_key, longest)}")
