"""A figure with its 95 % interval and the number of independent rows that it was computed from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_cli.algorithms.bootstrap import bootstrap_interval, mean_interval
from rlhf_cli.algorithms.comparison import length_controlled_interval, length_controlled_win_rate
from rlhf_cli.algorithms.statistics import newcombe_interval, wilson_interval


@dataclass(frozen=True)
class Figure:
    """A number, its 95 % interval (NaN without one) and the number of independent rows."""

    value: float
    low: float = math.nan
    high: float = math.nan
    rows: int | None = None

    def __str__(self) -> str:
        """The value and its interval.

        >>> str(Figure(0.925, 0.901, 0.944)), str(Figure(-1.2, -1.31, -1.11)), str(Figure(3.0))
        ('0.93 [0.90, 0.94]', '-1.20 [-1.31, -1.11]', '3')
        """
        return self.text(self.digits)

    @property
    def digits(self) -> int | None:
        """Digits after the point that the interval justifies; None without an interval."""
        if math.isnan(self.low):
            return None
        width = self.high - self.low
        return 3 if 0 < width < 0.02 else 2 if width < 20 else 0

    def text(self, digits: int | None) -> str:
        """The value and its interval with these digits after the point; with None, four significant digits.

        >>> Figure(-0.001, -0.004, 0.002).text(2)  # not -0.00
        '0.00 [0.00, 0.00]'
        """
        if digits is None:
            return f"{self.value:.4g}"
        if math.isnan(self.low):
            return f"{self.value:z.{digits}f}"
        return f"{self.value:z.{digits}f} [{self.low:z.{digits}f}, {self.high:z.{digits}f}]"

    def __format__(self, spec: str) -> str:
        """The figure as `str` gives it, or in percent if `spec` is "%".

        >>> f"{Figure(0.936, 0.921, 0.951):%}", f"{Figure(0.5):%}"
        ('94 % [92, 95]', '50 %')
        """
        if spec != "%":
            return format(str(self), spec)
        value = f"{100 * self.value:z.0f} %"
        return value if math.isnan(self.low) else f"{value} [{100 * self.low:z.0f}, {100 * self.high:z.0f}]"

    def as_json(self) -> dict[str, float | int]:
        """The figure as JSON values. A number that is not finite is left out: JSON has none."""
        values = {"value": self.value, "low": self.low, "high": self.high, "rows": self.rows}
        return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


Figures = dict[str, Figure]
"""Figures by name, in the order in which they are shown."""


def mean_figure(values: Tensor, *, seed: int) -> Figure:
    """The mean of [n] numbers of independent rows, with its bootstrap interval."""
    return Figure(values.double().mean().item(), *mean_interval(values, seed=seed), len(values))


def share_figure(successes: Tensor) -> Figure:
    """The share of successes, with its Wilson interval. `successes` is [n], 0 or 1, or 1/2 for a tie."""
    total = successes.double().sum().item()
    return Figure(total / len(successes), *wilson_interval(total, len(successes)), len(successes))


def rate_figure(values: Tensor, *, seed: int) -> Figure:
    """The mean of [n] numbers: with Wilson's interval if all are 0 or 1, else with the bootstrap's."""
    return share_figure(values) if _is_binary(values) else mean_figure(values, seed=seed)


def difference_figure(after: Tensor, before: Tensor, *, seed: int) -> Figure:
    """The mean difference of [n] pairs: with Newcombe's interval if all numbers are 0 or 1, else the bootstrap's."""
    if _is_binary(after) and _is_binary(before):
        value = (after.double() - before.double()).mean().item()
        return Figure(value, *newcombe_interval(after, before), len(after))
    return mean_figure(after - before, seed=seed)


def _is_binary(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def equal_length_figure(win: Tensor, length_a: Tensor, length_b: Tensor) -> Figure:
    """The share of rows that A would win at equal length, with its interval (`length_controlled_win_rate`)."""
    rate = length_controlled_win_rate(win, length_a, length_b)
    return Figure(rate, *length_controlled_interval(win, length_a, length_b), len(win))


def ratio_figure(numerator: Tensor, denominator: Tensor, *, seed: int) -> Figure:
    """``sum(numerator) / sum(denominator)`` over [n] rows: a mean per token, if rows have several tokens."""
    top, bottom = numerator.double(), denominator.double()
    interval = bootstrap_interval(lambda a, b: a.sum(-1) / b.sum(-1), top, bottom, seed=seed)
    return Figure((top.sum() / bottom.sum()).item(), *interval, len(top))


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """The Pearson correlations of [..., n] pairs, [...]; 0 where a or b is constant."""
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    scale = (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    return torch.where(scale > 0, (a * b).sum(-1) / scale, 0.0)


def correlation_figure(x: Tensor, y: Tensor, *, seed: int) -> Figure:
    """The Pearson correlation of [n] pairs, with its bootstrap interval; 0 if x or y is constant."""
    x, y = x.double(), y.double()
    return Figure(correlation(x, y).item(), *bootstrap_interval(correlation, x, y, seed=seed), len(x))
