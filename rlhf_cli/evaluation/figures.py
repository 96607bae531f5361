"""Figures of held-out rows with their 95 % intervals, and how they are printed and written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_cli.algorithms.comparison import length_controlled_win_rate
from rlhf_cli.algorithms.statistics import bootstrap_interval, newcombe_interval, wilson_interval
from rlhf_cli.report.figure import Figure, Figures, rows_of_figures
from rlhf_cli.report.progress import Display

MOST_ORDERED = 2000  # rows of which all pairs are resampled


def bootstrapped(statistic: Callable[..., Tensor], *columns: Tensor, seed: int | None) -> Figure:
    """A statistic of [n] columns of independent rows, with its bootstrap interval if there is a seed.

    `statistic` maps [B, n] columns to [B].
    """
    columns = tuple(column.double() for column in columns)
    value, n = statistic(*(column[None] for column in columns)).item(), len(columns[0])
    interval = (math.nan, math.nan) if seed is None else bootstrap_interval(statistic, *columns, seed=seed)
    return Figure(value, *interval, n)


def mean_figure(values: Tensor, *, seed: int | None) -> Figure:
    """The mean of [n] numbers of independent rows, with its bootstrap interval if there is a seed."""
    return bootstrapped(lambda rows: rows.mean(-1), values, seed=seed)


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


def ratio_figure(numerator: Tensor, denominator: Tensor, *, seed: int) -> Figure:
    """``sum(numerator) / sum(denominator)`` over [n] rows: a mean per token, if rows have several tokens."""
    return bootstrapped(lambda a, b: a.sum(-1) / b.sum(-1), numerator, denominator, seed=seed)


def order_figure(statistic: Callable[..., Tensor], x: Tensor, y: Tensor, *, seed: int | None) -> Figure:
    """`kendall` or `pair_accuracy` of [n] rows; of the first MOST_ORDERED of them, and with an interval, if there is a
    seed."""
    if seed is None:
        return Figure(statistic(x, y).item(), rows=len(x))
    x, y = x[:MOST_ORDERED], y[:MOST_ORDERED]

    def resampled(rows: Tensor) -> Tensor:
        return statistic(x, y, torch.zeros(len(rows), len(x)).scatter_add_(1, rows, torch.ones(rows.shape)))

    interval = bootstrap_interval(resampled, torch.arange(len(x)), seed=seed)
    return Figure(statistic(x, y).item(), *interval, len(x))


def equal_length_figure(win: Tensor, length_a: Tensor, length_b: Tensor) -> Figure:
    """The share of rows that A would win at equal length, with its interval (`length_controlled_win_rate`)."""
    return Figure(*length_controlled_win_rate(win, length_a, length_b), len(win))


# ------------------------------------------------------------------------------------- printed and written


class Sentences:
    """Sentences about figures, which are printed, and kept for the file and the report."""

    def __init__(self, display: Display):
        self.display = display
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        """Print a sentence, given without its period, and keep it."""
        sentence = f"{text[0].upper()}{text[1:]}."
        self.display.note(sentence)
        self.texts.append(sentence)


def as_json(figures: Figures) -> dict[str, Any]:
    """Figures as JSON values."""
    return {name: figure.as_json() for name, figure in figures.items()}


def show(display: Display, title: str, columns: dict[str, Figures], *, counts: bool = False) -> None:
    """Print figures as a table (`rows_of_figures`)."""
    display.table(title, ["", *columns, *["rows"] * counts], rows_of_figures(columns, counts=counts))
