"""Whether stated probabilities come true: reliability, calibration error, Brier score, temperature.

A reward model states a probability for each pair, `sigmoid(score of one answer - score of the other)`. Take the answer
that it prefers: its stated confidence is `sigmoid(|margin|)`, at least 1/2, and it is right if that answer is the
better one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HIGHEST_INVERSE = 1e3
"""Largest inverse temperature that `best_temperature` tries."""


@dataclass(frozen=True)
class Bin:
    """The predictions whose stated probability lies in one interval."""

    low: float
    high: float
    count: int
    confidence: float
    """Mean stated probability; NaN for an empty bin."""
    frequency: float
    """Share of predictions that came true; NaN for an empty bin."""


def reliability(probability: Tensor, outcome: Tensor, *, low: float = 0.0, num_bins: int = 10) -> list[Bin]:
    """Group predictions by stated probability, in bins of equal width from `low` to 1.

    `probability` is [n], `low` to 1: `low` is 1/2 for the confidence in the preferred one of two answers. `outcome` is
    [n], 1 if the prediction came true and 0 if not; a tie may count 1/2.

    Niculescu-Mizil and Caruana 2005, "Predicting good probabilities with supervised learning".

    >>> [(b.count, round(b.confidence, 2), b.frequency) for b in reliability(
    ...     torch.tensor([0.1, 0.9, 0.8, 0.7]), torch.tensor([0.0, 1.0, 1.0, 0.0]), num_bins=2)]
    [(1, 0.1, 0.0), (3, 0.8, 0.6666666666666666)]
    """
    p, y = probability.double(), outcome.double()
    index = ((p - low) / (1 - low) * num_bins).long().clamp(0, num_bins - 1)
    bins = []
    for number in range(num_bins):
        mask = index == number
        edges = (low + (1 - low) * number / num_bins, low + (1 - low) * (number + 1) / num_bins)
        bins.append(Bin(*edges, int(mask.sum()), p[mask].mean().item(), y[mask].mean().item()))
    return bins


def calibration_error(probability: Tensor, outcome: Tensor, *, low: float = 0.0, num_bins: int = 10) -> Tensor:
    """The expected calibration error of [..., n] predictions, [...] float64; arguments as for `reliability`.

    ``sum over bins of count / n * |frequency - confidence|``; 0 for perfect calibration, NaN without predictions.

    Naeini et al. 2015, "Obtaining well calibrated probabilities using Bayesian binning".

    >>> calibration_error(torch.tensor([[0.25, 0.75]]), torch.tensor([[0.0, 0.0]]), num_bins=2)
    tensor([0.5000], dtype=torch.float64)
    """
    p, y = probability.double(), outcome.double()
    index = ((p - low) / (1 - low) * num_bins).long().clamp(0, num_bins - 1)
    sums = torch.zeros(*p.shape[:-1], num_bins, dtype=torch.float64).scatter_add(-1, index, y - p)
    return sums.abs().sum(-1) / p.shape[-1]


def brier_score(probability: Tensor, outcome: Tensor) -> float:
    """Mean squared difference of probability and outcome, both [n]; 0 is best, always 1/2 gives 0.25.

    Brier 1950, "Verification of forecasts expressed in terms of probability".

    >>> brier_score(torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.0]))
    0.125
    """
    return (probability.double() - outcome.double()).square().mean().item()


def best_temperature(margin: Tensor, *, steps: int = 100) -> Tensor:
    """The temperature that makes `sigmoid(margin / temperature)` most likely, given that every margin should be > 0.

    ``argmin over T of mean(log(1 + exp(-margin / T)))``

    The objective is convex in 1 / T. Its minimum is where ``mean(margin * sigmoid(-margin / T)) = 0``, found by
    bisection. Above 1 the model is too sure of itself, below 1 not sure enough.

    `margin` is [..., n], the score of the better answer minus that of the worse one. Each of the `steps` of the
    bisection halves the error of 1 / T. The result is [...] float64: 0 if no margin is negative (no confidence is too
    high), infinity if the model is no better than chance.

    Guo et al. 2017 (arXiv 1706.04599), section 4.2.

    >>> best_temperature(torch.tensor([[2.0, 2.0, 2.0, -2.0], [1.0, 1.0, 1.0, -1.0]]))  # 3 of 4 right: 2 / log(3)
    tensor([1.8205, 0.9102], dtype=torch.float64)
    """
    m = margin.double()

    def slope(inverse: Tensor) -> Tensor:
        return (m * torch.sigmoid(-m * inverse[..., None])).mean(-1)

    low = torch.zeros(m.shape[:-1], dtype=torch.float64)
    high = torch.full_like(low, HIGHEST_INVERSE)
    is_chance = slope(low) <= 0
    for _ in range(steps):
        middle = (low + high) / 2
        rises = slope(middle) > 0
        low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
    temperature = torch.where(m.amin(-1) >= 0, 0.0, 2 / (low + high))
    return torch.where(is_chance, torch.inf, temperature)
