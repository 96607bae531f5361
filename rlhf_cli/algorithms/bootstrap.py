"""Confidence intervals by the bootstrap: resample the rows, recompute the statistic, take quantiles."""

from __future__ import annotations

from collections.abc import Callable
from math import erf, pi, sqrt, tan
from statistics import NormalDist

import torch
from torch import Tensor

NUM_RESAMPLES = 2000
CHUNK = 1 << 22
"""Numbers that are resampled at the same time."""


def bootstrap_interval(
    statistic: Callable[..., Tensor],
    *columns: Tensor,
    seed: int,
    level: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
) -> tuple[float, float]:
    """The expanded percentile bootstrap interval of a statistic of n independent rows.

    Rows are drawn with replacement, the same rows of every column, so columns that belong together stay paired. The
    plain percentile interval is too narrow for small n. The quantiles are therefore those of
    ``Phi(-sqrt(n / (n - 1)) * t)`` with t the quantile of Student's distribution with n - 1 degrees of freedom
    (Hesterberg 2015, "What teachers should know about the bootstrap", section 5.3).

    Args:
        statistic: maps resampled columns, [B, n] each, to [B].
        columns: [n] each, n at least 2 for an interval.
        seed: of the resampling. The same seed gives the same interval.
        level: probability that the interval covers the true value, about.
        num_resamples: number of resamples.

    Returns:
        (low, high). With fewer than two rows both are NaN.

    >>> mean = lambda x: x.mean(-1)
    >>> low, high = bootstrap_interval(mean, torch.tensor([0.0, 1.0] * 50), seed=0)
    >>> round(low, 1), round(high, 1)  # 0.5 plus and minus 1.98 * 0.05
    (0.4, 0.6)
    """
    n = len(columns[0])
    if n < 2:
        return float("nan"), float("nan")
    generator = torch.Generator().manual_seed(seed)
    values = []
    for start in range(0, num_resamples, step := max(1, CHUNK // n)):
        size = min(step, num_resamples - start)
        rows = torch.randint(n, (size, n), generator=generator)
        values.append(statistic(*(column[rows] for column in columns)).double())
    tail = _phi(-sqrt(n / (n - 1)) * student_quantile((1 + level) / 2, n - 1))
    low, high = torch.cat(values).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution: exact for 1 and 2 degrees of freedom, else by the Cornish-Fisher
    expansion to the third order.

    At probability 0.975 the error is below 0.001 for 10 degrees of freedom or more, and below 1 % for 3 or more.

    >>> [round(student_quantile(0.975, freedom), 3) for freedom in (1, 2, 10, 1000)]
    [12.706, 4.303, 2.228, 1.962]
    """
    if freedom == 1:
        return tan(pi * (probability - 0.5))
    if freedom == 2:
        share = 2 * probability - 1
        return share * sqrt(2 / (1 - share**2))
    z, v = NormalDist().inv_cdf(probability), float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def _phi(x: float) -> float:
    """The standard normal distribution function."""
    return (1 + erf(x / sqrt(2))) / 2
