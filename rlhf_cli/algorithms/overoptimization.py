"""How the gold score rises and falls as a policy moves away from where it started (Gao et al. 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import exp, log

import torch
from torch import Tensor

from rlhf_cli.algorithms.statistics import student_quantile

MIN_FREEDOM = 3
"""Points beyond two that an interval needs."""


@dataclass(frozen=True)
class GoldCurve:
    """``gold(d) - gold(0) = d * (a - b * log(d))`` for reinforcement learning, with ``d = sqrt(KL)``."""

    a: float
    b: float
    start: float
    """Gold score at d = 0."""
    error_a: float = math.nan
    error_b: float = math.nan
    """Half of the 95 % interval of a and of b, NaN with fewer than five points."""

    def gold(self, d: float) -> float:
        """The gold score at distance d >= 0."""
        return self.start + (d * (self.a - self.b * log(d)) if d > 0 else 0.0)

    @property
    def peak(self) -> float | None:
        """The distance of the highest gold score, ``exp(a / b - 1)``; None if the curve never falls (b <= 0)."""
        return exp(min(self.a / self.b - 1, 700.0)) if self.b > 0 else None


def fit_gold_curve(distance: Tensor, gold: Tensor, *, start: float) -> GoldCurve:
    """Least squares in a and b; the problem is linear in them. Student's distribution gives their intervals.

    `distance` has [n] square roots of KLs in nats, above 0, two different ones at least; `gold` has the [n] gold scores
    there, and `start` is that of the initial policy.

    Gao et al. 2023 (arXiv 2210.10760), equation 1.

    >>> d = torch.tensor([0.5, 1.0, 2.0])
    >>> curve = fit_gold_curve(d, 1.0 + d * (3.0 - 1.0 * d.log()), start=1.0)
    >>> round(curve.a, 4), round(curve.b, 4), round(curve.peak, 2)
    (3.0, 1.0, 7.39)
    """
    d, y = distance.double(), gold.double() - start
    if len(d) < 2 or bool((d <= 0).any()) or d.min() == d.max():
        raise ValueError("the fit needs two different distances above 0")
    columns = torch.stack([d, -d * d.log()], dim=1)  # [n, 2]
    a, b = (solution := torch.linalg.lstsq(columns, y[:, None]).solution[:, 0]).tolist()
    freedom = len(d) - 2
    if freedom < MIN_FREEDOM:
        return GoldCurve(a, b, start)
    variance = (y - columns @ solution).square().sum() / freedom
    half = student_quantile(0.975, freedom) * (variance * torch.linalg.inv(columns.T @ columns).diagonal()).sqrt()
    return GoldCurve(a, b, start, *half.tolist())
