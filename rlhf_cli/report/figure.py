"""A figure of `rlhf eval` with its 95 % interval, and how tables write it. Does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = {
    "kl": "KL to SFT, nats",
    "eos_rate": "EOS rate",
    "distinct_1": "distinct words",
    "distinct_2": "distinct word pairs",
    "length": "length, tokens",
    "brier": "Brier score",
    "gold_accuracy": "agreement with the gold scores",
    "longer_wins": "baseline: longer is better",
    "shorter_wins": "baseline: shorter is better",
    "score_length_correlation": "correlation of score and length",
    "length_controlled": "accuracy at equal length",
    "accuracy_longer_is_worse": "accuracy where the longer is worse",
    "accuracy_longer_is_better": "accuracy where the longer is better",
}
METRICS = {"longer_wins": "length_baseline", "shorter_wins": "shorter_baseline"}
"""Figures that the metrics of the RM stage call by another name."""


@dataclass(frozen=True)
class Figure:
    """A number, its 95 % interval (NaN without one) and the number of independent rows that it was computed from."""

    value: float
    low: float = math.nan
    high: float = math.nan
    rows: int | None = None

    @staticmethod
    def of(found: Mapping[str, Any]) -> Figure:
        """The figure of `as_json`. An end of the interval that is left out is infinite if the other one is there.

        >>> str(Figure.of({"value": 7.25, "low": 1.5})), str(Figure.of({"value": 3.0})), str(Figure.of({"rows": 2}))
        ('7.25 [1.5, inf]', '3', 'none')
        """
        low, high = (-math.inf, math.inf) if {"low", "high"} & found.keys() else (math.nan, math.nan)
        return Figure(found.get("value", math.nan), found.get("low", low), found.get("high", high), found.get("rows"))

    def as_json(self) -> dict[str, float | int]:
        """The figure as JSON values. A number that is not finite is left out: JSON has none."""
        values = {"value": self.value, "low": self.low, "high": self.high, "rows": self.rows}
        return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}

    @property
    def digits(self) -> int | None:
        """Digits after the point that the interval justifies; None without an interval or with an infinite one."""
        width = self.high - self.low
        if not math.isfinite(width):
            return None
        return 3 if 0 < width < 0.02 else 2 if width < 20 else 0

    def text(self, digits: int | None) -> str:
        """The value and its interval with these digits after the point; with None, four significant digits.

        >>> Figure(-0.001, -0.004, 0.002).text(2)  # not -0.00
        '0.00 [0.00, 0.00]'
        """

        def of(number: float) -> str:
            return f"{number:.4g}" if digits is None else f"{number:z.{digits}f}"

        if math.isnan(self.value):
            return "none"
        return of(self.value) if math.isnan(self.low) else f"{of(self.value)} [{of(self.low)}, {of(self.high)}]"

    def __str__(self) -> str:
        """The value and its interval, with the digits that it justifies.

        >>> str(Figure(0.925, 0.901, 0.944)), str(Figure(-1.2, -1.31, -1.11)), str(Figure(3.0))
        ('0.93 [0.90, 0.94]', '-1.20 [-1.31, -1.11]', '3')
        """
        return self.text(self.digits)

    def __format__(self, spec: str) -> str:
        """The figure as `str` gives it, or in percent if `spec` is "%".

        >>> f"{Figure(0.936, 0.921, 0.951):%}", f"{Figure(0.5):%}"
        ('94 % [92, 95]', '50 %')
        """
        if spec != "%":
            return format(str(self), spec)
        value = f"{100 * self.value:z.0f} %"
        return value if math.isnan(self.low) else f"{value} [{100 * self.low:z.0f}, {100 * self.high:z.0f}]"


Figures = dict[str, Figure]  # figures by name, in the order in which they are shown


def figures_of(found: Mapping[str, Any]) -> Figures:
    """The figures of a part of `rlhf eval`'s file."""
    return {name: Figure.of(figure) for name, figure in found.items()}


def as_metrics(figures: Figures) -> dict[str, float]:
    """The figures of a reward model under the names of its metrics; the main one with its interval and its rows.

    >>> as_metrics({"accuracy": Figure(0.5, 0.4, 0.6, 90), "longer_wins": Figure(0.3)})
    {'eval/accuracy': 0.5, 'eval/accuracy_low95': 0.4, 'eval/accuracy_high95': 0.6, 'eval/num_rows': 90, \
'eval/length_baseline': 0.3}
    """
    found: dict[str, float] = {}
    for name, figure in figures.items():
        key = f"eval/{METRICS.get(name, name)}"
        found[key] = figure.value
        if name in ("accuracy", "mse"):
            if math.isfinite(figure.low):
                found |= {f"{key}_low95": figure.low, f"{key}_high95": figure.high}
            found["eval/num_rows"] = figure.rows or 0
    return found


def rows_of_figures(columns: Mapping[str, Figures], *, counts: bool = False) -> list[list[str]]:
    """The rows of a table with a row per name and a column per side, which is empty where the side lacks the figure.

    A row has as many digits as its narrowest interval justifies. With `counts` the names are those of groups of rows,
    and the last column has the number of rows.
    """
    lines = []
    for name in dict.fromkeys(name for figures in columns.values() for name in figures):
        row = [figures.get(name) for figures in columns.values()]
        known = [figure for figure in row if figure is not None]
        digits = max((figure.digits for figure in known if figure.digits is not None), default=None)
        cells = ["" if figure is None else figure.text(digits) for figure in row]
        lines.append([name, *cells, f"{known[0].rows or 0:,}"] if counts else [readable(name), *cells])
    return lines


def readable(name: str) -> str:
    """The name of a figure in words. Behind a / it is the name that you gave to a probe or a reward.

    >>> readable("score_p10"), readable("eos_rate"), readable("gold_equal_length"), readable("reward/my_judge")
    ('score, 10th percentile', 'EOS rate', 'gold, equal length', 'reward/my_judge')
    """
    if "/" in name:
        return name
    if match := re.fullmatch(r"(.*)_(?:p(\d+)|equal_length)", name):
        return f"{match[1]}, {match[2]}th percentile" if match[2] else f"{match[1]}, equal length"
    return NAMES.get(name, name.replace("_", " "))
